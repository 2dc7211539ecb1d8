"""The verbs that add rows to a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipeline.buffer.transitions.columns import Rows, Schema
from pipeline.buffer.transitions.compressed import check_compressed
from pipeline.buffer.transitions.drawing import Drawer
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.config import ReplayOptions
from pipeline.errors import StoreError, UsageError
from pipeline.replay.arguments import (
    MOST_ENVS,
    MOST_VERSION,
    end_code,
    end_codes,
    environments,
    one_environment,
    weights_version,
)
from pipeline.replay.gate import Gate
from pipeline.replay.stepping import Stepping, named_step

DEFAULT: Any = object()


class AddingVerbs:
    """How :class:`~pipeline.ReplayBuffer` takes rows in."""

    options: ReplayOptions
    gate: Gate
    ring: Ring
    next_obs: SharedNextObs | None
    """The next observations, if rows share them with their successors."""
    stepping: Stepping
    _drawer: Drawer
    _counts: Counts
    _forked: bool
    _fed = False
    """Whether the rollouts of a pipeline fill it."""

    def _not_fed(self, verb: str) -> None:
        if self._fed:
            raise UsageError(
                f"{verb}(): a pipeline's rollouts fill this buffer, with ctx.extend(), and the pipeline saves and "
                "resumes it; rows that came otherwise would be in no journal"
            )

    def _usable(self) -> None:
        raise NotImplementedError

    def _waited_to_add(self, count: int, timeout: float | None) -> bool:
        raise NotImplementedError

    @property
    def schema(self) -> Schema | None:
        """The columns of every row; None before there is one."""
        self.gate.look()
        return self._schema

    @property
    def _schema(self) -> Schema | None:
        return self.ring.storage.schema if self.next_obs is None else self.next_obs.schema

    def _shape(self, schema: Schema, count: int = 0) -> None:
        """Begin with rows of a schema, of which ``count`` come at once; if there is no room for them, not at all."""
        self.ring.check(schema)
        check_compressed(self.options.compress, schema)
        self.ring.storage.shape(schema if self.next_obs is None else self.next_obs.reduced(schema))
        if self.next_obs is not None:
            self.next_obs.shape(schema)
        try:
            self.ring.make_room(count)
        except StoreError:
            self.ring.storage.forget()
            if self.next_obs is not None:
                self.next_obs.forget()
            raise

    def extend(
        self,
        rows: Rows,
        *,
        env: int | ArrayLike = 0,
        envs: int | None = None,
        ends: ArrayLike | None = None,
        version: int = 0,
        timeout: float | None = DEFAULT,
    ) -> Sequence[int]:
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
            The keys of the rows. A list of them with another ``remove`` than ``fifo``, in which -1 is a row that was
            not kept: it was itself the first to go.

        Raises:
            ConfigError: a column is missing or unknown, or of another shape or dtype. Nothing was changed.
            TimedOut: the limiter does not let them in. Nothing was changed.
        """
        if version.__class__ is not int or not 0 <= version <= MOST_VERSION:
            version = weights_version(version)
        if self._fed:
            self._not_fed("extend")
        with self.gate.lock:
            keys = self._extend(rows, env, envs, ends, version, timeout)
        self.gate.changed()
        return keys

    def _extend(
        self,
        rows: Rows,
        env: int | ArrayLike,
        envs: int | np.ndarray | None,
        ends: ArrayLike | None,
        version: int,
        timeout: float | None,
    ) -> Sequence[int]:
        while True:
            if self._forked:
                self._usable()
            ring, nexts = self.ring, self.next_obs
            known = ring.storage.schema if nexts is None else nexts.schema
            schema = known or Schema.of(rows)
            arrays, count = schema.check(rows)
            whose, mixed = environments(env, envs, count)
            codes = end_codes(arrays, count, ends, self.options.fields)
            if not count:
                return range(ring.added, ring.added)
            if self._counts.free or not self._waited_to_add(count, timeout):
                break  # else the columns may be others by now
        if known is None:
            self._shape(schema, count)
        if nexts is None:
            first = ring.extend(arrays, count, whose, codes, version, mixed=mixed)
        else:
            arrays, obs, after = nexts.split(arrays)
            first = ring.extend(arrays, count, whose, codes, version, mixed=mixed)
            nexts.added(first, count, obs, after)
        self._drawer.added(first, count)
        self._counts.added += count
        return ring.given(first, count)

    def append(self, row: Rows, *, env: int = 0, version: int = 0, timeout: float | None = DEFAULT) -> int:
        """Add one row, whose columns have no leading axis; return its key. See :meth:`extend`."""
        if env.__class__ is not int or not 0 <= env < MOST_ENVS:
            env = one_environment(env)
        if version.__class__ is not int or not 0 <= version <= MOST_VERSION:
            version = weights_version(version)
        if self._fed:
            self._not_fed("append")
        with self.gate.lock:
            key = self._append(row, env, version, timeout)
        self.gate.changed()
        return key

    def _append(self, row: Rows, env: int, version: int, timeout: float | None) -> int:
        while True:
            if self._forked:
                self._usable()
            ring, nexts = self.ring, self.next_obs
            packed = None if nexts is not None else ring.storage.packed(row)
            known = None
            if packed is None:
                known = self._schema
                schema = known or Schema.of(row, leading=False)
                arrays = row if schema.fits(row) else schema.check(row, leading=False)[0]
            else:
                arrays = row
            end = end_code(arrays, self.options.fields)
            if self._counts.free or not self._waited_to_add(1, timeout):
                break
        if packed is None and known is None:
            self._shape(schema, 1)
        if nexts is None:
            key = ring.append(arrays, env, end, version, packed)
        else:
            arrays, obs, after = nexts.split(arrays)
            key = ring.append(arrays, env, end, version)
            nexts.added_one(key, obs, after)
        self._drawer.added(key, 1)
        self._counts.added += 1
        return ring.given(key, 1)[0] if ring.scattered else key

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        info: Any = None,
        *,
        extras: Mapping[str, Any] | None = None,
        autoreset: Any = None,
        env: int = 0,
        version: int = 0,
        timeout: float | None = DEFAULT,
    ) -> Sequence[int]:
        """Add the rows that come of an environment's step, all or none; ``obs`` and ``action`` are from before it.

        ::

            next_obs, reward, terminated, truncated, info = envs.step(action)
            buffer.add(obs, action, reward, next_obs, terminated, truncated, info, autoreset="next_step")

        A vector environment is told by its rewards [N], and then everything is [N, ...]. A call that only resets one
        of its environments gives no row of it. After a reset by hand in mid-episode, or in mode ``next_step``, call
        :meth:`end_episode`. What is nested gives columns ``obs.x``, ``obs.0``.

        Args:
            reward: [N, 1] is taken as [N], and so are flags; stored as float32 unless ``schema=`` says otherwise.
            info: needed in mode ``same_step``, for its ``final_obs``.
            extras: more columns, such as what the policy gave beside its action.
            autoreset: ``"next_step"``, ``"same_step"``, ``"disabled"``, or Gymnasium's ``AutoresetMode``; may be left
                out for a single environment that is reset by hand.
            env: the number of the environment, or of a vector environment's first.
            version, timeout: as in :meth:`extend`.

        Returns:
            The keys of the rows, by environment.

        Raises:
            ConfigError: the mode or a ``final_obs`` is missing, or something does not fit. Nothing was changed.
            TimedOut: the limiter does not let them in. Nothing was changed.
        """
        env, version = one_environment(env), weights_version(version)
        values = (obs, action, reward, next_obs, terminated, truncated)
        given = named_step(self.options.fields, values, extras)
        with self.gate.lock:
            keys = self._add(given, info, autoreset, env, version, timeout)
        self.gate.changed()
        return keys

    def _add(
        self, given: Mapping[str, Any], info: Any, autoreset: Any, env: int, version: int, timeout: float | None
    ) -> Sequence[int]:
        self._usable()
        self._not_fed("add")
        step = self.stepping.rows(given, info, autoreset, env, self.options.fields, self._schema)
        keys: Sequence[int] = range(self.ring.added, self.ring.added)
        if step.number and step.envs.__class__ is int:
            key = self._append(step.rows, env, version, timeout)
            keys = (key,) if self.ring.scattered else range(key, key + 1)
        elif step.number:
            keys = self._extend(step.rows, 0, step.envs, None, version, timeout)
        self.stepping.take(step)
        return keys

    def end_episode(self, env: int | None = None) -> int:
        """End the open episode of an environment, or of all, where it is: its next row begins another one.

        Returns:
            How many episodes were ended. Their last rows count as neither terminated nor truncated.
        """
        if env is not None:
            env = one_environment(env)
        self._not_fed("end_episode")
        with self.gate.lock:
            self._usable()
            self.stepping.reset(env)
            before = self.ring.cuts
            self.ring.cut(env)
            return self.ring.cuts - before
