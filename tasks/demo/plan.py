"""The demo's numbers in one place. Nothing heavy is imported here."""

from __future__ import annotations

import math
from typing import Final

MARK: Final = 475.0
"""The mean return over the evaluation episodes at which CartPole-v1 counts as solved."""
EVALUATION_EPISODES: Final = 100
STEPS: Final = 80
"""Trainer steps at most; the learning rate falls over as many."""
BATCH: Final = 16
"""Rollouts of a trainer step."""
CONCURRENCY: Final = 16
"""Rollouts in flight at once."""
MAX_STALENESS: Final = 2
"""Trainer steps that may lie between the weights that made a rollout and the step that uses it."""
CAPACITY: Final = 40
"""Rollouts claimed and not yet trained: two batches and a half, so that batches are of one and two steps before."""
SAVE_EVERY: Final = 5
"""Trainer steps from one checkpoint to the next; after each of these steps the policy is evaluated too."""
KILL_AT: Final = 0.2
"""The share of the steps after which the training process is killed: about 0.4 of those that it takes to the mark."""


def kill_due(step: int, steps: int) -> bool:
    """Whether the training process is to be killed while it works on what follows ``step``.

    Never right after a save, so that there is something to repeat and to recover.
    """
    return step >= min(math.ceil(KILL_AT * steps), steps - 1) and step % SAVE_EVERY in (2, 3)


def is_over(step: int, steps: int, evaluation: float | None) -> bool:
    """Whether the run ends at ``step``: the mark is reached, or the steps are used up.

    However well it goes, the mark ends no run that is younger than this, so that the kill falls into work to be done.
    """
    young = step < 2 * KILL_AT * steps
    return step >= steps or (evaluation is not None and evaluation >= MARK and not young)
