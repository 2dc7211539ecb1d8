"""Buffers of transitions for tools that take them apart and put them together: rows of every odd kind."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import ReplayBuffer
from pipeline.buffer.transitions.blocks import decode_block
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.config import Prioritized
from pipeline.errors import Damaged
from pipeline.replay.state import read_buffer_state
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, read_blocks
from pipeline.testing import KillingFiles
from pipeline.tools import merge
from tests.support.replaying import Counter

PRIORITIZED = Prioritized(alpha=0.6, beta=0.4)
SMALL = ("run", "t", "reward")


def odd_rows(run: int, t: int, envs: int, *, done: list[bool]) -> dict[str, Any]:
    """A step of some environments: dtypes that numpy lacks, single numbers, empty ones, NaNs with a payload, -0.0, and
    an image."""
    number = 1000 * run + 10 * t + np.arange(envs)
    bits = np.where(number % 3 == 0, 0x7FC00000 | (number & 0xFFF), np.where(number % 3 == 1, 0x80000000, number))
    return {
        "run": np.full(envs, run),
        "t": np.full(envs, t),
        "reward": (number % 7).astype(np.float64),
        "bits": np.repeat(bits.astype(np.uint32).view(np.float32)[:, None], 3, 1),
        "half": torch.from_numpy(number % 251).to(torch.bfloat16)[:, None].expand(envs, 2),
        "small": torch.from_numpy(number % 100).to(torch.float8_e4m3fn),
        "flag": number % 2 == 0,
        "wide": (number + 1j * number).astype(np.complex64),
        "empty": np.zeros((envs, 0), np.int16),
        "image": np.repeat((number % 256).astype(np.uint8), 1200).reshape(envs, 30, 40),
        "terminated": np.array(done),
    }


def play(
    directory: Path,
    run: int,
    steps: int,
    *,
    envs: int = 2,
    capacity: int = 1000,
    lasts: int = 5,
    select: Any = "uniform",
    **options: Any,
) -> dict[str, Any]:
    """Save a buffer in two generations, and return all that it holds: episodes of different lengths, one that is cut, a
    column that was written back, priorities, and something attached."""
    with ReplayBuffer(capacity, directory=directory, select=select, seed=run, **options) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume()
        for t in range(steps):
            done = [(t + 2 * env) % (lasts + env) == lasts - 1 for env in range(envs)]
            buffer.extend(odd_rows(run, t, envs, done=done), envs=envs, version=t // 4)
            if t == steps // 2:
                buffer.end_episode(0)
                buffer.save(run, wait=True)
        keys = buffer.ring.keys()
        buffer.write_back(keys[1::4], {"reward": np.full(len(keys[1::4]), -0.0)})
        if select is PRIORITIZED:
            buffer.update_priorities(keys, 1 + keys % 11)
        buffer.save(run + 1, wait=True)
        return everything(buffer)


def everything(buffer: ReplayBuffer) -> dict[str, Any]:
    """All that a buffer holds, as bytes and plain numbers, oldest row first."""
    ring = buffer.ring
    keys, layout = ring.keys(), ring.storage.layout
    slots = ring.slots(keys)
    names = [] if layout is None else [*(layout.record.names or ()), *ring.storage.large]
    found: dict[str, Any] = {name: [each.tobytes() for each in ring.storage.view(name)[slots]] for name in names}
    found["keys"] = keys.tolist()
    found["open"] = ring.episodes.state(), ring.episodes.next
    if names:
        found["following"] = ring.following(keys).tolist()
        back, counts = ring.chain_back(keys, 4)
        alive = ring.alive(back) & (np.arange(4) < counts[:, None])
        found["back"] = np.where(alive, back, -1).tolist()
        found["mass"] = buffer.drawer.mass(keys).tolist()
        found["id"] = list(zip(*(ring.storage.view(name)[slots].tolist() for name in ("run", "t")), strict=True))
    if buffer.next_obs is not None and names:
        nexts = buffer.next_obs.gather(keys, buffer.next_obs.names())
        found |= {name: [each.tobytes() for each in array] for name, array in nexts.items()}
        found["aside"] = tuple(buffer.next_obs.state()[0].tolist())
    found["counts"] = buffer.statistics().added, buffer.statistics().sampled
    return found


def load(directory: Path, *, select: Any = "uniform", capacity: int = 5000, **options: Any) -> dict[str, Any]:
    """Resume a copy of the run that nobody else has, and return all that it holds; what :func:`verify` says of it is
    good."""
    found = verify(str(directory))
    assert found.whole, found.damages
    assert not found.unpromised
    with ReplayBuffer(capacity, directory=directory, select=select, seed=1, **options) as buffer:
        buffer.resume(continue_episodes=True)
        return everything(buffer)


def stored(directory: Path) -> Iterator[tuple[Path, Block, dict[str, np.ndarray]]]:
    """The blocks of the newest generation: the segment of each, and what it holds."""
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    folder = Path(find_generations(layout, run.run_id).complete[-1].folder)
    reader = PayloadReader(layout, run.tag)
    for path in [folder, *sorted((folder / "shards").glob("*"))]:
        if (path / BLOCKS_FILE).exists():
            state, _ = read_buffer_state(str(path))
            blocks = {block.place: block for block in read_blocks(str(path / BLOCKS_FILE))}
            for place, payload in reader.each(blocks):
                assert state.schema is not None
                assert not isinstance(payload, Damaged)
                block = blocks[place]
                arrays = decode_block(payload, state.schema, block.count, str(path))
                yield Path(layout.segment(*block.segment_key)), block, arrays


def compressed(directory: Path, name: str) -> dict[Any, bytes | None]:
    """How the rows of a column lie in the blocks of the newest generation, by id: the stream of each, or None where it
    is dense."""
    found: dict[Any, bytes | None] = {}
    for _, block, arrays in stored(directory):
        streams = arrays[name].tolist() if arrays[name].dtype == object else [None] * block.count
        found |= dict(zip(zip(arrays["run"].tolist(), arrays["t"].tolist(), strict=True), streams, strict=True))
    return found


def rows_by_id(found: dict[str, Any], names: tuple[str, ...] = ()) -> dict[Any, Any]:
    """What there is of each row that does not depend on where it lies, by environment-independent id."""
    kept = names or tuple(name for name in found if isinstance(found[name], list) and not name.startswith("#"))
    kept = tuple(name for name in kept if name not in ("keys", "following", "back", "id"))
    marks = ("#version", "#end", "#place")
    rows: dict[Any, Any] = {}
    for at, which in enumerate(found.get("id", ())):
        content = tuple(found[name][at] for name in (*kept, *marks))
        rows.setdefault(which, []).append((*content, found["following"][at]))
    return {which: sorted(each, key=repr) for which, each in rows.items()}


def digest(directory: Path) -> str:
    """A digest of every file of a folder: names and contents."""
    hashed = hashlib.blake2b()
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            hashed.update(os.path.relpath(path, directory).encode() + b"\0")
            with open(path, "rb") as file:
                hashed.update(file.read())
    return hashed.hexdigest()


def merge_and_die(pipe: Any, runs: list[str], out: str, after: int) -> None:
    """Merge, and die instead of the change of the folder that comes after so many."""
    merge(runs, out, files=KillingFiles(after=after))
    pipe.send("merged")
