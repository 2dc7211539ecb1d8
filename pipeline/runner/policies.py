"""What follows a failed attempt: pure decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from numbers import Real
from typing import Any

from pipeline.config import FailFast, FailurePolicy, Retry
from pipeline.errors import RolloutInvalid, RunnerRaised, WorkerFailed
from pipeline.records import Item, Rollout, Trace


class Verdict(Enum):
    """What to do with a member whose attempt failed."""

    RETRY = "retry"
    GIVE_UP = "give up"
    STOP = "stop"


def after_failure(policy: FailurePolicy, failures: int) -> Verdict:
    """Return what follows when a member has failed ``failures`` times, this one included."""
    if isinstance(policy, FailFast):
        return Verdict.STOP
    if isinstance(policy, Retry) and failures < policy.attempts:
        return Verdict.RETRY
    return Verdict.GIVE_UP


def check_rollout(given: Any, item: Item, *, rows: bool = False) -> str | None:
    """Check what a runner returned, before anything is changed.

    Args:
        given: what it returned.
        item: what it worked on.
        rows: whether what it made are rows of a buffer.

    Returns:
        None if it is good, else why the attempt counts as failed: a reward that is not finite.

    Raises:
        RolloutInvalid: it is no rollout at all; names the task, the item and the field.
        WorkerFailed: the engine gave this instead.
    """
    if type(given) is not Rollout and not isinstance(given, Rollout):
        if isinstance(given, (RolloutInvalid, WorkerFailed)):
            raise given  # an engine's word for what it found elsewhere
        raise RolloutInvalid(
            f"{item}: the runner returned {_shown(given)}; return Rollout(tensors, reward=...), and raise to fail"
        )
    reward = given.reward
    if type(reward) is not float and (isinstance(reward, bool) or not isinstance(reward, Real)):
        raise RolloutInvalid(f"{item}: field reward: a number is needed, found {_shown(reward)}")
    if not (math.isfinite(reward) if type(reward) is float else _is_finite(reward)):
        return f"reward is {_shown(reward)}"
    if type(given.traces) is not tuple:
        raise RolloutInvalid(
            f"{item}: field traces: tensors by name, or a list, are needed, found {_shown(given.traces)}"
        )
    if rows and given.traces:
        raise RolloutInvalid(
            f"{item}: field traces: the pipeline has a buffer of transitions; add rows to it with ctx.extend(), and "
            "return Rollout(reward=...) without tensors"
        )
    if type(given.info) is not dict and not _is_mapping(given.info):
        raise RolloutInvalid(f"{item}: field info: a mapping is needed, found {_shown(given.info)}")
    for number, trace in enumerate(given.traces):
        if not isinstance(trace, Trace) or not _is_mapping(trace.tensors):
            raise RolloutInvalid(
                f"{item}: field traces[{number}]: a Trace or a mapping is needed, found {_shown(trace)}"
            )
        for name in trace.tensors:
            if type(name) is not str or not name:
                raise RolloutInvalid(f"{item}: field traces[{number}]: tensor names are text, found {name!r}")
    if not (given.oldest is None and given.newest is None and type(given.tokens) is int and given.tokens == 0):
        _check_versions(given, item)
    return None


def _check_versions(given: Rollout, item: Item) -> None:
    for field in ("oldest", "newest"):
        value = getattr(given, field)
        if value is not None and not _is_count(value):
            raise RolloutInvalid(f"{item}: field {field}: a version number of at least 0 is needed, found {value!r}")
    if given.oldest is not None and given.newest is not None and given.newest < given.oldest:
        raise RolloutInvalid(f"{item}: field newest={given.newest} lies before oldest={given.oldest}")
    if not _is_count(given.tokens):
        raise RolloutInvalid(f"{item}: field tokens: a count of at least 0 is needed, found {given.tokens!r}")


def _is_mapping(value: Any) -> bool:
    return type(value) is dict or isinstance(value, Mapping)  # the second question costs ten times the first


def _is_finite(reward: float) -> bool:
    try:
        return math.isfinite(reward)
    except OverflowError:  # an integer beyond every float
        return False


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def error_text(error: BaseException) -> str:
    """Return an error in one line: its type and its message."""
    text = str(error) if isinstance(error, RunnerRaised) else f"{type(error).__name__}: {error}"
    return text[:500]


def encodable(text: str) -> str:
    """Return an error's text as a journal can hold it: it may hold what UTF-8 cannot, and is a note for people."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
