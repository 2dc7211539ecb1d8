"""What is kept of a generation of which only some rows are whole: where they lie in blocks, and what becomes of what it
says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import KEPT_MARKS, decode_block
from pipeline.buffer.transitions.compressed import packed_rows
from pipeline.buffer.transitions.layout import MARKS
from pipeline.errors import Damaged
from pipeline.replay.state import BufferState
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader

Ints = np.ndarray
Moved = Callable[[Ints], tuple[Ints, Ints]]
"""Returns which of some keys [n] are of rows that are kept, [n] bool, and what these are called now."""


class Lying(NamedTuple):
    """Where rows lie on the disk.

    Attributes:
        at: [n] the place of each, oldest first, as blocks count them.
        order: in which they rise.
    """

    at: Ints
    order: Ints

    @classmethod
    def of(cls, state: BufferState, values: Mapping[str, Ints]) -> Lying:
        """Args:
        state, values: of the generation.
        """
        if state.remove == "fifo":
            at = np.arange(state.added - state.size, state.added)
            return cls(at, np.arange(state.size))
        at = values["pool.at.int64"]
        return cls(at, np.argsort(at))

    def rows(self, block: Block) -> Ints:
        """Return which rows lie in a block."""
        begin, end = np.searchsorted(self.at, (block.first, block.first + block.count), sorter=self.order)
        rows: Ints = self.order[begin:end]
        return rows


class WholeRows(NamedTuple):
    """Rows of a generation, oldest first.

    Attributes:
        arrays: columns and marks of all that there were.
        there: [n] which of them are whole.
        gone: blocks that are not, and why, in their order.
        lie: where rows lie in blocks.
    """

    arrays: dict[str, Ints]
    there: Ints
    gone: list[tuple[Block, Damaged]]
    lie: Lying


def read_whole(
    layout: Layout, reader: PayloadReader, state: BufferState, values: Mapping[str, Ints], blocks: Iterable[Block]
) -> WholeRows:
    """Read what is whole of the rows of a generation. Blocks, and takes the memory of all of them.

    Args:
        layout, reader: of the run.
        state, values: of the generation.
        blocks: that it lists.
    """
    found = WholeRows({}, np.zeros(state.size, bool), [], Lying.of(state, values))
    if state.schema is None:
        return found
    arrays = found.arrays
    arrays |= {each.name: np.zeros((state.size, *each.shape), each.bits) for each in state.schema.columns}
    arrays |= {name: np.zeros(state.size, MARKS[name]) for name in KEPT_MARKS}
    by_first = {block.first: block for block in blocks}
    needed = [block for block in by_first.values() if len(found.lie.rows(block))]
    for place, payload in reader.each(block.place for block in needed):
        block = by_first[place[0]]
        where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
        try:
            if isinstance(payload, Damaged):
                raise payload
            given = decode_block(payload, state.schema, block.count, where, block.sums)
        except Damaged as error:
            found.gone.append((block, error))
            continue
        rows = found.lie.rows(block)
        for name in arrays:
            take_rows(arrays, name, rows, given[name][found.lie.at[rows] - block.first], found.there)
        found.there[rows] = True
    found.gone.sort(key=lambda each: each[0].first)
    return found


def keeps_selection(state: BufferState) -> bool:
    """Whether what the selection has of rows is good for some of them alone."""
    return state.selection in ("", "uniform", "prioritized")


def of_selection(values: Mapping[str, Ints], there: Ints) -> dict[str, Ints]:
    """Return what the selection has of the rows that are ``there``."""
    return {
        name: each[there] if len(each) == len(there) else each
        for name, each in values.items()
        if name.startswith("selector.")
    }


def take_rows(arrays: dict[str, Ints], name: str, places: Ints, rows: Ints, there: Ints) -> None:
    """Put rows of a column into places. A column of which some rows are compressed is so in all.

    Args:
        arrays: by column.
        name: the column.
        places: [n] of the rows.
        rows: [n, ...] these.
        there: which places have rows already.
    """
    held = arrays[name]
    if rows.dtype == object and held.dtype != object:
        arrays[name] = np.empty(len(held), object)
        arrays[name][there] = packed_rows(held[there], held.dtype)
    elif held.dtype == object:
        rows = packed_rows(rows, rows.dtype)
    arrays[name][places] = rows


def written_of(values: Mapping[str, Ints], of: Moved) -> dict[str, Ints]:
    """Return what was written back into the rows that are kept, by their new keys."""
    found: dict[str, Ints] = {}
    for name, keys in values.items():
        if not (name.startswith("written.") and name.endswith(".keys.int64")):
            continue
        inside, found[name] = of(keys)
        prefix = name.removesuffix("keys.int64") + "values."
        for other, each in values.items():
            if other.startswith(prefix) and len(keys):
                found[other] = each.reshape(len(keys), -1)[inside].reshape(-1)
            elif other.startswith(prefix):
                found[other] = each
    return found


def without(state: BufferState, values: Mapping[str, Ints], there: Ints) -> tuple[BufferState, dict[str, Ints]]:
    """Return the state of a pool without the rows that are not ``there`` [n], oldest first, and the values that go with
    it. An order of keys begins anew.

    Every row gets a new key, above all that there were: as it lies in another slot, an old one would name another row.
    """
    keys, serials = values["pool.keys.int64"], values["pool.serials.int64"][there]
    floor, end, not_kept, next_at = state.pool
    floor = -(-max(floor, end) // state.capacity) * state.capacity
    kept = floor + np.arange(len(serials))
    order = np.argsort(keys)
    now = np.full(len(keys), -1)
    now[there] = kept

    def of(given: Ints) -> tuple[Ints, Ints]:
        at = order[np.minimum(np.searchsorted(keys, given, sorter=order), len(keys) - 1)]
        inside = (keys[at] == given) & there[at]
        return inside, now[at[inside]]

    state = msgspec.structs.replace(
        state,
        size=len(kept),
        cut_keys=of(np.array(state.cut_keys, np.int64))[1].tolist(),
        pool=[floor, floor + len(kept), not_kept, next_at],
    )
    places = {"keys": kept, "serials": serials, "at": np.full(len(kept), -1)}
    kept_values = {f"pool.{name}.int64": each for name, each in places.items()} | written_of(values, of)
    if keeps_selection(state):
        return state, kept_values | of_selection(values, there)
    return msgspec.structs.replace(state, selection="", selector={}), kept_values
