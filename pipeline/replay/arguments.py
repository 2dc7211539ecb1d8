"""What callers hand to a replay buffer beside the columns, checked: everything is, before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from pipeline.buffer.transitions.columns import as_array
from pipeline.buffer.transitions.layout import OPEN, TERMINATED, TRUNCATED
from pipeline.config import Fields
from pipeline.errors import ConfigError

Ints = np.ndarray
MOST_ENVS = 1 << 20
MOST_VERSION = 2**31 - 1
_NUMPY_HAS = (torch.float16, torch.float32, torch.float64)


def whole(option: str, value: Any, least: int, most: int) -> int:
    """Return a whole number.

    Raises:
        ConfigError: it is none, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ConfigError.of(option, value, f"a whole number from {least} to {most} is needed")
    return number


def numbers(name: str, value: Any) -> np.ndarray:
    """Return values as an array of a dtype that numpy has: of ``bfloat16`` and the like, float32 of the same values.

    Raises:
        ConfigError: they are no numbers.
    """
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype not in _NUMPY_HAS:
        value = value.float()
    return as_array(name, value)[0]


def not_shared(storage: str, verb: str, instead: str) -> None:
    """Refuse what could not be taken back if the process were killed in its midst.

    Raises:
        ConfigError: the buffer is one of several processes.
    """
    if storage == "shared":
        raise ConfigError(
            f"{verb}() cannot be undone by another process, should this one be killed in its midst, so a buffer with "
            f"storage='shared' has it not; {instead}",
            option="storage",
        )


def one_environment(env: Any) -> int:
    """Return the number of an environment."""
    return whole("env", env, 0, MOST_ENVS - 1)


def weights_version(version: Any) -> int:
    """Return the version of weights."""
    return whole("version", version, 0, MOST_VERSION)


def environments(env: int | ArrayLike, envs: int | Ints | None, count: int) -> tuple[Ints, bool]:
    """Return the environments of rows, and whether they are those of each row. An array ``envs`` is returned as it
    is."""
    if envs.__class__ is int and env.__class__ is int and env == 0 and 0 < envs <= MOST_ENVS and not count % envs:
        return _first_environments(envs), False  # the common case, quickly
    if isinstance(envs, np.ndarray):
        return envs, False
    if envs is not None:
        width = whole("envs", envs, 1, MOST_ENVS)
        if count % width or not (env.__class__ is int and env == 0):
            raise ConfigError.of(
                "envs", envs, f"a number that divides the {count} rows is needed, and no env= beside it"
            )
        return _first_environments(width), False
    if env.__class__ is int and env == 0:
        return _ZERO, False
    given = np.asarray(env)
    if given.ndim == 0:
        return np.array([one_environment(given[()])]), False
    if given.shape != (count,):
        raise ConfigError(
            f"env={_said(given)}: the number of an environment, or [{count}] of them, are needed", option="env"
        )
    if given.dtype.kind not in "iu" or (given < 0).any() or (given >= MOST_ENVS).any():
        raise ConfigError(f"env={_said(given)}: whole numbers from 0 to {MOST_ENVS - 1} are needed", option="env")
    return given.astype(np.int64), len(given) > 1


@lru_cache(16)
def _first_environments(width: int) -> Ints:
    """Return 0 to ``width`` - 1, as an array that is known again."""
    found = np.arange(width)
    found.setflags(write=False)
    return found


_ZERO = _first_environments(1)


def end_codes(arrays: Mapping[str, Any], count: int, ends: ArrayLike | None, fields: Fields) -> np.ndarray | None:
    """Return how the episode ends with each row, as the columns say, or ``ends``; None if it goes on with every row.

    Raises:
        ConfigError: ``ends`` is no such array, or lets an episode go on that terminated.
    """
    codes = None
    for name, code in ((fields.done, TERMINATED), (fields.truncated, TRUNCATED), (fields.terminated, TERMINATED)):
        flags = arrays.get(name)
        if flags is not None and (np.count_nonzero(flags) or flags.size != count):
            codes = np.zeros(count, np.uint8) if codes is None else codes
            codes[_flags(name, flags, count)] = code
    if ends is None:
        return codes
    codes = np.zeros(count, np.uint8) if codes is None else codes
    given = np.asarray(ends)
    if given.shape != (count,) or given.dtype != bool:
        raise ConfigError(f"ends={_said(given)}: [{count}] bool is needed", option="ends")
    wrong = np.flatnonzero(~given & (codes == TERMINATED))
    if len(wrong):
        raise ConfigError(
            f"ends: the episode terminated with row {wrong[0]}, and is not said to end there", option="ends"
        )
    return np.where(given, np.where(codes == OPEN, TRUNCATED, codes), OPEN).astype(np.uint8)


def end_code(arrays: Mapping[str, Any], fields: Fields) -> int:
    """As :func:`end_codes`, of one row."""
    end = OPEN
    get = arrays.get
    terminated, truncated, done = get(fields.terminated), get(fields.truncated), get(fields.done)
    if terminated is not None and _flag(fields.terminated, terminated):
        return TERMINATED
    if done is not None and _flag(fields.done, done):
        end = TERMINATED
    if truncated is not None and _flag(fields.truncated, truncated):
        end = TRUNCATED
    return end


def _said(given: np.ndarray) -> str:
    """Return what an array is, in a word: its values may be millions."""
    return f"{given.dtype}{list(given.shape)}"


def _flags(name: str, flags: np.ndarray, count: int) -> np.ndarray:
    if flags.size != count:
        raise ConfigError(f"column {name}: shape {list(flags.shape[1:])}; one flag in each row is needed", option=name)
    set_: np.ndarray = flags.reshape(count) != 0
    return set_


def _flag(name: str, flag: Any) -> bool:
    if flag.__class__ is bool:
        return bool(flag)
    return bool(_flags(name, np.asarray(flag)[None], 1)[0])


def keys_of(keys: ArrayLike) -> Ints:
    """Return keys [n].

    Raises:
        ConfigError: they are no whole numbers.
    """
    where = np.asarray(keys).reshape(-1)
    if where.dtype.kind not in "iu" and len(where):
        raise ConfigError.of("keys", where.dtype, "whole numbers, such as batch.keys, are needed")
    return where.astype(np.int64, copy=False)


def check_known(keys: Ints, end: int, first: int = 0) -> None:
    """Refuse keys that are not all from ``first`` on and below ``end``.

    Raises:
        ConfigError: one was never the key of a row.
    """
    unknown = np.flatnonzero((keys < first) | (keys >= end))
    if len(unknown):
        raise ConfigError.of("keys", int(keys[unknown[0]]), "it was never the key of a row of this buffer")


def priorities_of(keys: ArrayLike, priorities: Any) -> tuple[Ints, np.ndarray]:
    """Return keys, and as many priorities.

    Raises:
        ConfigError: one of them is negative or not finite, or a key is no whole number, or the numbers differ.
    """
    where = keys_of(keys)
    if hasattr(priorities, "detach"):
        priorities = priorities.detach().cpu()
        if not priorities.is_complex():
            priorities = priorities.double().numpy()
    try:
        given = np.asarray(priorities)
        values = given.astype(np.float64, casting="same_kind" if given.size else "unsafe").reshape(-1)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"priorities: numbers are needed ({error})", option="priorities") from None
    if len(where) != len(values):
        raise ConfigError.of("priorities", len(values), f"as many as keys are needed: {len(where)}")
    if not len(values):
        return where, values
    if not (np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) < np.inf):  # what is no number is neither
        wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
        raise ConfigError.of(
            "priorities", float(values[wrong[0]]), f"finite numbers from 0 on are needed; number {wrong[0]} is none"
        )
    return where, values
