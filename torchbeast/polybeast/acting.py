"""What PolyBeast's inference threads need to act: models, padded batches, a stream."""

import copy
from collections.abc import Callable

import torch

from torchbeast.base import devices
from torchbeast.base.nested import Nested, map_nested
from torchbeast.core.acting import Net, prepare_to_act
from torchbeast.core.observations import iterate_space
from torchbeast.core.weights import Weights
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.model import make_model
from torchbeast.runs import checkpoint


class ActingModels(Weights):
    """Weights as complete models; `compiler` is a mode of torch.compile, or None."""

    def __init__(
        self, model: Net, device: torch.device, compiler: str | None = None
    ) -> None:
        space = model.observation_space
        # With them in common, all nets can run the same compiled code.
        common = {id(x): x for x in (space, *iterate_space(space), model.distribution)}
        self.nets = [
            copy.deepcopy(model, dict(common)).to(device) for _ in range(self.NUM_BANKS)
        ]
        for net in self.nets:
            prepare_to_act(net, compiler)
        super().__init__([net.state_dict() for net in self.nets])


def fits(flags: Flags, weights: dict[str, torch.Tensor]) -> Callable[[EnvSpec], Net]:
    """For find_env_spec: returns a model with these weights, or raises UserError."""

    def load(spec: EnvSpec) -> Net:
        spaces = spec.observation_space, spec.action_space
        model = make_model(flags, *spaces, torch.device("cpu"))
        checkpoint.check_fit(weights, model)
        return prepare_to_act(model)

    return load


def pad(nested: Nested, count: int) -> Nested:
    """Repeats the first environment of tensors [?, n, ...], until there are `count`."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        more = x[:, :1].expand(-1, count - x.shape[1], *[-1] * (x.dim() - 2))
        return torch.cat([x, more], dim=1)

    return map_nested(padded, nested)


def on_own_stream(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Makes `work` compute on a GPU before what other threads have queued there."""
    if not devices.works_ahead(device):
        return work

    def on_stream() -> None:
        with torch.Stream(device, priority=-1):
            work()

    return on_stream
