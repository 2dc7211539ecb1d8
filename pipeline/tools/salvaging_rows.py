"""Salvaging a buffer of transitions of one process: a new run out of the rows that are whole, with what the selection
has of each. Blocks are read one at a time, and twice: first to see which are whole, then to write their rows.

Rows lie in blocks, and a block is whole or not. Those that are kept follow each other in the new run: the newest have
the keys that they had, and others come closer. Where rows between two of an episode are gone, the later part is an
episode of its own that begins there, and the earlier one was left where it is; no sequence, return or stack of frames
reaches over the gap. If none is gone, blocks are copied as they lie.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.buffer.transitions.compressed import as_held, dense
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.buffer.transitions.layout import BEHIND, END, EPISODE, OPEN, PLACE
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.config import Fields
from pipeline.errors import Damaged
from pipeline.replay.feeding import schema_of
from pipeline.replay.next_obs import Aside
from pipeline.replay.salvage_choice import Chosen, payload_loss, unfollowed_loss
from pipeline.replay.state import LISTED, BufferState, Ends
from pipeline.replay.values import Values, WrittenBack
from pipeline.replay.whole_rows import keeps_selection
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, needed_blocks, read_blocks
from pipeline.tools.later_rows import LaterRows, Reads
from pipeline.tools.parts_of_episodes import TAIL, Marks, PartsOfEpisodes
from pipeline.tools.rows_with_gaps import GapsWriter, Kept, RowsOfBlock, of_each
from pipeline.tools.salvaged_run import Content, DamagedBlocks, Looked, Packing, SalvagedRun
from pipeline.tools.scattered import AsideRows, Heap
from pipeline.tools.writing import BlockWriter

Ints = np.ndarray


class Covered:
    """Which keys some blocks cover, as these come by rising first keys."""

    def __init__(self, begin: int, end: int) -> None:
        """Args:
        begin, end: no other keys count.
        """
        self._upto, self._end = begin, end
        self._ranges: list[tuple[int, int]] = []

    def add(self, block: Block) -> tuple[int, int]:
        """Take one in; return from which key on, and up to which, it has what none before it has."""
        begin, end = max(block.first, self._upto), min(block.first + block.count, self._end)
        if begin < end:
            self._ranges.append((begin, end))
            self._upto = end
        return begin, max(begin, end)

    def absent(self, begin: int, end: int) -> int:
        """Return how many keys from ``begin`` up to ``end`` none covers."""
        ranges = np.array(self._ranges, np.int64).reshape(-1, 2)
        edges = np.clip(ranges, begin, end)
        return end - begin - int((edges[:, 1] - edges[:, 0]).sum())


class RowsInOrder:
    """The rows of one generation, of which the oldest go first."""

    def __init__(
        self,
        layout: Layout,
        chosen: Chosen,
        state: BufferState,
        unknown: dict[str, Any],
        later: LaterRows | None = None,
    ) -> None:
        """Args:
        layout, chosen: the damaged run, and the generation.
        state, unknown: of the generation's buffer, and fields of it that this version does not know.
        later: rows that came after it, where rollouts fill the buffer.
        """
        self._layout, self._chosen, self._unknown, self._later = layout, chosen, unknown, later
        stored = chosen.stored
        listed = read_blocks(os.path.join(stored.folder, BLOCKS_FILE)) if state.columns and state.size else []
        listed = [block for block in listed if block.first < state.added]
        if later is not None:
            listed += later.blocks
            if state.columns is None:
                state = msgspec.structs.replace(state, columns=_columns_of(layout, chosen.run_tag, listed))
        self._saved = state
        self._state = state = state if later is None else later.state_of(state)
        self._oldest = state.added - state.size
        self._values = Values(stored)
        self._blocks = needed_blocks(listed, self._oldest) if state.columns else []
        self._columns = {each.name: each for each in state.columns or ()}
        self._nexts = state.next_obs_columns or [] if state.size else []
        self._twins = twins_of(self._nexts, Fields.of(stored.manifest.options.get("fields")))
        self._aside = self._values.aside(self._nexts)
        self._ends = Ends(state)
        self._listed = self._coming_back() if state.dropped else None
        self._packing = Packing(state.schema)
        self._whole: list[Block] = []
        self._kept = self._episodes = 0
        self._next_episode = state.next_episode
        self._left: list[Ints] = []  # keys of rows of which no end is known, and that nothing follows
        self._tails = np.empty(0, TAIL)  # rows that are whole and do not come along: they are without successor
        self._unfollowed = np.empty(0, np.int64)

    @property
    def _gone(self) -> bool:
        return self._kept < self._state.size or bool(self._state.dropped)

    def _coming_back(self) -> Ints:
        """Return the episodes whose rows a save has not dropped."""
        if LISTED not in self._values.names:
            self._state.coming_back({}, np.empty(0, np.int64))  # says what is wrong
        return np.unique(self._values.all(LISTED))

    def look(self) -> Looked:
        """See what is whole. Blocks, and changes nothing."""
        state, damaged = self._state, list[tuple[Block, Damaged]]()
        covered, parts = Covered(self._oldest, state.added), PartsOfEpisodes(sharing=bool(self._nexts))
        closed: list[np.ndarray] = []
        for block, found in self._each():
            if isinstance(found, Damaged):
                damaged.append((block, found))
                continue
            self._whole.append(block)
            self._packing.note(found.arrays)
            rows = self._rows(block, found.arrays, *covered.add(block))
            self._kept += len(rows.keys)
            self._next_episode = max(self._next_episode, int(rows.marks.episode.max(initial=-1)) + 1)
            closed.append(self._closed(parts.follow(rows.marks).closed))
        closed.append(self._closed(parts.finish()))
        self._tails = np.concatenate(closed)
        self._unfollowed = np.sort(self._tails["key"])
        self._kept -= len(self._unfollowed)
        self._episodes = parts.episodes
        losses = [self._loss(block, error, covered) for block, error in damaged]
        losses += unfollowed_loss(self._layout, self._chosen.stored, len(self._unfollowed))
        missing = state.held - self._kept
        if self._anew and not self._keeps_selection and (missing > 0 or self._later):  # a resume forgets it, if dropped
            losses.append(selection_loss(self._layout, self._chosen, state))
        split = parts.parts - parts.episodes if self._gone else 0
        return Looked(self._kept, missing, split, losses)

    def _each(self) -> Iterator[tuple[Block, Content | Damaged]]:
        if self._state.schema is None:
            return iter(())
        return DamagedBlocks(self._layout, self._chosen.run_tag, self._state.schema).each(self._blocks)

    def _whole_ones(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, Content]]:
        if self._state.schema is None:
            return iter(())
        return DamagedBlocks(self._layout, self._chosen.run_tag, self._state.schema).whole(blocks)

    def _closed(self, closed: np.ndarray) -> np.ndarray:
        if self._later is not None:
            self._left.append(closed["key"][~closed["ended"]])
        return self._without_successor(closed)

    def _without_successor(self, closed: np.ndarray) -> np.ndarray:
        """Return which of the newest rows of parts do not come along: the next observation of each lies in a row that
        is gone."""
        return closed[~closed["aside"]] if self._nexts else closed[:0]

    def _rows(self, block: Block, arrays: Arrays, begin: int, end: int) -> RowsOfBlock:
        """Return the rows of a block from one key up to another, but for those that a save has dropped."""
        part = slice(begin - block.first, end - block.first)
        arrays = {name: each[part] for name, each in arrays.items()}
        keys = np.arange(begin, end)
        aside = np.zeros(len(keys), bool)
        aside[self._aside.keys(begin, end) - begin] = True
        if self._later is not None:
            self._later.cap(arrays, begin)
        ended = self._ends.of(keys, arrays[END]) != OPEN
        marks = Marks(keys, arrays[EPISODE], arrays[BEHIND], arrays[PLACE], ended, aside, keys)
        rows = RowsOfBlock(keys, arrays, marks)
        if self._listed is None:
            return rows
        at = np.minimum(np.searchsorted(self._listed, arrays[EPISODE]), len(self._listed) - 1)
        listed = self._listed[at] == arrays[EPISODE] if len(self._listed) else np.zeros(len(keys), bool)
        return rows.at(listed)

    def _loss(self, block: Block, error: Damaged, covered: Covered) -> Loss:
        begin, end = max(self._oldest, block.first), min(self._state.added, block.first + block.count)
        what = f"rows {begin} to {end - 1}, {covered.absent(begin, end)} of which are in no other block"
        return payload_loss(self._layout, block, error, what)

    def gap_losses(self) -> list[Loss]:
        """Return the loss of rows of which nothing says where they lie, as their events are missing."""
        named, losses, expected = self._layout.journals, list[Loss](), self._oldest
        for block in [*self._blocks, None]:
            first = self._state.added if block is None else block.first
            if first > expected:
                what = f"{named}: no event, and no generation, says where rows {expected} to {first - 1} lie"
                path = os.path.relpath(named, self._layout.directory)
                losses.append(Loss(path=path, what=what, lost=f"rows {expected} to {first - 1}"))
            expected = max(expected, first if block is None else first + block.count)
        return losses

    # -- writing -----------------------------------------------------------------------------------------------

    def write(self, run: SalvagedRun) -> str:
        """Write them, once they were looked at, and return the id of the new run. Blocks."""
        if self._anew:
            return self._write_anew(run)
        if self._later is not None:
            return self._write_on(run, self._later)
        run.keep_values()
        return run.finish(self._state, self._unknown, run.copy(self._whole_ones(self._whole), self._packing))

    def _write_anew(self, run: SalvagedRun) -> str:
        with contextlib.ExitStack() as stack:
            heap = Heap(run.layout.directory)
            stack.callback(heap.close)
            writer = GapsWriter(run, self._state, self._extras(), self._values, self._kept, self._episodes)
            stack.callback(writer.close)
            kept_aside: list[Aside | AsideRows] = [self._aside, self._fetched(heap)]
            written = WrittenBack(self._state, self._values)
            covered = Covered(self._oldest, self._state.added)
            for block, content in self._whole_ones(self._whole):
                rows = self._rows(block, content.arrays, *covered.add(block))
                self._change(rows, written)
                rows = rows.at(~_among(rows.keys, self._unfollowed))
                if len(rows.keys):
                    writer.add(rows._replace(arrays=self._packing.packed(rows.arrays)), kept_aside)
            state = writer.finish()
            run.kept = writer.kept
        return run.finish(state, self._unknown, writer.blocks)

    @property
    def _anew(self) -> bool:
        """Whether rows get other keys, or others of what there is of them."""
        return self._gone or (self._later is not None and not self._goes_on)

    @property
    def _keeps_selection(self) -> bool:
        """Whether what the selection has of rows is known of all of them, and good for some alone."""
        return keeps_selection(self._state) and self._known_of_all

    @property
    def _known_of_all(self) -> bool:
        every = [self._extended(name) for name in self._of_rows()]
        return all(each is not None for each in every)

    @property
    def _goes_on(self) -> bool:
        """Whether everything that the generation says of rows holds for all that there are, where none is lost."""
        whole = not self._state.written_columns or self._oldest == self._saved.added - self._saved.size
        return whole and self._known_of_all and not self._nexts

    def _of_rows(self) -> list[str]:
        """Return the names of what the selection has of each row."""
        size = self._saved.size
        return [name for name in self._values.names if of_each(name) and self._values.count(name) == size]

    def _extended(self, name: str) -> Reads | None:
        file = self._values.file(name)
        return file if self._later is None else self._later.extended(file, name, self._saved)

    def _extras(self) -> list[tuple[str, Reads]]:
        """Return what the selection has of each row, where that is kept."""
        if not self._keeps_selection:
            return []
        every = [(name, self._extended(name)) for name in self._of_rows()]
        return [(name, reads) for name, reads in every if reads is not None]

    def _write_on(self, run: SalvagedRun, later: LaterRows) -> str:
        """Write all rows, of which none is lost, with those that came later: what the generation says stays true."""
        of_rows = self._of_rows()
        run.keep_values(but=of_rows)
        state, schema = self._state, self._state.schema
        for name in of_rows:
            reads, file = self._extended(name), run.values(name)
            assert reads is not None
            for begin in range(0, state.size, AT_ONCE):
                file.write(reads.read(begin, min(AT_ONCE, state.size - begin)).tobytes())
        before = [block for block in self._whole if block.first < later.begin]
        blocks = run.copy(self._whole_ones(before), self._packing)
        if schema is not None:
            writer = BlockWriter(run.segments, schema, max(later.begin, self._oldest))
            covered, written = Covered(max(later.begin, self._oldest), state.added), WrittenBack(state, self._values)
            for block, content in self._whole_ones([block for block in self._whole if block.first >= later.begin]):
                rows = self._rows(block, content.arrays, *covered.add(block))
                self._change(rows, written)
                if len(rows.keys):
                    writer.add(rows.arrays)
            writer.flush()
            blocks += writer.blocks
        run.kept = [Kept(self._oldest, state.added, self._oldest)]
        left = np.concatenate([*self._left, np.array(state.cut_keys, np.int64)])
        cuts = np.unique(left[left >= self._oldest]).tolist()
        state = msgspec.structs.replace(state, next_episode=self._next_episode, cut_keys=cuts)
        return run.finish(state, self._unknown, blocks)

    def _change(self, rows: RowsOfBlock, written: WrittenBack) -> None:
        """Make rows as they are now."""
        arrays = rows.arrays
        for name, column in self._columns.items():
            arrays[name] = as_held(arrays[name], column)
        if len(rows.keys):
            written.into(arrays, rows.keys)
        arrays[END] = self._ends.of(rows.keys, arrays[END])

    def _fetched(self, heap: Heap) -> AsideRows:
        """Return the next observations of rows whose successors do not come along, but are whole."""
        found = AsideRows(heap, self._nexts)
        wanted = self._tails[(self._tails["before"] >= 0) & ~self._tails["before_aside"]]
        wanted = wanted[np.argsort(wanted["key"])]
        keys = wanted["key"]
        covered = Covered(self._oldest, self._state.added)
        ranges = [(block, *covered.add(block)) for block in self._whole] if len(keys) else []
        having = {
            block.first: (low, high)
            for block, begin, end in ranges
            for low, high in [np.searchsorted(keys, (begin, end)).tolist()]
            if low < high
        }
        for block, content in self._whole_ones([block for block in self._whole if block.first in having]):
            own = slice(*having[block.first])
            rows = keys[own] - block.first
            observed = [dense(content.arrays[twin][rows], self._columns[twin]) for twin in self._twins.values()]
            found.put(wanted["before"][own], observed)
        return found


def _columns_of(layout: Layout, run_tag: int, blocks: Sequence[Block]) -> list[Column] | None:
    """Return the columns of rows, where no generation says them: those of the first block that is whole."""
    for _, found in PayloadReader(layout, run_tag, forgiving=True).each(block.place for block in blocks):
        with contextlib.suppress(Damaged):
            if not isinstance(found, Damaged):
                return list(schema_of(found, layout.segments).columns)
    return None


def _among(keys: Ints, some: Ints) -> Any:
    """Return which of some rising keys [n] are among others that rise: [n] bool."""
    low, high = np.searchsorted(some, (keys[0], keys[-1] + 1)) if len(keys) else (0, 0)
    found = np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(keys, some[low:high]), max(0, len(keys) - 1))
    found[at[keys[at] == some[low:high]]] = True
    return found


def selection_loss(layout: Layout, chosen: Chosen, state: BufferState) -> Loss:
    """Return what is lost of a selection that has an order of rows, if some of these are gone."""
    what = f"how far its order was: the selection, {state.selection}, begins anew"
    where = os.path.relpath(chosen.stored.folder, layout.directory)
    return Loss(path=where, what="it is of rows that are gone", lost=what)
