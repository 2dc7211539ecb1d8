"""A buffer of trajectories, of which single transitions are sampled.

A trajectory is there whole or not at all: what is added is checked before anything is changed, and a batch is copied
out under the lock under which rows are written, or read from files that nobody changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.storage import to_torch
from pipeline.config import TrajectoryOptions
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, ForebayError, Starved
from pipeline.replay.flattening import Aligned, TrajectoryInfo, aligned, nested
from pipeline.replay.folder_verbs import due_of, not_after_fork
from pipeline.replay.gate import Gate
from pipeline.replay.segment_rows import SegmentRows
from pipeline.replay.shelving import Shelving
from pipeline.replay.trajectory_aio import AsyncTrajectoryBuffer
from pipeline.replay.trajectory_draws import Draw
from pipeline.replay.trajectory_ranks import TrajectoryRankSaver
from pipeline.replay.trajectory_saving import TrajectoryParts, TrajectorySaver
from pipeline.replay.trajectory_verbs import TrajectoryVerbs
from pipeline.store.files import FilesLike


class TrajectoryBuffer(TrajectoryVerbs):
    """The newest trajectories of tensors [T, B, ...]: T steps of B environments.

    ::

        buffer = TrajectoryBuffer(sample_window_size=100, directory="runs/t", auto_save=True, seed=1)
        buffer.attach(agent=agent)
        for step in range(buffer.resume().step + 1, steps + 1):
            buffer.add_trajectories([{"rewards": rewards, "actions": actions, "curr_obs": {"states": states}}])
            agent.update(buffer.sample(num_chunks=256))  # batch["curr_obs"]["states"] is [256, ...]
            if buffer.save_due(step):
                buffer.save(step)

    Every verb may be called from any thread; ``buffer.aio`` has those that may wait for tasks. Options are those of
    :class:`~pipeline.config.TrajectoryOptions`. The buffer has a random generator of its own, whose state is saved.
    """

    def __init__(self, *, files: FilesLike | None = None, ranks: Ranks | None = None, **options: Any) -> None:
        """Args:
        files: the file layer, for tests.
        ranks: this process among those that train together. Each has a shard of its own, and they have one folder:
            ``resume``, ``save_due`` and ``save`` are called by all of them, for the same steps, and ``resume`` before
            anything is added. ``capacity``, ``cache_size`` and ``sample_window_size`` are of each.
        options: see :class:`~pipeline.config.TrajectoryOptions`.

        Raises:
            ConfigError: an option is unknown or out of range; or there are ranks, and no directory.
        """
        self.options, self.ranks = TrajectoryOptions.of(options), ranks
        self.gate = Gate()
        own: Ranks | None = None
        if ranks is None:
            self._saver: TrajectorySaver = TrajectorySaver(self.options, self.gate, files)
        else:
            self._saver = saver = TrajectoryRankSaver(self.options, self.gate, ranks, files)
            own = saver.ranks
        store = self._saver.store
        self._own = TrajectoryParts(self.options, None if ranks is None else ranks.rank)
        self._shelving = Shelving(self.gate, store, self._own.shelf, weakref.WeakMethod(self._let_go))
        self._saver.shelving = self._shelving
        self._due = due_of(store, self.get_stats, own)
        self._rows = None if store is None else SegmentRows(store.folder.layout, lambda: store.folder.tag)
        self._closed = self._forked = False
        self._first = 0  # the number of the window's first row
        self._widen(self._own)
        not_after_fork(self)

    @property
    def aio(self) -> AsyncTrajectoryBuffer:
        """The same buffer for tasks: its verbs are awaited."""
        return AsyncTrajectoryBuffer(self)

    # -- adding ------------------------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[Any]) -> range:
        """Add trajectories, all or none of them, as copies; the oldest go where there are more than are held.

        With a directory it waits while more is queued to be written than the disk takes.

        Args:
            trajectories: mappings, or objects with such attributes, of tensors [T, B, ...] and mappings of such, with
                ``max_episode_length`` and ``model_weights_id`` beside them. Row ``t * B + b`` of a trajectory is step t
                of environment b. Fields named in ``first_extra`` and ``last_extra`` may be [T + E, B, ...]. All have
                the same fields, shapes (but for T and B) and dtypes.

        Returns:
            Their numbers, from 0 on, which are never used again.

        Raises:
            ConfigError: a field is missing or unknown, or has another shape or dtype. Nothing was changed.
            UsageError: the folder is in use, and was not resumed; or there are ranks, and it was not resumed. Nothing
                was changed.
            WriteFailed: what was added before could not be written beside the training; it is in memory still, and
                will be tried again. Nothing was changed.
        """
        given = [aligned(each, self.options) for each in trajectories]
        self._usable()
        if not self._saver.begun:
            self._saver.begin_adding()
        with self.gate.lock:
            self._usable()
            self._shelving.wait_for_room()
            self._shelving.raise_failed()
            self._usable()
            schema = self._own.shelf.schema
            rows: list[Arrays] = []
            for each in given:
                flat = each.flat()
                schema = schema or Schema.of(flat)
                rows.append(schema.check(flat)[0])
            shelf = self._own.shelf
            if schema is not None and given:
                self._take(schema, given, rows)
            return range(shelf.next - len(given), shelf.next)

    def _take(self, schema: Schema, given: list[Aligned], rows: list[Arrays]) -> None:
        shelf = self._own.shelf
        end = shelf.next + len(given)
        infos = [each.info(shelf.next + number) for number, each in enumerate(given)]
        low, cached = self._kept(end)
        shelf.add(schema, infos, rows, low=low, cached=cached)
        self._set_first()
        if self._saver.store is not None:
            held = self._own.room(self.options).cache
            self._shelving.want(end if self.options.auto_save else 0 if held is None else end - held)

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, num_chunks: int, *, strict: bool | None = None) -> dict[str, Any]:
        """Return transitions of the newest ``sample_window_size`` trajectories, each transition alike, with
        replacement.

        Args:
            num_chunks: how many.
            strict: as the option of that name, for this call.

        Returns:
            Tensors [n, ...] by field, nested as they were given; place i of every field is of one transition. n is
            ``num_chunks``, or the number of transitions in the window if that is less.

        Raises:
            ConfigError: ``num_chunks`` is no whole number from 1 on.
            Starved: nothing is there; or, strict, less than was asked for.
            Damaged, StoreError: a trajectory cannot be read from the disk. Nothing was drawn.
        """
        if num_chunks.__class__ is not int or num_chunks < 1:
            raise ConfigError.of("num_chunks", num_chunks, "a whole number from 1 on is needed")
        with self.gate.lock:
            self._usable()
            own = self._own
            shelf, first = own.shelf, self._first
            total = shelf.end - first
            if not total:
                raise Starved("the buffer is empty: add trajectories first")
            if num_chunks > total and (self.options.strict if strict is None else strict):
                raise Starved(f"num_chunks={num_chunks}, and the window has {total} transitions; add, or ask for less")
            if first >= shelf.begin:
                found = shelf.gather(own.rng.integers(first, shelf.end, min(num_chunks, total)))
                return nested(to_torch(found.layout, found.arrays))
            assert self._rows is not None
            before = own.rng.bit_generator.state
            rows = own.rng.integers(first, shelf.end, min(num_chunks, total))
            after = own.rng.bit_generator.state
            try:
                draw = Draw(shelf, rows, self._rows)
            except ForebayError:
                own.rng.bit_generator.state = before
                raise
        try:
            return self._read(draw)
        except ForebayError:
            with self.gate.lock:
                if own.rng.bit_generator.state == after:  # nobody has drawn since
                    own.rng.bit_generator.state = before
            raise

    def _read(self, draw: Draw) -> dict[str, Any]:
        """Return what was drawn; the lock is not held, as nobody changes what lies on the disk."""
        arrays = draw.read()
        if draw.found_data:
            with self.gate.lock:
                for number, begin in draw.found_data.items():
                    draw.shelf.note_data(number, begin)
        return nested(to_torch(draw.layout, arrays))

    @property
    def sample_window_size(self) -> int:
        """Of how many of the newest trajectories transitions are drawn; 0 or less: of all. May be set at any time."""
        return self._own.window

    @sample_window_size.setter
    def sample_window_size(self, window: int) -> None:
        self.options.check_window(window)
        with self.gate.lock:
            self._own.window = window
            self._widen(self._own)
            self._set_first()

    # -- the rest ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many trajectories there are."""
        return len(self._own.shelf)

    def __bool__(self) -> bool:
        """True, whatever is there: ``given or TrajectoryBuffer()`` asks whether a buffer was given."""
        return True

    @property
    def total_samples(self) -> int:
        """How many transitions there are."""
        with self.gate.lock:
            shelf = self._own.shelf
            return shelf.end - shelf.start(shelf.low)

    @property
    def trajectory_counter(self) -> int:
        """The number of the next trajectory."""
        return self._own.shelf.next

    def is_ready(self, min_size: int) -> bool:
        """Whether there are ``min_size`` trajectories."""
        return len(self) >= min_size

    def ready(self, count: int = 1) -> bool:
        """Whether every rank can sample ``count`` transitions now: one that waits alone, while the others are in a
        collective, would wait for ever. All ranks ask, at the same place of the script; without ``ranks`` it is whether
        the window has so many.

        Raises:
            RankLost: a rank did not ask in time.
        """
        with self.gate.lock:
            own = self._own.shelf.end - self._first >= count
        return own if self.ranks is None else all(self.ranks.all("ready", own))

    def get_stats(self) -> dict[str, int]:
        """Return how the buffer stands: trajectories and transitions that there are; trajectories in memory
        (``cache_size``), and those that are on the disk for good; the transitions that can be drawn now; bytes of
        memory, and of rows that wait to be written."""
        with self.gate.lock:
            shelf = self._own.shelf
            return {
                "num_trajectories": len(shelf),
                "total_samples": self.total_samples,
                "cache_size": shelf.next - shelf.cached,
                "on_disk": max(0, shelf.synced - shelf.low),
                "window_samples": shelf.end - self._first,
                "trajectory_counter": shelf.next,
                "memory_bytes": shelf.storage.capacity * shelf.storage.row_bytes,
                "queued_bytes": self._shelving.queued_bytes,
            }

    def infos(self) -> list[TrajectoryInfo]:
        """Return what is known of each trajectory, oldest first."""
        with self.gate.lock:
            shelf = self._own.shelf
            return [shelf.info(number) for number in range(shelf.low, shelf.next)]

    def trajectory(self, number: int) -> dict[str, Any]:
        """Return a copy of a trajectory: tensors [T, B, ...] by field, nested as they were given, with
        ``max_episode_length`` and ``model_weights_id``.

        Raises:
            ConfigError: it is not there.
            Damaged, StoreError: it cannot be read from the disk.
        """
        with self.gate.lock:
            self._usable()
            shelf = self._own.shelf
            if number.__class__ is not int or not shelf.low <= number < shelf.next:
                there = f"{shelf.low} to {shelf.next - 1} are" if len(shelf) else "none is"
                raise ConfigError.of("number", number, f"{there} there")
            info, arrays = shelf.info(number), self._whole(shelf, number)
            layout = shelf.storage.layout
        assert layout is not None
        fields = to_torch(layout, {name: np.array(array) for name, array in arrays.items()})
        shaped = {name: tensor.reshape(*info.shape, *tensor.shape[1:]) for name, tensor in fields.items()}
        plain = {"max_episode_length": info.max_episode_length, "model_weights_id": info.model_weights_id}
        return {**nested(shaped), **plain}

    def clear(self) -> None:
        """Forget every trajectory, and the fields: others may be added then. Numbers are not used again."""
        with self.gate.lock:
            self._usable()
            self._forget()
        self.gate.changed()

    def clear_cache(self) -> None:
        """Give back the memory that no trajectory needs: with a directory, of all that is on the disk for good. All
        that could be sampled still can."""
        with self.gate.lock:
            self._usable()
            shelf = self._own.shelf
            if self._saver.store is not None:
                shelf.let_go(shelf.low, max(shelf.cached, min(shelf.next, shelf.may_let_go(shelf.low))))
            shelf.shrink()

    def close(self) -> None:
        """Wait for what is being written, and give back the folder, the signals and all memory; nothing can be added or
        sampled any more. Again is nothing. In a forked child it does nothing.

        Raises:
            WriteFailed: something could not be written, and nobody was told yet. It is closed all the same.
        """
        if self._forked:
            return
        try:
            super().close()
        finally:
            with self.gate.lock:
                self._forget()
                self._closed = True
                if self._rows is not None:
                    self._rows.forget()
