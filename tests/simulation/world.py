"""What a seed stands for: the run's options, its tasks, and how their rollouts behave."""

from __future__ import annotations

import random
from typing import Any

import anyio

from pipeline import ConfigError, Context, Item, Pipeline, PipelineOptions, Retry, Rollout, Skip, Task, ZeroVariance
from pipeline.testing import Numbers

GROUPS = 3


class World:
    """Everything about a run that its seed decides; each life has chances of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = random.Random(seed)
        self.options = _options(chance)
        self.plans = [_plan(chance, name) for name in ("a", "b", "c")[: chance.randint(1, 3)]]
        self.options.update(_policies(chance, self.options, self.plans))
        self.lives = chance.randint(1, 5)
        self.chance = chance
        self.lag = chance.choice([0.0, 0.0, 0.3])
        """How often, of 1, a step is acked only after the next."""
        self.impatient = chance.choice([0.0, 0.0, 0.3])
        """How often the trainer stops waiting for a batch, and asks again."""
        if self.lag and self.options["capacity"] is not None:
            self.options["capacity"] += 2 * GROUPS  # two batches are out at once

    @property
    def items(self) -> set[tuple[str, int, int]]:
        """Every item of every epoch."""
        return {
            (plan["name"], epoch, index)
            for plan in self.plans
            for epoch in range(plan["epochs"])
            for index in range(plan["count"])
        }

    def make(self, life: int, **how: Any) -> Pipeline:
        """Build a fresh pipeline."""
        return Pipeline([self._task(plan, life) for plan in self.plans], seed=7, watchdog=None, **self.options, **how)

    def _task(self, plan: dict[str, Any], life: int) -> Task:
        given = {key: value for key, value in plan.items() if key not in ("count", "spread", "risk", "hangs", "keeps")}
        weather = random.Random(f"{self.seed}/{life}/{plan['name']}")

        async def run(item: Item, ctx: Context) -> Rollout:
            done = 0 if ctx.partial is None else int(ctx.partial["done"][0])
            length = 1 + int(3 * ctx.rng.pareto(1.5 + plan["spread"]))  # a heavy tail
            if plan["hangs"] and weather.random() < 0.05:
                await anyio.sleep_forever()
            for step in range(done, min(length, 30)):
                await anyio.sleep(0.1 * weather.uniform(0.5, 1.5))
                if plan["keeps"] and weather.random() < 0.3:
                    ctx.save_partial(Rollout({"done": [step + 1]}))
            if weather.random() < plan["risk"]:
                raise ValueError("a bad day")
            if weather.random() < 0.2:
                async with ctx.scoring():
                    await anyio.sleep(0.1)
            return Rollout({"n": [item["n"]]}, reward=float(ctx.rng.random() < 0.6), tokens=length)

        return Task(source=Numbers(plan["count"]), run=run, **given)


def _options(chance: random.Random) -> dict[str, Any]:
    staleness = chance.choice([None, 0, 1, 2])
    options: dict[str, Any] = {
        "concurrency": chance.choice([1, 2, 3, 5, 20]),
        "strategy": chance.choice(["asynchronous"] * 3 + ["synchronous"]),
        "order": chance.choice(["finished", "finished", "strict"]),
        "selector": chance.choice(["stalest", "fifo", "freshest"]),
        "max_staleness": staleness,
        "segment_bytes": chance.choice([1, 2000, 1 << 20]),
        "max_deaths": chance.choice([0, 1, 99, 99]),
        "durability": chance.choice(["kill", "kill", "power", "none"]),
        "write_queue_bytes": chance.choice([1, 5000, 64 << 20]),
        "max_rerolls": chance.choice([1, 3]),
        "keep": chance.choice([1, 3, None]),
        "after_crash": chance.choice(["reuse", "reuse", "discard"]),
        "capacity": chance.choice([None, 5, 9]),
        "batch_groups": GROUPS,
    }
    return options


def _policies(chance: random.Random, options: dict[str, Any], plans: list[dict[str, Any]]) -> dict[str, Any]:
    """What is done about staleness, and how batches are made up, as far as it goes with the other options."""
    chosen: dict[str, Any] = {
        "staleness_policy": chance.choice(
            ["drop", "wait", "gate", "mask", {"policy": "reroll"}, {"policy": "reroll", "tail": 3}]
        ),
        "oversample": chance.choice([1, 1, 1.5]),
        "mixing": chance.choice(["long_run", "batch"]) if len({plan["share"] for plan in plans}) == 1 else "long_run",
    }
    while chosen:
        try:
            PipelineOptions.of({**options, **chosen})
            return chosen
        except ConfigError:
            chosen.popitem()
    return chosen


def _plan(chance: random.Random, name: str) -> dict[str, Any]:
    size = chance.choice([1, 1, 2, 3])
    return {
        "name": name,
        "count": chance.randint(1, 9),
        "epochs": chance.choice([1, 1, 2]),
        "share": chance.choice([1.0, 1.0, 2.5, 7.0]),
        "shuffle": chance.random() < 0.7,
        "group_size": size,
        "min_group": chance.randint(1, size),
        "on_failure": chance.choice([Retry(attempts=2), Retry(attempts=5), Skip()]),
        "timeout": 2.5,
        "group_timeout": chance.choice([None, None, 6.0]),
        "filter": chance.choice([None, None, ZeroVariance()]),
        "spread": chance.choice([0.0, 2.0]),
        "risk": chance.choice([0.0, 0.1, 0.3]),
        "hangs": chance.random() < 0.4,
        "keeps": chance.random() < 0.4,
    }
