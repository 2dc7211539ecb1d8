"""What evaluations came to: the results, and where those of before lie, so that nobody has to make them again.

A result is kept under (task, version, index, member), and found again only from where its weights can be told to be the
same: by the incarnation that made it, and by those that went on from that one's generations, as far as the versions had
gone when they did. After the weights went back, a version 12 of the line that was left is no version 12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pipeline.locations import Location
from pipeline.records import AnyEvent, Evaluated, Opened, Rollout
from pipeline.store.codec import unpack

Key = tuple[int, int]
"""(index, member)."""


class Kept(msgspec.Struct, frozen=True, gc=False):
    """One result that lies in a segment."""

    made: Evaluated
    location: Location


class Evaluations:
    """Part of the folded state: every result that was written, and how the incarnations follow each other."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], list[Kept]] = {}
        self._parents: dict[int, tuple[int, int]] = {}  # by incarnation: whose generation it recovered, and its version

    def apply(self, incarnation: int, rank: int, event: AnyEvent) -> None:
        """Take in an event; those that are none of its business do nothing."""
        if type(event) is Evaluated:
            if event.segment >= 0:
                where = Location(incarnation, rank, event.segment, event.offset, event.length)
                self._kept.setdefault((event.task, event.version), []).append(Kept(event, where))
        elif type(event) is Opened:
            self._parents[event.incarnation] = (event.parent, event.version)

    def find(self, task: str, version: int, mark: str, incarnation: int) -> dict[Key, Kept]:
        """Return what ``incarnation`` may use of the results of ``task`` for ``version``; none older than that."""
        newest = self._visible(incarnation)
        found: dict[Key, Kept] = {}
        for kept in self._kept.get((task, version), ()):
            made = kept.made
            at_most = newest.get(kept.location.incarnation, -1)
            if made.mark == mark and version <= made.oldest and made.newest <= at_most:
                found[made.index, made.member] = kept
        return found

    def places(self, version: int) -> list[Location]:
        """Return where the results of ``version`` and newer ones lie."""
        return [kept.location for (_, of), each in self._kept.items() if of >= version for kept in each]

    def _visible(self, incarnation: int) -> dict[int, int]:
        """Return, for each incarnation on the line that leads here, the newest version that this line has of it."""
        newest, bound = {incarnation: 2**63}, 2**63
        while incarnation in self._parents:
            incarnation, restored = self._parents[incarnation]
            if incarnation < 0 or incarnation in newest:
                break
            bound = min(bound, restored)
            newest[incarnation] = bound
        return newest


class Outcome(msgspec.Struct, eq=False, kw_only=True):
    """What one item came to.

    Attributes:
        index: the item's index in its source.
        member: which of the item's samples it is, from 0.
        reward: None if it failed.
        error: why it failed for good; None if it did not.
        reused: whether it had been made before, in this life or in one that a crash ended.
    """

    index: int
    member: int = 0
    reward: float | None = None
    error: str | None = None
    reused: bool = False
    _blob: bytes | None = None
    _rollout: Rollout | None = None

    @property
    def rollout(self) -> Rollout | None:
        """The rollout, with tensors that are the caller's; None if it failed."""
        if self._rollout is None and self._blob is not None:
            # At first use and on the caller's thread, as with a batch.
            _, self._rollout = unpack(self._blob, f"evaluation of item {self.index}")
        return self._rollout


class Evaluation(msgspec.Struct, eq=False, kw_only=True):
    """The results of ``evaluate``, in the order of the items.

    Attributes:
        task: the task's name.
        version: what was asked for; every rollout is of these weights, or of newer ones that came meanwhile.
        outcomes: one for each item and sample.
        seconds: how long it took.
    """

    task: str
    version: int
    outcomes: Sequence[Outcome]
    seconds: float = 0.0

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of those that did not fail."""
        return [each.rollout for each in self.outcomes if each.rollout is not None]

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of those that did not fail; None if all did."""
        rewards = [each.reward for each in self.outcomes if each.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def failed(self) -> int:
        """How many failed for good."""
        return sum(each.error is not None for each in self.outcomes)

    @property
    def reused(self) -> int:
        """How many had been made before."""
        return sum(each.reused for each in self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    def __repr__(self) -> str:
        return f"Evaluation({self.task!r}, version={self.version}, outcomes={len(self)}, failed={self.failed})"
