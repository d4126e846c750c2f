"""What the scripts of the peers share: flags, a log of updates, versions, game names.

These scripts run in the peer's own Python, which has no torchbeast.
"""

import argparse
import csv
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterable
from pathlib import Path


class RunLog:
    """Makes savedir/xpid with logs.csv and meta.json, as far as benchmarks read them.

    Args:
      cases: the cases that the script has, one of them is its argument.
      packages: those whose versions go to meta.json.
    """

    def __init__(self, doc: str | None, cases: Iterable[str], packages: str) -> None:
        parser = argparse.ArgumentParser(description=doc)
        parser.add_argument("case", choices=list(cases))
        parser.add_argument("--savedir", type=Path, required=True)
        parser.add_argument("--xpid", required=True)
        args = parser.parse_args()
        self.case: str = args.case
        self.folder: Path = args.savedir / args.xpid
        self.folder.mkdir(parents=True)
        versions = {"python": platform.python_version()}
        for name in packages.split():
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # a clone, for example
                versions[name] = "unknown"
        text = json.dumps({"versions": versions}, indent=2)
        (self.folder / "meta.json").write_text(text)
        self._file = (self.folder / "logs.csv").open("w", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(("_time", "step", "total_loss"))

    def write(self, steps: int) -> None:
        """After an update: the environment steps learned from so far, each once."""
        self._rows.writerow((time.time(), steps, "nan"))  # a loss marks an update
        self._file.flush()


def register_atari() -> None:
    """Gymnasium before 1.0 does not find the games by itself."""
    import ale_py
    import gymnasium

    if "PongNoFrameskip-v4" not in gymnasium.registry:
        ale_py.registration.register_v0_v4_envs()
