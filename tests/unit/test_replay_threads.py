"""A replay buffer under several threads and tasks: no torn row, no lost wake-up, nobody waits for another's loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pipeline import ConfigError, ReplayBuffer, Slices, Starved, TimedOut
from tests.support.replay import everything, filled, ids, rows

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
SECONDS = 0.0 if SOAK == 1 else 60.0


def marked(first: int, count: int) -> dict[str, np.ndarray]:
    """Rows of which every column says the same number, one of them in memory of its own."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    return {"a": numbers, "b": numbers.astype(np.float64), "large": np.repeat(numbers[:, None], 256, axis=1)}


def until_waiting(buffer: ReplayBuffer, count: int) -> None:
    """Return when so many wait for the buffer."""
    while buffer.gate.waiters < count:
        os.sched_yield()


async def turns() -> None:
    """Let everything that is ready run, and what that makes ready."""
    for _ in range(10):
        await asyncio.sleep(0)


def together(*parts: Callable[[], object]) -> list[Any]:
    with ThreadPoolExecutor(len(parts)) as pool:
        return [each.result() for each in [pool.submit(part) for part in parts]]


@pytest.mark.slow
@pytest.mark.timeout(120 + 2 * SECONDS)
@pytest.mark.parametrize("select", ["uniform", {"select": "prioritized", "alpha": 1.0}, "without_replacement"])
def test_one_writer_and_four_readers_see_whole_rows_alone(select: Any) -> None:
    buffer = ReplayBuffer(512, select=select, returns="numpy")
    buffer.extend(marked(0, 512))
    done, until = threading.Event(), time.monotonic() + SECONDS

    def write() -> int:
        first = 512
        while not done.is_set():
            for count in (1, 7, 300):
                buffer.extend(marked(first, count), env=first % 3)
                first += count
            buffer.append({name: each[0] for name, each in marked(first, 1).items()})
            first += 1
            buffer.end_episode()
        return first

    def read(number: int) -> None:
        at = 0
        while at < 400 or time.monotonic() < until:
            at += 1
            batch = buffer.sample(128, slices=Slices(length=3, pad=True) if (at + number) % 2 else None)
            assert (batch["a"] == batch["b"]).all()
            assert (batch["large"] == batch["a"][..., None]).all()
            assert (batch["a"].reshape(128, -1)[:, 0] == batch.keys).all()
            if isinstance(select, dict):
                buffer.update_priorities(batch.keys, 1.0 + batch.keys % 3)
            buffer.statistics()

    def readers() -> None:
        try:
            together(*(lambda number=number: read(number) for number in range(4)))
        finally:
            done.set()

    written, _ = together(write, readers)
    assert ids_of(buffer) == list(range(written - 512, written))


@pytest.mark.slow
@pytest.mark.parametrize("select", ["uniform", {"select": "prioritized", "alpha": 1.0}, "without_replacement"])
def test_a_buffer_that_grows_while_it_is_read_gives_whole_rows(select: Any) -> None:
    """100,000 rows are read, from the first row on to where the buffer is full and goes round."""
    buffer = ReplayBuffer(20_000, select=select, returns="numpy")
    done, grown = threading.Event(), threading.Event()
    buffer.extend(marked(0, 1))

    def write() -> None:
        first = 1
        while first < 30_000 or not done.is_set():
            for count in (1, 50):
                buffer.extend(marked(first, count))
                first += count
            if first >= 30_000:
                grown.set()

    def read() -> int:
        rows_read = 0
        while rows_read < 50_000 or not grown.is_set():
            try:
                batch = buffer.sample(100)
            except Starved:  # no 100 are there yet, without replacement
                continue
            assert (batch["a"] == batch["b"]).all()
            assert (batch["large"] == batch["a"][:, None]).all()
            assert (batch["a"] == batch.keys).all()
            rows_read += len(batch)
        return rows_read

    def readers() -> int:
        try:
            return sum(together(read, read))
        finally:
            done.set()

    _, rows_read = together(write, readers)
    assert rows_read >= 100_000
    assert len(buffer) == 20_000


def ids_of(buffer: ReplayBuffer) -> list[int]:
    found: list[int] = buffer.ring.mark("a", buffer.ring.keys()).tolist()
    return found


def test_readers_survive_that_others_clear_and_bring_other_columns() -> None:
    buffer = ReplayBuffer(64, returns="numpy")
    done = threading.Event()

    def write() -> None:
        for number in range(200 * SOAK):
            buffer.clear()
            name = f"column{number % 3}"
            buffer.extend({name: np.full((8, number % 3 + 1), number % 3)})
        done.set()

    def read() -> None:
        while not done.is_set():
            try:
                batch = buffer.sample(16)
            except TimedOut:
                continue
            (name,) = batch
            assert batch[name].shape == (16, int(name[-1]) + 1)
            assert (batch[name] == int(name[-1])).all()

    together(write, read, read)


def test_after_clear_other_columns_may_come_and_keys_are_not_used_again() -> None:
    buffer = filled(4)
    keys = buffer.sample(4).keys
    buffer.clear()
    assert len(buffer) == 0
    with pytest.raises(TimedOut):
        buffer.sample(1)
    assert buffer.extend({"x": np.zeros((2, 3))}) == range(4, 6)
    assert set(buffer.sample(50).keys) == {4, 5}
    buffer.clear()
    buffer.extend(rows(2))
    assert ids(buffer) == [0, 1]
    assert not buffer.ring.alive(keys).any()


@pytest.mark.parametrize("storage", ["memory", "shared"])
@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 700), (0,)])
def test_a_buffer_that_was_cleared_works_as_a_new_one(shape: tuple[int, ...], select: Any, storage: Any) -> None:
    buffer, new = (ReplayBuffer(4, select=select, storage=storage, returns="numpy") for _ in range(2))
    buffer.extend({"x": np.ones((6, 3)), "y": np.ones(6)})
    buffer.clear()
    given: dict[str, Any] = {
        "x": np.arange(5 * int(np.prod(shape))).reshape(5, *shape).astype(np.uint16),
        "n": np.arange(5),
    }
    new.extend(given)
    buffer.extend(given)
    for each in (buffer, new):
        assert each.ring.storage.schema == new.ring.storage.schema
        batch = each.sample(4)
        assert batch.columns == ("n", "x")
        assert (batch["x"].dtype, batch["x"].shape) == (np.uint16, (4, *shape))
        np.testing.assert_array_equal(batch["x"], given["x"][batch["n"]])
        assert set(batch["n"]) <= {1, 2, 3, 4}
        assert each.sample(2, slices=Slices(length=2))["x"].shape == (2, 2, *shape)


def test_arrays_that_tell_which_rows_are_meant_are_not_changed() -> None:
    buffer = ReplayBuffer(4, select="prioritized", returns="numpy")
    env, ends, keys = np.array([1, 0, 1, 0, 1, 0]), np.array([0, 0, 1, 0, 0, 1], bool), np.array([5, 0, 2, -2])
    priorities, values, versions = np.array([3.0, 2.0, 1.0]), np.array([7.0, 8.0, 9.0]), np.zeros(3, int)
    given = [env, ends, keys, priorities, values, versions]
    before = [each.copy() for each in given]
    for each in given:
        each.setflags(write=False)  # and whoever tried to would raise
    buffer.extend({"x": np.zeros(6), "reward": np.ones(6)}, env=env, ends=ends)
    buffer.update_priorities(keys[:3], priorities)
    buffer.write_back(keys[:3], {"x": values}, versions=versions)
    for each, expected in zip(given, before, strict=True):
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("select", ["prioritized", "without_replacement"])
def test_draws_begin_anew_after_clear(select: Any) -> None:
    buffer = filled(6, select=select)
    buffer.sample(2)
    before = buffer.sample(1).keys
    buffer.clear()
    buffer.extend(rows(4))
    assert sorted(buffer.sample(4).keys) == [6, 7, 8, 9] or select == "prioritized"
    if select == "prioritized":
        assert buffer.update_priorities(before, [100.0]).stale == 1
        assert set(buffer.sample(200).keys) == {6, 7, 8, 9}


def test_a_thread_that_may_not_add_goes_on_when_another_samples() -> None:
    buffer = ReplayBuffer(100, limiter={"min_size": 3, "ratio": 2, "error_buffer": 4}, returns="numpy")
    buffer.extend(rows(5))

    def sample() -> None:
        until_waiting(buffer, 1)
        assert buffer.statistics().waiters == 1
        buffer.sample(2)

    key, _ = together(lambda: buffer.extend(rows(1, 5), timeout=None), sample)
    assert key == range(5, 6)
    assert buffer.statistics().waiters == 0


def test_a_thread_that_may_not_sample_goes_on_when_another_adds() -> None:
    buffer = ReplayBuffer(100, limiter={"min_size": 3}, timeout=None, returns="numpy")

    def add() -> None:
        until_waiting(buffer, 2)
        for number in range(3):
            buffer.append({"id": number, "reward": 1.0, "truncated": False})

    one, other, _ = together(lambda: buffer.sample(4), lambda: buffer.sample(4), add)
    assert len(one) == len(other) == 4


def test_a_time_that_ran_out_changes_nothing() -> None:
    buffer = filled(2, limiter={"min_size": 3})
    before = everything(buffer)
    with pytest.raises(TimedOut, match=r"Waited 0.01 s; with timeout=None"):
        buffer.sample(1, timeout=0.01)
    assert everything(buffer) == before


@pytest.mark.parametrize("one_by_one", [False, True])
def test_columns_that_changed_while_a_thread_waited_are_checked_again(one_by_one: bool) -> None:
    """Rows that were checked against columns that are no more tore the buffer's marks and failed halfway."""
    buffer = ReplayBuffer(100, limiter={"min_size": 1, "ratio": 1, "error_buffer": 2}, returns="numpy")
    for number in range(3):
        buffer.append({"id": number})

    def add() -> None:
        if one_by_one:
            buffer.append({"id": 3}, timeout=None)
        else:
            buffer.extend({"id": [3, 4]}, timeout=None)

    def change() -> dict[str, Any]:
        until_waiting(buffer, 1)
        with buffer.gate.lock:
            buffer.clear()
            buffer.append({"other": 1.0})
            buffer.sample(3)
            return everything(buffer) | {"statistics": None}

    with ThreadPoolExecutor(2) as pool:
        adding, changing = pool.submit(add), pool.submit(change)
        with pytest.raises(ConfigError, match="other missing; id unknown"):
            adding.result()
        assert everything(buffer) | {"statistics": None} == changing.result()


async def test_a_task_goes_on_when_a_thread_has_added() -> None:
    buffer = ReplayBuffer(10, returns="numpy")
    waiting = asyncio.ensure_future(buffer.gate.wait_for(buffer.can_sample))

    def add() -> None:
        until_waiting(buffer, 1)
        buffer.extend(rows(2))

    await asyncio.to_thread(add)
    await waiting
    assert len(buffer.sample(2)) == 2
    assert buffer.gate.waiters == 0


async def test_a_task_goes_on_when_a_task_of_its_loop_has_added() -> None:
    buffer = ReplayBuffer(10, returns="numpy")

    async def sample() -> int:
        await buffer.gate.wait_for(buffer.can_sample)
        return len(buffer.sample(1))

    tasks = [asyncio.ensure_future(sample()) for _ in range(5)]
    await asyncio.sleep(0)
    assert buffer.gate.waiters == 5
    buffer.append({"id": 1})
    assert await asyncio.gather(*tasks) == [1] * 5


async def test_a_task_that_is_cancelled_when_it_was_woken_takes_nothing_from_the_others() -> None:
    buffer = ReplayBuffer(10, limiter={"min_size": 1, "ratio": 1, "error_buffer": 1}, returns="numpy")
    taken: list[int] = []

    async def take(number: int) -> None:
        await buffer.gate.wait_for(buffer.can_sample)
        buffer.sample(1)
        taken.append(number)

    tasks = [asyncio.ensure_future(take(number)) for number in range(4)]
    await asyncio.sleep(0)
    buffer.append({"id": 0})
    tasks[0].cancel()  # in the same turn in which it was woken
    await turns()
    assert tasks[0].cancelled()
    assert taken == [1]
    buffer.append({"id": 1})
    await turns()
    assert taken == [1, 2]
    tasks[3].cancel()
    await asyncio.wait(tasks)
    assert buffer.gate.waiters == 0
    assert buffer.statistics().sampled == 2


async def test_no_task_is_lost_or_served_twice_however_many_are_cancelled() -> None:
    buffer = ReplayBuffer(64, limiter={"min_size": 1, "ratio": 1, "error_buffer": 1}, returns="numpy")
    rng = np.random.default_rng(0)
    served = 0

    async def take() -> None:
        nonlocal served
        await buffer.gate.wait_for(buffer.can_sample)
        buffer.sample(1)
        served += 1

    async def give() -> None:
        await buffer.gate.wait_for(buffer.can_add)
        buffer.append({"id": 0})

    tasks: list[asyncio.Future[None]] = []
    for _ in range(300 * SOAK):
        tasks += [asyncio.ensure_future(each()) for each in (take, give)]
        await asyncio.sleep(0)
        if rng.random() < 0.5:
            tasks[int(rng.integers(len(tasks)))].cancel()
    await turns()
    waiting = [each for each in tasks if not each.done()]
    assert buffer.gate.waiters == len(waiting)
    assert not (waiting and buffer.can_add() and buffer.can_sample())
    for each in waiting:
        each.cancel()
    await asyncio.wait(tasks)
    assert buffer.gate.waiters == 0
    assert buffer.statistics().sampled == served


async def test_whoever_adds_does_not_wait_for_the_loop_of_a_task_that_waits() -> None:
    """A loop that is busy, or that itself waits for this thread, held the thread that woke its task."""
    buffer = ReplayBuffer(10, returns="numpy")
    waiting = asyncio.ensure_future(buffer.gate.wait_for(buffer.can_sample))
    await asyncio.sleep(0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(buffer.append, {"id": 1}).result(timeout=60) == 0  # with this loop blocked
    await waiting


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_ended_with_a_task_in_wait_breaks_nobody() -> None:
    buffer = ReplayBuffer(10, returns="numpy")
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(buffer.gate.wait_for(buffer.can_sample))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert buffer.gate.waiters == 1
    together(lambda: buffer.append({"id": 1}))
    assert len(buffer) == 1
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    del waiting
    gc.collect()


def test_starved_threads_are_told_and_not_left_waiting() -> None:
    buffer = filled(3, ends=[0, 1, 2], timeout=None)
    with pytest.raises(Starved):
        buffer.sample(1, slices=Slices(length=2))
