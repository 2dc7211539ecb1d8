"""How the public names are typed: mypy checks this file, nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, assert_type

import torch

from forebay import (
    Batch,
    Context,
    Evaluation,
    Group,
    Item,
    Pipeline,
    ProcessEngine,
    Progress,
    Resumed,
    Rollout,
    SequenceSource,
    Source,
    Stream,
    Task,
)


async def solve(item: Item, ctx: Context) -> Rollout:
    assert_type(ctx.version, int)
    assert_type(ctx.attempt, int)
    assert_type(item.index, int)
    assert_type(ctx.kind, str)
    ctx.park()
    return Rollout({"x": torch.zeros(3)}, reward=ctx.rng.random(), info={"a": 1})


class Model:
    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


source: Source = SequenceSource([1, 2, 3])
task = Task("t", source=source, run=solve)


async def questions() -> AsyncIterator[dict[str, str]]:
    yield {"prompt": "?"}


stream: Stream = questions()
chat = Task("chat", source=questions(), run=solve)


def play(item: Item, ctx: Context) -> Rollout:
    return Rollout({"x": [item["n"]]}, reward=ctx.rng.random())


plain = [Task("plain", source=source, run=play), Task("named", source=source, run="sims:play", resource="sims:env")]
elsewhere = Pipeline(plain, engine=ProcessEngine(workers=2, env={"OMP_NUM_THREADS": "1"}))


async def asynchronous() -> None:
    async with Pipeline([task], directory="runs/a", max_staleness=2) as pipe:
        pipe.attach(model=Model())
        assert_type(await pipe.resume(), Resumed)
        await pipe.start()
        assert_type(pipe.progress, Progress)
        async for batch in pipe.batches(groups=4, until=10):
            assert_type(batch, Batch)
            for group in batch:
                assert_type(group, Group)
            assert_type(batch.padded(), dict[str, torch.Tensor])
            async with pipe.weight_update(version=batch.step, running="finish"):
                pass
            await (await pipe.save(batch.step)).committed()
        uid = await pipe.submit("t", {"prompt": "?"})
        assert_type(uid, int)
        assert_type(await pipe.put(task, [Rollout(reward=1.0)], {"prompt": "?"}), int)
        await pipe.reward(uid, 1.0, 0, attempt=1)
        await pipe.discard(uid)
        await pipe.set_share("t", 2)
        assert_type(await pipe.evaluate(task, version=3, items=[1, 2], samples=2), Evaluation)


def synchronous() -> None:
    with Pipeline(task, {"concurrency": 4}).sync() as pipe:
        pipe.start(weights_current=True)
        for batch in pipe.batches(groups=4):
            assert_type(batch.rewards, torch.Tensor)
            pipe.save(batch.step).committed()
        assert_type(pipe.metrics(), dict[str, float])
        evaluation = pipe.evaluate(task)
        assert_type(evaluation.rollouts, list[Rollout])
        assert_type(evaluation.reward_mean, float | None)
        assert_type(pipe.submit(task, 3), int)
