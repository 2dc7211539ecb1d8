"""What the ledger keeps of an item, of a task, and of what the weights have seen."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipeline.records import Claimed, HeldItem, Location

WAITING, RUNNING, PARKED, BUFFERED, LEASED = range(5)
STATES = ("waiting", "running", "parked", "buffered", "leased")
PENDING, IN_FLIGHT, FINISHED, GIVEN_UP, UNREWARDED = range(5)


class Entry(msgspec.Struct, eq=False, gc=False):
    """A claimed item that has not ended.

    Neither it nor anything in it is walked by the garbage collector, which would otherwise cost more than all else that
    is done with 100,000 groups. So it holds numbers, text, bytes and tuples of numbers only, and can be in no cycle.
    """

    uid: int
    task: str
    epoch: int
    index: int
    position: int
    size: int
    need: int
    kind: str
    content: bytes | None
    members: bytearray
    failures: tuple[int, ...]
    attempts: tuple[int, ...]
    unsettled: int
    in_flight: int = 0
    state: int = RUNNING
    rank: int = 0
    life: int = 0
    interruptions: int = 0
    deaths: int = 0
    rerolls: int = 0
    """How often it was run again because it had become too old, crashes aside."""
    made: int = 0
    """The incarnation in which a member finished last."""
    order: int = 0
    """Counts groups as they become buffered: the order in which fifo hands them out."""
    oldest: int | None = None
    newest: int = 0
    effective: int = 0
    """The oldest version in terms of the weights that are in use now; staleness counts from it."""
    rewards: float = 0.0
    tokens: int = 0
    parked: int = 0
    """Members that have run and wait for their reward."""
    given: tuple[tuple[int, float], ...] = ()
    """(member, reward) of those that were given later: they count instead of what the payload says."""

    @classmethod
    def of(cls, event: Claimed) -> Entry:
        """Return the entry of an item that has just been claimed."""
        size = event.size
        zeros = (0,) * size
        return cls(
            event.uid,
            event.task,
            event.epoch,
            event.index,
            event.position,
            size,
            event.need,
            event.kind,
            event.content,
            bytearray(size),
            zeros,
            zeros,
            size,
        )

    @classmethod
    def held(cls, item: HeldItem) -> Entry:
        """Return the entry of an item that somebody else's state lists; nothing of it is in flight."""
        unsettled = item.members.count(PENDING)
        return cls(
            item.uid,
            item.task,
            item.epoch,
            item.index,
            item.position,
            item.size,
            item.need,
            item.kind,
            item.content,
            bytearray(item.members),
            tuple(item.failures),
            tuple(item.attempts),
            unsettled,
            state=WAITING if unsettled else PARKED if UNREWARDED in item.members else BUFFERED,
            life=item.life,
            interruptions=item.interruptions,
            deaths=item.deaths,
            rerolls=item.rerolls,
            order=item.order,
            oldest=item.oldest,
            newest=item.newest,
            effective=item.effective,
            rewards=item.rewards,
            tokens=item.tokens,
            parked=item.members.count(UNREWARDED),
            given=tuple((member, reward) for member, reward in item.given),
        )

    def hold(self, places: Iterable[tuple[int, Location]] = (), *, anew: bool = False) -> HeldItem:
        """Return what another state needs to know of this item.

        Args:
            places: where the payload of each member that finished lies.
            anew: as if nothing had finished. What failed for good stays so.
        """
        gone = (IN_FLIGHT, FINISHED, UNREWARDED) if anew else (IN_FLIGHT,)
        kept = bytes(PENDING if status in gone else status for status in self.members)
        return HeldItem(
            self.uid,
            self.task,
            self.epoch,
            self.index,
            self.position,
            self.size,
            self.need,
            self.kind,
            self.content,
            kept,
            self.failures,
            self.attempts,
            self.life + anew,
            self.interruptions,
            self.deaths,
            self.rerolls,
            0 if anew else self.order,
            None if anew else self.oldest,
            0 if anew else self.newest,
            0 if anew else self.effective,
            0.0 if anew else self.rewards,
            0 if anew else self.tokens,
            tuple((m, at.incarnation, at.rank, at.segment, at.offset, at.length) for m, at in places),
            () if anew else self.given,
        )


class TaskTotals(msgspec.Struct):
    """A task's counts for the life of the run."""

    claimed: int = 0
    trained: int = 0
    trained_rollouts: int = 0
    trained_tokens: int = 0
    dropped: dict[str, int] = {}
    produced: int = 0
    """Groups that became buffered; one that was reopened and finished again counts again."""
    finished: int = 0
    """Members that finished."""
    failed: int = 0
    """Attempts that failed."""
    interrupted: int = 0
    reopened: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0
    seconds: float = 0.0
    """Time that attempts which finished took."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was handed out: its groups, in order, and how often each had been reopened."""

    step: int
    uids: list[int]
    lives: list[int]
    consumer: str = "trainer"


class ConsumerHalf(msgspec.Struct, kw_only=True):
    """What the weights have seen, as a generation keeps it. Every field has a default: old files load."""

    format_version: int = 1
    step: int = 0
    trained: list[tuple[int, int]] = []
    leases: list[Lease] = []
    trained_by_task: dict[str, tuple[int, int, int]] = {}
    """Groups, rollouts and tokens."""
