"""One buffer, several processes: no row is torn or lost, and what one does the others see."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Limiter, ReplayBuffer
from pipeline.buffer.transitions import blocks
from pipeline.buffer.transitions.layout import BEHIND
from pipeline.checkpoint import verify
from pipeline.config import Ordered, StalenessWeighted, Uniform, WithoutReplacement
from tests.support.children import child
from tests.support.sharing import (
    BACK,
    CAPACITY,
    OPERATIONS,
    Slow,
    add_limited,
    busy,
    check,
    check_next_obs,
    contents,
    drain,
    follow,
    hold_two,
    operate,
    outcome,
    read,
    rows,
    sample_limited,
    shared,
    step_on,
    until,
    use_after_fork,
    whole,
    work,
    work_in_threads,
    write,
    write_when_told,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is a thing of Linux")
SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
SECONDS = 2.0 if SOAK == 1 else 60.0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save takes several copies, so that there is something to overwrite between them."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20_000)


@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement"])
def test_writers_and_readers_at_once_lose_and_tear_nothing(select: str) -> None:
    many = 60 * SOAK
    buffer = shared(3 * 5 * many, select=select, limiter={"min_size": 64})
    told: dict[int, int] = {}
    with ExitStack() as stack:
        handle = buffer.share()
        writers = [stack.enter_context(child(write, handle, number, many)) for number in range(3)]
        kind = 1 if select == "prioritized" else 2
        readers = [stack.enter_context(child(read, handle, kind, many)) for _ in range(2)]
        for process in writers:
            assert process.hear() == "ready"
        for process in writers:
            process.pipe.send("go")
        for process in readers:
            assert process.hear() == "ready"
            process.pipe.send("go")
        for process in writers:
            for said in process.rest():
                assert said[0] != "raised", said
                for key, number in said:
                    assert told.setdefault(key, number) == number, "a key was given twice"
        assert [process.hear() for process in readers] == ["done"] * 2
    check(buffer)
    assert sorted(told) == list(range(3 * 5 * many))
    keys = buffer.ring.keys()
    assert dict(zip(keys.tolist(), buffer.ring.mark("a", keys).tolist(), strict=True)) == told


def test_threads_of_several_processes_lose_and_tear_nothing() -> None:
    many = 40 * SOAK
    buffer = shared(6 * 5 * many)
    with child(work_in_threads, buffer.share(), 3, many) as other:
        assert work(buffer, 0, many) == []
        assert other.hear() == []
    check(buffer)
    numbers = buffer.ring.mark("a", buffer.ring.keys())
    expected = [1_000_000 * number + each for number in range(6) for each in range(5 * many)]
    assert sorted(numbers.tolist()) == expected


def test_what_processes_do_in_turn_is_what_one_does_alone() -> None:
    chance = random.Random(5)
    alone, together = ReplayBuffer(CAPACITY, select="prioritized"), shared(seed=0)
    with child(follow, together.share()) as other:
        for number in range(60 * SOAK):
            what = chance.choice([each for each in OPERATIONS if each not in ("first", "sample")])
            if what == "clear" and chance.random() < 0.7:
                what = "append"
            operate(alone, what, 1000 * number)
            if chance.random() < 0.5:
                other.pipe.send((what, 1000 * number))
                assert other.hear() is None, what
            else:
                operate(together, what, 1000 * number)
            other.pipe.send(("look", 0))
            with alone.gate.lock:
                if len(alone):
                    alone._drawer.state()
            expected = outcome(alone, "look", 0)[:5]
            assert other.hear()[:5] == expected, (number, what)
            assert outcome(together, "look", 0)[:5] == expected, (number, what)
    check(together)


def test_a_priority_that_one_process_sets_decides_what_another_draws() -> None:
    buffer = shared()
    buffer.extend(rows(0, 50))
    with child(follow, buffer.share()) as other:
        buffer.update_priorities(range(50), np.zeros(50))
        buffer.update_priorities([17], [1.0])
        assert set(buffer.sample(20).keys.tolist()) == {17}
        other.pipe.send(("update", 3))
        other.hear()
        keys = np.arange(50)
        expected = 1 + (keys * 7 + 3) % 13
        weight = (expected + 1e-6) ** 0.6
        drawn = np.bincount(np.concatenate([buffer.sample(500).keys for _ in range(40)]), minlength=50) / 20_000
        assert np.abs(drawn - weight / weight.sum()).max() < 0.01
    check(buffer)


@pytest.mark.parametrize(
    "select", [Ordered(by="fifo", uses=1), Ordered(by="lifo", uses=2), Uniform(uses=3), WithoutReplacement(uses=2)]
)
def test_processes_have_the_uses_of_rows_in_common(select: Any) -> None:
    buffer = shared(600, select=select)
    buffer.extend(rows(0, 600), envs=3)
    with ExitStack() as stack:
        drawers = [stack.enter_context(child(drain, buffer.share())) for _ in range(3)]
        for process in drawers:
            assert process.hear() == "ready"
        for process in drawers:
            process.pipe.send("go")
        given = [process.hear() for process in drawers]
    times = np.bincount(np.concatenate([np.array(keys, np.int64) for keys in given]), minlength=600)
    assert times.max() == select.uses
    assert 600 * select.uses - times.sum() < 3, "what is left is less than a batch"
    buffer.extend(rows(600, 30))
    assert buffer.sample(3).keys.min() >= 598


@pytest.mark.parametrize("episodes", [1, 3, 8])
def test_a_process_that_joins_late_knows_where_episodes_began(episodes: int) -> None:
    select = Uniform(window_trajectories=episodes)
    alone, buffer = ReplayBuffer(CAPACITY, select=select), shared(select=select)
    for number in range(12):
        for each in (alone, buffer):
            each.extend(rows(40 * number, 12), envs=3)
            each.extend(rows(40 * number + 12, 7), env=np.array([3, 0, 3, 3, 1, 0, 3]))
            each.append({name: column[0] for name, column in rows(40 * number + 20, 1).items()}, env=7)
        with child(follow, buffer.share()) as other:
            other.pipe.send(("draw", 2000))
            drawn = set(other.hear())
        keys = alone.ring.keys()
        assert drawn == set(keys[alone.drawer.mass(keys) > 0].tolist())


def test_ages_of_rows_that_others_add_count() -> None:
    buffer = shared(100, select=StalenessWeighted(half_life=1.0))
    buffer.extend(rows(0, 10), version=2000)
    buffer.sample(5)
    with child(follow, buffer.share()) as other:
        other.pipe.send(("draw", 5))
        other.hear()
        buffer.extend(rows(10, 10), version=3000)
        other.pipe.send(("draw", 50))
        assert min(other.hear()) >= 10
        other.pipe.send(("extend", 100))  # of version 0
        other.hear()
        assert set(buffer.sample(50).keys.tolist()) <= set(range(10, 20))


def test_what_another_process_writes_back_is_saved(tmp_path: Path) -> None:
    with shared(directory=tmp_path) as buffer, child(follow, buffer.share()) as other:
        buffer.extend(rows(0, 60), envs=3)
        buffer.save(1, wait=True)
        other.pipe.send(("write back", 0))
        assert other.hear() is None
        buffer.save(2, wait=True)
        after = contents(buffer)
        assert after["a"][-1] == BACK + 59
        other.pipe.send(("write back", 0))
        other.hear()
    for storage in ("memory", "shared"):
        with ReplayBuffer(CAPACITY, directory=tmp_path, storage=storage, select="prioritized", seed=1) as again:
            again.resume(continue_episodes=True)
            assert contents(again) == after
            assert whole(again.sample(200))


def test_a_row_that_another_process_writes_back_while_it_is_saved_is_saved_as_it_was(tmp_path: Path) -> None:
    files = Slow()
    with shared(directory=tmp_path, files=files) as buffer, child(follow, buffer.share()) as other:
        buffer.extend(rows(0, 60), envs=3)
        before = contents(buffer)
        saving = buffer.save(1)
        assert files.begun.wait(30)
        other.pipe.send(("write back", 0))
        assert other.hear() is None
        assert contents(buffer) != before
        files.go_on.set()
        assert saving.wait(30)
    with shared(directory=tmp_path) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == before


@pytest.mark.parametrize("select", ["prioritized", Uniform(window_trajectories=2)])
def test_others_know_nothing_any_more_of_rows_that_a_state_has_replaced(select: Any) -> None:
    alone, buffer = ReplayBuffer(CAPACITY, select=select, seed=1), shared(select=select)
    alone.extend(rows(500, 48), envs=4)
    buffer.extend(rows(0, 48), envs=3)
    with child(follow, buffer.share()) as other:
        other.pipe.send(("look", 0))
        assert other.hear()[:5] == outcome(buffer, "look", 0)[:5]
        buffer.load_state_dict(alone.state_dict(), continue_episodes=True)
        check(buffer)
        other.pipe.send(("look", 0))
        assert other.hear()[:5] == outcome(buffer, "look", 0)[:5] == outcome(alone, "look", 0)[:5]
        other.pipe.send(("draw", 1000))
        keys = alone.ring.keys()
        assert set(other.hear()) == set(keys[alone.drawer.mass(keys) > 0].tolist())
        other.pipe.send(("mixed", 900))
        assert other.hear() is None
    check(buffer)


def test_processes_have_next_observations_in_common_that_are_kept_aside(tmp_path: Path) -> None:
    with shared(directory=tmp_path, share_next_obs=True) as buffer, child(follow, buffer.share()) as other:
        for number in range(40):
            what = ("linked", "linked append", "linked many")[number % 3]
            other.pipe.send((what, 1050 * number))
            assert other.hear() is None
            check_next_obs(buffer)
            operate(buffer, "linked", 1050 * number + (12 if number % 3 == 0 else 300))
            check_next_obs(buffer)
            if number % 13 == 12:
                buffer.clear()
                buffer.extend({"obs": np.zeros((4, 9)), "next_obs": np.zeros((4, 9)), "other": np.zeros(4)})
                other.pipe.send(("draw", 8))
                assert len(other.hear()) == 8
                other.pipe.send(("clear", 0))
                other.hear()
                assert buffer.schema is None
        batch = buffer.sample(200)
        assert (batch["next_obs"] == batch["obs"] + 3).all()
        other.pipe.send(("draw", 200))
        assert len(other.hear()) == 200
        buffer.save(1, wait=True)
        before = contents(buffer)
    for storage in ("memory", "shared"):
        again = ReplayBuffer(CAPACITY, directory=tmp_path, storage=storage, select="prioritized", share_next_obs=True)
        with again:
            again.resume(continue_episodes=True)
            assert contents(again) == before
            batch = again.sample(200)
            assert (batch["next_obs"] == batch["obs"] + 3).all()


def test_each_process_knows_which_of_its_environments_await_their_reset() -> None:
    buffer = shared(5000, select="uniform")
    with ExitStack() as stack:
        steppers = [stack.enter_context(child(step_on, buffer.share(), number, 100)) for number in range(3)]
        added = [process.hear() for process in steppers]
    assert sum(added) == len(buffer)
    keys = buffer.ring.keys()
    obs, nexts, behind = (buffer.ring.mark(name, keys) for name in ("obs", "next_obs", BEHIND))
    later = np.flatnonzero(behind)
    assert len(later) > 100
    assert np.array_equal(obs[later], nexts[later - behind[later]])


def test_processes_draw_from_streams_of_their_own() -> None:
    alone, buffer = ReplayBuffer(CAPACITY, seed=9), shared(select="uniform", seed=9)
    alone.extend(rows(0, 80))
    buffer.extend(rows(0, 80))
    with child(sample_limited, buffer.share(), 1, 8) as one, child(sample_limited, buffer.share(), 1, 8) as two:
        assert [one.rest(), two.rest()] != []
    assert buffer.sample(30).keys.tolist() == alone.sample(30).keys.tolist(), "the owner draws as it would alone"
    assert buffer.ring.processes == 2


def test_a_process_that_is_started_anew_joins_as_well() -> None:
    buffer = shared()
    context = multiprocessing.get_context("spawn")  # "forkserver" is what children are, and "fork" their children
    ours, theirs = context.Pipe()
    process = context.Process(target=add_limited, args=(theirs, buffer.share(), 30))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == "done"
    process.join()
    assert len(buffer) == 30
    assert buffer.ring.mark("x", buffer.ring.keys()).tolist() == list(range(30))
    ours.close()
    theirs.close()


# -- waiting ---------------------------------------------------------------------------------------------------


def test_adding_in_one_process_and_sampling_in_others_wait_for_each_other() -> None:
    buffer = shared(200, limiter=Limiter(min_size=3, ratio=2.0, error_buffer=4.0), select="uniform")
    handle = buffer.share()
    with child(sample_limited, handle, 55, 1) as one, child(sample_limited, handle, 55, 1) as two:
        with child(add_limited, handle, 60) as writer:
            assert writer.hear() == "done"
        assert one.rest()[-1] == two.rest()[-1] == "done"
    statistics = buffer.statistics()
    assert (statistics.added, statistics.sampled) == (60, 110)


async def test_a_task_waits_for_another_process() -> None:
    buffer = shared(limiter=Limiter(min_size=5, ratio=1.0, error_buffer=3.0), select="uniform")
    with child(add_limited, buffer.share(), 40) as other, anyio.fail_after(60):
        for _ in range(37):
            await buffer.aio.sample(1)
        assert other.hear() == "done"
        assert buffer.statistics().waiters == 0
    assert number_waiting(buffer) == 0


def test_a_waiter_that_is_killed_is_in_nobodys_way() -> None:
    buffer = shared(limiter=Limiter(min_size=10), select="uniform", timeout=None)
    handle = buffer.share()
    with ExitStack() as stack:
        waiting = [stack.enter_context(child(sample_limited, handle, 1, 4)) for _ in range(3)]
        assert [process.hear() for process in waiting] == ["ready"] * 3
        until(lambda: number_waiting(buffer) == 3)
        waiting[0].kill()
        waiting[1].send(signal.SIGSTOP)
        until(lambda: stopped(waiting[1].process.pid))
        buffer.extend(rows(0, 10))
        assert waiting[2].hear() == 4
        waiting[1].send(signal.SIGCONT)
        assert waiting[1].hear() == 8
        until(lambda: number_waiting(buffer) == 0)


def number_waiting(buffer: ReplayBuffer) -> int:
    from pipeline.buffer.transitions.shared.header import WAITING

    with buffer.gate.lock:
        return buffer._room._header.words[WAITING]  # type: ignore[attr-defined,no-any-return]


def stopped(pid: int | None) -> bool:
    """Whether no thread of a process runs any more: until then one might take the lock, and be stopped with it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all(task.joinpath("stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks)


# -- saving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [6, 60, 96, 600])
def test_rows_that_others_overwrite_while_they_are_saved_are_saved(tmp_path: Path, more: int) -> None:
    files = Slow()
    with shared(directory=tmp_path, files=files) as buffer, child(write_when_told, buffer.share(), 1) as other:
        assert other.hear() == "ready"
        other.pipe.send(96)
        other.hear()
        expected = contents(buffer)
        saving = buffer.save(1)
        assert files.begun.wait(30)
        other.pipe.send(more)
        other.hear()
        assert not saving.done
        assert len(contents(buffer)["a"]) == CAPACITY
        files.go_on.set()
        assert saving.wait(30)
        last = contents(buffer)
        buffer.save(2, wait=True)
        check(buffer)
    for step, content in ((1, expected), (2, last)):
        with shared(directory=tmp_path) as again, child(follow, again.share()) as other:
            other.pipe.send(("look", 0))
            assert other.hear()[0] == []
            again.resume(step, continue_episodes=True)
            assert contents(again) == content
            check(again)
            other.pipe.send(("look", 0))
            assert other.hear()[:5] == outcome(again, "look", 0)[:5]
    with ReplayBuffer(CAPACITY, directory=tmp_path) as alone:
        alone.resume(continue_episodes=True)
        assert len(alone) == CAPACITY


@pytest.mark.parametrize("storage", ["memory", "shared"])
def test_rows_that_are_forgotten_while_they_are_saved_are_saved(tmp_path: Path, storage: Any) -> None:
    files = Slow()
    with ReplayBuffer(CAPACITY, storage=storage, directory=tmp_path, files=files) as buffer:
        buffer.extend(rows(0, 40))
        expected = contents(buffer)
        saving = buffer.save(1)
        assert files.begun.wait(30)
        buffer.clear()
        buffer.extend({"other": np.ones((CAPACITY, 2000))})
        files.go_on.set()
        assert saving.wait(30)
    with ReplayBuffer(CAPACITY, storage=storage, directory=tmp_path) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected


def test_what_is_saved_while_others_write_is_of_one_moment(tmp_path: Path) -> None:
    saves = 8 * min(SOAK, 10)
    with ExitStack() as stack:
        buffer = stack.enter_context(shared(directory=tmp_path, keep=None, select="uniform"))
        writers = [stack.enter_context(child(write_when_told, buffer.share(), number)) for number in (1, 2, 3)]
        for process in writers:
            assert process.hear() == "ready"
            process.pipe.send(6_000_000)
        until(lambda: len(buffer) == CAPACITY)
        for step in range(saves):
            buffer.save(step, wait=True)
    assert verify(str(tmp_path)).whole
    for step in range(saves):
        with shared(directory=tmp_path, keep=None, select="uniform") as again:
            again.resume(step, continue_episodes=True)
            check(again)
            keys = again.ring.keys()
            assert len(keys) == CAPACITY
            a = again.ring.mark("a", keys)
            for number in (1, 2, 3):
                own = a[a // 1_000_000 == number]
                assert (np.diff(own) == 1).all()
                assert not len(own) or own[-1] % 1_000_000 % 6 == 5, "a block of rows was cut"


# -- the rest --------------------------------------------------------------------------------------------------


def test_an_error_in_the_midst_of_a_change_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = shared()
    with child(follow, buffer.share()) as other:
        with monkeypatch.context() as patched:
            patched.setattr(buffer.ring.episodes, "extend", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                buffer.extend({"other": np.ones(3)})
        other.pipe.send(("extend", 0))
        assert other.hear() is None
        check(buffer)
        assert len(buffer) == 12
        with monkeypatch.context() as patched:
            patched.setattr(buffer.ring.storage, "write", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                operate(buffer, "extend", 12)
        check(buffer)
        operate(buffer, "extend", 12)
        check(buffer)
        other.pipe.send(("look", 0))
        assert other.hear()[0] == list(range(24))


def test_a_buffer_that_is_used_after_a_fork_without_joining_is_an_error() -> None:
    with child(use_after_fork) as process:
        assert "storage='shared'" in process.hear()
        assert process.hear() is True
        assert process.hear() == 1


def test_each_row_is_drawn_once_in_an_epoch_whoever_draws() -> None:
    buffer = shared(select="without_replacement")
    buffer.extend(rows(0, 40))
    with child(follow, buffer.share()) as other:
        for _ in range(3):
            drawn = []
            for _ in range(4):
                drawn += buffer.sample(5).keys.tolist()
                other.pipe.send(("draw", 5))
                drawn += other.hear()
            assert sorted(drawn) == list(range(40))


def test_threads_that_hold_two_buffers_are_no_deadlock() -> None:
    one, two = shared(), shared()
    with child(hold_two, one.share(), two.share()) as process:
        assert process.hear() == "held"
        with two.gate.lock:
            waiting = threading.Thread(target=lambda: len(one))
            waiting.start()
            until(lambda: blocked(waiting))
            process.pipe.send("go on")
            assert process.hear() == "waits"
            assert not process.pipe.poll(0.05)
        assert process.hear() == "has it"
        waiting.join(30)
        assert not waiting.is_alive()


def blocked(thread: threading.Thread) -> bool:
    """Whether a thread waits for a lock of the kernel's."""
    with open("/proc/locks") as file:
        return any("->" in line and f" {os.getpid()} " in line for line in file)


@pytest.mark.slow
@pytest.mark.timeout(120 + SECONDS)
def test_a_writer_and_four_readers_for_a_while() -> None:
    buffer = shared(5000)
    buffer.extend(rows(0, 100))
    handle = buffer.share()
    with ExitStack() as stack:
        processes = [stack.enter_context(child(busy, handle, 4))]
        processes += [stack.enter_context(child(read, handle, number, 10**9)) for number in range(4)]
        for process in processes:
            assert process.hear() == "ready"
        for process in processes[1:]:
            process.pipe.send("go")
        until_time = time.monotonic() + SECONDS
        while time.monotonic() < until_time:
            batch = buffer.sample(64)
            assert whole(batch)
        for process in processes:
            assert not process.pipe.poll(), process.rest()
            assert process.process.exitcode is None
    check(buffer)
    assert buffer.statistics().added > 100
