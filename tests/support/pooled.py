"""Pools, of which others than the oldest rows go first, for tools that take them apart and put them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Prioritized, ReplayBuffer, Uniform, WithoutReplacement
from pipeline.checkpoint import verify
from pipeline.replay import pool_files, values
from pipeline.store import rearranged
from pipeline.tools import in_step, packing, resharding_pools

CAPACITY = 23
_IN_PIECES = (in_step, packing, pool_files, resharding_pools, values)
REMOVERS: dict[str, Any] = {
    "lifo": "lifo",
    "stalest": "stalest",
    "lowest_priority": "lowest_priority",
    "min": {"by": "min", "field": "score"},
    "max": {"by": "max", "field": "score"},
}
SELECTS: dict[str, Any] = {
    "uniform": "uniform",
    "uses": Uniform(uses=40),
    "epoch_uses": WithoutReplacement(uses=40),
    "prioritized": Prioritized(alpha=0.7, beta=0.4, new="current_max"),
}
CHOICES = {
    f"{remove}-{select}": {"remove": REMOVERS[remove], "select": SELECTS[select]}
    for remove in REMOVERS
    for select in SELECTS
    if remove != "lowest_priority" or select == "prioritized"
}


def in_pieces(patch: pytest.MonkeyPatch, count: int, window: int) -> None:
    """Have so many rows be looked at together, and so many places where these are in another order."""
    for module in _IN_PIECES:
        patch.setattr(module, "AT_ONCE", count)
    patch.setattr(rearranged, "_WINDOW", window)


def made(directory: Path, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, directory=directory, **({"seed": 3, "remove": REMOVERS["min"]} | options))


def rows(run: int, first: int, count: int) -> dict[str, Any]:
    """Rows whose columns follow from their run and number, which no other row has."""
    t = np.arange(first, first + count)
    number = 1000 * run + t
    return {
        "run": np.full(count, run),
        "t": t,
        "image": np.repeat(number % 251, 2048).astype(np.uint8).reshape(count, 32, 64),
        "score": (number * 37 % 101).astype(np.float32),
        "value": number / 8,
        "terminated": number % 7 == 6,
    }


def fill(buffer: ReplayBuffer, run: int, first: int, count: int, envs: int = 3) -> None:
    """Add rows, whose episodes end at different times, by weights of versions that rise and fall."""
    for begin in range(first, first + count, 5):
        size = min(5, first + count - begin)
        keys = np.array(buffer.extend(rows(run, begin, size), version=begin // 5 * 7 % 5, env=begin // 5 % envs))
        if buffer.drawer.takes_priorities:
            buffer.update_priorities(keys, 1 + np.arange(begin, begin + size) % 11)


def play(directory: Path, run: int, count: int, capacity: int = CAPACITY, **options: Any) -> dict[str, Any]:
    """Save a pool in two generations, in whose blocks lie rows that are gone, and return all that it holds: rows that
    were drawn, a column that was written back, an episode that was cut, and open ones."""
    with made(directory, capacity, **options) as buffer:
        buffer.resume()
        fill(buffer, run, 0, count // 2)
        if buffer.can_sample():
            buffer.sample(min(8, len(buffer)))
        if count:
            buffer.end_episode(0)
        buffer.save(run, wait=True)
        fill(buffer, run, count // 2, count - count // 2)
        changed = buffer.ring.keys()[::3] if count else np.empty(0, np.int64)
        if count:
            buffer.write_back(changed, {"value": changed + 0.5})
            buffer.sample(min(8, len(buffer)))
        buffer.save(run + 1, wait=True)
        return held(buffer)


def wander(directory: Path, seed: int, capacity: int = CAPACITY, **options: Any) -> dict[str, Any]:
    """Save a pool several times, and change it by chance in between: rows come and go, columns of some are written
    back, episodes are cut. Return all that it holds, and the key of each row."""
    rng = np.random.default_rng(seed)
    with made(directory, capacity, **options) as buffer:
        buffer.resume()
        first = 0
        for step in range(1, int(rng.integers(2, 6))):
            count = int(rng.integers(0, 2 * capacity if step == 1 else capacity))
            fill(buffer, seed, first, count)
            first += count
            for name in ("value", "image") if len(buffer) else ():
                keys = rng.choice(buffer.ring.keys(), int(rng.integers(0, len(buffer) + 1)), replace=False)
                if rng.random() < 0.6 and len(keys):
                    given = rng.integers(0, 200, len(keys))
                    wide = np.broadcast_to(given.astype(np.uint8)[:, None, None], (len(keys), 32, 64))
                    buffer.write_back(keys, {name: wide if name == "image" else given / 16})
            if first and rng.random() < 0.5:
                buffer.end_episode(int(rng.integers(0, 3)))
            buffer.save(step, wait=True)
        return {**held(buffer), "key": buffer.ring.keys().tolist()}


def held(buffer: ReplayBuffer) -> dict[str, Any]:
    """All that a pool holds, oldest row first, but for the keys."""
    ring, layout = buffer.ring, buffer.ring.storage.layout
    keys = ring.keys()
    slots = ring.slots(keys)
    marks = ("#ahead", "#behind", "#serial")
    names = [] if layout is None else [*(layout.record.names or ()), *ring.storage.large]
    found: dict[str, Any] = {
        name: [each.tobytes() for each in ring.storage.view(name)[slots]] for name in names if name not in marks
    }
    found["id"] = (
        list(zip(*(ring.storage.view(name)[slots].tolist() for name in ("run", "t")), strict=True)) if names else []
    )
    found["mass"] = np.round(buffer.drawer.mass(keys), 12).tolist() if names else []
    found["uses"] = {name: each.tolist() for name, each in buffer.drawer.arrays().items() if "used" in name}
    serials = ring.serials(keys)
    at = {serial: number for number, serial in enumerate(serials.tolist())}
    # Environments whose newest row is not there begin anew where a pool is taken apart.
    found["open"] = [[env, at[serial], *rest] for env, serial, *rest in ring.episodes.state() if serial in at]
    found["next"] = ring.episodes.next
    found["counts"] = buffer.statistics().added, buffer.statistics().sampled, ring.not_kept
    return found


def load(directory: Path, capacity: int = CAPACITY, **options: Any) -> dict[str, Any]:
    """Resume a run and return all that it holds; what :func:`verify` says of it is good, and it can be drawn from."""
    found = verify(str(directory))
    assert found.whole, found.damages
    assert not found.unpromised
    with made(directory, capacity, **options) as buffer:
        buffer.resume(continue_episodes=True)
        there = held(buffer)
        if len(buffer):
            drawn = buffer.sample(min(8, len(buffer) // 2) or 1)
            assert set(zip(drawn["run"].tolist(), drawn["t"].tolist(), strict=True)) <= set(there["id"])
        return there


def content(found: dict[str, Any]) -> dict[Any, Any]:
    """What there is of each row by its id, wherever it lies."""
    aside = ("open", "id", "draws", "#episode")
    names = [name for name, each in found.items() if isinstance(each, list) and name not in aside]
    used = [each for _, each in sorted(found["uses"].items())]
    rows = {
        which: (*(found[name][at] for name in names), *(each[at] for each in used))
        for at, which in enumerate(found["id"])
    }
    assert len(rows) == len(found["id"])
    return rows
