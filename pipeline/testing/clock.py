"""An event loop whose clock leaps: hours of sleep and timeouts pass at once.

When nothing is ready to run, time jumps to the next timer. It also leaps while a worker thread is busy, so a test on
this loop uses no threads: open a pipeline with ``inline=True``, and in memory or over a small directory.

In a pytest-asyncio suite :mod:`pipeline.testing.plugin` gives it to the tests that are marked ``virtual_time``.
"""

from __future__ import annotations

import asyncio
import selectors

_START = 10_000.0  # far from the real clock's values, so that mixing the two fails at once


class _LeapingSelector(selectors.DefaultSelector):
    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # None still blocks: then only real input or output can wake the loop.
        events = super().select(0 if timeout else timeout)
        if not events and timeout:
            self.loop.advance(timeout)
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        selector = _LeapingSelector()
        super().__init__(selector)
        selector.loop = self
        self._virtual_now = _START

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._virtual_now += seconds
