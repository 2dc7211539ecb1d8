"""What is drawn from a saved pool that is looked at is what the pool itself would have drawn next, whatever its
selection looks at and whichever rows go first; and nothing as long as its rows is in memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ConfigError, ReplayBuffer, Starved
from pipeline.buffer.transitions import elsewhere, unread_sums
from pipeline.errors import Damaged
from pipeline.replay import looked, looked_order, looked_pool, pool_files
from pipeline.replay.looked_pool import LookedPool
from pipeline.tools import sample_run
from tests.support.looked import KINDS, SELECTIONS, change, draw, rows, seen
from tests.support.opening import reseal

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
SEEDS = range(200) if SOAK else range(4)

OF_POOLS: dict[str, dict[str, Any]] = {
    name: each for name, each in SELECTIONS.items() if "window" not in each and "window_trajectories" not in each
} | {"prioritized by all": {"select": "prioritized", "eps": 0.01, "weights": "buffer", "alpha": 0.7}}
REMOVALS: dict[str, Any] = {
    "least": {"by": "min", "field": "reward"},
    "most": {"by": "max", "field": "reward"},
    "stalest": "stalest",
    "lifo": "lifo",
    "priority": "lowest_priority",
}


def lived(directory: str, select: Mapping[str, Any], options: Mapping[str, Any], seed: int, capacity: int) -> None:
    """A pool that was filled, drawn from, changed, saved and resumed, most of it several times."""
    rng = np.random.default_rng(seed)
    for life in range(int(rng.integers(1, 3))):
        with ReplayBuffer(capacity, directory=directory, select=select, seed=seed, **options) as buffer:
            buffer.resume()
            for step in range(int(rng.integers(1, 5))):
                if len(buffer) and rng.random() < 0.7:  # of rows that were saved before
                    change(buffer, rng, (1, 5, 100))
                for _ in range(int(rng.integers(1, 7))):
                    count = int(rng.integers(1, 30))
                    buffer.extend(
                        rows(rng, count, big="compress" in options, rewards=60),
                        version=int(rng.integers(0, 2 + 3 * step)),
                    )
                for _ in range(int(rng.integers(0, 3))):
                    if rng.random() < 0.5:
                        change(buffer, rng, (1, 5, 100))
                    draw(buffer, int(rng.integers(1, 9)))
                if rng.random() < 0.05:
                    buffer.clear()
                    buffer.extend(rows(rng, 20, big="compress" in options, rewards=60))
                buffer.save(10 * life + step, wait=True)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "AT_ONCE", 8)
    monkeypatch.setattr(pool_files, "AT_ONCE", 8)
    monkeypatch.setattr(unread_sums, "_AT_ONCE", 16)
    monkeypatch.setattr(looked, "_SPAN", 300)
    monkeypatch.setattr(looked_order, "_LEAST", 5)
    monkeypatch.setattr(looked_order, "_KNOWN", 40)
    monkeypatch.setattr(looked_order, "_AHEAD", 16)
    monkeypatch.setattr(looked_pool, "_EACH", 4)


CASES = [
    (selection, removal, kind)
    for selection, select in OF_POOLS.items()
    for removal in REMOVALS
    for kind in ("plain", "compressed")
    if (removal != "priority" or select["select"] == "prioritized")
    and (kind == "plain" or removal in ("least", "lifo"))
]


@pytest.mark.parametrize(("selection", "removal", "kind"), CASES)
def test_what_comes_next_is_drawn(run_directory: str, selection: str, removal: str, kind: str) -> None:
    select = OF_POOLS[selection]
    options = KINDS[kind] | {"remove": REMOVALS[removal]}
    for seed in SEEDS:
        capacity = 10 + 17 * (seed % 5)
        directory = f"{run_directory}/{seed}"
        lived(directory, select, options, seed, capacity)
        found = seen(directory)
        assert isinstance(found.ring, LookedPool)
        with ReplayBuffer(capacity, directory=directory, select=select, seed=seed, **options) as real:
            real.resume()
            assert len(found) == len(real)
            for count in (1, 5, 5, 3, 10, 2, 7):
                assert draw(found, count) == draw(real, count), (seed, count)


@pytest.mark.parametrize("by", ["fifo", "lifo", "stalest", "min"])
def test_more_than_there_are_are_refused(run_directory: str, by: str) -> None:
    select = {"select": "ordered", "by": by, **({"field": "reward"} if by == "min" else {})}
    with ReplayBuffer(30, directory=run_directory, select=select, remove="lifo") as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), 20, big=False, rewards=60))
        buffer.save(1, wait=True)
        found = seen(run_directory)
        assert draw(found, 21) == draw(buffer, 21)
        assert draw(found, 20) == draw(buffer, 20)


def test_an_empty_pool(run_directory: str) -> None:
    with ReplayBuffer(30, directory=run_directory, remove="lifo") as buffer:
        buffer.resume()
        buffer.save(1, wait=True)
        assert len(seen(run_directory)) == 0
        buffer.extend(rows(np.random.default_rng(1), 20, big=False, rewards=60))
        buffer.clear()
        buffer.save(2, wait=True)
    with pytest.raises(Starved):
        sample_run(run_directory, 3)


def test_sequences_are_refused_as_of_a_pool(run_directory: str) -> None:
    lived(run_directory, {"select": "uniform"}, {"remove": "lifo"}, 1, 50)
    with pytest.raises(ConfigError, match="none knows its neighbours"):
        seen(run_directory).sample(2, n_step=3, gamma=0.9)


def test_another_seed(run_directory: str) -> None:
    lived(run_directory, {"select": "prioritized"}, {"remove": "lowest_priority"}, 3, 50)
    drawn = [draw(seen(run_directory, seed=seed), 9) for seed in (7, 7, 8, None)]
    assert drawn[0] == drawn[1]
    assert len({tuple(keys) for keys, *_ in drawn}) == 3


def test_an_order_of_which_hardly_any_row_is_left(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are gone are looked up many at a time."""
    select = {"select": "without_replacement"}
    with ReplayBuffer(400, directory=run_directory, select=select, remove={"by": "min", "field": "x"}) as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(400)})
        buffer.sample(5)
        buffer.extend({"x": np.arange(1000, 1395)})
        buffer.save(1, wait=True)
        found = seen(run_directory)
        looks: list[int] = []
        real = looked_order.Slots._found

        def noted(self: looked_order.Slots, slots: np.ndarray) -> np.ndarray:
            looks.append(len(slots))
            return real(self, slots)

        monkeypatch.setattr(looked_order.Slots, "_found", noted)
        for count in (1, 3, 2, 200):
            assert draw(found, count) == draw(buffer, count)
    assert max(looks) < 100
    assert len(looks) < 40


@pytest.mark.parametrize("selection", OF_POOLS)
def test_what_is_read_is_told(run_directory: str, selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_order, "_LEAST", 700)
    with ReplayBuffer(3000, directory=run_directory, select=OF_POOLS[selection], remove="lifo") as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), 3000, big=False, rewards=60), version=3)
        draw(buffer, 5)
        buffer.save(1, wait=True)
    told: list[tuple[int, int]] = []
    sample_run(run_directory, 8, told=lambda *each: told.append(each))
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1
    assert sorted(done) == list(done)
    assert 0.6 * totals[0] < done[-1] <= totals[0]


@pytest.mark.parametrize("selection", OF_POOLS)
def test_nothing_is_as_long_as_the_rows(run_directory: str, selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a bit or two of each, where they are checked, sums of a sixteenth of them, and an epoch's order."""
    count = 200_000
    for place, name, value in (
        (elsewhere, "AT_ONCE", 1 << 12),
        (pool_files, "AT_ONCE", 1 << 12),
        (unread_sums, "_AT_ONCE", 1 << 12),
        (looked, "_SPAN", 1 << 16),
        (looked_order, "_LEAST", 1 << 12),
        (looked_order, "_KNOWN", 1 << 12),
        (looked_pool, "_EACH", 1 << 12),
    ):
        monkeypatch.setattr(place, name, value)
    with ReplayBuffer(count, directory=run_directory, select=OF_POOLS[selection], remove="lifo") as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), count, big=False, rewards=60), version=3)
        draw(buffer, 5)
        buffer.save(1, wait=True)
        expected = draw(buffer, 4)
    tracemalloc.start()
    drawn = draw(seen(run_directory), 4)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert drawn == expected
    order = 4 * count if "epoch" in selection else 0
    assert most < 4_500_000 + 4 * count + order  # 4 MB of a file are compared with its manifest at a time


def first(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def changed(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[0] = array[1] if value is None else value
        return array

    return changed


@pytest.mark.parametrize(
    ("part", "change_to"),
    [
        ("pool.keys.int64", first(-1)),
        ("pool.keys.int64", first(None)),
        ("pool.keys.int64", first(10**6)),
        ("pool.keys.int64", lambda array: array + 1),
        ("pool.keys.int64", lambda array: array[:-1]),
        ("pool.serials.int64", first(None)),
        ("pool.serials.int64", first(-1)),
        ("pool.serials.int64", lambda array: array + 10**6),
        ("pool.serials.int64", lambda array: array[1:]),
        ("pool.at.int64", first(None)),
        ("pool.at.int64", first(-1)),
        ("pool.at.int64", first(-2)),
        ("pool.at.int64", first(10**6)),
        ("pool.at.int64", lambda array: array[1:]),
        ("selector.order.int64", first(None)),
        ("selector.order.int64", first(-1)),
        ("selector.order.int64", first(10**6)),
        ("selector.used.uint32", lambda array: array[1:]),
    ],
)
def test_what_does_not_fit_together_is_damaged(run_directory: str, part: str, change_to: Any) -> None:
    """Where checksums fit, as whoever wrote it was wrong."""
    options: dict[str, Any] = {"select": {"select": "without_replacement", "uses": 2}, "remove": "lifo"}
    with ReplayBuffer(40, directory=run_directory, **options) as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), 40, big=False, rewards=60))
        buffer.sample(5)
        buffer.save(1, wait=True)
    path = Path(reseal(run_directory), "values", part)
    change_to(np.fromfile(path, part.rpartition(".")[2])).tofile(path)
    reseal(run_directory)
    with pytest.raises(Damaged) as wrong:
        seen(run_directory)
    with ReplayBuffer(40, directory=run_directory, **options) as real, pytest.raises(Damaged) as expected:
        real.resume()
    assert str(wrong.value) == str(expected.value) or "in order" not in part


def test_priorities_that_are_no_numbers_are_named_as_a_resume_names_them(run_directory: str) -> None:
    options: dict[str, Any] = {"select": "prioritized", "remove": "lowest_priority"}
    lived(run_directory, options["select"], {"remove": options["remove"]}, 3, 50)
    path = Path(reseal(run_directory), "values", "selector.priorities.float64")
    given = np.fromfile(path)
    given[3] = np.nan
    given.tofile(path)
    reseal(run_directory)
    with pytest.raises(Damaged, match=r"priorities\[3\] is nan"):
        seen(run_directory)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 2, 3], [3, 0, 1, 2], [3, 2, 1, 0]])
def test_what_was_written_back_counts_in_whatever_order_it_was_saved(run_directory: str, order: list[int]) -> None:
    """It is oldest row first; by whom it was not is not known."""
    with ReplayBuffer(40, directory=run_directory, remove="lifo", seed=3) as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(40)})
        buffer.save(1, wait=True)
        buffer.write_back(np.array([3, 5, 20, 30]), {"x": np.array([-1, -2, -3, -4])})
        buffer.save(2, wait=True)
        folder = Path(reseal(run_directory), "values")
        for name in ("written.0.keys.int64", "written.0.values.int64"):
            np.fromfile(folder / name, np.int64)[order].tofile(folder / name)
        reseal(run_directory)
        expected = draw(buffer, 200)
    assert draw(seen(run_directory), 200) == expected


def test_what_was_written_back_into_rows_that_never_were(run_directory: str) -> None:
    with ReplayBuffer(40, directory=run_directory, remove="lifo") as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(40)})
        buffer.save(1, wait=True)
        buffer.write_back(np.array([3, 5]), {"x": np.zeros(2, np.int64)})
        buffer.save(2, wait=True)
    np.array([3, 40]).tofile(Path(reseal(run_directory), "values", "written.0.keys.int64"))
    reseal(run_directory)
    with pytest.raises(Damaged, match=r"written keys of x\[1\] is 40"):
        seen(run_directory)
