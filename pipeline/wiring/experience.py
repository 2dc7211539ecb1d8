"""A run whose rollouts make rows of a buffer of transitions, and no batches.

The buffer is the run's: what an attempt adds is one block of rows and one event, and lies in a segment before the event
does. What the trainer has seen of it (draws, priorities, the limiter's count) goes into generations only, as every
consumer half does. Recovery takes the buffer of the generation, and lets what came after it happen again, in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.config import PipelineOptions
from pipeline.errors import ConfigError, Damaged, UsageError, WriteFailed
from pipeline.locations import Location
from pipeline.records import (
    EVALUATION,
    Added,
    AnyEvent,
    Dropped,
    Failed,
    Finished,
    Interrupted,
    Opened,
)
from pipeline.store.journal import Logged
from pipeline.store.segments import PayloadReader, Place
from pipeline.task import Task
from pipeline.wiring.feed import Feed, Reading

if TYPE_CHECKING:
    from pipeline.runner.context import Context
    from pipeline.wiring.state import RunState


_OF_GROUPS = {
    "max_staleness": None,
    "batch_groups": None,
    "capacity": None,
    "oversample": 1.0,
    "mixing": "long_run",
    "staleness_policy": "drop",
    "strategy": "asynchronous",
    "order": "finished",
    "selector": "stalest",
}


def check_rows(tasks: Sequence[Task], options: PipelineOptions) -> None:
    """Refuse what says how batches of groups are made, where rollouts fill a buffer.

    Raises:
        ConfigError: names the first such option.
    """
    for option, default in _OF_GROUPS.items():
        value = getattr(options, option)
        if value != default:
            raise ConfigError.of(
                option, value, "says how batches of groups are made, and with buffer= there are none; leave it out"
            )
    for task in tasks:
        for option, value, usual in (("group_size", task.group_size, 1), ("filter", task.filter, None)):
            if value != usual:
                raise ConfigError(
                    f"task {task.name!r}: {option}={value!r}: with buffer= every item is one episode; leave it out",
                    option=option,
                )


class Episodes:
    """Which attempt's episode is which environment of the buffer, while it is open."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0

    def env_of(self, uid: int) -> int:
        """Return the environment of an item's open episode, or one for a new one: the event is to tell."""
        env = self._open.get(uid)
        if env is not None:
            return env
        return self._free[0] if self._free else self._next

    def ended(self, event: AnyEvent) -> tuple[int | None, ...]:
        """Take an event in, and return the environments whose episodes it ends; None stands for all."""
        if isinstance(event, Added):
            self._take(event.uid, event.env)
        elif isinstance(event, (Finished, Failed, Interrupted, Dropped)):
            env = self._open.pop(event.uid, None)
            if env is not None:
                heapq.heappush(self._free, env)
                return (env,)
        elif isinstance(event, Opened):
            self._open, self._free, self._next = {}, [], 0
            return (None,)
        return ()

    def _take(self, uid: int, env: int) -> None:
        if uid not in self._open:
            self._open[uid] = env
            if self._free and self._free[0] == env:
                heapq.heappop(self._free)
            else:
                self._next = max(self._next, env + 1)


class Later(NamedTuple):
    """Something that happened to the buffer after a generation: rows were added, or an episode ended."""

    added: Added | None
    at: Location | None
    env: int | None


class RowsFold:
    """What the journals say of the buffer: collected while they are folded."""

    def __init__(self, positions: Mapping[tuple[int, int], int]) -> None:
        """Args:
        positions: the last event of each journal that the generation's own buffer knows of.
        """
        self._positions = positions
        self._episodes = Episodes()
        self.later: list[Later] = []

    def apply(self, logged: Logged) -> None:
        """Take in the next event that counts."""
        incarnation, rank, sequence, event = logged
        known = sequence <= self._positions.get((incarnation, rank), 0)
        ended = self._episodes.ended(event)
        if known:
            return
        self.later += [Later(None, None, env) for env in ended]
        if isinstance(event, Added):
            at = Location(incarnation, rank, event.segment, event.offset, event.length)
            self.later.append(Later(event, at, None))

    def redo(self, reading: Reading, reader: PayloadReader, version: int) -> None:
        """Let what came after the generation happen to its buffer. Blocks.

        Raises:
            Damaged: a block cannot be read.
        """
        # They lie one after the other, as their events came: each file is read once, and one blob held at a time.
        blobs = reader.each(self._places())
        for each in self.later:
            if each.added is None or each.at is None:
                reading.cut(each.env)
                continue
            place, blob = next(blobs)
            if isinstance(blob, Damaged):
                raise blob
            assert place == (each.added.first, 0, each.at)
            reading.add(blob, each.added, each.at, version)
        reading.cut(None)  # whoever played them is not here any more

    def _places(self) -> Iterator[Place]:
        for each in self.later:
            if each.added is not None and each.at is not None:
                if each.at.segment < 0:
                    raise Damaged(
                        f"rows {each.added.first} and on were added after the generation, and are in no segment: "
                        "durability='none' writes them with the next generation"
                    )
                yield each.added.first, 0, each.at


def give_back(state: RunState) -> None:
    """Let go of the buffer of a run that was not opened, if it has one."""
    if state.experience is not None:
        state.experience.feed.give_back()


class Experience:
    """The buffer of a run, and the episodes that are open in it."""

    def __init__(self, feed: Feed, state: RunState) -> None:
        self.feed = feed
        self._state = state
        self._episodes = Episodes()
        # Attempts that wait for the limiter, and what says whether it lets their rows in: several of them perhaps.
        self._waiting: dict[Context, list[Callable[[], object]]] = {}
        self.without_slot = 0
        """Attempts whose slot others may have while they wait for the limiter, or until they have one again."""
        self._acked = 0
        self._unrecorded: BaseException | None = None  # why the buffer has rows of which the journal knows nothing

    @property
    def held(self) -> int:
        """How many attempts wait for the limiter, and would go on waiting."""
        return sum(not any(may() for may in each) for each in self._waiting.values())

    def has_lent(self, in_flight: int) -> bool:
        """Whether the slots that are free belong to attempts that wait for the limiter: no other rollout begins."""
        return self.without_slot > 0 and in_flight + self.without_slot >= self._state.options.concurrency

    @property
    def drawn(self) -> bool:
        """Whether anybody has drawn rows since the trainer last said what the weights hold."""
        return self.feed.sampled != self._acked

    def acked(self) -> None:
        """Take in that the weights hold what was drawn, or are those that go with it."""
        self._acked = self.feed.sampled

    def apply(self, event: AnyEvent) -> None:
        """Take in what happened: an attempt's end is its episode's."""
        for env in self._episodes.ended(event):
            self.feed.cut(env)

    async def extend(self, ctx: Context, rows: Any) -> int:
        """Add the rows of an attempt once there is room for them. Returns how many they are."""
        state = self._state
        if ctx.kind == EVALUATION:
            return 0
        may = self.feed.may_add(rows)
        while True:
            if state.writer is not None and state.writing and state.writer.writer.full:
                await state.writer.room()
            elif may():
                break
            else:
                await self._wait(ctx, may)
        self.check_recorded()
        entry = state.ledger.entries.get(ctx.uid)
        if entry is None or not entry.in_flight or entry.attempts[ctx.member] != ctx.attempt:
            raise UsageError(f"{ctx.item}: attempt {ctx.attempt} has ended; rows are added while it runs")
        env = self._episodes.env_of(ctx.uid)
        # None of the rows is older than the block before; what the weights are by now may have made only some of them.
        version = ctx.version if ctx._since is None else ctx._since
        first, count = self.feed.extend(rows, env, version)
        if not count:
            return 0
        ctx._since = state.version
        try:
            self._record(ctx, env, first, count, version)
        except BaseException as error:
            self._unrecorded = error
            state.fail(error)
            raise
        state.changed.notify()
        return count

    def check_recorded(self) -> None:
        """Refuse to go on with rows that are in no journal: with others behind them nothing could be recovered.

        Raises:
            WriteFailed: there are such.
        """
        if self._unrecorded is not None:
            raise WriteFailed(
                f"rows were added and could not be recorded: {self._unrecorded!r}. What came before is safe; resume"
            ) from self._unrecorded

    async def _wait(self, ctx: Context, may: Callable[[], object]) -> None:
        slots = ctx._run.slots if ctx.has_slot else None
        if slots is None:
            await self._wait_here(ctx, may)
            return
        # The limiter waits for the trainer, and the trainer perhaps for an evaluation: that may have the slot.
        self.without_slot += 1
        try:
            slots.give_slot(ctx)
            await self._wait_here(ctx, may)
            await slots.take_slot(ctx)
        finally:
            self.without_slot -= 1

    async def _wait_here(self, ctx: Context, may: Callable[[], object]) -> None:
        waits = self._waiting.setdefault(ctx, [])
        waits.append(may)
        self._state.changed.notify()  # a waiting trainer may now see that nothing comes
        try:
            await self.feed.wait_for(may)
        finally:
            waits.remove(may)
            if not waits:
                del self._waiting[ctx]

    def _record(self, ctx: Context, env: int, first: int, count: int, version: int) -> None:
        state = self._state
        segment, offset, length = -1, 0, 0
        if state.writer is not None and state.writing:
            at = state.writer.writer.place(self.feed.encode(first, count), first, 0, 0)
            segment, offset, length = at.segment, at.offset, at.length
            self.feed.wrote(first, count, at)
        state.record(Added(ctx.uid, ctx.member, ctx.attempt, env, first, count, version, segment, offset, length))
