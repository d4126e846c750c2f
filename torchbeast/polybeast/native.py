"""The C++ part, and what to do if it is missing. Loads no torch by itself."""

import importlib
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path


def require_native(builds: bool = True) -> None:
    """Imports libtorchbeast, or ends the process with the reason; allows many streams.

    In a checkout that scripts/train_pong has set up, it `builds` it, in a minute.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard % (1 << 63), 10_240)  # unlimited is -1; macOS allows no more
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    checkout = Path(__file__).resolve().parents[2]
    try:
        importlib.import_module("libtorchbeast")
    except ImportError as error:
        builds &= Path(sys.prefix).resolve() == checkout / ".venv"
        if not builds or os.environ.get("TORCHBEAST_NATIVE") == "skip":
            sys.exit(str(error))
        set_up = ["bash", str(checkout / "scripts" / "setup")]
        sys.stderr.write(f"PolyBeast's C++ part is missing: {shlex.join(set_up)}\n")
        subprocess.run(set_up, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        importlib.invalidate_caches()
        require_native(builds=False)
