"""What a salvage of a buffer of transitions must come to, with all rows in memory at once: to be compared with.

Rows lie in blocks, and a block is whole or not. Those that are kept follow each other in the new run: the newest have
the keys that they had, and others come closer. Where rows between two of an episode are gone, the later part is an
episode of its own that begins there, and the earlier one was left where it is; no sequence, return or stack of frames
reaches over the gap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.compressed import unpacked
from pipeline.buffer.transitions.layout import BEHIND, END, EPISODE, OPEN, PLACE
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import BLOCKS_FILE, REPLAY
from pipeline.config import Fields
from pipeline.errors import Damaged
from pipeline.replay.loading import read_values
from pipeline.replay.salvage_choice import Chosen, choose_generation, payload_loss, unfollowed_loss
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.replay.whole_rows import Moved, keeps_selection, of_selection, read_whole, without, written_of
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, read_blocks

Ints = np.ndarray


class SavedRows(NamedTuple):
    """What is whole of a buffer, as its ``state_dict`` would be, and what is not.

    Attributes:
        chosen: the generation that it is of.
        state: what ``load_state_dict`` takes.
        kept, missing: rows.
        split: episodes that go on as another one after a gap.
        losses: each place that is not whole.
    """

    chosen: Chosen
    state: dict[str, Any]
    kept: int
    missing: int
    split: int
    losses: list[Loss]


def whole_rows(layout: Layout, *, step: int | None = None) -> SavedRows:
    """Read what is whole of a buffer's newest generation, or of the newest of ``step``. Blocks, and changes nothing;
    the rows are in memory then.

    Raises:
        UsageError: the run is of another kind, or its rows cannot be told apart from what would be lost.
        NotARun, Damaged, StoreError: as :func:`~pipeline.replay.salvage_choice.choose_generation`.
    """
    return _Rows(layout, choose_generation(layout, REPLAY, step)).result()


class _Rows:
    """The rows of one generation that are whole."""

    def __init__(self, layout: Layout, chosen: Chosen) -> None:
        self.layout, self.chosen, self.stored = layout, chosen, chosen.stored
        self.losses: list[Loss] = []
        self.state, _ = read_buffer_state(chosen.stored.folder)
        self._values = read_values(chosen.stored)

    def result(self) -> SavedRows:
        return self._pooled() if self.state.remove != "fifo" else self._in_order()

    def _pooled(self) -> SavedRows:
        """The rows of a pool: none of them knows another one."""
        state, values = self.state, self._values
        arrays, there = self._read()
        missing = state.size - int(there.sum())
        if missing:
            if not keeps_selection(state):
                self._forget_selection(state, told=True)
            state, values = without(state, values, there)
        return self._saved(state, values, arrays, np.flatnonzero(there), missing)

    def _in_order(self) -> SavedRows:
        state, values = self.state, self._values
        oldest = state.added - state.size
        arrays, there = self._read()
        if state.dropped:
            there &= state.coming_back(values, arrays[EPISODE])
        shared = self._with_next(arrays, there, values, oldest) if state.next_obs_columns else None
        kept = np.flatnonzero(there)
        first = state.added - len(kept)
        missing, gone = state.held - len(kept), state.size - len(kept)
        state, split = self._joined(arrays, there, kept, first)
        kept_values = written_of(values, moved(there, oldest, first)) if gone else dict(values)
        if gone and shared is not None:
            kept_values |= shared.values(first + np.cumsum(there) - 1)
        if gone and keeps_selection(state):
            kept_values |= of_selection(values, there)
        elif gone:
            self._forget_selection(state, told=missing > 0)
        return self._saved(state, kept_values, arrays, kept, missing, split)

    def _saved(
        self,
        state: BufferState,
        values: dict[str, Ints],
        arrays: dict[str, Ints],
        kept: Ints,
        missing: int,
        split: int = 0,
    ) -> SavedRows:
        state.size = len(kept)
        rows = {name: each[kept] for name, each in arrays.items()}
        return SavedRows(
            chosen=self.chosen,
            state={"state": msgspec.to_builtins(state), "values": values, "rows": rows},
            kept=len(kept),
            missing=missing,
            split=split,
            losses=[*self.chosen.losses, *self.losses],
        )

    def _read(self) -> tuple[dict[str, Ints], Ints]:
        """Return columns and marks of all rows that there were, and which of them are whole."""
        reader = PayloadReader(self.layout, self.chosen.run_tag, forgiving=True)
        blocks = read_blocks(os.path.join(self.stored.folder, BLOCKS_FILE))
        found = read_whole(self.layout, reader, self.state, self._values, blocks)
        for block, wrong in found.gone:
            self._note(block, wrong, found.there[found.lie.rows(block)])
        return found.arrays, found.there

    def _with_next(
        self, arrays: Mapping[str, Ints], there: Ints, values: Mapping[str, Ints], oldest: int
    ) -> SharedNext:
        """Do without rows whose next observation lies in one that is gone; return those of the others that are kept
        aside."""
        options = self.stored.manifest.options
        shared = SharedNext(self.state.next_obs_columns or [], Fields.of(options.get("fields")), values, oldest)
        left_out = shared.leave_out(arrays, there)
        self.losses += unfollowed_loss(self.layout, self.stored, left_out)
        return shared

    def _note(self, block: Block, error: Damaged, there: Ints) -> None:
        absent = int((~there).sum())
        if self.state.remove != "fifo":
            what = f"{absent} rows"
        else:
            begin = max(self.state.added - self.state.size, block.first)
            end = min(self.state.added, block.first + block.count)
            what = f"rows {begin} to {end - 1}, {absent} of which are in no other block"
        self.losses.append(payload_loss(self.layout, block, error, what))

    def _forget_selection(self, state: BufferState, *, told: bool) -> None:
        what = f"how far its order was: the selection, {state.selection}, begins anew"
        where = os.path.relpath(self.stored.folder, self.layout.directory)
        if told:  # a resume forgets it where rows were dropped
            self.losses.append(Loss(path=where, what="it is of rows that are gone", lost=what))
        state.selection, state.selector = "", {}

    def _joined(self, arrays: dict[str, Ints], there: Ints, kept: Ints, first: int) -> tuple[BufferState, int]:
        """Give the rows that are kept their new marks; return the state that goes with them, and how many episodes go
        on as another one."""
        state = msgspec.structs.replace(self.state, dropped={})
        if len(kept) == state.size:
            return state, 0
        if not len(kept):
            state.open_episodes, state.cut_keys, state.truncated_keys = [], [], []
            return state, 0
        now = np.cumsum(there) - 1  # by place among all, the place among those that are kept
        before = np.arange(state.size) - arrays[BEHIND].astype(np.int64)
        led = there & (arrays[BEHIND] > 0) & (before >= 0)
        led[led] = there[before[led]]
        follows = np.zeros(state.size, bool)
        follows[before[led]] = True  # rows that another one follows
        parts = _parts(kept, led, before)
        numbers, number = np.unique(parts, return_inverse=True)
        split = len(numbers) - len(np.unique(arrays[EPISODE][kept]))
        state.next_episode += split
        arrays[PLACE][kept] -= arrays[PLACE][kept[parts]]
        arrays[EPISODE][kept] = state.next_episode - len(numbers) + number
        arrays[BEHIND][~led] = 0
        arrays[BEHIND][led] = (now[led] - now[before[led]]).astype(arrays[BEHIND].dtype)
        self._end(state, arrays, there, follows, now, first)
        return state, split

    def _end(
        self, state: BufferState, arrays: dict[str, Ints], there: Ints, follows: Ints, now: Ints, first: int
    ) -> None:
        """Say of every episode that has no end where it was left, or that it goes on."""
        oldest = self.state.added - self.state.size

        def kept(key: int) -> bool:
            return key >= oldest and bool(there[key - oldest])

        goes_on = {key: env for env, key, _, _ in state.open_episodes if kept(key)}
        state.open_episodes = [
            [env, first + int(now[key - oldest]), int(arrays[EPISODE][key - oldest]), int(arrays[PLACE][key - oldest])]
            for key, env in goes_on.items()
        ]
        left = there & ~follows & (arrays[END] == OPEN)
        truncated = [key - oldest for key in state.truncated_keys if kept(key)]
        left[[*truncated, *(key - oldest for key in goes_on)]] = False
        left[[key - oldest for key in state.cut_keys if kept(key)]] = True
        state.cut_keys = (first + now[left]).tolist()
        state.truncated_keys = [first + int(now[at]) for at in truncated]


def _parts(kept: Ints, led: Ints, before: Ints) -> Ints:
    """Return of every row that is kept where, among those, the part of its episode begins that it is in."""
    place = np.full(len(led), -1, np.int64)
    place[kept] = np.arange(len(kept))
    leader = np.where(led[kept], place[np.maximum(before[kept], 0)], np.arange(len(kept)))
    while True:  # each round doubles how far back is looked
        further = leader[leader]
        if (further == leader).all():
            return leader
        leader = further


class SharedNext:
    """The next observations that are kept aside, where rows share them."""

    def __init__(self, columns: list[Column], fields: Fields, values: Mapping[str, Ints], oldest: int) -> None:
        """Args:
        columns: of these.
        fields: what they are called.
        values: of the generation.
        oldest: the key of the oldest row.
        """
        self._columns, self._twins = columns, twins_of(columns, fields)
        plain = {name.rpartition(".")[0]: each for name, each in values.items()}
        self._at = plain["next_obs.keys"] - oldest  # the place of the row of each
        self._nexts = [
            plain[f"next_obs.{number}"].view(column.bits).reshape(len(self._at), *column.shape)
            for number, column in enumerate(columns)
        ]

    def leave_out(self, arrays: Mapping[str, Ints], there: Ints) -> int:
        """Take rows that are ``there`` out of these, if their next observation lies in one that is not; the row before
        keeps theirs aside. Returns how many."""
        aside = np.zeros(len(there), bool)
        aside[self._at] = True
        before = np.arange(len(there)) - arrays[BEHIND].astype(np.int64)
        led = there & (arrays[BEHIND] > 0) & (before >= 0)
        led[led] = there[before[led]]
        followed = np.zeros(len(there), bool)
        followed[before[led]] = True
        gone = np.flatnonzero(there & ~followed & ~aside)
        after = gone[led[gone]]
        after = after[~aside[before[after]]]
        self._at = np.concatenate([self._at, before[after]])
        for number, column in enumerate(self._columns):
            rows = arrays[self._twins[column.name]][after]
            rows = unpacked(rows, column.shape, column.bits) if rows.dtype == object else rows
            self._nexts[number] = np.concatenate([self._nexts[number], rows])
        there[gone] = False
        self._at, self._nexts = self._at[there[self._at]], [each[there[self._at]] for each in self._nexts]
        return len(gone)

    def values(self, keys: Ints) -> dict[str, Ints]:
        """Return them as a generation holds them; ``keys``: by place, what rows are called now."""
        order = np.argsort(self._at)
        found = {"next_obs.keys.int64": keys[self._at[order]]}
        for number, (column, each) in enumerate(zip(self._columns, self._nexts, strict=True)):
            found[f"next_obs.{number}.{column.bits.name}"] = each[order].reshape(-1)
        return found


def moved(there: Ints, oldest: int, first: int) -> Moved:
    """Return what has become of keys, where those that are kept follow each other.

    Args:
        there: which rows are kept, oldest first.
        oldest: the key that the oldest of all had.
        first: the key of the oldest that is kept.
    """
    now = first + np.cumsum(there) - 1

    def of(keys: Ints) -> tuple[Ints, Ints]:
        inside = (keys >= oldest) & (keys < oldest + len(there))
        inside[inside] = there[keys[inside] - oldest]
        return inside, now[keys[inside] - oldest]

    return of
