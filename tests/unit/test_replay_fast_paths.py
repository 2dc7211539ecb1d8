"""What is done quickly where it can be comes out as it does where everything is worked out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.layout import EPISODE, MARKS
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.buffer.transitions.sums import SumTree
from pipeline.replay import ReplayBuffer

SCHEMA = Schema.of({"obs": np.zeros((1, 3), np.float32), "image": np.zeros((1, 1_100), np.uint8)})


def make_ring(capacity: int) -> Ring:
    ring = Ring(TransitionStorage(capacity))
    ring.storage.shape(SCHEMA)
    ring.storage.records[:] = np.zeros((), ring.storage.records.dtype)
    return ring


def rows(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    return {
        "obs": rng.random((count, 3), np.float32),
        "image": rng.integers(0, 255, (count, 1_100), np.uint8),
    }


def assert_same(one: Ring, other: Ring) -> None:
    """All that a ring knows, as far as anybody can ask."""
    assert (one.added, one.size, one.stride, one.cuts) == (other.added, other.size, other.stride, other.cuts)
    slots = one.slots(one.keys())
    for name in (*(MARKS.names or ()), "obs", "image"):
        np.testing.assert_array_equal(one.storage.view(name)[slots], other.storage.view(name)[slots], name)
    if one.size:
        keys = one.keys()
        np.testing.assert_array_equal(one.following(keys), other.following(keys))
        episodes = one.mark(EPISODE, keys)
        np.testing.assert_array_equal(one.episodes.lengths.first(episodes), other.episodes.lengths.first(episodes))
        assert one.episodes.lengths.held == other.episodes.lengths.held
    assert (one.episodes.next, one.episodes.state()) == (other.episodes.next, other.episodes.state())


@pytest.mark.parametrize("seed", range(40))
def test_blocks_that_are_like_the_one_before_are_marked_as_any_block_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 200))
    quick, general = make_ring(capacity), make_ring(capacity)
    steady = 0
    for _ in range(30):
        width, steps = int(rng.integers(1, 9)), int(rng.choice([1, 1, 2, 5]))
        envs = rng.permutation(10)[:width].astype(np.int64)
        envs.setflags(write=False)
        rate = rng.choice([0.0, 0.02, 0.3, 1.0])
        for _ in range(int(rng.integers(1, 12))):
            count = width * steps
            block, version = rows(rng, count), int(rng.integers(0, 3))
            ends = (rng.random(count) < rate).astype(np.uint8) * rng.integers(1, 3, count, np.uint8)
            given = ends if ends.any() or rng.random() < 0.5 else None
            quick.extend(block, count, envs, given, version)
            steady += quick.episodes._steady is not None
            general.extend(block, count, envs.copy(), ends, version)  # an array that is not known again
            assert general.episodes._steady is None
            if rng.random() < 0.2:
                assert_same(quick, general)
        odd = rng.random()
        for ring in (quick, general):
            env = int(envs[0])
            if odd < 0.2:
                ring.append({name: each[0] for name, each in block.items()}, env, 0, 1)
            elif odd < 0.4:
                ring.cut(env)
            elif odd < 0.5:
                ring.cut()
            elif odd < 0.55:
                ring.clear()
            elif odd < 0.7:
                ring.extend(block, count, np.sort(np.resize(envs, count)), ends, 0, mixed=True)
            elif odd < 0.8:
                ring.episodes.load(ring.episodes.state(), ring.episodes.next)
        assert_same(quick, general)
    assert steady or capacity < 40, seed


def test_a_serial_that_begins_anew_leaves_its_neighbours_alone() -> None:
    envs = np.arange(4)
    envs.setflags(write=False)
    quick, general = make_ring(64), make_ring(64)
    rng = np.random.default_rng(0)
    for ring in (quick, general):
        ring.added = (1 << 32) - 30
    for number in range(20):
        block = rows(rng, 4)
        ends = np.array([0, number % 5 == 4, 0, 0], np.uint8)
        quick.extend(block, 4, envs, ends, 0)
        general.extend(block, 4, envs.copy(), ends, 0)
        assert_same(quick, general)


def test_rows_are_looked_at_closely_unless_every_dtype_and_shape_is_that_of_its_column() -> None:
    good: dict[str, Any] = {"obs": np.zeros((5, 3), np.float32), "image": np.zeros((5, 1_100), np.uint8)}
    assert SCHEMA.block(good) == 5
    assert SCHEMA.block({name: each[:0] for name, each in good.items()}) == 0
    for name, other in (
        ("obs", good["obs"].astype(np.float64)),
        ("obs", good["obs"].astype(">f4")),
        ("obs", good["obs"][:4]),
        ("obs", good["obs"][:, :2]),
        ("obs", good["obs"].tolist()),
        ("obs", np.float32(1)),
        ("obs", np.ma.masked_array(good["obs"])),
        ("image", good["image"].astype(bool)),
        ("more", good["image"]),
    ):
        assert SCHEMA.block({**good, name: other}) == -1, (name, other)
    assert SCHEMA.block({"obs": good["obs"]}) == -1
    assert SCHEMA.block({"obs": good["obs"], "other": good["image"]}) == -1


def trees(capacity: int) -> Iterator[SumTree]:
    yield SumTree(capacity, fast=False)
    if find_spec("numba") is not None:
        fast = SumTree(capacity, fast=True)
        assert fast._loops is not None
        yield fast


@pytest.mark.parametrize("capacity", [1, 15, 16, 17, 256, 257, 5_000])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_the_same_to_the_last_bit_however_it_was_changed(capacity: int, seed: int) -> None:
    """By single values or by runs, by arrays or by compiled loops."""
    rng = np.random.default_rng(seed)
    changed = list(trees(capacity))
    values = np.zeros(capacity)
    for _ in range(12):
        begin, end = sorted(rng.integers(0, capacity + 1, 2).tolist())
        new = rng.random(end - begin) ** 9 * (rng.random(end - begin) < 0.7)
        places = rng.integers(0, capacity, int(rng.integers(1, 300)))
        ones = rng.random(len(places)) * rng.integers(0, 2, len(places))
        for tree in changed:
            tree.fill(begin, end, new)
            tree.set(places, ones)
        values[begin:end] = new
        values[places] = ones
        masses = np.append(rng.random(200), [0, 1, 0.5])
        for whole in trees(capacity):
            whole.fill(0, capacity, values)
            for tree in changed:
                np.testing.assert_array_equal(tree._flat, whole._flat)
                np.testing.assert_array_equal(tree._bounds, whole._bounds)
                assert tree.least == values[values > 0].min(initial=np.inf)
                assert tree.most == values.max()
                if tree.total > 0:
                    found = tree.find(masses * tree.total)
                    np.testing.assert_array_equal(found, whole.find(masses * whole.total))
                    assert (values[found] > 0).all()


@pytest.mark.parametrize("fast", [False, True])
def test_a_mass_falls_where_the_running_sum_first_exceeds_it(fast: bool) -> None:
    """Whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, 3_000).astype(np.float64)
    tree = SumTree(3_000, fast=fast)
    tree.fill(0, 3_000, values)
    masses = np.arange(int(values.sum())).astype(np.float64)
    np.testing.assert_array_equal(tree.find(masses), np.searchsorted(np.cumsum(values), masses, side="right"))
    assert tree.find(np.array([tree.total, tree.total * 2])).tolist() == [np.flatnonzero(values)[-1]] * 2


def test_nothing_is_compiled_for_a_small_buffer_or_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SumTree(100)._loops is None
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "pipeline.buffer.transitions.compiled", raising=False)
    monkeypatch.delattr("pipeline.buffer.transitions.compiled", raising=False)
    assert SumTree(100_000)._loops is None
    assert SumTree(100, fast=True)._loops is None


def test_where_nothing_can_be_kept_on_the_disk_loops_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from pipeline.buffer.transitions import compiled

    njit = numba.njit

    def refuse(*functions: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*functions, **options)  # numba itself may import more of itself meanwhile

    monkeypatch.setattr(numba, "njit", refuse)
    assert compiled._compiled(lambda number: number + 1)(1) == 2


@pytest.mark.parametrize("storage", ["memory", "mapped"])
@pytest.mark.parametrize("count", [64, 256])
def test_large_blocks_are_stored_as_small_ones_whatever_their_columns(
    tmp_path: Path, storage: Literal["memory", "mapped"], count: int
) -> None:
    rng = np.random.default_rng(3)
    complex_ = rng.random((2048, 3)) + 1j * rng.random((2048, 3))
    columns: dict[str, np.ndarray] = {
        "flat": rng.random((2048, 5)).astype(np.float32),
        "matrix": rng.random((2048, 4, 3)),
        "turned": rng.random((3, 2048)).T,  # no row of it is contiguous
        "complex": complex_.astype(np.complex64),
        "halves": rng.random((2048, 7)).astype(np.float16),
        "pair": rng.integers(0, 255, (2048, 2)).astype(np.uint8),
        "nothing": np.zeros((2048, 0), np.float32),
        "number": rng.random(2048),
        "image": rng.integers(0, 255, (2048, 40, 40)).astype(np.uint8),
        "done": rng.random(2048) < 0.01,
    }
    with ReplayBuffer(1_536, storage=storage, directory=tmp_path / "run", seed=1) as buffer:
        for begin in range(0, 2048, count):
            buffer.extend({name: each[begin : begin + count] for name, each in columns.items()}, envs=64)
        assert buffer.ring.episodes._steady is not None  # the quick way was taken
        slots = buffer.ring.slots(buffer.ring.keys())
        for name, each in columns.items():
            np.testing.assert_array_equal(buffer.ring.storage.view(name)[slots], each[512:], err_msg=name)
