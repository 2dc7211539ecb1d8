"""What every selector promises, run over each: see ``pipeline.interfaces.Selector``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.buffer.selectors import FifoSelector, FreshestSelector, StalestSelector, StrictSelector
from pipeline.interfaces import Selector

every = pytest.mark.parametrize("make", [FifoSelector, StalestSelector, FreshestSelector, StrictSelector])


def filled(make: Callable[[], Selector], uids: range) -> Selector:
    selector = make()
    for uid in uids:
        selector.add(uid, uid // 3)
    return selector


@every
def test_it_gives_each_key_once_and_knows_how_many_it_holds(make: Callable[[], Selector]) -> None:
    selector = filled(make, range(10))
    assert len(selector) == 10
    first, second, third = selector.take(4), selector.take(4), selector.take(4)
    assert [len(first), len(second), len(third), len(selector)] == [4, 4, 2, 0]
    assert sorted(first + second + third) == list(range(10))
    assert selector.take(1) == []


@every
def test_a_removed_key_is_not_given_and_may_come_again(make: Callable[[], Selector]) -> None:
    selector = filled(make, range(5))
    selector.remove(2)
    assert len(selector) == 4
    assert 2 not in selector.take(4)
    selector.add(2, 9)
    assert selector.take(5) == [2]


@every
def test_what_was_taken_and_put_back_first_is_taken_first(make: Callable[[], Selector]) -> None:
    selector = filled(make, range(9))
    taken = selector.take(3)
    for uid in reversed(taken):
        selector.add(uid, uid // 3, first=True)
    assert selector.take(3) == taken


@every
def test_a_key_that_is_not_held_cannot_be_removed(make: Callable[[], Selector]) -> None:
    with pytest.raises(KeyError):
        filled(make, range(3)).remove(7)
