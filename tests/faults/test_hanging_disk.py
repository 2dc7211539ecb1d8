"""What waits, and for what: a disk that hangs holds nobody up, and old limits do not outlive a resume."""

from __future__ import annotations

import os
import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
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


class StuckDisk(OsFiles):
    """A sync, or the removal of a file, does not return until it is let."""

    def __init__(self, verb: str = "sync") -> None:
        self._verb = verb
        self.stuck, self.free = threading.Event(), threading.Event()
        self.free.set()

    def _comes(self, verb: str) -> None:
        if verb == self._verb:
            self.stuck.set()
            assert self.free.wait(60)

    def sync(self, handle: int) -> None:
        self._comes("sync")
        super().sync(handle)

    def unlink(self, path: str) -> None:
        self._comes("unlink")
        super().unlink(path)


async def test_rollouts_and_batches_go_on_while_a_disk_hangs(run_directory: str) -> None:
    files = StuckDisk()

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.lowlevel.checkpoint()
        return Rollout(reward=0.0)

    given = task(200, run, epochs=None)
    async with pipeline(given, directory=run_directory, files=files, capacity=100, concurrency=4) as pipe:
        pipe.attach(trained=Trained())
        await pipe.start()
        batch = await pipe.get_batch(1)
        files.stuck.clear()
        files.free.clear()
        try:
            saving = await pipe.save(batch.step)
            await anyio.to_thread.run_sync(files.stuck.wait)
            committed = len(os.listdir(os.path.join(run_directory, "generations")))
            with anyio.fail_after(30):
                for _ in range(20):
                    batch = await pipe.get_batch(16)
                    await pipe.ack(batch.step)
            assert pipe.statistics().rollouts.finished >= 320
            assert len(os.listdir(os.path.join(run_directory, "generations"))) == committed, "the disk did hang"
        finally:
            files.free.set()
        await saving.committed()
        assert (await pipe.save(batch.step)).step == 21


async def test_a_generation_is_committed_before_an_old_one_has_gone(run_directory: str) -> None:
    """Removing a large file can take longer than writing one; the next save waits for it, and nobody else."""
    files = StuckDisk("unlink")
    generations = os.path.join(run_directory, "generations")
    async with pipeline(task(3), directory=run_directory, files=files, keep=1) as pipe:
        pipe.attach(trained=Trained())
        await pipe.start()
        batch = await pipe.get_batch(1)
        files.free.clear()
        try:
            saving = await pipe.save(batch.step)
            with anyio.fail_after(30):
                await saving.committed()
                await anyio.to_thread.run_sync(files.stuck.wait)
            assert sorted(os.listdir(generations)) == ["00000000.part", "00000001"]
        finally:
            files.free.set()
        await (await pipe.save(batch.step)).committed()
        assert not [name for name in os.listdir(generations) if name.startswith("00000000")]
