"""A replay buffer as a plain list of rows: what the real one is compared with. Slow, short, and plain to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

OPEN, TERMINATED, TRUNCATED, CUT = range(4)


@dataclass
class Row:
    """One row that was ever added."""

    key: int
    env: int
    episode: int
    place: int
    end: int
    terminated: bool
    truncated: bool
    reward: float


class Model:
    """What a buffer holds, and what may be drawn of it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.oldest = 0
        self.open: dict[int, Row] = {}  # the newest row of each environment's open episode
        self.episodes = 0

    def add(self, env: int, terminated: bool, truncated: bool, ends: bool | None = None) -> None:
        """Add a row, whose episode ends as its flags say, or as ``ends`` does."""
        last = self.open.pop(env, None)
        end = TERMINATED if terminated else TRUNCATED if truncated or ends else OPEN
        if ends is False:
            end = OPEN
        if last is None:
            episode, place = self.episodes, 0
            self.episodes += 1
        else:
            episode, place = last.episode, last.place + 1
        key = len(self.rows)
        row = Row(key, env, episode, place, end, terminated, truncated, reward_of(key))
        self.rows.append(row)
        if end == OPEN:
            self.open[env] = row
        self.oldest = max(self.oldest, key + 1 - self.capacity)

    def cut(self, env: int | None) -> int:
        """End the open episode of an environment, or of all; return how many there were."""
        ended = list(self.open) if env is None else [each for each in [env] if each in self.open]
        for each in ended:
            self.open.pop(each).end = CUT
        return len(ended)

    def clear(self) -> None:
        """Forget all rows."""
        self.cut(None)
        self.oldest = len(self.rows)

    @property
    def there(self) -> list[Row]:
        return self.rows[self.oldest :]

    def onwards(self, row: Row) -> list[Row]:
        """The rows of an episode from one on."""
        return [each for each in self.rows[row.key :] if each.episode == row.episode]

    def upto(self, row: Row) -> list[Row]:
        """The rows of an episode up to one, newest first; some may be gone."""
        return [each for each in self.rows[: row.key + 1] if each.episode == row.episode][::-1]

    def starts(self, span: int, *, pad: bool, first: bool, ended: bool) -> list[int]:
        """Where slices may begin."""
        going_on = {each.episode for each in self.open.values()}
        return [
            row.key
            for row in self.there
            if (pad or len(self.onwards(row)) >= span)
            and not (first and row.place)
            and not (ended and row.episode in going_on)
        ]

    def returns(self, row: Row, n: int, gamma: float) -> tuple[float, float, Row, int]:
        """The n-step return, the discount, the last row that is in it, and how many are."""
        summed = self.onwards(row)[:n]
        last = summed[-1]
        discount = 0.0 if last.end == TERMINATED else gamma ** len(summed)
        return sum(gamma**k * each.reward for k, each in enumerate(summed)), discount, last, len(summed)

    def frames(self, row: Row, count: int) -> list[float]:
        """The newest observations up to a row, oldest first, the first one repeated."""
        seen = [float(each.key) for each in self.upto(row)[:count]]
        return (seen + [seen[-1]] * count)[:count][::-1]

    def next_frames(self, row: Row, count: int) -> list[float]:
        """What is seen after a row, oldest first: the newest observations, and the next one."""
        return [*(self.frames(row, count - 1) if count > 1 else []), row.key + 0.5]


def reward_of(key: int) -> float:
    return float(key * 7 % 5 - 1)


def columns(first: int, terminated: list[bool], truncated: list[bool]) -> dict[str, Any]:
    """The columns of rows with the keys from ``first`` on."""
    keys = np.arange(first, first + len(terminated))
    return {
        "obs": keys.astype(np.float64),
        "next_obs": keys + 0.5,
        "reward": np.array([reward_of(int(key)) for key in keys], np.float64),
        "terminated": np.array(terminated, bool),
        "truncated": np.array(truncated, bool),
    }
