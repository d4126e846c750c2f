"""Draws the curves of docs/results again, for light and for dark pages.

python scripts/draw_results.py [PICTURE ...]
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"


class Picture(NamedTuple):
    title: str
    runs: tuple[str, ...]  # folders of runs, or files of a study
    labels: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("--iqm",)


BOTH, TIME = ("MonoBeast", "PolyBeast"), ("--iqm", "--x", "time")
BREAKOUT = "breakout-?", "poly-breakout_10m-?"
INVADERS = "space_invaders-?", "poly-space_invaders_10m-?"
STUDIED = "impala-4", "impala-8", "impala-8-unclipped", "laser"
UPDATES = "IMPALA, 4 updates", "IMPALA, 8 updates", "8, no clipping", "LASER"
LASER = "IMPALA", "LASER"
METHODS = "no bonus", "counts", "RND", "RIDE", "NovelD", "E3B", "AMIGo"
ROOMS = "none", "counts", "rnd", "ride", "noveld", "e3b", "amigo"
PICTURES = {
    "pong": Picture("MonoBeast learns Pong", ("pong-1",)),
    "atari_breakout": Picture("Breakout (Atari)", ("atari_breakout-1",)),
    "atari_qbert": Picture("Qbert", ("atari_qbert-1",)),
    "atari_seaquest": Picture("Seaquest", ("atari_seaquest-1",)),
    "atari_beam_rider": Picture("Beam Rider", ("atari_beam_rider-1",)),
    "atari_space_invaders": Picture("Space Invaders", ("atari_space_invaders-1",)),
    "cartpole": Picture("CartPole", ("cartpole-?", "poly-cartpole-?"), BOTH),
    "minatar_breakout_iqm": Picture("MinAtar Breakout", BREAKOUT, BOTH),
    "minatar_breakout_iqm_time": Picture("MinAtar Breakout", BREAKOUT, BOTH, TIME),
    "minatar_space_invaders_iqm": Picture("MinAtar Space Invaders", INVADERS, BOTH),
    "minatar_space_invaders_iqm_time": Picture(
        "MinAtar Space Invaders", INVADERS, BOTH, TIME
    ),
    "minatar": Picture(
        "Three games of MinAtar",
        ("asterix-?", "freeway-?", "seaquest-?"),
        ("Asterix", "Freeway", "Seaquest"),
    ),
    "variants_breakout": Picture(
        "MinAtar Breakout: variants and precisions",
        ("mono-breakout-?", "poly-breakout-?", "fp32-breakout-?"),
        ("MonoBeast, bf16", "PolyBeast, bf16", "MonoBeast, fp32"),
    ),
    "half_cheetah": Picture(
        "HalfCheetah", ("half_cheetah-?",), ("seed 1", "seed 2", "seed 3"), ()
    ),
    "mujoco_half_cheetah": Picture("HalfCheetah-v5", ("mujoco-half_cheetah-??",)),
    "mujoco_hopper": Picture("Hopper-v5", ("mujoco-hopper-??",)),
    "mujoco_walker2d": Picture("Walker2d-v5", ("mujoco-walker2d-??",)),
    "mujoco_ant": Picture("Ant-v5", ("mujoco-ant-??",)),
    "mujoco_swimmer": Picture("Swimmer-v5", ("mujoco-swimmer-??",)),
    "laser_breakout": Picture(
        "MinAtar Breakout", ("impala-breakout-?", "laser-breakout-?"), LASER
    ),
    "laser_space_invaders": Picture(
        "MinAtar Space Invaders",
        ("impala-space_invaders-?", "laser-space_invaders-?"),
        LASER,
    ),
    "iqm_breakout_time": Picture(
        "MinAtar Breakout", ("impala-breakout-?", "laser-breakout-?"), LASER, TIME
    ),
    "laser_equal_updates": Picture(
        "MinAtar Breakout",
        tuple(f"study/laser/breakout-{x}-8?.csv" for x in STUDIED),
        UPDATES,
    ),
    "laser_equal_updates_space_invaders": Picture(
        "MinAtar Space Invaders",
        tuple(f"study/laser/space_invaders-{x}-8?.csv" for x in STUDIED),
        UPDATES,
    ),
    "exploration_rooms": Picture(
        "MiniGrid's rooms",
        tuple(f"study/exploration/rooms-{x}-7?.csv" for x in ROOMS),
        METHODS,
    ),
    "exploration_minihack": Picture(
        "MiniHack's rooms",
        tuple(f"study/exploration/hack-{x}-7?.csv" for x in ROOMS),
        METHODS,
    ),
}


def describe(name: str) -> str:
    """All words of a picture. The file has them: a test sees if it is out of date."""
    from torchbeast.tools import plot

    return repr((PICTURES[name], plot.X_AXES, plot.Y_LABELS))


def draw(name: str, folder: Path) -> None:
    """Draws a picture to folder/NAME.png and NAME-dark.png, with few colours."""
    from PIL import Image, PngImagePlugin

    from torchbeast.tools import plot

    picture, runs = PICTURES[name], []
    with tempfile.TemporaryDirectory() as temporary:
        for pattern in picture.runs:
            for found in sorted(RESULTS.glob(pattern)):
                if found.suffix == ".csv":  # the log of a run, thinned
                    run = Path(temporary, found.stem)
                    run.mkdir()
                    (run / "logs.csv").write_bytes(found.read_bytes())
                    found = run
                runs.append(str(found))
        flags = [
            *picture.flags,
            "--y",
            "mean_game_return_100",
            "--title",
            picture.title,
        ]
        if picture.labels:
            flags += ["--labels", *picture.labels]
        for look, ending in ([], ""), (["--dark"], "-dark"):
            out = folder / f"{name}{ending}.png"
            plot.main([*runs, *flags, *look, "--out", str(out)])
            words = PngImagePlugin.PngInfo()
            words.add_text("Description", describe(name))
            Image.open(out).quantize(64).save(out, optimize=True, pnginfo=words)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        draw(name, RESULTS)
