"""Trajectories out of a run, one by one, oldest first."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from pipeline.checkpoint.manifest import BLOCKS_FILE, TRAJECTORY_SHARDS
from pipeline.errors import Damaged
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.shards import share_out
from pipeline.replay.trajectory_blobs import decode_info
from pipeline.replay.trajectory_loading import blocks_of, read_infos
from pipeline.replay.trajectory_shards import listed_for, read_trajectory_shards, schema_of
from pipeline.store.codec import ITEM_KEY, read_bytes
from pipeline.store.segments import Block, PayloadReader
from pipeline.tools.interchange.runs import Opened
from pipeline.tools.interchange.streams import TRAJECTORIES, Record, Records


def trajectories_of(opened: Opened) -> Records:
    """Return every trajectory of a generation.

    Raises:
        Damaged: a file is damaged.
    """
    infos, blocks, end = _of_ranks(opened) if opened.stored.manifest.kind == TRAJECTORY_SHARDS else _of_one(opened)
    about = msgspec.structs.replace(opened.about, next_trajectory=end)

    def records() -> Iterator[Record]:
        reader = PayloadReader(opened.layout, opened.tag)
        for info, block in zip(infos, blocks, strict=True):
            yield _record(opened, reader, info, block)

    return Records(TRAJECTORIES, about, records, sum(block.length for block in blocks), len(blocks))


_Listed = tuple[list[TrajectoryInfo], list[Block], int]
"""What is known of each, where it lies, and the number of the next one."""


def _of_one(opened: Opened) -> _Listed:
    state, _, infos = read_infos(opened.stored)
    blocks = blocks_of(os.path.join(opened.stored.folder, BLOCKS_FILE), state)
    return infos, blocks, state.trajectory_counter


def _of_ranks(opened: Opened) -> _Listed:
    """Return those of all ranks, as one rank would have them; numbered from 0 on, as ranks have equal numbers."""
    shards = read_trajectory_shards(opened.stored)
    where = opened.stored.folder
    schema_of(shards)
    shares = share_out(shards, 1, None, rebalance=True, evict=False, where=where, counted="episodes")
    infos, blocks, _ = listed_for(0, shards, shares)
    numbered = [msgspec.structs.replace(info, trajectory_id=number) for number, info in enumerate(infos)]
    return numbered, blocks, len(infos)


def _record(opened: Opened, reader: PayloadReader, info: TrajectoryInfo, block: Block) -> Record:
    ((_, found),) = reader.each([block.place])
    if isinstance(found, Damaged):
        raise found
    where = f"{opened.layout.segment(*block.segment_key)} at byte {block.offset}"
    tensors = read_bytes(found, where)
    raw = tensors.pop(ITEM_KEY, None)
    written = msgspec.structs.replace(info, trajectory_id=block.first)
    if raw is None or decode_info(raw.array.tobytes(), where) != written:
        raise Damaged(f"{where}: holds another trajectory than {info}")
    steps, envs = info.shape
    fields = {
        "trajectory_id": info.trajectory_id,
        "steps": steps,
        "envs": envs,
        "max_episode_length": info.max_episode_length,
        "model_weights_id": info.model_weights_id,
    }
    return Record(fields, dict(sorted(tensors.items())))
