"""Learning: the loss and one update.

Both variants use this file. Read it top to bottom: rewards_and_discounts, impala_loss,
Learner, update, learn, count_batch. V-trace is in core/vtrace.py, the model in
model.py, the optimizer and its schedule in optimizer.py.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchbeast.base import devices, ranks
from torchbeast.base.nested import Nested
from torchbeast.core import rollout, vtrace
from torchbeast.core.acting import row_spec
from torchbeast.core.columns import join_columns, spread
from torchbeast.core.counters import Counters
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.finite import check_loss, check_weights, sum_of_weights
from torchbeast.core.rollout import State
from torchbeast.extras.explorer import Explorer, combine
from torchbeast.extras.replay.implied_kl import implied_kl
from torchbeast.extras.replay.memory import make_replay
from torchbeast.extras.replay.mixer import Mixer, reject
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.model import make_model
from torchbeast.optimizer import (
    advance,
    make_optimizer,
    steps_per_batch,
    tell_of_a_higher_rate,
)
from torchbeast.runs import checkpoint, start

# --- The loss -------------------------------------------------------------------------


def rewards_and_discounts(
    batch: dict[str, Any], outputs: dict[str, torch.Tensor], flags: Flags
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and discounts of the T steps, for V-trace.

    Args:
      batch, outputs: see impala_loss. If outputs has `reward` (--normalize_rewards), it
        replaces the batch's, and is not clipped again.
      flags: reward_clipping, discounting.

    Returns:
      Both [T, B] float32. For a baseline [T + 1, B, K] of K value heads, make them
      [T, B, K]: each head can have a reward and a discount of its own.
    """
    rewards, done = outputs.get("reward", batch["reward"])[1:], batch["done"][1:]
    if flags.reward_clipping == "abs_one" and "reward" not in outputs:
        rewards = rewards.clamp(-1, 1)
    # If an episode was truncated, bootstrap from the value of its last observation.
    rewards = rewards + flags.discounting * batch["truncation_value"][1:]
    return rewards, flags.discounting * (~done).float()


def impala_loss(
    batch: dict[str, Any],
    outputs: dict[str, torch.Tensor],
    distribution: ActionDistribution,
    flags: Flags,
    auxiliary_losses: Callable[..., Mapping[str, Any]] = lambda *_: {},
    progress: float = 0.0,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The IMPALA loss, summed over time and batch (Espeholt et al. 2018, section 4.2).

    Args:
      batch: rollouts [T + 1, B, ...], see torchbeast/core/rollout.py. It may have
        the fields `step_counts` [T + 1, B] and `replayed` [B], bool.
      outputs: of the learner's model for all T + 1 rows: policy_logits [T + 1, B, P],
        baseline [T + 1, B] or [T + 1, B, K], float32. The advantages of K value heads
        are added.
      distribution: the policy distribution over actions, given logits.
      flags: reward_clipping, discounting, baseline_cost, entropy_cost,
        final_entropy_cost, clip_rho, clip_pg_rho, clip_c, trace_decay,
        normalize_advantages, clip_ratio, and kl_threshold if columns are replayed.
      auxiliary_losses: see Net.auxiliary_losses.
      progress: the share of the run before this update, from 0 to 1. To anneal a
        coefficient, multiply it by 1 - progress.

    Returns:
      The loss, a scalar; and columns for logs.csv: numbers, None or tensors [K], for
      example one number per value head.
    """
    # Row t has observation t and the action for it. Row t + 1 has the action's reward
    # and whether the episode ended. Row T has no action here; its baseline is the
    # bootstrap value.
    actions = batch["action"][:-1]
    behavior_logits = batch["policy_logits"][:-1]
    target_logits = outputs["policy_logits"][:-1]
    values, bootstrap_value = outputs["baseline"][:-1], outputs["baseline"][-1]
    rewards, discounts = rewards_and_discounts(batch, outputs, flags)
    rewards, discounts = combine(batch, rewards, discounts)  # with --explorer's

    log_probs = distribution.log_prob(target_logits, actions)  # [T, B]
    log_rhos = (log_probs - distribution.log_prob(behavior_logits, actions)).detach()
    rhos = log_rhos.exp()
    # [T, B] bool: the steps that count, and those of them that are not replayed.
    valid = online = rollout.steps_that_count(batch)[:-1]
    of_replay: dict[str, torch.Tensor] = {}
    if "replayed" in batch:
        logits = target_logits.detach(), behavior_logits
        kl = implied_kl(distribution, *logits, flags.clip_rho)
        valid, online, of_replay = reject(valid, batch["replayed"], kl, flags)
    targets = vtrace.from_importance_weights(
        *(log_rhos, discounts, rewards, values, bootstrap_value),
        clip_rho_threshold=flags.clip_rho,
        clip_pg_rho_threshold=flags.clip_pg_rho,
        clip_c_threshold=flags.clip_c,
        trace_decay=flags.trace_decay,
        valid=valid,
    )
    # Steps that don't count have advantage 0 and value error 0.
    advantages = targets.pg_advantages
    if advantages.dim() == 3:  # one per value head
        advantages = advantages.sum(-1)
    if flags.normalize_advantages:
        weights = rhos.clamp(max=flags.clip_pg_rho).masked_fill(~valid, 0)
        advantages = vtrace.normalize(advantages, weights, valid)
    # PPO's clipping (Schulman et al. 2017, equation 7): no gradient where rho has left
    # the interval around 1 in the direction of the advantage.
    low, high = 1 - flags.clip_ratio, 1 + flags.clip_ratio
    clipped = torch.where(advantages > 0, rhos > high, rhos < low)
    advantages = advantages.masked_fill(clipped, 0)
    entropy = distribution.entropy(target_logits) * online
    entropy_cost = flags.entropy_cost
    if flags.final_entropy_cost is not None:
        entropy_cost += (flags.final_entropy_cost - entropy_cost) * progress
    auxiliary = auxiliary_losses(batch, outputs, targets, valid, flags, progress)

    # Each loss is summed, added to the total and logged. A masked action has advantage
    # 0 and log-probability -inf: finite() prevents a NaN.
    losses = {
        "pg_loss": -(vtrace.finite(log_probs) * advantages).sum(),
        "baseline_loss": flags.baseline_cost * 0.5 * (targets.vs - values).pow(2).sum(),
        "entropy_loss": -entropy_cost * entropy.sum(),
    }
    total_loss, columns = add_up(join_columns(losses, auxiliary), values.device)

    number = ranks.total(valid.sum())

    def mean(x: torch.Tensor) -> torch.Tensor:
        """The mean over the steps that count: [T, B, ...] -> [...]."""
        counts = valid.reshape(*valid.shape, *[1] * (x.dim() - 2))
        return ranks.total((x.detach() * counts).sum((0, 1))) / number

    about = {
        # nats per step
        "entropy": ranks.total(entropy.sum().detach()) / ranks.total(online.sum()),
        "mean_value": mean(values),
        "frac_rho_above_1": mean(log_rhos > 0),
        "frac_clipped": mean(clipped),
        **of_replay,
    }
    return total_loss, join_columns(columns, about)


def add_up(
    losses: Mapping[str, Any], device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of all losses, tensors or numbers, and their columns: see impala_loss."""
    tensors = {name: torch.as_tensor(x, device=device) for name, x in losses.items()}
    total: Any = sum(x.sum() for x in tensors.values())
    columns = {
        name: ranks.total((x.sum() if x.dim() > 1 else x).detach())
        for name, x in tensors.items()
    }
    return total, join_columns({"total_loss": ranks.total(total.detach())}, columns)


# --- The learner ----------------------------------------------------------------------

COUNTED = (*Counters.FIELDS, "env_warnings")  # the fields of rows for count_batch


class Learner:
    """The state of learning: model, optimizer, schedule, counters.

    Not thread-safe; see Run.updating.
    """

    def __init__(self, flags: Flags, env_spec: EnvSpec) -> None:
        torch.manual_seed(flags.seed)
        self.flags, self.env_spec = flags, env_spec
        self.device = devices.learner_device(flags)
        # A GPU may still make an update while the next one is prepared.
        self.is_ahead = devices.works_ahead(self.device)
        self.model = make_model(
            flags, env_spec.observation_space, env_spec.action_space, self.device
        )
        self.optimizer, self.scheduler = make_optimizer(self.model, flags)
        # A checkpoint has the state of each: state_dict and load_state_dict.
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        self.explorer: Explorer | None = None
        if flags.explorer:
            self.explorer = Explorer(flags, self.model, self.device)
            self.parts["explorer"] = self.explorer
        self.row_spec = row_spec(self.model)
        self.mixer: Mixer | None = None
        if flags.replay_ratio > 0:
            replay = make_replay(flags, self.row_spec)
            self.mixer = Mixer(replay, flags, self.model.initial_state(1))
        self.loss: Callable[..., tuple] = model_loss
        if flags.compile:
            devices.check_compiler(flags.compile, self.device)
            self.loss = torch.compile(model_loss, mode=flags.compile)
        self.diverged = False  # the weights are not finite
        self.step = 0  # environment steps learned from
        self.num_updates = 0  # of the weights: the number of the newest policy
        self.counters = Counters(flags.episodes_for_avg)

    def state_dict(self) -> dict[str, Any]:
        return {
            **{f"{k}_state_dict": part.state_dict() for k, part in self.parts.items()},
            "rng": checkpoint.rng_state(),
            "stats": {
                "step": self.step,
                "num_updates": self.num_updates,
                **self.counters.state_dict(),
                "replayed_steps": self.mixer.replayed_steps if self.mixer else 0,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint.

        Raises:
          CheckpointError: it does not fit this model and optimizer.
        """
        checkpoint.check_fit(state["model_state_dict"], self.model)
        optimizer = state["flags"].get("optimizer", "rmsprop")
        if optimizer != self.flags.optimizer:
            raise checkpoint.CheckpointError(
                f"the checkpoint is of a run with --optimizer {optimizer}, and this "
                f"run has --optimizer {self.flags.optimizer}. Give --optimizer "
                f"{optimizer}, or choose another --xpid"
            )
        try:
            self._load_state_dict(state)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise checkpoint.CheckpointError(
                "the checkpoint does not fit this model and optimizer: "
                f"{type(error).__name__}: {error}. Choose another --xpid"
            ) from error

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.set_rng_state(state["rng"])
        stats = state["stats"]
        self.step, self.num_updates = stats["step"], stats["num_updates"]
        if start.changed(state["flags"], self.flags):
            # Take the optimizer's moments only, and the new schedule at this step.
            advance(self.scheduler, self.step // steps_per_batch(self.flags))
            before = state["scheduler_state_dict"]["_last_lr"][0]
            tell_of_a_higher_rate(self.scheduler, before, self.flags)
            groups = self.optimizer.state_dict()["param_groups"]
            moments = {**state["optimizer_state_dict"], "param_groups": groups}
            new = {"optimizer": moments, "scheduler": self.scheduler.state_dict()}
            state = {**state, **{f"{k}_state_dict": x for k, x in new.items()}}
        for name, part in self.parts.items():
            part.load_state_dict(state[f"{name}_state_dict"])
        self.counters.load_state_dict(stats)
        if self.mixer:
            self.mixer.replayed_steps = stats["replayed_steps"]

    @property
    def progress(self) -> float:
        """The share of the run that has been learned from, from 0 to 1."""
        return min(1.0, self.step / self.flags.total_steps)


def model_loss(
    model: Any, batch: dict[str, Nested], state: State, flags: Flags, progress: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Runs the model over a batch; returns the loss and columns, see impala_loss."""
    outputs, _ = model(batch, state)
    arguments = flags, model.auxiliary_losses, progress
    return impala_loss(batch, outputs, model.distribution, *arguments)


class Update(NamedTuple):
    """What was learned from a batch. A GPU may still be working on it."""

    finish: Callable[[], dict[str, Any]]  # waits; returns columns, or raises: see learn
    weights: dict[str, torch.Tensor]  # the model's state dict; of a GPU, a copy
    policy_version: int  # number of updates of these weights
    inputs: Any  # whose memory the GPU still reads


def update(
    learner: Learner, batch: dict[str, Nested], initial_state: State
) -> Callable[[], dict[str, Any]]:
    """One step of the optimizer.

    Returns:
      A function that waits for a GPU, and returns columns about the loss and the
      gradient. It raises FloatingPointError if they or the new weights are not finite.
      On the CPU `update` itself raises: for the loss and the gradient, before it
      changes the model.
    """
    flags, model = learner.flags, learner.model
    progress: Any = learner.progress
    if flags.compile:  # whose code would have a float as a constant
        progress = torch.full((), progress, device=learner.device)
    loss, columns = learner.loss(model, batch, initial_state, flags, progress)
    learner.optimizer.zero_grad()
    loss.backward()
    ranks.add_gradients(model.parameters())
    grad_norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), flags.grad_norm_clipping
    )
    numbers = devices.fetch(join_columns(columns, {"grad_norm": grad_norm}))
    step = learner.step
    if not learner.is_ahead:
        check_loss(spread(numbers()), batch, flags, step, in_turn=True)
    learning_rate = float(learner.scheduler.get_last_lr()[0])
    learner.optimizer.step()
    total = devices.fetch({"weights": sum_of_weights(model)})

    def check() -> dict[str, Any]:
        try:
            found = spread(numbers())
            check_loss(found, batch, flags, step, in_turn=False)
            check_weights(total()["weights"], learning_rate, flags, step)
        except FloatingPointError:
            learner.diverged = True
            raise
        return found

    if not learner.is_ahead:
        check()
    learner.num_updates += 1
    return check


def learn(learner: Learner, batch: dict[str, Nested], initial_state: State) -> Update:
    """Learns from one batch [T + 1, B, ...]; does not wait for a GPU.

    initial_state: tensors [layers, B, ...], the recurrent state before row 0.

    The batch is used for flags.updates_per_batch updates, each from one of
    flags.minibatches parts of it. V-trace corrects for the change of the policy since
    the first. The columns about the loss are those of the last update.

    LASER (Schmitt et al. 2019) adds replayed columns to the batch. Until the replay has
    learn_start steps, it only stores the batch and adds it to the running moments.

    Raises, with a GPU in the finish() of what it returns:
      FloatingPointError: the loss, the gradient or the new weights are not finite. On
        the CPU the model is unchanged, unless it is the weights.
    """
    flags, mixer, model = learner.flags, learner.mixer, learner.model
    known: dict[str, Any] = {"learning_rate": learner.scheduler.get_last_lr()[0]}
    # With a replay: once all ranks are.
    ready = not ranks.highest(not mixer.add(batch, learner.step)) if mixer else True
    explored: Callable[[], dict[str, Any]] = dict  # columns of a method: none
    checks = []
    model.update_moments(batch, initial_state)
    if ready:
        rows, state = batch, initial_state
        if mixer:
            rows, state = mixer.mix(rows, state)
        if flags.rollouts == "episode":
            rows, state = rollout.cut_at_episodes(rows, state)
        if learner.explorer:
            rows, explored = learner.explorer.explore(rows)
        for _ in range(flags.updates_per_batch // flags.minibatches):
            for part in rollout.minibatches(rows, state, flags.minibatches):
                checks.append(update(learner, *part))
        if mixer:
            mixer.carry_states(model)
    advance(learner.scheduler, 1)
    weights = model.state_dict()
    if learner.is_ahead:  # a copy, made before `counted` has arrived
        weights = {name: x.clone() for name, x in weights.items()}
    counted = devices.fetch({name: ranks.joined(batch[name], 1) for name in COUNTED})
    learner.step += batch["done"][1:].numel() * ranks.size()
    # The lag counts up to the weights before the last update.
    step, newest = learner.step, learner.num_updates - ready
    known |= mixer.columns(step) if mixer else {}

    def finish() -> dict[str, Any]:
        scalars: dict[str, Any] = {}  # of the last update
        try:
            method = explored()
            for check in checks:
                scalars |= check()
        except FloatingPointError:  # of a GPU, whose next updates have begun
            learner.diverged = True
            raise
        columns = count_batch(learner, counted(), step, newest)
        return spread(join_columns(columns, known, method, scalars))

    return Update(finish, weights, learner.num_updates, (batch, initial_state))


def count_batch(
    learner: Learner, batch: dict[str, torch.Tensor], step: int, newest: int
) -> dict[str, Any]:
    """Counts what a batch contains. Returns columns for logs.csv.

    Args:
      batch: the fields COUNTED [T + 1, B], of all ranks, in the CPU's memory.
      step, newest: see Counters.add.
    """
    return {
        "step": step,
        "frames": step * learner.env_spec.frames_per_step,
        **learner.counters.add(batch, step, newest),
        "env_warnings": batch["env_warnings"][1:].sum(),
    }
