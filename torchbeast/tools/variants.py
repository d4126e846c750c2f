"""The two variants of a run, as commands name them."""

import importlib
from typing import Any

# What has make_parser and resolve_layout of `python -m torchbeast.VARIANT`.
VARIANTS = {"monobeast": "monobeast", "polybeast": "polybeast.start"}


def load(variant: str) -> Any:
    """The module of a variant. Ends the process if PolyBeast's C++ part is missing."""
    if variant == "polybeast":
        from torchbeast.polybeast.native import require_native

        require_native()
    return importlib.import_module(f"torchbeast.{VARIANTS[variant]}")
