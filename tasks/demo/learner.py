"""An actor-critic for CartPole-v1 that learns from whole, slightly stale episodes.

- `Learner.update(episodes, step)` depends on weights, optimizer state, config, step and episodes in their
  order, on nothing else: shuffles and learning rate derive from seed and step. So there is no random state to
  save, and a resumed run repeats its steps bit for bit, on the same machine with as many threads.
- No global random state is read or moved: not torch's, numpy's or Python's.
- Acting takes `Weights` alone, which later updates do not change.
- It knows nothing of where episodes come from or how weights travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["ActorCritic", "Episode", "Learner", "LearnerConfig", "Weights", "evaluate"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """One whole episode of T >= 1 steps, as it was acted. The arrays are read, never written or kept."""

    obs: NDArray[np.float32]
    """[T, 4] float32: what the policy saw before each action."""
    action: NDArray[np.int64]
    """[T] int64, each 0 or 1."""
    logprob: NDArray[np.float32]
    """[T] float32: log mu(action | obs) under the weights that acted, taken when they acted."""
    reward: NDArray[np.float32]
    """[T] float32."""
    terminated: bool
    """The pole fell or the cart left: nothing follows, whatever `truncated` says."""
    truncated: bool
    """The time limit cut it off: the value of `final_obs` stands for what would have followed."""
    final_obs: NDArray[np.float32]
    """[4] float32: what the environment showed after the last action."""

    def __post_init__(self) -> None:
        # A [T, 1] column would broadcast against [T] without a word, and train on nonsense.
        got = [np.shape(x) for x in (self.obs, self.action, self.logprob, self.reward, self.final_obs)]
        if (t := len(self.obs)) == 0 or got != [(t, 4), (t,), (t,), (t,), (4,)]:
            raise ValueError(f"expected T >= 1 and shapes [T, 4], [T], [T], [T] and [4], got {got}")
        if not (self.terminated or self.truncated):
            raise ValueError("expected a whole episode, terminated or truncated, got one that still runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """What shapes learning. The defaults were tuned together, for a staleness of 0 to 2 trainer steps."""

    seed: int = 0
    """Seeds the first weights and, with the step, each shuffle."""
    batch_episodes: int = 16
    """Episodes of a trainer step that the other defaults suit; `update` takes any number."""
    planned_steps: int = 100
    """The learning rate falls linearly from step 1 to here. The other defaults suit 80 to 150."""
    learning_rate: float = 2e-4
    """Adam's step size at step 1."""
    final_lr_fraction: float = 0.2
    """Share of `learning_rate` that is left at `planned_steps`, and after."""
    hidden: int = 64
    """Width of both hidden layers, of the policy and of the value network."""
    gamma: float = 0.99
    """Discount of a reward per environment step, below 1."""
    lam: float = 0.98
    """Decay of the traces: 1 trusts the returns, 0 the value network."""
    clip: float = 0.05
    """How far a probability may move, as a share, before it yields no more gradient in this step."""
    entropy_weight: float = 0.01
    """Weight of the mean entropy, in nats, in the objective."""
    max_grad_norm: float = 0.5
    """Each network's gradient is scaled down to this norm."""
    epochs: int = 4
    """Passes over the batch in a trainer step."""
    minibatches: int = 4
    """Gradient steps in a pass: a number, not a size, so that short episodes weigh as much as long ones."""

    def __post_init__(self) -> None:
        counts = (self.batch_episodes, self.planned_steps, self.hidden, self.epochs, self.minibatches)
        if min(counts) < 1 or not 0.0 <= self.gamma < 1.0:
            raise ValueError(f"expected every count to be 1 or more, and 0 <= gamma < 1, got {self}")

    def learning_rate_at(self, step: int) -> float:
        """Adam's step size in trainer step `step`, from 1."""
        progress = min(1.0, (step - 1) / max(1, self.planned_steps - 1))
        return self.learning_rate * (1.0 - progress * (1.0 - self.final_lr_fraction))


class ActorCritic(torch.nn.Module):
    """A policy and a value network that share nothing: 4 -> hidden -> hidden -> 2 or 1, tanh between.

    Both that and the nearly uniform first policy are advice of Andrychowicz et al. 2021, arXiv:2006.05990.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.policy = _mlp(hidden, 2, 0.01, generator)
        self.value = _mlp(hidden, 1, 1.0, generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Map obs [N, 4] to policy logits [N, 2] and values [N], all float32.

        Values count rewards of 1 - gamma, so that a pole that never falls is worth 1.
        """
        return self.policy(obs), self.value(obs).squeeze(-1)


def _mlp(hidden: int, out: int, out_gain: float, generator: torch.Generator) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for size, width, gain in ((4, hidden, 2.0**0.5), (hidden, hidden, 2.0**0.5), (hidden, out, out_gain)):
        # Built without memory first: otherwise it would fill itself from torch's global generator.
        layer = torch.nn.Linear(size, width, device="meta").to_empty(device="cpu")
        torch.nn.init.orthogonal_(layer.weight, gain, generator=generator)
        torch.nn.init.zeros_(layer.bias)
        layers += [layer, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


class Weights:
    """An immutable numpy copy of a policy: all that an actor needs, and safe to share between threads."""

    __slots__ = ("_b1", "_b2", "_b3", "_w1", "_w2", "_w3")

    def __init__(self, model: ActorCritic) -> None:
        arrays = [parameter.detach().numpy().copy() for parameter in model.policy.parameters()]
        self._w1, self._b1, self._w2, self._b2, w3, b3 = arrays
        # Of two logits only the difference matters, the log-odds of action 1: one row is enough.
        self._w3, self._b3 = w3[1] - w3[0], b3[1] - b3[0]
        for array in (*arrays, self._w3):
            array.flags.writeable = False

    def act(self, obs: NDArray[np.float32], rng: np.random.Generator) -> tuple[int, float]:
        """Sample an action for obs [4] float32, with one draw of `rng`; return it and its log-probability."""
        hidden = np.tanh(self._w1.dot(obs) + self._b1)
        hidden = np.tanh(self._w2.dot(hidden) + self._b2)
        odds = float(self._w3.dot(hidden) + self._b3)
        # log sigmoid(odds), in the form that cannot overflow.
        logprob = min(odds, 0.0) - math.log1p(math.exp(-abs(odds)))
        return (1, logprob) if rng.random() < math.exp(logprob) else (0, logprob - odds)

    def greedy(self, obs: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the likelier action, [N] int64, for each row of obs [N, 4] float32."""
        hidden = np.tanh(obs @ self._w1.T + self._b1)
        hidden = np.tanh(hidden @ self._w2.T + self._b2)
        return np.asarray(hidden @ self._w3 + self._b3 > 0.0, dtype=np.int64)


class _Samples(NamedTuple):
    """A batch as N steps in a row: obs [N, 4] float32, action [N] int64, the rest [N] float32."""

    obs: Tensor
    action: Tensor
    logprob: Tensor  # log pi(action | obs), under the weights before the trainer step
    weight: Tensor  # min(1, pi/mu)
    advantage: Tensor
    target: Tensor


class Learner:
    """Decoupled PPO on V-trace advantages; a trainer step is `epochs` times `minibatches` gradient steps.

    With mu the stale policy that acted, pi the policy before the trainer step and q the policy in the making,
    the mean of this is maximised:

        min(1, pi/mu) min(q/pi A, clip(q/pi, 1 - clip, 1 + clip) A).

    The clip (Schulman et al. 2017, arXiv:1707.06347, eq. 7) limits the step, pi/mu corrects for staleness.
    Both in one ratio q/mu would slow learning down, the more so the staler they are. The split is Hilton
    et al.'s, 2021, arXiv:2110.00641; truncating pi/mu, to bound the variance, V-trace's: see `_advantages`.

    `model` and `optimizer` are public: with the config, their `state_dict`s are all of a learner's state.
    """

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self.model = ActorCritic(config.hidden, config.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), eps=1e-5, fused=True)

    def weights(self) -> Weights:
        """Copy the policy as it is now."""
        return Weights(self.model)

    def update(self, episodes: Sequence[Episode], step: int) -> dict[str, float]:
        """Take trainer step `step`, from 1, on a batch of whole episodes, and return its figures.

        Of the batch: `mean_return`, `env_steps`, and `staleness_kl`, an estimate of KL(mu || pi) in nats.
        Means over the gradient steps: `policy_loss`, `value_loss`, `entropy` and `clip_fraction`.
        """
        if not episodes or step < 1:
            raise ValueError(f"expected episodes and a step >= 1, got {len(episodes)} and step {step}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        samples, staleness_kl = self._judge(episodes)
        # Hashed, since seed + step would give neighbouring seeds the same shuffles.
        hashed = np.random.SeedSequence((self.config.seed, step)).generate_state(1)
        generator = torch.Generator().manual_seed(int(hashed[0]))
        count = len(samples.obs)
        figures = [
            self._gradient_step(_Samples(*(column[chosen] for column in samples)))
            for _ in range(self.config.epochs)
            for chosen in torch.randperm(count, generator=generator).tensor_split(self.config.minibatches)
            if len(chosen)  # empty ones, of a batch with fewer steps than minibatches, would yield nan
        ]
        names = ("policy_loss", "value_loss", "entropy", "clip_fraction")
        return {
            "mean_return": float(np.mean([episode.reward.sum() for episode in episodes])),
            "env_steps": float(count),
            "staleness_kl": staleness_kl,
            **dict(zip(names, torch.stack(figures).mean(0).tolist(), strict=True)),
        }

    def _judge(self, episodes: Sequence[Episode]) -> tuple[_Samples, float]:
        """Put the episodes in a row, and judge them by the weights before the step."""
        obs = torch.from_numpy(np.concatenate([episode.obs for episode in episodes]))
        action = torch.from_numpy(np.concatenate([episode.action for episode in episodes]))
        mu = torch.from_numpy(np.concatenate([episode.logprob for episode in episodes]))
        final_obs = torch.from_numpy(np.stack([episode.final_obs for episode in episodes]))
        with torch.no_grad():
            logits, values = self.model(obs)
            final_values = self.model(final_obs)[1]
            pi = _taken(functional.log_softmax(logits, dim=-1), action)
        weight = (pi - mu).exp().clamp(max=1.0)
        pairs: list[tuple[float, float]] = []
        for episode, last in zip(episodes, final_values.tolist(), strict=True):
            span = slice(len(pairs), len(pairs) + len(episode.obs))
            known = [*values[span].tolist(), 0.0 if episode.terminated else last]
            rewards = ((1.0 - self.config.gamma) * episode.reward).tolist()
            pairs += _advantages(rewards, known, weight[span].tolist(), self.config.gamma, self.config.lam)
        advantage, target = torch.tensor(pairs).unbind(1)
        # Advantages shrink as the policy improves, and the entropy's weight does not.
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        return _Samples(obs, action, pi, weight, advantage, target), (mu - pi).mean().item()

    def _gradient_step(self, samples: _Samples) -> Tensor:
        """Move the weights once; return policy loss, value loss, entropy and the share clipped, [4]."""
        logits, values = self.model(samples.obs)
        log_probs = functional.log_softmax(logits, dim=-1)
        ratio = (_taken(log_probs, samples.action) - samples.logprob).exp()
        clipped = ratio.clamp(1.0 - self.config.clip, 1.0 + self.config.clip)
        gain = torch.minimum(ratio * samples.advantage, clipped * samples.advantage)
        policy_loss = -(samples.weight * gain).mean()
        value_loss = functional.mse_loss(values, samples.target)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        # The networks share nothing, so their losses need no weights, and their gradients each a norm.
        loss = policy_loss - self.config.entropy_weight * entropy + value_loss
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for network in (self.model.policy, self.model.value):
            torch.nn.utils.clip_grad_norm_(network.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return torch.stack([policy_loss, value_loss, entropy, (ratio != clipped).float().mean()]).detach()


def _taken(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _advantages(
    rewards: Sequence[float], values: Sequence[float], weights: Sequence[float], gamma: float, lam: float
) -> list[tuple[float, float]]:
    """Return each step's advantage A_t and value target, from T rewards and weights and T + 1 values.

    With w_t = min(1, pi/mu), V_T the value of what follows the last step, and A_T = 0:

        A_t = r_t + gamma V_{t+1} - V_t + gamma lam w_{t+1} A_{t+1}        target_t = V_t + w_t A_t

    Targets are V-trace's, c_t = lam w_t (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and remark 2). A_t has
    no w_t of its own step: the objective supplies it. If all episodes are fresh, w is 1 and A GAE(gamma, lam)
    (Schulman et al. 2016, arXiv:1506.02438, eq. 16).
    """
    pairs, carried = [(0.0, 0.0)] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * carried
        carried = weights[t] * advantage
        pairs[t] = (advantage, values[t] + carried)
    return pairs


def evaluate(weights: Weights, episodes: int = 100, *, seed: int) -> float:
    """Return the mean return of greedy CartPole-v1 episodes, each in an environment seeded from `seed`."""
    seeds = np.random.SeedSequence(seed).generate_state(episodes).tolist()
    running = [(env, env.reset(seed=s)[0]) for s in seeds for env in [gymnasium.make("CartPole-v1")]]
    total = 0.0
    while running:  # all advance together, so that one call of the policy serves all
        actions = weights.greedy(np.stack([obs for _, obs in running])).tolist()
        moved = [(env, env.step(action)) for (env, _), action in zip(running, actions, strict=True)]
        total += sum(float(reward) for _, (_, reward, *_) in moved)
        running = [(env, obs) for env, (obs, _, fell, timed_out, _) in moved if not (fell or timed_out)]
    return total / episodes
