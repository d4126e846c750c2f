"""Trains on environments that come from packages of others, with both variants.

    .venv/bin/python scripts/try_environments.py               all of them
    .venv/bin/python scripts/try_environments.py minigrid      some
    .venv/bin/python scripts/try_environments.py --folder DIR  keep packages and runs

Makes a virtual environment in a temporary folder, or in --folder. It sees everything
that the Python which runs this script sees, so PyTorch and libtorchbeast are not
installed again; nothing outside the folder changes. pip installs the packages below
into it, at these versions (they need Python >= 3.11).

Each environment and variant then does what a user does first: starts a training run,
stops it with Ctrl-C, resumes it by --xpid alone, and plays games with `--mode test`,
recorded to a video if the environment can draw without a display. A table says how that
went; the exit status is 1 if anything failed. It takes a few minutes on two cores.
"""

import argparse
import contextlib
import csv
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VARIANTS = ("monobeast", "polybeast")
TIMEOUT = 300.0  # seconds that one command may take

# Small runs: what counts here is that they work.
LAYOUT = (
    *("--num_actors", "2", "--envs_per_actor", "2", "--batch_size", "2"),
    *("--unroll_length", "20", "--torch_threads", "1", "--reward_clipping", "none"),
)


@dataclass
class Trial:
    """One environment: what to install, and how to train on it.

    Attributes:
      packages: with all that they need.
      alone: packages without what they say that they need; with the rest by hand.
      steps: enough for games to end after a resume, which begins new games.
      video: it draws pictures on any machine; others need OpenGL.
    """

    packages: tuple[str, ...]
    env: str
    steps: int
    flags: tuple[str, ...] = ()
    video: bool = False
    alone: tuple[str, ...] = ()


MUJOCO = "mujoco==3.17.0"
BOX2D = "box2d==2.3.10"
TRIALS = {
    # Vectors without bounds, float64; continuous actions.
    "mujoco": Trial((MUJOCO, "imageio==2.38.1"), "Hopper-v5", 3000),
    # Vectors with wide bounds; and continuous actions with screens of 96x96x3.
    "lunar_lander": Trial((BOX2D, "pygame-ce"), "LunarLander-v3", 3000, video=True),
    "car_racing": Trial(
        (BOX2D, "pygame-ce"),
        "CarRacing-v3",
        800,
        ("--env_kwargs", '{"max_episode_steps": 60}', "--num_actors", "1"),
        video=True,
    ),
    # A Dict with goals, on MuJoCo. (FetchReach-v4 does not start with this MuJoCo.)
    "robotics": Trial(
        (MUJOCO, "gymnasium-robotics==1.4.2"),
        "gymnasium_robotics:PointMaze_UMaze-v3",
        4000,
    ),
    # An id without a version. It needs an older MuJoCo.
    "metaworld": Trial(
        ("mujoco==3.3.0", "metaworld==3.1.1"),
        "metaworld:Meta-World/MT1",
        5000,
        ("--env_kwargs", '{"env_name": "reach-v3"}'),
    ),
    # As MuJoCo's, in a Dict with scalars; games are cut off after 1,000 steps.
    "dm_control": Trial(
        (MUJOCO, "dm-control==1.0.50", "shimmy[dm-control]==2.0.1"),
        "shimmy:dm_control/walker-walk-v0",
        3000,
        ("--use_lstm", "--num_actors", "1"),
    ),
    # A wrapper leaves out the text and makes planes of the image: docs/environments.md.
    "minigrid": Trial(
        ("minigrid==3.2.0",),
        "minigrid:MiniGrid-DoorKey-5x5-v0",
        3000,
        ("--wrapper", "my_wrappers:planes"),
        video=True,
    ),
    # A Dict with goals; slow: 100 steps per second.
    "highway_env": Trial(
        ("highway-env==1.12.1",), "highway_env:parking-v0", 800, video=True
    ),
    # Big screens, and numbers whose bounds are those of float32. Games of 300 steps.
    "vizdoom": Trial(
        ("vizdoom==1.3.2",),
        "vizdoom.gymnasium_wrapper:VizdoomBasic-v1",
        800,
        ("--envs_per_actor", "1"),
        video=True,
    ),
    # The old Gym API.
    "crafter": Trial(("crafter==1.8.3",), "crafter:Env", 800),
    # A Dict of screens, numbers and texts as bytes. NLE pins an older Gymnasium.
    "nle": Trial(
        (),
        "nle:NetHackScore-v0",
        800,
        ("--env_kwargs", '{"max_episode_steps": 100}'),
        alone=("nle==1.3.0",),
    ),
    "minihack": Trial(
        ("setuptools<81",),
        "minihack:MiniHack-Room-5x5-v0",
        2000,
        alone=("nle==1.3.0", "minihack==1.0.2"),
    ),
    # Vector environments: a task of EnvPool, and Procgen by a function with num_envs.
    # procgen-mirror has wheels for this Python; it pins an older NumPy.
    "envpool": Trial(("envpool==1.2.5",), "envpool:Acrobot-v1", 3000),
    "procgen": Trial(
        ("cffi", "moderngl", "imageio", "imageio-ffmpeg", "glfw", "filelock"),
        "my_envs:procgen",
        4000,
        ("--env_kwargs", '{"game": "bigfish"}'),
        alone=("procgen-mirror==0.10.7", "gym3==0.3.3"),
    ),
    # Several agents in Gymnasium's API, through PettingZoo's parallel one.
    "foraging": Trial(
        ("lbforaging==2.0.0", "pettingzoo"),
        "my_agents:TupleGame",
        3000,
        ("--env_kwargs", '{"id": "lbforaging:Foraging-8x8-2p-2f-v3"}'),
    ),
    # Tasks that need memory: numbers of categories, and screens of 84x84x3.
    "popgym": Trial(
        ("popgym==1.0.7",),
        "popgym:popgym-ConcentrationEasy-v0",
        3000,
        ("--use_lstm",),
    ),
    "memory_gym": Trial(
        ("pygame-ce",),
        "memory_gym:MortarMayhem-Grid-v0",
        1500,
        ("--use_lstm",),
        video=True,
        alone=("memory-gym==1.0.2",),  # it pins an older Gymnasium
    ),
    # A reward per objective, which a wrapper of the package adds up.
    "mo_gymnasium": Trial(
        ("mo-gymnasium==1.3.2", "pygame-ce"),
        "mo_gymnasium:deep-sea-treasure-v0",
        3000,
        ("--wrapper", "mo_gymnasium.wrappers:LinearReward"),
        video=True,
    ),
    # Vector environments in JAX. It pins an older Gymnasium.
    "gymnax": Trial(
        ("jax==0.10.2", "flax==0.12.8", "matplotlib", "seaborn"),
        "gymnax_games:GymnaxGames",
        3000,
        alone=("gymnax==1.0.1",),
    ),
}


class Failed(Exception):
    """A run did not do what it should; the message says what."""


def install(folder: Path, packages: Sequence[str], alone: Sequence[str]) -> Path:
    """Installs packages in an environment in `folder`; returns its Python."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", purelib], text=True).strip()
        # addsitedir, unlike a bare path, finds editable installs too.
        lines = [f"import site; site.addsitedir({path!r})" for path in own_packages()]
        Path(site, "packages_of_the_checkout.pth").write_text("\n".join(lines))
    pip = [python, "-m", "pip", "install", "--quiet"]
    for names in (packages, ["--no-deps", *alone] if alone else []):
        if names:
            subprocess.run([*pip, *names], check=True)
    return python


def own_packages() -> list[str]:
    """The folders of packages that this Python looks into."""
    return [path for path in sys.path if path.endswith("-packages")]


def documented_module(name: str) -> str:
    """The text of the module that a page of docs/ shows under this file name."""
    text = "".join(page.read_text() for page in (REPOSITORY / "docs").glob("*.md"))
    match = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", text, re.DOTALL)
    if not match:
        raise Failed(f"no page of docs/ shows {name}")
    return match[1]


@dataclass
class User:
    """Someone who works in `folder` with the Python of its environment."""

    python: Path
    folder: Path
    variant: str
    xpid: str

    def start(self, *arguments: str, log: str) -> subprocess.Popen:
        words = [str(self.python), "-m", f"torchbeast.{self.variant}"]
        words += ["--savedir", str(self.folder / "runs"), "--xpid", self.xpid]
        environ = {**os.environ, "PYTHONPATH": str(self.folder)}
        with self.log(log).open("w") as file:
            print("$", *words[1:], *arguments, file=file, flush=True)
            return subprocess.Popen(
                [*words, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environ,
                start_new_session=True,  # to be signalled and killed as a whole
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{self.xpid}-{name}.log"

    def rows(self) -> list[dict[str, str]]:
        path = self.folder / "runs" / self.xpid / "logs.csv"
        if not path.exists():
            return []
        with path.open() as file:
            return list(csv.DictReader(file))


@contextlib.contextmanager
def guarded(process: subprocess.Popen) -> Iterator[None]:
    """Kills the process and its group, if it still runs at the end."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(process: subprocess.Popen, expected: int, doing: str) -> None:
    try:
        status = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Failed(f"{doing}: no end after {TIMEOUT:g} s") from None
    if status != expected:
        raise Failed(f"{doing}: exit status {status}, not {expected}")


def train_and_interrupt(user: User, trial: Trial) -> None:
    """Presses Ctrl-C once a few updates are made."""
    process = user.start(
        *("--env", trial.env, "--total_steps", str(trial.steps)),
        *(*LAYOUT, *trial.flags),
        log="train",
    )
    with guarded(process):
        deadline = time.monotonic() + TIMEOUT
        while len(user.rows()) < 3:
            if process.poll() is not None:
                raise Failed(f"train: ended with exit status {process.returncode}")
            if time.monotonic() > deadline:
                raise Failed(f"train: no 3 updates after {TIMEOUT:g} s")
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        finish(process, 128 + signal.SIGINT, "Ctrl-C")


def resume(user: User, trial: Trial) -> None:
    before = int(user.rows()[-1]["step"])
    process = user.start(log="resume")
    with guarded(process):
        finish(process, 0, "resume")
    steps = [int(row["step"]) for row in user.rows()]
    if steps != sorted(set(steps)) or steps[-1] < trial.steps or before not in steps:
        raise Failed(
            f"logs.csv: steps do not grow from {before} to {trial.steps}: {steps}"
        )


def check_logs(user: User) -> None:
    rows = user.rows()
    for name in ("total_loss", "grad_norm", "entropy", "mean_value"):
        if not all(math.isfinite(float(row[name])) for row in rows):
            raise Failed(f"logs.csv: {name} is not finite")
    if not int(rows[-1]["games"]):
        raise Failed("logs.csv: no game ended")


def play(user: User, trial: Trial) -> None:
    video = user.folder / f"{user.xpid}.mp4"
    record = ("--video", str(video)) if trial.video else ()
    process = user.start(
        *("--mode", "test", "--num_test_episodes", "2", *record), log="test"
    )
    with guarded(process):
        finish(process, 0, "test")
    if "2 games: mean return" not in user.log("test").read_text():
        raise Failed("test: says nothing of its 2 games")
    if trial.video and not video.stat().st_size:
        raise Failed(f"test: {video} is empty")


def try_one(python: Path, folder: Path, name: str, variant: str) -> bool:
    """Prints a line of the table; False if something failed."""
    trial = TRIALS[name]
    user = User(python, folder, variant, f"{name}-{variant}-{time.time_ns():x}")
    started = time.monotonic()
    failure, steps, sps, games = "", "-", "-", "-"
    try:
        train_and_interrupt(user, trial)
        resume(user, trial)
        check_logs(user)
        last = user.rows()[-1]
        steps, games = last["step"], last["games"]
        sps = f"{float(last['sps']):.0f}"
        play(user, trial)
    except Failed as error:
        failure = str(error)
    seconds = f"{time.monotonic() - started:.0f}"
    result = f"FAILED: {failure}" if failure else "passed"
    cells = (f"`{trial.env}`", variant, steps, games, sps, seconds, result)
    print("|", " | ".join(cells), "|", flush=True)
    if failure:
        for log in sorted(folder.glob(f"{user.xpid}-*.log")):
            print(log.read_text()[-3000:], file=sys.stderr, flush=True)
    return not failure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TRIALS))
    parser.add_argument("--folder", type=Path, help="keep packages and runs here")
    arguments = parser.parse_args()
    names = arguments.names or list(TRIALS)
    if unknown := set(names) - TRIALS.keys():
        parser.error(f"no {', '.join(unknown)}; there are {', '.join(TRIALS)}")

    with contextlib.ExitStack() as stack:
        if arguments.folder:
            folder = arguments.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        packages = sorted({p for name in names for p in TRIALS[name].packages})
        alone = sorted({p for name in names for p in TRIALS[name].alone})
        print("Installing", *packages, *alone, flush=True)
        python = install(folder, packages, alone)
        for module in ("my_wrappers.py", "my_envs.py", "my_agents.py"):
            (folder / module).write_text(documented_module(module))
        shutil.copy(REPOSITORY / "examples/jax_envs/gymnax_games.py", folder)
        print("\n| `--env` | variant | steps | games | SPS | seconds | result |")
        print("|---|---|---|---|---|---|---|", flush=True)
        passed = [
            try_one(python, folder, name, variant)
            for name in names
            for variant in VARIANTS
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
