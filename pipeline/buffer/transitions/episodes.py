"""Which rows follow each other: the marks of new rows by environment."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np

from pipeline.buffer.transitions.layout import END, EPISODE, OPEN, PLACE
from pipeline.buffer.transitions.lengths import Lengths
from pipeline.buffer.transitions.steady import FEW, Steady
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import UsageError

Ints = np.ndarray


class Marks(NamedTuple):
    """Marks of n new rows, and the links from rows that were there."""

    episode: Ints
    place: Ints
    ahead: Ints
    behind: Ints
    linked: Ints
    """Keys of older rows that go on in these."""
    distances: Ints
    """How far each of them lies before its next row."""
    stride: int
    """How far each row lies before the next of its episode, if that is the same for all within the block; else 0."""


class Episodes:
    """The open episode of each environment, and the length of every episode.

    An environment is a number from 0 on that the caller gave it. Rows of one environment come in their order in time;
    those of several may come in any mixture.
    """

    def __init__(self) -> None:
        # By environment, of the open episode: key of its newest row (-1: there is none), its number, place of that row.
        self._tails = np.full((3, 8), -1, np.int64)
        self._hot: tuple[int, int, int, int] | None = (
            None  # (environment, key, number, place) instead of what lies there
        )
        self._steady: Steady | None = None  # knows more than the tails of its environments do
        self._like: tuple[Ints, int, int] | None = None  # environments and count of the newest block, and the next key
        self._lengths = Lengths()
        self._unsettled = False  # whether the lengths of the open episodes are behind those in `_steady`
        self.next = 0
        """The number of the next episode."""

    @property
    def lengths(self) -> Lengths:
        """How many rows each episode has had."""
        if self._unsettled:
            self._settle()
        return self._lengths

    @property
    def held(self) -> int:
        """How many episodes are remembered, but for a few."""
        return self._lengths.held

    def trim(self, newest: int, needed: Ints) -> None:
        """Forget how long episodes were, but for the ``newest`` so many, those that are ``needed``, and open ones."""
        self.lengths.trim(newest, np.concatenate([needed, self.open()]))

    def note_open(self) -> None:
        """Remember how long the open episodes are, though none of their rows may be there."""
        rows = np.array(self.state(), np.int64).reshape(-1, 4)
        if len(rows):
            self.lengths.note_open(rows[:, 2], rows[:, 3] + 1)

    def _settle(self) -> None:
        assert self._steady is not None
        self._unsettled = False
        newest, number, place = self._steady.tails()
        going = newest >= 0
        self._lengths.set(number[going], place[going] + 1)

    def _tail(self, env: int) -> tuple[int, int, int]:
        if env >= self._tails.shape[1]:
            more = np.full((3, max(env + 1, 2 * self._tails.shape[1]) - self._tails.shape[1]), -1, np.int64)
            self._tails = np.concatenate([self._tails, more], axis=1)
        key, number, place = self._tails[:, env].tolist()
        return key, number, place

    def _cool(self) -> None:
        """Put what :meth:`append` and :meth:`steady` keep at hand where it belongs."""
        if self._hot is not None:
            self._tails[:, self._hot[0]] = self._hot[1:]
            self._hot = None
        if self._steady is not None:
            if self._unsettled:
                self._settle()
            hot = self._steady
            self._tails[:, hot.envs] = hot.tails()
            self._steady, self._like = None, (hot.envs, hot.count, hot.key)

    def append(self, key: int, env: int, end: int) -> tuple[int, int, int]:
        """Note one row; return its episode, its place, and how far behind it the row before lies, or 0."""
        hot = self._hot
        if hot is None or hot[0] != env:
            self._cool()
            hot = (env, *self._tail(env))
        _, last, episode, place = hot
        if last < 0:
            behind, episode, place = 0, self.next, 0
            self.next += 1
        else:
            behind, place = key - last, place + 1
            if place >= MOST_ROWS:
                self._too_long(env)
        self._hot = (env, key if end == OPEN else -1, episode, place)
        self._lengths.note_one(episode, place, key)
        return episode, place, behind

    def steady(self, key: int, envs: Ints, count: int) -> Steady | None:
        """Return the marks of a block, if it is like the one before and follows it at once; :meth:`begin` and
        :meth:`went` come next."""
        hot = self._steady
        if hot is not None and hot.key == key and hot.envs is envs and hot.count == count:
            return hot
        like = self._like
        if like is None or like[0] is not envs or like[1] != count or like[2] != key or envs.flags.writeable:
            return None
        self._cool()
        tails = self._tails[:, envs]
        closed = tails[0] < 0
        if (tails[2] >= MOST_ROWS - 2 * count).any():
            return None
        if np.count_nonzero(closed) > FEW or not ((tails[0] == np.arange(key - len(envs), key)) | closed).all():
            return None
        self._steady = Steady(key, envs, count, tails)
        return self._steady

    def begin(self, hot: Steady, ends: Ints | None) -> bool:
        """Complete the marks of a block; return whether that could be done.

        Args:
            hot: from :meth:`steady`.
            ends: [count] how the episode ends with the row; None if none does.
        """
        ended: list[int] = []
        codes: list[int] = []
        if ends is not None:
            ended = ends.nonzero()[0].tolist()
            if len(ended) > FEW:
                return False
            codes = [ends.item(at) for at in ended]
        self.next = hot.change(ended, codes, self.next)
        for number, key in hot.opened:
            self._lengths.begin(number, key)
        for number, length in hot.closed:
            self._lengths.set_one(number, length)
        return True

    def went(self, hot: Steady, *, changed: bool) -> None:
        """Take in that the rows of a block were written; ``changed``: :meth:`begin` completed their marks."""
        self._unsettled = True
        if not hot.advance(changed=changed):
            self._leave(hot)

    def _leave(self, hot: Steady) -> None:
        """Take the tails back from a block that was written, and that none can follow as it is."""
        last = hot.marks[hot.count - hot.width :]
        key, going = hot.key + hot.count, last[END] == OPEN
        self._steady, self._unsettled = None, False
        self._lengths.set(last[EPISODE][going], last[PLACE][going] + 1)
        self._tails[:, hot.envs] = np.arange(key - hot.width, key), last[EPISODE], last[PLACE]
        self._tails[0, hot.envs[~going]] = -1
        self._like = (hot.envs, hot.count, key)

    def extend(self, key: int, envs: Ints, ends: Ints) -> Marks:
        """Note a block whose row t * E + e is of environment ``envs[e]``.

        Args:
            key: of the first row.
            envs: [E], each once.
            ends: [n] how the episode ends with the row, 0: it goes on; n is a multiple of E, and not 0.
        """
        self._cool()
        self._room(envs, len(ends))
        marks = self._block(key, envs, ends)
        self._lengths.note(marks.episode, marks.place, key)
        self._like = (envs, len(ends), key + len(ends))
        return marks

    def _room(self, envs: Ints, count: int) -> None:
        """Refuse a block with which an episode might have more rows than its marks can count."""
        self._tail(int(envs.max()))
        keys, _, places = self._tails[:, envs]
        long = (keys >= 0) & (places >= MOST_ROWS - count)
        if long.any():
            self._too_long(int(envs[long][0]))

    def _too_long(self, env: int) -> NoReturn:
        raise UsageError(f"env={env}: an episode has at most {MOST_ROWS} rows; end_episode({env}) begins another one")

    def _block(self, key: int, envs: Ints, ends: Ints) -> Marks:
        width = len(envs)
        ended = (ends != OPEN).reshape(-1, width)
        length = len(ended)
        self._tail(int(envs.max()))
        last_key, last_number, last_place = self._tails[:, envs]
        went_on = last_key >= 0
        ahead = np.where(ended, 0, width)
        ahead[-1] = 0
        behind = np.zeros((length, width), np.int64)
        behind[1:] = ahead[:-1]
        behind[0] = np.where(went_on, key + np.arange(width) - last_key, 0)
        # Within the block, the number of ends before a row tells its episode apart from others of its environment.
        before = np.zeros((length, width), np.int64)
        np.cumsum(ended[:-1], axis=0, out=before[1:])
        rows = np.arange(length)[:, None]
        begun = np.zeros((length, width), np.int64)
        np.maximum.accumulate(np.where(ended[:-1], rows[1:], 0), axis=0, out=begun[1:])
        first = (before == 0) & went_on
        place = rows - begun + np.where(first, last_place + 1, 0)
        new = before[-1] + ~went_on
        numbers = self.next + np.cumsum(new) - new - went_on
        episode = np.where(first, last_number, numbers + before)
        self.next += int(new.sum())
        keys = key + (length - 1) * width + np.arange(width)
        self._tails[:, envs] = np.where(ended[-1], -1, keys), episode[-1], place[-1]
        distances = behind[0][went_on]
        flat = [each.reshape(-1) for each in (episode, place, ahead, behind)]
        return Marks(flat[0], flat[1], flat[2], flat[3], last_key[went_on], distances, width)

    def mixed(self, key: int, envs: Ints, ends: Ints) -> Marks:
        """Note a block whose row i is of environment ``envs[i]``, in any mixture."""
        self._cool()
        self._room(envs, len(ends))
        order = np.argsort(envs, kind="stable")
        names, starts = np.unique(envs[order], return_index=True)
        episode, place, ahead, behind = (np.zeros(len(envs), np.int64) for _ in range(4))
        linked, distances = [], []
        for env, rows in zip(names.tolist(), np.split(order, starts[1:]), strict=True):
            of_env = self._block(0, np.array([env]), ends[rows])
            episode[rows], place[rows] = of_env.episode, of_env.place
            ahead[rows[:-1]] = np.where(of_env.ahead[:-1] > 0, np.diff(rows), 0)
            behind[rows[1:]] = ahead[rows[:-1]]
            for last in of_env.linked.tolist():
                behind[rows[0]] = key + int(rows[0]) - last
                linked.append(last)
                distances.append(int(behind[rows[0]]))
            if self._tails[0, env] >= 0:
                self._tails[0, env] = int(rows[-1]) + key
        self._lengths.note(episode, place, key)
        return Marks(episode, place, ahead, behind, np.array(linked, np.int64), np.array(distances, np.int64), 0)

    def cut(self, env: int | None = None) -> list[int]:
        """Close the open episode of an environment, or of all; return the keys of the rows that end so."""
        self._cool()
        if env is None:
            where = np.flatnonzero(self._tails[0] >= 0)
        else:
            where = np.array([env] * (self._tail(env)[0] >= 0), np.int64)
        keys: list[int] = self._tails[0, where].tolist()
        self._tails[0, where] = -1
        return keys

    def open(self) -> Ints:
        """Return the numbers of the open episodes."""
        self._cool()
        numbers: Ints = self._tails[1, self._tails[0] >= 0]
        return numbers

    def state(self) -> list[list[int]]:
        """Return [environment, key, episode, place] of every open episode."""
        self._cool()
        where = np.flatnonzero(self._tails[0] >= 0)
        state: list[list[int]] = np.column_stack([where, *self._tails[:, where]]).tolist()
        return state

    def load(self, state: list[list[int]], next_episode: int) -> None:
        """Take back what :meth:`state` gave."""
        self._hot = self._steady = self._like = None
        self._unsettled = False
        self._tails = np.full((3, 8), -1, np.int64)
        for env, *tail in state:
            self._tail(env)
            self._tails[:, env] = tail
        self.next = next_episode
