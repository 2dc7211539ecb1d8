"""What is looked at of the calls of a thread hangs on these calls alone, not on objects that go at that moment."""

from __future__ import annotations

import weakref
from pathlib import Path

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
