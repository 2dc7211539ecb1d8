"""Prompts of a Parquet file, and prompts that are drawn by what there is to learn from them.

::

    pool = DifficultyPool(ParquetSource("train.parquet"))
    Task("math", source=pool, run=solve, group_size=8)
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline import SourceMark
from pipeline.buffer.transitions.sums import SumTree
from pipeline.errors import ConfigError, SourceError
from pipeline.interfaces import Source
from tasks.sources import SequenceSource


class ParquetSource(SequenceSource):
    """The rows of a Parquet file, or of several as one: each a dict of plain values. Needs ``forebay[tools]``.

    ::

        ParquetSource("train.parquet", columns=["prompt", "answer"])

    The columns are read when this is built, and held as Arrow has them: some bytes more than they hold. An item is made
    when it is asked for. For more than fits into memory, ``SequenceSource(datasets.load_from_disk(path))`` maps a
    folder of Hugging Face's ``datasets``. Where files lie is no part of what identifies the source: they may move.

    Args:
        path: of the file, or of several, in their order.
        columns: those that are wanted; None: all.

    Raises:
        ConfigError: pyarrow is missing.
        SourceError: a file cannot be read, lacks a column, or has another schema than the first.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
    ) -> None:
        paths = [os.fspath(each) for each in ([path] if isinstance(path, str | os.PathLike) else path)]
        if not paths:
            raise SourceError("no Parquet file was named")
        from pipeline.tools.formats.extras import needed

        pa, pq = (needed(name, "ParquetSource", "tools") for name in ("pyarrow", "pyarrow.parquet"))
        wanted = None if columns is None else list(columns)
        tables: list[Any] = []
        for each in paths:
            try:
                with pq.ParquetFile(each) as file:
                    names = file.schema_arrow.names
                    missing = [name for name in wanted or () if name not in names]
                    if missing:
                        raise SourceError(f"{each}: has no column {missing[0]!r}; it has {', '.join(names)}")
                    tables.append(file.read(columns=wanted))
            except (OSError, pa.ArrowException) as error:
                raise SourceError(f"{each}: cannot be read as Parquet ({error})") from error
            if not tables[-1].schema.equals(tables[0].schema):
                raise SourceError(f"{each}: has the columns {tables[-1].schema}, and {paths[0]} {tables[0].schema}")
        super().__init__(_Rows(pa.concat_tables(tables)), "parquet")
        self._named = paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")

    def __repr__(self) -> str:
        return f"ParquetSource({self._named!r})"


class _Rows:
    """The rows of an Arrow table by number."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts stand.

    Attributes:
        unseen: of which no group has finished yet.
        hopeless: of which the newest groups earned next to nothing (a solve rate below 0.05).
        easy: of which they earned next to everything (above 0.95).
        between: all others.
        rate: the mean solve rate of those that were seen; 0 if none was.
    """

    unseen: int
    hopeless: int
    easy: int
    between: int
    rate: float


class DifficultyPool:
    """Items of a source, drawn again and again, most often those that are solved every other time.

    A group of which all members earn the same teaches nothing, as its advantages are 0. Of an item that is solved at a
    rate r, rewards vary by r (1 - r), the variance of a Bernoulli variable; so its weight in a draw is
    ``floor + (1 - floor) * 4 r (1 - r)``, which is 1 at r = 1/2 and ``floor`` where nothing is left to learn. An item
    that was not seen yet weighs 1. A draw costs O(log n).

    What it has learnt needs no saving: the pipeline tells it all of it again in a resume (see
    :class:`pipeline.LearningSource`), and which items were drawn is in the journal. Draws hang on the order in which
    groups finish.

    Args:
        source: the items, finite. One that grows meanwhile does so for the next pool that is made of it.
        low, high: the rewards of what is not solved at all, and of what is; what lies beyond counts as one of them.
        floor: the least weight, above 0, so that nothing is given up for good.
        memory: how much of an item's rate is that of before when one more group of it has finished, from 0 to below 1.
        length: draws of an epoch; None: there is no end.

    Raises:
        ConfigError: an option is out of range, or the source is empty or endless.
    """

    def __init__(
        self,
        source: Source,
        *,
        low: float = 0.0,
        high: float = 1.0,
        floor: float = 0.05,
        memory: float = 0.5,
        length: int | None = None,
    ) -> None:
        count = source.length()
        if not count:
            raise ConfigError.of("source", source, "a pool needs items, and an end of them")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError.of("low", (low, high), "must be finite, and below high")
        if not 0 < floor <= 1:
            raise ConfigError.of("floor", floor, "must be above 0, and at most 1")
        if not 0 <= memory < 1:
            raise ConfigError.of("memory", memory, "must be from 0 to below 1")
        if length is not None and length < 1:
            raise ConfigError.of("length", length, "must be at least 1, or None for draws without an end")
        self._source, self._count, self._length = source, count, length
        self._low, self._high, self._floor, self._memory = low, high, floor, memory
        self._rates = np.full(count, np.nan)
        self._tree = SumTree(count, fast=False)  # the same sums, to the last bit, on every machine
        self._tree.fill(0, count, 1.0)

    # -- a source ------------------------------------------------------------------------------------------------------

    def item(self, index: int) -> Any:
        """Return item ``index`` of the source."""
        return self._source.item(index)

    def length(self) -> int | None:
        """Return how many draws an epoch has, or None."""
        return self._length

    def mark(self) -> SourceMark:
        """Return the source's mark, as that of a pool."""
        mark = self._source.mark()
        return msgspec.structs.replace(mark, kind=f"pool of {mark.kind}")

    def choose(self, seed: int, epoch: int, position: int) -> int:
        """Return an index, drawn in proportion to the weights as they are now. Changes nothing."""
        digest = hashlib.blake2b(f"pool/{seed}/{epoch}/{position}".encode(), digest_size=8).digest()
        fraction = (int.from_bytes(digest, "little") >> 11) / 2**53
        return int(self._tree.find(np.array([fraction * self._tree.total]))[0])

    def feedback(self, index: int, reward: float) -> None:
        """Take in the mean reward of a group of an item.

        Raises:
            SourceError: the pool has no such item, or the reward is no number.
        """
        if not 0 <= index < self._count:
            raise SourceError(f"{self!r} has {self._count} items, from 0; it was told of item {index}")
        if math.isnan(reward):
            raise SourceError(f"{self!r}: the reward of item {index} is not a number")
        solved = (min(max(reward, self._low), self._high) - self._low) / (self._high - self._low)
        before = self._rates[index]
        rate = solved if math.isnan(before) else self._memory * before + (1 - self._memory) * solved
        self._rates[index] = rate
        weight = self._floor + (1 - self._floor) * 4 * rate * (1 - rate)
        self._tree.set(np.array([index]), np.array([weight]))

    # -- what it knows -------------------------------------------------------------------------------------------------

    @property
    def rates(self) -> np.ndarray:
        """Solve rates, float64 [n] from 0 to 1; NaN where no group has finished yet. A copy."""
        return self._rates.copy()

    @property
    def weights(self) -> np.ndarray:
        """What each item weighs in a draw, float64 [n]. A copy."""
        return np.array(self._tree.values)

    def statistics(self) -> PoolStatistics:
        """Return how the items stand."""
        seen = self._rates[~np.isnan(self._rates)]
        hopeless, easy = int((seen < 0.05).sum()), int((seen > 0.95).sum())
        return PoolStatistics(
            unseen=self._count - len(seen),
            hopeless=hopeless,
            easy=easy,
            between=len(seen) - hopeless - easy,
            rate=float(seen.mean()) if len(seen) else 0.0,
        )

    def __repr__(self) -> str:
        return f"DifficultyPool({self._source!r})"
