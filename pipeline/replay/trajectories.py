"""A buffer of trajectories, of which single transitions are sampled.

The rows of all trajectories lie one after the other in a ring, so that the window of the newest ones is one range of
row numbers, and a batch is one gather. A trajectory is there whole or not at all: what is added is checked before
anything is changed, and a batch is copied out under the lock under which rows are written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.storage import TransitionStorage, to_torch
from pipeline.config import TrajectoryOptions
from pipeline.errors import ClosedError, ConfigError, Starved
from pipeline.replay.flattening import Aligned, TrajectoryInfo, aligned, nested
from pipeline.replay.state import generator_state, set_generator


class TrajectoryBuffer:
    """The newest trajectories of tensors [T, B, ...]: T steps of B environments.

    ::

        buffer = TrajectoryBuffer(sample_window_size=100, seed=1)
        buffer.add_trajectories([{"rewards": rewards, "actions": actions, "curr_obs": {"states": states}}])
        batch = buffer.sample(num_chunks=256)  # batch["curr_obs"]["states"] is [256, ...]

    Every verb may be called from any thread. Options are those of :class:`~pipeline.config.TrajectoryOptions`. The
    buffer has a random generator of its own, whose state is part of :meth:`state`.
    """

    def __init__(self, **options: Any) -> None:
        """Raises:
        ConfigError: an option is unknown or out of range.
        """
        self.options = TrajectoryOptions.of(options)
        self._window = self.options.sample_window_size
        self._most: int | None = 1  # the largest window so far; None: everything
        self._lock = threading.RLock()
        self._storage = TransitionStorage(0)
        self._infos: list[TrajectoryInfo] = []
        self._begin = self._end = 0  # numbers of the first row that is there, and of the next one
        self._first = 0  # the number of the window's first row
        self._next = 0
        self._rng = np.random.Generator(np.random.PCG64([self.options.seed, 0]))
        self._closed = False
        self._widen()

    # -- adding ------------------------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[Any]) -> range:
        """Add trajectories, all or none of them, as copies; the oldest go where there are more than are held.

        Args:
            trajectories: mappings, or objects with such attributes, of tensors [T, B, ...] and mappings of such, with
                ``max_episode_length`` and ``model_weights_id`` beside them. Row ``t * B + b`` of a trajectory is step t
                of environment b. Fields named in ``first_extra`` and ``last_extra`` may be [T + E, B, ...]. All have
                the same fields, shapes (but for T and B) and dtypes.

        Returns:
            Their numbers, from 0 on, which are never used again.

        Raises:
            ConfigError: a field is missing or unknown, or has another shape or dtype. Nothing was changed.
        """
        given = [aligned(each, self.options) for each in trajectories]
        with self._lock:
            self._usable()
            schema = self._storage.schema
            rows: list[Arrays] = []
            for each in given:
                flat = each.flat()
                schema = schema or Schema.of(flat)
                rows.append(schema.check(flat)[0])
            if schema is not None and given:
                self._take(schema, given, rows)
            return range(self._next - len(given), self._next)

    def _take(self, schema: Schema, given: list[Aligned], rows: list[Arrays]) -> None:
        infos = [each.info(self._next + number) for number, each in enumerate(given)]
        there = len(self._infos)
        excess = 0 if self._held is None else max(0, there + len(infos) - self._held)
        gone = [*self._infos[:excess], *infos[: max(0, excess - there)]]
        begin, end = self._begin + _rows(gone), self._end + _rows(infos)
        self._fit(schema, begin, end)
        row = self._end
        for info, arrays in zip(infos, rows, strict=True):
            if row >= begin:
                self._write(row, info.num_samples, arrays)
            row += info.num_samples
        self._infos += infos
        del self._infos[:excess]
        self._begin, self._end, self._next = begin, end, self._next + len(infos)
        self._set_first()

    def _fit(self, schema: Schema, begin: int, end: int) -> None:
        """See to it that the rows ``begin`` to ``end`` have room; those that are there keep their numbers."""
        old, least = self._storage, end - begin
        if least <= old.capacity:
            return
        try:
            storage = TransitionStorage(max(least, 2 * old.capacity), schema)
        except ConfigError:
            storage = TransitionStorage(least, schema)
        self._copy(old, storage, begin)
        self._storage = storage

    def _copy(self, old: TransitionStorage, storage: TransitionStorage, begin: int) -> None:
        row = begin
        while row < self._end:
            source, target = row % old.capacity, row % storage.capacity
            count = min(old.capacity - source, storage.capacity - target, self._end - row)
            storage.records[target : target + count] = old.records[source : source + count]
            for name, array in old.large.items():
                storage.large[name][target : target + count] = array[source : source + count]
            row += count

    def _write(self, row: int, count: int, arrays: Arrays) -> None:
        slot = row % self._storage.capacity
        room = min(count, self._storage.capacity - slot)
        self._storage.write(slice(slot, slot + room), {name: array[:room] for name, array in arrays.items()})
        if room < count:
            self._storage.write(slice(0, count - room), {name: array[room:] for name, array in arrays.items()})

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
        """
        if num_chunks.__class__ is not int or num_chunks < 1:
            raise ConfigError.of("num_chunks", num_chunks, "a whole number from 1 on is needed")
        with self._lock:
            self._usable()
            total = self._end - self._first
            if not total:
                raise Starved("the buffer is empty: add trajectories first")
            if num_chunks > total and (self.options.strict if strict is None else strict):
                raise Starved(f"num_chunks={num_chunks}, and the window has {total} transitions; add, or ask for less")
            rows = self._rng.integers(self._first, self._end, min(num_chunks, total))
            found = self._storage.gather(rows % self._storage.capacity)
        return nested(to_torch(found.layout, found.arrays))

    def _set_first(self) -> None:
        """Find where the window begins."""
        inside = 0 < self._window < len(self._infos)
        self._first = self._end - _rows(self._infos[-self._window :]) if inside else self._begin

    @property
    def sample_window_size(self) -> int:
        """Of how many of the newest trajectories transitions are drawn; 0 or less: of all. May be set at any time."""
        return self._window

    @sample_window_size.setter
    def sample_window_size(self, window: int) -> None:
        self.options.check_window(window)
        with self._lock:
            self._window = window
            self._widen()
            self._set_first()

    def _widen(self) -> None:
        if self._most is not None:
            self._most = max(self._most, self._window) if self._window > 0 else None

    @property
    def _held(self) -> int | None:
        return self._most if self.options.cache_size is None else self.options.cache_size

    # -- the rest ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many trajectories there are."""
        return len(self._infos)

    @property
    def total_samples(self) -> int:
        """How many transitions there are."""
        with self._lock:
            return self._end - self._begin

    @property
    def trajectory_counter(self) -> int:
        """The number of the next trajectory."""
        return self._next

    def is_ready(self, min_size: int) -> bool:
        """Whether there are ``min_size`` trajectories."""
        return len(self._infos) >= min_size

    def get_stats(self) -> dict[str, int]:
        """Return how the buffer stands: trajectories and transitions that there are, trajectories in memory, the
        transitions that can be drawn now, and bytes of memory."""
        with self._lock:
            return {
                "num_trajectories": len(self._infos),
                "total_samples": self.total_samples,
                "cache_size": len(self._infos),
                "window_samples": self._end - self._first,
                "trajectory_counter": self._next,
                "memory_bytes": self._storage.capacity * self._storage.row_bytes,
            }

    def infos(self) -> list[TrajectoryInfo]:
        """Return what is known of each trajectory, oldest first."""
        with self._lock:
            return list(self._infos)

    def trajectory(self, number: int) -> dict[str, Any]:
        """Return a copy of a trajectory: tensors [T, B, ...] by field, nested as they were given, with
        ``max_episode_length`` and ``model_weights_id``.

        Raises:
            ConfigError: it is not there.
        """
        with self._lock:
            self._usable()
            row = self._begin
            for info in self._infos:
                if info.trajectory_id == number:
                    rows = np.arange(row, row + info.num_samples)
                    found = self._storage.gather(rows % self._storage.capacity)
                    break
                row += info.num_samples
            else:
                there = f"{self._infos[0].trajectory_id} to {self._next - 1} are" if self._infos else "none is"
                raise ConfigError.of("number", number, f"{there} there")
        fields = to_torch(found.layout, {name: np.array(array) for name, array in found.arrays.items()})
        shaped = {name: tensor.reshape(*info.shape, *tensor.shape[1:]) for name, tensor in fields.items()}
        plain = {"max_episode_length": info.max_episode_length, "model_weights_id": info.model_weights_id}
        return {**nested(shaped), **plain}

    def clear(self) -> None:
        """Forget every trajectory, and the fields: others may be added then. Numbers are not used again."""
        with self._lock:
            self._usable()
            self._forget()

    def _forget(self) -> None:
        self._storage, self._infos, self._begin = TransitionStorage(0), [], self._end
        self._set_first()

    def clear_cache(self) -> None:
        """Give back the memory that no trajectory needs; all that could be sampled still can."""
        with self._lock:
            self._usable()
            old = self._storage
            if old.schema is None or self.total_samples == old.capacity:
                return
            storage = TransitionStorage(self.total_samples, old.schema)
            self._copy(old, storage, self._begin)
            self._storage = storage

    def close(self) -> None:
        """Give all memory back; nothing can be added or sampled any more. Again is nothing."""
        with self._lock:
            self._forget()
            self._closed = True

    def _usable(self) -> None:
        if self._closed:
            raise ClosedError("this buffer is closed")

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything but the rows, as plain values that JSON keeps: fields, what is known of each trajectory,
        the next number, the window, and the state of the random generator."""
        with self._lock:
            self._usable()
            schema = self._storage.schema
            return {
                "columns": [] if schema is None else msgspec.to_builtins(schema.columns),
                "infos": msgspec.to_builtins(self._infos),
                "trajectory_counter": self._next,
                "sample_window_size": self._window,
                "most": self._most,
                "random": generator_state(self._rng),
            }

    def arrays(self) -> Arrays:
        """Return copies of the fields of all rows [total_samples, ...], oldest trajectory first, as they are held."""
        with self._lock:
            self._usable()
            if self._storage.schema is None:
                return {}
            rows = np.arange(self._begin, self._end)
            found = self._storage.gather(rows % self._storage.capacity)
            return {name: np.array(array) for name, array in found.arrays.items()}

    def load(self, state: dict[str, Any], arrays: Arrays) -> None:
        """Take back what :meth:`state` and :meth:`arrays` gave: then the same is sampled as would have been.

        Raises:
            ConfigError: the rows are not those of the state. Nothing was changed.
        """
        infos = msgspec.convert(state["infos"], list[TrajectoryInfo])
        schema = msgspec.convert({"columns": state["columns"]}, Schema)
        total = sum(info.num_samples for info in infos)
        for column in schema.columns:
            array = arrays.get(column.name)
            if array is None or array.dtype != column.bits or array.shape != (total, *column.shape):
                raise ConfigError(f"field {column}: {total} rows of it are needed", option="arrays")
        with self._lock:
            self._usable()
            storage = TransitionStorage(total, schema) if schema.columns else TransitionStorage(0)
            if total:
                storage.write(slice(0, total), {name: arrays[name] for name in schema.names})
            set_generator(self._rng, state["random"])
            self._storage, self._infos, self._begin, self._end = storage, infos, 0, total
            self._next, self._window, self._most = (
                state["trajectory_counter"],
                state["sample_window_size"],
                state["most"],
            )
            self._set_first()


def _rows(infos: Sequence[TrajectoryInfo]) -> int:
    return sum(info.num_samples for info in infos)
