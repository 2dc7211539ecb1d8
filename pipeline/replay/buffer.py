"""A replay buffer of transitions, for use without a pipeline."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.columns import Rows, Schema
from pipeline.buffer.transitions.drawing import make_drawer
from pipeline.buffer.transitions.layout import OPEN, TERMINATED, TRUNCATED
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.config import ReplayOptions, Slices
from pipeline.errors import ConfigError, Starved, UsageError
from pipeline.replay.aio import AsyncReplayBuffer
from pipeline.replay.due import Due
from pipeline.replay.gate import Gate
from pipeline.replay.sampling import Sampler, Wanted
from pipeline.replay.saving import Parts, Saver
from pipeline.replay.saving_verbs import SavingVerbs
from pipeline.store.files import FilesLike

_DEFAULT: Any = object()


class Updated(NamedTuple):
    """What became of an update of priorities."""

    applied: np.ndarray
    """[n] bool: whether the priority of each key was written. Where not, its row had gone before."""

    @property
    def stale(self) -> int:
        """How many were ignored, because another row has the place by now."""
        return int((~self.applied).sum())


class ReplayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How a buffer stands."""

    size: int
    capacity: int
    added: int
    sampled: int
    episodes: int
    """How many there have been."""
    open_episodes: int
    stale_updates: int
    """Priorities that came too late: their row had gone."""
    waiters: int
    row_bytes: int


class ReplayBuffer(SavingVerbs):
    """The newest ``capacity`` rows of fixed shape, to be sampled many times.

    ::

        buffer = ReplayBuffer(1_000_000, select=Prioritized(alpha=0.6, beta=0.4), seed=1)
        buffer.extend({"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "terminated": terminated})
        batch = buffer.sample(256, n_step=3, gamma=0.99)
        buffer.update_priorities(batch.keys, agent.update(batch))

    Every verb may be called from any thread of this process, and never from a fork of it. ``buffer.aio`` has the same
    verbs for tasks. Options are those of :class:`~pipeline.config.ReplayOptions`.
    """

    def __init__(
        self, capacity: int, *, schema: Schema | None = None, files: FilesLike | None = None, **options: Any
    ) -> None:
        """Args:
        capacity: how many rows are held.
        schema: the columns; else those of the first rows.
        files: the file layer, for tests.
        options: see :class:`~pipeline.config.ReplayOptions`.

        Raises:
            ConfigError: an option is out of range, or the rows would not fit into memory.
        """
        self.options = ReplayOptions.build(capacity, options)
        self.gate = Gate()
        self._saver = Saver(self.options, self.gate, files)
        self._due = None if self._saver.store is None else Due(self.options, self._saver.store.folder.layout.stop_file)
        self._use(self._parts(Ring(TransitionStorage(capacity, schema))))
        self._forked = False
        _not_after_fork(self)

    @property
    def aio(self) -> AsyncReplayBuffer:
        """The same buffer for tasks: its verbs are awaited."""
        return AsyncReplayBuffer(self)

    def _parts(self, ring: Ring) -> Parts:
        """Return the parts of a buffer of the rows of ``ring``, as they are at the beginning."""
        drawer = make_drawer(ring, self.options.select, self.options.seed)
        rng = np.random.Generator(np.random.PCG64([self.options.seed, 0]))
        return Parts(ring, drawer, Counts(self.options.limiter), rng, {})

    def _use(self, parts: Parts) -> None:
        self._own = parts
        self.ring, self._drawer, self._counts = parts.ring, parts.drawer, parts.counts
        self._sampler = Sampler(parts.ring, parts.drawer, parts.rng, self.options)

    # -- adding ------------------------------------------------------------------------------------------------

    def extend(
        self,
        rows: Rows,
        *,
        env: int | ArrayLike = 0,
        envs: int | None = None,
        ends: ArrayLike | None = None,
        version: int = 0,
        timeout: float | None = _DEFAULT,
    ) -> range:
        """Add rows [n, ...], all or none of them.

        Args:
            rows: numpy arrays or tensors by column, with n in front; a mapping in it stands for nested columns. They
                are copied.
            env: the environment that they are of, a number from 0 on, or that of each row [n]. Rows of one environment
                come in their order in time.
            envs: E, if row t * E + e is of environment e.
            ends: [n] bool, whether the episode ends with the row; by default where ``terminated``, ``truncated`` or
                ``done`` say so, if there are such columns.
            version: of the weights that made them.
            timeout: seconds to wait for the limiter; by default the option of that name.

        Returns:
            The keys of the rows.

        Raises:
            ConfigError: a column is missing or unknown, or of another shape or dtype. Nothing was changed.
            TimedOut: the limiter does not let them in. Nothing was changed.
        """
        with self.gate.lock:
            self._usable()
            schema = self.ring.storage.schema or Schema.of(rows)
            arrays, count = schema.check(rows)
            whose, mixed = _environments(env, envs, count)
            codes = self._ends(arrays, count, ends)
            if not self._counts.free:
                self._counts.check_add(count)
                self.wait_to_add(count, timeout)
            if self.ring.storage.schema is None:
                self.ring.storage.shape(schema)
            first = self.ring.extend(arrays, count, whose, codes, version, mixed=mixed)
            self._drawer.added(first, count)
            self._counts.added += count
        self.gate.changed()
        return range(first, first + count)

    def append(self, row: Rows, *, env: int = 0, version: int = 0, timeout: float | None = _DEFAULT) -> int:
        """Add one row, whose columns have no leading axis; return its key. See :meth:`extend`."""
        with self.gate.lock:
            self._usable()
            storage = self.ring.storage
            schema = storage.schema or Schema.of(row, leading=False)
            plain = schema.fits(row)
            arrays = row if plain else schema.check(row, leading=False)[0]
            if env.__class__ is not int or env < 0:
                raise ConfigError.of("env", env, "the number of an environment, from 0 on, is needed")
            if not self._counts.free:
                self.wait_to_add(1, timeout)
            if storage.schema is None:
                storage.shape(schema)
            fields = self.options.fields
            get = arrays.get
            end = OPEN
            if get(fields.terminated) or get(fields.done):
                end = TERMINATED
            if get(fields.truncated) and not get(fields.terminated):
                end = TRUNCATED
            key = self.ring.append(arrays, env, end, version)
            self._drawer.added(key, 1)
            self._counts.added += 1
        self.gate.changed()
        return key

    def end_episode(self, env: int | None = None) -> int:
        """End the open episode of an environment, or of all, where it is: its next row begins another one.

        Returns:
            How many episodes were ended. Their last rows count as neither terminated nor truncated.
        """
        with self.gate.lock:
            self._usable()
            return len(self.ring.cut(env))

    def _ends(self, arrays: Mapping[str, np.ndarray], count: int, ends: ArrayLike | None) -> np.ndarray:
        codes = np.zeros(count, np.uint8)
        if ends is not None:
            given = np.asarray(ends)
            if given.shape != (count,) or given.dtype != bool:
                raise ConfigError.of("ends", given, f"[{count}] bool is needed")
            codes[given] = TRUNCATED
            return codes
        fields = self.options.fields
        for name, code in ((fields.done, TERMINATED), (fields.truncated, TRUNCATED), (fields.terminated, TERMINATED)):
            flags = arrays.get(name)
            if flags is not None:
                codes[flags.reshape(count, -1)[:, 0] != 0] = code
        return codes

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(
        self,
        count: int,
        *,
        n_step: int = 1,
        gamma: float | None = None,
        slices: Slices | Mapping[str, Any] | None = None,
        stack: int = 1,
        columns: Sequence[str] | None = None,
        timeout: float | None = _DEFAULT,
    ) -> TransitionBatch:
        """Return ``count`` rows, or slices, as the option ``select`` says.

        Args:
            count: how many.
            n_step: sum up to so many rewards: ``reward`` becomes their discounted sum, ``next_obs``, ``terminated``,
                ``truncated`` and ``done`` those of the last row that was summed. Never across the end of an episode,
                nor the newest row: then fewer are summed, and the discount is of those.
            gamma: the discount factor, 0 to 1; needed with ``n_step``. With it, the batch has ``discount``.
            slices: draw slices instead of rows.
            stack: give ``obs`` and ``next_obs`` as the so many newest ones, [n, stack, ...], oldest first; before an
                episode's first row that is repeated.
            columns: only these.
            timeout: seconds to wait for the limiter; by default the option of that name.

        Raises:
            ConfigError: what is asked can never be had.
            Starved: nothing that is there could be drawn.
            TimedOut: the limiter lets nothing out now.
        """
        wanted = Wanted.of(n_step, gamma, slices, stack, columns)
        with self.gate.lock:
            self._usable()
            self.options.check_batch(count)
            if not self._counts.may_sample(count, self.ring.size):
                self.wait_to_sample(count, timeout)
            if not self.ring.size:
                raise Starved("the buffer is empty: add rows first")
            batch = self._sampler.sample(count, wanted)
            self._counts.sampled += count
        self.gate.changed()
        return batch

    def update_priorities(self, keys: ArrayLike, priorities: Any) -> Updated:
        """Set the priorities of rows, all or none of them.

        Args:
            keys: [n] of a batch. A row that has gone meanwhile is left out, and counted.
            priorities: [n] numbers, not negative; such as the absolute errors.

        Raises:
            ConfigError: one of them is negative or not finite, or was never the key of a row, or the numbers differ.
        """
        with self.gate.lock:
            self._usable()
            where, values = self._checked_priorities(keys, priorities)
            applied = self.ring.alive(where)
            if applied.all():
                self._drawer.update(where, values)
            else:
                self._drawer.update(where[applied], values[applied])
                self._saver.stale_updates += len(where) - int(applied.sum())
        return Updated(applied)

    def _checked_priorities(self, keys: ArrayLike, priorities: Any) -> tuple[np.ndarray, np.ndarray]:
        where = np.asarray(keys)
        if where.dtype.kind not in "iu" and len(where):
            raise ConfigError.of("keys", where.dtype, "whole numbers, such as batch.keys, are needed")
        where = where.astype(np.int64, copy=False).reshape(-1)
        if hasattr(priorities, "detach"):
            priorities = priorities.detach().cpu()
            priorities = priorities.double().numpy()
        values = np.asarray(priorities, np.float64).reshape(-1)
        if len(where) != len(values):
            raise ConfigError.of("priorities", len(values), f"as many as keys are needed: {len(where)}")
        wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
        if len(wrong):
            raise ConfigError.of(
                "priorities", float(values[wrong[0]]), f"finite numbers from 0 on are needed; number {wrong[0]} is none"
            )
        unknown = np.flatnonzero((where < 0) | (where >= self.ring.added))
        if len(unknown):
            raise ConfigError.of("keys", int(where[unknown[0]]), "it was never the key of a row of this buffer")
        return where, values

    # -- the rest ----------------------------------------------------------------------------------------------

    def can_add(self, count: int = 1) -> bool:
        """Whether the limiter lets ``count`` rows in now."""
        return self._counts.may_add(count)

    def can_sample(self, count: int = 1) -> bool:
        """Whether the limiter lets ``count`` rows out now, and there are any."""
        return self.ring.size > 0 and self._counts.may_sample(count, self.ring.size)

    def wait_to_add(self, count: int, timeout: float | None = _DEFAULT) -> None:
        """Wait until ``count`` rows may be added.

        Raises:
            TimedOut: that took longer than ``timeout`` seconds.
        """
        counts = self._counts
        with self.gate.lock:
            self.gate.wait(lambda: counts.may_add(count), self._seconds(timeout), lambda: counts.why_not_add(count))

    def wait_to_sample(self, count: int, timeout: float | None = _DEFAULT) -> None:
        """Wait until ``count`` rows may be sampled.

        Raises:
            TimedOut: that took longer than ``timeout`` seconds.
        """
        with self.gate.lock:
            self.gate.wait(
                lambda: self._counts.may_sample(count, self.ring.size),
                self._seconds(timeout),
                lambda: self._counts.why_not_sample(count, self.ring.size),
            )

    def _seconds(self, timeout: float | None) -> float | None:
        return self.options.timeout if timeout is _DEFAULT else timeout

    def clear(self) -> None:
        """Forget every row, and the columns: others may be added then. Keys are not used again."""
        with self.gate.lock:
            self._usable()
            self.ring.clear()
            self.ring.storage.forget()
            self._drawer.clear()
        self.gate.changed()

    def statistics(self) -> ReplayStatistics:
        """Return how the buffer stands."""
        with self.gate.lock:
            return ReplayStatistics(
                size=self.ring.size,
                capacity=self.ring.capacity,
                added=self.ring.added,
                sampled=self._counts.sampled,
                episodes=self.ring.episodes.next,
                open_episodes=len(self.ring.episodes.open()),
                stale_updates=self._saver.stale_updates,
                waiters=self.gate.waiters,
                row_bytes=self.ring.storage.row_bytes,
            )

    def __len__(self) -> int:
        return self.ring.size

    def _usable(self) -> None:
        if self._forked:
            raise UsageError(
                "this buffer was made before a fork, and is used in the child: what is added here the parent never "
                "sees. Make it in the process that uses it."
            )


def _environments(env: int | ArrayLike, envs: int | None, count: int) -> tuple[np.ndarray, bool]:
    """Return the environments of rows, and whether they are those of each row."""
    if envs is not None:
        if envs < 1 or count % envs or not (isinstance(env, int) and env == 0):
            raise ConfigError.of(
                "envs", envs, f"a number that divides the {count} rows is needed, and no env= beside it"
            )
        return np.arange(envs), False
    if env.__class__ is int and env >= 0:
        return _ZERO if env == 0 else np.array([env]), False
    given = np.asarray(env)
    if given.ndim == 0:
        given = given.reshape(1)
    elif given.shape != (count,):
        raise ConfigError.of("env", given, f"the number of an environment, or [{count}] of them, are needed")
    if given.dtype.kind not in "iu" or (given < 0).any() or (given >= _MOST_ENVS).any():
        raise ConfigError.of("env", given, f"whole numbers from 0 to {_MOST_ENVS - 1} are needed")
    return given.astype(np.int64), len(given) > 1


_ZERO = np.zeros(1, np.int64)
_MOST_ENVS = 1 << 20
_buffers: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()
_watching = False


def _not_after_fork(buffer: ReplayBuffer) -> None:
    """Let a forked child know that the buffer is not its own."""
    global _watching
    _buffers.add(buffer)
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_mark_forked)


def _mark_forked() -> None:
    for buffer in _buffers:
        buffer._forked = True
