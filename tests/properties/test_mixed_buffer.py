"""A buffer that gives so many groups of each task: against plain lists."""

from __future__ import annotations

from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.buffer import MixedBuffer
from tests.properties.conftest import SOAK

TASKS = ("c", "a", "b")


def task_of(uid: int) -> str:
    return TASKS[uid % 3]


class MixedMachine(RuleBasedStateMachine):
    """Claims, finishes, drops, reopens, takes and gives back groups, as a pipeline does."""

    order: Literal["finished", "strict"] = "finished"
    choice: Literal["fifo", "stalest", "freshest"] = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, int] = {}
        self.known: set[int] = set()  # claimed and not ended: the ledger knows no others
        self.buffer = MixedBuffer(
            order=self.order, selector=self.choice, task_of=self.task_of_known, places=lambda count: self.places
        )
        self.open: list[int] = []
        self.held: list[tuple[int, int]] = []  # (uid, version), as they were added
        self.out: list[tuple[int, int]] = []
        self.next_uid = 0
        self.peak = 0

    def task_of_known(self, uid: int) -> str:
        assert uid in self.known
        return task_of(uid)

    def expected(self, task: str) -> list[int]:
        """Every group of a task that can be taken now, in order."""
        held = [(uid, version) for uid, version in self.held if task_of(uid) == task]
        if self.order == "strict":
            least = min((uid for uid in self.open if task_of(uid) == task), default=self.next_uid)
            return sorted(uid for uid, _ in held if uid < least)
        if self.choice == "fifo":
            return [uid for uid, _ in held]
        sign = -1 if self.choice == "freshest" else 1
        return [uid for uid, _ in sorted(held, key=lambda each: sign * each[1])]

    @rule(count=st.integers(1, 4))
    def claim(self, count: int) -> None:
        for _ in range(count):
            self.known.add(self.next_uid)
            self.buffer.opened(self.next_uid)
            self.open.append(self.next_uid)
            self.next_uid += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), version=st.integers(0, 4), dropped=st.booleans())
    def end(self, data: st.DataObject, version: int, dropped: bool) -> None:
        uid = data.draw(st.sampled_from(self.open))
        self.open.remove(uid)
        if dropped:
            self.known.remove(uid)
        self.buffer.closed(uid)
        if not dropped:
            self.add(uid, version)

    def add(self, uid: int, version: int) -> None:
        self.buffer.add(uid, version)
        self.held.append((uid, version))
        self.peak = max(self.peak, len(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reopened=st.booleans())
    def remove(self, data: st.DataObject, reopened: bool) -> None:
        uid, version = data.draw(st.sampled_from(self.held))
        self.held.remove((uid, version))
        if reopened:
            self.buffer.remove(uid)
            self.buffer.opened(uid)
            self.open.append(uid)
        else:
            self.known.remove(uid)
            self.buffer.closed(uid)
            self.buffer.remove(uid)

    @rule(places=st.lists(st.integers(0, 3), min_size=3, max_size=3), more=st.integers(-1, 1))
    def take(self, places: list[int], more: int) -> None:
        self.places = dict(zip(TASKS, places, strict=True))
        count = sum(places) + more
        expected = {task: self.expected(task) for task in TASKS}
        enough = all(len(expected[task]) >= self.places[task] for task in TASKS)
        assert self.buffer.ready(count) == (enough and more == 0)
        taken = self.buffer.take(count)
        assert taken == [uid for task in TASKS for uid in expected[task][: self.places[task]]]
        self.out += [each for each in self.held if each[0] in taken]
        self.held = [each for each in self.held if each[0] not in taken]

    @precondition(lambda self: self.out)
    @rule(data=st.data(), first=st.booleans())
    def give_back(self, data: st.DataObject, first: bool) -> None:
        uid, version = data.draw(st.sampled_from(self.out))
        self.out.remove((uid, version))
        if first:
            self.buffer.put_back([(uid, version)])
            self.held.insert(0, (uid, version))
            self.peak = max(self.peak, len(self.held))
        else:
            self.add(uid, version)

    @invariant()
    def it_holds_what_the_lists_hold(self) -> None:
        assert len(self.buffer) == len(self.held)
        assert all(uid in self.buffer for uid, _ in self.held)
        assert not any(uid in self.buffer for uid in self.open)
        assert self.buffer.peak == self.peak
        versions = [version for _, version in self.held]
        assert self.buffer.counts() == {version: versions.count(version) for version in versions}
        assert len(self.buffer._task) <= len(self.held) + len(self.open), "and nothing of what has gone"


class MixedStalestMachine(MixedMachine):
    choice = "stalest"


class MixedFreshestMachine(MixedMachine):
    choice = "freshest"


class MixedStrictMachine(MixedMachine):
    order = "strict"


TestMixedFifo = MixedMachine.TestCase
TestMixedStalest = MixedStalestMachine.TestCase
TestMixedFreshest = MixedFreshestMachine.TestCase
TestMixedStrict = MixedStrictMachine.TestCase
for case in (TestMixedFifo, TestMixedStalest, TestMixedFreshest, TestMixedStrict):
    case.settings = settings(max_examples=60 * SOAK, stateful_step_count=50)
