"""The marks of rows that come into a new buffer: keys, and which row follows which."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.layout import BEHIND, CUT, OPEN, TERMINATED, TRUNCATED
from pipeline.config import Fields
from pipeline.errors import Damaged
from pipeline.tools.interchange.streams import END, EPISODE, KEY, PLACE, RANK, VERSION, About, Rows

_FIELDS = Fields()


class _Tail(NamedTuple):
    """The newest row of an episode that has no end yet."""

    key: int
    number: int
    place: int


class Linker:
    """Gives rows their marks, batch by batch."""

    def __init__(self, about: About, marks: tuple[str, ...], schema: Schema) -> None:
        self._about, self._given = about, frozenset(marks)
        self._names = schema.names
        self._first = -1
        self.size = 0
        self.next_key = about.next_key if about.contiguous else 0
        self.next_episode = about.next_episode if about.contiguous else 0
        self._tails: dict[tuple[int, int], _Tail] = {}  # by rank, and number in the stream
        self._cuts: list[np.ndarray] = []
        self._current = 0  # where the stream tells no episodes: that which goes on

    def marks_of(self, rows: Rows) -> Arrays:
        """Return the marks of the next rows.

        Raises:
            Damaged: keys do not follow each other, or the rows of an episode do not.
        """
        count = len(rows)
        keys = self._keys(rows)
        end = self._ends(rows)
        episodes = rows.marks[EPISODE] if EPISODE in self._given else self._counted(end)
        ranks = rows.marks[RANK] if RANK in self._given else np.zeros(count, np.int32)
        marks: Arrays = {
            KEY: keys,
            END: np.where(end == CUT, OPEN, end).astype(np.uint8),  # blocks know of ends; of cuts the state knows
            VERSION: rows.marks.get(VERSION, np.zeros(count, np.int32)),
            EPISODE: np.empty(count, np.int64),
            PLACE: rows.marks[PLACE].copy() if PLACE in self._given else np.empty(count, np.int32),
            BEHIND: np.zeros(count, np.int32),
        }
        self._cuts.append(keys[end == CUT])
        self._link(episodes, ranks, end, marks)
        return marks

    def _keys(self, rows: Rows) -> np.ndarray:
        count = len(rows)
        if self._about.contiguous:
            keys: np.ndarray = rows.marks[KEY]
            begin = int(keys[0]) if self._first < 0 else self._first + self.size
            if not np.array_equal(keys, np.arange(begin, begin + count)):
                raise Damaged(f"rows: the keys from {begin} on are said to follow each other, and do not")
        else:
            begin = max(0, self._first) + self.size
            keys = np.arange(begin, begin + count)
        if self._first < 0:
            self._first = begin
        self.size += count
        self.next_key = max(self.next_key, begin + count)
        return keys

    def _ends(self, rows: Rows) -> np.ndarray:
        if END in self._given:
            return rows.marks[END]
        end = np.zeros(len(rows), np.uint8)
        done = self._flag(rows, _FIELDS.done)
        truncated = self._flag(rows, _FIELDS.truncated)
        end[truncated] = TRUNCATED
        end[self._flag(rows, _FIELDS.terminated) | (done & ~truncated)] = TERMINATED
        return end

    def _flag(self, rows: Rows, name: str) -> np.ndarray:
        if name not in self._names:
            return np.zeros(len(rows), bool)
        flags: np.ndarray = rows.columns[name].reshape(len(rows), -1).astype(bool).max(axis=1, initial=False)
        return flags

    def _counted(self, end: np.ndarray) -> np.ndarray:
        """Number episodes that follow one after the other."""
        ended = np.cumsum(end != OPEN)
        numbers: np.ndarray = self._current + np.concatenate([[0], ended[:-1]]).astype(np.int64)
        self._current += int(ended[-1]) if len(end) else 0
        return numbers

    def _link(self, episodes: np.ndarray, ranks: np.ndarray, end: np.ndarray, marks: Arrays) -> None:
        order = np.lexsort((np.arange(len(episodes)), episodes, ranks))
        ids = np.stack([ranks[order], episodes[order]], axis=1)
        new = np.r_[True, (ids[1:] != ids[:-1]).any(axis=1)]
        if not self._about.contiguous:
            new[1:] |= end[order][:-1] != OPEN
            if PLACE in self._given:  # rows between them may be gone
                new[1:] |= np.diff(marks[PLACE][order]) != 1
        begins = np.flatnonzero(new)
        # Numbers are given in the order in which episodes appear.
        for begin, stop in sorted(zip(begins, np.r_[begins[1:], len(order)], strict=True), key=lambda p: order[p[0]]):
            self._episode(order[begin:stop], (int(ids[begin, 0]), int(ids[begin, 1])), end, marks)

    def _episode(self, which: np.ndarray, name: tuple[int, int], end: np.ndarray, marks: Arrays) -> None:
        keys = marks[KEY][which]
        tail = self._tails.pop(name, None)
        if PLACE not in self._given:
            marks[PLACE][which] = np.arange(len(which)) + (0 if tail is None else tail.place + 1)
        places = marks[PLACE][which]
        if tail is not None and places[0] != tail.place + 1 and not self._about.contiguous:
            self._cuts.append(np.array([tail.key]))
            tail = None
        self._check(name, places, end[which], tail)
        before = keys[:-1] if tail is None else np.r_[tail.key, keys[:-1]]
        behind = np.zeros(len(keys), np.int64)
        behind[len(keys) - len(before) :] = keys[len(keys) - len(before) :] - before
        if tail is None and places[0] > 0:  # its first rows are gone: the one before lies before all that there are
            behind[0] = keys[0] - self._first + 1
        number = tail.number if tail is not None else self._number(name)
        marks[EPISODE][which], marks[BEHIND][which] = number, behind
        if end[which[-1]] == OPEN:
            self._tails[name] = _Tail(int(keys[-1]), number, int(places[-1]))

    def _number(self, name: tuple[int, int]) -> int:
        if self._about.contiguous and EPISODE in self._given:
            self.next_episode = max(self.next_episode, name[1] + 1)
            return name[1]
        self.next_episode += 1
        return self.next_episode - 1

    @staticmethod
    def _check(name: tuple[int, int], places: np.ndarray, end: np.ndarray, tail: _Tail | None) -> None:
        steady = (np.diff(places) == 1).all() and (tail is None or places[0] == tail.place + 1)
        if not steady or places[0] < 0 or (end[:-1] != OPEN).any():
            raise Damaged(f"rows: those of episode {name[1]} do not follow each other; an end or a row is out of place")

    def open_episodes(self) -> list[list[int]]:
        """Return the episodes that go on: [environment, key of the newest row, number, its place] each."""
        return [each for each in self._about.open_episodes if self._goes_on(each)]

    def _goes_on(self, each: list[int]) -> bool:
        if not self._about.contiguous:
            return False
        tail = self._tails.get((0, each[2]))
        return tail is not None and tail.key == each[1]

    def cut_keys(self) -> list[int]:
        """Return the keys of the rows with which an episode was left where it was."""
        going = {each[1] for each in self.open_episodes()}
        left = [tail.key for tail in self._tails.values() if tail.key not in going]
        return sorted({*np.concatenate([*self._cuts, np.empty(0, np.int64)]).tolist(), *left})
