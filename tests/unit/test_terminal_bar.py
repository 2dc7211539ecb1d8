"""A bar goes as far as it is told, and begins when it is first told how far that may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.cli.terminal import Advance, Terminal


def test_it_goes_as_far_as_it_is_told() -> None:
    happened: list[object] = []

    class Seen(Terminal):
        @contextmanager
        def progress(self, total: int | None, what: str) -> Iterator[Advance]:
            happened.append((what, total))
            yield happened.append
            happened.append("closed")

    with Seen().bar("inspect") as told:
        assert happened == []
        for done in (3, 3, 10):
            told(done, 10)
    assert happened == [("inspect", 10), 3, 0, 7, "closed"]
