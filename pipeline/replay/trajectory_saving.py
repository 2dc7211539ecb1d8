"""Saving a buffer of trajectories and what was attached to it, and going on from that."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import TRAJECTORIES
from pipeline.config import TrajectoryOptions
from pipeline.errors import Damaged
from pipeline.replay.gate import Gate
from pipeline.replay.job import SaveJob
from pipeline.replay.numbering import numbered_after
from pipeline.replay.saving import SaverOf
from pipeline.replay.shelf import Shelf
from pipeline.replay.shelving import Shelving, TrajectoryJob
from pipeline.replay.state import generator_state, set_generator
from pipeline.replay.store import ReplayStore
from pipeline.replay.trajectory_loading import ReadTrajectories, Room, Verify, read
from pipeline.replay.trajectory_state import TrajectoryState
from pipeline.store.files import FilesLike


class TrajectoryParts:
    """What the state of a buffer of trajectories consists of; guarded by the buffer's lock."""

    def __init__(self, options: TrajectoryOptions, rank: int | None = None) -> None:
        """Args:
        options: of the buffer.
        rank: whose; each draws from a stream of its own. None: there are no ranks.
        """
        self.shelf = Shelf(0)
        self.numbered = ""
        """What tells how trajectories are numbered from how they had been, if a resume has changed that."""
        seeds = [options.seed, 0] if rank is None else [options.seed, 0, rank]
        self.rng = np.random.Generator(np.random.PCG64(seeds))
        self.window = options.sample_window_size
        self.widest: int | None = 1
        """The largest window so far; None: everything."""

    def room(self, options: TrajectoryOptions) -> Room:
        """Return how much is held."""
        return Room(options.capacity, self.widest if options.cache_size is None else options.cache_size)

    def state(self) -> TrajectoryState:
        """Return everything but the rows, and what is known of each trajectory."""
        shelf = self.shelf
        return TrajectoryState(
            columns=None if shelf.schema is None else list(shelf.schema.columns),
            size=len(shelf),
            total_samples=shelf.end - shelf.start(shelf.low),
            trajectory_counter=shelf.next,
            sample_window_size=self.window,
            generator=generator_state(self.rng),
            weights=list(shelf.weights),
            numbered=self.numbered,
        )


class TrajectorySaver(SaverOf[TrajectoryParts, ReadTrajectories]):
    """Saves and resumes a buffer of trajectories."""

    shelving: Shelving

    def __init__(self, options: TrajectoryOptions, gate: Gate, files: FilesLike | None) -> None:
        store = None if options.directory is None else ReplayStore(options, files, TRAJECTORIES)
        super().__init__(store, gate)
        self._options = options

    def raise_failed(self) -> None:
        """Raise what a save, or writing beside the training, failed with; once."""
        super().raise_failed()
        self.shelving.raise_failed()

    def close(self) -> None:
        """Wait for what is being written, and give the folder back."""
        self.shelving.join()
        super().close()

    def take_over(self, found: ReadTrajectories, parts: TrajectoryParts) -> None:
        """Put what was read in use.

        Raises:
            Damaged: the state does not fit together; nothing was changed.
        """
        try:
            if found.state.generator:
                set_generator(parts.rng, found.state.generator)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{found.stored.folder}: the buffer's state does not fit together ({error!r})") from None
        parts.shelf = found.shelf
        parts.numbered = numbered_after(found.state.numbered, self._left)
        self.adopt(found)

    def _job(self, parts: TrajectoryParts) -> SaveJob:
        assert self.store is not None
        return TrajectoryJob(self.shelving, self._gate, self.store, parts.shelf, parts.state())

    def _used(self, like: Any) -> bool:
        return bool(like.shelf.next)

    def _rows(self, parts: TrajectoryParts) -> int:
        return parts.shelf.end - parts.shelf.start(parts.shelf.low)

    def _read(self, stored: Stored, like: Any) -> ReadTrajectories:
        store = self.store
        assert store is not None
        layout, room = store.folder.layout, like.room(self._options)
        verify: Verify = "lazy" if self.loading.lazily else "full"
        return read(layout, store.folder.tag, stored, list(self.attached), room, verify)
