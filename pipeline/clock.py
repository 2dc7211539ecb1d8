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

    It is read twice for each rollout, and ``anyio.current_time`` looks the backend up at each call (ten times the
    cost). So on asyncio it is the loop's bound method, or what the loop's own class calls in it.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return Clock(anyio.current_time, time.time)
    own = type(loop).time is asyncio.BaseEventLoop.time
    return Clock(time.monotonic if own else loop.time, time.time)
