"""Which episodes each rank is to hold after a load, and how ranks find out that they mean the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from pipeline.checkpoint.listed import Episode, Place, Shard
from pipeline.errors import ConfigError

_RULE = b"forebay plan 1\0"
"""What a digest begins with: another rule has another name, whatever it comes to."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is to hold."""

    rank: int
    uids: tuple[int, ...]
    """Oldest first."""
    rows: tuple[tuple[int, ...], ...]
    """The same by row, each oldest first."""
    again: tuple[int, ...]
    """Those that are handed out before the others, oldest first: they were in batches to be handed out again, and the
    batches are not made up again. Empty in an identity, in which they are."""
    opens: tuple[int, ...]
    """Shards that are opened for it."""
    steps: int
    """Of episodes, items not counted."""
    items: int
    """How many are items of which nothing is in the buffer."""
    bytes: int
    """Of payloads that are read for it."""

    @property
    def load(self) -> int:
        """What is balanced: steps, an item being one."""
        return self.steps + self.items

    @property
    def masked(self) -> tuple[int, ...]:
        """Rows that hold nothing: nothing can be sampled from them yet."""
        return tuple(row for row, uids in enumerate(self.rows) if not uids)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`~pipeline.checkpoint.reshard.plan` gives."""

    targets: tuple[Target, ...]
    identity: bool
    """Rank r takes shard r over as it is: open episodes go on, and random states count."""
    evicted: tuple[int, ...] = ()
    """Episodes for which there was no room, oldest first."""
    evicted_steps: int = 0

    def target(self, rank: int) -> Target:
        """Return what a rank is to hold.

        Raises:
            ConfigError: there is no such rank.
        """
        if rank.__class__ is not int or not 0 <= rank < len(self.targets):
            raise ConfigError.of(
                "rank", rank, f"the plan is for {len(self.targets)} targets: 0 to {len(self.targets) - 1} are allowed"
            )
        return self.targets[rank]

    @property
    def rows(self) -> int:
        """How many rows each target has."""
        return len(self.targets[0].rows)

    def place(self, rank: int, row: int) -> Place:
        """Return the ids of whatever lies in a row of a rank.

        Raises:
            ConfigError: there is no such rank or row.
        """
        self.target(rank)
        if row.__class__ is not int or not 0 <= row < self.rows:
            raise ConfigError.of("row", row, f"each target has {self.rows} rows: 0 to {self.rows - 1} are allowed")
        return Place.of(rank, row, self.rows)

    def places(self) -> dict[int, Place]:
        """Return where each episode lies now, by uid: row, environment and rank follow from that alone."""
        return {
            uid: place
            for target in self.targets
            for row, uids in enumerate(target.rows)
            for place in [Place.of(target.rank, row, self.rows)]
            for uid in uids
        }

    def ready(self, least: int = 1) -> bool:
        """Whether every target has ``least`` steps to sample from. It follows from the plan, so that all ranks say
        the same and none waits alone."""
        return not self._short(least)

    def why_not_ready(self, least: int = 1) -> str:
        """Return a sentence that says which targets are short of steps; empty if none is."""
        short = self._short(least)
        if not short:
            return ""
        episodes, count = sum(len(each.uids) - each.items for each in self.targets), len(self.targets)
        shown = ", ".join(f"{rank} ({self.targets[rank].steps})" for rank in short[:8]) + ", ..." * (len(short) > 8)
        return (
            f"{len(short)} of {count} targets have fewer than {least} steps: {shown}; {episodes} episodes were shared "
            "out. All ranks wait until each has enough: add rows, ask for less, or load on fewer ranks"
        )

    def _short(self, least: int) -> list[int]:
        return [target.rank for target in self.targets if target.steps < least]

    def digest(self) -> str:
        """Return 32 hexadecimal digits that two plans share only if they are the same, in whatever process they were
        made: they are of numbers alone, in one order and one width."""
        hashed = hashlib.blake2b(_RULE, digest_size=16)

        def feed(numbers: Iterable[int]) -> None:
            array = np.array(list(numbers), "<i8")
            hashed.update(len(array).to_bytes(8, "little"))
            hashed.update(array.tobytes())

        feed((len(self.targets), self.rows, self.identity, self.evicted_steps))
        feed(self.evicted)
        for target in self.targets:
            feed((target.rank, target.steps, target.items, target.bytes))
            for numbers in (target.uids, *target.rows, target.again, target.opens):
                feed(numbers)
        return hashed.hexdigest()


def relisted(planned: Plan, episodes: Iterable[Episode], shards: Sequence[Shard]) -> list[Episode]:
    """Return the episodes that a plan keeps as the shards of its targets list them, in the order in which they came.

    Shard and row are where an episode lies now; uid and stamp are what they were, and so is the origin, which says
    where an episode was made.
    """
    places, rows = planned.places(), {shard.rank: shard.rows for shard in shards}
    return [
        msgspec.structs.replace(
            each,
            shard=place.rank,
            row=place.row,
            origin=each.origin or Place.of(each.shard, each.row, rows[each.shard]),
        )
        for each in episodes
        if (place := places.get(each.uid)) is not None
    ]
