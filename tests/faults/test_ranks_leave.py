"""A rank whose script leaves what all ranks have, by an error or not: who waits for it, in whichever verb, hears that
at once, and not when the time limit is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Pipeline, Ranks, ReplayBuffer
from pipeline.conversation import Conversation
from pipeline.errors import RankFailed
from pipeline.sync_form import SyncPipeline
from pipeline.wiring.rank_run import RankRun
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter
from tests.support.runs import task

Leave = Callable[[str], None]


class Left(Exception):
    pass


def buffer_of(ranks: Ranks, directory: Path) -> ReplayBuffer:
    buffer = ReplayBuffer(60, directory=directory, ranks=ranks, seed=1)
    buffer.attach(counter=Counter())
    return buffer


def save(buffer: ReplayBuffer, step: int) -> None:
    buffer.extend({"x": np.arange(5), "done": np.zeros(5, bool)})
    buffer.save(step, wait=True)


def use_buffer(ranks: Ranks, directory: Path, leave: Leave) -> None:
    with buffer_of(ranks, directory) as buffer:
        leave("resume")
        buffer.resume()
        leave("first save")
        save(buffer, 1)
        leave("next save")
        save(buffer, 2)


def unopened(ranks: Ranks, directory: Path, leave: Leave) -> None:
    with buffer_of(ranks, directory) as buffer:
        leave("save")
        save(buffer, 1)


def opened(ranks: Ranks, directory: Path) -> SyncPipeline:
    pipe = Pipeline(task(24), directory=str(directory), ranks=ranks, watchdog=None, seed=3, order="strict").sync()
    pipe.attach(counter=Counter())
    return pipe


def use_pipeline(ranks: Ranks, directory: Path, leave: Leave) -> None:
    for life in (1, 2):
        with opened(ranks, directory) as pipe:
            leave(f"resume {life}")
            pipe.resume()
            leave(f"start {life}")
            pipe.start(weights_current=True)
            leave(f"batch {life}")
            pipe.get_batch(4)
            leave(f"save {life}")
            pipe.save(life).committed()


CASES: list[Any] = [
    (use_buffer, "resume"),
    (use_buffer, "first save"),
    (use_buffer, "next save"),
    (unopened, "save"),
    (use_pipeline, "start 1"),
    (use_pipeline, "save 1"),
    (use_pipeline, "resume 2"),
    (use_pipeline, "batch 2"),
    (use_pipeline, "save 2"),
]


@pytest.mark.parametrize(("use", "verb"), CASES, ids=[f"{use.__name__}-{verb}" for use, verb in CASES])
@pytest.mark.parametrize("victim", [0, 1])
def test_others_do_not_wait_for_one_that_has_left(
    tmp_path: Path, use: Callable[[Ranks, Path, Leave], None], verb: str, victim: int
) -> None:
    def do(ranks: Ranks) -> str:
        def leave(before: str) -> None:
            if (ranks.rank, before) == (victim, verb):
                raise Left("enough")

        try:
            use(ranks, tmp_path, leave)
        except (Left, RankFailed) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = fine(on_ranks(2, do))
    assert found[victim] == "Left: enough"
    assert found[1 - victim].startswith("RankFailed: ")
    assert f"rank {victim} failed: Left: enough" in found[1 - victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_closes_its_buffer_early_is_not_waited_for(tmp_path: Path, victim: int) -> None:
    def do(ranks: Ranks) -> str:
        with buffer_of(ranks, tmp_path) as buffer:
            buffer.resume()
            if ranks.rank != victim:
                with pytest.raises(RankFailed) as caught:
                    save(buffer, 1)
                return str(caught.value)
        return ""

    assert f"rank {victim} failed: ClosedError: the buffer was closed there" in fine(on_ranks(2, do))[1 - victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_whose_pipeline_cannot_be_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    fine(on_ranks(2, lambda ranks: use_pipeline(ranks, tmp_path, lambda verb: None)))

    def do(ranks: Ranks) -> str:
        pipe = opened(ranks, tmp_path)
        if ranks.rank == victim:

            async def begin(*args: Any) -> None:
                raise Left("no port")

            monkeypatch.setattr(pipe._run.control, "begin", begin)
            with pytest.raises(Left):
                pipe.__enter__()
            return ""
        with pipe, pytest.raises(RankFailed) as caught:
            pipe.resume()
        return str(caught.value)

    assert f"rank {victim} failed: Left: no port" in fine(on_ranks(2, do))[1 - victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_interrupted_while_it_hears_others_says_so(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    """Others have heard all, and are at the next step."""

    def do(ranks: Ranks) -> None:
        speaking = Conversation(ranks, "test")
        if ranks.rank == victim:
            wanted = speaking._word

            def word(*args: Any) -> Any:
                wanted(*args)
                raise KeyboardInterrupt

            monkeypatch.setattr(speaking, "_word", word)
            with pytest.raises(KeyboardInterrupt):
                speaking.all("begun")
        else:
            speaking.all("begun")
            with pytest.raises(RankFailed, match=f"rank {victim} failed: KeyboardInterrupt"):
                speaking.agreed("chosen", lambda: 1)

    fine(on_ranks(2, do))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_interrupted_between_two_steps_of_a_resume_says_so_when_it_resumes_again(
    tmp_path: Path, victim: int
) -> None:
    fine(on_ranks(2, lambda ranks: use_buffer(ranks, tmp_path, lambda verb: None)))

    def do(ranks: Ranks) -> int:
        with buffer_of(ranks, tmp_path) as buffer:
            saver: Any = buffer._saver
            if ranks.rank == victim:
                load = saver.load_attached

                def interrupted(found: Any) -> None:
                    saver.load_attached = load
                    raise KeyboardInterrupt

                saver.load_attached = interrupted
            with pytest.raises(KeyboardInterrupt if ranks.rank == victim else RankFailed):
                buffer.resume()
            return buffer.resume().step

    assert fine(on_ranks(2, do)) == [2, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_whose_thread_is_interrupted_when_its_pipeline_has_found_a_generation_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """The loop's thread comes to the end of it; nobody is there any more to go on from what it has found."""
    fine(on_ranks(2, lambda ranks: use_pipeline(ranks, tmp_path, lambda verb: None)))

    def do(ranks: Ranks) -> str:
        with opened(ranks, tmp_path) as pipe:
            if ranks.rank != victim:
                with pytest.raises(RankFailed) as caught:
                    pipe.resume()
                return str(caught.value)
            run: Any = pipe._run
            assert isinstance(run, RankRun)
            call = pipe._call

            def interrupted(*args: Any) -> Any:
                call(*args)
                raise KeyboardInterrupt

            monkeypatch.setattr(pipe, "_call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipe.resume()
            monkeypatch.setattr(pipe, "_call", call)
        return ""

    assert f"rank {victim} failed: " in fine(on_ranks(2, do))[1 - victim]
