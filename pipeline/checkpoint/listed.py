"""What a generation of several shards lists of its episodes, so that a load can be planned without any payload.

A *step* of an episode is a transition here, a *row* one environment's lane in a shard, and a *stamp* an episode's
logical age. A uid, a stamp and an origin are given once, when an episode begins, and travel with it wherever it is
loaded: so a plan cannot tell how often it has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.errors import Damaged, NewerFormat

Ints = np.ndarray

OPEN, HEADLESS = 1, 2
"""Flags of an episode: it has no end yet; steps of its start are gone."""
AGAIN = 4
"""It is in a batch that was to be handed out again."""
WAITING, PARKED, PARTIAL = 8, 16, 32
"""It is an item of which nothing is in the buffer: it waits to be run; it has run, and waits for its reward; a part of
it is kept. Such a one is listed, and planned, as an episode of one step."""
ITEM = WAITING | PARKED | PARTIAL
_KNOWN = OPEN | HEADLESS | AGAIN | ITEM
_HELP = "Restore the file from a copy, or resume() an older generation."


class Stamp(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """How old an episode is, by no clock: the trainer's step at which it began, the rank that began it, and how many
    that rank had begun before."""

    step: int
    rank: int
    sequence: int


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an episode lies: a rank, a row of it, and the number of that row's environment among those of all ranks."""

    rank: int
    row: int
    env: int

    @classmethod
    def of(cls, rank: int, row: int, rows: int) -> Place:
        """Return the place that is a row of a rank, where each rank has ``rows``."""
        return cls(rank, row, rank * rows + row)


class Episode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An episode, a group, or an item, as the manifest lists it."""

    uid: int
    """Unique over all ranks, and never reused."""
    stamp: Stamp
    length: int
    """Steps that it has had."""
    steps: int
    """Those that are kept."""
    shard: int
    """The rank whose shard it lies in."""
    row: int = 0
    """The row of that rank."""
    flags: int = 0
    bytes: int = 0
    """Of payloads that are read for it."""
    origin: Place | None = None
    """Where it was made; None: where it lies."""


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wrote, as the manifest lists it. It is known by its number; its name is for whoever opens it."""

    rank: int
    name: str = ""
    bytes: int = 0
    digest: str = ""
    steps: int = 0
    episodes: int = 0
    rows: int = 1


class Listing(NamedTuple):
    """Episodes by column, int64 [n] each, in any order: a million of them are a few arrays. Names are those of
    :class:`Episode` and :class:`Stamp`."""

    uid: Ints
    step: Ints
    rank: Ints
    sequence: Ints
    length: Ints
    steps: Ints
    shard: Ints
    row: Ints
    flags: Ints
    bytes: Ints

    @classmethod
    def of(cls, episodes: Sequence[Episode] | Listing, where: str) -> Listing:
        """Return episodes by column.

        Raises:
            Damaged: they are no columns of one length, or a number has more than 64 bits.
        """
        if isinstance(episodes, cls):
            shapes = {each.shape for each in episodes}
            if len(shapes) != 1 or episodes.uid.ndim != 1 or any(each.dtype != np.int64 for each in episodes):
                raise Damaged(f"{where}: the columns of the episodes are not int64 of one length. {_HELP}")
            return episodes
        try:
            return cls(*(np.fromiter(map(get, episodes), np.int64, len(episodes)) for get in _GETTERS))
        except OverflowError:
            raise Damaged(f"{where}: an episode has a number of more than 64 bits. {_HELP}") from None

    @property
    def number(self) -> int:
        """How many episodes there are."""
        return len(self.uid)

    @property
    def items(self) -> Ints:
        """[n] Which are items of which nothing is in the buffer."""
        items: Ints = self.flags & ITEM != 0
        return items

    def at(self, places: Ints) -> Listing:
        """Return those at some places, in that order."""
        return Listing(*(each[places] for each in self))

    def in_age_order(self) -> Listing:
        """Return all of them, oldest first: by stamp, then by uid."""
        return self.at(self.age_order())

    def age_order(self) -> Ints:
        """Return the places of all of them, oldest first."""
        return np.lexsort((self.uid, self.sequence, self.rank, self.step))

    def check(self, shards: Sequence[Shard], where: str) -> None:
        """Compare what is listed of episodes with itself, and with what is listed of shards.

        Raises:
            Damaged: they do not fit together.
            NewerFormat: an episode has flags that this version does not know.
        """
        _check_shards(shards, where)
        count = len(shards)

        def refuse(bad: Ints, text: Callable[[int], str]) -> None:
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise Damaged(f"{where}: episode {self.uid[at]} of shard {self.shard[at]} {text(at)}. {_HELP}")

        unknown = np.flatnonzero((self.flags & ~_KNOWN) != 0)
        if len(unknown):
            at = int(unknown[0])
            raise NewerFormat(
                f"{where}: episode {self.uid[at]} has flags {self.flags[at]:#x}; this version knows {_KNOWN:#x}. "
                "Install a newer forebay."
            )
        refuse(self.uid < 0, lambda at: "has a uid below 0")
        stamp = (self.step, self.rank, self.sequence)
        refuse(np.minimum.reduce(stamp) < 0, lambda at: f"has the stamp {[int(each[at]) for each in stamp]}")
        refuse((self.shard < 0) | (self.shard >= count), lambda at: f"lies in none: shards 0 to {count - 1} are listed")
        rows = np.array([shard.rows for shard in _by_rank(shards)], np.int64)
        refuse(
            (self.row < 0) | (self.row >= rows[self.shard]),
            lambda at: f"lies in row {self.row[at]}; the shard has {rows[self.shard[at]]}",
        )
        refuse(
            (self.steps < 1) | (self.steps > self.length),
            lambda at: f"has {self.steps[at]} steps of {self.length[at]}",
        )
        refuse(self.items & (self.length != 1), lambda at: f"is an item, and has {self.length[at]} steps and not 1")
        refuse(self.bytes < 0, lambda at: f"has {self.bytes[at]} bytes")
        self._check_uids(where)
        self._check_sums(shards, where)

    def _check_uids(self, where: str) -> None:
        order = np.argsort(self.uid, kind="stable")
        twice = np.flatnonzero(np.diff(self.uid[order]) == 0)
        if len(twice):
            one, other = sorted(self.shard[order[twice[0] : twice[0] + 2]].tolist())
            uid = self.uid[order[twice[0]]]
            raise Damaged(f"{where}: episode {uid} is listed twice, in shard {one} and in shard {other}. {_HELP}")

    def _check_sums(self, shards: Sequence[Shard], where: str) -> None:
        if sum(self.steps.tolist()) >= 2**63:
            raise Damaged(f"{where}: the episodes have more steps than there can be. {_HELP}")
        steps, episodes = np.zeros(len(shards), np.int64), np.bincount(self.shard, minlength=len(shards))
        np.add.at(steps, self.shard, self.steps)
        for shard in _by_rank(shards):
            found = int(episodes[shard.rank]), int(steps[shard.rank])
            if found != (shard.episodes, shard.steps):
                raise Damaged(
                    f"{where}: shard {shard.rank} {shard.name!r} is said to have {shard.episodes} episodes with "
                    f"{shard.steps} steps, and {found[0]} with {found[1]} are listed. {_HELP}"
                )


_GETTERS = [attrgetter(f"stamp.{name}" if name in Stamp.__struct_fields__ else name) for name in Listing._fields]


def _by_rank(shards: Sequence[Shard]) -> list[Shard]:
    """Return shards by their number, however they came, and whatever their names sort as."""
    return sorted(shards, key=attrgetter("rank"))


def _check_shards(shards: Sequence[Shard], where: str) -> None:
    ranks = sorted(shard.rank for shard in shards)
    if not ranks or ranks != list(range(len(ranks))):
        listed = ", ".join(map(str, ranks)) or "none"
        raise Damaged(f"{where}: lists the shards {listed}; each from 0 on is needed, once. {_HELP}")
    for shard in shards:
        if not 1 <= shard.rows < 1 << 20:
            raise Damaged(f"{where}: shard {shard.rank} {shard.name!r} is said to have {shard.rows} rows. {_HELP}")
