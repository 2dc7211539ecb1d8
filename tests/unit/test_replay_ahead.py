"""An iterator that is gone through ahead of whoever takes what it gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pipeline.replay.ahead import ahead


def test_everything_comes_in_its_order() -> None:
    assert list(ahead(iter(range(1000)))) == list(range(1000))
    assert list(ahead(iter([]))) == []


def test_no_more_is_made_than_was_asked_for() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    gone_through = ahead(items(), depth=3)
    for taken, _ in enumerate(gone_through, 1):
        assert len(made) <= taken + 3


def test_an_error_comes_after_what_was_given_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    gone_through = ahead(items())
    assert [next(gone_through), next(gone_through)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(gone_through)


def test_who_leaves_early_leaves_no_thread() -> None:
    before = threading.active_count()
    gone_through = ahead(iter(range(10**9)))
    assert next(gone_through) == 0
    assert threading.active_count() == before + 1
    gone_through.close()
    assert threading.active_count() == before


def test_ctrl_c_while_the_thread_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    gone_through = ahead(iter(range(10**9)))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(gone_through)
    assert threading.active_count() == before
