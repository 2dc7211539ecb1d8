"""What the ledger keeps of an item, of a task, and of what the weights have seen."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipeline.ledger.places import without_members
from pipeline.locations import Location
from pipeline.records import Claimed, HeldItem, Reopened

WAITING, RUNNING, PARKED, BUFFERED, LEASED = range(5)
STATES = ("waiting", "running", "parked", "buffered", "leased")
PENDING, IN_FLIGHT, FINISHED, GIVEN_UP, UNREWARDED = range(5)

_ZERO = (0,)
_AT_REST = bytes.maketrans(bytes([IN_FLIGHT]), bytes([PENDING]))
_ANEW = bytes.maketrans(bytes([IN_FLIGHT, FINISHED, UNREWARDED]), bytes([PENDING] * 3))


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
    ages: tuple[int, ...] = ()
    """(member, version, tokens), flat: how many tokens weights of which version made, where that is kept at all.
    Versions are in terms of the weights that are in use now."""
    masked: int = 0
    """Tokens that are too old for the batch that the group is leased for."""
    rows: int = 0
    """Rows that its attempt in flight has added to the run's buffer."""

    @property
    def freshest(self) -> int:
        """The newest version of a token: one of any other says that the group is too old, if this one does."""
        return max(self.ages[1::3]) if self.ages else self.effective

    def too_old(self, least: int) -> int:
        """Return how many tokens have a version below ``least``."""
        ages = self.ages
        return sum(tokens for version, tokens in zip(ages[1::3], ages[2::3], strict=True) if version < least)

    def members_below(self, least: int) -> frozenset[int]:
        """Return the members of which every token has a version below ``least``."""
        members = zip(self.ages[::3], self.ages[1::3], strict=True)
        return frozenset(self.ages[::3]) - {member for member, version in members if version >= least}

    def reopen(self, event: Reopened) -> None:
        """Begin anew: the members that ``event`` names, or all."""
        self.life += 1
        self.deaths = 0  # it had finished, so none of its members is what kills the process
        self.rerolls += event.reason == "expired"
        if event.members:
            for member in event.members:
                self.members[member] = PENDING
            self.unsettled, self.ages = len(event.members), without_members(self.ages, set(event.members))
            self.oldest = self.effective = event.oldest
            self.newest, self.rewards, self.tokens = event.newest, event.rewards, event.tokens
        else:
            self.members = bytearray(self.size)
            self.unsettled, self.ages = self.size, ()
            self.oldest, self.newest, self.rewards, self.tokens = None, 0, 0.0, 0
        self.in_flight = self.parked = 0
        self.given = tuple(each for each in self.given if event.members and each[0] not in event.members)

    @classmethod
    def of(cls, event: Claimed) -> Entry:
        """Return the entry of an item that has just been claimed."""
        size = event.size
        zeros = _ZERO if size == 1 else (0,) * size
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
            ages=tuple(item.ages),
        )

    def hold(self, places: Iterable[tuple[int, Location]] = (), *, anew: bool = False) -> HeldItem:
        """Return what another state needs to know of this item.

        Args:
            places: where the payload of each member that finished lies.
            anew: as if nothing had finished. What failed for good stays so.
        """
        kept = bytes(self.members.translate(_ANEW if anew else _AT_REST))
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
            self.deaths if self.unsettled or not anew else 0,
            self.rerolls,
            0 if anew else self.order,
            None if anew else self.oldest,
            0 if anew else self.newest,
            0 if anew else self.effective,
            0.0 if anew else self.rewards,
            0 if anew else self.tokens,
            tuple((m, at.incarnation, at.rank, at.segment, at.offset, at.length) for m, at in places),
            () if anew else self.given,
            () if anew else self.ages,
        )


class TaskTotals(msgspec.Struct):
    """A task's counts for the life of the run."""

    claimed: int = 0
    trained: int = 0
    trained_rollouts: int = 0
    trained_tokens: int = 0
    dropped: dict[str, int] = {}
    produced: int = 0
    """Groups that became buffered, and episodes that came to their end; one that was reopened and finished again counts
    again."""
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
    again: int = 0
    """Members that finished in a group that had been reopened: items that were long enough to become too old are among
    them more often than in the source."""
    again_tokens: int = 0
    retired: int = 0
    """Episodes that ended: what they made are rows of the run's buffer."""
    retired_early: int = 0
    """Of those, the ones that were cut: what they had made by then stays."""
    rows: int = 0
    """Rows that were added."""
    masked_tokens: int = 0
    """Tokens in batches that were trained, but masked as too old; ``trained_tokens`` are those that were not."""


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
    masked_by_task: dict[str, int] = {}
    """Tokens in these groups that were masked as too old."""
