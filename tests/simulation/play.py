"""Plays a world to its end, life by life, and checks what must hold."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anyio

from pipeline import Batch, EndOfSource, Pipeline
from pipeline.checkpoint.generations import find_generations
from pipeline.ledger import IN_FLIGHT, PENDING, Ledger
from pipeline.sampler import DrawPlan
from pipeline.store.journal import read_journals
from pipeline.store.layout import Layout
from pipeline.testing import FakeTrainer, RecordingFiles, Replay, VirtualClockLoop
from pipeline.testing.recording import folder_in_memory
from pipeline.wiring.recovery import Fold
from tests.simulation.world import GROUPS, World


def simulate(seed: int) -> int:
    """Play the world of a seed. Returns how many batches were trained in the line that survives.

    Raises:
        AssertionError: something that must hold did not.
    """
    loop = VirtualClockLoop()
    try:
        with folder_in_memory() as folder:
            return loop.run_until_complete(_Play(World(seed), folder).run())
    finally:
        loop.close()


class _Play:
    def __init__(self, world: World, folder: str) -> None:
        self.world, self.folder = world, folder
        self.directory = os.path.join(folder, "0")
        self.saved: dict[int, list[list[Any]]] = {}
        self.life = 0

    async def run(self) -> int:
        while self.life < self.world.lives - 1:
            self.life += 1
            await self._one_life()
        self.life += 1
        return await self._last_life()

    # -- lives ---------------------------------------------------------------------------------------------------

    async def _one_life(self) -> None:
        """Live for a while, and die: killed anywhere, resuming and closing included, or closed."""
        chance = random.Random(f"{self.world.seed}/{self.life}")
        base = os.path.join(self.folder, f"base-{self.life}")
        if os.path.isdir(self.directory):
            shutil.copytree(self.directory, base)
        files = RecordingFiles(self.directory)
        pipe = self.world.make(self.life, directory=self.directory, files=files, inline=True)
        trainer = FakeTrainer()
        async with pipe:
            with anyio.move_on_after(chance.uniform(0.05, 6.0)):
                await self._begin(pipe, trainer, chance)
                await self._train(pipe, trainer, chance)
            self._check_recovery(pipe)
            changes = list(files.changes)
        if chance.random() < 0.75:
            replay = Replay(base)
            kept = max(0, len(changes) - chance.choice([0, 0, 0, 1, 2, 5, chance.randint(0, len(changes))]))
            replay.forward(changes, kept)
            if kept < len(changes) and changes[kept].verb == "write" and chance.random() < 0.5:
                replay.tear(changes[kept], chance.random())
            self.directory = base

    async def _last_life(self) -> int:
        files = RecordingFiles(self.directory)
        pipe = self.world.make(self.life, directory=self.directory, files=files, inline=True)
        trainer = FakeTrainer()
        chance = random.Random(f"{self.world.seed}/last")
        async with pipe:
            await self._begin(pipe, trainer, chance)
            with anyio.fail_after(100_000):
                await self._train(pipe, trainer, chance)
            self._check_end(pipe, trainer)
            self._check_recovery(pipe)
        return len(trainer.batches)

    async def _begin(self, pipe: Pipeline, trainer: FakeTrainer, chance: random.Random) -> None:
        pipe.attach(trainer=trainer)
        if self.saved and chance.random() < 0.15:
            await self._back(pipe, chance)
        else:
            await pipe.resume()
        pipe.ledger.check()
        async with pipe.weight_update(version=len(trainer.batches)):
            pass
        await pipe.start()

    async def _back(self, pipe: Pipeline, chance: random.Random) -> None:
        """Resume an older step, of those that are on the disk."""
        layout = Layout(self.directory)
        run = layout.read_run()
        steps = {stored.manifest.step for stored in find_generations(layout, run.run_id).complete} if run else set()
        await pipe.resume(step=chance.choice(sorted(steps)) if steps else None)

    async def _train(self, pipe: Pipeline, trainer: FakeTrainer, chance: random.Random) -> None:
        bound = pipe.options.max_staleness
        released, begun_with = 0, len(pipe.ledger.entries)
        async for batch in self._batches(pipe, chance):
            self._check_memory(pipe, begun_with)
            if released < 3 and chance.random() < 0.1:
                released += 1
                batch.release()
                continue
            masked = pipe.options.staleness_policy == "mask"  # then it is its tokens that are bounded
            assert bound is None or masked or batch.staleness <= bound, f"{batch}: {bound} allowed"
            trainer.step(batch)
            await anyio.sleep(chance.choice([0.0, 0.1, 1.0]))
            await self._publish(pipe, batch.step, chance)
            if chance.random() < 0.4:
                saving = await pipe.save(batch.step, replay_buffer=chance.random() < 0.8)
                self.saved[batch.step] = list(trainer.batches)
                if chance.random() < 0.5:
                    await saving.committed()

    async def _batches(self, pipe: Pipeline, chance: random.Random) -> AsyncIterator[Batch]:
        """Batches as ``pipe.batches`` gives them, for a trainer that may lose patience and may ack a step late."""
        held: int | None = None
        while True:
            batch = None
            impatient = chance.random() < self.world.impatient
            try:
                with anyio.move_on_after(chance.random() if impatient else float("inf")):
                    batch = await pipe.get_batch(GROUPS)
            except EndOfSource:
                if held is None:
                    return
                await pipe.ack(held)  # what is leased might still be released, so it is not the end before
                held = None
            if batch is None:
                continue
            yield batch
            if batch.step not in pipe.ledger.leases:
                held = held if batch.released else None
            elif held is None and chance.random() < self.world.lag:
                held = batch.step
            else:
                await pipe.ack(batch.step)
                held = None

    async def _publish(self, pipe: Pipeline, step: int, chance: random.Random) -> None:
        while True:
            try:
                async with pipe.weight_update(version=step, running=chance.choice(["keep", "keep", "finish", "abort"])):
                    await anyio.sleep(chance.choice([0.0, 0.2]))
                    if chance.random() < 0.05:
                        raise ConnectionError("the push failed")
                return
            except ConnectionError:
                continue

    # -- what must hold --------------------------------------------------------------------------------------------

    def _check_memory(self, pipe: Pipeline, begun_with: int) -> None:
        """What is held is bounded by the options, whatever happens, and belongs to an item that has not ended."""
        state, options = pipe._run.state, pipe.options
        entries, staleness = state.ledger.entries, options.max_staleness
        ahead = options.capacity or (2 if staleness is None else staleness + 1) * GROUPS
        # Beside what may be begun: what oversampling adds, two batches that are out, and a tail that gathers.
        most = max(begun_with, ahead) + 4 * GROUPS
        assert len(entries) <= most, f"{len(entries)} items are held, of {most} at the most"
        held = {uid for uid in entries if uid in state.buffer.storage}
        assert len(state.buffer.storage) == len(held), "payloads are held of items that have ended"
        kept = {(uid, member) for uid, member, _ in state.partials.items()}
        going = {(uid, m) for uid, entry in entries.items() for m, now in enumerate(entry.members) if now <= IN_FLIGHT}
        assert kept <= going, f"partial rollouts are kept of members that have ended: {sorted(kept - going)}"

    def _check_end(self, pipe: Pipeline, trainer: FakeTrainer) -> None:
        state = pipe._run.state
        pipe.ledger.check()
        trained = Counter(trainer.groups)
        twice = {key for key, count in trained.items() if count > 1}
        assert not twice, f"trained twice: {sorted(twice)}"
        unknown = trained.keys() - self.world.items
        assert not unknown, f"trained, and in no source: {sorted(unknown)}"
        totals = pipe.ledger.totals.values()
        dropped = sum(sum(each.dropped.values()) for each in totals)
        lost = len(self.world.items) - len(trained) - dropped
        assert lost == 0, f"{len(trained)} trained and {dropped} dropped of {len(self.world.items)}: {lost} lost"
        assert sum(each.claimed for each in totals) == len(self.world.items)
        now = pipe.statistics()
        held = (len(pipe.ledger.entries), len(state.buffer), len(state.buffer.storage), len(state.partials))
        assert held == (0, 0, 0, 0), f"held at the end: entries, buffer, payloads, partials = {held}"
        assert (now.buffer.waiters, now.rollouts.in_flight, now.rollouts.scoring) == (0, 0, 0)

    def _check_recovery(self, pipe: Pipeline) -> None:
        """What a recovery would fold, with the consumer half as it is now, is the state as it is now."""
        state = pipe._run.state
        if state.writer is None or not state.writer.writer.idle:
            return  # what is still in the queue is what a crash would take
        layout, folder = Layout(self.directory), pipe._run._folder
        assert folder is not None
        own, saver = state.incarnation, pipe._run._saver
        assert saver is not None
        plans = [DrawPlan(t.name, t.source, t.share, t.epochs, t.shuffle) for t in state.tasks.values()]
        journals = list(read_journals(layout, run_tag=folder.tag))
        opened = next(each.event for each in journals if each.incarnation == own)
        fold = Fold(state.ledger.consumer_half(), plans, seed=7, discarded=opened.discarded)  # type: ignore[union-attr]
        for logged in journals:
            if logged.incarnation >= saver.base:
                fold.apply(logged)
        fold.ledger.restore(state.ledger.consumer_half())
        assert _producer_half(fold.ledger) == _producer_half(state.ledger), "recovered, and live"
        assert fold.sampler.cursors == state.sampler.cursors
        assert fold.sampler.mixture.drawn == state.sampler.mixture.drawn


def _producer_half(ledger: Ledger) -> dict[str, Any]:
    """What the events alone decide; leases are the consumer's."""
    found = copy.deepcopy(dict(ledger.snapshot()))
    for entry in found["entries"].values():
        del entry["masked"]  # what of it is too old for the batch that it is leased for
        entry["state"] = "settled" if PENDING not in entry["members"] and not entry["in_flight"] else "open"
    del found["consumer"], found["order"]
    return found
