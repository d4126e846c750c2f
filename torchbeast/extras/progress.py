"""--help; the state of a run, as a live line or every 5 s in the log; how to go on."""

import argparse
import difflib
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchbeast.base.flag import FlagParser
from torchbeast.base.nested import with_places
from torchbeast.envs.values import parts_of
from torchbeast.flags import Run

log = logging.getLogger(__name__)

STATUS_SECONDS = 5.0  # between two status lines, if there is no terminal
EMPTY_BATCHES = 10  # in a row from which nothing was learned: the first warning
# --help shows these flags, and --help all every one.
FIRST = "help env preset xpid savedir total_steps seed mode num_actors num_servers"
ADDRESSES = "server_addresses listen bind join"  # unless both sides are here
EXAMPLES = """examples:
  # Train CartPole; resume the run, for longer; play games with its weights.
  {0} --preset classic-control --xpid first
  {0} --xpid first --total_steps 1000000
  {0} --mode test --xpid first
"""


def script() -> str | None:
    """The module of this package that runs, such as torchbeast.monobeast."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return name if name.startswith("torchbeast.") else None


def command_line(parser: FlagParser, words: Sequence[str]) -> None:
    """Shortens --help, and names the flag that a mistyped one resembles."""
    flags, options = parser.declared, parser._option_string_actions
    parser.prog = f"python -m {script()}" if script() else parser.prog
    parser.usage = "%(prog)s [--help [all]] [--FLAG VALUE ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES.format(parser.prog) if "mode" in flags else None
    shown = FIRST if {"listen", "bind"} <= flags.keys() else f"{FIRST} {ADDRESSES}"
    for action in [] if "all" in words else options.values():
        if action.dest not in shown.split():
            action.help = argparse.SUPPRESS
    options["--help"].help = f"--help all shows all {len(flags)} flags"
    for name in [word.partition("=")[0] for word in words if word[:2] == "--"]:
        if not any(option.startswith(name) for option in options):
            near = difflib.get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]}?" if near else "--help all shows all"
            parser.error(f"there is no flag {name}: {hint}")


def attach(run: Any) -> "Progress":
    log_encoders(run.learner.model, run.flags.model, run.flags.encoder)
    return Progress(run)


def log_encoders(model: Any, torso: str, encoder: str | None = None) -> None:
    """Logs which encoder each observation gets, and the number of weights."""
    is_image = getattr(model, "is_image", [])  # of another model: only the weights
    leaves = with_places(parts_of(model.observation_space), "observation")
    parts = [
        f"{place}: {getattr(leaf, 'shape', None) or leaf} → {torso if image else 'MLP'}"
        for (place, leaf), image in zip(leaves, is_image, strict=False)
    ]
    count = f"{sum(x.numel() for x in model.parameters()):,} weights"
    log.info("The model: %s.", "; ".join(filter(None, [*parts, encoder, count])))


class Progress:
    def __init__(self, run: Any) -> None:
        self.run, self.flags, self.learner = run, run.flags, run.learner
        self.last = time.monotonic()
        self.bar: Any = None
        self.lag = 0.0  # of the last batch
        self.empty, self.most_empty = 0, EMPTY_BATCHES

    def poll(self) -> None:
        """Begins the live line: only now is out.log open."""
        if not self.bar and sys.stderr and sys.stderr.isatty():
            self.bar = self.begin_line()

    def begin_line(self) -> Any:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        # The bar stays empty: the description has all.
        bar = tqdm(total=1, bar_format="{desc}{bar}", dynamic_ncols=True)
        # Its end gives the log its handlers of now: out.log is closed after the stack.
        self.run.stack.callback(bar.close)
        level = logging.root.handlers[0].level  # see print_warnings_only
        self.run.stack.enter_context(logging_redirect_tqdm())  # keeps the line whole
        logging.root.handlers[-1].setLevel(level)
        return bar

    def row(self, row: dict[str, Any]) -> None:
        """Warns if no step of 10 batches in a row counts, then of 100, and so on."""
        self.lag = row.get("policy_lag", self.lag)
        means = [row.get(name, 0) for name in ("ess", "mean_value")]
        self.empty = self.empty + 1 if None in means else 0
        if self.empty == self.most_empty:
            self.most_empty *= 10
            hint = ", see --max_policy_lag" if row.get("frac_too_old") else ""
            log.warning("%d batches without a step that counts%s.", self.empty, hint)

    def show(self, queued: int, acted: int, streams: str | None = None) -> None:
        """Shows the state of the run, at most 5 times per second."""
        interval = 0.2 if self.bar else STATUS_SECONDS
        if time.monotonic() - self.last < interval:
            return
        self.last = time.monotonic()
        step, total = self.learner.step, self.flags.total_steps
        counters = self.learner.counters
        if (sps := counters.sps()) is None:
            numbers, rest = {"actors' steps": f"{acted:,}"}, "waiting for an update"
        else:
            mean = counters.mean_return(self.flags.episodes_for_avg)
            numbers = {
                "SPS": f"{sps:,.0f}",
                "return": "-" if mean is None else f"{mean:.2f}",
                "games": str(counters.games),
                "lag": f"{self.lag:.1f}",
                "queued": str(queued),
            }
            numbers |= {"streams": streams} if streams else {}
            minutes, seconds = divmod(int(max(0, total - step) / sps), 60)
            rest = f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"
        if self.bar:  # nothing raises if the terminal has closed
            hidden = {"games", "queued" if streams else ""}  # to fit 80 columns
            shown = [f"{k} {v}" for k, v in numbers.items() if k not in hidden]
            share = f"{step / total:.0%} of {self.bar.format_sizeof(total)}"
            self.bar.set_description_str(", ".join([share, rest, *shown]))
            return
        parts = [*(f"{k} {v}" for k, v in numbers.items()), rest]
        log.info("Step %s of %s, %s", f"{step:,}", f"{total:,}", ", ".join(parts))

    def close(self, status: int) -> None:
        """Prints the next commands, unless an error has ended the run."""
        flags, savedir = self.flags, Run.declared()["savedir"].default
        on_path = shutil.which("python") == sys.executable
        python = "python" if on_path else sys.executable
        run = shlex.quote(flags.xpid)
        if Path(flags.savedir) != Path(savedir).expanduser():
            run += f" --savedir {shlex.quote(flags.savedir)}"
        text = f"To plot, test and resume:\n  {python} -m torchbeast.plot {run}"
        if not flags.disable_checkpoint:
            again = f"\n  {python} -m {script()}"
            longer = "" if status else f" --total_steps {2 * flags.total_steps}"
            text += f"{again} --mode test --xpid {run}{again} --xpid {run}{longer}"
        if status != 1 and script():
            log.info("%s", text)
