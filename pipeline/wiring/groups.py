"""What a group begins with, and what is decided about whole ones: whether the task's filter keeps one, and when one
is late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from pipeline.config import ZeroVariance
from pipeline.errors import ForebayError, GroupsRejected, SourceError
from pipeline.ledger import FINISHED, Entry
from pipeline.observe import events
from pipeline.runner.context import Slots
from pipeline.runner.deadlines import TimeLimit
from pipeline.runner.policies import Verdict, after_failure
from pipeline.store.codec import read_header, unpack
from pipeline.task import Task
from pipeline.wiring.state import RunState


def give(task: Task, index: int) -> Any:
    """Return what the source of a task has at ``index``.

    Raises:
        SourceError: it failed.
    """
    try:
        return task.source.item(index)
    except ForebayError:
        raise
    except Exception as error:
        raise SourceError(f"task {task.name!r}: the source failed at item {index}: {error!r}") from error


class Filters:
    """Asks the tasks' filters about groups that are whole."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._in_a_row: dict[str, int] = {}

    def rejects(self, task: Task, entry: Entry, last: tuple[int, bytes] | None = None) -> bool:
        """Whether the group is to be dropped now that its last member has ended.

        A filter that raises, or has rejected ``max_rejections`` groups in a row, fails the run; the group is dropped.

        Args:
            task: the group's.
            entry: the group, as it was before that.
            last: member and blob of the last one, if it finished.
        """
        finished = entry.members.count(FINISHED) + (last is not None)
        if task.filter is None or entry.unsettled > 1 or entry.parked or finished < entry.need:
            return False  # one that is parked is judged when it has its rewards
        return self._judge(task, entry, last, dict(entry.given))

    def rejects_rewarded(self, task: Task, entry: Entry, member: int, reward: float) -> bool:
        """Whether a parked group is to be dropped now that ``member`` gets its reward; otherwise as :meth:`rejects`."""
        if task.filter is None or entry.unsettled or entry.parked > 1:
            return False
        return self._judge(task, entry, None, {**dict(entry.given), member: reward})

    def _judge(self, task: Task, entry: Entry, last: tuple[int, bytes] | None, given: Mapping[int, float]) -> bool:
        assert task.filter is not None
        where = f"payload of uid {entry.uid}"
        blobs = self._blobs(entry, last)
        try:
            if isinstance(task.filter, ZeroVariance):  # rewards alone: no tensor is copied on the event loop
                headers = {member: read_header(blob, where) for member, blob in blobs.items()}
                keeps = task.filter([given.get(member, header.reward) for member, header in headers.items()])
            else:
                rollouts = {member: unpack(blob, where)[1] for member, blob in blobs.items()}
                for member in given.keys() & rollouts.keys():
                    rollouts[member] = msgspec.structs.replace(rollouts[member], reward=given[member])
                keeps = task.filter(list(rollouts.values()))
        except Exception as error:
            failed = GroupsRejected(f"task {task.name!r}: its filter raised at uid {entry.uid}: {error!r}")
            failed.__cause__ = error
            self._state.fail(failed)
            return True
        if keeps:
            self._in_a_row.pop(task.name, None)
        else:
            self._count(task, entry.uid)
        return not keeps

    def _blobs(self, entry: Entry, last: tuple[int, bytes] | None) -> dict[int, bytes]:
        """Return what has finished of a group, by member in order."""
        storage = self._state.buffer.storage
        held = storage.get(entry.uid) if entry.uid in storage else {}
        blobs = {member: blob for member, (blob, _) in held.items() if blob is not None}
        if last is not None:
            blobs[last[0]] = last[1]
        return {member: blobs[member] for member in sorted(blobs)}

    def _count(self, task: Task, uid: int) -> None:
        count = self._in_a_row[task.name] = self._in_a_row.get(task.name, 0) + 1
        self._state.log.debug(events.GROUP_FILTERED, task=task.name, uid=uid, in_a_row=count)
        if count >= task.max_rejections:
            self._state.fail(
                GroupsRejected(
                    f"task {task.name!r}: its filter has rejected {count} groups in a row, the last with uid {uid}. "
                    "Loosen the filter, look at the rewards, or raise max_rejections="
                )
            )


class GivenUp:
    """Counts what is given up in a row: where nothing succeeds at all, an endless source would never end, and a trainer
    would wait for ever."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def finished(self, task: Task) -> None:
        """A member has finished."""
        if self._in_a_row:
            self._in_a_row.pop(task.name, None)

    def verdict(self, task: Task, failures: int, *, late: bool) -> Verdict:
        """Return what follows when a member has failed ``failures`` times; ``late``: it has no time for another."""
        verdict = after_failure(task.on_failure, failures)
        if late and verdict is Verdict.RETRY:
            verdict = Verdict.GIVE_UP
        if verdict is Verdict.GIVE_UP and self.too_many(task):
            return Verdict.STOP
        return verdict

    def too_many(self, task: Task) -> bool:
        """Count one more that is given up, and return whether that ends the run."""
        count = self._in_a_row[task.name] = self._in_a_row.get(task.name, 0) + 1
        return count >= task.max_failures

    def why(self, task: Task) -> str:
        """Return what is to be said beside the error that ends the run."""
        if self._in_a_row.get(task.name, 0) < task.max_failures:
            return ""
        return (
            f". This is number {self._in_a_row[task.name]} that was given up in a row, and none finished between. Mend "
            "what fails, or raise max_failures="
        )


class Limits(Protocol):
    """The part of a pool that runs timers."""

    def time_limit(self, timeout: float, cut: Callable[[Any], None]) -> TimeLimit[Any]: ...


class PoolSide(Slots, Limits, Protocol):
    """What the producer asks of the pool."""

    in_flight: int

    def pump(self) -> None: ...

    def cut_group(self, uid: int) -> None: ...


class GroupDeadlines:
    """When each group of a task with ``group_timeout=`` is late; a group is named by uid and life."""

    def __init__(self, late: Callable[[int, int], None]) -> None:
        self.pool: Limits | None = None
        self._late = late
        self._limits: dict[float, TimeLimit[tuple[int, int]]] = {}
        self._begun: dict[tuple[int, int], TimeLimit[tuple[int, int]]] = {}

    def begin(self, entry: Entry, timeout: float) -> None:
        """Count from now on, unless that has begun already."""
        key = (entry.uid, entry.life)
        if key in self._begun or self.pool is None:
            return
        limit = self._limits.get(timeout)
        if limit is None:
            limit = self._limits[timeout] = self.pool.time_limit(timeout, self._cut)
        self._begun[key] = limit
        limit.begin(key)

    def end(self, uid: int, life: int) -> None:
        """Stop counting; one that was never begun is no error."""
        limit = self._begun.pop((uid, life), None)
        if limit is not None:
            limit.end((uid, life))

    def _cut(self, key: tuple[int, int]) -> None:
        self._begun.pop(key, None)
        self._late(*key)
