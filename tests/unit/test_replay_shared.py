"""A shared buffer in one process does what any buffer does; and what is refused, with reasons."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ConfigError, ReplayBuffer, UsageError
from pipeline.buffer.transitions.shared.files import Files
from pipeline.config import Ordered, StalenessWeighted, Uniform, WithoutReplacement
from tests.support.replaying import CAPACITY, contents, draws, fill, rows
from tests.unit import test_replay_aio as aio
from tests.unit import test_replay_saving as saving

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is a thing of Linux")


@pytest.fixture(autouse=True)
def shared_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests below, which are those of any buffer, build is shared."""

    def make(directory: Path | None, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
        return ReplayBuffer(capacity, directory=directory, **{"storage": "shared", **options})

    monkeypatch.setattr(saving, "make", make)
    limited = aio.limited
    monkeypatch.setattr(aio, "limited", lambda **more: limited(storage="shared", **more))


@pytest.mark.parametrize(
    "name", ["uniform", "window", "carry", "drop", "keep", "prioritized", "by_batch", "fifo", "max"]
)
@pytest.mark.parametrize("added", [0, 5, 61, 200])
def test_the_next_draws(tmp_path: Path, name: str, added: int) -> None:
    saving.test_the_next_draws_are_those_of_the_buffer_that_was_not_saved(tmp_path, name, added)


def test_all_is_saved(tmp_path: Path) -> None:
    with saving.make(tmp_path) as buffer:
        buffer.extend(rows(0, 40), envs=4)
        buffer.extend(rows(40, 35), env=np.arange(35) % 3)
        buffer.end_episode(1)
        buffer.stepping.load([2, 5])
        before, following = contents(buffer), buffer.ring.following(buffer.ring.keys()).tolist()
        buffer.save(1, wait=True)
    with saving.make(tmp_path) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == before
        assert again.ring.following(again.ring.keys()).tolist() == following
        assert again.stepping.state() == [2, 5]


test_dtypes = saving.test_every_dtype_comes_back_as_it_went_in
test_capacities = saving.test_another_capacity_takes_the_newest_rows
test_overwritten_rows = saving.test_rows_that_are_overwritten_while_they_are_saved_are_saved
test_older_steps = saving.test_an_older_step_becomes_the_newest_generation
test_damage = saving.test_damage_is_named_and_the_generation_before_is_offered
test_other_columns = saving.test_other_columns_are_refused
test_tasks_wait = aio.test_adding_and_sampling_wait_for_each_other
test_threads_and_tasks = aio.test_a_thread_wakes_a_task_and_a_task_a_thread


@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement"])
def test_it_draws_what_a_buffer_of_one_process_draws(select: str) -> None:
    alone, shared = (ReplayBuffer(CAPACITY, select=select, seed=3, storage=each) for each in ("memory", "shared"))
    for buffer in (alone, shared):
        fill(buffer, 0, 200)
    assert draws(alone, 20) == draws(shared, 20)
    assert contents(alone) == contents(shared)
    for buffer in (alone, shared):
        buffer.clear()
        assert len(buffer) == 0
        buffer.extend({"x": np.arange(30)})
    assert alone.sample(12)["x"].tolist() == shared.sample(12)["x"].tolist()


def test_what_is_forgotten_gives_its_memory_back() -> None:
    buffer = ReplayBuffer(64, storage="shared", select="prioritized")
    handle = buffer.share()
    taken = [held(handle)]
    buffer.extend({"image": np.ones((64, 100_000))})
    taken.append(held(handle))
    buffer.clear()
    taken.append(held(handle))
    assert taken[1] - taken[0] > 64 * 800_000
    assert taken[2] - taken[0] < 1 << 20


def held(handle: Any) -> int:
    """Bytes of memory that are taken."""
    return os.fstat(handle._files.memory).st_blocks * 512


def test_the_descriptors_go_with_the_last_user() -> None:
    before = len(os.listdir("/proc/self/fd"))
    buffer = ReplayBuffer(64, storage="shared")
    handle = buffer.share()
    buffer.append({"x": 1.0})
    assert ReplayBuffer.join(handle) is buffer
    assert ReplayBuffer.join(buffer.share()) is buffer
    del buffer
    again = ReplayBuffer.join(handle)
    assert len(again) == 1
    del handle, again
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_task_of_a_loop_that_has_ended_is_cleared_away_with_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave a lock back whose file had been closed, or was another one by then."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: raised.append(told.exc_value))
    buffer = ReplayBuffer(10, storage="shared")
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(buffer.gate.wait_for(buffer.can_sample))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    del waiting, loop, buffer
    gc.collect()
    assert not [error for error in raised if isinstance(error, OSError)]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="storage='shared'"):
        ReplayBuffer(5).share()
    buffer = ReplayBuffer(10**6, storage="shared")
    with pytest.raises(ConfigError, match=r"[\d,]{15} bytes of memory are needed"):
        buffer.extend({"x": np.zeros((1, 100_000))})
    buffer.append({"x": 1.0})
    with pytest.raises(UsageError, match="while it is started"):
        pickle.dumps(buffer.share())
    handle = buffer.share()
    del buffer
    joined = ReplayBuffer.join(handle)
    assert len(joined) == 1
    for verb in (lambda: joined.save(1), joined.resume, joined.attach):
        with pytest.raises(UsageError, match="the process that built it"):
            verb()
    with pytest.raises(ConfigError, match="storage"):
        ReplayBuffer(5, storage="mapped")
    with pytest.raises(ConfigError, match="add rows with the new values"):
        joined.write_back([0], {"x": [2.0]})
    with pytest.raises(ConfigError, match="resume"):
        joined.load_state_dict(joined.state_dict())
    with pytest.raises(ConfigError, match="of its own"):
        joined.sampling_state()
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="a thing of Linux"):
        Files.create()


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("share_next_obs", {"share_next_obs": True}),
        ("remove", {"remove": "lifo"}),
        ("ages of rows", {"select": StalenessWeighted(half_life=3)}),
        ("uses", {"select": Uniform(uses=2)}),
        ("uses", {"select": Ordered(by="fifo", uses=1)}),
        ("uses", {"select": WithoutReplacement(uses=1)}),
        ("window_trajectories", {"select": Uniform(window_trajectories=2)}),
    ],
)
def test_what_processes_cannot_have_in_common_is_refused(option: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{option}.*storage='shared'|storage='shared'.*{option}"):
        ReplayBuffer(5, storage="shared", **given)
