"""Which groups a batch takes: every selector against a plain list."""

from __future__ import annotations

from collections import deque
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.buffer import GroupBuffer
from tests.properties.conftest import SOAK

Order = Literal["finished", "strict"]
Choice = Literal["fifo", "stalest", "freshest"]


class BufferMachine(RuleBasedStateMachine):
    """Claims, finishes, drops, reopens, takes and gives back groups, as a pipeline does."""

    order: Order = "finished"
    choice: Choice = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self.buffer = GroupBuffer(order=self.order, selector=self.choice)
        self.open: list[int] = []
        self.held: list[tuple[int, int]] = []  # (uid, version), as they were added
        self.out: list[tuple[int, int]] = []
        self.next_uid = 0
        self.peak = 0

    def expected(self) -> list[int]:
        """Every group that can be taken now, in order."""
        if self.order == "strict":
            least = min(self.open, default=self.next_uid)
            return sorted(uid for uid, _ in self.held if uid < least)
        if self.choice == "fifo":
            return [uid for uid, _ in self.held]
        sign = -1 if self.choice == "freshest" else 1
        return [uid for uid, _ in sorted(self.held, key=lambda each: sign * each[1])]  # stable: the first added first

    def add(self, uid: int, version: int) -> None:
        self.buffer.add(uid, version)
        self.held.append((uid, version))
        self.peak = max(self.peak, len(self.held))

    @initialize(count=st.integers(0, 8))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.claim()

    @rule()
    def claim(self) -> None:
        self.buffer.opened(self.next_uid)
        self.open.append(self.next_uid)
        self.next_uid += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), version=st.integers(0, 4), dropped=st.booleans())
    def end(self, data: st.DataObject, version: int, dropped: bool) -> None:
        uid = data.draw(st.sampled_from(self.open))
        self.open.remove(uid)
        self.buffer.closed(uid)
        if not dropped:
            self.add(uid, version)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.sampled_from(["reopened", "dropped", "added again"]))
    def remove(self, data: st.DataObject, again: str) -> None:
        uid, version = data.draw(st.sampled_from(self.held))
        self.held.remove((uid, version))
        self.buffer.remove(uid)
        if again == "reopened":
            self.buffer.opened(uid)
            self.open.append(uid)
        elif again == "added again":
            self.add(uid, version)

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        expected = self.expected()
        assert self.buffer.ready(count) == (len(expected) >= count)
        taken = self.buffer.take(count)
        assert taken == expected[:count]
        self.out += [each for each in self.held if each[0] in taken]
        self.held = [each for each in self.held if each[0] not in taken]

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        uid, version = data.draw(st.sampled_from(self.out))
        self.out.remove((uid, version))
        self.add(uid, version)

    @rule(version=st.integers(0, 6))
    def look_for_old_ones(self, version: int) -> None:
        old = [uid for uid, each in sorted(self.held, key=lambda each: each[1]) if each < version]
        assert self.buffer.older_than(version) == old
        assert self.buffer.older_than(version) == old, "looking changes nothing"

    @invariant()
    def it_holds_what_the_list_holds(self) -> None:
        assert len(self.buffer) == len(self.held)
        assert all(uid in self.buffer for uid, _ in self.held)
        assert not any(uid in self.buffer for uid in self.open)
        assert self.buffer.peak == self.peak
        ready = len(self.expected())
        assert self.buffer.ready(ready)
        assert not self.buffer.ready(ready + 1)


class StalestMachine(BufferMachine):
    choice: Choice = "stalest"


class FreshestMachine(BufferMachine):
    choice: Choice = "freshest"


class StrictMachine(BufferMachine):
    order: Order = "strict"


class StrictStalestMachine(StrictMachine):
    choice: Choice = "stalest"


TestFifo = BufferMachine.TestCase
TestStalest = StalestMachine.TestCase
TestFreshest = FreshestMachine.TestCase
TestStrict = StrictMachine.TestCase
TestStrictStalest = StrictStalestMachine.TestCase
for case in (TestFifo, TestStalest, TestFreshest, TestStrict, TestStrictStalest):
    case.settings = settings(max_examples=60 * SOAK, stateful_step_count=50)


@pytest.mark.parametrize("order", ["finished", "strict"])
@pytest.mark.parametrize("choice", ["fifo", "stalest"])
def test_much_that_comes_and_goes_leaves_nothing_behind(order: Order, choice: Choice) -> None:
    """The containers of a selector stay as small as what it holds, whatever passed through it."""
    buffer = GroupBuffer(order=order, selector=choice)
    for uid in range(5000):
        buffer.opened(uid)
        buffer.closed(uid)
        buffer.add(uid, uid // 50)
        if uid % 2:
            buffer.remove(uid)
        elif len(buffer) > 20:
            assert buffer.take(10)
    assert len(buffer) <= 21
    assert entries_in(buffer) < 400


def test_what_passes_behind_a_slow_one_leaves_nothing_behind() -> None:
    """Strict order: one item takes long, and everything claimed after it is dropped before it can be taken."""
    buffer = GroupBuffer(order="strict", selector="fifo")
    buffer.opened(0)
    for uid in range(1, 5000):
        buffer.opened(uid)
        buffer.closed(uid)
        buffer.add(uid, 0)
        assert not buffer.ready(1)
        buffer.remove(uid)
    assert entries_in(buffer) < 400
    buffer.closed(0)
    buffer.add(0, 0)
    assert buffer.take(2) == [0]


def entries_in(buffer: GroupBuffer) -> int:
    """Entries of all containers in it, dead ones included."""
    seen: set[int] = set()

    def held(value: object) -> int:
        if id(value) in seen:
            return 0
        seen.add(id(value))
        if isinstance(value, dict):
            return len(value) + sum(map(held, value.values()))
        if hasattr(value, "__dict__"):
            return sum(map(held, vars(value).values()))
        return len(value) + sum(map(held, value)) if isinstance(value, (set, list, tuple, deque)) else 0

    return held(buffer)
