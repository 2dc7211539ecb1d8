"""Sources: any sequence, JSON lines, and seeds of environments.

What they guarantee: ``item(index)`` is the same at each call and in each process, nothing is drawn ahead, no
random state is held, and ``mark()`` costs a few items whatever the length.
"""

from __future__ import annotations

import hashlib
import operator
import os
from array import array
from collections.abc import Mapping
from typing import Any, Protocol, SupportsIndex

import msgspec
import numpy as np

from pipeline.errors import ConfigError, SourceError
from pipeline.records import SourceMark
from tasks.marks import mark_of

_BOM = b"\xef\xbb\xbf"


class Indexed(Protocol):
    """What has a length and gives items by index: a list, an array, a ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _checked(index: SupportsIndex, length: int | None, what: str) -> int:
    index = operator.index(index)
    if index < 0 or (length is not None and index >= length):
        held = "no end" if length is None else f"{length} items, from 0"
        raise SourceError(f"{what} has {held}; item {index} was asked for")
    return index


class SequenceSource:
    """The items of anything with ``len()`` and ``[index]``: a list, an array, a ``datasets.Dataset``.

    ::

        SequenceSource([{"question": "1+1", "answer": 2}], name="sums")

    Args:
        sequence: held, not copied. If it grows, the new items count from the next epoch.
        name: tells one source from another when a run is resumed.

    Raises:
        ConfigError: ``sequence`` is a mapping, a text, or has no length or no index.
    """

    def __init__(self, sequence: Indexed, name: str = "sequence") -> None:
        try:
            usable = len(sequence) >= 0 and hasattr(sequence, "__getitem__")
        except TypeError:
            usable = False
        if not usable or isinstance(sequence, (Mapping, str, bytes)):
            raise ConfigError(
                f"sequence of type {type(sequence).__name__}: needs len() and [0], [1], ... "
                "(of a generator or a set, make a list first)",
                option="sequence",
            )
        self._sequence = sequence
        self._name = name

    def item(self, index: int) -> Any:
        """Return ``sequence[index]``.

        Raises:
            SourceError: there is no such item.
        """
        return self._sequence[_checked(index, len(self._sequence), repr(self))]

    def length(self) -> int:
        """Return how many items there are now."""
        return len(self._sequence)

    def mark(self) -> SourceMark:
        """Return this source's name, length, and the digests of a few items."""
        return mark_of(self._name, self.length(), self.item)

    def __repr__(self) -> str:
        return f"SequenceSource({self._name!r})"


class JsonlSource:
    """The lines of a file in JSON Lines, each one item; blank lines are none.

    ::

        JsonlSource("train.jsonl")

    The file is read through once, when this is built, to find its lines: 8 bytes a line are kept in memory, and
    an item is read and parsed when it is asked for. UTF-8, with or without a byte order mark. Lines appended
    later are seen by the next ``JsonlSource``; the file is not to be changed in any other way meanwhile, and one
    that was is noticed where the lines moved.

    Raises:
        SourceError: the file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._offsets = array("Q")
        position = 0
        try:
            with open(self._path, "rb") as file:
                for line in file:
                    if line.strip() and not (position == 0 and not line.removeprefix(_BOM).strip()):
                        self._offsets.append(position)
                    position += len(line)
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read ({error.strerror or error})") from error

    def item(self, index: int) -> Any:
        """Return what line ``index`` (from 0, blank lines not counted) holds.

        Raises:
            SourceError: there is no such item, the line is not JSON, or the file changed; the message names the
                file and the line.
        """
        offset = self._offsets[_checked(index, len(self._offsets), repr(self))]
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, offset - 1))
                moved = offset > 0 and file.read(1) != b"\n"
                line = file.readline()
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read ({error.strerror or error})") from error
        if moved or not line.strip():
            raise SourceError(
                f"{self._path}: item {index} is no longer at byte {offset}; the file was changed since it was "
                "opened. Build the source again"
            )
        try:
            return msgspec.json.decode(line.removeprefix(_BOM) if offset == 0 else line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"{self._path}, line {self._line(offset)} (item {index}): not JSON: {error}") from error

    def length(self) -> int:
        """Return how many items the file had when this was built."""
        return len(self._offsets)

    def mark(self) -> SourceMark:
        """Return the length and the digests of a few items. The path is no part of it: a file may move."""
        return mark_of("jsonl", self.length(), self.item)

    def _line(self, offset: int) -> int:
        """Return the number, from 1, of the line that begins at ``offset``."""
        number = 1
        with open(self._path, "rb") as file:
            while offset > 0 and (chunk := file.read(min(offset, 1 << 20))):
                number += chunk.count(b"\n")
                offset -= len(chunk)
        return number

    def __repr__(self) -> str:
        return f"JsonlSource({self._path!r})"


class EnvSeeds:
    """Seeds for environments: item ``i`` is ``{"seed": s}``, and ``s`` depends on ``(seed, i)`` alone.

    ::

        seeds = EnvSeeds(42)
        seeds.item(2)  # the same whether 4 or 8 environments are used
        envs.reset(seed=seeds.take(8))

    The seeds are from 0 to 2**31 - 1, which every simulator takes, and the first 2**31 all differ: they are a
    permutation of the indices keyed by ``seed``, so that no two environments share a start by chance. The seeds
    of neighbouring base seeds have nothing in common, unlike ``seed + i``.

    Args:
        seed: any integer.
        length: items of an epoch. None: endless.

    Raises:
        ConfigError: ``length`` is negative.
    """

    def __init__(self, seed: int, length: int | None = None) -> None:
        if length is not None and length < 0:
            raise ConfigError.of("length", length, "must be at least 0, or None for an endless source")
        self._seed, self._length = operator.index(seed), length

    def item(self, index: int) -> dict[str, int]:
        """Return ``{"seed": s}``.

        Raises:
            SourceError: the index is negative, or not below the length.
        """
        index = _checked(index, self._length, repr(self))
        return {"seed": _permuted(index & (2**31 - 1), f"{self._seed}/{index >> 31}")}

    def take(self, count: int) -> list[int]:
        """Return the seeds of items 0 to ``count - 1``, as ``envs.reset(seed=...)`` takes them."""
        return [self.item(index)["seed"] for index in range(count)]

    def length(self) -> int | None:
        """Return how many items an epoch has, or None."""
        return self._length

    def mark(self) -> SourceMark:
        """Return the length and the digests of a few items."""
        return mark_of("env_seeds", self._length, self.item)

    def __repr__(self) -> str:
        return f"EnvSeeds({self._seed}, length={self._length})"


def _permuted(value: int, key: str) -> int:
    """Return where a permutation of 31-bit numbers, keyed by ``key``, puts ``value``.

    Four rounds of steps that each can be undone (add, multiply by an odd number, shift and xor; the constants
    are those of MurmurHash3's finalizer, public domain), so that no two values meet.
    """
    words = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), dtype="<u4").tolist()
    mask = 2**31 - 1
    for word in words:
        value = (value + word) & mask
        value ^= value >> 16
        value = (value * 0x85EBCA6B) & mask
        value ^= value >> 13
        value = (value * 0xC2B2AE35) & mask
        value ^= value >> 16
    return int(value)
