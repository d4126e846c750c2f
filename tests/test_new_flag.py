"""A flag that a fork adds is one line in torchbeast/flags.py, and nothing else."""

import shutil
import subprocess
import sys

import runs

AFTER = "    entropy_cost: float = flag("
NEW = '    curiosity_cost: float = flag(0.5, "its weight", AT_LEAST_0, TUNE)\n'
CHECK = """
import pytest
from torchbeast import monobeast
from torchbeast.base.errors import FlagError
from torchbeast.runs import flagset

parser = monobeast.make_parser()

def parse(*words, saved=None):
    return flagset.merge(flagset.read(parser, words), saved and {"flags": saved})

assert "--curiosity_cost CURIOSITY_COST" in parser.format_help()
assert "its weight (default: 0.5)" in parser.format_help()
assert parse().curiosity_cost == 0.5
assert parse("--preset=minatar").curiosity_cost == 0.5
flags = flagset.resolve(parse("--curiosity_cost=2")).freeze()
assert flags.curiosity_cost == 2.0
with pytest.raises(FlagError, match="--curiosity_cost must be at least 0"):
    flagset.resolve(parse("--curiosity_cost=-1"))
with pytest.raises(SystemExit):
    parse("--curiosity_cost=a")
saved = flags.as_dict()
assert saved["curiosity_cost"] == 2.0
assert parse(saved=saved).curiosity_cost == 2.0
assert parse("--curiosity_cost=3", saved=saved).curiosity_cost == 3.0
assert parse(saved={"seed": 3}).curiosity_cost == 0.5  # from before the flag existed
with pytest.raises(FlagError, match="flag curiosity_cost is 'x'"):
    parse(saved={"curiosity_cost": "x"})
assert "curiosity_cost" not in flagset.FREE_TO_CHANGE
assert "curiosity_cost" in flagset.FREE_TO_CHANGE_IN_SYNC
"""


def test_a_new_flag_is_one_line(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(runs.ROOT / "torchbeast", tmp_path / "torchbeast", ignore=ignored)
    path = tmp_path / "torchbeast" / "flags.py"
    text = path.read_text()
    assert AFTER in text
    path.write_text(text.replace(AFTER, NEW + AFTER))
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path,
        env={**runs.environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
