"""Sharing out the episodes of M shards to N targets: a pure function of what the manifest lists.

The rule: oldest first, each episode to the target with the least steps; ties go to the one with fewer episodes, then
to the lower number. Then the same inside each target, to its rows. What follows:

* for every prefix of the age order, so for all of them, loads differ by no more than the longest episode in it: no
  target gets only old data;
* a plan hangs on uids, stamps and steps alone. Where an episode lay, in what order it was listed, and what files are
  called has no part in it; there is no clock, no random number, and no order of a set or a dict;
* as many targets as shards are the identity, unless somebody asks for a ``rebalance``.

Ranks are planned first and rows after that: over all rows at once the loads of ranks could differ by as many longest
episodes as a rank has rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.checkpoint.listed import AGAIN, Episode, Ints, Listing, Shard
from pipeline.checkpoint.planned import Plan, Target
from pipeline.checkpoint.shares import Counted, Room, settled, settled_as_they_were, share_out
from pipeline.errors import ConfigError

MOST_TARGETS = 1 << 20


def plan(
    episodes: Sequence[Episode] | Listing,
    targets: int,
    rows: int | None = None,
    *,
    shards: Sequence[Shard],
    rebalance: bool = False,
    capacity: int | None = None,
    counted: Counted = "steps",
    evict_oldest: bool = False,
    where: str = "the manifest",
) -> Plan:
    """Return which target is to hold which episodes.

    Args:
        episodes: all that the manifest lists, in any order.
        targets: how many ranks there will be.
        rows: how many rows each of them will have; as many as the shards had, if it is not said.
        shards: all that the manifest lists, in any order, empty ones too.
        rebalance: whether episodes are shared out though there are as many targets as shards.
        capacity: how much a target holds; None: everything.
        counted: what of.
        evict_oldest: whether the oldest go where there is too much: of all; in an identity of the shard that is too
            large, as a rank then reads its own shard and no other.
        where: what messages call the manifest.

    Raises:
        ConfigError: an argument is out of range, or there is no room.
        Damaged, NewerFormat: the manifest does not fit together, or is of a newer version.
    """
    _check_count("targets", targets)
    room = _room(capacity, counted, evict_oldest)
    listing = Listing.of(episodes, where)
    listing.check(shards, where)
    identity = targets == len(shards) and not rebalance
    rows = _rows(rows, shards, where, identity=identity)
    aged = listing.in_age_order()
    kept, ranks = (settled_as_they_were if identity else settled)(aged, room, targets)
    held = aged.at(np.flatnonzero(kept))
    gone = aged.at(np.flatnonzero(~kept))
    return Plan(
        targets=tuple(
            _target(rank, held.at(places), rows, identity=identity) for rank, places in enumerate(_by(ranks, targets))
        ),
        identity=identity,
        evicted=tuple(gone.uid.tolist()),
        evicted_steps=int(gone.steps.sum()),
    )


def _target(rank: int, held: Listing, rows: int, *, identity: bool) -> Target:
    """Return what a rank is to hold, given oldest first."""
    lanes = held.row if identity else share_out(held.steps, rows)
    items = held.items
    return Target(
        rank=rank,
        uids=tuple(held.uid.tolist()),
        rows=tuple(tuple(held.uid[places].tolist()) for places in _by(lanes, rows)),
        again=() if identity else tuple(held.uid[held.flags & AGAIN != 0].tolist()),
        # As it is, a shard is opened though it has no episode: there is more in it than these.
        opens=(rank,) if identity else tuple(np.unique(held.shard).tolist()),
        steps=int(held.steps[~items].sum()),
        items=int(items.sum()),
        bytes=sum(held.bytes.tolist()),
    )


def _by(chosen: Ints, count: int) -> list[Ints]:
    """Return the places of everything that goes to the first, the second, ... of ``count``, each in its order."""
    order = np.argsort(chosen, kind="stable")
    return np.split(order, np.searchsorted(chosen[order], np.arange(1, count)))


def _rows(rows: int | None, shards: Sequence[Shard], where: str, *, identity: bool) -> int:
    saved = max(shard.rows for shard in shards)
    if rows is None:
        return saved
    _check_count("rows", rows)
    if identity and rows < saved:
        text = f"{where} lists shards of {saved}, which are taken over as they are; or give rebalance=True"
        raise ConfigError.of("rows", rows, text)
    return rows


def _room(capacity: int | None, counted: Counted, evict: bool) -> Room | None:
    if counted not in ("steps", "episodes"):
        raise ConfigError.of("counted", counted, "'steps', 'episodes' are allowed")
    if capacity is None:
        return None
    if capacity.__class__ is not int or not 1 <= capacity < 2**63:
        raise ConfigError.of("capacity", capacity, "a whole number from 1 on is needed, or None")
    return Room(capacity, counted, evict)


def _check_count(option: str, value: int) -> None:
    if value.__class__ is not int or not 1 <= value < MOST_TARGETS:
        raise ConfigError.of(option, value, f"a whole number from 1 to {MOST_TARGETS - 1} is needed")
