"""A buffer that is saved and resumed is the buffer that was not."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline import (
    Anneal,
    Column,
    Damaged,
    Limiter,
    Locked,
    MixedReplay,
    Pipeline,
    Prioritized,
    ReplayBuffer,
    ReplayDataset,
    Schema,
    StalenessWeighted,
    StoreError,
    Uniform,
    UsageError,
    WithoutReplacement,
    WriteFailed,
)
from pipeline.buffer.transitions.columns import flat
from pipeline.checkpoint import salvage, verify
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.config import Ordered
from pipeline.errors import StoppedExit
from pipeline.replay.job import merged_from
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER
from pipeline.replay.store import ReplayStore
from pipeline.store.layout import Layout, segment_key
from pipeline.store.segments import Block
from pipeline.wiring.collecting import DeadSegments
from tests.support.children import child
from tests.support.disk import ScriptedFiles, tree
from tests.support.replay import as_likely
from tests.support.replaying import CAPACITY, Counter, contents, draw_again, draws, fill, rows
from tests.support.runs import task

SELECTIONS: dict[str, Any] = {
    "uniform": Uniform(),
    "window": Uniform(window=20),
    "carry": WithoutReplacement(),
    "keep": WithoutReplacement(last="keep"),
    "drop": WithoutReplacement(last="drop"),
    "prioritized": Prioritized(alpha=0.7, beta=Anneal(start=0.4, end=1.0, over=100)),
    "by_batch": Prioritized(weights="batch", new="all_time_max"),
    "fifo": Ordered(by="fifo"),
    "max": Ordered(by="max", field="reward"),
    "freshest": Ordered(by="freshest"),
    "trajectories": Uniform(window_trajectories=3),
    "uses": Uniform(uses=200),
    "window_uses": Uniform(window=40, uses=300),
    "epoch_uses": WithoutReplacement(uses=400),
    "order_uses": Ordered(by="lifo", uses=400),
    "staleness": StalenessWeighted(half_life=1.5),
}

LONG = {"uses": 5, "window_uses": 5, "epoch_uses": 5, "order_uses": 5}
"""How often is drawn where uses run out: 5 rows are the fewest."""


def make(directory: Path | None, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    if directory is not None:
        options.setdefault("files", ScriptedFiles())  # which does not sync: nobody could tell here
    return ReplayBuffer(capacity, directory=directory, **options)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("added", [0, 5, 61, 200])
def test_the_next_draws_are_those_of_the_buffer_that_was_not_saved(tmp_path: Path, name: str, added: int) -> None:
    options = {"select": SELECTIONS[name], "seed": 3}
    with make(tmp_path, **options) as buffer:
        buffer.resume()
        fill(buffer, 0, added)
        if added > 8:
            draws(buffer, 3)
        buffer.save(7, wait=True)
        if added > 8:
            expected = draws(buffer, LONG.get(name, 250))
        fill(buffer, added, 30)
        later = draws(buffer, 5)
    with make(tmp_path, **options) as again:
        resumed = again.resume(continue_episodes=True)
        assert (resumed.step, resumed.rows) == (7, min(added, CAPACITY))
        if added > 8:
            assert draws(again, LONG.get(name, 250)) == expected
        fill(again, added, 30)
        assert draws(again, 5) == later


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_saved_is_all_of_it(tmp_path: Path, shared: bool) -> None:
    with make(tmp_path, share_next_obs=shared) as buffer:
        buffer.extend(rows(0, 40), envs=4)
        buffer.extend(rows(40, 35), env=np.arange(35) % 3)
        buffer.end_episode(1)
        buffer.stepping.load([2, 5])
        before = contents(buffer)
        buffer.save(1, wait=True)
        expected = next_observations(buffer)
    with make(tmp_path, share_next_obs=shared) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == before
        assert again.stepping.state() == [2, 5]
        assert next_observations(again) == expected
    with make(tmp_path, share_next_obs=not shared) as other, pytest.raises(UsageError, match="share_next_obs="):
        other.resume()


def next_observations(buffer: ReplayBuffer) -> list[Any]:
    batch = buffer.sample(500)
    return [batch.keys.tolist(), batch["next_obs"]["n"].tolist(), batch["next_obs"]["half"].tolist()]


def test_every_dtype_comes_back_as_it_went_in(tmp_path: Path) -> None:
    kinds: Sequence[Any] = (
        torch.uint8, torch.int64, torch.int8, torch.float16, torch.bfloat16, torch.float64, torch.bool,
        torch.complex64, torch.float8_e4m3fn, torch.uint16,
    )  # fmt: skip
    columns: dict[str, Any] = {str(kind): torch.tensor([0, 1, 1, 0]).to(kind) for kind in kinds}
    columns["empty"] = torch.zeros(4, 0, 3)
    columns["large"] = torch.full((4, 700), 2.5, dtype=torch.bfloat16)
    columns["torch.int64"] = torch.tensor([2**53 + 1, -1, 2**63 - 1, 0])
    with make(tmp_path) as buffer:
        buffer.extend(columns)
        buffer.save(1, wait=True)
    with make(tmp_path, select=Ordered()) as again:
        again.resume()
        batch = again.sample(4)
        for name, tensor in columns.items():
            assert batch[name].dtype == tensor.dtype, name
            assert torch.equal(batch[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("capacity", [1, 7, 59, 60, 61, 500])
def test_another_capacity_takes_the_newest_rows(tmp_path: Path, capacity: int) -> None:
    with make(tmp_path, select=Prioritized()) as buffer:
        fill(buffer, 0, 100)
        buffer.save(1, wait=True)
    with make(tmp_path, capacity, select=Prioritized()) as again:
        again.resume()
        kept = min(capacity, CAPACITY)
        assert contents(again)["keys"] == list(range(100 - kept, 100))
        assert contents(again)["obs.n"] == list(range(100 - kept, 100))
        fill(again, 100, 50)
        assert contents(again)["obs.n"] == list(range(150 - min(capacity, kept + 50), 150))
        again.save(2, wait=True)
    assert verify(str(tmp_path)).whole


def test_priorities_and_weights_come_back(tmp_path: Path) -> None:
    options: dict[str, Any] = {"select": Prioritized(alpha=1, beta=1), "seed": 5}
    with make(tmp_path, 4, **options) as buffer:
        buffer.extend({"x": np.arange(4)})
        buffer.update_priorities(range(4), [1, 2, 3, 4])
        buffer.save(1, wait=True)
        expected = [buffer.sample(10).keys.tolist() for _ in range(100)]
    with child(draw_again, str(tmp_path), options) as process:
        shares, drawn, weights = process.hear()
    assert shares == [0.1, 0.2, 0.3, 0.4]
    assert drawn == expected
    assert weights == pytest.approx({0: 1, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4})
    assert as_likely(np.array(drawn), [1, 2, 3, 4])


def test_a_priority_that_comes_too_late_is_ignored_across_a_save_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"select": Prioritized(alpha=1)}
    with make(tmp_path, 4, **options) as buffer:
        buffer.extend({"x": np.arange(4)})
        drawn = next(batch for batch in (buffer.sample(1) for _ in range(100)) if batch["x"][0] == 0)
        state = buffer.state_dict()
        buffer.save(1, wait=True)
    in_memory = make(None, 4, **options)
    in_memory.load_state_dict(state)
    with make(tmp_path, 4, **options) as again:
        again.resume()
        for each in (again, in_memory):
            assert each.extend({"x": [4]}) == range(4, 5)
            updated = each.update_priorities(drawn.keys, [100.0])
            assert (updated.applied.tolist(), updated.stale) == ([False], 1)
            assert each.drawer.mass(np.arange(1, 5)).tolist() == [1, 1, 1, 1]
            assert each.update_priorities([4], [5.0]).applied.all()
        again.save(2, wait=True)
    with make(tmp_path, 4, **options) as once_more:
        once_more.resume()
        assert once_more.update_priorities(drawn.keys, [100.0]).stale == 1
        assert once_more.drawer.mass(np.arange(1, 5)).tolist() == [1, 1, 1, 5]


def test_terminated_and_truncated_are_kept_apart_wherever_rows_go(tmp_path: Path) -> None:
    flags = {"terminated": np.array([0, 1, 0, 1], bool), "truncated": np.array([0, 0, 1, 1], bool)}
    options: dict[str, Any] = {"select": "fifo", "returns": "numpy"}
    with make(tmp_path, **options) as buffer:
        buffer.extend({"reward": np.ones(4), **flags})
        in_memory = make(None, **options)
        in_memory.load_state_dict(buffer.state_dict())
        buffer.save(1, wait=True)
    with make(tmp_path, **options) as again:
        again.resume()
        mixed = MixedReplay({"saved": (again, 1), "kept": (in_memory, 1)})
        for batch in (again.sample(4, gamma=0.5), in_memory.sample(4, gamma=0.5), mixed.sample(8, gamma=0.5)):
            order = np.argsort(batch.keys, kind="stable").reshape(4, -1)
            for name, column in flags.items():
                assert (batch[name][order] == column[:, None]).all()
            assert (batch.discount[order] == np.array([[0.5], [0], [0.5], [0]])).all()
            assert batch["terminated"].dtype == batch["truncated"].dtype == bool


def _bytes_of(state: Any) -> bytes:
    return msgspec.msgpack.encode(state, enc_hook=lambda array: [str(array.dtype), array.shape, array.tobytes()])


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_state_that_is_loaded_and_asked_for_again_is_the_same_to_the_byte(name: str, batches: int) -> None:
    """Of an epoch of 3 batches: before it, within it, at its end, and in the next one."""
    options: dict[str, Any] = {"select": SELECTIONS[name], "seed": 3}
    buffer = make(None, 12, **options)
    fill(buffer, 0, 12)
    dataset = ReplayDataset(buffer, 4, prefetch=1)
    taken = iter(dataset)
    for _ in range(batches):
        if next(taken, None) is None:
            taken = iter(dataset)
            next(taken)
    state, ahead = buffer.state_dict(), dataset.state_dict()
    expected, expected_ahead = _bytes_of(state), _bytes_of(ahead)
    for _ in range(5):
        again = make(None, 12, **options | {"seed": 4})
        again.load_state_dict(state, continue_episodes=True)
        dataset = ReplayDataset(again, 4, prefetch=1)
        dataset.load_state_dict(ahead)
        state, ahead = again.state_dict(), dataset.state_dict()
        assert _bytes_of(state) == expected
        assert _bytes_of(ahead) == expected_ahead


@pytest.mark.parametrize("name", ["carry", "prioritized", "staleness"])
def test_what_is_resumed_and_saved_again_is_the_same_to_the_byte(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"select": SELECTIONS[name], "seed": 3}
    found = set()
    for life in range(5):
        with make(tmp_path, 12, **options) as buffer:
            buffer.resume(continue_episodes=True)
            if not life:
                fill(buffer, 0, 12)
                buffer.sample(4)
            saving = buffer.save(life, wait=True)
            folder = tmp_path / "generations" / f"{saving.generation:08d}"
            files = [folder / STATE_FILE, *sorted((folder / VALUES_FOLDER).glob("*"))]
            found.add(tuple((path.name, path.read_bytes()) for path in files))
    assert len(found) == 1


def test_epochs_have_the_same_orders_though_each_is_of_another_life(tmp_path: Path) -> None:
    options: dict[str, Any] = {"select": WithoutReplacement(), "seed": 0}
    unbroken = make(None, 20, **options)
    unbroken.extend({"x": np.arange(20)})
    orders = [unbroken.sample(20).keys.tolist() for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    for epoch in range(3):
        with make(tmp_path, 20, **options) as buffer:
            buffer.resume()
            if not epoch:
                buffer.extend({"x": np.arange(20)})
            assert buffer.sample(20).keys.tolist() == orders[epoch]
            buffer.save(epoch, wait=True)


def test_numbers_that_are_none_survive_the_very_first_save(tmp_path: Path) -> None:
    class Best(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, Any] = {"best": -math.inf, "last": math.nan, "lr": 5e-324, "x": -0.0}

        def state_dict(self) -> dict[str, Any]:
            return self.values

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state

    with make(tmp_path) as buffer:
        buffer.attach(best=Best())
        buffer.save(0, wait=True)
    with make(tmp_path) as again:
        best = Best()
        best.values = {}
        again.attach(best=best)
        assert again.resume().step == 0
    assert struct.pack("<4d", *best.values.values()) == struct.pack("<4d", -math.inf, math.nan, 5e-324, -0.0)
    assert list(best.values) == ["best", "last", "lr", "x"]


@pytest.mark.parametrize("new", ["all_time_max", "current_max"])
def test_priorities_are_to_the_power_of_todays_alpha(tmp_path: Path, new: Any) -> None:
    with make(tmp_path, 8, select=Prioritized(alpha=0.5, new=new)) as buffer:
        buffer.extend({"x": np.arange(4)})
        buffer.update_priorities(range(4), [0, 1, 4, 9])
        buffer.save(1, wait=True)
    with make(tmp_path, 8, select=Prioritized(alpha=2.0, new=new)) as again:
        again.resume()
        again.extend({"x": np.arange(2)})
        again.update_priorities([5], [2])
        again.sample(1)
        assert again.drawer.mass(np.arange(6)).tolist() == pytest.approx([0, 1, 16, 81, 81, 4])


def test_what_came_after_the_save_is_not_there(tmp_path: Path) -> None:
    with make(tmp_path, 20) as buffer:
        buffer.extend({"x": np.arange(10)})
        buffer.save(10, wait=True)
        buffer.extend({"x": np.arange(10, 15)})
    before = {name: hashlib.sha256(content).hexdigest() for name, content in tree(tmp_path).items()}
    with make(tmp_path, 20) as again:
        assert again.resume().step == 10
        assert contents(again)["x"] == list(range(10))
        assert again.ring.added == 10
        again.extend({"x": np.array([100])})
        again.save(11, wait=True)
        after = {name: hashlib.sha256(content).hexdigest() for name, content in tree(tmp_path).items()}
        changed = {name for name, digest in before.items() if after[name] != digest}
        assert changed <= {"lock"}
    with make(tmp_path, 20) as first:
        first.resume(10)
        assert contents(first)["x"] == list(range(10))


def test_saving_again_writes_only_what_is_new(tmp_path: Path) -> None:
    sizes = []
    with make(tmp_path, 7) as buffer:
        buffer.extend({"x": np.arange(7 * 131_072, dtype=np.float64).reshape(7, -1)})
        buffer.save(0, wait=True)
    sizes.append(sum(map(len, tree(tmp_path).values())))
    for life in range(1, 4):
        with make(tmp_path, 7) as buffer:
            buffer.resume()
            assert len(buffer) == 7
            assert contents(buffer)["keys"] == list(range(7))
            assert contents(buffer)["x"][-1][0] == 6 * 131_072
            buffer.save(life, wait=True)
        sizes.append(sum(map(len, tree(tmp_path).values())))
    assert max(sizes) < 1.05 * min(sizes) < 1.1 * 7 * 2**20


def test_a_buffer_that_is_hardly_filled_takes_hardly_anything(tmp_path: Path) -> None:
    count, content = 1000, 1000 * 48
    with make(tmp_path, 1_000_000, select=Prioritized()) as buffer:
        buffer.extend({"x": np.ones((count, 12), np.float32)})
        buffer.save(0, wait=True)
    assert sum(map(len, tree(tmp_path).values())) < content + 64 * count + 65_536


def test_segments_go_with_their_rows(tmp_path: Path) -> None:
    with make(tmp_path, 40, keep=1) as buffer:
        for step in range(30):
            buffer.extend({"x": np.full((20, 131_072), step, np.float64)})
            buffer.save(step, wait=True)
    held = [path.stat().st_size for path in (tmp_path / "segments").iterdir()]
    assert sum(held) < 4 * (64 << 20)
    with make(tmp_path, 40) as again:
        again.resume()
        assert again.sample(40)["x"][:, 0].min() == 28


def test_rows_that_are_overwritten_while_they_are_saved_are_saved(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedFiles):
        def create(self, path: str) -> int:
            if path.endswith(".fbs"):
                begun.set()
                assert go_on.wait(30)
            return super().create(path)

    with make(tmp_path, files=Slow()) as buffer:
        fill(buffer, 0, 100)
        before = contents(buffer)
        saving = buffer.save(1)
        assert begun.wait(30)
        fill(buffer, 100, 55)
        buffer.append({name: each[0] for name, each in flat(rows(155, 1))})
        fill(buffer, 156, 200)
        assert not saving.done
        go_on.set()
        assert saving.wait(30)
        last = contents(buffer)
        buffer.save(2, wait=True)
    for step, expected in ((1, before), (2, last)):
        with make(tmp_path) as again:
            again.resume(step, continue_episodes=True)
            assert contents(again) == expected


def test_what_is_attached_is_of_the_same_commit(tmp_path: Path) -> None:
    net, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    counter = Counter()
    with make(tmp_path) as buffer:
        buffer.attach(net=net, counter=counter)
        counter.step = 4
        fill(buffer, 0, 10)
        buffer.save(4, wait=True)
        saved = net.weight.detach().clone()
        counter.step = 5
    with make(tmp_path) as again, torch.no_grad():
        fresh = Counter()
        again.attach(net=other, counter=fresh)
        again.resume()
        assert torch.equal(other.weight, saved)
        assert fresh.step == 4


def test_open_episodes_end_where_they_were(tmp_path: Path) -> None:
    with make(tmp_path, 20) as buffer:
        ends = np.array([0, 0, 0, 1] * 2 + [0, 0], bool)
        buffer.extend({"x": np.arange(10)}, ends=ends)
        buffer.save(1, wait=True)
    with make(tmp_path, 20) as again:
        again.resume()
        again.extend({"x": np.arange(4)}, ends=np.array([0, 0, 0, 1], bool))
        again.save(2, wait=True)
        assert _lengths(again) == [4, 4, 2, 4]
    with make(tmp_path, 20) as once_more:
        once_more.resume()
        assert _lengths(once_more) == [4, 4, 2, 4]


def _lengths(buffer: ReplayBuffer) -> list[int]:
    lengths: list[int] = np.unique(contents(buffer)["#episode"], return_counts=True)[1].tolist()
    return lengths


# -- in memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_state_dict_is_all_of_it(name: str, shared: bool) -> None:
    options: dict[str, Any] = {"select": SELECTIONS[name], "seed": 3, "share_next_obs": shared}
    buffer, again = make(None, **options), make(None, **options)
    fill(buffer, 0, 100)
    draws(buffer, 3)
    state = buffer.state_dict()
    before = contents(buffer)
    expected = draws(buffer, 20)
    fill(buffer, 100, 60)
    fill(again, 0, 5)
    again.load_state_dict(state, continue_episodes=True)
    assert contents(again) == before
    assert draws(again, 20) == expected
    fill(again, 100, 60)
    assert contents(again) == contents(buffer)


def test_a_state_dict_fits_into_another_capacity_and_ends_open_episodes() -> None:
    buffer, smaller, larger = make(None), make(None, 30), make(None, 1000)
    buffer.extend({"x": np.arange(50)})
    for other in (smaller, larger):
        other.load_state_dict(buffer.state_dict())
        other.extend({"x": np.arange(50, 55)})
    assert contents(smaller)["x"] == list(range(25, 55))
    assert contents(larger)["x"] == list(range(55))
    assert _lengths(larger) == [50, 5]


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"state": {"added": "x"}, "rows": {}, "values": {}}])
def test_what_is_no_state_is_refused_and_nothing_changes(state: Any) -> None:
    buffer = make(None)
    fill(buffer, 0, 10)
    before = contents(buffer)
    with pytest.raises(ValueError, match="no state of a replay buffer"):
        buffer.load_state_dict(state)
    assert contents(buffer) == before


def test_rows_that_lie_on_the_disk_are_not_exchanged(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 10)
        state = buffer.state_dict()
        buffer.save(1, wait=True)
        with pytest.raises(UsageError, match="comes before"):
            buffer.load_state_dict(state)


# -- choosing a generation -------------------------------------------------------------------------------------


def test_an_older_step_becomes_the_newest_generation(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 10)
        buffer.save(1, wait=True)
        fill(buffer, 10, 10)
        buffer.save(2, wait=True)
    with make(tmp_path) as again:
        assert again.resume(1).rows == 10  # and it is killed before it saves
    with make(tmp_path) as once_more:
        resumed = once_more.resume()
        assert (resumed.step, resumed.rows) == (1, 10)
    with make(tmp_path) as other, pytest.raises(StoreError, match="no generation of step 9; there are steps 1, 2"):
        other.resume(9)


def test_an_empty_directory_begins_at_step_0(tmp_path: Path) -> None:
    with make(tmp_path / "new") as buffer:
        assert tuple(buffer.resume()) == (0, None, 0)


def test_an_epoch_goes_on_though_the_seed_is_another_one(tmp_path: Path) -> None:
    def drawn(buffer: ReplayBuffer) -> list[int]:
        return [int(key) for _ in range(2) for key in buffer.sample(5).keys]

    for life, seed in enumerate((2**62, 5, 6)):
        with make(tmp_path, 20, select="without_replacement", seed=seed) as buffer:
            if life:
                buffer.resume()
            else:
                buffer.extend({"x": np.arange(20)})
                first = drawn(buffer)
            buffer.save(life, wait=True)
            rest = drawn(buffer)
            assert sorted(first + rest) == list(range(20))
    with make(tmp_path / "shared", 20, select="without_replacement", seed=3, storage="shared") as buffer:
        buffer.extend({"x": np.arange(20)})
        first = drawn(buffer)
        buffer.save(0, wait=True)
    other = make(tmp_path / "shared", 20, select="without_replacement", seed=4, storage="shared")
    with other, pytest.raises(UsageError, match="saved with seed=3"):
        other.resume()
    with make(tmp_path / "shared", 20, select="without_replacement", seed=3, storage="shared") as buffer:
        buffer.resume()
        assert sorted(first + drawn(buffer)) == list(range(20))


@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement"])
def test_another_selection_begins_anew_with_the_same_rows(tmp_path: Path, select: str) -> None:
    for saved in ("uniform", "prioritized", "without_replacement"):
        folder = tmp_path / saved
        with make(folder, select=saved) as buffer:
            fill(buffer, 0, 30)
            buffer.sample(4)
            buffer.save(1, wait=True)
        with make(folder, select=select) as again:
            again.resume()
            assert set(again.sample(30).keys.tolist()) <= set(range(30))


# -- what is refused -------------------------------------------------------------------------------------------


def test_nothing_is_saved_without_a_directory() -> None:
    with pytest.raises(UsageError, match="directory="):
        make(None).save(1)
    with pytest.raises(UsageError, match="directory="):
        make(None).resume()


def test_a_used_directory_asks_for_resume(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        buffer.save(1, wait=True)
    with make(tmp_path) as again, pytest.raises(UsageError, match="call resume"):
        again.save(2)


def test_resume_comes_before_rows_and_once(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 3)
        with pytest.raises(UsageError, match="before rows"):
            buffer.resume()
    with make(tmp_path) as again:
        again.resume()
        with pytest.raises(UsageError, match="once"):
            again.resume()


def test_a_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        buffer.resume()
        with pytest.raises(Locked):
            make(tmp_path).resume()
    with make(tmp_path) as again:
        again.resume()


def test_another_attached_object_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        buffer.attach(counter=Counter())
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
    with make(tmp_path) as again:
        with pytest.raises(UsageError, match="counter"):
            again.resume()
        assert len(again) == 0
        again.attach(counter=Counter())
        assert again.resume().rows == 5


def test_other_columns_are_refused(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        buffer.extend({"x": np.arange(5)})
        buffer.save(1, wait=True)
    schema = Schema((Column("x", "float32"),))
    with make(tmp_path, schema=schema) as again, pytest.raises(UsageError, match="float32"):
        again.resume()


async def test_the_run_of_a_pipeline_is_not_that_of_a_buffer(tmp_path: Path) -> None:
    given = task(4)
    async with Pipeline(given, directory=tmp_path / "pipeline") as pipe:
        await pipe.start()
    with make(tmp_path / "pipeline") as buffer, pytest.raises(UsageError, match="run of a pipeline"):
        buffer.resume()
    with make(tmp_path / "buffer") as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
    async with Pipeline(given, directory=tmp_path / "buffer") as pipe:
        with pytest.raises(UsageError, match="run of a replay buffer"):
            await pipe.resume()
    with pytest.raises(UsageError, match="of a replay buffer"):
        salvage(tmp_path / "buffer", tmp_path / "salvaged")


def test_damage_is_named_and_the_generation_before_is_offered(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
        fill(buffer, 5, 5)
        buffer.save(2, wait=True)
    segment = next((tmp_path / "segments").iterdir())
    raw = bytearray(segment.read_bytes())
    at = raw.rindex(b"obs.half")
    raw[at + 600] ^= 1
    segment.write_bytes(raw)
    with make(tmp_path) as again:
        with pytest.raises(Damaged, match=r"000001-0000-000001\.fbs at byte \d+.*resume\(step=1\)"):
            again.resume()
        assert len(again) == 0
        assert again.resume(1).rows == 5
    assert not verify(str(tmp_path)).whole


def test_a_removed_segment_is_named(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
    os.unlink(next((tmp_path / "segments").iterdir()))
    with make(tmp_path) as again, pytest.raises(Damaged, match=r"missing.* from a copy\.$"):
        again.resume()


def test_a_failed_save_is_told_once_by_the_verbs_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise WriteFailed("no space")

    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        with monkeypatch.context() as patch:
            patch.setattr(ReplayStore, "commit", full)
            for tell in (lambda: buffer.save_due(1), lambda: buffer.save(2)):
                saving = buffer.save(1)
                while not saving.done:
                    time.sleep(0.001)
                fill(buffer, 5, 5)
                buffer.sample(2)
                with pytest.raises(WriteFailed, match="no space"):
                    tell()
        buffer.save(3, wait=True)
    with make(tmp_path) as again:
        assert again.resume()[::2] == (3, 15)


def test_signals_that_cannot_be_had_are_refused_before_anything_is_saved_or_resumed(tmp_path: Path) -> None:
    def refused(verb: Callable[[], Any]) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="in the main thread"):
            pool.submit(verb).result()

    with make(tmp_path, signals=["SIGUSR1"]) as buffer:
        fill(buffer, 0, 5)
        refused(lambda: buffer.save(1))
        assert not any((tmp_path / "generations").glob("*"))
        buffer.save(1, wait=True)
    with make(tmp_path, signals=["SIGUSR1"]) as again:
        refused(again.resume)
        assert len(again) == 0
        assert again.resume()[::2] == (1, 5)


def test_save_due_leaves_the_error_to_a_thread_that_saves_at_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        with monkeypatch.context() as patch:
            patch.setattr(ReplayStore, "commit", lambda *given: (_ for _ in ()).throw(WriteFailed("no space")))
            saving = buffer.save(1)
            while not saving.done:
                time.sleep(0.001)
        with buffer._saver.lock, ThreadPoolExecutor(1) as pool:
            assert not pool.submit(buffer.save_due, 1).result()
        with pytest.raises(WriteFailed, match="no space"):
            buffer.save_due(1)


def test_steps_are_needed_where_they_are_counted(tmp_path: Path) -> None:
    with make(tmp_path, save_every=5) as buffer:
        assert [buffer.save_due(step) for step in (4, 5)] == [False, True]
        with pytest.raises(UsageError, match="save_every=5 counts steps"):
            buffer.save_due()
        buffer.save(3, wait=True)  # in between: what counts are the steps that 5 divides
        assert [buffer.save_due(step) for step in (4, 5, 9)] == [False, True, True]


# -- settings and generators ------------------------------------------------------------------------------------


def test_the_settings_of_the_limiter_are_those_of_now(tmp_path: Path) -> None:
    blocking = Limiter(min_size=3, ratio=2.0, error_buffer=4.0)
    with make(tmp_path, limiter=blocking) as buffer:
        buffer.extend({"x": np.arange(5)})
        assert not buffer.can_add()
        buffer.save(1, wait=True)
    with make(tmp_path, limiter=Limiter(min_size=1)) as again:
        again.resume()
        assert again.append({"x": 5}) == 5
        assert len(again.sample(100)) == 100
    with make(tmp_path, limiter=blocking) as as_before:
        as_before.resume()
        assert not as_before.can_add()
        assert as_before.can_sample(8)
        assert not as_before.can_sample(9)


@pytest.mark.parametrize("drawn", range(4))
def test_half_a_word_that_a_generator_holds_is_saved(tmp_path: Path, drawn: int) -> None:
    with make(tmp_path, 1000, seed=7) as buffer:
        fill(buffer, 0, 100)
        buffer._rng.integers(0, 1000, drawn, dtype=np.int32)  # of 64 bits it takes 32, and keeps the others
        buffer.save(1, wait=True)
        expected = buffer._rng.integers(0, 1000, 3, dtype=np.int32).tolist()
        expected += buffer.sample(9).keys.tolist()
    with make(tmp_path, 1000, seed=8) as again:
        again.resume()
        found = again._rng.integers(0, 1000, 3, dtype=np.int32).tolist()
        assert found + again.sample(9).keys.tolist() == expected


def test_many_small_saves_leave_few_blocks(tmp_path: Path) -> None:
    with make(tmp_path, 5_000, files=ScriptedFiles()) as buffer:
        for step in range(290):
            buffer.extend({"x": np.arange(5) + 5 * step})
            buffer.save(step, wait=True)
        assert buffer._saver.store is not None
        assert len(buffer._saver.store.blocks) <= 2 * 16
        before = contents(buffer)
    with make(tmp_path, 5_000) as again:
        assert again.resume(continue_episodes=True).rows == 1450
        assert contents(again) == before
    assert verify(str(tmp_path)).whole


@pytest.mark.parametrize("rows_of_a_save", [1, 7, 100])
def test_rows_are_written_again_once_for_each_size_of_block(rows_of_a_save: int) -> None:
    blocks: list[Block] = []
    written = most = added = 0
    whole = 20_000
    while added < 10 * whole:
        begin = merged_from(blocks, whole)
        first = blocks[begin].first if begin < len(blocks) else added
        added += rows_of_a_save
        blocks = [*blocks[:begin], Block(first, added - first, 1, 0, 1, 0, 0)]
        written += added - first
        most = max(most, sum(block.count < whole // 2 for block in blocks))
    assert [block.first for block in blocks] == [0, *np.cumsum([block.count for block in blocks]).tolist()[:-1]]
    sizes = np.log(whole / rows_of_a_save) / np.log(16)
    assert written <= (2 + sizes) * added
    assert most <= 17 * (1 + sizes)


def test_what_sixteen_blocks_became_counts_as_one_of_the_next_sixteen() -> None:
    counts = [16] * 15 + [1] * 16
    firsts = np.cumsum([0, *counts]).tolist()
    blocks = [Block(first, count, 1, 0, 1, 0, 0) for first, count in zip(firsts, counts, strict=False)]
    assert merged_from(blocks, 20_000) == 0
    assert merged_from(blocks[1:], 20_000) == 14
    assert merged_from(blocks[:-1], 20_000) == len(blocks) - 1


def test_after_a_failed_save_the_next_one_writes_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever waited for it was told: no other verb says it again."""

    def full(*given: Any, **more: Any) -> None:
        raise WriteFailed("no space")

    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
        fill(buffer, 5, 5)
        before = {path.name: path.read_bytes() for path in (tmp_path / "segments").iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(GenerationWriter, "commit", full)
            with pytest.raises(WriteFailed, match="no space"):
                buffer.save(2, wait=True)
        half = {path.name: path.read_bytes() for path in (tmp_path / "segments").iterdir()}
        assert all(half[name].startswith(content) for name, content in before.items())
        assert not buffer.save_due(2)
        buffer.save(3, wait=True)
        now = {path.name: path.read_bytes() for path in (tmp_path / "segments").iterdir()}
        assert {name: now.get(name) for name in half} == half
        assert len(now) > len(half)
        content = contents(buffer)
    with make(tmp_path) as again:
        assert again.resume(continue_episodes=True).step == 3
        assert contents(again) == content
    assert verify(str(tmp_path)).whole


def test_rows_that_fit_into_a_smaller_buffer_keep_their_own_priorities(tmp_path: Path) -> None:
    select = Prioritized(alpha=1.0)
    with make(tmp_path, 10, select=select) as buffer:
        buffer.extend({"x": np.arange(13)})
        buffer.update_priorities(np.arange(3, 13), np.arange(3.0, 13.0))
        buffer.update_priorities([0, 1], [1.0, 1.0])
        buffer.save(1, wait=True)
    with make(tmp_path, 4, select=select) as again:
        assert again.resume(continue_episodes=True).rows == 4
        assert again.drawer.mass(np.arange(9, 13)).tolist() == [9.0, 10.0, 11.0, 12.0]
        assert again.statistics().stale_updates == 2


def test_who_goes_on_after_a_stop_is_not_stopped_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.replay.due._LOOK_EVERY_S", 0.0)
    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
        (tmp_path / "stop").touch()
        assert buffer.save_due()
        with pytest.raises(StoppedExit):
            buffer.save(2)
        assert not (tmp_path / "stop").exists()
        assert not buffer.save_due()
        buffer.save(3, wait=True)


def test_an_episode_that_is_cut_before_its_rows_are_written_was_open_when_they_were_saved(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        buffer.extend({"x": np.arange(3)})
        with buffer.gate.lock:  # nobody writes meanwhile
            saving = buffer.save(1)
            before = contents(buffer)
            buffer.end_episode()
        saving.wait()
    with make(tmp_path) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == before


@pytest.mark.parametrize("later", [0, 1, 2])
def test_half_a_record_at_the_end_of_a_segment_is_not_counted_on(tmp_path: Path, later: int) -> None:
    """Of the two newest segments of a life that was killed: older ones were synced before the newest was begun."""
    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
    (path,) = (tmp_path / "segments").iterdir()
    key, size = segment_key(path.name), path.stat().st_size
    path.write_bytes(path.read_bytes() + b"half a record")
    layout = Layout(str(tmp_path))
    for number in range(later):
        Path(layout.segment(key[0], key[1], key[2] + 1 + number)).touch()
    run = layout.read_run()
    assert run is not None
    found = DeadSegments(layout).bytes_of(key, run.tag)
    assert found == (size if later < 2 else size + 13)


def test_verify_wants_of_a_segment_what_the_generation_promised_that_promised_most(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        sizes = []
        for step in (1, 2):
            fill(buffer, 5 * step, 5)
            buffer.save(step, wait=True)
            (path,) = (tmp_path / "segments").iterdir()
            sizes.append(path.stat().st_size)
    found = verify(str(tmp_path), quick=True)
    assert (found.whole, found.payloads) == (True, 3)
    os.truncate(path, sizes[0])
    found = verify(str(tmp_path), quick=True)
    assert [damage.path for damage in found.damages] == [f"segments/{path.name}"]


def test_a_save_whose_lock_was_removed_commits_nothing(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 5)
        buffer.save(1, wait=True)
        (tmp_path / "lock").unlink()
        with pytest.raises(WriteFailed, match="was removed, or replaced"):
            buffer.save(2, wait=True)
        assert [path.name for path in (tmp_path / "generations").iterdir()] == ["00000000"]
