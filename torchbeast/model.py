"""The model: encoders for observations, one core, two heads.

`Net` follows from the spaces. Images go through a convolutional torso, all else through
an MLP, see encoders.py. The core, see recurrent.py, gets their features, the clipped
last reward and the last action. --encoder, --core and --explorer name modules of yours.
"""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from torchbeast import encoders
from torchbeast.base.named import make_named
from torchbeast.base.nested import map_nested
from torchbeast.core import rollout
from torchbeast.core.distributions import make_distribution
from torchbeast.core.observations import is_image, iterate_observation, iterate_space
from torchbeast.core.rollout import State
from torchbeast.core.vtrace import VTraceReturns
from torchbeast.encoders import VectorEncoder, initialize
from torchbeast.envs.values import MASK, agent_is_present, mask_space
from torchbeast.flags import Flags
from torchbeast.recurrent import make_core

CHOICES: dict[str, Any] = {"model": encoders.TORSOS}  # of these flags


class Net(nn.Module):
    """The policy and value network of the agent.

    Args:
      observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or nested Dicts and
        Tuples of these. If its part "action_mask" has a 0, that action is never taken.
      action_space: Discrete, MultiDiscrete or Box.
    """

    def __init__(
        self, flags: Flags, observation_space: spaces.Space, action_space: spaces.Space
    ) -> None:
        super().__init__()
        # Of the image encoders only: it rounds integers above 256, as vectors may hold.
        self.bf16 = flags.precision == "bf16"
        self.observation_space = observation_space
        self.distribution = make_distribution(action_space)
        self.explorer: Any = None  # the acting part of --explorer, see ExplorerActor
        num_values = 1
        if getattr(flags, "explorer", None):
            from torchbeast.extras.explorer.method import make_method  # optional

            method = make_method(flags.explorer, observation_space, self.distribution)
            self.explorer, num_values = method.actor, 1 + method.value_head
        sizes = flags.encoder_width, flags.layer_norm
        # --encoder: the whole observation [N, ...] -> features [N, D] float32
        self.encoder = make_named("--encoder", flags.encoder, observation_space, *sizes)
        leaves = [] if self.encoder else iterate_space(observation_space)
        self.is_image = [is_image(space) for space in leaves]
        images, vectors = self._split(leaves)
        self.images = nn.ModuleList(
            encoders.ImageEncoder(space, flags.model, *sizes) for space in images
        )
        normalize = getattr(flags, "normalize_observations", False)
        settings = vectors, flags.model, normalize, *sizes
        self.vector = VectorEncoder(*settings) if vectors else None
        self.return_moments: Any = None
        if getattr(flags, "normalize_rewards", False):
            from torchbeast.extras.moments.running import ReturnMoments  # optional

            self.return_moments = ReturnMoments(flags.discounting)
        rows = rollout.example_rows(observation_space, self.distribution)
        self.explorer_states = 0
        if self.explorer is not None:
            state = self.explorer.initial_state(1)
            self.explorer_states = len(state)
            rows |= self.explorer.act(rows, state)[0]
        self.value_vector: VectorEncoder | None = None
        size = encoders.output_size(lambda x: self.encode(x)[0], rows)
        self.core: Any = make_core(flags, size) if flags.use_lstm else None
        size = size if self.core is None else self.core.hidden_size
        self.policy = nn.Linear(size, self.distribution.num_logits)
        # The values have an MLP of their own if that takes little time.
        if self.vector and not self.images and self.core is None:
            self.value_vector = VectorEncoder(*settings)
            self.value_vector.apply(initialize)
            self.value_vector.moments = self.vector.moments
        self.baseline = nn.Linear(size, num_values)
        self.images.apply(initialize)
        if self.vector:
            self.vector.apply(initialize)
        # At first all actions have about the same probability.
        nn.init.normal_(self.policy.weight, std=0.01 / self.policy.in_features**0.5)
        nn.init.zeros_(self.policy.bias)

    def encoders_to(self, dtype: torch.dtype) -> None:
        """Casts the image encoders' weights, to act without casts at every step."""
        self.images.to(dtype)
        self.bf16 = False  # no autocast

    def initial_state(self, batch_size: int) -> State:
        """The state of new episodes: tensors [layers, B, size] float32.

        Of the core; of normalized rewards, the discounted sum; of the explorer.
        """
        device = self.policy.weight.device
        sizes = self.core.state_sizes(batch_size) if self.core is not None else []
        if self.return_moments is not None:
            sizes = [*sizes, (1, batch_size, 1)]
        state = tuple(torch.zeros(size, device=device) for size in sizes)
        if self.explorer is not None:
            state += self.explorer.initial_state(batch_size)
        return state

    def forward(
        self, rows: dict[str, Any], state: State = (), acting: bool = False
    ) -> tuple[dict[str, torch.Tensor], State]:
        """Runs the model over T rows of B environments.

        Args:
          rows: observation [T, B, ...] in the structure of the space, reward [T, B]
            float32, done [T, B] bool, last_action [T, B, ...].
          state: before row 0, see initial_state. If done, the state, the reward and
            the last action belong to the previous episode, and are zeroed.
          acting: true in actors, which store all outputs in the rollout.

        Returns:
          policy_logits [T, B, P] and baseline [T, B], or of K values [T, B, K],
          float32; fields of the explorer, or a normalized reward. And the last state.
        """
        T, B = rows["reward"].shape
        fields: dict[str, torch.Tensor] = {}
        n = len(state) - self.explorer_states
        state, explorer_state = state[:n], state[n:]
        if self.explorer is not None and acting:
            fields, explorer_state = self.explorer.act(rows, explorer_state)
            rows = rows | fields
        x, value_x = self.encode(rows)  # [T * B, D]
        if self.core is not None:
            n = len(self.core.state_sizes(B))
            y, core_state = self.core.unroll(x.view(T, B, -1), rows["done"], state[:n])
            x = value_x = y.flatten(0, 1)
            state = (*core_state, *state[n:])
        logits = self.policy(x).view(T, B, -1)
        if mask_space(self.observation_space):
            allowed = rows["observation"][MASK].flatten(2) != 0
            logits = self.distribution.mask(logits, allowed)
        baseline = self.baseline(value_x).view(T, B, -1).squeeze(-1)
        outputs = {"policy_logits": logits, "baseline": baseline}
        outputs |= fields
        if self.return_moments is not None:
            returns = self.return_moments.sums(rows, state[-1])
            last_return = returns[-1].masked_fill(rows["done"][-1], 0)
            state = (*state[:-1], last_return.view(1, B, 1))
            if not acting:
                outputs["reward"] = self._scale(rows["reward"])
        return outputs, (*state, *explorer_state)

    def encode(self, rows: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the core: features [T * B, D] float32 of rows [T, B, ...].

        And that of the values, which may have an MLP of their own. To encode the parts
        of a Dict yourself: `rows["observation"]["map"]`. D follows from the result.
        """
        T, B = rows["reward"].shape
        images, vectors = self._leaves(rows)
        features = []
        if self.encoder is not None:
            observation = map_nested(lambda x: x.flatten(0, 1), rows["observation"])
            features.append(self.encoder(observation))
        if self.explorer is not None:
            features.append(self.explorer.features(rows))
        if images:
            device = rows["reward"].device.type
            with torch.autocast(device, torch.bfloat16, enabled=self.bf16):
                features += [f(x) for f, x in zip(self.images, images, strict=True)]
        goes_on = (~rows["done"]).reshape(T * B, 1)
        reward = self._scale(rows["reward"]).clamp(-1, 1).reshape(T * B, 1)
        last_action = self.distribution.features(rows["last_action"].flatten(0, 1))
        side = [goes_on * reward, goes_on * last_action]

        def join(vector: VectorEncoder | None) -> torch.Tensor:
            own = [vector(vectors)] if vector else []
            return torch.cat([f.float() for f in (*features, *own, *side)], dim=-1)

        x = join(self.vector)
        return x, join(self.value_vector) if self.value_vector else x

    def auxiliary_losses(
        self,
        batch: dict[str, Any],
        outputs: dict[str, torch.Tensor],
        targets: VTraceReturns,
        valid: torch.Tensor,
        flags: Flags,
        progress: float,
    ) -> dict[str, torch.Tensor]:
        """Losses of your own heads, by name. The learner adds their sums.

        A scalar is one column of logs.csv, [K] are K columns (one per task, for
        example); of larger ones the sum is logged. impala_loss describes the arguments;
        targets are vs and pg_advantages [T, B].
        """
        return {}

    @torch.no_grad()
    def update_moments(
        self,
        batch: dict[str, Any],
        state: State,
        joined: Callable[[torch.Tensor, int], torch.Tensor] = lambda x, dim: x,
    ) -> None:
        """Adds rows 1 to T of a batch to the running moments; state: before row 0.

        `joined` joins a tensor with those of other learners, along a dimension.
        """
        present = agent_is_present(batch["observation"])  # [T + 1, B] bool, or True

        def add(moments: Any, values: torch.Tensor, rows: slice) -> None:
            there = ... if present is True else joined(present[rows].flatten(), 0)
            moments.update(joined(values, 0)[there])  # without absent agents

        if self.vector and self.vector.moments:
            rows = map_nested(lambda x: x[1:], batch)
            values = self.vector.join(self._leaves(rows)[1])
            add(self.vector.moments, values, slice(1, None))
        if self.return_moments is not None:
            returns = self.return_moments.sums(batch, state[-1 - self.explorer_states])
            add(self.return_moments, returns[1:].flatten(), slice(-1))

    def _split(self, leaves: list) -> tuple[list, list]:
        """Those of the images, and the others."""
        parts: tuple[list, list] = [], []
        for x, image in zip(leaves, self.is_image, strict=False):  # none with --encoder
            parts[not image].append(x)
        return parts

    def _leaves(self, rows: dict[str, Any]) -> tuple[list, list]:
        """The observations of rows [T, B, ...] as images and others [T * B, ...]."""
        leaves = iterate_observation(self.observation_space, rows["observation"])
        return self._split([x.flatten(0, 1) for x in leaves])

    def _scale(self, reward: torch.Tensor) -> torch.Tensor:
        return self.return_moments.scale(reward) if self.return_moments else reward


def make_model(
    flags: Flags,
    observation_space: spaces.Space,
    action_space: spaces.Space,
    device: torch.device,
) -> Net:
    """Makes the model of the flags. docs/your_network.md says what another needs."""
    return Net(flags, observation_space, action_space).to(device)
