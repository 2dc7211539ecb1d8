"""Several streams of rows as one, in the order of their ids: of each key, one part after the other.

A stream is read block by block, and no more than a block of each is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.bodies import joined
from pipeline.buffer.transitions.compressed import packed_rows
from pipeline.errors import ConfigError
from pipeline.tools.kept_rows import Chunk

Ints = np.ndarray


class Mixed(NamedTuple):
    """Some rows of all streams, in their order, and the stream of each."""

    chunk: Chunk
    stream: Ints


class _Head:
    """What is left of a stream's newest chunk."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self.chunk: Chunk | None = None
        self.advance()

    def advance(self) -> None:
        self.chunk = next((chunk for chunk in self._chunks if len(chunk.key)), None)

    @property
    def last(self) -> tuple[int, int]:
        """The id of the last row that is known."""
        assert self.chunk is not None
        return int(self.chunk.key[-1]), int(self.chunk.part[-1])

    def take(self, upto: tuple[int, int]) -> Chunk:
        """Take the rows up to an id, that one included."""
        chunk = self.chunk
        assert chunk is not None
        key, part = upto
        begin, end = np.searchsorted(chunk.key, [key, key + 1])
        count = int(begin) + int(np.searchsorted(chunk.part[begin:end], part, side="right"))
        taken, left = chunk.at(slice(0, count)), chunk.at(slice(count, None))
        self.chunk = left if len(left.key) else None
        return taken


def mixed(streams: Sequence[Iterator[Chunk]], told: Callable[[Ints, Ints], str]) -> Iterator[Mixed]:
    """Yield the rows of all streams in the order of their ids; what is yielded is valid until the next is asked for.

    Args:
        streams: each in that order.
        told: names a row that two streams have, by its part and key, for people.

    Raises:
        ConfigError: two streams have one row.
    """
    heads = [_Head(stream) for stream in streams]
    before: tuple[int, int] | None = None
    while True:
        for head in heads:
            if head.chunk is None:
                head.advance()
        going = [number for number, head in enumerate(heads) if head.chunk is not None]
        if not going:
            return
        upto = min(heads[number].last for number in going)
        parts = [(number, heads[number].take(upto)) for number in going]
        parts = [(number, part) for number, part in parts if len(part.key)]
        found = _joined(parts)
        ids = found.chunk.key, found.chunk.part
        twice = np.flatnonzero((np.diff(ids[0]) == 0) & (np.diff(ids[1]) == 0))
        if len(twice) or before == (int(ids[0][0]), int(ids[1][0])):
            at = int(twice[0]) if len(twice) else 0
            raise ConfigError(told(ids[1][at], ids[0][at]), option="runs")
        before = int(ids[0][-1]), int(ids[1][-1])
        yield found


def _joined(parts: Sequence[tuple[int, Chunk]]) -> Mixed:
    if len(parts) == 1:
        number, chunk = parts[0]
        return Mixed(chunk, np.full(len(chunk.key), number))
    chunks = [chunk for _, chunk in parts]
    stream = np.repeat([number for number, _ in parts], [len(chunk.key) for chunk in chunks])
    key = np.concatenate([chunk.key for chunk in chunks])
    part = np.concatenate([chunk.part for chunk in chunks])
    order = np.lexsort((part, key))
    first = chunks[0]
    arrays = joined([chunk.arrays for chunk in chunks], order, _alike)
    extras = [np.concatenate([chunk.extras[at] for chunk in chunks])[order] for at in range(len(first.extras))]
    return Mixed(Chunk(arrays, part[order], key[order], extras, *_joined_aside(chunks, order)), stream[order])


def _alike(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows together: all compressed, if some are."""
    if any(each.dtype == object for each in parts):
        parts = [packed_rows(each, each.dtype) for each in parts]
    return np.concatenate(parts)


def _joined_aside(chunks: Sequence[Chunk], order: Ints) -> tuple[Ints, list[np.ndarray]]:
    begins = np.cumsum([0, *(len(chunk.key) for chunk in chunks)]).tolist()
    now = np.empty(len(order), np.int64)
    now[order] = np.arange(len(order))
    aside = now[np.concatenate([begin + chunk.aside for begin, chunk in zip(begins, chunks, strict=False)])]
    nexts = [np.concatenate([chunk.nexts[at] for chunk in chunks]) for at in range(len(chunks[0].nexts))]
    rising = np.argsort(aside)
    return aside[rising], [each[rising] for each in nexts]
