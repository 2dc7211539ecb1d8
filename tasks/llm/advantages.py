"""How much better each member of a group did than the group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import ConfigError

Floats = NDArray[np.float64]


def _grpo(rewards: Floats, epsilon: float) -> Floats:
    centred = rewards - rewards.mean()
    deviation = rewards.std()
    # Equal rewards leave a deviation of rounding errors alone, which must not become advantages of one.
    if deviation <= 1e-12 * max(1.0, float(np.abs(rewards).max())):
        return np.zeros_like(rewards)
    scaled: Floats = centred / (deviation + epsilon)
    return scaled


def _mean(rewards: Floats, epsilon: float) -> Floats:
    centred: Floats = rewards - rewards.mean()
    return centred


def _rloo(rewards: Floats, epsilon: float) -> Floats:
    count = len(rewards)
    return np.zeros_like(rewards) if count == 1 else _mean(rewards, epsilon) * (count / (count - 1))


def _raw(rewards: Floats, epsilon: float) -> Floats:
    return rewards.copy()


_KINDS: dict[str, Callable[[Floats, float], Floats]] = {
    "grpo": _grpo,
    "mean": _mean,
    "rloo": _rloo,
    "leave_one_out": _rloo,
    "reward": _raw,
}


def advantages(rewards: ArrayLike, kind: str = "grpo", *, epsilon: float = 0.0) -> Floats:
    """Return the advantage of each member of one group.

    With r the rewards [n] of the members that finished, and n their number, not that of the members that were begun:

    ``grpo``: ``(r - mean(r)) / (std(r) + epsilon)``, with the population's deviation; all 0 where the rewards are
    equal. Shao et al., *DeepSeekMath*, 2024, section 4.1.2 (outcome supervision).

    ``mean``: ``r - mean(r)``. Liu et al., *Understanding R1-Zero-Like Training*, 2025, section 3.2 ("Dr. GRPO").

    ``rloo``, or ``leave_one_out``: ``r[i] - mean(r without r[i])``, which is ``n / (n - 1) * (r - mean(r))``; 0 for a
    group of one, which has nothing to be compared with. Ahmadian et al., *Back to Basics*, 2024, section 2.2;
    Kool et al., *Buy 4 REINFORCE Samples*, 2019.

    ``reward``: ``r`` as it is.

    Args:
        rewards: [n], finite; computed in float64.
        kind: one of these.
        epsilon: not negative; some trainers use 1e-4 or 1e-6, the paper none.

    Raises:
        ConfigError: the rewards are no row of finite numbers, or there is no such kind.
    """
    found = np.asarray(rewards, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ConfigError.of("rewards", rewards, "finite numbers [n] are needed, those of one group")
    if kind not in _KINDS:
        raise ConfigError.of("kind", kind, f"one of {', '.join(_KINDS)} is needed")
    if not 0 <= epsilon < float("inf"):
        raise ConfigError.of("epsilon", epsilon, "a number of at least 0 is needed")
    return _KINDS[kind](found, epsilon) if len(found) else found
