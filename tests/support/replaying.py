"""Buffers of transitions for tests: made alike each time, and compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import ReplayBuffer

CAPACITY = 60


class Counter:
    """Something that is attached."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows whose columns all tell their number; an episode of one environment has 7 of them."""
    number = np.arange(first, first + count)
    return {
        "obs": {"n": number, "half": (number / 2).astype(np.float32)},
        "image": np.repeat(number % 251, 2048).astype(np.uint8).reshape(count, 32, 64),
        "reward": number % 5 / 4,
        "next_obs": {"n": number + 1, "half": ((number + 1) / 2).astype(np.float32)},
        "terminated": number % 7 == 6,
    }


def fill(buffer: ReplayBuffer, first: int, count: int, block: int = 9) -> None:
    """Add rows ``first`` to ``first + count`` in blocks, and give them priorities that follow from their numbers."""
    for begin in range(first, first + count, block):
        size = min(block, first + count - begin)
        keys = np.array(buffer.extend(rows(begin, size), version=begin // 20))
        if buffer.options.to_dict()["select"]["select"] == "prioritized":
            buffer.update_priorities(keys, 1 + keys % 11)


def contents(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything that a buffer holds, oldest row first, as plain arrays."""
    ring = buffer.ring
    slots = ring.slots(ring.keys())
    layout = ring.storage.layout
    names = [] if layout is None else [*(layout.record.names or ()), *ring.storage.large]
    found: dict[str, Any] = {name: ring.storage.view(name)[slots].tolist() for name in names}
    found["keys"] = ring.keys().tolist()
    found["episodes"] = ring.episodes.state(), ring.episodes.next
    return found


def draws(buffer: ReplayBuffer, count: int, size: int = 8) -> list[Any]:
    """What ``count`` batches of each kind give."""
    found: list[Any] = []
    for _ in range(count):
        for more in ({}, {"n_step": 3, "gamma": 0.9}, {"slices": {"length": 3}}, {"stack": 2}):
            batch = buffer.sample(size, **more)
            found.append((batch.keys.tolist(), batch["reward"].tolist(), batch.weights.tolist()))
    return found
