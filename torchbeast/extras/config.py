"""--config: flags from a file of TOML, or from the meta.json of a run to repeat it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import START, Flag, Group, flag
from torchbeast.runs.flagset import from_file

# Flags of a meta.json that name a place, and not what the run does.
OF_ITS_RUN = {
    *("mode", "savedir", "xpid", "config", "video", "checkpoint"),
    *("pipes_basename", "listen", "bind", "join", "server_addresses", "ray_address"),
}
# Only the command line says whether a file is trusted.
NEVER_IN_A_FILE = ("config", "trust_checkpoint_env")


# fmt: off
class Flags(Group):
    config: str | None = flag(None, "flags: .toml or meta.json", START, metavar="FILE")
# fmt: on


def more_flags(declared: Mapping[str, Flag], typed: Mapping[str, Any]) -> Any:
    """The flags of the file. Raises FlagError, and UntrustedError, see trust.py."""
    if "config" not in typed:
        return {}
    file, path = f"--config {typed['config']}", Path(typed["config"]).expanduser()
    names = declared.keys() - NEVER_IN_A_FILE
    with using(file):
        text = path.read_text("utf-8")
        if path.suffix == ".json":  # of a run, maybe of another variant
            found = json.loads(text)
            found["flags"] = found["args"]
            names -= OF_ITS_RUN.union(found.get("flags_left_open", ()))
        else:
            import tomllib  # from Python 3.11 on

            found = {"flags": tomllib.loads(text)}
            if unknown := sorted(found["flags"].keys() - names):
                raise FlagError(f"{file}: there is no flag {unknown[0]}")
        return from_file(declared, found, file, names, typed)
