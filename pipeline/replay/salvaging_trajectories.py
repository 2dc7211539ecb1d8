"""Salvaging a buffer of trajectories: a new run out of those that are whole.

Each lies in one block, which is whole or not. Those that are kept follow each other in the new run: the newest have the
numbers that they had, and those before a gap higher ones, as numbers have no gaps.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import BLOCKS_FILE, TRAJECTORIES
from pipeline.errors import Damaged
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.loading import read_values
from pipeline.replay.salvage_choice import Chosen, choose_generation, commit_salvaged, payload_loss
from pipeline.replay.trajectories import TrajectoryBuffer
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_loading import blocks_of, read_infos
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader


class SavedTrajectories(NamedTuple):
    """What is whole of a buffer, as its ``state_dict`` would be, and what is not.

    Attributes:
        chosen: the generation that it is of.
        state: what ``load_state_dict`` takes.
        kept, missing: trajectories.
        rows_kept, rows_missing: their rows.
        losses: each place that is not whole.
    """

    chosen: Chosen
    state: dict[str, Any]
    kept: int
    missing: int
    rows_kept: int
    rows_missing: int
    losses: list[Loss]


def whole_trajectories(layout: Layout, *, step: int | None = None) -> SavedTrajectories:
    """Read what is whole of a buffer's newest generation, or of the newest of ``step``. Blocks, and changes nothing;
    the trajectories are in memory then.

    Raises:
        UsageError: the run is of another kind.
        NotARun, Damaged, StoreError: as :func:`~pipeline.replay.salvage_choice.choose_generation`.
    """
    chosen = choose_generation(layout, TRAJECTORIES, step)
    stored = chosen.stored
    state, _, infos = read_infos(stored)
    found: dict[int, dict[str, np.ndarray]] = {}
    losses = list(chosen.losses)
    if state.schema is not None:
        blobs, by_number = BlobLayout(state.schema), {info.trajectory_id: info for info in infos}
        blocks = {block.first: block for block in blocks_of(os.path.join(stored.folder, BLOCKS_FILE), state)}
        reader = PayloadReader(layout, chosen.run_tag, forgiving=True)
        for place, blob in reader.each(block.place for block in blocks.values()):
            block, info = blocks[place[0]], by_number[place[0]]
            try:
                if isinstance(blob, Damaged):
                    raise blob
                where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
                arrays = blobs.decode(blob, info, where)
                found[info.trajectory_id] = {name: np.array(array) for name, array in arrays.items()}
            except Damaged as error:
                losses.append(payload_loss(layout, block, error, _lost(info)))
    there = [info for info in infos if info.trajectory_id in found]
    kept = np.array([info.trajectory_id in found for info in infos], bool)
    rows = sum(info.num_samples for info in there)
    gathered = {
        column.name: [found[each.trajectory_id][column.name] for each in there]
        or [np.empty((0, *column.shape), column.bits)]
        for column in (() if state.schema is None else state.schema.columns)
    }
    return SavedTrajectories(
        chosen=chosen,
        state={
            "state": msgspec.to_builtins(msgspec.structs.replace(state, size=len(there), total_samples=rows)),
            "values": {name: each[kept] for name, each in read_values(stored).items()},
            "rows": {name: np.concatenate(parts) for name, parts in gathered.items()},
        },
        kept=len(there),
        missing=len(infos) - len(there),
        rows_kept=rows,
        rows_missing=state.total_samples - rows,
        losses=losses,
    )


def _lost(info: TrajectoryInfo) -> str:
    steps, envs = info.shape
    return f"trajectory {info.trajectory_id}, of {steps} steps in {envs} environments"


def write_trajectories(
    saved: SavedTrajectories, directory: str, *, origin: str, called: str, files: FilesLike | None = None
) -> str:
    """Save what is whole as the first generation of a run in ``directory``, which is absent or empty and will be called
    ``called``. Returns the new run's id. Blocks.

    Raises:
        WriteFailed: it could not be written.
        Damaged: a file of the trainer's was whole a moment ago.
    """
    with TrajectoryBuffer(directory=directory, files=files) as buffer:
        buffer.load_state_dict(saved.state)
        return commit_salvaged(buffer, saved.chosen, origin=origin, called=called)
