"""What each staleness policy costs: the real pipeline on a virtual clock, beside a trainer that never waits.

Batches of 32 groups of 8, 128 attempts at once, and lengths that are lognormal with a mean of one second; a length is
an item's own, so what is run again is as long as before. Training takes as long as making a batch does when every slot
is busy, so neither side is the bottleneck: the bound is that time for each step. ``ours`` is the time over the bound.
Nothing is measured but what is simulated, so a run says the same on every machine.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from typing import Any

import anyio
import numpy as np

from benchmarks.harness import Endless, Row
from pipeline import Context, Item, Pipeline, Reroll, Rollout, Task
from pipeline.testing import VirtualClockLoop

GROUPS, MEMBERS, SLOTS, BOUND = 32, 8, 128, 2
STEP = GROUPS * MEMBERS / SLOTS  # seconds that a batch takes when lengths average one second
TOKENS = 100  # in a second
SPREADS = (0.5, 1.5, 3.0)
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {"strategy": "synchronous", "max_staleness": None},
    "synchronous, oversample 1.25": {"strategy": "synchronous", "oversample": 1.25},
    "gate, in draw order": {"order": "strict", "staleness_policy": "gate"},
    "wait": {"staleness_policy": "wait"},
    "drop": {"staleness_policy": "drop"},
    "drop, oversample 1.25": {"staleness_policy": "drop", "oversample": 1.25},
    "reroll": {"staleness_policy": "reroll"},
    "reroll, tail of 32": {"staleness_policy": Reroll(tail=GROUPS)},
    "mask": {"staleness_policy": "mask"},
    "mask, oversample 2": {"staleness_policy": "mask", "oversample": 2},
}
_ASKED = dict(zip(SPREADS, (0.98, 0.95, 0.90), strict=True))  # of efficiency, with partial rollouts continued


class Simulation:
    """A trainer and its rollouts."""

    def __init__(self, spread: float, options: dict[str, Any]) -> None:
        self._sigma = math.sqrt(math.log(1 + spread**2))
        self._options = {"max_staleness": BOUND, "batch_groups": GROUPS, "concurrency": SLOTS, **options}
        self._masks = options.get("staleness_policy") == "mask"
        self._published: list[float] = []
        """When each version came into use."""
        self.generated = 0
        self.stalest = 0

    async def roll(self, item: Item, ctx: Context) -> Rollout:
        rng = np.random.default_rng((7, item.index, ctx.member))
        tokens = max(1, round(TOKENS * float(rng.lognormal(-(self._sigma**2) / 2, self._sigma))))
        begun = anyio.current_time()
        await anyio.sleep(tokens / TOKENS)
        self.generated += tokens
        if not self._masks:
            return Rollout(reward=0.0, tokens=tokens)
        first, last = bisect_right(self._published, begun) - 1, len(self._published) - 1
        edges = [0, *(round((time - begun) * TOKENS) for time in self._published[first + 1 :]), tokens]
        versions = np.repeat(np.arange(first, last + 1), np.diff(np.minimum(edges, tokens)))
        return Rollout({"versions": versions}, reward=0.0, tokens=tokens)

    async def run(self, steps: int) -> tuple[float, Any]:
        """Train so many steps; return the time that they took and the task's statistics."""
        task = Task("lengths", source=Endless(), run=self.roll, group_size=MEMBERS, epochs=None, shuffle=False)
        async with Pipeline(task, inline=True, watchdog=None, **self._options) as pipe:
            begun = anyio.current_time()
            self._published.append(begun)
            await pipe.start()
            async for batch in pipe.batches(groups=GROUPS, until=steps):
                self.stalest = max(self.stalest, batch.staleness)
                await anyio.sleep(STEP)
                async with pipe.weight_update(version=batch.step):
                    self._published.append(anyio.current_time())
            return anyio.current_time() - begun, pipe.statistics().tasks["lengths"]


def measure(name: str, spread: float, steps: int) -> Row:
    """Simulate one policy."""
    simulation = Simulation(spread, POLICIES[name])
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        seconds, task = runner.run(simulation.run(steps))
    efficiency = steps * STEP / seconds
    asked = f"efficiency {efficiency:.2f}"
    limit = 1 / efficiency  # nothing is asked of the others: they are there to compare with
    if name.startswith("mask"):
        limit, asked = 1 / _ASKED[spread], f"{asked} (asked, with partial rollouts continued: {_ASKED[spread]:.2f})"
    figures = {
        "tokens trained of generated": task.totals.trained_tokens / simulation.generated,
        "trained length of the source's": task.trained_length / task.source_length,
        "with what is masked": (task.totals.trained_tokens + task.totals.masked_tokens)
        / task.totals.trained_rollouts
        / task.source_length,
        "stalest": float(simulation.stalest),
    }
    return Row(
        name=f"{name}, CV {spread}", ours=1 / efficiency, unit="x the bound", limit=limit, asked=asked, peers=figures
    )


def run(scale: float) -> list[Row]:
    """Simulate every policy for each spread of lengths."""
    steps = max(5, round(100 * scale))
    return [measure(name, spread, steps) for spread in SPREADS for name in POLICIES]
