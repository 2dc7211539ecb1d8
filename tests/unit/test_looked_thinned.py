"""What is drawn from a saved buffer that is looked at, of which the save has left episodes out, is what the buffer
draws after a resume; and of the rows only those that are drawn are kept."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import elsewhere, unread_sums
from pipeline.errors import Damaged
from pipeline.replay import looked, looked_order
from pipeline.replay.looked_thinned import LookedThinned
from pipeline.tools import sample_run
from tests.support.looked import KINDS, SELECTIONS, change, draw, rows, seen
from tests.support.opening import reseal

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
SEEDS = range(200) if SOAK else range(4)
OF_EPISODES = (
    "uniform",
    "window",
    "some episodes",
    "every episode",
    "uses",
    "uses of the newest",
    "epochs",
    "epochs of uses",
    "lifo",
    "queue",
    "stalest",
    "freshest",
    "most",
    "slowly ageing",
    "prioritized",
)


def lived(directory: str, select: Mapping[str, Any], kind: Mapping[str, Any], seed: int, capacity: int) -> bool:
    """A buffer that was filled, drawn from, changed, saved and resumed; return whether the last save has dropped
    rows."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"select": select, "seed": seed, "incomplete": "drop", **kind}
    for life in range(int(rng.integers(1, 3))):
        with ReplayBuffer(capacity, directory=directory, **options) as buffer:
            buffer.resume()
            for step in range(int(rng.integers(1, 4))):
                if len(buffer) and rng.random() < 0.7:  # of rows that were saved before
                    change(buffer, rng)
                for _ in range(int(rng.integers(1, 7))):
                    envs = int(rng.integers(1, 5))
                    count = envs * int(rng.integers(1, 12))
                    version = int(rng.integers(0, 2 + 3 * step))
                    buffer.extend(rows(rng, count, big="compress" in kind), envs=envs, version=version)
                    if rng.random() < 0.2:
                        buffer.end_episode()
                for _ in range(int(rng.integers(0, 3))):
                    if rng.random() < 0.5:
                        change(buffer, rng)
                    draw(buffer, int(rng.integers(1, 9)))
                buffer.save(10 * life + step, wait=True)
            said = buffer.statistics().save
    return bool(said["dropped_open"] + said["dropped_headless"])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "AT_ONCE", 8)
    monkeypatch.setattr(unread_sums, "_AT_ONCE", 16)
    monkeypatch.setattr(looked, "_SPAN", 300)
    monkeypatch.setattr(looked_order, "_LEAST", 5)
    monkeypatch.setattr(looked_order, "_KNOWN", 40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("selection", OF_EPISODES)
def test_what_a_resume_leaves_is_drawn(run_directory: str, selection: str, kind: str) -> None:
    select, options, thinned = SELECTIONS[selection], KINDS[kind], 0
    for seed in SEEDS:
        capacity = 20 + 17 * (seed % 5)
        directory = f"{run_directory}/{seed}"
        dropped = lived(directory, select, options, seed, capacity)
        found = seen(directory)
        thinned += isinstance(found.ring, LookedThinned)
        assert isinstance(found.ring, LookedThinned) == dropped
        with ReplayBuffer(
            capacity, directory=directory, select=select, seed=seed, incomplete="drop", **options
        ) as real:
            real.resume()
            assert len(found) == len(real)
            if not len(real):
                continue
            for count in (1, 5, 5, 3, 10, 2, 7):
                assert draw(found, count) == draw(real, count), (seed, count)
    assert thinned > len(SEEDS) // 2


def test_nothing_is_as_long_as_the_rows(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 200_000
    monkeypatch.undo()
    for place, name in ((elsewhere, "AT_ONCE"), (unread_sums, "_AT_ONCE"), (looked_order, "_LEAST")):
        monkeypatch.setattr(place, name, 1 << 12)
    monkeypatch.setattr(looked, "_SPAN", 1 << 16)
    monkeypatch.setattr(looked_order, "_KNOWN", 1 << 12)
    given = rows(np.random.default_rng(1), count, big=False) | {"done": np.arange(count) // 8 % 500 == 499}
    for number, select in enumerate(SELECTIONS[name] for name in OF_EPISODES):
        directory = f"{run_directory}/{number}"
        with ReplayBuffer(count, directory=directory, select=select, incomplete="drop") as buffer:
            buffer.resume()
            buffer.extend(given | {"done": given["done"] & (np.arange(count) < count - 100)}, envs=8, version=3)
            draw(buffer, 5)
            buffer.save(1, wait=True)
        tracemalloc.start()
        found = seen(directory)
        drawn = draw(found, 4)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        with ReplayBuffer(count, directory=directory, select=select, incomplete="drop") as real:
            real.resume()
            assert drawn == draw(real, 4)
        order = 4 * count if select["select"] == "without_replacement" else 0
        assert most < 4_800_000 + 4 * count + order, select


@pytest.mark.parametrize("selection", OF_EPISODES)
def test_what_is_read_is_told(run_directory: str, selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looked_order, "_LEAST", 700)
    monkeypatch.setattr(looked, "_SPAN", 1 << 14)
    select = SELECTIONS[selection]
    with ReplayBuffer(3000, directory=run_directory, select=select, incomplete="drop") as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), 3000, big=False) | {"done": np.arange(3000) % 50 == 3}, version=3)
        draw(buffer, 5)
        buffer.save(1, wait=True)
    told: list[tuple[int, int]] = []
    sample_run(run_directory, 8, told=lambda *each: told.append(each))
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1
    assert sorted(done) == list(done)
    assert 0.6 * totals[0] < done[-1] <= totals[0]


@pytest.mark.parametrize(
    ("part", "which", "value"),
    [
        ("episodes.length.int32", 0, 2),
        ("episodes.rows.int32", 0, 1),
        ("episodes.number.int64", 0, 0),
        ("episodes.number.int64", -1, 10**6),  # no row is of it
        ("episodes.uid.int64", 0, 1),
    ],
)
def test_a_list_that_is_not_of_these_rows_is_damaged(run_directory: str, part: str, which: int, value: int) -> None:
    """Where checksums fit, as whoever wrote it was wrong."""
    with ReplayBuffer(60, directory=run_directory, incomplete="drop") as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(60), "done": np.arange(60) % 10 == 3})
        buffer.save(1, wait=True)
    path = Path(reseal(run_directory), "values", part)
    given = np.fromfile(path, part.rpartition(".")[2])
    given[which] = value if given[which] != value else value + 1
    given.tofile(path)
    reseal(run_directory)
    with ReplayBuffer(60, directory=run_directory, incomplete="drop") as real:
        with pytest.raises(Damaged):
            real.resume()
        with pytest.raises(Damaged):
            seen(run_directory)
