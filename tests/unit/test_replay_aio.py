"""The awaitable form of a replay buffer."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from pipeline import ClosedError, ConfigError, Limiter, ReplayBuffer, TimedOut, UsageError
from tests.support.replaying import contents, fill, rows


def limited(**more: Any) -> ReplayBuffer:
    return ReplayBuffer(100, limiter=Limiter(min_size=3, ratio=2.0, error_buffer=4.0), **more)


async def test_adding_and_sampling_wait_for_each_other() -> None:
    replay = limited().aio
    sampled, added = 0, 0

    async def add() -> None:
        nonlocal added
        for number in range(60):
            await replay.append({"x": np.float32(number)})
            added += 1

    async def sample() -> None:
        nonlocal sampled
        for _ in range(110):
            await replay.sample(1)
            sampled += 1
            assert abs(2 * added - sampled - 6) <= 4 + 2

    async with anyio.create_task_group() as group:
        group.start_soon(add)
        group.start_soon(sample)
    assert (added, sampled) == (60, 110)
    assert replay.buffer.statistics().waiters == 0


async def test_a_waiter_that_is_cancelled_has_taken_nothing_and_is_in_nobodys_way() -> None:
    buffer = limited()
    with anyio.move_on_after(0.01) as scope:
        await buffer.aio.sample(1)
    assert scope.cancelled_caught
    assert buffer.statistics().waiters == 0
    for number in range(5):
        await buffer.aio.append({"x": number})
    with anyio.move_on_after(0.01):
        await buffer.aio.append({"x": 5})
    assert contents(buffer)["x"] == [0, 1, 2, 3, 4]
    await buffer.aio.sample(8)
    assert await buffer.aio.append({"x": 5}) == 5


async def test_without_waiting_it_says_what_it_would_wait_for() -> None:
    with pytest.raises(TimedOut, match="nothing can be sampled yet: 0 rows are there, and min_size=3"):
        limited().sample(1)
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.01):
            await limited().aio.sample(1)


async def test_a_thread_wakes_a_task_and_a_task_a_thread() -> None:
    buffer = limited()
    taken: list[Any] = []

    async def sample() -> None:
        taken.append(await buffer.aio.sample(4))

    async with anyio.create_task_group() as group:
        group.start_soon(sample)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(lambda: buffer.extend({"x": np.arange(5)}))
    assert len(taken) == 1

    async with anyio.create_task_group() as group:

        async def add_in_thread() -> None:
            await anyio.to_thread.run_sync(lambda: buffer.extend({"x": np.arange(3)}, timeout=20.0))

        group.start_soon(add_in_thread)
        while not buffer.gate.waiters:
            await anyio.lowlevel.checkpoint()
        await buffer.aio.sample(4)
    assert len(buffer) == 8


async def test_saving_and_resuming(tmp_path: Path) -> None:
    async with ReplayBuffer(50, directory=tmp_path).aio as replay:
        assert (await replay.resume()).step == 0
        fill(replay.buffer, 0, 70)
        before = contents(replay.buffer)
        saving = await replay.save(3)
        await replay.extend(rows(70, 5))
        assert saving.wait(20)
    async with ReplayBuffer(50, directory=tmp_path).aio as again:
        assert (await again.resume(continue_episodes=True)).step == 3
        assert contents(again.buffer) == before
        batch = await again.sample(4, slices={"length": 3})
        assert batch["image"].shape == (4, 3, 32, 64)


@pytest.mark.parametrize("select", ["uniform", "prioritized"])
async def test_it_draws_what_the_plain_form_draws(select: str) -> None:
    plain, awaited = (ReplayBuffer(50, select=select, seed=9) for _ in range(2))
    for buffer in (plain, awaited):
        fill(buffer, 0, 70)
    for _ in range(20):
        assert (await awaited.aio.sample(6)).keys.tolist() == plain.sample(6).keys.tolist()


async def test_steps_are_added_and_wait_too() -> None:
    buffer = ReplayBuffer(100, limiter=Limiter(min_size=2, ratio=1.0, error_buffer=2.0))
    step: Any = (np.zeros(2), np.zeros(2, int), np.ones(2), np.ones(2), np.zeros(2, bool), np.zeros(2, bool))
    for first in (0, 2):
        assert await buffer.aio.add(*step, autoreset="next_step") == range(first, first + 2)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(buffer.aio.add, *step, autoreset="next_step"))
        await anyio.wait_all_tasks_blocked()
        assert len(buffer) == 4
        await buffer.aio.sample(2)
    assert len(buffer) == 6


def told_threads(buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that says of every verb which is called from now on whether it was in this thread."""
    here: list[bool] = []
    loop = threading.get_ident()
    for verb in ("extend", "append", "add", "write_back", "sample", "update_priorities"):
        verb_itself = getattr(buffer, verb)

        def told(*given: Any, own: Any = verb_itself, **more: Any) -> Any:
            here.append(threading.get_ident() == loop)
            return own(*given, **more)

        monkeypatch.setattr(buffer, verb, told)
    return here


@pytest.mark.parametrize(("size", "inline"), [(8, True), (1 << 20, False)])
async def test_what_takes_long_to_copy_is_left_to_a_thread(
    size: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(8)
    here = told_threads(buffer, monkeypatch)
    obs = np.zeros((2, size), np.uint8)
    action, reward, flags = np.zeros(2), np.zeros(2, np.float32), np.zeros(2, bool)
    await buffer.aio.add(obs, action, reward, obs, flags, flags, autoreset="disabled")
    given: dict[str, Any] = {"action": action, "reward": reward, "terminated": flags, "truncated": flags}
    await buffer.aio.extend(given | {"obs": obs, "next_obs": obs})
    row = {name: each[0] for name, each in given.items()}
    large = np.zeros((size,), np.uint8)
    await buffer.aio.append(row | {"obs": large, "next_obs": large})
    await buffer.aio.write_back([0, 1], {"obs": obs})
    await buffer.aio.sample(2)
    assert here == [inline] * 5


MANY = 20_000


def simple(count: int) -> dict[str, Any]:
    number = np.arange(count)
    return {"obs": np.zeros(count, np.float32), "reward": number % 7.0, "terminated": number % 9 == 8}


@pytest.mark.parametrize(
    ("select", "more"),
    [
        ("uniform", {"where": {"reward": 3}}),
        ("uniform", {"slices": {"length": 2}}),
        ("uniform", {"n_step": 4000, "gamma": 0.9}),
        ("uniform", {"stack": 2000}),
        ({"select": "ordered", "by": "max", "field": "reward"}, {}),
        ("freshest", {}),
        ({"select": "ordered", "by": "lifo", "uses": 2}, {}),
        ({"select": "uniform", "window_trajectories": 50}, {}),
        ("without_replacement", {}),
    ],
)
async def test_what_takes_long_to_draw_is_left_to_a_thread(
    select: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(MANY, select=select)
    buffer.extend(simple(MANY))
    here = told_threads(buffer, monkeypatch)
    assert len(await buffer.aio.sample(8, **more)) == 8
    assert here == [False]


@pytest.mark.parametrize(
    ("select", "more"),
    [
        ("uniform", {}),
        ("uniform", {"n_step": 3, "gamma": 0.9}),
        ("uniform", {"stack": 4, "columns": ["obs"]}),
        ("uniform", {"where": None, "slices": None}),
        ("fifo", {}),
        ({"select": "uniform", "window": 50}, {}),
        ("prioritized", {}),
        ({"select": "staleness", "half_life": 3}, {}),
        ("without_replacement", {}),
        ({"select": "uniform", "uses": 9}, {}),
        ({"select": "uniform", "window_trajectories": 50}, {}),
    ],
)
async def test_a_small_batch_is_drawn_at_once(
    select: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(MANY, select=select)
    buffer.extend(simple(MANY))
    buffer.sample(8)  # what is new is settled, and an epoch has begun
    here = told_threads(buffer, monkeypatch)
    assert len(await buffer.aio.sample(8, **more)) == 8
    assert here == [True]


async def test_many_rows_and_keys_are_left_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(MANY, select="prioritized")
    here = told_threads(buffer, monkeypatch)
    await buffer.aio.extend(simple(MANY))
    await buffer.aio.extend({name: each.tolist() for name, each in simple(MANY).items()})
    await buffer.aio.extend(simple(300), env=np.arange(300))  # each environment is looked at alone
    await buffer.aio.update_priorities(np.arange(MANY, 2 * MANY), np.ones(MANY))
    await buffer.aio.update_priorities(list(range(MANY, 2 * MANY)), [1.0] * MANY)
    await buffer.aio.write_back(np.arange(MANY, 2 * MANY), {"reward": np.ones(MANY)})
    assert here == [False] * 6
    here.clear()
    await buffer.aio.extend(simple(300))
    await buffer.aio.extend(simple(4), env=np.arange(4))
    await buffer.aio.update_priorities(np.arange(MANY, MANY + 256), np.ones(256))
    await buffer.aio.write_back(np.arange(MANY, MANY + 256), {"reward": np.ones(256)})
    assert here == [True] * 4


async def test_rows_that_are_compared_with_all_others_are_left_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(MANY, remove={"by": "min", "field": "reward"})
    buffer.extend(simple(MANY))
    here = told_threads(buffer, monkeypatch)
    await buffer.aio.extend(simple(20))
    await buffer.aio.append({name: each[0] for name, each in simple(1).items()})
    assert here == [False, True]


@pytest.mark.parametrize(
    "more",
    [{"count": "x"}, {"count": 2.5}, {"count": None}, {"count": -1}, {"n_step": "x"}, {"stack": "x"}, {"stack": 0}],
)
async def test_bad_arguments_are_refused_as_in_the_plain_form(more: dict[str, Any]) -> None:
    buffer = ReplayBuffer(8)
    buffer.extend(simple(8))
    given = {"count": 4, **more}
    with pytest.raises(ConfigError) as plain:
        buffer.sample(**given)
    with pytest.raises(ConfigError) as awaited:
        await buffer.aio.sample(**given)
    assert str(awaited.value) == str(plain.value)


@pytest.mark.parametrize("storage", ["memory", "shared"])
async def test_the_loop_goes_on_while_a_thread_has_the_lock(storage: str) -> None:
    buffer = ReplayBuffer(8, storage=storage, select="prioritized")
    buffer.extend({"x": np.arange(8)})
    held, let_go = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold() -> None:
        with buffer.gate.lock:
            held.set()
            in_time.append(let_go.wait(20))

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    async with anyio.create_task_group() as group:
        group.start_soon(buffer.aio.sample, 2)
        group.start_soon(buffer.aio.append, {"x": 9})
        group.start_soon(buffer.aio.update_priorities, [7], [2.0])
        if storage == "memory":
            group.start_soon(buffer.aio.write_back, [7], {"x": [5]})
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        let_go.set()
    holder.join()
    assert in_time == [True]
    assert len(buffer) == 8


async def test_how_long_to_wait_is_not_said_with_timeout() -> None:
    replay = limited().aio
    for verb in (partial(replay.sample, 1), partial(replay.extend, {"x": [1]}), partial(replay.append, {"x": 1})):
        with pytest.raises(UsageError, match=r"anyio\.fail_after"):
            await verb(timeout=1.0)


async def test_who_waits_when_the_buffer_is_closed_gives_up() -> None:
    buffer = limited()
    gave_up: list[str] = []

    async def sample() -> None:
        try:
            await buffer.aio.sample(1)
        except ClosedError as error:
            gave_up.append(str(error))

    async def sample_in_thread() -> None:
        try:
            await anyio.to_thread.run_sync(lambda: buffer.sample(1, timeout=None))
        except ClosedError as error:
            gave_up.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(sample)
        group.start_soon(sample_in_thread)
        while buffer.gate.waiters < 2:
            await anyio.lowlevel.checkpoint()
        buffer.close()
    assert len(gave_up) == 2
    assert all("closed while this waited" in each for each in gave_up)
    assert buffer.gate.waiters == 0
    buffer.extend({"x": np.arange(5)})  # the rows are still of use
    assert len(buffer.sample(2)) == 2
