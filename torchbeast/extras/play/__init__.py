"""--mode test and test_render: plays games with a checkpoint, and writes test.json."""

import contextlib
import logging
import os
import statistics
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchbeast.base import parts
from torchbeast.base.flag import FREE, START, Group, Range, flag

log = logging.getLogger(__name__)

GAMES = Range(1, 10**6, "at least 1 and at most 1,000,000")


# fmt: off
class Flags(Group):
    title = "test"
    num_test_episodes: int = flag(10, "games to play", GAMES, START)
    checkpoint: str = flag("model.tar", "of the run, such as model.best.tar", START)
    greedy: bool = flag(False, "take the most likely action, also in evaluations", FREE)
# fmt: on


def attach(run: Any) -> Any:
    # All parts have accepted the run when it calls `about`.
    return types.SimpleNamespace(about=lambda: link_latest(run.folder))


def link_latest(folder: Path) -> dict[str, Any]:
    """Lets savedir/latest name the newest run, which a test without --xpid plays."""
    # A unique name, because several runs may start at the same time.
    link = folder.with_name(f".latest.{os.getpid()}")
    with contextlib.suppress(OSError):  # some file systems have no links
        link.symlink_to(folder.name, target_is_directory=True)
        link.replace(folder.with_name("latest"))
    return {}


def test(typed: Any, find_player: Callable[[Any], Any]) -> None:
    """Tests the checkpoint of --xpid, with the flags saved in it; writes test.json.

    find_player returns what plays the games; None: this machine plays them.
    """
    from torchbeast.extras.play import games
    from torchbeast.runs import checkpoint, files, flagset, start

    flags = flagset.merge(typed)
    # Another run may move "latest" during the games.
    path = Path(os.path.expanduser(flags.savedir), flags.xpid or "latest").resolve()
    path /= flags.checkpoint
    saved = checkpoint.load(path)
    flags = flagset.merge(typed, saved, str(path))
    if flags.suppress_logs:
        start.print_warnings_only()
    play = find_player(flags) or games.play_in_processes
    flags = flagset.resolve(flags).freeze()
    weights, numbers = saved["model_state_dict"], range(flags.num_test_episodes)
    ended: list[games.Game] = []
    with contextlib.closing(play(flags, weights, numbers)) as playing:
        for game in playing:
            ended.append(game)
            log.info("Game %d: return %.2f after %d steps", *game[:3])
    _, returns, lengths, of_agents = zip(*sorted(ended), strict=True)  # by number
    code = parts.optional("code")
    result = {
        "xpid": path.parent.name,
        "checkpoint": path.name,
        "step": saved.get("stats", {}).get("step"),
        "num_games": len(ended),
        "policy": "greedy" if flags.greedy else "sampled",
        "mean": statistics.fmean(returns),
        "std": statistics.stdev(returns) if len(returns) > 1 else 0.0,
        "returns": returns,
        "lengths": lengths,
        **({"returns_of_agents": of_agents} if any(of_agents) else {}),
        "seed": flags.seed,
        "flags": flags.as_dict(),
        "date": files.now(),
        **(code.provenance() if code else {}),
    }
    text = "%(num_games)d games: mean return %(mean).2f, standard deviation %(std).2f"
    log.info(text, result)
    for k, each in enumerate(zip(*of_agents, strict=True)):
        if known := [x for x in each if x is not None]:
            log.info("Agent %d: mean return %.2f", k, statistics.fmean(known))
    parts.call("tested", flags, path.parent, result["step"])
    if games.draws(flags):
        return
    path = path.with_name(path.name.replace("model", "test", 1)).with_suffix(".json")
    try:
        files.write_json(path, result)
        log.info("Wrote %s", path)
    except OSError as error:  # for example, somebody else's run
        log.warning("Can't write %s: %s. The result is only in this log.", path, error)
