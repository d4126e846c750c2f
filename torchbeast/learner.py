"""Learning: the loss and one update, in both variants.

Read it top to bottom: rewards_and_discounts, impala_loss, Learner, update, learn.
V-trace and the losses of policy and values are in core/vtrace.py, the model in
model.py, the optimizer and its schedule in optimizer.py.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from torchbeast.base import devices, ranks
from torchbeast.base.errors import CheckpointError
from torchbeast.base.named import check_call, find_named
from torchbeast.base.nested import Nested
from torchbeast.core import means, rollout, vtrace
from torchbeast.core.acting import row_spec
from torchbeast.core.columns import join_columns, spread
from torchbeast.core.counters import Counters
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.finite import check_finite
from torchbeast.core.means import effective_share, mean
from torchbeast.core.rollout import State
from torchbeast.flags import Flags
from torchbeast.model import make_model
from torchbeast.optimizer import advance, make_optimizer
from torchbeast.runs import checkpoint, flagset

if TYPE_CHECKING:
    from torchbeast.local.env_spec import EnvSpec


def rewards_and_discounts(
    batch: dict[str, Any], outputs: dict[str, torch.Tensor], flags: Flags
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and discounts of the T steps, for V-trace: [T, B] float32 each.

    With K value heads [T, B, K]: each has a reward and a discount of its own. If
    outputs has `reward` (--normalize_rewards), it replaces the batch's, unclipped.
    """
    rewards, done = outputs.get("reward", batch["reward"])[1:], batch["done"][1:]
    if flags.reward_clipping == "abs_one" and "reward" not in outputs:
        rewards = rewards.clamp(-1, 1)
    # If an episode was truncated, bootstrap from the value of its last observation.
    rewards = rewards + flags.discounting * batch["truncation_value"][1:]
    discounts = flags.discounting * (~done).float()
    if "intrinsic_discount" in batch:  # --explorer, with a value head
        rewards = torch.stack([rewards, batch["intrinsic_reward"][1:]], -1)
        discounts = torch.stack([discounts, batch["intrinsic_discount"][1:]], -1)
    elif "intrinsic_reward" in batch:
        rewards = rewards + batch["intrinsic_reward"][1:]
    return rewards, discounts


def impala_loss(
    batch: dict[str, Any],
    outputs: dict[str, torch.Tensor],
    valid: torch.Tensor,
    distribution: ActionDistribution,
    flags: Flags,
    progress: float = 0.0,
    auxiliary_losses: Callable[..., Mapping[str, Any]] = lambda *_: {},
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The IMPALA loss, summed over time and batch (Espeholt et al. 2018, section 4.2).

    --loss MODULE:FUNCTION[JSON] names a function that replaces it. It gets the first
    six arguments by position, and those of the JSON object by name.

    Args:
      batch: rollouts [T + 1, B, ...], see torchbeast/core/rollout.py.
      outputs: of the model for them: policy_logits [T + 1, B, P], baseline [T + 1, B]
        or of K value heads [T + 1, B, K], float32. Their advantages are added.
      valid: [T, B] bool, the steps that count.
      distribution: of the actions, given logits.
      flags: of the run.
      progress: the share of the run before this update, from 0 to 1. To anneal a
        coefficient, multiply it by 1 - progress.
      auxiliary_losses: see Net.auxiliary_losses.

    Returns:
      Losses by name: tensors, sums over the steps that count, or numbers. The learner
      adds them up. And columns for logs.csv: mean(x, valid), numbers, None or vectors.
    """
    # Row t has observation t and the action for it, row t + 1 the action's reward and
    # whether the episode ended. The baseline of row T is the bootstrap value.
    actions = batch["action"][:-1]
    behavior_logits = batch["policy_logits"][:-1]
    target_logits = outputs["policy_logits"][:-1]
    values, bootstrap_value = outputs["baseline"][:-1], outputs["baseline"][-1]
    rewards, discounts = rewards_and_discounts(batch, outputs, flags)

    log_probs = distribution.log_prob(target_logits, actions)  # [T, B]
    log_rhos = (log_probs - distribution.log_prob(behavior_logits, actions)).detach()
    rhos = log_rhos.exp()
    steps = log_rhos, discounts, rewards, values, bootstrap_value
    clips = flags.clip_rho, flags.clip_pg_rho, flags.clip_c
    targets = vtrace.from_importance_weights(*steps, *clips, flags.trace_decay, valid)
    # Steps that don't count have advantage 0 and value error 0.
    advantages = targets.pg_advantages
    if advantages.dim() == 3:  # one per value head
        advantages = advantages.sum(-1)
    if flags.normalize_advantages:
        weights = rhos.clamp(max=flags.clip_pg_rho).masked_fill(~valid, 0)
        advantages = means.normalize(advantages, weights, valid)
    pg_loss, clipped = vtrace.policy_loss(log_probs, rhos, advantages, flags.clip_ratio)
    # LASER has no entropy bonus for replayed steps.
    online = rollout.not_replayed(batch, valid)
    entropy = distribution.entropy(target_logits) * online
    entropy_cost = flags.entropy_cost
    if flags.final_entropy_cost is not None:
        entropy_cost += (flags.final_entropy_cost - entropy_cost) * progress
    # Each loss is added to the total and logged.
    losses = {
        "pg_loss": pg_loss,
        "baseline_loss": flags.baseline_cost * vtrace.value_loss(values, targets.vs),
        "entropy_loss": -entropy_cost * entropy.sum(),
    }
    auxiliary = auxiliary_losses(batch, outputs, targets, valid, flags, progress)
    bounded = log_rhos.clamp(-30, 30)  # so that squares stay in float32's range
    columns = {
        "entropy": mean(entropy, online),  # nats per step
        "mean_value": mean(values, valid),
        "frac_rho_above_1": mean(log_rhos > 0, valid),
        "frac_clipped": mean(clipped, valid),
        "ess": effective_share(bounded.exp(), valid),
        # KL(μ ‖ π) in nats, by ρ - 1 - log ρ (Schulman 2020, "k3").
        "behavior_kl": mean(bounded.expm1() - bounded, valid),
    }
    return join_columns(losses, auxiliary), columns


def make_loss(flags: Flags, model: Any) -> Callable[..., Any]:
    """impala_loss, or the function that --loss names. Raises UserError."""
    if not flags.loss:
        return functools.partial(impala_loss, auxiliary_losses=model.auxiliary_losses)
    function, arguments = find_named("--loss", flags.loss)
    check_call(f"--loss {flags.loss}", function, *[None] * 6, **arguments)
    return functools.partial(function, **arguments)


class Learner:
    """Model, optimizer, schedule and counters. Not thread-safe; see Run.updating."""

    def __init__(self, flags: Flags, env_spec: "EnvSpec") -> None:
        torch.manual_seed(flags.seed)
        self.flags, self.env_spec = flags, env_spec
        self.device = devices.learner_device(flags)
        # A GPU may still make an update while the next one is prepared.
        self.is_ahead = devices.works_ahead(self.device)
        spaces = env_spec.observation_space, env_spec.action_space
        self.model = make_model(flags, *spaces, self.device)
        self.weights = [*self.model.parameters()]  # buffers may hold masks of -inf
        self.steps_per_batch = flags.batch_size * flags.unroll_length * ranks.size()
        made = make_optimizer(self.model, flags, self.steps_per_batch)
        self.optimizer, self.scheduler = made
        # A checkpoint has the state of each: state_dict and load_state_dict.
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        self.row_spec = row_spec(self.model)
        self.explorer: Any = None
        self.mixer: Any = None
        if getattr(flags, "explorer", None):
            from torchbeast.extras.explorer.method import Explorer  # optional

            self.explorer = Explorer(flags, self.model, self.device)
            self.parts["explorer"] = self.explorer
        if getattr(flags, "replay_ratio", 0) > 0:
            from torchbeast.extras.replay.mixer import make_mixer  # optional

            self.mixer = make_mixer(self)
        self.loss = make_loss(flags, self.model)
        self.model_loss: Callable[..., Any] = model_loss
        if flags.compile:
            devices.check_compiler(flags.compile, self.device)
            self.model_loss = torch.compile(model_loss, mode=flags.compile)
        self.diverged = False  # the weights are not finite
        self.step = 0  # environment steps learned from
        self.num_updates = 0  # of the weights: the number of the newest policy
        self.counters = Counters(flags)

    def state_dict(self) -> dict[str, Any]:
        parts = {f"{k}_state_dict": x.state_dict() for k, x in self.parts.items()}
        stats = {"step": self.step, "num_updates": self.num_updates}
        stats |= self.counters.state_dict()
        stats["replayed_steps"] = self.mixer.replayed_steps if self.mixer else 0
        return {**parts, "rng": checkpoint.rng_state(), "stats": stats}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint; what does not fit raises an error, see Run."""
        checkpoint.check_fit(state["model_state_dict"], self.model)
        before = state["flags"]
        if (old := before["optimizer"]) != self.flags.optimizer:
            raise CheckpointError(f"the checkpoint needs --optimizer {old}")
        for name, off in {"replay_ratio": 0, "rollouts": "fixed"}.items():
            if before.get(name, off) != off and not hasattr(self.flags, name):
                raise CheckpointError(f"the part that has --{name} is deleted")
        checkpoint.set_rng_state(state["rng"])
        stats = state["stats"]
        self.step, self.num_updates = stats["step"], stats["num_updates"]
        if flagset.changed(state["flags"], self.flags):
            # Take the optimizer's moments only, and the new schedule at this step.
            advance(self.scheduler, self.step // self.steps_per_batch)
            groups = self.optimizer.state_dict()["param_groups"]
            moments = state["optimizer_state_dict"] | {"param_groups": groups}
            state = {**state, "optimizer_state_dict": moments}
            state["scheduler_state_dict"] = self.scheduler.state_dict()
        for name, part in self.parts.items():
            part.load_state_dict(state[f"{name}_state_dict"])
        self.counters.load_state_dict(stats)
        if self.mixer:
            self.mixer.replayed_steps = stats["replayed_steps"]


def model_loss(
    learner: Learner, batch: dict[str, Nested], state: State, progress: Any
) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """The total loss; sums over the batch by name, [] or [K]; columns."""
    model, flags = learner.model, learner.flags
    outputs, _ = model(batch, state)
    valid, columns = rollout.valid_steps(batch)[:-1], {}
    about = model.distribution, flags
    if "replayed" in batch:
        valid, columns = learner.mixer.reject(batch, outputs, valid, *about)
    found, more = learner.loss(batch, outputs, valid, *about, progress)
    losses = {k: torch.as_tensor(x, device=valid.device) for k, x in found.items()}
    total: Any = sum(x.sum() for x in losses.values())
    sums = {name: x.sum() if x.dim() > 1 else x for name, x in losses.items()}
    return total, join_columns({"total_loss": total}, sums), join_columns(more, columns)


class Update(NamedTuple):
    """What was learned from a batch. A GPU may still be working on it."""

    finish: Callable[[], dict[str, Any]]  # waits; returns columns, or raises: see learn
    weights: dict[str, torch.Tensor]  # the model's state dict; of a GPU, a copy
    policy_version: int  # number of updates of these weights
    inputs: Any  # whose memory the GPU still reads


def update(
    learner: Learner, batch: dict[str, Nested], initial_state: State, is_last: bool
) -> Callable[[], dict[str, Any]]:
    """One step of the optimizer. Returns a function that waits, and returns columns.

    It raises FloatingPointError if the loss, the gradient or the new weights are not
    finite. On the CPU `update` does, for loss and gradient before the model changes.
    """
    flags, step = learner.flags, learner.step
    progress: Any = min(1.0, step / flags.total_steps)
    if flags.compile:  # whose code would have a float as a constant
        progress = torch.full((), progress, device=learner.device)
    loss, sums, columns = learner.model_loss(learner, batch, initial_state, progress)
    learner.optimizer.zero_grad()
    loss.backward()
    ranks.add_gradients(learner.weights)
    grad_norm = clip_grad_norm_(learner.weights, flags.grad_norm_clipping)
    columns = join_columns(sums, columns, {"grad_norm": grad_norm})
    if not is_last:  # of its batch: nobody reads the others
        columns = {k: columns[k] for k in ("total_loss", "grad_norm")}
    fetched = means.fetch(columns, sums.keys() & columns.keys())
    numbers = functools.cache(lambda: spread(fetched()))
    if not learner.is_ahead:
        check_finite(numbers(), batch, flags, step)
    learner.optimizer.step()
    total = torch.stack([x.detach().sum() for x in learner.weights]).sum()
    of_weights = devices.fetch({"sum_of_weights": total})

    def check() -> dict[str, Any]:
        learner.diverged = True  # unless this passes
        check_finite(numbers() | of_weights(), batch, flags, step)
        learner.diverged = False
        return numbers()

    if not learner.is_ahead:
        check()
    learner.num_updates += 1
    return check


def learn(learner: Learner, batch: dict[str, Nested], initial_state: State) -> Update:
    """Learns from one batch [T + 1, B, ...]; does not wait for a GPU.

    It makes flags.updates_per_batch updates, each from one of flags.minibatches parts.
    The columns about the loss are of the last one. A replay adds columns to the batch;
    until it has enough, the batch is only stored.

    initial_state: tensors [layers, B, ...], the recurrent state before row 0.
    Raises FloatingPointError as `update` does, with a GPU in finish().
    """
    flags, mixer, model = learner.flags, learner.mixer, learner.model
    known: dict[str, Any] = {"learning_rate": learner.scheduler.get_last_lr()[0]}
    checks: list[Callable[[], dict[str, Any]]] = []
    ready = mixer.add(batch, learner.step) if mixer else True
    model.update_moments(batch, initial_state, ranks.joined)
    explored: Callable[[], dict[str, Any]] = dict  # columns of --explorer
    if ready:
        rows, state = batch, initial_state
        if flags.max_policy_lag is not None:
            old = learner.num_updates - batch["policy_version"] > flags.max_policy_lag
            rows = batch | {"valid": rollout.valid_steps(batch) & ~old}
        if mixer:
            rows, state = mixer.mix(rows, state)
        if getattr(flags, "rollouts", "fixed") == "episode":
            from torchbeast.extras.episodes import cut_at_episodes  # optional

            rows, state = cut_at_episodes(rows, state)
        if learner.explorer:
            rows, explored = learner.explorer.explore(rows)
        for _ in range(flags.updates_per_batch // flags.minibatches):
            for part in rollout.minibatches(rows, state, flags.minibatches):
                is_last = len(checks) == flags.updates_per_batch - 1
                checks.append(update(learner, *part, is_last))
        if mixer:
            mixer.carry_states(model)
    advance(learner.scheduler, 1)
    weights = model.state_dict()
    if learner.is_ahead:  # a copy, made before `counted` has arrived
        weights = {name: x.clone() for name, x in weights.items()}
    counted = devices.fetch({k: ranks.joined(batch[k], 1) for k in Counters.FIELDS})
    learner.step += batch["done"][1:].numel() * ranks.size()
    # The lag counts up to the weights before the last update.
    step, newest = learner.step, learner.num_updates - ready
    known |= mixer.columns(step) if mixer else {}

    def finish() -> dict[str, Any]:
        learner.diverged = True  # unless this passes
        method = explored()
        learner.diverged = False
        scalars: dict[str, Any] = {}  # of the last update
        for check in checks:
            scalars |= check()
        columns = count_batch(learner, counted(), step, newest)
        return join_columns(columns, known, method, scalars)

    return Update(finish, weights, learner.num_updates, (batch, initial_state))


def count_batch(
    learner: Learner, batch: dict[str, torch.Tensor], step: int, newest: int
) -> dict[str, Any]:
    """Columns for logs.csv about what a batch contains; see Counters.add."""
    return {
        "step": step,
        "frames": step * learner.env_spec.frames_per_step,
        **learner.counters.add(batch, step, newest),
    }
