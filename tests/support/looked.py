"""Saved buffers that are looked at, and what is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline import ReplayBuffer, Starved
from pipeline.checkpoint.generations import find_generations
from pipeline.replay.looking import look_at
from pipeline.store.layout import Layout

SELECTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"select": "uniform"},
    "window": {"select": "uniform", "window": 20},
    "newest episode": {"select": "uniform", "window_trajectories": 1},
    "newest episodes": {"select": "uniform", "window_trajectories": 7},
    "some episodes": {"select": "uniform", "window_trajectories": 3},
    "every episode": {"select": "uniform", "window_trajectories": 1000},
    "uses": {"select": "uniform", "uses": 2},
    "uses of the newest": {"select": "uniform", "uses": 3, "window_trajectories": 6},
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
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"share_next_obs": True},
    "compressed": {"compress": {"big": "zlib"}},
}


def rows(rng: np.random.Generator, count: int, *, big: bool, rewards: int = 6) -> dict[str, Any]:
    """Rows of few different numbers; ``big``: with a column that may be compressed."""
    found: dict[str, Any] = {
        "obs": rng.integers(0, 9, (count, 3)).astype(np.float32),
        "action": rng.integers(0, 5, count),
        "reward": np.where(rng.random(count) < 0.1, np.nan, rng.integers(0, rewards, count)),
        "next_obs": rng.integers(0, 9, (count, 3)).astype(np.float32),
        "done": rng.random(count) < 0.15,
    }
    return found | ({"big": rng.integers(0, 3, (count, 40, 30), np.uint8)} if big else {})


def change(buffer: ReplayBuffer, rng: np.random.Generator, counts: Sequence[int] = (5,)) -> None:
    """Write rewards back into some rows, one of ``counts`` at the most, and give them priorities."""
    keys = np.unique(buffer.ring.keys()[rng.integers(0, len(buffer), int(rng.choice(counts)))])
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


def seen(directory: str, *, seed: int | None = None) -> ReplayBuffer:
    """Look at a run's newest generation."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return look_at(layout, run.tag, find_generations(layout, run.run_id).complete[-1], seed=seed)
