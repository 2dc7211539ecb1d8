"""What an attempt has kept stays on the disk for as long as a recovery asks for it, whoever makes use of it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Rollout, Task
from pipeline.store.layout import Layout
from tests.support.crashes import Trained, begin, finish, inline_pipeline
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

COUNT = 40


async def run(item: Item, ctx: Context) -> Rollout:
    """Item 0 keeps something, and then takes very long, an hour at each attempt."""
    if item["n"] == 0:
        ctx.save_partial(Rollout({"n": [77]}))
        await anyio.sleep(3600)
    await anyio.sleep(1 + item["n"] / 10_000)
    return Rollout({"n": [item["n"]]}, reward=1.0)


async def go_on(item: Item, ctx: Context) -> Rollout:
    """Item 0 takes very long, and keeps nothing."""
    await anyio.sleep(3600 if item["n"] == 0 else 1 + item["n"] / 10_000)
    return Rollout({"n": [item["n"]]}, reward=1.0)


def make(directory: str, runner: Any, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(COUNT), run=runner, shuffle=False)
    return inline_pipeline(given, directory=directory, segment_bytes=700, capacity=8, keep=1, **options)


async def some_steps(directory: str, runner: Any, until: int, **options: Any) -> None:
    """Train, save each step, and cut at each weight update what runs."""
    trained = Trained()
    async with make(directory, runner, save_every=1, **options) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=until):
            trained.step(batch)
            async with pipe.weight_update(version=batch.step, running="abort"):
                pass


@pytest.mark.parametrize("last", [True, False])
async def test_a_life_without_partial_leaves_it_to_the_next(run_directory: str, last: bool) -> None:
    await some_steps(run_directory, run, 2)
    await some_steps(run_directory, go_on, 7, partial=False)
    assert "000001-0000-000002.fbs" not in Layout(run_directory).list_segments()
    trained = Trained()
    async with make(run_directory, go_on, partial=last) as pipe:
        await begin(pipe, trained=trained)
        await finish(pipe, trained, 4)
    assert trained.items == list(range(COUNT))


async def test_what_became_too_old_to_go_on_from_does_not_stop_a_resume(run_directory: str) -> None:
    bound: dict[str, Any] = {"max_staleness": 1, "batch_groups": 4, "max_rerolls": 1000}
    await some_steps(run_directory, run, 2, **bound)
    await some_steps(run_directory, go_on, 4, **bound)
    await some_steps(run_directory, go_on, 8, **bound)
    trained = Trained()
    async with make(run_directory, go_on, **bound) as pipe:
        await begin(pipe, trained=trained)
        await finish(pipe, trained, 4)
    assert trained.items == list(range(COUNT))
