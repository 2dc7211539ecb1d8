"""Values of a state that somebody gives back, checked: what breaks an invariant would be found when a batch is wrong,
or never.

What is wrong raises ``ValueError``; whoever was given the state says where it came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Ints = np.ndarray
Floats = np.ndarray
MOST = 2**62
"""No count or key is as large: sums of two are still whole numbers of 64 bits."""


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return a whole number.

    Raises:
        ValueError: it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; a whole number from {least} to {most} is needed")
    return int(value)


def each_whole(name: str, values: Iterable[Any], least: int, most: int) -> None:
    """Refuse what is not all whole numbers in a range.

    Raises:
        ValueError: one is none, or out of range.
    """
    for value in values:
        whole(name, value, least, most)


def wholes(name: str, values: Any, least: int, most: int, *, count: int | None = None, first: int = 0) -> Ints:
    """Return an array [n] of whole numbers. ``first``: how many there are before these.

    Raises:
        ValueError: it is none; or there are not ``count`` of them; or one is out of range.
    """
    array = _flat(name, values, "iu", "whole numbers", count)
    if len(array) and not (array.min() >= least and array.max() <= most):  # no mask as long as none is needed
        wrong = np.flatnonzero((array < least) | (array > most))[0]
        raise ValueError(f"{name}[{first + wrong}] is {array[wrong]}; whole numbers from {least} to {most} are needed")
    return array


def masses(name: str, values: Any, *, count: int | None = None, first: int = 0) -> Floats:
    """Return an array [n] of numbers that rows are drawn in proportion to; the one that is given, if it is of float64.
    ``first``: how many there are before these.

    Raises:
        ValueError: it is none; or there are not ``count`` of them; or one is negative, or no number, or infinite, or
            their sum is.
    """
    array = _flat(name, values, "fiu", "numbers", count).astype(np.float64, copy=False)
    if len(array) and not (array.min() >= 0 and array.max() < np.inf):  # what is no number is neither
        wrong = np.flatnonzero(~((array >= 0) & np.isfinite(array)))[0]
        raise ValueError(f"{name}[{first + wrong}] is {array[wrong]}; finite numbers that are not negative are needed")
    with np.errstate(over="ignore"):
        total = np.add.reduce(array)
    if not np.isfinite(total):
        raise ValueError(f"{name}: the sum of all {len(array)} is infinite")
    return array


def check_masses(name: str, pieces: Iterable[tuple[int, Any]]) -> None:
    """As :func:`masses`, of an array that is there piece by piece, each with how many numbers came before."""
    count, total = 0, 0.0
    for first, piece in pieces:
        total += float(np.add.reduce(masses(name, piece, first=first)))
        count = first + len(piece)
    if not total < np.inf:
        raise ValueError(f"{name}: the sum of all {count} is infinite")


def mass(name: str, value: Any) -> float:
    """Return one of such numbers, as :func:`masses` does."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{name} is {value!r}; a number is needed")
    return float(masses(name, np.array([value], np.float64))[0])


def distinct(name: str, values: Ints) -> Ints:
    """Return an array [n] of numbers of which none is there twice.

    Raises:
        ValueError: one is.
    """
    names, counts = np.unique(values, return_counts=True)
    if len(names) != len(values):
        raise ValueError(f"{name}: {names[np.argmax(counts)]} is there {counts.max()} times")
    return values


def _flat(name: str, values: Any, kinds: str, what: str, count: int | None) -> np.ndarray:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kinds:
        given = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ValueError(f"{name} is {given}; an array of {what} [n] is needed")
    if count is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} values; {count} are needed")
    return values
