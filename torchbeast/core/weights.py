"""Published weights: the learner writes them; actors and inference read them."""

import collections
import copy
import math
import threading
from collections.abc import Mapping

import torch

from torchbeast.base import devices
from torchbeast.core import rollout
from torchbeast.core.acting import Net, prepare_to_act
from torchbeast.core.observations import iterate_space


class Weights:
    """The learner's newest weights in a triple buffer. Thread-safe.

    The learner publishes into a bank that is neither the newest nor being read, and
    then makes it the newest. A reader acquires the newest bank and releases it later.
    So no reader sees half-written weights, and a reader waits at most while one copy is
    made.

    Args:
      banks: NUM_BANKS state dicts of a model.
    """

    NUM_BANKS = 3

    def __init__(self, banks: list[dict[str, torch.Tensor]]) -> None:
        self.banks = banks
        self._newest = (0, -1)  # bank and number of updates
        self._readers: collections.Counter[int] = collections.Counter()
        self._lock = threading.Lock()  # between threads of this process

    def publish(self, weights: Mapping[str, torch.Tensor], policy_version: int) -> bool:
        """Publishes a model's state dict; False if all other banks are in use."""
        device = next((x.device for x in weights.values()), torch.device("cpu"))
        with self._lock:
            if policy_version == self._newest[1]:
                return True  # while a replay fills, only the moments change
            for bank in range(self.NUM_BANKS):
                if bank != self._newest[0] and not self._readers[bank]:
                    with devices.copying(device):
                        for name, x in weights.items():
                            self.banks[bank][name].copy_(x)
                    self._newest = bank, policy_version
                    return True
        return False

    def acquire(self) -> tuple[int, int]:
        """Returns the newest bank and its number of updates.

        `publish` does not overwrite the bank until `release`.
        """
        with self._lock:
            bank, policy_version = self._newest
            self._readers[bank] += 1
            return bank, policy_version

    def release(self, bank: int) -> None:
        with self._lock:
            self._readers[bank] -= 1


class SharedWeights(Weights):
    """Weights in shared memory, for actor processes.

    The learner acquires a bank for an actor and sends its number with a command. The
    actor replies when it has loaded the bank, and the learner releases it. So processes
    share no lock.
    """

    def __init__(
        self, model: torch.nn.Module, memory: torch.Tensor | None = None
    ) -> None:
        offset, places = 0, {}
        for name, x in model.state_dict().items():
            places[name] = (offset, x.shape, x.dtype)
            offset += math.ceil(x.nbytes / 64) * 64  # aligned for every dtype
        if memory is None:
            memory = rollout.create_buffers(
                rollout.Spec((max(offset, 1),), torch.uint8),
                (self.NUM_BANKS,),
                what=f"{self.NUM_BANKS} copies of the model's weights",
                lower="take a smaller --model",
            )
        self.memory = memory  # [banks, bytes] uint8, shared
        super().__init__(
            [
                {
                    name: bank[at : at + shape.numel() * dtype.itemsize]
                    .view(dtype)
                    .view(shape)
                    for name, (at, shape, dtype) in places.items()
                }
                for bank in memory
            ]
        )


class ActingModels(Weights):
    """Weights as complete models, for the inference threads of one process.

    Args:
      compiler: a mode of torch.compile, see --compile.
    """

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
