"""Runs of every kind, with values of every dtype, to be exported and compared."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import Context, Item, Pipeline, Prioritized, ReplayBuffer, Rollout, Task, Trace, TrajectoryBuffer
from pipeline.tools.interchange.streams import Record, Rows, Stream, Transitions, flat_bytes
from tests.support.runs import numbers

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
]
NAN = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]
"""With a payload."""


def bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bits: NaNs with payloads, infinities and -0.0 among the floats."""
    kind = getattr(torch, dtype)
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    width = torch.empty(0, dtype=kind).element_size()
    raw = rng.integers(0, 256, (math.prod(shape) * width,), np.uint8)
    special: dict[str, list[float]] = {"float32": [-0.0, math.inf, -math.inf, math.nan], "float64": [-0.0, NAN]}
    values = (
        torch.from_numpy(raw).view(kind).reshape(shape).clone() if math.prod(shape) else torch.empty(shape, dtype=kind)
    )
    for at, value in enumerate(special.get(dtype, [])[: values.numel()]):
        values.view(-1)[at] = value
    return values


def rows(count: int, seed: int) -> dict[str, Any]:
    """Return rows of every dtype, scalars, vectors, images, and columns of no values."""
    found: dict[str, Any] = {}
    for number, dtype in enumerate(DTYPES):
        found[f"each.{dtype}"] = bits(dtype, (count,), seed + number)
        found[f"more.{dtype}"] = bits(dtype, (count, 2, 3), seed + 100 + number)
    rng = np.random.default_rng(seed)
    found["nothing"] = np.empty((count, 0, 2), np.float32)
    found["image"] = rng.integers(0, 256, (count, 24, 24, 3), np.uint8)
    found["map"] = rng.standard_normal((count, 20, 20)).astype(np.float32)
    found["reward"] = rng.standard_normal(count)
    found["terminated"] = rng.random(count) < 0.1
    found["truncated"] = (rng.random(count) < 0.1) & ~found["terminated"]
    return found


def replay_run(directory: Path, *, envs: int = 3, steps: int = 30, **options: Any) -> str:
    """A buffer that has wrapped, with priorities, versions, open episodes, and rows that were changed later."""
    buffer = ReplayBuffer(60, select=Prioritized(alpha=0.7, beta=0.4), directory=str(directory), seed=1, **options)
    with buffer:
        buffer.resume()
        obs = bits("float32", (envs, 4), 0)
        for step in range(steps):
            after = bits("float32", (envs, 4), step + 1)
            given = {**rows(envs, step), "obs": obs, "next_obs": after}
            buffer.extend(given, envs=envs, version=step // 10)
            obs = torch.where(torch.from_numpy(given["terminated"] | given["truncated"])[:, None], after + 1, after)
            if step == steps // 2:
                buffer.save(1, wait=True)
        keys = buffer.sample(10).keys
        buffer.update_priorities(keys, np.random.default_rng(0).random(10))
        buffer.write_back(keys, {"reward": np.arange(10.0)})
        buffer.save(7, wait=True)
    return str(directory)


def trajectory_run(directory: Path, count: int = 7) -> str:
    """A buffer of trajectories of several lengths, the first two of which have gone."""
    buffer = TrajectoryBuffer(capacity=5, cache_size=2, directory=str(directory), seed=1)
    with buffer:
        buffer.resume()
        for number in range(count):
            shape = (3 + number % 3, 2)
            fields: dict[str, Any] = {name: bits(name, (*shape, 2), number) for name in DTYPES}
            fields["rewards"] = bits("float32", shape, number)
            fields["curr_obs"] = {"states": bits("float32", (*shape, 4), number), "empty": np.empty((*shape, 0))}
            weights = f"w{number // 2}"
            buffer.add_trajectories([{**fields, "model_weights_id": weights, "max_episode_length": number}])
        buffer.save(3, wait=True)
    return str(directory)


INFO: dict[str, Any] = {
    "text": "hälló \ud83d",
    "bytes": b"\x00\xff",
    "tuple": (1, (2.5, None)),
    "big": 2**80,
    "floats": [NAN, math.inf, -math.inf, -0.0, 0.1],
    "map": {1: "a", (2, 3): True},
    "$odd": {"$x": 1},
    "nested": {"list": [[], {}, ""]},
}


async def play(item: Item, ctx: Context) -> Rollout:
    """Two traces of one agent each, with tensors of every dtype, scalars and empty ones among them."""
    n = item["n"]
    if n % 7 == 6:
        ctx.park()
    first: dict[str, Any] = {name: bits(name, (n % 4, 2), n) for name in DTYPES}
    second: dict[str, Any] = {f"scalar.{name}": bits(name, (), n) for name in DTYPES}
    second["completion_ids"] = torch.arange(n)
    if n % 5 == 0:
        return Rollout((), reward=float(n), info=INFO, tokens=n)
    return Rollout((Trace(first, "solver", "p"), Trace(second, "judge")), reward=n / 3, info={**INFO, "n": n}, tokens=n)


async def pipeline_run(directory: Path, items: int = 20) -> str:
    """A run of which two batches were trained, and the rest is there or parked."""
    task = Task("numbers", source=numbers(items), run=play, epochs=1, group_size=2)
    other = Task("other", source=numbers(items), run=play, epochs=1)
    options: dict[str, Any] = {"directory": str(directory), "archive": "all", "concurrency": 4, "capacity": 100}
    async with Pipeline([task, other], **options) as pipe:
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        for _ in range(2):
            batch = await pipe.get_batch(groups=3)
            async with pipe.weight_update(version=batch.step):
                pass
        await pipe.get_batch(groups=2 * (items - items // 7) - 6)  # all that are not parked; it is not trained
        await (await pipe.save(2)).committed()
    return str(directory)


def gathered(stream: Stream) -> Any:
    """Return everything that a stream gives, as bytes that can be compared."""
    if isinstance(stream, Transitions):
        found: dict[str, list[bytes]] = {}
        for part in stream.batches():
            assert isinstance(part, Rows)
            for name, array in {**part.columns, **part.marks}.items():
                assert len(array) == len(part), name
                found.setdefault(name, []).append(np.ascontiguousarray(array).tobytes())
        return stream.schema, {name: b"".join(parts) for name, parts in found.items()}
    return [_comparable(record) for record in stream.records()]


def _comparable(record: Record) -> Any:
    tensors = {
        name: (each.dtype, tuple(each.shape), flat_bytes(each).tobytes()) for name, each in record.tensors.items()
    }
    return {name: _bitwise(value) for name, value in record.fields.items()}, tensors


def _bitwise(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {name: _bitwise(each) for name, each in value.items()}
    return [_bitwise(each) for each in value] if isinstance(value, list) else value
