"""Ctrl-C wherever a verb of the synchronous form waits for the loop: the next save comes, and the end is an end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from pipeline.sync_form import SyncPipeline
from tests.support.replaying import Counter
from tests.support.runs import pipeline, task


class Interrupts:
    """Raises at the k-th crossing from the trainer's thread to the loop: before it, or once the loop has done it."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, *, done: bool) -> None:
        self.left, self._done = number, done
        for name in ("_call", "_do"):
            patch.setattr(SyncPipeline, name, self._wrapped(getattr(SyncPipeline, name)))

    def _wrapped(self, crossing: Callable[..., Any]) -> Callable[..., Any]:
        def cross(pipe: SyncPipeline, function: Callable[..., Any], *args: Any) -> Any:
            self.left -= 1
            due = self.left == 0
            if due and not self._done:
                raise KeyboardInterrupt
            result = crossing(pipe, function, *args)
            if due:
                raise KeyboardInterrupt
            return result

        return cross


def save(pipe: SyncPipeline) -> None:
    pipe.save(0).committed()


def checkpoint(pipe: SyncPipeline) -> None:
    with pipe.checkpoint(0) as folder:
        Path(folder, "weights").write_bytes(b"x")


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("verb", [save, checkpoint])
@pytest.mark.timeout(60)
def test_an_interrupted_save_holds_up_nothing(tmp_path: Path, verb: Callable[[Any], None], done: bool) -> None:
    number = 0
    interrupted = True
    while interrupted:
        number += 1
        interrupted = False
        directory = tmp_path / str(number)
        with pipeline(task(12), directory=directory).sync() as pipe:
            pipe.attach(counter=Counter())
            pipe.start()
            with pytest.MonkeyPatch.context() as patch:
                crossings = Interrupts(patch, number, done=done)
                try:
                    verb(pipe)
                except KeyboardInterrupt:
                    interrupted = True
            assert interrupted == (crossings.left <= 0)
            if verb is save:
                pipe.save(0).committed()
        assert verify(str(directory)).whole
    assert number > 3
