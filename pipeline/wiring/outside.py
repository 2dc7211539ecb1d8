"""What comes from outside while a run goes on: rewards, items, finished rollouts, streams, shares.

Every verb here checks everything first, and then changes the state in one window without an await: so it happens as a
whole or not at all, and the events of one verb lie in one frame of the journal. That also means that a verb which was
cancelled while it waited for the disk has happened.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from numbers import Real
from typing import Any

import anyio

from pipeline.config import LEAST, MOST
from pipeline.errors import ConfigError, SourceError, UsageError
from pipeline.ledger import PARKED, UNREWARDED, Entry
from pipeline.observe import events
from pipeline.records import EXTERNAL, Claimed, Dropped, Finished, Item, Rewarded, Rollout, Started
from pipeline.runner.policies import check_rollout
from pipeline.runner.pool import Pool
from pipeline.store.codec import pack
from pipeline.store.contents import encode_content
from pipeline.task import StreamSource, Task
from pipeline.wiring.producing import Producer
from pipeline.wiring.state import RunState


class Outside:
    """The verbs in their synchronous part; :meth:`written` is what each of them waits for at its end."""

    def __init__(self, state: RunState, producer: Producer, pool: Callable[[], Pool]) -> None:
        self._state, self._producer, self._pool = state, producer, pool

    async def written(self) -> None:
        """Return once what was recorded before is written, where ``durability`` says that it is written at all."""
        if self._state.writer is not None and self._state.writing:
            await self._state.writer.flush()

    # -- rewards -----------------------------------------------------------------------------------------------

    def reward(self, uid: int, value: float, member: int = 0, attempt: int | None = None) -> None:
        """Give a parked member its reward."""
        state = self._state
        reward = _finite(value)
        entry = self._entry(uid)
        if isinstance(member, bool) or not isinstance(member, int) or not 0 <= member < entry.size:
            raise ConfigError.of("member", member, f"uid {uid} has the members 0 to {entry.size - 1}")
        if attempt is not None and attempt != entry.attempts[member]:
            raise UsageError(
                f"uid {uid}, member {member}: the reward is for attempt {attempt}, and the member is at attempt "
                f"{entry.attempts[member]}: it was run again since, and that attempt needs a reward of its own"
            )
        if entry.members[member] != UNREWARDED:
            given = dict(entry.given).get(member)
            if given == reward:
                return  # whoever was not told that it arrived may send it again
            had = f"was given the reward {given!r} already" if given is not None else "is not parked"
            raise UsageError(f"uid {uid} ({state.ledger.state(uid)}), member {member} {had}; nothing was changed")
        task = state.tasks.get(entry.task)
        rejected = task is not None and self._producer.filters.rejects_rewarded(task, entry, member, reward)
        became = state.record(Rewarded(uid, member, entry.attempts[member], reward, rejected))
        if became is not None:
            self._became_buffered(became)
        elif rejected:
            state.teach(entry)
            self._changed()

    def discard(self, uid: int) -> None:
        """Give a parked group up."""
        entry = self._entry(uid)
        if entry.state != PARKED:
            raise UsageError(f"uid {uid} is {self._state.ledger.state(uid)}; only what is parked can be discarded")
        self._state.record(Dropped(uid, "discarded"))
        self._state.count_absent()
        self._changed()

    def _entry(self, uid: int) -> Entry:
        state = self._state
        if isinstance(uid, bool) or not isinstance(uid, int):
            raise ConfigError.of("uid", uid, "the whole number that ctx.uid says is needed")
        entry = state.ledger.entries.get(uid)
        if entry is None:
            where = state.ledger.state(uid)
            known = "this run has no such item" if where == "future" else f"it is {where}"
            raise UsageError(f"uid {uid}: {known}; a reward is for what is parked")
        return entry

    # -- items and rollouts ------------------------------------------------------------------------------------

    def _check_groups(self, verb: str) -> None:
        if self._state.experience is not None:
            raise UsageError(f"{verb}(): these rollouts fill a buffer, and the run has no groups")

    def submit(self, task: Task | str, content: Any) -> int:
        """Claim an item that was given by hand."""
        state, plan = self._state, self._task(task)
        self._check_groups("submit")
        uid = state.ledger.next_uid
        kept = encode_content(content, f"task {plan.name!r}, an item by hand")
        state.record(Claimed(uid, plan.name, -1, -1, -1, plan.group_size, plan.min_group, EXTERNAL, kept))
        self._producer.requeue(state.ledger.entries[uid])
        self._changed()
        return uid

    def put(self, task: Task | str, rollouts: Rollout | Sequence[Rollout], content: Any = None) -> int:
        """Take a group in that was made elsewhere."""
        state, plan = self._state, self._task(task)
        self._check_groups("put")
        group = list(rollouts) if isinstance(rollouts, (list, tuple)) else [rollouts]
        if not group:
            raise ConfigError.of("rollouts", rollouts, "a Rollout, or a list of at least one, is needed")
        uid = state.ledger.next_uid
        kept = None if content is None else encode_content(content, f"task {plan.name!r}, a rollout by hand")
        item = Item(plan.name, -1, -1, uid, content)
        packed = [self._packed(each, item, member) for member, each in enumerate(group)]
        size = len(packed)
        state.record(Claimed(uid, plan.name, -1, -1, -1, size, size, EXTERNAL, kept))
        for member in range(size):
            state.record(Started(uid, member, 1, state.version))
        became = None
        for member, (rollout, blob, oldest, newest) in enumerate(packed):
            became = self._put_member(uid, member, rollout, blob, (oldest, newest))
        assert became is not None
        self._became_buffered(became)
        return uid

    def _packed(self, rollout: Any, item: Item, member: int) -> tuple[Rollout, bytes, int, int]:
        fault = check_rollout(rollout, item)
        if fault is not None:
            raise ConfigError(f"{item}, member {member}: {fault}; a finite one is needed", option="rollouts")
        now = self._state.version
        oldest = rollout.oldest if rollout.oldest is not None else min(now, rollout.newest or now)
        newest = max(oldest, now) if rollout.newest is None else rollout.newest
        blob = pack(rollout, item, member=member, attempt=1, life=0, versions=(oldest, newest))
        return rollout, blob, oldest, newest

    def _put_member(
        self, uid: int, member: int, rollout: Rollout, blob: bytes, versions: tuple[int, int]
    ) -> Entry | None:
        segment, offset = self._state.keep(uid, member, 0, blob)
        return self._state.record(
            Finished(uid, member, 1, float(rollout.reward), *versions, segment, offset, len(blob), rollout.tokens)
        )

    def _task(self, task: Task | str) -> Task:
        tasks = self._state.tasks
        name = task.name if isinstance(task, Task) else task
        if not isinstance(name, str) or name not in tasks:
            raise ConfigError.of("task", name, f"the run's tasks are {', '.join(tasks)}")
        return tasks[name]

    def _became_buffered(self, entry: Entry) -> None:
        self._state.teach(entry)
        self._state.expire_stale()
        self._changed()

    def _changed(self) -> None:
        self._pool().pump()
        self._state.changed.notify()

    # -- shares ------------------------------------------------------------------------------------------------

    def set_share(self, task: Task | str, share: float) -> None:
        """Give a task another share of the draws, from the next one on."""
        state, name = self._state, self._task(task).name
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not LEAST <= share <= MOST:
            raise ConfigError.of("share", share, f"a number of {LEAST:g} to {MOST:g} is needed")
        before = state.sampler.mixture.shares.get(name)
        if before is None:
            raise UsageError("set_share() comes after start(); before it, the shares are those of Task(share=...)")
        state.record(state.sampler.share_event(name, float(share)))
        state.log.info(events.SHARE_CHANGED, task=name, before=before, after=float(share), by="set_share")


class StreamFeed:
    """Takes items from a task's stream, one at a time and only when the producer has asked for one.

    An item is claimed, and so in the journal, in the same turn of the loop in which the stream gave it: none is held
    beside it that a crash could take. A stream that has an item at hand gets the place whose turn it was, which is kept
    for one turn of the loop. After that the others have it, and what comes later waits for the next.
    """

    def __init__(self, task: Task, state: RunState, producer: Producer, pool: Callable[[], Pool]) -> None:
        assert isinstance(task.source, StreamSource)
        self._stream = task.source.stream
        self._task, self._state, self._producer, self._pool = task, state, producer, pool
        self._asked = False
        self._requests = 0
        self._wake: anyio.Event | None = None

    def ask(self) -> None:
        """Let the next item come; asked again meanwhile, it does nothing."""
        self._asked = True
        if self._wake is not None:
            self._wake.set()

    async def run(self) -> None:
        """Take what is asked for, until the stream ends; a failing stream ends the run."""
        stream = aiter(self._stream)
        async with anyio.create_task_group() as group:
            while True:
                while not self._asked:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                group.start_soon(self._leave_the_place, self._requests)
                kept = await self._take(stream)
                self._asked = False
                self._requests += 1
                self._state.sampler.awaited.discard(self._task.name)
                if kept is None:
                    break
                self._claim(kept)
        self._pool().pump()
        self._state.changed.notify()

    async def _leave_the_place(self, request: int) -> None:
        """It has not come at once: until it does, the task is left out of the draws."""
        if request == self._requests:
            self._state.sampler.awaited.add(self._task.name)
            self._pool().pump()

    async def _take(self, stream: AsyncIterator[Any]) -> bytes | None:
        """Return the stream's next item, or None at its end and after an error."""
        state, name = self._state, self._task.name
        try:
            content = await anext(stream)
            return encode_content(content, f"task {name!r}, an item of its stream")
        except StopAsyncIteration:
            state.sampler.end(name)
        except SourceError as error:
            state.fail(error)
        except Exception as error:
            failed = SourceError(f"task {name!r}: its stream failed: {error!r}")
            failed.__cause__ = error
            state.fail(failed)
        return None

    def _claim(self, kept: bytes) -> None:
        state, task = self._state, self._task
        uid, draw = state.ledger.next_uid, state.sampler.draw_of(task.name)
        if draw.began is not None:
            state.record(draw.began)
        state.record(
            Claimed(
                uid, task.name, draw.epoch, draw.position, draw.index, task.group_size, task.min_group, content=kept
            )
        )
        self._producer.requeue(state.ledger.entries[uid])
        self._pool().pump()
        state.changed.notify()


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError.of("value", value, "a reward is a finite number")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ConfigError.of("value", value, "a reward is a finite number")
    return reward
