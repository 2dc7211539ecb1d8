"""Rollouts that wait to be told, and single turns of the loop."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from pipeline import Context, Item, Rollout


async def turn() -> None:
    """Let everything that is ready run once."""
    await anyio.lowlevel.checkpoint()


class Gate:
    """Rollouts that end when they are told to: ``gate.open[n].set()``."""

    def __init__(self) -> None:
        self.open: dict[int, anyio.Event] = {}

    async def run(self, item: Item, ctx: Context) -> Rollout:
        """The runner."""
        event = self.open[item["n"]] = anyio.Event()
        await event.wait()
        return Rollout(reward=0.0)
