"""One of the attached objects refuses its state: the error says what holds the checkpoint's by then, and the run is as
it was, so that a resume with the right object goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import verify
from tests.support.disk import tree
from tests.support.replaying import Counter
from tests.support.runs import pipeline, task


class Refuses(Counter):
    refuses = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError("size mismatch")
        super().load_state_dict(state)


def without_lock(directory: str) -> dict[str, bytes]:
    return {path: content for path, content in tree(directory).items() if path != "lock"}


def attached(step: int) -> dict[str, Any]:
    found = {"first": Counter(), "second": Refuses()}
    for each in found.values():
        each.step = step
    return found


def test_a_pipeline_says_what_was_loaded_and_may_be_resumed_again(run_directory: str) -> None:
    with pipeline(task(12), directory=run_directory).sync() as pipe:
        pipe.attach(**attached(5))
        pipe.start()
        pipe.save(pipe.get_batch(2).step).committed()
    before, mine = without_lock(run_directory), attached(0)
    with pipeline(task(12), directory=run_directory).sync() as pipe:
        pipe.attach(**mine)
        with pytest.raises(RuntimeError, match="size mismatch") as caught:
            pipe.resume()
        assert "attached 'second' did not take" in caught.value.__notes__[0]
        assert "first held it already" in caught.value.__notes__[0]
        assert (mine["first"].step, mine["second"].step) == (5, 0)
        assert without_lock(run_directory) == before
        mine["second"].refuses = False
        assert pipe.resume().step == 1
        assert mine["second"].step == 5
        pipe.start(weights_current=True)
        pipe.save(pipe.get_batch(2).step).committed()
    assert verify(run_directory).whole


def test_a_buffer_says_what_was_loaded_and_may_be_resumed_again(run_directory: str) -> None:
    with ReplayBuffer(20, directory=run_directory) as buffer:
        buffer.attach(**attached(5))
        buffer.extend({"reward": np.arange(7.0)})
        buffer.save(3, wait=True)
    before, mine = without_lock(run_directory), attached(0)
    with ReplayBuffer(20, directory=run_directory) as buffer:
        buffer.attach(**mine)
        with pytest.raises(RuntimeError, match="size mismatch") as caught:
            buffer.resume()
        assert "first held it already" in caught.value.__notes__[0]
        assert len(buffer) == 0
        assert without_lock(run_directory) == before
        mine["second"].refuses = False
        assert (buffer.resume().step, len(buffer), mine["second"].step) == (3, 7, 5)
        buffer.extend({"reward": np.arange(2.0)})
        buffer.save(4, wait=True)
    assert verify(run_directory).whole
