"""What is looked at of the calls of a thread hangs on these calls alone, not on objects that go at that moment."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.buffer.transitions.elsewhere import pieces
from pipeline.store.lock import RunLock
from tests.support.failing_calls import Calls


class Held:
    """Goes when nobody has it any more."""


def test_what_an_object_calls_that_goes_is_not_looked_at(tmp_path: Path) -> None:
    calls = Calls()
    lock = RunLock(str(tmp_path / "lock"))
    held = Held()
    weakref.finalize(held, RunLock(str(tmp_path / "other")).release)
    with calls.watched():
        del lock
        assert list(calls.seen) == []
        del held
        assert list(calls.seen) == []
        RunLock(str(tmp_path / "own")).holds()
    assert [code.co_qualname for code in calls.seen] == ["RunLock.__init__", "RunLock.holds"]


class _Numbers:
    def __len__(self) -> int:
        return 1 << 20

    def read(self, begin: int, count: int) -> np.ndarray:
        return np.zeros(count)

    def at(self, places: np.ndarray) -> np.ndarray:
        return np.zeros((len(places), 1))


@pytest.fixture
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_thresholds")
def test_nor_what_ends_as_garbage_is_collected() -> None:
    """A generator, which is gone on with then so that it ends."""
    calls = Calls()
    gc.collect()  # what is made from now on is looked at first
    begun = pieces(_Numbers())
    next(begun)
    box: list[Any] = [begun]
    box.append(box)
    del begun, box
    with calls.watched():
        gc.set_threshold(1, 1, 1)
        kept = [[number] for number in range(1000)]
    assert list(calls.seen) == []
    assert gc.isenabled()
    assert len(kept) == 1000
