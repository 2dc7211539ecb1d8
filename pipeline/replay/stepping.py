"""From what an environment returned to the rows that are stored, in each of Gymnasium's autoreset modes.

What a call returns for an environment whose episode ends at it (https://farama.org/Vector-Autoreset-Mode):

========== ============================ ================================ ========================
mode       observation of that call     the next call                    stored as its next obs
========== ============================ ================================ ========================
next_step  the final one                is the reset: no row comes of it the call's observation
same_step  the next episode's first     goes on                          ``info["final_obs"]``
disabled   the final one                follows the caller's reset       the call's observation
========== ============================ ================================ ========================

The rows are whole before anything is changed. :class:`~pipeline.replay.ReplayBuffer` calls this with its lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.buffer.transitions.columns import Schema, as_array
from pipeline.config import Fields
from pipeline.errors import ConfigError
from pipeline.replay.arguments import numbers
from pipeline.replay.finals import Named, final_of, leaves, no_final, put, shape_of, with_finals

MODES = ("next_step", "same_step", "disabled")
ACTION = "action"


class Step(NamedTuple):
    """What came of a call: the rows to store, and what the next call depends on."""

    rows: Named
    """By column: [n, ...] of a vector environment; of a single one without that axis."""
    envs: Any
    """[n] the environment of each row; a number, of a single environment."""
    number: int
    base: int
    over: np.ndarray
    """[N] bool: the environments, from ``base`` on, whose next call is their reset."""
    lent: list[tuple[Any, Named]]
    """Final observations, as they were given and copied."""


class Stepping:
    """Which environments await their reset (mode ``next_step``). Nothing else is remembered of an environment."""

    def __init__(self) -> None:
        self._over = np.zeros(8, bool)
        self._lent: dict[int, list[tuple[Any, Named]]] = {}

    def state(self) -> list[int]:
        """Return the environments whose next call is their reset."""
        found: list[int] = np.flatnonzero(self._over).tolist()
        return found

    def load(self, state: list[int]) -> None:
        """Take back what :meth:`state` gave."""
        self._over, self._lent = np.zeros(max([8, *(env + 1 for env in state)]), bool), {}
        self._over[state] = True

    def reset(self, env: int | None = None) -> None:
        """Take in that an environment, or all, was reset by hand."""
        self._lent.clear()
        if env is None:
            self._over[:] = False
        elif env < len(self._over):
            self._over[env] = False

    def take(self, step: Step) -> None:
        """Take in that a step was stored."""
        end = step.base + len(step.over)
        if end > len(self._over):
            self._over = np.concatenate([self._over, np.zeros(2 * end - len(self._over), bool)])
        self._over[step.base : end] = step.over
        if step.lent or self._lent:
            self._lent[step.base] = step.lent

    def rows(
        self, given: Mapping[str, Any], info: Any, autoreset: Any, env: int, fields: Fields, schema: Schema | None
    ) -> Step:
        """Return the rows that come of a call; see :meth:`~pipeline.replay.ReplayBuffer.add`.

        Args:
            given: obs, action, reward, next_obs, terminated, truncated, and extras, by their columns' names.
            info: of the call.
            autoreset: the mode.
            env: the number of the environment, or of a vector environment's first.
            fields: names of columns.
            schema: the columns; None before there are any: the reward's is to be of float32.

        Raises:
            ConfigError: something does not fit together. Nothing was changed.
        """
        reward = given[fields.reward]
        shape = () if isinstance(reward, float) else shape_of(reward)
        dims = len(shape)
        if dims == 2 and shape[1] == 1:
            reward, dims = _flat(reward), 1
        if dims > 1:
            raise ConfigError.of(fields.reward, list(shape), "[N] of a vector environment is needed, or one number")
        mode = mode_of(autoreset, single=dims == 0)
        self._check_lent(env)
        if dims:
            given = {**given, fields.reward: _as_held(fields.reward, reward, schema)}
        step = (self._vector if dims else self._single)(given, info, mode, env, fields)
        if schema is None and step.number:
            step.rows[fields.reward] = _single_precision(fields.reward, step.rows[fields.reward])
        return step

    def _single(self, given: Mapping[str, Any], info: Any, mode: str, env: int, fields: Fields) -> Step:
        flags = [_flag(name, given[name]) for name in (fields.terminated, fields.truncated)]
        ended = flags[0] or flags[1]
        if env < len(self._over) and self._over[env]:
            return Step({}, env, 0, env, _NO, [])
        row: Named = {}
        for name, value in given.items():
            if name == fields.next_obs and mode == "same_step" and ended:
                value = final_of(info, None)
                if value is None:
                    raise no_final(env)
            put(row, name, value)
        row[fields.terminated], row[fields.truncated] = flags
        row[fields.reward] = _number(fields.reward, given[fields.reward])
        return Step(row, env, 1, env, _YES if ended and mode == "next_step" else _NO, [])

    def _vector(self, given: Mapping[str, Any], info: Any, mode: str, env: int, fields: Fields) -> Step:
        size = len(given[fields.reward])
        rows: Named = {}
        for name, value in given.items():
            put(rows, name, value)
        for name in (fields.terminated, fields.truncated):
            rows[name] = _flat(numbers(name, rows[name])) != 0
        for name, value in rows.items():
            shape = shape_of(value)
            if shape[:1] != (size,):
                raise ConfigError(
                    f"column {name}: shape {list(shape)}; the first axis must be {size} long, as the reward's is",
                    option=name,
                )
        for name in (fields.terminated, fields.truncated):
            if rows[name].ndim != 1:
                raise ConfigError(
                    f"column {name}: shape {list(rows[name].shape)}; [{size}] bool is needed", option=name
                )
        flags = rows[fields.terminated] | rows[fields.truncated]
        over = np.zeros(size, bool)
        known = self._over[env : env + size]
        over[: len(known)] = known
        ended = flags & ~over
        lent = with_finals(rows, ended, info, fields.next_obs, env) if mode == "same_step" and ended.any() else []
        envs = np.arange(env, env + size)
        if over.any():
            live = np.flatnonzero(~over)
            rows = {name: _chosen(value, live) for name, value in rows.items()}
            envs = envs[live]
        return Step(rows, envs, len(envs), env, ended if mode == "next_step" else np.zeros(size, bool), lent)

    def _check_lent(self, base: int) -> None:
        """Check that no final observation of the last call was overwritten since.

        An environment that writes to the array that it gave has done so in its reset too, before anyone saw the
        array: ``SyncVectorEnv`` does not copy it.
        """
        lent = self._lent.pop(base, ())
        for final, copies in lent:
            now = leaves("", final)
            if any(as_array(name, now[name])[0].tobytes() != copy for name, copy in copies.items()):
                raise ConfigError(
                    "a final_obs was written to after it had been given: the environment re-uses its array, and in "
                    "mode same_step its reset overwrites the final observation, so the next obs of the last row was "
                    "wrong. Copy the observations in a wrapper, or use another mode",
                    option="autoreset",
                )


_YES, _NO = np.ones(1, bool), np.zeros(1, bool)


def named_step(fields: Fields, values: tuple[Any, ...], extras: Mapping[str, Any] | None) -> Named:
    """Return obs, action, reward, next_obs, terminated, truncated, and extras, by the names of their columns.

    Raises:
        ConfigError: the name of an extra is taken.
    """
    names = (fields.obs, ACTION, fields.reward, fields.next_obs, fields.terminated, fields.truncated)
    given = dict(zip(names, values, strict=True))
    for name, value in (extras or {}).items():
        if name in given:
            raise ConfigError.of("extras", name, "this name is taken; call it otherwise")
        given[name] = value
    return given


def mode_of(given: Any, *, single: bool = False, option: str = "autoreset") -> str:
    """Return the mode that ``given`` names: ``"next_step"``, ``"NextStep"``, or Gymnasium's ``AutoresetMode``.

    Args:
        given: the mode.
        single: whether it is that of a single environment, where it may be left out.
        option: what an error calls it.

    Raises:
        ConfigError: it names none, or is missing for a vector environment.
    """
    if given is None and single:
        return "disabled"
    if given.__class__ is str and given in MODES:
        return str(given)
    name = str(getattr(given, "value", given)).rpartition(".")[2].replace("_", "").replace("-", "").lower()
    for mode in MODES:
        if mode.replace("_", "") == name:
            return mode
    raise ConfigError.of(option, given, f"one of {', '.join(MODES)} is needed; envs.metadata['autoreset_mode'] has it")


def _flag(name: str, value: Any) -> bool:
    if value.__class__ is bool or value.__class__ is np.bool_:
        return bool(value)
    array = numbers(name, value)
    if array.ndim:
        raise ConfigError(
            f"column {name}: shape {list(array.shape)}, where the reward is one number: a single environment's",
            option=name,
        )
    return bool(array)


def _number(name: str, value: Any) -> float:
    if isinstance(value, float):
        return float(value)
    array = numbers(name, value)
    if array.dtype.kind == "c":
        raise ConfigError(f"column {name}: {array.dtype} is no reward", option=name)
    return float(array)


def _single_precision(name: str, value: Any) -> np.ndarray:
    array = numbers(name, value)
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
        raise ConfigError(f"column {name}: too large for float32; name float64 for it with schema=", option=name)
    return narrow


def _as_held(name: str, value: Any, schema: Schema | None) -> Any:
    """Return a tensor of a dtype that only torch has as numbers, unless its column is of that dtype."""
    if not isinstance(value, torch.Tensor):
        return value
    held = None if schema is None or name not in schema.names else schema.column(name).torch_only
    return value if value.dtype == held else numbers(name, value)


def _flat(values: Any) -> Any:
    """Return [n] for [n, 1], as some wrappers give rewards and flags."""
    array = values if isinstance(values, (np.ndarray, torch.Tensor)) else np.asarray(values)
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


def _chosen(value: Any, index: np.ndarray) -> Any:
    """Return rows of ``value``."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()[torch.from_numpy(index)]
    return np.asarray(value)[index]
