"""PolyBeast: environments in servers, batched inference in the learner's process."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """As `python -m torchbeast.polybeast`; returns the exit status."""
    from torchbeast.polybeast import start  # loads torch, which servers don't

    return start.main(argv)
