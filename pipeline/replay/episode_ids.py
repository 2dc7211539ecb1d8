"""What names the episodes of a shard over all ranks and lives, and how old they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.layout import EPISODE, PLACE
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.listed import HEADLESS, OPEN
from pipeline.errors import ConfigError, Damaged

Ints = np.ndarray
_NUMBER_BITS, _RANK_BITS = 36, 12
MOST_RANKS = 1 << _RANK_BITS
"""With more, names of two ranks would be the same."""
_PREFIX = "episodes."
_SPARSE = 1 << 16


class EpisodeTable(NamedTuple):
    """The episodes of a shard of which rows are there, by column, [n] each, by rising number."""

    number: Ints
    """That which the rows' marks have."""
    uid: Ints
    age: Ints
    """About how many rows each rank had added when it began, since the run began."""
    length: Ints
    """Rows that it has had."""
    rows: Ints
    """Those that are there."""
    flags: Ints

    def values(self) -> dict[str, np.ndarray]:
        """Return it as what a generation holds of it: arrays by the names of their files."""
        kinds = (np.int64, np.int64, np.int64, np.int32, np.int32, np.uint8)
        arrays = {name: each.astype(kind) for (name, each), kind in zip(self._asdict().items(), kinds, strict=True)}
        return {f"{_PREFIX}{name}.{each.dtype.name}": each for name, each in arrays.items()}

    @classmethod
    def none(cls) -> EpisodeTable:
        """Return a table without episodes."""
        return cls(*(np.empty(0, np.int64) for _ in cls._fields))

    @classmethod
    def of(cls, values: dict[str, np.ndarray], where: str) -> EpisodeTable:
        """Take back what :meth:`values` gave, among others.

        Raises:
            Damaged: it is not there, or does not fit together.
        """
        own = {name: each for name, each in values.items() if name.startswith(_PREFIX)}
        found = {name.rpartition(".")[0]: each.astype(np.int64) for name, each in own.items()}
        try:
            table = cls(*(found[f"{_PREFIX}{name}"] for name in cls._fields))
        except KeyError as error:
            raise Damaged(f"{where}: the list of its episodes has no {error}. resume() an older generation") from None
        if len({len(each) for each in table}) != 1 or (np.diff(table.number) <= 0).any():
            raise Damaged(f"{where}: the list of its episodes does not fit together. resume() an older generation")
        return table

    def at(self, numbers: Ints, where: str) -> Ints:
        """Return the positions of episodes in the table.

        Raises:
            Damaged: one is not there.
        """
        places = Numbers(self.number).find(numbers)
        if len(numbers) and places.min() < 0:
            raise unlisted(where)
        return places

    @classmethod
    def of_rows(cls, numbers: Ints, places: Ints, opened: Ints) -> EpisodeTable:
        """Return the table of rows [n] by their marks, where a generation has none: episodes are named by their
        numbers, and are as old. ``opened``: the numbers of those that have no end yet."""
        number, of = np.unique(numbers, return_inverse=True)
        first, last = np.full(len(number), np.iinfo(np.int64).max), np.zeros(len(number), np.int64)
        np.minimum.at(first, of, places)
        np.maximum.at(last, of, places)
        flags = np.where(first > 0, HEADLESS, 0) | np.where(np.isin(number, opened), OPEN, 0)
        return cls(number, number, number, last + 1, last + 1 - first, flags)


def unlisted(where: str) -> Damaged:
    """Return the error about rows of unknown episodes."""
    return Damaged(f"{where}: holds rows of episodes that the list of them has not. resume() an older generation")


class Numbers:
    """Finds numbers among rising ones."""

    def __init__(self, numbers: Ints) -> None:
        self._numbers = numbers
        self._base = int(numbers[0]) if len(numbers) else 0
        span = int(numbers[-1]) - self._base + 1 if len(numbers) else 0
        self._table: Ints | None = None  # by number, from `_base` on
        if span <= 4 * len(numbers) + _SPARSE:
            self._table = np.full(span + 2, -1, np.int64)  # of what lies before and behind too
            self._table[numbers - self._base + 1] = np.arange(len(numbers))

    def find(self, wanted: Ints) -> Ints:
        """Return the positions of numbers; -1: not there."""
        if self._table is not None:
            places: Ints = self._table[np.clip(wanted - (self._base - 1), 0, len(self._table) - 1)]
            return places
        at = np.minimum(np.searchsorted(self._numbers, wanted), len(self._numbers) - 1)
        return np.where(self._numbers[at] == wanted, at, -1)


class Ids:
    """Names what one rank has by numbers, episodes or trajectories: those of an earlier life keep the name and age that
    they had."""

    def __init__(
        self, life: int, rank: int, *, age: int = 0, begin: int = 0, known: EpisodeTable | None = None, named: int = 0
    ) -> None:
        """Args:
        life: the incarnation of the run: unique for each life.
        rank: that makes them.
        age: of whatever begins now; above that of all that began before.
        begin: from this number on, they are of this life.
        known: those before.
        named: how many names of this life they have already.
        """
        self._prefix, self._named = prefix_of(life, rank), named
        self.begin, self._at_first, self._known = begin, age, known

    def age_after(self, since: int) -> int:
        """Return the age of what begins when so much has been added in this life."""
        return self._at_first + since

    def of(self, numbers: Ints, since: Ints) -> tuple[Ints, Ints]:
        """Return names and ages; ``since``: how much had been added in this life before each."""
        uid = self._prefix | (numbers - self.begin + self._named)
        age = self._at_first + np.maximum(since, 0)
        old = np.flatnonzero(numbers < self.begin)
        if len(old):
            assert self._known is not None
            at = self._known.at(numbers[old], "the buffer")
            uid[old], age[old] = self._known.uid[at], self._known.age[at]
        return uid, age


class EpisodeIds(Ids):
    """Names the episodes of one rank."""

    def __init__(
        self,
        life: int,
        rank: int,
        *,
        age: int = 0,
        ring: Ring | None = None,
        known: EpisodeTable | None = None,
        named: int = 0,
    ) -> None:
        """Args:
        life, rank, age, known, named: as of :class:`Ids`.
        ring: the rank's rows, as they were when this life began; None: there were none.
        """
        begin, self._from = (0, 0) if ring is None else (ring.episodes.next, ring.added)
        super().__init__(life, rank, age=age, begin=begin, known=known, named=named)

    def age(self, ring: Ring) -> int:
        """Return the age of what begins now."""
        return self.age_after(ring.added - self._from)

    def table(self, ring: Ring) -> EpisodeTable:
        """Return the table of a shard; the caller has the buffer's lock. Costs by the number of episodes."""
        if ring.storage.schema is None:
            return EpisodeTable.none()
        ring.know_marks()
        lengths, oldest = ring.episodes.lengths, ring.oldest
        numbers = lengths.numbers()
        length, first = lengths.of(numbers).astype(np.int64), lengths.first(numbers)
        skipped = np.where(first >= oldest, 0, length)  # of those that began before, rows may be there all the same
        headless, places = _headless(ring)
        at = np.searchsorted(numbers, headless)
        skipped[at] = places
        there = np.flatnonzero(skipped < length)
        numbers, length, first, skipped = numbers[there], length[there], first[there], skipped[there]
        flags = np.where(skipped > 0, HEADLESS, 0) | np.where(np.isin(numbers, ring.episodes.open()), OPEN, 0)
        uid, age = self.of(numbers, first - self._from)
        return EpisodeTable(numbers, uid, age, length, length - skipped, flags)


def values_of_rows(uid: Ints, age: Ints) -> dict[str, np.ndarray]:
    """Return what names rows that are of no episode, oldest first, as what a generation holds of it."""
    return {"pool.uid.int64": uid, "pool.age.int64": age}


def table_of_rows(values: Mapping[str, np.ndarray], rank: int, where: str, *, named: bool = False) -> EpisodeTable:
    """Return rows that are of no episode as if each were one: by what a generation holds of them.

    Args:
        values: of the generation.
        rank: whose.
        where: for messages.
        named: whether they must have been named when they were saved; else they get names here.

    Raises:
        ConfigError: they were not.
        Damaged: they do not fit together.
    """
    serials = values["pool.serials.int64"]
    uid, age = values.get("pool.uid.int64"), values.get("pool.age.int64")
    if uid is None or age is None:
        if named:
            check_named(where, named=False)
        uid, age = prefix_of(0, rank) | serials, serials  # no life has this number
    if not len(uid) == len(age) == len(serials) or (np.diff(serials) <= 0).any():
        raise Damaged(f"{where}: the names of its rows do not fit together. resume() an older generation")
    ones = np.ones_like(serials)
    return EpisodeTable(serials, uid, age, ones, ones, np.zeros_like(serials))


def check_named(where: str, *, named: bool) -> None:
    """Refuse rows that other ranks are to have, and which were not named when they were saved.

    Raises:
        ConfigError: they were not.
    """
    if not named:
        raise ConfigError(
            f"{where}: saved by a version that gave rows no names where others than the oldest go first: they are "
            "loaded by as many ranks as saved them. Save them once more with those",
            option="remove",
        )


def _headless(ring: Ring) -> tuple[Ints, Ints]:
    """Return the numbers of the episodes whose first rows are gone, while others are there, and the least place of
    these."""
    # Where all rows follow at one distance, each environment has a row among the oldest so many.
    keys = np.arange(ring.oldest, min(ring.added, ring.oldest + ring.stride) if ring.stride else ring.added)
    numbers, places = ring.mark(EPISODE, keys), ring.mark(PLACE, keys)
    found, at = np.unique(numbers, return_index=True)  # the first of each is the oldest
    least = places[at].astype(np.int64)
    return found[least > 0], least[least > 0]


def prefix_of(life: int, rank: int) -> int:
    """Return the name of the first episode of a rank in a life."""
    return (life << (_NUMBER_BITS + _RANK_BITS)) | (rank << _NUMBER_BITS)


def check_ranks(option: str, size: int) -> None:
    """Refuse more ranks than there are names for.

    Raises:
        ConfigError: there are.
    """
    if size > MOST_RANKS:
        raise ConfigError.of(option, size, f"{MOST_RANKS} ranks at the most can have a buffer together")


def maker(uid: Ints) -> tuple[Ints, Ints]:
    """Return which rank made episodes, and how many it had made before in that life."""
    return (uid >> _NUMBER_BITS) & ((1 << _RANK_BITS) - 1), uid & ((1 << _NUMBER_BITS) - 1)
