"""Rows that rollouts added to a buffer after a generation, as a resume of it would find them: they lie where journals
say, in blocks as those of the generation do.

A block says itself which rows follow each other. What came after it was written is known: no episode is open any more,
as whoever played it is gone, so that one without an end was left where it is; and weights are no newer than those that
were restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.layout import VERSION
from pipeline.checkpoint.played import Played
from pipeline.errors import Damaged
from pipeline.replay.state import BufferState
from pipeline.store.segments import Block


class Reads(Protocol):
    """An array, of which parts are read."""

    def read(self, begin: int, count: int) -> np.ndarray: ...


class LaterRows(NamedTuple):
    """What came after a generation.

    Attributes:
        begin, end: keys of the first of these rows, and that after the last.
        blocks: where they lie, by rising keys.
        version: the newest that rows of them may be of.
        unwritten: how many of them lie nowhere.
    """

    begin: int
    end: int
    blocks: list[Block]
    version: int
    unwritten: int

    @classmethod
    def of(cls, played: Played, state: BufferState, version: int) -> LaterRows:
        """Args:
        played: what the journals say.
        state: of the generation.
        version: that its weights are of.
        """
        blocks = [Block.at(event.first, event.count, at) for event, at in played.later if at.segment >= 0]
        end = max([state.added, *(event.first + event.count for event, _ in played.later)])
        nowhere = sum(event.count for event, at in played.later if at.segment < 0)
        blocks.sort(key=lambda block: block.first)
        return cls(state.added, end, [each for each in blocks if each.first >= state.added], version, nowhere)

    def check(self, where: str) -> LaterRows:
        """Return itself, if all rows are there.

        Raises:
            Damaged: some are not.
        """
        expected = self.begin
        for block in self.blocks:
            if block.first != expected:
                break
            expected = block.first + block.count
        if expected != self.end:
            raise Damaged(
                f"{where}: rows from {expected} on, which were added after the generation, are in no segment that the "
                "journals name; one is missing, or changed. forebay salvage makes a run of what is whole"
            )
        return self

    def state_of(self, state: BufferState) -> BufferState:
        """Return the buffer's state with them.

        Raises:
            Damaged: what it says of its limiter, or its selection, no buffer does.
        """
        try:
            return self._state_of(state)
        except (LookupError, TypeError, ValueError) as error:
            raise Damaged(f"the buffer's state does not fit together ({error!r})") from None

    def _state_of(self, state: BufferState) -> BufferState:
        more = self.end - self.begin
        size = min(max(state.capacity, state.size), state.size + more)
        limiter = {**state.limiter, "added": state.limiter["added"] + more} if state.limiter else {}
        selector = state.selector
        if more and "ever" in selector:
            value = self._new_value(state, self.end - size)
            most = {"most": max(float(selector.get("most", 0.0)), value)} if "most" in selector else {}
            selector = {**selector, "ever": max(float(selector["ever"]), value), **most}
        return msgspec.structs.replace(
            state, added=self.end, size=size, open_episodes=[], limiter=limiter, selector=selector
        )

    @staticmethod
    def _new_value(state: BufferState, oldest: int) -> float:
        """Return the priority of a new row, to the power of alpha: the largest that there is, as is usual."""
        selector = state.selector
        floor = float(selector.get("floor", 0.0)) if oldest < int(selector.get("floor_until", 0)) else 0.0
        return max(float(selector.get("most", 0.0)), floor) or 1.0

    def extended(self, values: Reads, name: str, state: BufferState) -> Reads | None:
        """Return what a selection has of each row, with what it has of new ones; None: that is not known.

        Args:
            values: of the generation's rows.
            name: of their file.
            state: of the generation.
        """
        kind, dtype = name.split(".")[1], np.dtype(name.rpartition(".")[2])
        if kind not in ("priorities", "used") and self.end > self.begin:
            return None
        now = self.state_of(state)
        new = self._new_value(state, now.added - now.size) if kind == "priorities" else 0
        gone = (now.added - now.size) - (state.added - state.size)
        return _Extended(values, gone, max(0, state.size - gone), np.array(new, dtype))

    def cap(self, arrays: Arrays, first: int) -> None:
        """Let the versions of rows from a key on be no newer than may be, if they came later."""
        if first >= self.begin:
            arrays[VERSION] = np.minimum(arrays[VERSION], self.version).astype(arrays[VERSION].dtype)


class _Extended:
    """Values of rows of which the oldest are gone and others have come."""

    def __init__(self, values: Reads, gone: int, known: int, new: np.ndarray) -> None:
        self._values, self._gone, self._known, self._new = values, gone, known, new

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return ``count`` values from ``begin`` on."""
        own = max(0, min(count, self._known - begin))
        parts: Sequence[np.ndarray] = [np.full(count - own, self._new)]
        if own:
            parts = [self._values.read(begin + self._gone, own), *parts]
        return np.concatenate(parts)
