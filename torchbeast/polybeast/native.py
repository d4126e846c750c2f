"""The C++ part, and what to do if it is missing. Loads no torch by itself."""

import contextlib
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path


def require_native() -> None:
    """Imports libtorchbeast; ends the process with the reason if this can't be done.

    scripts/train_pong sets up a checkout without the C++ part. In the environment of
    such a checkout, this builds it first, which takes about a minute.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("libtorchbeast")
        return
    checkout = Path(__file__).resolve().parents[2]
    in_its_environment = Path(sys.prefix).resolve() == checkout / ".venv"
    if in_its_environment and os.environ.get("TORCHBEAST_NATIVE") != "skip":
        set_up = ["bash", str(checkout / "scripts" / "setup")]
        sys.stderr.write(f"PolyBeast's C++ part is missing: {shlex.join(set_up)}\n")
        subprocess.run(set_up, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        importlib.invalidate_caches()
    try:
        importlib.import_module("libtorchbeast")
    except ImportError as error:
        sys.exit(str(error))
