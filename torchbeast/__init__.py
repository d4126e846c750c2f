"""IMPALA in PyTorch: MonoBeast, one script for one machine; PolyBeast, for many."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchbeast.agent import load_agent

__all__ = ["load_agent"]


def __getattr__(name: str) -> Any:
    # Late, because environment servers import this package and don't load torch.
    if name == "load_agent":
        from torchbeast.agent import load_agent

        return load_agent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
