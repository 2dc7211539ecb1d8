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
batch is made. Waiting closes the gap, where batches take the stalest first: see :func:`overdue`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def staleness(step: int, oldest: int) -> int:
    """Return how stale a rollout is in the batch of ``step``; never negative."""
    return max(0, step - 1 - oldest)


def floor(step: int, max_staleness: int | None) -> int | None:
    """Return the oldest version allowed in the batch of ``step``; None: any."""
    return None if max_staleness is None else step - 1 - max_staleness


def admissible(
    *,
    max_staleness: int | None,
    batch_groups: int,
    trained: int,
    version: int,
    capacity: int | None,
    oversample: float = 1.0,
) -> int | None:
    """Return how many groups may be outstanding in an asynchronous run; None: as many as can run at once.

    Args:
        max_staleness: the bound in steps, or None.
        batch_groups: groups of a batch; 0 while nobody has asked for one.
        trained: the last step trained.
        version: version of the weights in use.
        capacity: the most groups to hold, or None for what staleness allows, else two batches.
        oversample: how many may be begun for each that a batch needs; those beyond 1 come on top, unless the weights
            lag so far that nothing may start.
    """
    if batch_groups <= 0:
        return capacity if max_staleness is None else 0
    more = surplus(batch_groups, oversample)
    if max_staleness is None:
        return 2 * batch_groups + more if capacity is None else capacity
    allowed = max(0, max_staleness + 1 - max(0, trained - version)) * batch_groups
    # Weights published before their step is acked let the next batch start at once.
    if version > trained:
        allowed += (version - trained) * batch_groups
    if allowed:
        allowed += more
    return allowed if capacity is None else min(allowed, capacity)


def surplus(groups: int, oversample: float) -> int:
    """Return how many more groups may be begun than a batch of ``groups`` needs."""
    # Rounded first: 1.1 - 1 is a little more than a tenth, and of 10 groups that would make 2.
    return math.ceil(round((oversample - 1) * groups, 6)) if oversample > 1 else 0


def overdue(
    step: int, max_staleness: int, batch_groups: int, *, finished: Mapping[int, int], running: Mapping[int, int]
) -> bool:
    """Return whether the batch of ``step`` must wait, lest a rollout in flight become too old.

    A group of version ``v`` may be in the batches up to that of step ``v + max_staleness + 1``. If the batch of
    ``step`` took the stalest of what has finished, then for each such last step ``d``, what is left with no more time
    than that must fit into the ``d - step`` batches that remain: the condition for deadlines of unit jobs (Jackson
    1955). Admission keeps it for what starts, so with this one nothing becomes too old: by the time its last batch is
    made it has finished, and has a place in it.

    Args:
        step: the step of the next batch.
        max_staleness: the bound.
        batch_groups: how many groups a batch takes.
        finished: how many groups of each version may be taken now.
        running: how many of each version are in flight. Those that are too old already are not waited for.
    """
    have = flying = 0
    for version in sorted({*finished, *running}):
        last = version + max_staleness + 1
        if last < step:
            continue
        have += finished.get(version, 0)
        flying += running.get(version, 0)
        if flying and flying + max(0, have - batch_groups) > batch_groups * (last - step):
            return True
    return False
