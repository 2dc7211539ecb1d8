"""The marks of a block that is like the one before it: the same environments, and as many steps of each.

This is how most rows come. Their marks then differ from those of the block before by a constant, but for the few whose
episode ended or began, and need not be worked out from nothing.
:class:`~pipeline.buffer.transitions.episodes.Episodes` keeps one; whatever else happens, it takes the tails of the
episodes back, and works as it does without.
"""

from __future__ import annotations

import numpy as np

from pipeline.buffer.transitions.layout import AHEAD, BEHIND, END, EPISODE, MARKS, OPEN, PLACE, SERIAL, VERSION
from pipeline.config.replay import MOST_ROWS

Ints = np.ndarray
FEW = 16
"""Ends, or beginnings, within a block up to which they are looked at one by one."""
_LOW = 0xFFFFFFFF  # the bits of a key that its row's serial has
_WORDS = np.dtype("<i8")


class Steady:
    """The marks of the next block, whose row t * E + e is of environment ``envs[e]``.

    Attributes:
        envs: [E], the very array that the next block has to come with.
        count: rows of a block.
        key: of the first row of the next block.
        marks: [count] of :data:`MARKS`: those of the next block; :meth:`change` completes them.
        plain: the same memory, without fields: copying it is one run of bytes for each row.
        links: how far each row of the step before lies before its next row, [E]; or E, if that goes for all.
        starts: the positions of environments whose next row begins an episode.
        version: of the weights.
        opened: (number, key of the first row) of the episodes that began with the changes, in order.
        closed: (number, rows) of those that ended.
    """

    def __init__(self, key: int, envs: Ints, count: int, tails: Ints) -> None:
        """``tails`` [3, E]: key of the newest row of each, or -1; number of its episode; place of that row."""
        width = len(envs)
        self.envs, self.width, self.count, self.key, self.version = envs, width, count, key, 0
        self.marks = np.zeros(count, MARKS)
        self.plain = self.marks.view(f"V{MARKS.itemsize}")
        self._words = self.marks.view(_WORDS)
        step = np.zeros(count, MARKS)
        step[PLACE], step[SERIAL] = count // width, count & _LOW
        self._step = step.view(_WORDS)
        block = self.marks.reshape(-1, width)
        self._episode, self._place, self._ahead, self._behind = (
            block[name] for name in (EPISODE, PLACE, AHEAD, BEHIND)
        )
        self._end = self.marks[END]
        self._rows = np.arange(count // width, dtype=np.int32)
        self.marks[SERIAL] = np.arange(key, key + count).astype(np.uint32)
        self._episode[:] = tails[1]
        self._place[:] = tails[2] + 1 + self._rows[:, None]
        self._ahead[:-1] = width
        self._behind[:] = width
        self._left = (MOST_ROWS - int(self._place.max())) // max(
            1, count // width
        ) - 1  # blocks that places have room for
        self.links: int | Ints = width
        self.starts: list[int] = []
        self.opened: list[tuple[int, int]] = []
        self.closed: list[tuple[int, int]] = []
        self._touched: list[int] = []
        self._ended: list[int] = []
        self._start(np.flatnonzero(tails[0] < 0).tolist())

    def _start(self, envs: list[int]) -> None:
        """Let the next row of some environments begin an episode."""
        self.starts, self.links = envs, self.width
        if envs:
            self.links = np.full(self.width, self.width, np.int32)
        for env in envs:
            self._place[:, env] = self._rows
            self._behind[0, env] = self.links[env] = 0  # type: ignore[index]

    def name_version(self, version: int) -> None:
        """Let the marks name the version of the weights."""
        self.marks[VERSION] = version
        self.version = version

    def change(self, ended: list[int], codes: list[int], number: int) -> int:
        """Note in the marks which rows of the block end their episode, and how; give new episodes their numbers, from
        ``number`` on, by environment and then by time. Return the next number."""
        width, length = self.width, len(self._rows)
        begins: dict[int, list[int]] = {env: [0] for env in self.starts}
        for at in ended:
            begins.setdefault(at % width, []).append(at // width + 1)
        self._touched, self._ended = sorted(begins), ended
        self.opened, self.closed = [], []
        episode, place = self._episode, self._place
        for env in self._touched:
            for begin in begins[env]:
                if begin:
                    self.closed.append((episode.item(begin - 1, env), place.item(begin - 1, env) + 1))
                if begin == length:
                    break
                episode[begin:, env] = number
                self.opened.append((number, self.key + begin * width + env))
                number += 1
                if begin:
                    place[begin:, env] = self._rows[: length - begin]
                    self._ahead[begin - 1, env] = self._behind[begin, env] = 0
        for at, code in zip(ended, codes, strict=True):
            self._end[at] = code
        return number

    def advance(self, *, changed: bool = False) -> bool:
        """Go on to the block after the next; return whether that can be had.

        Args:
            changed: whether :meth:`change` was called for the block that was next.
        """
        self._left -= 1
        if self._left < 0 or (self.key & _LOW) + 2 * self.count > _LOW:
            return False  # a place, or a serial, would overflow into its neighbour
        self.key += self.count
        if not changed:
            np.add(self._words, self._step, self._words)
            return True
        last = [(self._episode.item(-1, env), self._place.item(-1, env)) for env in self._touched]
        np.add(self._words, self._step, self._words)
        for at in self._ended:
            self._end[at] = OPEN
        for env, (episode, place) in zip(self._touched, last, strict=True):
            self._episode[:, env] = episode
            self._place[:, env] = self._rows + (place + 1)
            self._ahead[:-1, env] = self._behind[:, env] = self.width
        over = self.count - self.width
        self._start([at - over for at in self._ended if at >= over])
        return True

    def tails(self) -> Ints:
        """Return what the next block goes on from, as it is handed to the constructor."""
        newest = np.arange(self.key - self.width, self.key)
        newest[self.starts] = -1
        return np.stack([newest, self._episode[0], self._place[0] - np.int64(1)])
