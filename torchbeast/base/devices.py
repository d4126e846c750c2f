"""The devices that the flags select. Importing this module does not load torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchbeast.base.errors import FlagError

if TYPE_CHECKING:
    import torch


def learner_device(flags: argparse.Namespace) -> torch.device:
    """--learner_device; by default the first GPU, or this rank's, or else the CPU.

    Raises:
      FlagError: there is no such device.
    """
    return _device(flags, "learner_device", 0)


def actor_device(flags: argparse.Namespace) -> torch.device:
    """--actor_device; by default the second GPU, or else the learner's device.

    Raises:
      FlagError: there is no such device.
    """
    return _device(flags, "actor_device", 1)


def _device(flags: argparse.Namespace, name: str, gpu: int) -> torch.device:
    import torch

    from torchbeast.base import ranks

    given = getattr(flags, name, None)
    gpus = 0 if flags.disable_cuda else torch.cuda.device_count()
    if not given:
        if name == "actor_device" and (gpus < 2 or flags.learner_device):
            return learner_device(flags)
        if (own := ranks.local_gpu(gpus)) is not None:
            return torch.device("cuda", own)
        return torch.device("cuda", gpu) if gpus else torch.device("cpu")
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise FlagError(f"--{name} {given}: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise FlagError(
            f"--{name} {given}: there are {gpus} GPUs"
            + (" with --disable_cuda" if flags.disable_cuda else "")
        )
    if device.type not in ("cuda", "cpu"):
        raise FlagError(f"--{name} must be cpu, cuda or cuda:N, got {given}")
    return device


def fast_bf16(device: torch.device) -> bool:
    """Whether the device has bfloat16 matrix instructions."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
