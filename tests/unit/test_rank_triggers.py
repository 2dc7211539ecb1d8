"""What one rank hears, all of them do, once and at the same step."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline import ReplayBuffer, UsageError, WriteFailed
from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.distributed import Ranks
from pipeline.errors import RankFailed, RankLost, StoppedExit
from pipeline.replay import due
from pipeline.store.layout import Layout
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter

SECONDS = 30.0
GONE = 1
"""The rank that leaves the others."""
Hook = Callable[[ReplayBuffer, int], None]


class Died(BaseException):
    """Stands for the death of the rank's process."""


class Trained(NamedTuple):
    """What became of a rank's loop."""

    saves: list[int]
    stopped: StoppedExit | None = None


def manifests(directory: Path) -> list[Manifest]:
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    return [each.manifest for each in find_generations(layout, run.run_id).complete]


def wants_a_save(buffer: ReplayBuffer) -> None:
    """As when the seconds of ``save_every_s`` are over on this rank."""
    assert buffer._due is not None
    buffer._due._since = -math.inf


def is_stopped(buffer: ReplayBuffer) -> None:
    """As when a SIGTERM came to this rank."""
    assert buffer._due is not None
    buffer._due._reason, buffer._due._code = "SIGTERM", 143


def train(
    ranks: Ranks, directory: Path, steps: Iterable[int], hook: Hook, reduce: Callable[[], Any], **options: Any
) -> Trained:
    """Two rows a step, an all-reduce, and a save where it is due."""
    counter, saves = Counter(), list[int]()
    with ReplayBuffer(10_000, directory=directory, save_every_s=1e6, keep=None, ranks=ranks, **options) as buffer:
        buffer.attach(counter=counter)
        buffer.resume()
        try:
            for step in steps:
                hook(buffer, step)
                counter.step = step
                buffer.extend({"n": np.full(2, step)})
                reduce()
                if buffer.save_due(step):
                    saves.append(step)
                    buffer.save(step)
        except StoppedExit as stopped:
            return Trained(saves, stopped)
    return Trained(saves)


def in_lock_step(size: int, directory: Path, hooks: dict[int, Hook], steps: int = 100, **options: Any) -> list[Trained]:
    """Train ``size`` ranks that wait for each other in each step; one that waits too long has an error."""
    barrier = threading.Barrier(size)

    def body(ranks: Ranks) -> Trained:
        hook = hooks.get(ranks.rank, lambda buffer, step: None)
        return train(ranks, directory, range(1, steps + 1), hook, lambda: barrier.wait(SECONDS), **options)

    return fine(on_ranks(size, body))


def at(step: int, do: Callable[[ReplayBuffer], None]) -> Hook:
    return lambda buffer, now: do(buffer) if now == step else None


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("first", [True, False])
def test_what_one_rank_wants_all_save_once(tmp_path: Path, size: int, first: bool) -> None:
    found = in_lock_step(size, tmp_path, {0 if first else size - 1: at(7, wants_a_save)})
    assert len({tuple(each.saves) for each in found}) == 1
    (step,) = found[0].saves
    (saved,) = manifests(tmp_path)
    assert step >= 7
    assert (saved.step, saved.world_size, [shard.rank for shard in saved.shards]) == (step, size, list(range(size)))
    assert [shard.rows for shard in saved.shards] == [2 * step] * size  # each rank's rows are of that step


def test_two_that_want_one_at_the_same_time_get_one(tmp_path: Path) -> None:
    found = in_lock_step(3, tmp_path, {rank: at(7, wants_a_save) for rank in (0, 2)})
    assert [len(each.saves) for each in found] == [1, 1, 1]
    assert len(manifests(tmp_path)) == 1


def test_one_request_after_the_other(tmp_path: Path) -> None:
    hooks: dict[int, Hook] = {
        rank: lambda buffer, step, rank=rank: wants_a_save(buffer) if step % 60 == 20 * rank else None  # type: ignore[misc]
        for rank in range(3)
    }
    found = in_lock_step(3, tmp_path, hooks, steps=300)
    assert found[1:] == found[:-1]
    assert [saved.step for saved in manifests(tmp_path)] == found[0].saves
    assert found[0].saves[0] in range(20, 87)
    assert len(found[0].saves) >= 3


def test_all_save_at_one_step_though_one_is_far_ahead(tmp_path: Path) -> None:
    ahead, asked = threading.Event(), threading.Event()

    def body(ranks: Ranks) -> Trained:
        def hook(buffer: ReplayBuffer, step: int) -> None:
            if ranks.rank == 0 and step == 36:
                ahead.set()
                assert asked.wait(SECONDS)
            elif ranks.rank == 1 and step == 5:
                assert ahead.wait(SECONDS)
                wants_a_save(buffer)
            elif ranks.rank == 1 and step == 6:
                asked.set()
            elif ranks.rank == 2 and step == 3:
                assert asked.wait(SECONDS)

        return train(ranks, tmp_path, range(1, 151), hook, lambda: None)

    found = fine(on_ranks(3, body))
    assert found[1:] == found[:-1]
    (step,) = found[0].saves
    assert step >= 36
    (saved,) = manifests(tmp_path)
    assert [shard.rows for shard in saved.shards] == [2 * step] * 3
    assert (saved.step, saved.run_id) == (step, Layout(str(tmp_path)).read_run().run_id)  # type: ignore[union-attr]

    def look(ranks: Ranks) -> tuple[int, int, list[int]]:
        counter = Counter()
        with ReplayBuffer(10_000, directory=tmp_path, ranks=ranks) as buffer:
            buffer.attach(counter=counter)
            return buffer.resume().step, counter.step, buffer.ring.storage.view("n")[: len(buffer)].tolist()

    assert fine(on_ranks(3, look)) == [(step, step, [n for n in range(1, step + 1) for _ in range(2)])] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_of_one_stops_all(tmp_path: Path, rank: int) -> None:
    found = in_lock_step(3, tmp_path, {rank: at(7, is_stopped)})
    (saved,) = manifests(tmp_path)
    for each in found:
        assert each.saves == [saved.step]
        assert each.stopped is not None
        assert (each.stopped.code, each.stopped.step, each.stopped.generation) == (143, saved.step, saved.generation)
        assert each.stopped.reason == f"SIGTERM at rank {rank}"


def test_the_stop_file_stops_all_and_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "_LOOK_EVERY_S", 0.0)
    found = in_lock_step(3, tmp_path, {1: at(7, lambda buffer: (tmp_path / "stop").touch())})
    assert {(each.stopped.code, each.stopped.reason) for each in found if each.stopped} == {(0, "stop file")}
    assert len({tuple(each.saves) for each in found}) == 1
    assert len(manifests(tmp_path)) == 1
    assert not (tmp_path / "stop").exists()


def test_a_stop_is_not_lost_behind_another_ranks_wish(tmp_path: Path) -> None:
    found = in_lock_step(3, tmp_path, {0: at(7, wants_a_save), 1: at(7, is_stopped)}, steps=200)
    assert all(each.stopped is not None for each in found)
    assert len({tuple(each.saves) for each in found}) == 1
    assert [saved.step for saved in manifests(tmp_path)] == found[0].saves
    assert len(found[0].saves) in (1, 2)


def test_steps_are_counted_alike_on_all_ranks_and_together_with_what_is_asked_for(tmp_path: Path) -> None:
    found = in_lock_step(3, tmp_path, {1: at(7, wants_a_save)}, save_every=30)
    assert found[1:] == found[:-1]
    assert set(found[0].saves) >= {30, 60, 90}
    assert len(found[0].saves) in (3, 4)
    assert [saved.step for saved in manifests(tmp_path)] == found[0].saves


def test_scripts_that_never_ask_are_stopped_at_the_next_save_of_all(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def body(ranks: Ranks) -> tuple[list[int], int]:
        steps = []
        with ReplayBuffer(1000, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()
            for step in range(10, 2000, 10):
                steps.append(step)
                if step == 30 and ranks.rank == 1:
                    is_stopped(buffer)
                barrier.wait(SECONDS)
                try:
                    buffer.save(step)
                except StoppedExit as stopped:
                    return steps, stopped.step
        return steps, -1

    found = fine(on_ranks(2, body))
    assert found[0] == found[1]
    assert found[0][1] in range(30, 110)
    assert manifests(tmp_path)[-1].step == found[0][1]


def test_a_rank_that_has_left_is_missed_by_the_others_in_time(tmp_path: Path) -> None:
    stay = threading.Barrier(2)  # those two
    wait = partial(stay.wait, SECONDS)

    def body(ranks: Ranks) -> str:
        def hook(buffer: ReplayBuffer, step: int) -> None:
            if ranks.rank == GONE and step == 5:
                raise Died
            if ranks.rank == 2 and step == 20:
                is_stopped(buffer)

        try:
            train(ranks, tmp_path, itertools.count(1), hook, wait if ranks.rank != GONE else lambda: None)
        except Died:
            return "left"
        except (RankLost, RankFailed) as error:
            stay.abort()  # the other is told when its buffer is closed
            return str(error)
        raise AssertionError

    first, second, third = fine(on_ranks(3, body))
    assert first.startswith("save part: rank 1 failed: Died")
    assert second == "left"
    assert "rank 1 failed: Died" in third
    assert not manifests(tmp_path)


@pytest.mark.parametrize("decided", [False, True])
def test_one_that_dies_when_it_has_asked_leaves_nobody_behind(tmp_path: Path, decided: bool) -> None:
    """It has claimed the request, and dies before the step is decided, or right after."""

    stay = threading.Barrier(2)  # those two
    wait = partial(stay.wait, SECONDS)

    def body(ranks: Ranks) -> str:
        def hook(buffer: ReplayBuffer, step: int) -> None:
            if ranks.rank == GONE and step == 20:
                wants_a_save(buffer)
                meeting: Any = buffer._due._meeting  # type: ignore[union-attr]
                holder, verb = (meeting, "_find") if decided else (meeting._ranks, "claim")
                do = getattr(holder, verb)

                def dies(*given: Any) -> Any:
                    do(*given)
                    raise Died

                setattr(holder, verb, dies)

        try:
            train(ranks, tmp_path, itertools.count(1), hook, wait if ranks.rank != GONE else lambda: None)
        except Died:
            return "dead"
        except (RankLost, RankFailed) as error:
            stay.abort()  # the other is told when its buffer is closed
            return str(error)
        raise AssertionError

    first, second, third = fine(on_ranks(3, body))
    assert second == "dead"
    assert "rank 1 failed: Died" in first
    assert "rank 1 failed: Died" in third
    assert not manifests(tmp_path)


def test_a_save_that_was_asked_for_and_failed_is_asked_for_again_by_all_or_by_nobody(tmp_path: Path) -> None:
    """One rank's model cannot be read; the next request finds all of them where they were."""
    barrier = threading.Barrier(2)

    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            if self.step < 100:
                raise WriteFailed("this one's trouble")
            return super().state_dict()

    def body(ranks: Ranks) -> list[tuple[int, str]]:
        said = []
        counter = Broken()
        with ReplayBuffer(1000, directory=tmp_path, save_every_s=1e6, ranks=ranks) as buffer:
            buffer.attach(counter=counter)
            buffer.resume()
            for step in range(1, 251):
                counter.step = step
                if ranks.rank == 1 and step in (10, 120):
                    wants_a_save(buffer)
                barrier.wait(SECONDS)
                if buffer.save_due(step):
                    try:
                        buffer.save(step, wait=True)
                        said.append((step, "saved"))
                    except (WriteFailed, RankFailed) as error:
                        said.append((step, type(error).__name__))
        return said

    first, second = fine(on_ranks(2, body))
    assert [step for step, _ in first] == [step for step, _ in second]
    assert [kind for _, kind in first] == ["WriteFailed", "saved"]
    assert [kind for _, kind in second] == ["RankFailed", "saved"]


def test_ranks_need_steps_that_do_not_go_back(tmp_path: Path) -> None:
    def body(ranks: Ranks) -> None:
        with ReplayBuffer(10, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()
            with pytest.raises(UsageError, match=r"call save_due\(step\)"):
                buffer.save_due()
            assert not buffer.save_due(5)
            assert not buffer.save_due(5)
            with pytest.raises(UsageError, match=r"save_due\(4\) comes after save_due\(5\)"):
                buffer.save_due(4)
            buffer.save(3, wait=True)  # the caller's own business

    fine(on_ranks(2, body))


class TestSignals:
    """In this process, which has one buffer without ranks."""

    def test_one_that_comes_in_the_midst_of_resume_is_heard(self, tmp_path: Path) -> None:
        missed = list[int]()
        before = signal.signal(signal.SIGTERM, lambda number, frame: missed.append(number))
        try:
            with ReplayBuffer(10, directory=tmp_path) as buffer:
                saver: Any = buffer._saver
                choose = saver._choose

                def interrupted(*given: Any) -> Any:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return choose(*given)

                saver._choose = interrupted
                buffer.resume()
                assert buffer.save_due()
                with pytest.raises(StoppedExit):
                    buffer.save(1)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert manifests(tmp_path)[-1].step == 1
        assert missed == [signal.SIGTERM]  # the script's own handler is called as well

    def test_a_resume_that_fails_gives_them_back(self, tmp_path: Path) -> None:
        (tmp_path / "other").write_text("something else")
        before = signal.getsignal(signal.SIGTERM)
        buffer = ReplayBuffer(10, directory=tmp_path)
        with pytest.raises(OSError, match="no run of forebay"):
            buffer.resume()
        assert signal.getsignal(signal.SIGTERM) is before
        buffer.close()
