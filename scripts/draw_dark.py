"""Makes docs/pictures/impala-dark.svg of impala-light.svg, in colours for a dark page.

python scripts/draw_dark.py
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs/pictures"
COLORS = {
    "#1f2328": "#f0f6fc",  # text
    "#59636e": "#b1bac4",  # notes and arrows
    "#d1d9e0": "#3d444d",  # the line between the variants
    "#8c959f": "#768390",  # a process
    "#9a6700": "#d29922",  # games
    "#fff8c5": "#3b2f0b",
    "#0969da": "#4493f8",  # the model
    "#ddf4ff": "#0f2d4f",
}


def dark(svg: str) -> str:
    for light, other in COLORS.items():
        svg = svg.replace(light, other)
    return svg


if __name__ == "__main__":
    light = (FOLDER / "impala-light.svg").read_text()
    (FOLDER / "impala-dark.svg").write_text(dark(light))
