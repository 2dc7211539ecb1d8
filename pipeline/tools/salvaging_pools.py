"""Salvaging a buffer of transitions of which not the oldest go first: blocks that are whole are copied as they lie, and
what is said of their rows comes along.

No row knows another one there, and where each lies is said beside the blocks; so nothing in a block changes when others
are gone. Neither rows nor what is said of them is in memory, but for what was written back into rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.errors import Damaged
from pipeline.replay.pooling import block_of
from pipeline.replay.salvage_choice import Chosen, payload_loss
from pipeline.replay.state import BufferState
from pipeline.replay.values import Values
from pipeline.replay.whole_rows import keeps_selection
from pipeline.store.layout import Layout
from pipeline.store.segments import read_blocks
from pipeline.tools.salvaged_run import DamagedBlocks, Looked, Packing, SalvagedRun
from pipeline.tools.salvaging_rows import selection_loss

Ints = np.ndarray
_KEYS, _SERIALS, _AT = (f"pool.{name}.int64" for name in ("keys", "serials", "at"))


class PooledRows:
    """The rows of one generation."""

    def __init__(self, layout: Layout, chosen: Chosen, state: BufferState, unknown: dict[str, Any]) -> None:
        """Raises:
        Damaged: the generation does not say where its rows lie.
        """
        self._layout, self._chosen, self._state, self._unknown = layout, chosen, state, unknown
        self._values = Values(chosen.stored)
        counts = {self._values.count(name) for name in (_KEYS, _SERIALS, _AT)}
        if counts != {state.size} or len(state.pool) != 4:
            raise Damaged(
                f"{chosen.stored.folder}: does not say where the {state.size} rows lie. resume(step=...) goes on from "
                "an older generation"
            )
        listed = read_blocks(os.path.join(chosen.stored.folder, BLOCKS_FILE)) if state.columns else []
        by_first = {block.first: block for block in listed}
        self._blocks = [by_first[first] for first in sorted(by_first)]
        self._rows = self._counted()
        self._whole = np.zeros(len(self._blocks), bool)
        self._packing = Packing(state.schema)

    def _counted(self) -> Ints:
        """Return how many rows lie in each block."""
        counts = np.zeros(len(self._blocks), np.int64)
        for at in self._values.pieces(_AT):
            of = block_of(at, self._blocks)
            counts += np.bincount(of[of >= 0], minlength=len(counts))
        return counts

    @property
    def _kept(self) -> int:
        return int(self._rows[self._whole].sum())

    def _disk(self) -> DamagedBlocks:
        assert self._state.schema is not None
        return DamagedBlocks(self._layout, self._chosen.run_tag, self._state.schema)

    def look(self) -> Looked:
        """See what is whole. Blocks, and changes nothing."""
        losses: list[Loss] = []
        needed = np.flatnonzero(self._rows).tolist()
        if needed:
            found = self._disk().each([self._blocks[number] for number in needed])
            for number, (block, content) in zip(needed, found, strict=True):
                if isinstance(content, Damaged):
                    losses.append(payload_loss(self._layout, block, content, f"{self._rows[number]} rows"))
                else:
                    self._whole[number] = True
                    self._packing.note(content.arrays)
        missing = self._state.size - self._kept
        if missing and not keeps_selection(self._state):
            losses.append(selection_loss(self._layout, self._chosen, self._state))
        return Looked(self._kept, missing, 0, losses)

    def write(self, run: SalvagedRun) -> str:
        """Write them, once they were looked at, and return the id of the new run. Blocks."""
        whole = [self._blocks[number] for number in np.flatnonzero(self._whole).tolist()]
        blocks = run.copy(self._disk().whole(whole), self._packing) if whole else []
        if self._kept == self._state.size:
            run.keep_values()
            return run.finish(self._state, self._unknown, blocks)
        return run.finish(self._write_values(run), self._unknown, blocks)

    def _write_values(self, run: SalvagedRun) -> BufferState:
        """Write what is said of the rows that come along; return the state that goes with them.

        Every row gets a new key, above all that there were: as it lies in another slot, an old one would name another
        row.
        """
        state, values, keeps = self._state, self._values, keeps_selection(self._state)
        floor, end, not_kept, next_at = state.pool
        floor = -(-max(floor, end) // state.capacity) * state.capacity
        extras = [name for name in values.names if name.startswith("selector.")] if keeps else []
        own = [name for name in extras if values.count(name) == state.size]
        for name in set(extras) - set(own):
            run.keep(f"values/{name}")
        files = [(values.file(name), run.values(name)) for name in (_SERIALS, _AT, *own)]
        renamed, done = _Renamed(state, values), floor
        keys_now = run.values(_KEYS)
        for begin, keys, there in self._pieces():
            now = np.arange(done, done + int(there.sum()))
            done += len(now)
            keys_now.write(now.tobytes())
            renamed.note(keys[there], now)
            for file, grown in files:
                each = file.read(begin, len(keys))[there]
                grown.write(each.tobytes())
        renamed.write(run)
        return msgspec.structs.replace(
            state,
            size=self._kept,
            cut_keys=renamed.of(np.array(state.cut_keys, np.int64))[1].tolist(),
            pool=[floor, done, not_kept, next_at],
            selection=state.selection if keeps else "",
            selector=state.selector if keeps else {},
        )

    def _pieces(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield where some rows begin among all, their keys [n], and which of them come along [n]."""
        keys, at = self._values.file(_KEYS), self._values.file(_AT)
        for begin in range(0, self._state.size, AT_ONCE):
            count = min(AT_ONCE, self._state.size - begin)
            of = block_of(at.read(begin, count), self._blocks)
            there = of >= 0
            there[there] = self._whole[of[there]]
            yield begin, keys.read(begin, count), there


class _Renamed:
    """Keys of which more is said, and what they are now."""

    def __init__(self, state: BufferState, values: Values) -> None:
        self._values = values
        self._written = [f"written.{number}.keys.int64" for number in range(len(state.written_columns))]
        said = [values.all(name) for name in self._written]
        self._keys = np.unique(np.concatenate([np.array(state.cut_keys, np.int64), *said]))
        self._now = np.full(len(self._keys), -1)

    def note(self, keys: Ints, now: Ints) -> None:
        """Take in what the keys of some rows are now."""
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            found = self._keys[at] == keys
            self._now[at[found]] = now[found]

    def of(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return which of some keys are of rows that come along, and what they are now."""
        now = self._now[np.searchsorted(self._keys, keys)]
        return now >= 0, now[now >= 0]

    def write(self, run: SalvagedRun) -> None:
        """Write what was written back into the rows that come along."""
        for name in self._written:
            prefix = name.removesuffix("keys.int64") + "values."
            inside, now = self.of(self._values.all(name))
            run.values(name).write(now.tobytes())
            for other in [each for each in self._values.names if each.startswith(prefix)]:
                file, grown = self._values.file(other), run.values(other)
                width = self._values.count(other) // max(1, len(inside))
                for begin in range(0, len(inside), AT_ONCE):
                    chosen = inside[begin : begin + AT_ONCE]
                    each = file.read(begin * width, len(chosen) * width).reshape(len(chosen), width)
                    grown.write(each[chosen].tobytes())
