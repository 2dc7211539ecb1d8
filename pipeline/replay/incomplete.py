"""What a save makes of episodes that are not whole: *open* ones, which have no end yet, and *headless* ones, whose
first rows have gone. The buffer stays as it is; what is changed is what the generation says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.listed import HEADLESS, OPEN
from pipeline.checkpoint.manifest import ShardInfo
from pipeline.config import ReplayOptions
from pipeline.observe import events
from pipeline.replay.episode_ids import EpisodeIds, EpisodeTable
from pipeline.replay.state import BufferState

Ints = np.ndarray
Values = dict[str, np.ndarray]
WARN_SHARE = 0.1
"""A save that drops more than this share of the rows says so in a warning."""


class Settled(NamedTuple):
    """What a generation is to hold.

    Attributes:
        state, values: of the buffer.
        table: its episodes; None where they are not needed.
        shard: what the manifest says of it.
    """

    state: BufferState
    values: Values
    table: EpisodeTable | None
    shard: ShardInfo


def settled(
    ring: Ring, options: ReplayOptions, state: BufferState, values: Values, ids: EpisodeIds | None, rank: int = 0
) -> Settled:
    """Return what a generation is to hold by the option ``incomplete``. The caller has the buffer's lock.

    Args:
        ring: the buffer's.
        options: its options.
        state, values: as the buffer stands.
        ids: what names its episodes; None: they are named by their numbers, and listed where some are dropped.
        rank: that it is the shard of.
    """
    table = None
    if not ring.scattered and (ids is not None or options.incomplete == "drop"):
        table = (ids or EpisodeIds(0, 0)).table(ring)
    shard = ShardInfo(rank=rank, rows=ring.size, saved=ring.size, added=ring.added)
    if options.incomplete == "truncate":
        before = len(state.truncated_keys)
        state, values = _truncated(ring, options, state, values)
        shard = msgspec.structs.replace(shard, truncated=len(state.truncated_keys) - before)
        if table is not None:
            table = table._replace(flags=table.flags & ~OPEN)
    elif options.incomplete == "drop" and table is not None:
        state, table = _dropped(state, table)
        saved = ring.size - sum(state.dropped.values())
        shard = msgspec.structs.replace(shard, saved=saved, dropped=state.dropped)
    if table is not None:
        shard = msgspec.structs.replace(shard, episodes=len(table.uid))
        if ids is not None or state.dropped:
            values = values | table.values()
    return Settled(state, values, table, shard)


def _truncated(ring: Ring, options: ReplayOptions, state: BufferState, values: Values) -> tuple[BufferState, Values]:
    """Let open episodes end with their newest row, truncated."""
    ended = np.array([key for _, key, *_ in state.open_episodes if ring.alive(np.array([key]))[0]], np.int64)
    schema, name = ring.storage.schema, options.fields.truncated
    keys = sorted({*state.truncated_keys, *ended.tolist()})
    state = msgspec.structs.replace(state, open_episodes=[], truncated_keys=keys)
    if schema is None or not len(ended) or name not in schema.names or schema.column(name).torch_only is not None:
        return state, values
    return _with_flag(state, values, schema, name, np.sort(ended))


def _with_flag(state: BufferState, values: Values, schema: Schema, name: str, keys: Ints) -> tuple[BufferState, Values]:
    """Set a flag of rows, as if it had been written back."""
    column, columns = schema.column(name), list(state.written_columns)
    flags = np.ones((len(keys), *column.shape), column.bits)
    if name in columns:
        number = columns.index(name)
        path = next(each for each in values if each.startswith(f"written.{number}.values."))
        before = values[f"written.{number}.keys.int64"]
        left = ~np.isin(before, keys)
        flags = np.concatenate([values[path][left], flags])
        keys = np.concatenate([before[left], keys])
        order = np.argsort(keys, kind="stable")
        keys, flags = keys[order], flags[order]
    else:
        number = len(columns)
        columns.append(name)
    more = {f"written.{number}.keys.int64": keys, f"written.{number}.values.{flags.dtype.name}": flags}
    return msgspec.structs.replace(state, written_columns=columns), values | more


def _dropped(state: BufferState, table: EpisodeTable) -> tuple[BufferState, EpisodeTable]:
    """Leave out the episodes that are not whole."""
    rows = {
        "open": int(table.rows[table.flags & OPEN != 0].sum()),
        "headless": int(table.rows[(table.flags & OPEN == 0) & (table.flags & HEADLESS != 0)].sum()),
    }
    whole = np.flatnonzero(table.flags & (OPEN | HEADLESS) == 0)
    if not sum(rows.values()):
        return state, table
    return msgspec.structs.replace(state, dropped=rows), EpisodeTable(*(each[whole] for each in table))


def counts(shard: ShardInfo) -> dict[str, int]:
    """Return what the log and statistics say of a save."""
    return {
        "rows": shard.rows,
        "saved": shard.held,
        "dropped_open": shard.dropped.get("open", 0),
        "dropped_headless": shard.dropped.get("headless", 0),
        "truncated": shard.truncated,
    }


def warn_of_dropped(log: object, step: int, said: Mapping[str, int]) -> None:
    """Warn if a save has dropped much."""
    dropped = said["dropped_open"] + said["dropped_headless"]
    if dropped > WARN_SHARE * said["rows"]:
        warning = log.warning  # type: ignore[attr-defined]
        warning(events.ROWS_DROPPED, step=step, **said, share=round(dropped / said["rows"], 3))
