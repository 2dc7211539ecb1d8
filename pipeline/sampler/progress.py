"""Progress: the small state that people read and old files still load into.

Evolution rules: a field is added with a default and never retyped or renamed; a file without a field takes its
default; a file of a newer ``format_version`` is refused; a field that this version does not know is carried along
and written back. Every version ever written has a golden file in ``tests/golden``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pipeline.errors import Damaged, NewerFormat

PROGRESS_VERSION = 1
_WINDOW = (
    "produced_samples",
    "produced_tokens",
    "failed_samples",
    "filtered_samples",
    "raw_rewards_sum",
    "raw_rewards_count",
    "produce_time_s",
)

_FLOATS = ("raw_rewards_sum", "produce_time_s")


class Progress(msgspec.Struct, kw_only=True):
    """How far a run is. Per-task fields are keyed by task name."""

    format_version: int = PROGRESS_VERSION
    next_consumer_step: int = 1
    """The step that the trainer will train next."""
    producer_future_step: int = 1
    """The step that producers work for now."""
    target_upto_future_step: int = 0
    """Last step whose groups have been added to ``target_samples``."""
    target_samples: dict[str, int] = {}
    """Groups asked for, for life."""
    consumed_samples: dict[str, int] = {}
    """Groups asked for and trained, for life."""
    produced_samples: dict[str, int] = {}
    """Groups finished since the last batch; the six below count from there as well."""
    produced_tokens: dict[str, int] = {}
    failed_samples: dict[str, int] = {}
    filtered_samples: dict[str, int] = {}
    raw_rewards_sum: dict[str, float] = {}
    raw_rewards_count: dict[str, int] = {}
    produce_time_s: dict[str, float] = {}
    model_step: int = 0
    """Version of the weights that rollouts are made with."""
    replay_buffer_saved: bool = True
    """Whether the buffer was saved beside this. True where it is left out: older files came with a buffer."""
    batch_groups: int = 0
    """How many groups the last batch was asked to have; 0 before the first."""
    window_marks: dict[str, list[float]] = {}
    """Lifetime totals at the last batch, from which the window is counted."""

    def deficit(self, task: str, available: int) -> int:
        """Return how many groups of ``task`` are still to be produced for what has been asked."""
        return max(0, self.target_samples.get(task, 0) - self.consumed_samples.get(task, 0) - available)


def encode_progress(progress: Progress, unknown: Mapping[str, Any] | None = None) -> bytes:
    """Return the JSON of a progress and of the unknown fields that came with its file."""
    # Converted as a reader would, so that a count in a field of floats is written as it will be after a load.
    plain = msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(progress), Progress))
    fields = {**(unknown or {}), **_spelled(plain)}
    return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"


def decode_progress(raw: bytes, where: str = "progress") -> tuple[Progress, dict[str, Any]]:
    """Return the progress in ``raw`` and the fields of it that this version does not know.

    Raises:
        NewerFormat: it was written by a newer version.
        Damaged: it is no JSON, or a field has another type.
    """
    try:
        fields = msgspec.json.decode(raw)
        if not isinstance(fields, dict):
            raise msgspec.ValidationError(f"expected an object, found {type(fields).__name__}")
        version = fields.get("format_version", 0)
        if isinstance(version, int) and version > PROGRESS_VERSION:
            raise NewerFormat(
                f"{where}: progress has format {version}; this version reads up to {PROGRESS_VERSION}. "
                "Install a newer forebay."
            )
        known = set(Progress.__struct_fields__)
        progress = msgspec.convert({name: _unspelled(fields[name]) for name in fields if name in known}, Progress)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{where}: not a progress file ({error})") from None
    progress.format_version = PROGRESS_VERSION
    return progress, {name: value for name, value in fields.items() if name not in known}


def _spelled(value: Any) -> Any:
    """JSON has no infinities and no NaN, and a sum of finite rewards may overflow: they are written as text."""
    if isinstance(value, dict):
        return {key: _spelled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_spelled(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unspelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unspelled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unspelled(each) for each in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


def restore_in_place(progress: Progress, given: Progress) -> None:
    """Give ``progress`` the fields of ``given``, so that nobody is left holding a stale object."""
    for name in Progress.__struct_fields__:
        setattr(progress, name, getattr(given, name))


def rolled_back(progress: Progress, window_marks: dict[str, list[float]]) -> Progress:
    """Return what is saved without the buffer: as if nothing beyond what was consumed had ever been asked for.

    Args:
        progress: the live one; it is not changed.
        window_marks: lifetime totals as of now, from which the window will be counted.
    """
    nothing: dict[str, Any] = {name: dict.fromkeys(window_marks, 0.0 if name in _FLOATS else 0) for name in _WINDOW}
    return msgspec.structs.replace(
        progress,
        producer_future_step=progress.next_consumer_step,
        target_samples=dict(progress.consumed_samples),
        target_upto_future_step=max(0, progress.next_consumer_step - 1),
        replay_buffer_saved=False,
        window_marks=window_marks,
        **nothing,
    )


def add_counts(counts: dict[str, int], tasks: Iterable[str]) -> dict[str, int]:
    """Return ``counts`` with one more for each name in ``tasks``."""
    added = dict(counts)
    for task, more in Counter(tasks).items():
        added[task] = added.get(task, 0) + more
    return added


def joined(parts: Sequence[Progress]) -> Progress:
    """Return the one progress of several ranks that train together: counts are sums."""
    counts: dict[str, Any] = {}
    for name in (*_WINDOW, "target_samples", "consumed_samples"):
        total: dict[str, Any] = {}
        for part in parts:
            for task, count in getattr(part, name).items():
                total[task] = total.get(task, 0) + count
        counts[name] = total
    marks: dict[str, list[float]] = {}
    for part in parts:
        for task, given in part.window_marks.items():
            marks[task] = [one + other for one, other in zip(marks.get(task, [0.0] * len(given)), given, strict=True)]
    return Progress(
        next_consumer_step=parts[0].next_consumer_step,
        producer_future_step=min(part.producer_future_step for part in parts),
        target_upto_future_step=parts[0].target_upto_future_step,
        model_step=min(part.model_step for part in parts),
        batch_groups=sum(part.batch_groups for part in parts),
        window_marks=marks,
        **counts,
    )
