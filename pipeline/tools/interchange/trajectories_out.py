"""Trajectories out of a run, one by one, oldest first."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.errors import Damaged
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.trajectory_blobs import decode_info
from pipeline.replay.trajectory_loading import blocks_of, read_infos
from pipeline.store.codec import ITEM_KEY, read_bytes
from pipeline.store.segments import Block, PayloadReader
from pipeline.tools.interchange.runs import Opened
from pipeline.tools.interchange.streams import TRAJECTORIES, Record, Records


def trajectories_of(opened: Opened) -> Records:
    """Return every trajectory of a generation.

    Raises:
        Damaged: a file is damaged.
    """
    folder = opened.stored.folder
    state, _, infos = read_infos(opened.stored)
    blocks = blocks_of(os.path.join(folder, BLOCKS_FILE), state)
    about = msgspec.structs.replace(opened.about, next_trajectory=state.trajectory_counter)

    def records() -> Iterator[Record]:
        reader = PayloadReader(opened.layout, opened.tag)
        for info, block in zip(infos, blocks, strict=True):
            yield _record(opened, reader, info, block)

    return Records(TRAJECTORIES, about, records, sum(block.length for block in blocks), len(blocks))


def _record(opened: Opened, reader: PayloadReader, info: TrajectoryInfo, block: Block) -> Record:
    ((_, found),) = reader.each([block.place])
    if isinstance(found, Damaged):
        raise found
    where = f"{opened.layout.segment(*block.segment_key)} at byte {block.offset}"
    tensors = read_bytes(found, where)
    raw = tensors.pop(ITEM_KEY, None)
    if raw is None or decode_info(raw.array.tobytes(), where) != info:
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
