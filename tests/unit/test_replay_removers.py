"""A full buffer that others than the oldest rows leave: what can be asked of it, and that it is saved exactly."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import (
    Anneal,
    ConfigError,
    Ordered,
    Prioritized,
    Remove,
    ReplayBuffer,
    ReplayDataset,
    Slices,
    StalenessWeighted,
    Uniform,
    UsageError,
    WithoutReplacement,
)
from pipeline.checkpoint import verify
from pipeline.replay.pooling import PoolJob
from pipeline.store.segments import read_blocks
from tests.support.disk import ScriptedFiles, tree
from tests.support.replay import as_likely
from tests.support.replaying import CAPACITY

REMOVERS: dict[str, Any] = {
    "lifo": "lifo",
    "stalest": Remove(by="stalest"),
    "lowest_priority": "lowest_priority",
    "min": {"by": "min", "field": "score"},
    "max": {"by": "max", "field": "score"},
}
SELECTIONS: dict[str, Any] = {
    "uniform": Uniform(),
    "uses": Uniform(uses=40),
    "carry": WithoutReplacement(),
    "epoch_uses": WithoutReplacement(uses=40),
    "prioritized": Prioritized(alpha=0.7, beta=Anneal(start=0.4, end=1.0, over=100)),
    "fifo": Ordered(),
    "freshest": Ordered(by="freshest"),
    "queue": Ordered(uses=40),
    "staleness": StalenessWeighted(half_life=1.5),
}


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows whose columns follow from their number."""
    number = np.arange(first, first + count)
    return {
        "n": number,
        "image": np.repeat(number % 251, 2048).astype(np.uint8).reshape(count, 32, 64),
        "score": (number * 37 % 101).astype(np.float32),
        "half": torch.from_numpy(number % 50).to(torch.bfloat16),
        "terminated": number % 7 == 6,
    }


def make(directory: Path | None = None, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, **({"directory": directory, "remove": REMOVERS["min"], "seed": 3} | options))


def fill(buffer: ReplayBuffer, first: int, count: int, block: int = 9) -> None:
    for begin in range(first, first + count, block):
        size = min(block, first + count - begin)
        keys = buffer.extend(rows(begin, size), version=begin * 7 % 5, env=begin % 3)
        if isinstance(buffer.options.select, Prioritized):
            buffer.update_priorities(keys, 1 + np.arange(begin, begin + size) % 11)


def contents(buffer: ReplayBuffer) -> dict[str, Any]:
    ring = buffer.ring
    slots, layout = ring.slots(ring.keys()), ring.storage.layout
    names = [] if layout is None else [*(layout.record.names or ()), *ring.storage.large]
    found: dict[str, Any] = {name: ring.storage.view(name)[slots].tolist() for name in names}
    state = {name: each.tolist() for name, each in ring.places().items() if name != "at"}
    return found | {"places": state, "numbers": ring.numbers()[:3], "open": ring.episodes.state()}


def draws(buffer: ReplayBuffer, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        batch = buffer.sample(8)
        found.append((batch.keys.tolist(), batch["n"].tolist(), batch.weights.tolist()))
    return found


@pytest.mark.parametrize(
    ("remove", "select"),
    [
        (remove, select)
        for remove in REMOVERS
        for select in SELECTIONS
        if remove != "lowest_priority" or select == "prioritized"
    ],
)
def test_the_next_draws_are_those_of_the_buffer_that_was_not_saved(tmp_path: Path, remove: str, select: str) -> None:
    options = {"remove": REMOVERS[remove], "select": SELECTIONS[select]}
    with make(tmp_path, **options) as buffer:
        buffer.resume()
        for step in range(4):
            fill(buffer, 40 * step, 40)
            draws(buffer, 2)
            buffer.save(step, wait=True)
        state, before = buffer.state_dict(), contents(buffer)
        expected = draws(buffer, 20)
        fill(buffer, 160, 50)
        last = contents(buffer), draws(buffer, 5)
    with make(tmp_path, **options) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == before
        assert draws(again, 20) == expected
        fill(again, 160, 50)
        assert (contents(again), draws(again, 5)) == last
    other = make(**options)
    fill(other, 0, 5)
    other.load_state_dict(state, continue_episodes=True)
    assert draws(other, 20) == expected
    fill(other, 160, 50)
    assert (contents(other), draws(other, 5)) == last
    assert verify(str(tmp_path)).whole


def test_after_a_clear_keys_go_on_where_they_would(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 100)
        keys = buffer.ring.keys()
        buffer.clear()
        fill(buffer, 100, 20)
        buffer.save(1, wait=True)
        fill(buffer, 120, 60)
        expected = contents(buffer)
    with make(tmp_path) as again:
        again.resume(continue_episodes=True)
        assert not again.ring.alive(keys).any()
        fill(again, 120, 60)
        assert contents(again) == expected


def test_the_top_rows_are_kept_and_drawn_alike() -> None:
    buffer = make(capacity=10, remove={"by": "min", "field": "score"}, returns="numpy")
    fill(buffer, 0, 101)
    assert sorted(buffer.ring.mark("score", buffer.ring.keys())) == list(range(91, 101))
    assert buffer.statistics().not_kept > 0
    order = np.argsort(buffer.ring.keys())
    keys = buffer.sample(20_000).keys
    assert as_likely(np.searchsorted(buffer.ring.keys()[order], keys), np.ones(10))


def test_a_row_that_is_the_first_to_go_is_not_kept_and_has_no_key() -> None:
    buffer = make(capacity=2, remove={"by": "min", "field": "x"}, select="prioritized")
    assert list(buffer.extend({"x": np.array([5, 9])})) == [0, 1]
    assert list(buffer.extend({"x": np.array([1, 7, 3])})) == [-1, 2, -1]
    assert buffer.append({"x": np.int64(0)}) == -1
    assert buffer.update_priorities([-1, 2], [3.0, 4.0]).applied.tolist() == [False, True]
    assert buffer.write_back([-1, 0], {"x": [1, 1]}).stale.tolist() == [True, True]
    assert buffer.statistics().not_kept == 3
    with pytest.raises(ConfigError, match="never the key"):
        buffer.update_priorities([-2], [1.0])


def test_once_full_the_oldest_stay_where_the_newest_go() -> None:
    buffer = make(capacity=5, remove="lifo")
    fill(buffer, 0, 30, block=4)
    assert buffer.ring.mark("n", buffer.ring.keys()).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"slices": Slices(length=2)}, "slices"),
        ({"n_step": 2, "gamma": 0.9}, "n_step"),
        ({"stack": 2}, "stack"),
        ({"hindsight": {"reward": lambda a, g: a[:, 0]}}, "hindsight"),
    ],
)
def test_what_needs_neighbours_is_refused_before_anything_is_drawn(more: Any, said: str) -> None:
    buffer = make()
    fill(buffer, 0, 20)
    before = buffer._rng.bit_generator.state
    with pytest.raises(ConfigError, match=rf"{said}.*remove='min' none knows its neighbours"):
        buffer.sample(2, **more)
    assert buffer._rng.bit_generator.state == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share_next_obs": True}, "share_next_obs"),
        ({"select": Uniform(window=3)}, "neighbours"),
        ({"select": Uniform(window_trajectories=3)}, "neighbours"),
        ({"remove": "lowest_priority"}, "Prioritized"),
        ({"remove": "min"}, "field"),
        ({"remove": {"by": "lifo", "field": "x"}}, "field"),
        ({"remove": "nonsense"}, "fifo"),
        ({"remove": {"by": "lifo", "other": 1}}, "other"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**options)


@pytest.mark.parametrize("field", ["other", "image", "half"])
def test_rows_cannot_be_ordered_by_what_is_no_number(field: str) -> None:
    buffer = make(remove={"by": "max", "field": field})
    with pytest.raises(ConfigError, match=r"there is none|one real number"):
        buffer.extend(rows(0, 5))
    assert (len(buffer), buffer.schema) == (0, None)


def test_a_discount_goes_with_single_rows() -> None:
    buffer = make(capacity=10, remove="stalest")
    buffer.extend({"reward": np.ones(5, np.float32), "terminated": np.array([0, 0, 1, 0, 1], bool)})
    batch = buffer.sample(50, gamma=0.5, where={"terminated": True})
    assert set(batch.discount.tolist()) == {0.0}


def test_an_episode_that_is_cut_stays_so(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 9)
        buffer.save(1, wait=True)
        assert buffer.end_episode() == 1
        buffer.save(2, wait=True)
        ends = buffer.ring.mark("#end", buffer.ring.keys()).tolist()
        assert ends[-1] == 3
    with make(tmp_path) as again:
        again.resume(continue_episodes=True)
        assert again.ring.mark("#end", again.ring.keys()).tolist() == ends
        assert again.ring.episodes.open().tolist() == []


def test_saving_again_writes_what_is_new_and_the_disk_stays_bounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    with make(tmp_path, 200, remove={"by": "min", "field": "score"}, keep=1) as buffer:
        for step in range(40):
            buffer.extend({"score": rng.random(50), "x": np.zeros((50, 4096), np.uint8)})
            buffer.save(step, wait=True)
            blocks = read_blocks(str(max((tmp_path / "generations").iterdir()) / "blocks.msgpack"))
            assert sum(block.count for block in blocks) <= 2 * len(buffer)
        written = sum(len(content) for name, content in tree(tmp_path).items() if name.startswith("segments"))
        kept = buffer.statistics().added - buffer.statistics().not_kept
        assert written < 3 * kept * 4096
        before = sum(map(len, tree(tmp_path).values()))
        buffer.save(40, wait=True)
        assert sum(map(len, tree(tmp_path).values())) < before + 4096
        expected = contents(buffer)
    with make(tmp_path, 200, remove={"by": "min", "field": "score"}, keep=1) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected


def test_rows_that_go_while_they_are_saved_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 20_000)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedFiles):
        def create(self, path: str) -> int:
            if path.endswith(".fbs"):
                begun.set()
                assert go_on.wait(30)
            return super().create(path)

    with make(tmp_path, files=Slow()) as buffer:
        fill(buffer, 0, 90)
        before = contents(buffer)
        saving = buffer.save(1)
        assert begun.wait(30)
        keys = buffer.ring.keys()
        buffer.write_back(keys[5:9], {"score": [1e6] * 4})
        buffer.append({name: value[0] for name, value in rows(98, 1).items()})
        fill(buffer, 91, 200)
        buffer.end_episode()
        assert not saving.done
        last = contents(buffer)
        buffer.clear()
        buffer.extend({"score": np.zeros(3)})
        go_on.set()
        assert saving.wait(30)
        assert last != before
        buffer.save(2, wait=True)
        cleared = contents(buffer)
    for step, expected in ((1, before), (2, cleared)):
        with make(tmp_path) as again:
            again.resume(step, continue_episodes=True)
            assert contents(again) == expected


@pytest.mark.parametrize("remove", ["fifo", "lifo"])
def test_rows_that_are_cleared_while_they_are_saved_are_saved(
    tmp_path: Path, remove: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 20_000)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedFiles):
        def create(self, path: str) -> int:
            if path.endswith(".fbs"):
                begun.set()
                assert go_on.wait(30)
            return super().create(path)

    with make(tmp_path, files=Slow(), remove=remove) as buffer:
        fill(buffer, 0, 50)
        expected = contents(buffer)
        saving = buffer.save(1)
        assert begun.wait(30)
        buffer.clear()
        go_on.set()
        assert saving.wait(30)
    with make(tmp_path, remove=remove) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected


def test_a_save_that_failed_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 70)
        buffer.save(1, wait=True)
        fill(buffer, 70, 40)
        with monkeypatch.context() as patch:
            patch.setattr(PoolJob, "pieces", lambda self: iter([None]))
            with pytest.raises(AttributeError):
                buffer.save(2, wait=True)
        fill(buffer, 110, 40)
        buffer.save(3, wait=True)
        expected = contents(buffer)
    with make(tmp_path) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected


def test_another_remover_takes_the_rows_over_but_not_the_oldest_first(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 90)
        buffer.save(1, wait=True)
        state, expected = buffer.state_dict(), contents(buffer)["n"]
    with make(tmp_path, remove="stalest") as again:
        again.resume()
        assert contents(again)["n"] == expected
        fill(again, 90, 40)
    for options, said in (({"remove": "fifo"}, "remove='min'"), ({"capacity": 61}, "capacity=60")):
        with make(tmp_path, **options) as other, pytest.raises(UsageError, match=said):
            other.resume()
        with pytest.raises(UsageError, match=said):
            make(**options).load_state_dict(state)
    fifo = make(remove="fifo")
    fill(fifo, 0, 9)
    with pytest.raises(UsageError, match="remove='fifo'"):
        make().load_state_dict(fifo.state_dict())


def test_rows_that_cannot_be_ordered_are_not_taken_back(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 9)
        buffer.save(1, wait=True)
        state = buffer.state_dict()
    remove = {"by": "max", "field": "other"}
    with make(tmp_path, remove=remove) as again, pytest.raises(ConfigError, match="there is none"):
        again.resume()
    with pytest.raises(ConfigError, match="there is none"):
        make(remove=remove).load_state_dict(state)


def test_steps_of_environments_are_added() -> None:
    buffer = make(capacity=3, remove={"by": "min", "field": "reward"}, returns="numpy")
    obs = np.zeros(2)
    for reward in (1.0, 5.0, 3.0):
        assert len(buffer.add(obs, 0, reward, obs, False, False)) == 1
    assert list(buffer.add(obs, 0, 0.5, obs, True, False)) == [-1]
    given = (np.zeros((2, 2)), np.zeros(2, int), np.array([9.0, 0.25]), np.zeros((2, 2)), np.zeros(2, bool))
    keys = buffer.add(*given, np.zeros(2, bool), autoreset="disabled")
    assert list(keys) == [3, -1]
    assert min(buffer.sample(50)["reward"].tolist()) == 3
    assert buffer.statistics().not_kept == 2


@pytest.mark.parametrize("part", ["pool.keys.int64", "pool.at.int64", "pool.serials.int64"])
def test_a_state_that_does_not_fit_together_is_refused(part: str) -> None:
    buffer = make()
    fill(buffer, 0, 90)
    state = buffer.state_dict()
    for broken in (None, state["values"][part][:-1]):
        values = {name: each for name, each in state["values"].items() if name != part}
        if broken is not None:
            values[part] = broken
        with pytest.raises(ConfigError, match="no state of a replay buffer"):
            buffer.load_state_dict(state | {"values": values})
    assert len(buffer) == CAPACITY


def test_batches_that_were_drawn_ahead_come_back(tmp_path: Path) -> None:
    def life(directory: Path, resume: bool) -> list[Any]:
        with make(directory, select=WithoutReplacement(last="keep"), returns="numpy") as buffer:
            dataset = ReplayDataset(buffer, 7, prefetch=2)
            buffer.attach(dataset=dataset)
            if resume:
                buffer.resume()
            else:
                fill(buffer, 0, 80)
                next(iter(dataset))
                buffer.save(1, wait=True)
            return [batch["n"].tolist() for batch in dataset]

    assert life(tmp_path, False) == life(tmp_path, True)


async def test_tasks_add_rows(tmp_path: Path) -> None:
    buffer = make(capacity=2, remove={"by": "min", "field": "x"})
    assert list(await buffer.aio.extend({"x": np.array([5, 9, 1])})) == [0, 1, -1]
    assert await buffer.aio.append({"x": np.int64(0)}) == -1


def test_blocks_are_listed_in_their_order_whoever_copied_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 4096 * 5)
    with ReplayBuffer(CAPACITY, remove="lifo", directory=tmp_path, files=ScriptedFiles()) as buffer:
        keys = np.array(buffer.extend(rows(0, 50)))
        with buffer.gate.lock:  # nobody copies but who changes a row
            saving = buffer.save(1)
            buffer.write_back(keys[-1:], {"score": np.zeros(1, np.float32)})
        saving.wait()
        store = buffer._saver.store
        assert store is not None
        firsts = [block.first for block in store.blocks]
        assert len(firsts) > 3
        assert firsts == sorted(firsts)
        before = store.blocks
        buffer.save(2, wait=True)
        assert store.blocks == before  # and nothing is written again


def test_every_row_that_is_written_back_goes_by_its_new_value() -> None:
    buffer = ReplayBuffer(4, remove={"by": "min", "field": "score"}, returns="numpy")
    keys = np.array(buffer.extend({"n": np.arange(4), "score": np.arange(4.0)}))
    buffer.extend({"n": [4], "score": [5.0]})  # n=0 goes
    buffer.write_back(keys[[1, 2]], {"score": np.array([9.0, 8.0])})
    buffer.extend({"n": [5, 6], "score": [6.0, 7.0]})
    assert sorted(buffer.ring.mark("n", buffer.ring.keys()).tolist()) == [1, 2, 5, 6]


def test_a_row_that_comes_right_after_another_leaves_that_its_priority() -> None:
    """Where the lowest priority goes, a new row asks what it is worth, which is when those before it get theirs."""
    buffer = ReplayBuffer(3, select=Prioritized(alpha=1), remove=Remove(by="lowest_priority"), returns="numpy")
    for number in range(3):
        buffer.append({"n": np.array(number)})
    assert buffer.drawer.mass(buffer.ring.keys()).tolist() == [1.0, 1.0, 1.0]
