"""Draws some seconds of a run's test games to an animated GIF.

    python scripts/make_gif.py OUT.gif START SECONDS --xpid XPID [FLAGS OF THE TEST]

The games are those of `--mode test`, so the same weights and seed draw the same file.
It needs `pip install imageio-ffmpeg`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

# Twice the size. One palette for all frames; dithering would make still parts flicker.
DRAWN = (
    "scale=iw*2:-1:flags=neighbor,"
    "split[a][b];[a]palettegen=max_colors=32[p];[b][p]paletteuse=dither=none"
)


def main(out: str, start: str, seconds: str, *flags: str) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    with tempfile.TemporaryDirectory() as folder:
        video = str(Path(folder, "games.mp4"))
        play = [sys.executable, "-m", "torchbeast.monobeast", "--mode", "test"]
        subprocess.run([*play, "--video", video, *flags], check=True)
        part = ["-ss", start, "-t", seconds, "-i", video, "-vf", DRAWN]
        command = [get_ffmpeg_exe(), "-loglevel", "error", "-y", *part, out]
        subprocess.run(command, check=True)
    print(f"{out}: {Path(out).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
