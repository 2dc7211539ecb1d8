"""Other replay buffers at the same work as ours: a script for an interpreter that has some of them.

``python replay_peers.py`` reads a JSON object a line from stdin and answers each with one on stdout::

    {"do": "peers"}                                          -> ["cpprb", "SB3"]
    {"do": "open", "peer": "SB3", "kind": "uniform", "work": "M", "rows": 1000}     fills a buffer
    {"do": "time", "line": "sample", "number": 100}          -> seconds for each call; null: it has no such thing
    {"do": "close"}                                          forgets the buffer

It imports nothing of this project: the published wheels of TorchRL are bound to one torch each, which need not be ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

Call = Callable[[], object]
Lines = dict[str, Call]
BATCH, ALPHA, BETA = 256, 0.6, 0.4
SHAPES = {"M": (np.float32, (17,)), "A": (np.uint8, (4, 84, 84))}
EPISODE = 1_000


def rows_of(work: str, count: int) -> dict[str, np.ndarray]:
    """Return ``count`` random rows of a workload, of which one in a thousand ends its episode."""
    rng = np.random.default_rng(0)
    dtype, shape = SHAPES[work]
    values: Any = (rng.random((2, count, *shape)) * 255).astype(dtype)
    return {
        "obs": values[0],
        "action": rng.random((count, 6), np.float32),
        "reward": rng.random(count, np.float32),
        "next_obs": values[1],
        "done": rng.random(count) < 1 / EPISODE,
    }


def cut(rows: dict[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    """Return blocks of ``count`` rows each."""
    total = len(rows["reward"])
    return [{name: each[at : at + count] for name, each in rows.items()} for at in range(0, total - count + 1, count)]


def in_order(call: Callable[[Any], object], blocks: list[Any]) -> Call:
    """Return a call that takes the blocks one after the other, again and again."""
    place = [0]

    def step() -> object:
        place[0] = at = (place[0] + 1) % len(blocks)
        return call(blocks[at])

    return step


def fill(blocks: list[Any], rows: int, each: int, call: Callable[[Any], object]) -> None:
    """Add blocks of ``each`` rows until there are ``rows`` and a few more."""
    step = in_order(call, blocks)
    for _ in range(rows // each + 2):
        step()


def of_sb3(kind: str, work: str, rows: int) -> Lines | None:
    """Stable-Baselines3: uniform alone; its columns come back as tensors."""
    box = import_module("gymnasium.spaces").Box
    from stable_baselines3.common import buffers  # type: ignore[import-not-found]

    if kind != "uniform" and kind != "n-step":
        return None
    dtype, shape = SHAPES[work]
    space, action = box(0, 255, shape, dtype), box(-1, 1, (6,), np.float32)
    data = rows_of(work, 16_384 if work == "M" else 1_024)
    infos: list[dict[str, Any]] = [{}] * 1_024  # an environment's; truncation would be in there

    def build(envs: int) -> Any:
        options = {"device": "cpu", "n_envs": envs}
        if kind == "n-step":
            return buffers.NStepReplayBuffer(rows, space, action, n_steps=3, gamma=0.99, **options)
        return buffers.ReplayBuffer(rows, space, action, **options)

    def add(buffer: Any, block: dict[str, np.ndarray]) -> None:
        buffer.add(
            block["obs"],
            block["next_obs"],
            block["action"],
            block["reward"],
            block["done"],
            infos[: len(block["done"])],
        )

    lines: Lines = {}
    for envs in (64, 1, 1_024):
        if (kind, envs) == ("uniform", 1_024) and work == "A":
            continue
        buffer = build(envs)
        fill(cut(data, envs), rows if envs == 64 else 0, envs, partial(add, buffer))
        lines[f"add {envs}"] = in_order(partial(add, buffer), cut(data, envs))
        if envs == 64:
            lines["sample"] = partial(buffer.sample, BATCH)
        if kind == "n-step" or work == "A":
            break
    return lines


def of_cpprb(kind: str, work: str, rows: int) -> Lines | None:
    """cpprb: its columns come back as arrays."""
    import cpprb  # type: ignore[import-not-found]

    if kind not in ("uniform", "prioritized"):
        return None
    dtype, shape = SHAPES[work]
    columns = {
        "obs": {"shape": shape, "dtype": dtype},
        "action": {"shape": 6, "dtype": np.float32},
        "reward": {"dtype": np.float32},
        "next_obs": {"shape": shape, "dtype": dtype},
        "done": {"dtype": np.bool_},
    }
    kinds = {"uniform": cpprb.ReplayBuffer, "prioritized": partial(cpprb.PrioritizedReplayBuffer, alpha=ALPHA)}
    buffer = kinds[kind](rows, columns)
    data = rows_of(work, 16_384 if work == "M" else 1_024)

    def add(block: dict[str, np.ndarray]) -> None:
        buffer.add(**block)

    fill(cut(data, 64), rows, 64, add)
    lines: Lines = {f"add {count}": in_order(add, cut(data, count)) for count in (1, 64, 1_024)}
    if kind == "uniform":
        return lines | {"sample": partial(buffer.sample, BATCH)}
    new = np.random.default_rng(1).random(BATCH).astype(np.float32)

    def update() -> None:
        buffer.update_priorities(buffer.sample(BATCH, beta=BETA)["indexes"], new)

    return lines | {"sample": update}


def of_tianshou(kind: str, work: str, rows: int) -> Lines | None:
    """tianshou: its columns come back as arrays."""
    from tianshou.data import (  # type: ignore[import-not-found]
        Batch,
        PrioritizedReplayBuffer,
        ReplayBuffer,
        VectorReplayBuffer,
    )

    if kind not in ("uniform", "prioritized"):
        return None

    def batch(block: dict[str, np.ndarray]) -> Any:
        truncated = np.zeros_like(block["done"])
        return Batch(
            obs=block["obs"],
            act=block["action"],
            rew=block["reward"],
            terminated=block["done"],
            truncated=truncated,
            done=block["done"],
            obs_next=block["next_obs"],
        )

    data = rows_of(work, rows)
    if kind == "prioritized":
        buffer = PrioritizedReplayBuffer(rows, alpha=ALPHA, beta=BETA)
        buffer.set_batch(batch(data))
        buffer._size = rows
        buffer.init_weight(np.arange(rows))
        new = np.random.default_rng(1).random(BATCH)
        return {"sample": lambda: buffer.update_weight(buffer.sample(BATCH)[1], new)}
    buffer = ReplayBuffer(rows)
    buffer.set_batch(batch(data))
    buffer._size = rows
    lines: Lines = {"sample": partial(buffer.sample, BATCH)}
    if work == "M":
        one = ReplayBuffer(min(rows, 10_000))
        lines["add 1"] = in_order(one.add, [each[0] for each in map(batch, cut(data, 1)[:1_000])])
        many = VectorReplayBuffer(max(64, rows), 64)
        lines["add 64"] = in_order(many.add, [batch(each) for each in cut(data, 64)[:100]])
    return lines


def of_torchrl(kind: str, work: str, rows: int) -> Lines | None:
    """TorchRL: its columns come back as tensors. ``cached``: nothing changes between two samples."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import (  # type: ignore[import-not-found]
        LazyTensorStorage,
        PrioritizedSampler,
        RandomSampler,
        ReplayBuffer,
        SliceSampler,
    )

    if kind == "n-step":
        return None
    samplers = {
        "uniform": RandomSampler,
        "prioritized": partial(PrioritizedSampler, rows, ALPHA, BETA),
        "sequences": partial(SliceSampler, slice_len=16, end_key="done", cache_values=True),
    }
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=samplers[kind](), batch_size=BATCH)
    data = rows_of(work, 16_384 if work == "M" else 1_024)

    def blocks(count: int) -> list[Any]:
        cuts = cut(data, count)
        return [TensorDict({k: torch.from_numpy(v) for k, v in each.items()}, [count]) for each in cuts]

    fill(blocks(1_024), rows, 1_024, buffer.extend)
    lines: Lines = {f"add {count}": in_order(buffer.extend, blocks(count)) for count in (64, 1_024)}
    lines["add 1"] = in_order(buffer.add, [each[0] for each in blocks(1)[:1_000]])
    if kind != "prioritized":
        return lines | {"sample": buffer.sample}
    new = torch.rand(BATCH)

    def update() -> None:
        _, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], new)

    return lines | {"sample": update}


PEERS: dict[str, tuple[str, Callable[[str, str, int], Lines | None]]] = {
    "cpprb": ("cpprb", of_cpprb),
    "SB3": ("stable_baselines3", of_sb3),
    "tianshou": ("tianshou", of_tianshou),
    "TorchRL": ("torchrl", of_torchrl),
}


def _warm_calls(number: int) -> int:
    return max(1, number // 10)


def timed(call: Call, number: int) -> float:
    """Return seconds for each of ``number`` calls, after some that are not counted: whose turn it was before has
    other things in the caches."""
    for _ in range(_warm_calls(number)):
        call()
    begun = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begun) / number


def timed_after(call: Call, before: Call, number: int) -> float:
    """As :func:`timed`, with ``before`` called before each and not counted."""
    spent = 0.0
    for _ in range(_warm_calls(number)):
        before()
        call()
    for _ in range(number):
        before()
        begun = time.perf_counter()
        call()
        spent += time.perf_counter() - begun
    return spent / number


def found() -> list[str]:
    """Return the peers that this interpreter has."""
    return [name for name, (package, _) in PEERS.items() if find_spec(package) is not None]


class Server:
    """Answers what is read."""

    def __init__(self) -> None:
        self.opened: dict[str, Lines] = {}

    def answer(self, wanted: dict[str, Any]) -> Any:
        """Do one thing."""
        verb = wanted["do"]
        if verb == "peers":
            return found()
        if verb == "close":
            return self.opened.clear()
        if verb == "open":
            try:
                lines = PEERS[wanted["peer"]][1](wanted["kind"], wanted["work"], wanted["rows"])
            except (ImportError, RuntimeError, OSError) as error:  # it is there, and does not work with its torch
                print(f"{wanted['peer']}, {wanted['kind']}: {error}", file=sys.stderr)
                lines = None
            self.opened[wanted["peer"]] = lines or {}
            return sorted(lines or {})
        lines = self.opened[wanted["peer"]]
        before = wanted.get("before")
        if before is not None:
            return timed_after(lines[wanted["line"]], lines[before], wanted["number"])
        return timed(lines[wanted["line"]], wanted["number"])


def main() -> None:
    """Serve until stdin ends. What packages print while they are imported goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    server = Server()
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
