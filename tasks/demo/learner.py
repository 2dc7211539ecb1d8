"""An actor-critic for CartPole-v1 that learns from whole, slightly stale episodes.

What it guarantees:

- `Learner.update(episodes, step)` is a pure function of (weights, optimizer state, episodes in order, config, step):
  the shuffle and the learning rate both derive from (seed, step), so there is no random state to save, and a run
  resumed from (weights, optimizer state) repeats the lost steps bit for bit on one machine and thread count.
- Nothing here reads or moves a global random state: torch's, numpy's or Python's.
- Acting needs `Weights` alone: numpy arrays that no later training step can change.

It knows nothing of where episodes come from, how they wait, or how weights travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["ActorCritic", "Episode", "Learner", "LearnerConfig", "Weights", "evaluate"]

OBS_SIZE = 4
NUM_ACTIONS = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """One whole episode of T >= 1 steps, as it was acted."""

    obs: NDArray[np.float32]
    """[T, 4] float32: what the policy saw before each action."""
    action: NDArray[np.int64]
    """[T] int64, each 0 or 1."""
    logprob: NDArray[np.float32]
    """[T] float32: log mu(action | obs) of the weights that acted, taken when they acted."""
    reward: NDArray[np.float32]
    """[T] float32."""
    terminated: bool
    """The pole fell or the cart left: nothing follows, so the last step's value target is its reward alone."""
    truncated: bool
    """The time limit cut it off: the value of `final_obs` stands for what would have followed."""
    final_obs: NDArray[np.float32]
    """[4] float32: what the environment showed after the last action."""

    def __post_init__(self) -> None:
        length = len(self.obs)
        expected = {
            "obs": (length, OBS_SIZE),
            "action": (length,),
            "logprob": (length,),
            "reward": (length,),
            "final_obs": (OBS_SIZE,),
        }
        if length == 0:
            raise ValueError("an episode needs at least one step, got none")
        for name, shape in expected.items():
            if (got := np.shape(getattr(self, name))) != shape:
                raise ValueError(f"episode.{name}: expected shape {shape}, got {got}")
        if not (self.terminated or self.truncated):
            raise ValueError("expected a whole episode (terminated or truncated), got one still running")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """Everything that shapes learning. The defaults were tuned together; see `batch_episodes`, `planned_steps`."""

    seed: int = 0
    """Seeds the initial weights and, with the step number, every shuffle."""
    batch_episodes: int = 16
    """Episodes per trainer step that the defaults were tuned for; `update` takes any number."""
    planned_steps: int = 100
    """The learning rate falls linearly from `learning_rate` at step 1 to `final_lr_fraction` of it here."""
    hidden: int = 64
    """Width of both hidden layers, in the policy and in the value network."""
    learning_rate: float = 3e-4
    """Adam's step size at step 1."""
    final_lr_fraction: float = 0.2
    """Share of `learning_rate` left at `planned_steps`, and kept from there on."""
    gamma: float = 0.99
    """Discount per environment step."""
    lam: float = 0.98
    """Decay of the traces: 1 trusts returns, 0 trusts the critic."""
    clip: float = 0.1
    """Half-width of the interval around 1 in which a probability ratio still yields a gradient."""
    entropy_weight: float = 0.01
    """Weight of the policy's mean entropy, in nats, in the objective."""
    max_grad_norm: float = 0.5
    """Gradients of each minibatch are scaled down to this global norm."""
    epochs: int = 4
    """Passes over the batch in one trainer step."""
    minibatches: int = 4
    """Gradient steps per pass: a count, not a size, so that a step moves as far on short episodes as on long."""

    def __post_init__(self) -> None:
        for name in ("batch_episodes", "planned_steps", "hidden", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"LearnerConfig.{name}: expected >= 1, got {getattr(self, name)}")
        if not 0.0 <= self.gamma < 1.0:
            raise ValueError(f"LearnerConfig.gamma: expected 0 <= gamma < 1, got {self.gamma}")
        for name in ("lam", "final_lr_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"LearnerConfig.{name}: expected 0 <= x <= 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"LearnerConfig.{name}: expected > 0, got {getattr(self, name)}")

    def learning_rate_at(self, step: int) -> float:
        """Adam's step size in trainer step `step` (from 1)."""
        progress = min(1.0, (step - 1) / max(1, self.planned_steps - 1))
        return self.learning_rate * (1.0 - progress * (1.0 - self.final_lr_fraction))


def _mlp(hidden: int, out: int, out_gain: float, generator: torch.Generator) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    gains = (math.sqrt(2.0), math.sqrt(2.0), out_gain)
    for fan_in, fan_out, gain in zip((OBS_SIZE, hidden, hidden), (hidden, hidden, out), gains, strict=True):
        # Linear's own initialisation would draw from torch's global generator.
        linear = torch.nn.utils.skip_init(torch.nn.Linear, fan_in, fan_out)
        torch.nn.init.orthogonal_(linear.weight, gain, generator=generator)
        torch.nn.init.zeros_(linear.bias)
        layers += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


class ActorCritic(torch.nn.Module):
    """Separate policy and value networks, 4 -> hidden -> hidden -> out, tanh between.

    Orthogonal initialisation with a nearly uniform first policy, after Andrychowicz et al. 2021, "What Matters for
    On-Policy Deep Actor-Critic Methods?" (arXiv:2006.05990), which also advises separate networks.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.policy = _mlp(hidden, NUM_ACTIONS, 0.01, generator)
        self.value = _mlp(hidden, 1, 1.0, generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Map obs [N, 4] float32 to policy logits [N, 2] and values [N], both float32.

        Values are in units of 1 / (1 - gamma) rewards, so that a pole which never falls is worth 1.
        """
        return self.policy(obs), self.value(obs).squeeze(-1)


class Weights:
    """An immutable numpy copy of a policy: what an actor needs, safe to share between threads.

    With two actions only the difference of their logits matters, so that is all the last layer keeps.
    """

    __slots__ = ("_b1", "_b2", "_b3", "_w1", "_w2", "_w3")

    def __init__(self, model: ActorCritic) -> None:
        first, second, last = (layer for layer in model.policy if isinstance(layer, torch.nn.Linear))
        self._w1, self._b1 = _frozen(first.weight), _frozen(first.bias)
        self._w2, self._b2 = _frozen(second.weight), _frozen(second.bias)
        self._w3, self._b3 = _frozen(last.weight[1] - last.weight[0]), float(_frozen(last.bias[1] - last.bias[0]))

    def act(self, obs: NDArray[np.float32], rng: np.random.Generator) -> tuple[int, float]:
        """Sample an action for obs [4] float32; return it and its log-probability. Draws one number from `rng`."""
        hidden = np.tanh(self._w1.dot(obs) + self._b1)
        hidden = np.tanh(self._w2.dot(hidden) + self._b2)
        preference = float(self._w3.dot(hidden)) + self._b3
        # log sigmoid(preference), in the form that cannot overflow.
        logprob_right = min(preference, 0.0) - math.log1p(math.exp(-abs(preference)))
        if rng.random() < math.exp(logprob_right):
            return 1, logprob_right
        return 0, logprob_right - preference

    def greedy(self, obs: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the likelier action, [N] int64, for each row of obs [N, 4] float32."""
        hidden = np.tanh(obs @ self._w1.T + self._b1)
        hidden = np.tanh(hidden @ self._w2.T + self._b2)
        return (hidden @ self._w3 + self._b3 > 0.0).astype(np.int64)


def _frozen(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().numpy().astype(np.float32, copy=True)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True)
class _Samples:
    """The batch, flattened to N environment steps: all [N] but obs [N, 4]."""

    obs: Tensor
    action: Tensor
    logprob: Tensor
    weight: Tensor
    advantage: Tensor
    target: Tensor


class Learner:
    """PPO's clipped objective on V-trace advantages, taken against the probabilities the episodes were acted with.

    The clip bounds how far a step moves from the policy that acted (Schulman et al. 2017, "Proximal Policy
    Optimization Algorithms", arXiv:1707.06347, eq. 7), here the stale one, so a sample whose ratio has already left
    the interval adds nothing. V-trace (Espeholt et al. 2018, "IMPALA", arXiv:1802.01561, eq. 1) makes the critic's
    targets those of the current policy; see `_advantages`.

    `model` and `optimizer` are public so that a checkpoint can hold their `state_dict`s: with the config, that is
    all of a learner's state.
    """

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self.model = ActorCritic(config.hidden, config.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)

    def weights(self) -> Weights:
        """Copy the policy as it is now."""
        return Weights(self.model)

    def update(self, episodes: Sequence[Episode], step: int) -> dict[str, float]:
        """Take trainer step `step` (from 1) on whole episodes, and return what to log.

        The metrics: `mean_return` and `env_steps` of the batch; `staleness_kl`, the estimate of KL(mu || pi) before the
        step; `clip_fraction`, `entropy`, `policy_loss` and `value_loss`, means over the step's minibatches.
        """
        if not episodes:
            raise ValueError("update needs at least one episode, got none")
        if step < 1:
            raise ValueError(f"trainer steps count from 1, got {step}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        samples, staleness_kl = self._prepare(episodes)
        generator = torch.Generator().manual_seed(_shuffle_seed(self.config.seed, step))
        count = len(samples.obs)
        logs = [
            self._minibatch(samples, index)
            for _ in range(self.config.epochs)
            for index in torch.randperm(count, generator=generator).tensor_split(self.config.minibatches)
            if len(index)
        ]
        policy_loss, value_loss, entropy, clip_fraction = torch.stack(logs).mean(0).tolist()
        return {
            "mean_return": float(np.mean([episode.reward.sum() for episode in episodes])),
            "env_steps": float(count),
            "staleness_kl": staleness_kl,
            "clip_fraction": clip_fraction,
            "entropy": entropy,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
        }

    def _prepare(self, episodes: Sequence[Episode]) -> tuple[_Samples, float]:
        """Flatten the batch and judge it with the weights as they are before the step."""
        obs = torch.from_numpy(np.concatenate([episode.obs for episode in episodes]))
        action = torch.from_numpy(np.concatenate([episode.action for episode in episodes]))
        logprob = torch.from_numpy(np.concatenate([episode.logprob for episode in episodes]))
        final_obs = torch.from_numpy(np.stack([episode.final_obs for episode in episodes]))
        with torch.no_grad():
            logits, value = self.model(obs)
            final_value = self.model(final_obs)[1]
            current = _taken(functional.log_softmax(logits, dim=-1), action)
            log_ratio = current - logprob
            weight = log_ratio.exp().clamp(max=1.0)
        advantages: list[float] = []
        targets: list[float] = []
        start = 0
        for episode, last in zip(episodes, final_value.tolist(), strict=True):
            span = slice(start, start := start + len(episode.obs))
            advantage, target = _advantages(
                reward=((1.0 - self.config.gamma) * episode.reward).tolist(),
                value=value[span].tolist(),
                weight=weight[span].tolist(),
                final_value=0.0 if episode.terminated else last,
                gamma=self.config.gamma,
                lam=self.config.lam,
            )
            advantages += advantage
            targets += target
        scaled = torch.tensor(advantages)
        scaled = (scaled - scaled.mean()) / (scaled.std(correction=0) + 1e-8)
        return _Samples(obs, action, current, weight, scaled, torch.tensor(targets)), -log_ratio.mean().item()

    def _minibatch(self, samples: _Samples, index: Tensor) -> Tensor:
        """Take one gradient step on the samples at `index`; return policy loss, value loss, entropy, clip fraction."""
        logits, value = self.model(samples.obs[index])
        log_probs = functional.log_softmax(logits, dim=-1)
        ratio = (_taken(log_probs, samples.action[index]) - samples.logprob[index]).exp()
        clipped = ratio.clamp(1.0 - self.config.clip, 1.0 + self.config.clip)
        advantage = samples.advantage[index]
        policy_loss = -(samples.weight[index] * torch.minimum(ratio * advantage, clipped * advantage)).mean()
        value_loss = functional.mse_loss(value, samples.target[index])
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        self.optimizer.zero_grad()
        # The networks share no weights, so the value loss needs no weight of its own.
        (policy_loss + value_loss - self.config.entropy_weight * entropy).backward()  # type: ignore[no-untyped-call]
        for network in (self.model.policy, self.model.value):
            torch.nn.utils.clip_grad_norm_(network.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        clip_fraction = (ratio != clipped).float().mean()
        return torch.stack([policy_loss, value_loss, entropy, clip_fraction]).detach()


def _taken(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _shuffle_seed(seed: int, step: int) -> int:
    # Hashed, so that no two (seed, step) near each other share a stream, as seed + step would.
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> 1)


def _advantages(
    *,
    reward: Sequence[float],
    value: Sequence[float],
    weight: Sequence[float],
    final_value: float,
    gamma: float,
    lam: float,
) -> tuple[list[float], list[float]]:
    """Advantages and value targets, T of each, of one episode of T steps.

    With delta_t = r_t + gamma V_{t+1} - V_t, rho_t = min(1, pi / mu), and V_T = `final_value`:

        A_t = delta_t + gamma lam rho_{t+1} A_{t+1},   A_T = 0,   target_t = V_t + rho_t A_t.

    The targets are V-trace's v_t with both truncation levels 1 and c_t = lam rho_t (Espeholt et al. 2018,
    arXiv:1802.01561, eq. 1 and remark 2). The advantage leaves out its own step's rho_t, which PPO's ratio supplies. On
    fresh episodes rho = 1 and A is GAE(gamma, lam) (Schulman et al. 2016, arXiv:1506.02438, eq. 16).
    """
    advantages = [0.0] * len(reward)
    targets = [0.0] * len(reward)
    carried, next_value = 0.0, final_value
    for t in reversed(range(len(reward))):
        advantages[t] = reward[t] + gamma * next_value - value[t] + gamma * lam * carried
        carried = weight[t] * advantages[t]
        targets[t] = value[t] + carried
        next_value = value[t]
    return advantages, targets


def evaluate(weights: Weights, *, episodes: int = 100, seed: int) -> float:
    """Play greedy CartPole-v1 episodes, one environment each, and return their mean return.

    Environments advance in lockstep so that the policy runs once per step for all that still go on; each is seeded
    by a hash of (seed, its index) and stops for good when it terminates or is truncated.
    """
    seeds = np.random.SeedSequence(seed).generate_state(episodes)
    envs = [gymnasium.make("CartPole-v1") for _ in range(episodes)]
    going = [(env, env.reset(seed=int(s))[0]) for env, s in zip(envs, seeds, strict=True)]
    total = 0.0
    while going:
        actions = weights.greedy(np.stack([obs for _, obs in going])).tolist()
        still_going = []
        for (env, _), action in zip(going, actions, strict=True):
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            if not (terminated or truncated):
                still_going.append((env, obs))
        going = still_going
    for env in envs:
        env.close()
    return total / episodes
