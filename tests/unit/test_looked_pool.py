"""What is drawn from a saved pool that is looked at is what the pool itself would have drawn next, whatever its
selection looks at and whichever rows go first; and nothing as long as its rows is in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer, Starved
from pipeline.buffer.transitions import elsewhere, unread_sums
from pipeline.checkpoint.generations import find_generations
from pipeline.replay import looked, looked_order, looked_pool
from pipeline.replay.looked_pool import LookedPool
from pipeline.replay.looking import look_at
from pipeline.store.layout import Layout

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
SEEDS = range(200) if SOAK else range(6)

SELECTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"select": "uniform"},
    "uses": {"select": "uniform", "uses": 2},
    "epochs": {"select": "without_replacement"},
    "epochs that drop": {"select": "without_replacement", "last": "drop"},
    "epochs of uses": {"select": "without_replacement", "uses": 2, "last": "keep"},
    "fifo": {"select": "ordered", "by": "fifo"},
    "lifo": {"select": "ordered", "by": "lifo", "uses": 1},
    "queue": {"select": "ordered", "by": "fifo", "uses": 1},
    "stalest": {"select": "ordered", "by": "stalest"},
    "freshest": {"select": "ordered", "by": "freshest", "uses": 2},
    "least": {"select": "ordered", "by": "min", "field": "reward"},
    "most": {"select": "ordered", "by": "max", "field": "reward", "uses": 1},
    "ageing": {"select": "staleness", "half_life": 0.01},
    "slowly ageing": {"select": "staleness", "half_life": 3.0},
    "prioritized": {"select": "prioritized", "eps": 0.01},
    "prioritized by all": {"select": "prioritized", "eps": 0.01, "weights": "buffer", "alpha": 0.7},
}
REMOVALS: dict[str, Any] = {
    "least": {"by": "min", "field": "reward"},
    "most": {"by": "max", "field": "reward"},
    "stalest": "stalest",
    "lifo": "lifo",
    "priority": "lowest_priority",
}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "compressed": {"compress": {"big": "zlib"}}}


def rows(rng: np.random.Generator, count: int, *, big: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "obs": rng.integers(0, 9, (count, 3)).astype(np.float32),
        "action": rng.integers(0, 5, count),
        "reward": np.where(rng.random(count) < 0.1, np.nan, rng.integers(0, 60, count)),
        "done": rng.random(count) < 0.15,
    }
    return found | ({"big": rng.integers(0, 3, (count, 40, 30), np.uint8)} if big else {})


def lived(directory: str, select: Mapping[str, Any], options: Mapping[str, Any], seed: int, capacity: int) -> None:
    """A pool that was filled, drawn from, changed, saved and resumed, most of it several times."""
    rng = np.random.default_rng(seed)
    for life in range(int(rng.integers(1, 3))):
        with ReplayBuffer(capacity, directory=directory, select=select, seed=seed, **options) as buffer:
            buffer.resume()
            for step in range(int(rng.integers(1, 5))):
                for _ in range(int(rng.integers(1, 7))):
                    count = int(rng.integers(1, 30))
                    buffer.extend(
                        rows(rng, count, big="compress" in options), version=int(rng.integers(0, 2 + 3 * step))
                    )
                for _ in range(int(rng.integers(0, 3))):
                    if rng.random() < 0.5:
                        change(buffer, rng)
                    draw(buffer, int(rng.integers(1, 9)))
                if rng.random() < 0.05:
                    buffer.clear()
                    buffer.extend(rows(rng, 20, big="compress" in options))
                buffer.save(10 * life + step, wait=True)


def change(buffer: ReplayBuffer, rng: np.random.Generator) -> None:
    keys = np.unique(buffer.ring.keys()[rng.integers(0, len(buffer), int(rng.choice([1, 5, 100])))])
    buffer.write_back(keys, {"reward": rng.integers(-3, 9, len(keys)).astype(np.float64)})
    if buffer.drawer.takes_priorities:
        buffer.update_priorities(keys, rng.integers(0, 4, len(keys)))


def draw(buffer: ReplayBuffer, count: int) -> Any:
    """Return what a batch holds; an error if there is none."""
    try:
        batch = buffer.sample(count)
    except Starved as error:
        return str(error)
    columns = {name: batch[name].numpy().tobytes() for name in batch.columns}
    marks = [batch.versions.tolist(), batch.episodes.tolist(), batch.places.tolist(), batch.weights.tolist()]
    return batch.keys.tolist(), columns, marks


def seen(directory: str) -> ReplayBuffer:
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return look_at(layout, run.tag, find_generations(layout, run.run_id).complete[-1])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "AT_ONCE", 8)
    monkeypatch.setattr(unread_sums, "_AT_ONCE", 16)
    monkeypatch.setattr(looked, "_SPAN", 300)
    monkeypatch.setattr(looked_order, "_LEAST", 5)
    monkeypatch.setattr(looked_order, "_KNOWN", 40)
    monkeypatch.setattr(looked_order, "_AHEAD", 16)
    monkeypatch.setattr(looked_pool, "_EACH", 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_comes_next_is_drawn(run_directory: str, selection: str, removal: str, kind: str) -> None:
    select = SELECTIONS[selection]
    if removal == "priority" and select["select"] != "prioritized":
        pytest.skip("no priorities")
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
            for count in (1, 5, 3, 10, 2, 7):
                assert draw(found, count) == draw(real, count), (seed, count)
