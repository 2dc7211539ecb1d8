"""What environments are called where several buffers come together.

An environment has an id: the part that it belongs to, and its number there. It is called by that number, unless two
would be called the same, and one of these has an open episode; then all are counted anew, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.replay.state import BufferState

Ints = np.ndarray
ENVIRONMENTS_FILE = "origin/environments.int64"
"""By environment: its number, part and number there."""


class Home(NamedTuple):
    """The id of an environment."""

    part: int
    env: int


class Known(Protocol):
    """A buffer that is read."""

    state: BufferState
    where: str

    def homes(self, env: int) -> list[Home]:
        """Return the ids of an environment: several, if all of them wait for their reset."""
        ...


def homes_listed(table: np.ndarray, ranks: Ints, env: int) -> list[Home]:
    """Return the ids of an environment, as a flat ``ENVIRONMENTS_FILE`` says; of one of which it does not, its own.

    Args:
        table: the file's content; of a buffer that no tool made, empty.
        ranks: where the buffer's parts stand among all.
        env: the environment.
    """
    known = table.reshape(-1, 3)
    own = known[known[:, 0] == env].tolist()
    return sorted(Home(int(ranks[part]), there) for _, part, there in own) or [Home(int(ranks.min()), env)]


class Going(NamedTuple):
    """An open episode: the part that it is of, which of the buffers has it, and in which environment."""

    part: int
    stream: int
    env: int


class Environments:
    """Those of a new buffer that have an open episode, or wait for their reset."""

    def __init__(self, streams: Sequence[Known], going: Sequence[Going]) -> None:
        self._streams = streams
        self._going = {each: self._home(each) for each in going}
        self._at = {home: (each.stream, each.env) for each, home in sorted(self._going.items(), key=_by_home)}
        rest = [
            (home, (number, env))
            for number, stream in enumerate(streams)
            for env in stream.state.awaiting_reset
            for home in stream.homes(env)
        ]
        named = [home.env for home in self._at]
        clash = len(set(named)) < len(named) or bool(
            set(named) & {home.env for home, _ in rest if home not in self._at}
        )
        for home, at in sorted(rest):
            self._at.setdefault(home, at)
        self._now = {home: number if clash else home.env for number, home in enumerate(self._at)}
        self.resting = sorted({self._now[home] for home, _ in rest})
        """Those whose next step is their reset."""

    def _home(self, of: Going) -> Home:
        found = [home for home in self._streams[of.stream].homes(of.env) if home.part == of.part]
        return found[0] if found else Home(of.part, of.env)

    def of(self, each: Going) -> int:
        """Return what the environment of an open episode is called now."""
        return self._now[self._going[each]]

    @property
    def table(self) -> Ints:
        """The content of an ``ENVIRONMENTS_FILE``."""
        return np.array([[now, *home] for home, now in self._now.items()], np.int64).reshape(-1, 3)

    @property
    def told(self) -> list[list[object]]:
        """What each is called now, where it was, and as what."""
        where = [(now, *self._at[home]) for home, now in self._now.items()]
        return [[now, self._streams[stream].where, env] for now, stream, env in where]


def _by_home(item: tuple[Going, Home]) -> Home:
    return item[1]
