"""The one source of time.

``now`` is the event loop's own clock, so that a virtual clock moves everything; ``wall`` is the calendar,
which nothing decides by: it is only written down for people.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import anyio
import anyio.lowlevel


class Clock(NamedTuple):
    """Two ways to read the time, both in seconds."""

    now: Callable[[], float]
    wall: Callable[[], float]


def running_clock() -> Clock:
    """Return the clock of the running event loop.

    On asyncio the loop's bound method is returned: it is read once or twice for each rollout, and
    ``anyio.current_time`` looks the backend up at each call (six times the cost).
    """
    try:
        return Clock(asyncio.get_running_loop().time, time.time)
    except RuntimeError:
        return Clock(anyio.current_time, time.time)
