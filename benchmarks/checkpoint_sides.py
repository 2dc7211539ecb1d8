"""What the checkpoint benchmark runs: pipelines that save and resume, a trainer's state, and a ticker on the loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import anyio
import numpy as np
import torch

from benchmarks.disk import warm_memory
from benchmarks.harness import Endless
from pipeline import Context, Item, Pipeline, Rollout, Task

MEMBER = 384 << 10  # bytes of a rollout
_PART = 32 << 20  # bytes of a tensor of the trainer's
_CHUNK = 64 << 20
_TICK = 0.0005  # seconds


class Content:
    """So many bytes that no disk can make smaller, in memory that was touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._member = max(1, min(MEMBER, size // 8))
        values = np.random.default_rng(0).integers(0, 1 << 63, -(-size // 8), dtype=np.int64)
        self._data = values.view(np.uint8)[:size]

    def chunks(self, most: int = _CHUNK) -> Iterator[memoryview]:
        """Yield all of it as it is written to a file."""
        view = self._data.data
        return (view[start : start + most] for start in range(0, self.size, most))

    def touch(self) -> None:
        """Read all of it: memory that lay idle for seconds is slow to touch, on a virtual machine."""
        for chunk in self.chunks():
            np.frombuffer(chunk, np.uint8).max()

    def rollouts(self, start: int = 0, size: int | None = None) -> list[Rollout]:
        """Return rollouts that hold ``size`` bytes of it from ``start`` on, or all of it."""
        end = self.size if size is None else min(self.size, start + size)
        return [Rollout({"data": part}, reward=1.0) for part in self._parts(self._member, start, end)]

    def state(self) -> dict[str, torch.Tensor]:
        """Return it as the state of a trainer: float32, and a few large tensors."""
        return {f"layer{i}": part for i, part in enumerate(self._parts(_PART, 0, self.size))}

    def _parts(self, most: int, start: int, end: int) -> list[torch.Tensor]:
        return [torch.from_numpy(self._data[at : min(end, at + most)]) for at in range(start, end, most)]


class Trainer:
    """What is attached: tensors that are saved as they are, and overwritten in place by a load."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = dict(state)

    def touch(self) -> None:
        """Write to all of it, for the same reason as :meth:`Content.touch`."""
        for tensor in self._state.values():
            tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self._state.items():
            tensor.copy_(state[name])


class Ticker:
    """Measures how late a task of the loop is at worst, in milliseconds, while it is entered."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.sleep(0)  # a hold that has just ended counts
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(_TICK)
            self.worst = max(self.worst, (time.perf_counter() - begun - _TICK) * 1e3)


async def _never(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep_forever()
    raise AssertionError("unreachable")


TASK = Task("given", source=Endless(), run=_never)


def pipeline(directory: str, durability: Literal["none", "kill"] = "kill") -> Pipeline:
    """Return a pipeline whose rollouts are all put in by hand."""
    return Pipeline(TASK, directory=directory, durability=durability, concurrency=1, capacity=1 << 40, watchdog=None)


async def put(pipe: Pipeline, rollouts: list[Rollout]) -> None:
    """Put rollouts into the buffer, and let the loop finish what hangs on that."""
    for rollout in rollouts:
        await pipe.put(TASK, rollout)


def touch_buffer(pipe: Pipeline) -> None:
    """Read every payload that the buffer holds in memory, for the same reason as :meth:`Content.touch`."""
    storage = pipe._run.state.buffer.storage
    for uid, _, _ in storage.locations():
        for blob in storage.blobs(uid) or []:
            np.frombuffer(blob, np.uint8).max()


async def timed_save(pipe: Pipeline, step: int = 0) -> dict[str, float]:
    """Save; return the seconds until ``save`` returned and until it was committed, and the longest hold of the loop."""
    async with Ticker() as ticker:
        begun = time.perf_counter()
        saving = await pipe.save(step)
        returned = time.perf_counter() - begun
        await saving.committed()
        committed = time.perf_counter() - begun
    return {"returned": returned, "committed": committed, "held": ticker.worst}


async def save_rollouts(
    directory: str, content: Content, durability: Literal["none", "kill"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Fill a new run's buffer with ``content`` and save it; then save after 1% more."""
    async with pipeline(directory, durability) as pipe:
        await pipe.start()
        await put(pipe, content.rollouts())
        warm_memory(os.path.dirname(directory), content.size)
        touch_buffer(pipe)
        first = await timed_save(pipe)
        await put(pipe, content.rollouts(0, max(1, content.size // 100)))
        return first, await timed_save(pipe)


async def save_trainer(directory: str, content: Content, times: int) -> list[dict[str, float]]:
    """Save an attached state again and again in one run."""
    async with pipeline(directory) as pipe:
        pipe.attach(trainer=Trainer(content.state()))
        await pipe.start()
        saves = []
        for _ in range(times):
            warm_memory(os.path.dirname(directory), content.size)
            content.touch()
            saves.append(await timed_save(pipe))
        return saves


async def resume(directory: str, trainer: Trainer | None = None) -> float:
    """Seconds for ``resume``: everything is read, checked and in use."""
    async with pipeline(directory) as pipe:
        if trainer is not None:
            pipe.attach(trainer=trainer)
        begun = time.perf_counter()
        await pipe.resume()
        return time.perf_counter() - begun


async def idle(seconds: float) -> float:
    """Return the longest hold of a loop that has nothing to do, in milliseconds: what the machine itself does."""
    async with Ticker() as ticker:
        await asyncio.sleep(seconds)
    return ticker.worst
