"""The trajectories of one run on the disk: of its buffer, or of each of its ranks, without payloads.

A trajectory has an id: the part that it belongs to, and the number that it had there. The part is the run itself, or a
rank's shard of it; of a run that a tool made, part and number of each trajectory lie beside them.
"""

from __future__ import annotations

import os

import msgspec
import numpy as np

from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.manifest import BLOCKS_FILE, TRAJECTORY_SHARDS, MadeOf
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import EpisodeTable, prefix_of
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_loading import blocks_of, read_infos
from pipeline.replay.trajectory_shards import TrajectoriesOnDisk, read_trajectory_shards
from pipeline.store.files import open_plain
from pipeline.store.held import HeldSegments
from pipeline.store.segments import Block
from pipeline.tools.kept_rows import KEY_FILE, PART_FILE, where_of
from pipeline.tools.sources import Source

Ints = np.ndarray


def trajectories_on_disk(source: Source) -> list[TrajectoriesOnDisk]:
    """Return what a generation says of its trajectories: one list, or one for each rank, each compared with the
    manifest. Blocks.

    Raises:
        Damaged: something is missing or was changed.
    """
    stored = source.stored
    if source.kind == TRAJECTORY_SHARDS:
        return read_trajectory_shards(stored)
    check_generation(stored)
    return [listed_alone(stored)]


def listed_alone(stored: Stored) -> TrajectoriesOnDisk:
    """Return what a generation of one process says of its trajectories, as if that were a rank.

    Raises:
        Damaged: it does not fit together.
    """
    state, unknown, infos = read_infos(stored)
    blocks = blocks_of(os.path.join(stored.folder, BLOCKS_FILE), state)
    number = np.arange(state.trajectory_counter - state.size, state.trajectory_counter)
    rows = np.array([each.num_samples for each in infos], np.int64)
    # One process names trajectories by their numbers alone: these come after each other in its lives.
    uid = prefix_of(stored.manifest.incarnation, 0) | number
    table = EpisodeTable(number, uid, number, rows, rows, np.zeros_like(rows))
    return TrajectoriesOnDisk(0, stored, state, unknown, infos, blocks, table)


class Shelved:
    """The trajectories of one buffer. What is read is checked."""

    def __init__(self, source: Source, run: int, listed: TrajectoriesOnDisk, held: HeldSegments) -> None:
        """Args:
        source: the run.
        run: which of those that are read it is.
        listed: what its generation says of the trajectories.
        held: the segments of the run.

        Raises:
            Damaged: something is missing or was changed.
        """
        self.source, self.run, self.held = source, run, held
        self.state, self.unknown, self.infos, self.blocks = listed.state, listed.unknown, listed.infos, listed.blocks
        of_ranks = source.kind == TRAJECTORY_SHARDS
        own = source.part(listed.rank) if of_ranks else source.part()
        own = msgspec.structs.replace(own, numbered=listed.state.numbered)
        self.where = where_of(source, own)
        made = not of_ranks and PART_FILE in {info.path for info in source.stored.manifest.files}
        self.parts: list[MadeOf] = list(source.stored.manifest.made_of) if made else [own]
        self.part = self._values(PART_FILE, np.int32) if made else np.zeros(self.state.size, np.int64)
        self.number = self._values(KEY_FILE, np.int64) if made else listed.table.number

    def _values(self, path: str, dtype: type[np.generic]) -> Ints:
        with open_plain(os.path.join(self.source.stored.folder, path)) as file:
            found = np.frombuffer(file.read(), dtype).astype(np.int64)
        if len(found) != self.state.size:
            raise Damaged(f"{self.source.stored.folder}: {path} is of {len(found)} trajectories, not {self.state.size}")
        return found

    def payload(self, blobs: BlobLayout, info: TrajectoryInfo, block: Block) -> memoryview:
        """Return the payload of a trajectory, which was compared with what is known of it; valid until the next call.

        Raises:
            Damaged: it is not whole, or another one.
            StoreError: it cannot be read now.
        """
        payload = self.held.payload(block)
        blobs.decode(payload, as_written(info, block), self.held.where(block))
        return payload


def as_written(info: TrajectoryInfo, block: Block) -> TrajectoryInfo:
    """Return what a payload says of its trajectory: a rank may have it under another number than it was written by."""
    return msgspec.structs.replace(info, trajectory_id=block.first)


def shelves_of(source: Source, run: int = 0) -> list[Shelved]:
    """Return the trajectories of a source: of its buffer, or of each of its ranks; ``run``: which of several it is.

    Raises:
        Damaged: something is missing or was changed.
    """
    each = trajectories_on_disk(source)
    # One for all ranks: they may need one segment both, and only so many files may be open.
    blocks = [block for listed in each for block in listed.blocks]
    held = HeldSegments(source.layout, source.tag, blocks, source.stored.manifest.segments)
    return [Shelved(source, run, listed, held) for listed in each]
