"""Token by token: which weights made each token of a rollout, and which tokens are young enough for a batch.

A rollout says it by a tensor named ``versions`` in a trace, int64 ``[tokens]``. A trace without one is judged whole, by
the oldest weights of its rollout: nobody knows which of its tokens are younger.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pipeline.errors import RolloutInvalid
from pipeline.records import Item, Rollout, Trace

VERSIONS = "versions"


def judge(rollout: Rollout, item: Item, *, started: int, now: int) -> tuple[int, int, dict[int, int]]:
    """Return the oldest and newest version of a rollout, and how many tokens each version made.

    Args:
        rollout: what a runner returned.
        item: what it is about, for the message.
        started: version in use when the attempt started, and now: what counts where the rollout does not say.
        now: version in use now.

    Raises:
        RolloutInvalid: ``versions`` is no row of version numbers, or lies before the ``oldest`` that the rollout names.
    """
    counts: dict[int, int] = {}
    for number, trace in enumerate(rollout.traces):
        if VERSIONS in trace.tensors:
            found, many = np.unique(_row(trace.tensors[VERSIONS], number, item), return_counts=True)
            for version, count in zip(found.tolist(), many.tolist(), strict=True):
                counts[version] = counts.get(version, 0) + count
    if counts and rollout.oldest is not None and min(counts) < rollout.oldest:
        raise RolloutInvalid(
            f"{item}: field versions: it names version {min(counts)}, which lies before oldest={rollout.oldest}"
        )
    newest = max(counts, default=0)
    if not counts or any(VERSIONS not in trace.tensors for trace in rollout.traces):
        oldest = started if rollout.oldest is None else rollout.oldest
        counts[oldest] = counts.get(oldest, 0) + max(0, rollout.tokens - sum(counts.values()))
        newest = max(*counts, now)
    return min(counts), newest if rollout.newest is None else max(newest, rollout.newest), counts


def _row(given: Any, number: int, item: Item) -> np.ndarray:
    row = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu") or (row.size and int(row.min()) < 0):
        raise RolloutInvalid(
            f"{item}: field versions of trace {number}: staleness_policy='mask' needs whole numbers of at least 0, one "
            f"for each token; found {row.dtype} {tuple(row.shape)}"
        )
    if row.size and int(row.max()) >= 2**63:
        raise RolloutInvalid(f"{item}: field versions of trace {number}: {int(row.max())} is no version number")
    return row


def young_enough(trace: Trace, least: int | None, *, oldest: int, aged: bool) -> torch.Tensor:
    """Return which tokens of an unpacked trace have at least version ``least``: bool ``[tokens]``.

    Args:
        trace: the trace.
        least: the oldest version allowed, or None for any.
        oldest: the oldest version of its rollout.
        aged: whether the rollout is too old as a whole: a version of a dead incarnation counts no more than what was
            restored, which is not known here.
    """
    versions = trace.tensors.get(VERSIONS)
    if least is None or versions is None:
        longest = max((len(tensor) for tensor in trace.tensors.values() if tensor.dim()), default=0)
        return torch.full((longest,), least is None or (oldest >= least and not aged))
    young: torch.Tensor = (versions >= least) & (not aged)
    return young
