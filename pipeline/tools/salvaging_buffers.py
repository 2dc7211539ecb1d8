"""Salvaging a buffer of transitions of one process, whichever of its rows go first."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import REPLAY
from pipeline.errors import ForebayError, WriteFailed
from pipeline.replay.salvage_choice import Chosen, choose_generation
from pipeline.replay.state import read_buffer_state
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.tools.salvaged_run import SalvagedRun
from pipeline.tools.salvaging_pools import PooledRows
from pipeline.tools.salvaging_rows import RowsInOrder


class SavedRows(NamedTuple):
    """What is whole of a buffer, and what is not.

    Attributes:
        chosen: the generation that it is of.
        origin: run id and generation of that.
        run_id: the new run's; empty after a rehearsal.
        kept, missing: rows.
        split: episodes that go on as another one after a gap.
        losses: each place that is not whole.
    """

    chosen: Chosen
    origin: str
    run_id: str
    kept: int
    missing: int
    split: int
    losses: list[Loss]


def salvage_rows(
    layout: Layout, target: str, *, step: int | None, called: str, files: FilesLike, rehearse: bool
) -> SavedRows:
    """Write what is whole of a damaged buffer into a new run in ``target``, which is absent or empty and will be called
    ``called``. Blocks; the damaged run is only read, and a bounded part of its rows is in memory.

    Raises:
        UsageError: the run is of another kind.
        NotARun, Damaged, StoreError: as :func:`~pipeline.replay.salvage_choice.choose_generation`.
        WriteFailed: it could not be written.
    """
    chosen = choose_generation(layout, REPLAY, step)
    manifest = chosen.stored.manifest
    origin, run_id = f"{manifest.run_id}/{manifest.generation}", ""
    state, unknown = read_buffer_state(chosen.stored.folder)
    rows = (RowsInOrder if state.remove == "fifo" else PooledRows)(layout, chosen, state, unknown)
    found = rows.look()
    if not rehearse:
        try:
            with contextlib.closing(SalvagedRun(chosen, target, files, origin=origin, called=called)) as run:
                run_id = rows.write(run)
        except ForebayError:
            raise
        except OSError as error:
            raise WriteFailed(f"{target}: could not be written: {error}. Remove it, and try again") from error
    losses = [*chosen.losses, *found.losses]
    return SavedRows(chosen, origin, run_id, found.kept, found.missing, found.split, losses)
