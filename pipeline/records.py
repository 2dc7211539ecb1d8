"""What travels and what is kept: items, rollouts, and the events of the producer half.

The events are a journal format. Evolution rules, which hold for every struct here that is persisted:

* a new field goes to the end and has a default; a field is never retyped, renamed or reused;
* a tag is never reused; a reader that meets an unknown tag refuses the journal as newer;
* every format version ever written has a golden file in ``tests/golden``.

Events are MessagePack arrays (a third of the bytes and half the time of maps): the order of fields *is* the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

TRAIN, EVALUATION, EXTERNAL, EPISODE = "train", "evaluation", "external", "episode"


class Item(msgspec.Struct, frozen=True):
    """One unit of work: ``content`` is what the source gave for ``(task, epoch, index)``.

    ``uid`` is unique in the run and never reused. ``item["prompt"]`` looks into ``content``.
    """

    task: str
    epoch: int
    index: int
    uid: int
    content: Any = None

    def __getitem__(self, key: Any) -> Any:
        return self.content[key]

    def __str__(self) -> str:
        return f"item {self.index} of epoch {self.epoch} of task {self.task!r} (uid {self.uid})"


class Trace(msgspec.Struct, frozen=True):
    """Named tensors of one agent's part in a rollout, the agent's name and its policy's."""

    tensors: Mapping[str, Any]
    agent: str = ""
    policy: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


class Rollout(msgspec.Struct, frozen=True):
    """What an attempt returns.

    Args:
        traces: a mapping of named tensors (torch or numpy, any shape and dtype), one :class:`Trace`, or a
            sequence of them.
        reward: a finite number.
        info: plain values to keep beside it: None, bool, int, float, str, bytes, lists and dicts.
        oldest: version number of the oldest weights that made a part of it. Left out, the pipeline's version
            when the attempt started.
        newest: the same of the newest. Left out, the pipeline's version when the attempt ended.
        tokens: how many tokens (or environment steps) it holds, for throughput and length figures.
    """

    traces: Any = ()
    reward: float = 0.0
    info: Mapping[str, Any] = {}
    oldest: int | None = None
    newest: int | None = None
    tokens: int = 0

    def __post_init__(self) -> None:
        given = self.traces
        if isinstance(given, Trace):
            msgspec.structs.force_setattr(self, "traces", (given,))
        elif isinstance(given, Mapping):
            msgspec.structs.force_setattr(self, "traces", (Trace(given),))
        elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
            traces = tuple(Trace(each) if isinstance(each, Mapping) else each for each in given)
            msgspec.structs.force_setattr(self, "traces", traces)

    def __getitem__(self, name: str) -> Any:
        """Return the tensor ``name`` of the first trace that has it.

        Raises:
            KeyError: no trace has it.
        """
        for trace in self.traces:
            if name in trace.tensors:
                return trace.tensors[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.traces)


class SourceMark(msgspec.Struct, frozen=True, array_like=True):
    """What identifies a source: how long it is and the digests of a few of its items, by index.

    ``length`` is -1 for an endless source. Two marks are of the same source when most of the digests that
    both have are equal: a corrected row or new rows at the end do not make it another source.
    """

    kind: str = ""
    length: int = -1
    digests: dict[int, str] = {}

    def agrees(self, other: SourceMark) -> bool:
        """Whether ``other`` marks the same source, perhaps grown or with single rows corrected."""
        if self.kind != other.kind or (self.length < 0) != (other.length < 0):
            return False
        common = self.digests.keys() & other.digests.keys()
        equal = sum(self.digests[index] == other.digests[index] for index in common)
        return equal * 2 > len(common) or not common

    def __str__(self) -> str:
        length = "endless" if self.length < 0 else f"{self.length} items"
        first = next(iter(self.digests.values()), "none")
        return f"{self.kind} ({length}, first item's digest {first})"


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="t", gc=False):
    """Base of the producer half's events; subclasses differ by tag."""


class Opened(Event, frozen=True, array_like=True, tag="open"):
    """First event of each journal: an incarnation begins.

    ``generation`` is the one that it recovered (-1: none), ``version`` what that generation's weights were.
    Attempts in flight of earlier incarnations of this rank are interrupted by it; if their journal did not end
    with :class:`Closed`, the interruption was unplanned and counts as a death of the process.
    """

    incarnation: int
    rank: int = 0
    generation: int = -1
    version: int = 0
    step: int = 0
    seed: int = 0
    host: str = ""
    process: int = 0
    wall: float = 0.0
    discarded: list[tuple[int, int, int]] = []
    """(incarnation, rank, sequence): events of that journal beyond it do not count in this line."""
    parent: int = -1
    """The incarnation that committed the generation recovered; -1: none, or not known. So the lines of a run can be
    told apart: a version 12 of a line that was left is no version 12 of this one."""
    origin: str = ""
    """Run id and generation that this run was forked from, ``"<run id>/<generation>"``."""


class EpochBegan(Event, frozen=True, array_like=True, tag="epoch"):
    """A task's source is read from its beginning; its length is fixed for this epoch."""

    task: str
    epoch: int
    length: int
    mark: SourceMark = SourceMark()
    restarted: bool = False


class Claimed(Event, frozen=True, array_like=True, tag="claim"):
    """An item was drawn. ``position`` counts draws inside the epoch; ``index`` is where the order put it.

    Of kind ``external`` it was given by hand, and epoch, position and index are -1: the sampler has no part in it. Of
    kind ``episode`` what it makes are rows, and no batch is made of it.
    """

    uid: int
    task: str
    epoch: int
    position: int
    index: int
    size: int = 1
    need: int = 1
    """How many members must finish for the group to count."""
    kind: str = TRAIN
    content: bytes | None = None
    """The item itself in MessagePack, where the source cannot give it again."""


class Started(Event, frozen=True, array_like=True, tag="start"):
    """An attempt at a member began, with weights of ``version``."""

    uid: int
    member: int = 0
    attempt: int = 1
    version: int = 0
    policy: str = ""


class Failed(Event, frozen=True, array_like=True, tag="fail"):
    """An attempt failed: the task's fault. ``final``: no retry is left and the member is settled."""

    uid: int
    member: int
    attempt: int
    reason: str
    error: str
    final: bool
    seconds: float = 0.0
    rejected: bool = False
    """The group is whole without this member, and its task's filter rejected it."""


class Interrupted(Event, frozen=True, array_like=True, tag="intr"):
    """An attempt was cut, through no fault of the task; it will be started again."""

    uid: int
    member: int
    attempt: int
    reason: str
    unplanned: bool = False


class Finished(Event, frozen=True, array_like=True, tag="done"):
    """A member finished; its payload lies at ``offset`` of ``segment`` (-1: in memory only).

    ``oldest`` and ``newest`` are version numbers of the journal's own incarnation.
    """

    uid: int
    member: int
    attempt: int
    reward: float
    oldest: int
    newest: int
    segment: int = -1
    offset: int = 0
    length: int = 0
    tokens: int = 0
    seconds: float = 0.0
    policy: str = ""
    rejected: bool = False
    """It was the last member of its group, and the task's filter rejected the group."""


class PartSaved(Event, frozen=True, array_like=True, tag="part"):
    """An attempt kept what it had so far: should it be interrupted, the next one goes on from there.

    The payload lies as that of :class:`Finished` does; a later one of the same member replaces it.
    """

    uid: int
    member: int
    attempt: int
    oldest: int
    newest: int
    segment: int = -1
    offset: int = 0
    length: int = 0


class Moved(Event, frozen=True, array_like=True, tag="move"):
    """A payload that had been written before lies here as well, and is read from here: the other segment may go."""

    uid: int
    member: int
    segment: int
    offset: int
    length: int


class Parked(Event, frozen=True, array_like=True, tag="park"):
    """A member has run and waits for its reward; the rest is as in :class:`Finished`.

    An event of its own and no flag there: a version that knows no parking must refuse it, not train it.
    """

    uid: int
    member: int
    attempt: int
    oldest: int
    newest: int
    segment: int = -1
    offset: int = 0
    length: int = 0
    tokens: int = 0
    seconds: float = 0.0
    policy: str = ""


class Rewarded(Event, frozen=True, array_like=True, tag="reward"):
    """A parked member has its reward, and has finished by that. It counts, not the one in the payload's header."""

    uid: int
    member: int
    attempt: int
    reward: float
    rejected: bool = False
    """It was the last that its group waited for, and the task's filter rejected the group."""


class Aged(Event, frozen=True, array_like=True, tag="aged"):
    """How many tokens of a member were made by weights of which version; the next event says that it finished.

    Written under ``staleness_policy="mask"`` only.
    """

    uid: int
    member: int
    tokens: dict[int, int]


class Added(Event, frozen=True, array_like=True, tag="rows"):
    """An attempt added a block of rows to the run's buffer of transitions; they lie at ``offset`` of ``segment`` (-1:
    in memory, until a generation says where).

    ``env`` tells the episodes apart that are open at one time. The rows are of the keys from ``first`` on.
    """

    uid: int
    member: int
    attempt: int
    env: int
    first: int
    count: int
    version: int
    segment: int = -1
    offset: int = 0
    length: int = 0


class Dropped(Event, frozen=True, array_like=True, tag="drop"):
    """An item leaves for good: failed, quarantined, filtered, expired, evicted or discarded."""

    uid: int
    reason: str


class Reopened(Event, frozen=True, array_like=True, tag="reopen"):
    """A finished group is to be run again, because its weights were too old.

    ``expired``: training overtook it; this is what ``max_rerolls`` counts. ``outlived``: a crash came between.
    With ``members``, only they are run again, and the other fields say what the rest of the group amounts to.
    """

    uid: int
    reason: str
    members: list[int] = []
    oldest: int = 0
    newest: int = 0
    rewards: float = 0.0
    tokens: int = 0


class BatchHint(Event, frozen=True, array_like=True, tag="batch"):
    """A batch was handed out. No state of the producer half: recovery repeats it if its line is resumed.

    ``lives`` says how often each group had been reopened, so that another life is not mistaken for this one.
    """

    step: int
    uids: list[int]
    lives: list[int]
    consumer: str = "trainer"


class Mixed(Event, frozen=True, array_like=True, tag="mix"):
    """The tasks of the run and their shares, from here on."""

    shares: dict[str, float]
    given: dict[str, float] = {}
    """The shares that the tasks were made with, where ``set_share`` has made them others; empty: the same."""


class Feedback(Event, frozen=True, array_like=True, tag="feed"):
    """What a group came to, for a source that learns from it: the mean reward of its members."""

    task: str
    uid: int
    index: int
    value: float


class Evaluated(Event, frozen=True, array_like=True, tag="eval"):
    """An item was evaluated: outside the ledger, and kept so that nobody has to do it again.

    ``version`` is what was asked for; ``oldest`` and ``newest`` are what it was made with. ``mark`` tells the source.
    """

    task: str
    version: int
    index: int
    member: int
    uid: int
    reward: float
    oldest: int
    newest: int
    mark: str = ""
    segment: int = -1
    offset: int = 0
    length: int = 0
    tokens: int = 0
    seconds: float = 0.0


class HeldItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An item that has been claimed and has not ended, as :class:`Inherited` lists it; fields as in the ledger."""

    uid: int
    task: str
    epoch: int
    index: int
    position: int
    size: int
    need: int
    kind: str
    content: bytes | None
    members: bytes
    failures: tuple[int, ...]
    attempts: tuple[int, ...]
    life: int = 0
    interruptions: int = 0
    deaths: int = 0
    rerolls: int = 0
    order: int = 0
    oldest: int | None = None
    newest: int = 0
    effective: int = 0
    rewards: float = 0.0
    tokens: int = 0
    places: tuple[tuple[int, int, int, int, int, int], ...] = ()
    """(member, incarnation, rank, segment, offset, length) of each payload that is kept."""
    given: tuple[tuple[int, float], ...] = ()
    """(member, reward) of those that were given later."""
    ages: tuple[int, ...] = ()


class Inherited(Event, frozen=True, array_like=True, tag="inherit"):
    """The producer half as somebody else gave it: a generation saved without its buffer, or another run.

    It follows :class:`Opened` in the journal of the incarnation that took it over. The items listed are as they are
    listed, whatever the events before it said of them; counts and cursors are replaced. Items that are not listed had
    ended by then, and keep what an older generation knows of them.
    """

    items: list[HeldItem]
    cursors: dict[str, tuple[int, int, int, SourceMark, int]]
    """By task: epoch, position, length, mark of the source, and the epoch in which it was begun anew last."""
    shares: dict[str, float]
    drawn: dict[str, int]
    totals: dict[str, dict[str, Any]]
    dropped: list[tuple[int, int]]
    next_uid: int = 0
    given: dict[str, float] = {}
    """The shares that the tasks were made with, where others have been set."""
    turns: int = -1
    """A draw that is the first rank's turn, where ranks share the order; -1: the next one."""


class Reserved(Event, frozen=True, array_like=True, tag="reserve"):
    """Draws of the order of all ranks, (uid, task, epoch, position, index) each: this rank claims them, and no other.

    The other fields say how the order stands after this turn of all ranks, at the draw ``next``: epochs that began on
    the way; by task, epoch and place in it; and draws since shares were set. It comes before these claims."""

    draws: list[tuple[int, str, int, int, int]]
    next: int
    began: list[EpochBegan] = []
    positions: dict[str, tuple[int, int]] = {}
    drawn: dict[str, int] = {}


class Closed(Event, frozen=True, array_like=True, tag="close"):
    """The incarnation ended on purpose: attempts cut by it were no deaths of the process."""

    wall: float = 0.0
    how: str = ""
    """``asked`` to stop, and not ended yet; ``stopped``, ``closed`` or ``failed``, as it ended. Empty: not said."""
    reason: str = ""


AnyEvent: TypeAlias = (
    Opened
    | EpochBegan
    | Claimed
    | Started
    | Failed
    | Interrupted
    | Finished
    | Parked
    | Rewarded
    | Aged
    | Dropped
    | Reopened
    | BatchHint
    | Mixed
    | Feedback
    | Evaluated
    | Closed
    | Inherited
    | PartSaved
    | Moved
    | Added
    | Reserved
)

DROP_REASONS = ("failed", "quarantined", "filtered", "expired", "evicted", "discarded")
