"""Staleness and admission: pure arithmetic.

A rollout whose oldest weights have version ``v``, consumed at step ``s``, is ``(s - 1) - v`` steps stale: ``s - 1``
steps had been trained when it was used. It is allowed while that is at most ``max_staleness``, so ``floor`` is the
oldest version that the batch of a step may hold. Versions newer than what has been trained count as not stale: they
come from weights that were published before the step was acked.

Admission paces the start of work so that it is not born too old. With batches of ``B`` groups, ``t`` steps trained and
weights of version ``v`` in use, groups may be outstanding (claimed, not yet trained or dropped) up to::

    (max_staleness + 1 - (t - v)) * B

which is the bound of AReaL (Fu et al. 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for
Language Reasoning", section 5.1) with what is outstanding counted instead of what was ever accepted: so it is the same
after a resume. Admission alone bounds nothing where groups overtake each other, so the bound is checked again where a
batch is made.
"""

from __future__ import annotations


def staleness(step: int, oldest: int) -> int:
    """Return how stale a rollout is in the batch of ``step``; never negative."""
    return max(0, step - 1 - oldest)


def floor(step: int, max_staleness: int | None) -> int | None:
    """Return the oldest version allowed in the batch of ``step``; None: any."""
    return None if max_staleness is None else step - 1 - max_staleness


def admissible(
    *, max_staleness: int | None, batch_groups: int, trained: int, version: int, capacity: int | None
) -> int | None:
    """Return how many groups may be outstanding in an asynchronous run; None: as many as can run at once.

    Args:
        max_staleness: the bound in steps, or None.
        batch_groups: groups of a batch; 0 while nobody has asked for one.
        trained: the last step trained.
        version: version of the weights in use.
        capacity: the most groups to hold, or None for what staleness allows, else two batches.
    """
    if batch_groups <= 0:
        return capacity if max_staleness is None else 0
    if max_staleness is None:
        return 2 * batch_groups if capacity is None else capacity
    allowed = max(0, max_staleness + 1 - max(0, trained - version)) * batch_groups
    # Weights published before their step is acked let the next batch start at once.
    if version > trained:
        allowed += (version - trained) * batch_groups
    return allowed if capacity is None else min(allowed, capacity)
