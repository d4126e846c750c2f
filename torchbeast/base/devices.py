"""Devices: those that the flags select, and work on them that nobody waits for."""

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchbeast.base import ranks
from torchbeast.base.errors import FlagError

AHEAD = ("cuda", "xpu")  # they compute while Python goes on, and copy beside that


def accelerators() -> tuple[str, int]:
    """The kind of this machine's GPUs, such as cuda, xpu or mps, and their number."""
    if kind := torch.accelerator.current_accelerator(check_available=True):
        return kind.type, torch.accelerator.device_count()
    return "cuda", 0


def learner_device(flags: argparse.Namespace) -> torch.device:
    """--learner_device; by default the first GPU, or this rank's, or else the CPU."""
    return _device(flags, "learner_device", 0)


def actor_device(flags: argparse.Namespace) -> torch.device:
    """--actor_device; by default the second GPU, or else the learner's device."""
    return _device(flags, "actor_device", 1)


def _device(flags: argparse.Namespace, name: str, gpu: int) -> torch.device:
    given = getattr(flags, name, None)
    kind, gpus = accelerators()
    if flags.disable_cuda or (kind == "mps" and not given):  # slower for small networks
        gpus = 0
    if not given and name == "actor_device" and (gpus < 2 or flags.learner_device):
        return learner_device(flags)
    own = ranks.local_gpu(gpus) if given in (None, "", kind) else None
    if own is not None:
        return torch.device(kind, own)
    try:
        device = torch.device(given or (f"{kind}:{gpu}" if gpus else "cpu"))
    except RuntimeError as error:
        raise FlagError(f"--{name} {given}: {error}") from error
    if device.type != "cpu" and (device.type != kind or (device.index or 0) >= gpus):
        raise FlagError(f"--{name} {given}: there are {gpus} GPUs of kind {kind}")
    return device


def check_defaults() -> None:
    """Raises FlagError if the caller's process has changed PyTorch's defaults."""
    found = torch.get_default_dtype(), torch.empty(0).device.type
    if found != (torch.float32, "cpu"):
        raise FlagError(f"PyTorch's default dtype and device are {found}: reset them")


def fast_bf16(device: torch.device) -> bool:
    """Whether the device has bfloat16 matrix instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


# --- Work that the CPU does not wait for ----------------------------------------------


_of_thread = threading.local()  # its stream for copies


def works_ahead(device: torch.device) -> bool:
    """Whether the device computes while Python goes on, and copies beside that."""
    return device.type in AHEAD


def check_compiler(mode: str, device: torch.device) -> None:
    """Raises a FlagError if this PyTorch can't compile in the mode for the device."""
    if mode != "default" and device.type == "cuda" and torch.__version__ < "2.13":
        raise FlagError(f"--compile {mode} needs PyTorch 2.13; use --compile default")
    try:  # a compiler or its folder may be missing
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise FlagError(
            f"--compile {mode}: this machine can't compile: {why}"
        ) from error


def fetch(row: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Begins to copy a row's tensors, of one device, to the CPU. The result waits.

    Numbers must fit float64 (MPS: float32).
    """
    tensors = {k: x.detach() for k, x in row.items() if isinstance(x, torch.Tensor)}
    device = next((x.device for x in tensors.values()), torch.device("cpu"))
    if device.type == "cpu":
        return lambda: {**row, **tensors}
    wide = torch.float32 if device.type == "mps" else torch.float64  # MPS lacks it
    flat = torch.cat([x.to(wide).flatten() for x in tensors.values()])
    flat = flat.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.Event(device)
    arrived.record(torch.accelerator.current_stream(device))

    def wait() -> dict[str, Any]:
        arrived.synchronize()
        parts = flat.split([x.numel() for x in tensors.values()])
        pairs = zip(tensors.items(), parts, strict=True)
        return {**row, **{k: x.to(y.dtype).view(y.shape) for (k, y), x in pairs}}

    return wait


@contextlib.contextmanager
def copying(device: torch.device) -> Iterator[None]:
    """Inside, copies from and to a GPU run beside its computations. Waits for them.

    Memory that is allocated inside must live until the GPU has used it.
    """
    if device.type not in AHEAD:
        yield
        return
    # One for each thread, because memory belongs to a stream.
    if not hasattr(_of_thread, "stream"):
        _of_thread.stream = torch.Stream(device)
    with _of_thread.stream:
        yield
    _of_thread.stream.synchronize()


def stack(parts: list[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """torch.stack of tensors of the CPU, on the device; see copying."""
    if device.type not in AHEAD:
        return torch.stack(parts, dim).to(device)
    shape = list(parts[0].shape)
    shape.insert(dim, len(parts))
    # Into pinned memory at once: PyTorch keeps it, so its pages are not new each time.
    pinned = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
    return torch.stack(parts, dim, out=pinned).to(device, non_blocking=True)


def move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor of the CPU to the device; see copying."""
    if device.type not in AHEAD:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def send(values: Any, device: torch.device) -> torch.Tensor:
    """A small tensor or array on the device, where it arrives before it is used."""
    return torch.as_tensor(values).to(device, non_blocking=True)
