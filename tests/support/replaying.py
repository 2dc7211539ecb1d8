"""Buffers of transitions for tests: made alike each time, and compared."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

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


def run_for_ever(pipe: Any, directory: str) -> None:
    """A trainer's process, which says what it has reached: it adds, samples, updates priorities and saves."""
    buffer = ReplayBuffer(200, directory=directory, select="prioritized", seed=4, keep=2)
    counter, net = Counter(), torch.nn.Linear(64, 64)
    buffer.attach(counter=counter, net=net)
    step = buffer.resume().step
    pipe.send(("resumed", step))
    saving = None
    while True:
        step += 1
        counter.step = step
        with torch.no_grad():
            net.weight.fill_(step)
            net.bias.fill_(step)
        buffer.extend(rows(20 * step, 20), version=step)
        batch = buffer.sample(16)
        buffer.update_priorities(batch.keys, 1 + batch["obs"]["n"])
        if saving is not None and saving.done:
            pipe.send(("committed", saving.step))
            saving = None
        if saving is None or buffer.save_due(step):
            saving = buffer.save(step)


def run_until_asked(pipe: Any, directory: str) -> None:
    """A trainer's process that saves when it is asked to, and no oftener."""
    buffer = ReplayBuffer(200, directory=directory, seed=4)
    step = buffer.resume().step
    while True:
        step += 1
        buffer.extend(rows(20 * step, 20))
        pipe.send(("step", step))
        if buffer.save_due():
            buffer.save(step)
        time.sleep(0.001)


def add_after_saving(pipe: Any, directory: str) -> None:
    """A process that saves rows 0 to 9 at step 10, adds five more, and waits to be killed."""
    buffer = ReplayBuffer(20, directory=directory)
    buffer.resume()
    buffer.extend({"x": np.arange(10)})
    buffer.save(10, wait=True)
    buffer.extend({"x": np.arange(10, 15)})
    pipe.send(("added", buffer.ring.added))
    pipe.recv()


def draw_again(pipe: Any, directory: str, options: dict[str, Any]) -> None:
    """A process that says what a saved buffer draws: probabilities, keys, and weights by key."""
    with ReplayBuffer(4, directory=directory, **options) as buffer:
        buffer.resume()
        mass = buffer.drawer.mass(np.arange(4))
        batches = [buffer.sample(10) for _ in range(100)]
        weights = {
            int(key): float(each) for batch in batches for key, each in zip(batch.keys, batch.weights, strict=True)
        }
        pipe.send(((mass / mass.sum()).tolist(), [batch.keys.tolist() for batch in batches], weights))


def run_lazily(pipe: Any, directory: str, storage: str) -> None:
    """A trainer's process that resumes lazily, samples, adds rows, and saves now and then."""
    buffer = ReplayBuffer(200, directory=directory, storage=storage, seed=4, keep=2)
    step = buffer.resume(verify="lazy").step
    pipe.send(("resumed", step))
    while True:
        step += 1
        buffer.extend(rows(20 * step, 20), version=step)
        batch = buffer.sample(4)
        assert (batch["next_obs"]["n"] == batch["obs"]["n"] + 1).all()
        buffer.write_back(batch.keys, {"reward": batch["reward"]})
        if step % 3 == 0:
            buffer.save(step, wait=True)
            pipe.send(("committed", step))


def hold_rows(pipe: Any, directory: str) -> None:
    """A process whose rows lie in a file."""
    buffer = ReplayBuffer(200, directory=directory, storage="mapped")
    fill(buffer, 0, 300)
    pipe.send(("there", len(buffer)))
    time.sleep(60)
