"""docs/cluster.md names flags and files that exist."""

import re
import shlex

import runs

from torchbeast import monobeast
from torchbeast.polybeast import (
    env as polybeast_env,
)
from torchbeast.polybeast import (
    learner as polybeast_learner,
)
from torchbeast.polybeast import (
    start as polybeast,
)
from torchbeast.runs import flagset

PARSERS = {
    "torchbeast.monobeast": monobeast,
    "torchbeast.polybeast": polybeast,
    "torchbeast.polybeast_learner": polybeast_learner,
    "torchbeast.polybeast_env": polybeast_env,
}


def test_the_pages_commands_have_flags_that_exist():
    text = (runs.ROOT / "docs" / "cluster.md").read_text()
    names = "|".join(map(re.escape, PARSERS))
    commands = re.findall(rf"`[^`\n]*-m ((?:{names}) [^`]*)`", text)
    assert len(commands) >= 5
    for command in commands:
        module, *arguments = shlex.split(command)
        flagset.parse(PARSERS[module].make_parser(), arguments)
    for name in re.findall(r"examples/cluster/[\w.]+", text):
        assert (runs.ROOT / name).exists(), name
