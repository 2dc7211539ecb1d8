"""The first pages of the memory: what is committed, and what is about to change.

The counters lie there twice. Those that count are told by one word, the number of commits, which is also what another
process looks at to see whether anything has changed. A kill between any two instructions leaves the one or the other.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

import numpy as np

PAGE = mmap.PAGESIZE
MOST_ENVS = 1 << 20
"""How many environments there may be."""
TEXT_BYTES = 1 << 20
"""How long the columns, as text, may be."""
MOST_WAITING = 4096

COMMITS, DIRTY, INTENT, FLOOR, NOTES, PROCESSES, WAITING, IDENTITY, SAVE_NEXT, SAVE_END, SPILLED = range(11)
UNDO, UNDO_END, CAPTURED = range(11, 14)
"""Words: the number of commits; the number of the process that is inside, plus 1; the commit that :data:`FLOOR` and
:data:`NOTES` are about; up to which key, that one excluded, rows are about to be overwritten; how many notes there are;
how many processes have joined; how many of them wait; what tells this memory from others; of a save that goes on, the
next key, the last one, that one excluded, and up to which key rows were set aside; the commit that the old values in
:mod:`~pipeline.buffer.transitions.shared.undo` are about, and how many bytes these take; and how many of all rows are in
blocks on the disk, or on the way there."""

_WORDS = 64
_COPIES = (1024, 2048)
_WAITING_AT = 4096
_TEXT_AT = 1 << 16
_TAILS_AT = 2 << 20
_NOTES_AT = _TAILS_AT + 3 * 8 * MOST_ENVS
_MOST_NOTES = 2 * MOST_ENVS
VALUES_AT = _NOTES_AT + 4 * 8 * _MOST_NOTES
"""From here on lies what the header knows nothing of."""


class Counters(NamedTuple):
    """What is committed beside rows, priorities and open episodes."""

    added: int = 0
    size: int = 0
    cuts: int = 0
    stride: int = 1
    irregular: int = 0
    next_episode: int = 0
    envs: int = 0
    """For how many environments it is known whether they have an open episode."""
    counted_in: int = 0
    counted_out: int = 0
    stale_updates: int = 0
    shapes: int = 0
    """How often the columns were set, or forgotten."""
    text: int = 0
    """Bytes of the columns, as text; 0: there are none."""
    drawer: tuple[float, ...] = ()


_FORMAT = struct.Struct("=12q5d")


class Header:
    """The words, counters and notes of one memory, as one process has them mapped."""

    def __init__(self, descriptor: int, values: int) -> None:
        """Args:
        descriptor: of the memory.
        values: bytes for what lies behind the header, before the rows.
        """
        self.end = VALUES_AT + -(-values // PAGE) * PAGE
        if os.fstat(descriptor).st_size < self.end:
            os.ftruncate(descriptor, self.end)
        self.map = mmap.mmap(descriptor, self.end)
        whole = memoryview(self.map)
        self._whole = whole
        self.words = whole[: 8 * _WORDS].cast("q")
        self.waiting = np.frombuffer(self.map, np.int64, MOST_WAITING, _WAITING_AT)
        """The numbers of processes that wait."""
        self.tails = np.frombuffer(self.map, np.int64, 3 * MOST_ENVS, _TAILS_AT).reshape(3, -1)
        """[3, environments]: of the open episode: key of its newest row (-1: none), its number, place of that row."""
        self._tail_words = whole[_TAILS_AT:_NOTES_AT].cast("q")
        self._note_words = whole[_NOTES_AT:VALUES_AT].cast("q")
        self._notes = np.frombuffer(self.map, np.int64, 4 * _MOST_NOTES, _NOTES_AT).reshape(4, -1)

    # -- counters ----------------------------------------------------------------------------------------------

    def read(self) -> Counters:
        """Return the counters that are committed."""
        values = _FORMAT.unpack_from(self.map, _COPIES[self.words[COMMITS] & 1])
        return Counters._make([*values[:12], values[12:]])

    def commit(self, counters: Counters) -> None:
        """Let these be the counters from now on."""
        commits = self.words[COMMITS] + 1
        numbers = counters.drawer + (0.0,) * (5 - len(counters.drawer))
        _FORMAT.pack_into(self.map, _COPIES[commits & 1], *counters[:12], *numbers)
        self.words[COMMITS] = commits

    @property
    def text(self) -> memoryview:
        """Where the columns lie, as text."""
        return self._whole[_TEXT_AT : _TEXT_AT + TEXT_BYTES]

    # -- what is about to change -------------------------------------------------------------------------------

    @property
    def intends(self) -> bool:
        """Whether anything was noted since the last commit."""
        return self._noted or self.words[UNDO] == self.words[COMMITS] + 1

    @property
    def _noted(self) -> bool:
        return self.words[INTENT] == self.words[COMMITS] + 1

    def overwrite(self, upto: int) -> None:
        """Note that the rows of keys before ``upto`` are about to be lost."""
        words = self.words
        if words[INTENT] != words[COMMITS] + 1:
            self._begin(upto)
        elif upto > words[FLOOR]:
            words[FLOOR] = upto

    def _begin(self, floor: int) -> None:
        words = self.words
        words[FLOOR], words[NOTES] = floor, 0
        words[INTENT] = words[COMMITS] + 1  # last: now they count

    def note(self, envs: np.ndarray) -> None:
        """Note the open episodes of environments, each named once, before they change."""
        words = self.words
        if words[INTENT] != words[COMMITS] + 1:
            self._begin(0)
        begin = words[NOTES]
        end = begin + len(envs)
        assert end <= _MOST_NOTES, "a change of more open episodes than there can be"
        self._notes[0, begin:end] = envs
        self._notes[1:, begin:end] = self.tails[:, envs]
        words[NOTES] = end

    def note_one(self, env: int) -> None:
        """As :meth:`note`, of one environment, in a tenth of the time."""
        words = self.words
        if words[INTENT] != words[COMMITS] + 1:
            self._begin(0)
        at = words[NOTES]
        assert at < _MOST_NOTES
        tails, notes = self._tail_words, self._note_words
        notes[at] = env
        notes[at + _MOST_NOTES] = tails[env]
        notes[at + 2 * _MOST_NOTES] = tails[env + MOST_ENVS]
        notes[at + 3 * _MOST_NOTES] = tails[env + 2 * MOST_ENVS]
        words[NOTES] = at + 1

    def take_back(self) -> int:
        """Make the open episodes those that were noted; return the key before which rows are lost."""
        if not self._noted:
            return 0
        notes = self._notes[:, : self.words[NOTES]]
        # Of an environment that was noted twice, the older note counts.
        _, first = np.unique(notes[0], return_index=True)
        self.tails[:, notes[0, first]] = notes[1:, first]
        return self.words[FLOOR]
