"""A shared buffer in one process does what any buffer does; and what is refused, with reasons."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ConfigError, ReplayBuffer, UsageError
from pipeline.buffer.transitions.shared.files import Files
from tests.support.replay import filled
from tests.support.replaying import CAPACITY, contents, draws, fill, rows
from tests.unit import test_replay_aio as aio
from tests.unit import test_replay_saving as saving
from tests.unit import test_replay_shared_obs as shared_obs
from tests.unit import test_replay_write_back as write_back

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is a thing of Linux")


@pytest.fixture(autouse=True)
def shared_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests below, which are those of any buffer, build is shared."""

    def make(directory: Path | None, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
        return ReplayBuffer(capacity, directory=directory, **{"storage": "shared", **options})

    monkeypatch.setattr(saving, "make", make)
    monkeypatch.setattr(shared_obs, "ReplayBuffer", partial(ReplayBuffer, storage="shared"))
    monkeypatch.setattr(write_back, "ReplayBuffer", partial(ReplayBuffer, storage="shared"))
    monkeypatch.setattr(write_back, "filled", partial(filled, storage="shared"))
    limited = aio.limited
    monkeypatch.setattr(aio, "limited", lambda **more: limited(storage="shared", **more))


@pytest.mark.parametrize("name", saving.SELECTIONS)
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


@pytest.mark.parametrize("name", saving.SELECTIONS)
def test_it_draws_what_a_buffer_of_one_process_draws(name: str) -> None:
    select = saving.SELECTIONS[name]
    alone, shared = (ReplayBuffer(CAPACITY, select=select, seed=3, storage=each) for each in ("memory", "shared"))
    for buffer in (alone, shared):
        fill(buffer, 0, 200)
    assert draws(alone, 5) == draws(shared, 5)
    for at in range(200, 300, 20):
        for buffer in (alone, shared):
            buffer.extend(rows(at, 12), envs=3, version=at)
            buffer.extend(rows(at + 12, 8), env=np.arange(8) * 5 % 3)
            buffer.end_episode(at % 3)
            buffer.append(one(rows(at, 1)), env=4)
        assert draws(alone, 1) == draws(shared, 1)
    assert contents(alone) == contents(shared)
    for buffer in (alone, shared):
        buffer.clear()
        assert len(buffer) == 0
        buffer.extend({"x": np.arange(30), "reward": np.arange(30)})
    assert alone.sample(12)["x"].tolist() == shared.sample(12)["x"].tolist()


def one(block: dict[str, Any]) -> dict[str, Any]:
    """The row of a block of one."""
    return {name: one(part) if isinstance(part, dict) else part[0] for name, part in block.items()}


@pytest.mark.parametrize("name", saving.SELECTIONS)
@pytest.mark.parametrize("share_next_obs", [False, True])
def test_a_state_dict(name: str, share_next_obs: bool) -> None:
    saving.test_a_state_dict_is_all_of_it(name, share_next_obs)


@pytest.mark.parametrize("share_next_obs", [False, True])
def test_all_that_is_saved(tmp_path: Path, share_next_obs: bool) -> None:
    saving.test_what_is_saved_is_all_of_it(tmp_path, share_next_obs)


@pytest.mark.parametrize(("envs", "capacity"), [(1, 1), (1, 7), (3, 40)])
@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_rows_that_share_observations(envs: int, capacity: int, gaps: float) -> None:
    for select in ("uniform", "prioritized"):
        shared_obs.test_every_sample_is_the_same_with_and_without(select, envs, capacity, gaps)


test_shared_obs_newest = shared_obs.test_the_newest_row_keeps_its_own_until_its_successor_comes
test_shared_obs_gone = shared_obs.test_what_is_kept_aside_goes_with_its_row
test_shared_obs_nan = shared_obs.test_a_nan_that_is_the_successors_is_shared
test_shared_obs_other = shared_obs.test_a_next_observation_that_is_not_the_successors_is_kept
test_shared_obs_large = shared_obs.test_a_large_payload_is_held_once
test_shared_obs_bounded = shared_obs.test_what_is_kept_aside_does_not_grow_with_what_was_added
test_shared_obs_empty = shared_obs.test_the_state_of_an_empty_buffer_can_be_loaded
test_shared_obs_refused = shared_obs.test_columns_that_are_not_alike_are_refused_before_anything_is_changed
test_shared_obs_schema = shared_obs.test_the_columns_of_a_row_are_those_that_are_given
test_shared_obs_place = shared_obs.test_a_row_that_comes_a_whole_buffer_after_its_predecessor_has_a_place_of_its_own


test_state_dicts_of_other_capacities = saving.test_a_state_dict_fits_into_another_capacity_and_ends_open_episodes
test_no_state_dict = saving.test_what_is_no_state_is_refused_and_nothing_changes
test_state_dict_after_save = saving.test_rows_that_lie_on_the_disk_are_not_exchanged
test_write_back = write_back.test_rows_that_are_there_are_changed_and_each_key_is_told_what_became_of_it
test_write_back_versions = write_back.test_a_row_of_another_version_is_refused
test_write_back_twice = write_back.test_of_a_key_that_is_named_twice_the_last_counts
test_write_back_kinds = write_back.test_columns_of_any_kind_are_changed
test_write_back_refused = write_back.test_what_is_bad_is_refused_and_nothing_changes
test_write_back_orders = write_back.test_an_order_by_a_column_follows_its_changes
test_write_back_saved = write_back.test_what_was_changed_is_saved_whenever_that_was
test_write_back_during_a_save = write_back.test_a_row_that_is_changed_while_it_is_saved_is_saved_as_it_was
test_write_back_before_a_save = write_back.test_what_is_changed_before_it_is_saved_costs_nothing
test_write_back_state = write_back.test_changes_are_in_a_state_dict


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
    gc.collect()
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
    for verb in (lambda: joined.save(1), joined.resume, joined.attach, lambda: joined.load_state_dict({})):
        with pytest.raises(UsageError, match="the process that built it"):
            verb()
    with pytest.raises(ConfigError, match="storage"):
        ReplayBuffer(5, storage="mapped")
    with pytest.raises(ConfigError, match="of its own"):
        joined.sampling_state()
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="a thing of Linux"):
        Files.create()


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("remove", {"remove": "lifo"}),
    ],
)
def test_what_processes_cannot_have_in_common_is_refused(option: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{option}.*storage='shared'|storage='shared'.*{option}"):
        ReplayBuffer(5, storage="shared", **given)
