"""What waits, and for what: a slow disk holds nobody up, and old limits do not outlive a resume."""

from __future__ import annotations

import itertools
import time

import anyio
import anyio.lowlevel
import pytest

from pipeline import Context, Item, Rollout
from pipeline.store.files import OsFiles
from tests.support.crashes import Trained, begin, inline_pipeline, lasting
from tests.support.runs import pipeline, task

virtual = pytest.mark.virtual_time


@virtual
async def test_a_put_returns_at_once_in_a_run_that_was_saved_while_blocked(run_directory: str) -> None:
    async with inline_pipeline(task(40, lasting({})), directory=run_directory, capacity=4) as pipe:
        await begin(pipe)
        await anyio.sleep(10)
        assert pipe.ledger.claimed == 4
        await pipe.save(0)
    async with inline_pipeline(task(40, lasting({})), directory=run_directory, capacity=1) as pipe:
        with anyio.fail_after(1):
            await begin(pipe)
            uid = await pipe.put("numbers", Rollout({"n": [7]}, reward=1.0))
            assert pipe.ledger.state(uid) == "buffered"
            assert len(await pipe.get_batch(1)) == 1


class SlowDisk(OsFiles):
    """Each sync takes as long as it is told."""

    seconds = 0.0

    def sync(self, handle: int) -> None:
        time.sleep(self.seconds)
        super().sync(handle)


async def test_the_loop_is_free_while_a_slow_disk_is_waited_for(run_directory: str) -> None:
    files = SlowDisk()
    stamps: list[float] = []

    async def tick() -> None:
        while True:
            stamps.append(anyio.current_time())
            await anyio.sleep(0.02)

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0.05)
        return Rollout(reward=0.0)

    async with pipeline(
        task(200, run, epochs=None), directory=run_directory, files=files, capacity=100, concurrency=1
    ) as pipe:
        pipe.attach(trained=Trained())
        await pipe.start()
        batch = await pipe.get_batch(1)
        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            await anyio.lowlevel.checkpoint()
            files.seconds = 0.3
            began, first = anyio.current_time(), len(stamps)
            finished = pipe.statistics().rollouts.finished
            saving = await pipe.save(batch.step)
            await saving.committed()
            took = anyio.current_time() - began
            files.seconds = 0.0
            ticks = len(stamps) - first
            more = pipe.statistics().rollouts.finished - finished
            group.cancel_scope.cancel()
    assert took >= 1
    assert ticks >= 30
    assert max(after - before for before, after in itertools.pairwise(stamps)) < 0.25  # no sync was waited for here
    assert more >= 6
