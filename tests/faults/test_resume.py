"""Closed or crashed anywhere and resumed: nothing is lost, nothing is trained twice, and no epoch is skipped."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Context, EndOfSource, Item, Pipeline, Rollout, SourceMismatch, Task
from tasks import SequenceSource
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.runs import ids, numbers, pipeline, task

virtual = pytest.mark.virtual_time


def files_of(directory: str, *parts: str) -> dict[str, tuple[str, int]]:
    """Digest and mtime of every file below ``directory/parts``."""
    found = {}
    for folder, _, names in os.walk(os.path.join(directory, *parts)):
        for name in names:
            path = os.path.join(folder, name)
            found[path] = (hashlib.sha256(Path(path).read_bytes()).hexdigest(), os.stat(path).st_mtime_ns)
    return found


def bytes_of(directory: str) -> int:
    """Bytes below ``directory``; a file with several names counts once."""
    stats = [os.stat(os.path.join(where, name)) for where, _, names in os.walk(directory) for name in names]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


class TestGenerationRunsAhead:
    """CASES 1: what was finished and not trained when the run stopped is trained after it."""

    @virtual
    @pytest.mark.parametrize("way", ["closed", "crashed"])
    async def test_finished_and_untrained_items_come_first_after_a_resume(
        self, run_directory: str, tmp_path: Path, way: str
    ) -> None:
        given = task(12, lasting({}))
        trained = Trained()
        async with inline_pipeline(given, directory=run_directory, capacity=6, concurrency=6) as pipe:
            await begin(pipe, trained=trained)
            await anyio.sleep(2)
            batch = await pipe.get_batch(2)
            assert ids(batch) == [0, 1]
            await train(pipe, trained, batch)
            await (await pipe.save(1)).committed()
            copy = crashed_copy(run_directory, tmp_path / "copy")
        again = Trained()
        directory = run_directory if way == "closed" else copy
        async with inline_pipeline(given, directory=directory, capacity=6, concurrency=6) as pipe:
            resumed = await begin(pipe, trained=again)
            assert (resumed.step, resumed.version, resumed.buffered) == (1, 1, 4)
            await finish(pipe, again, 2)
        assert again.batches[0] == [0, 1]
        assert again.batches[1] == [2, 3]
        assert again.items == list(range(12))

    @virtual
    async def test_a_batch_that_was_trained_but_not_saved_is_handed_out_again_first(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        given = task(12, lasting({}))
        async with inline_pipeline(given, directory=run_directory, capacity=6, concurrency=6) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            for _ in range(2):
                batch = await pipe.get_batch(2)
                await train(pipe, trained, batch)
                await pipe.ack(batch.step)
            await anyio.sleep(0.1)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        again = Trained()
        async with inline_pipeline(given, directory=copy, capacity=6, concurrency=6) as pipe:
            resumed = await begin(pipe, trained=again)
            assert (resumed.step, resumed.repeated) == (0, 2)
            first = await pipe.get_batch(2)
            assert (ids(first), first.repeated, first.step) == ([0, 1], True, 1)
            await train(pipe, again, first)
            await pipe.ack(1)
            await finish(pipe, again, 2)
        assert again.batches[:2] == [[0, 1], [2, 3]]
        assert again.items == list(range(12))

    @virtual
    @pytest.mark.parametrize("way", ["closed", "crashed"])
    async def test_a_stop_where_the_data_ends_starts_no_second_pass(
        self, run_directory: str, tmp_path: Path, way: str
    ) -> None:
        given = task(12, lasting({}))
        trained = Trained()
        async with inline_pipeline(given, directory=run_directory, capacity=6, concurrency=6) as pipe:
            await begin(pipe, trained=trained)
            for _ in range(3):
                batch = await pipe.get_batch(2)
                await train(pipe, trained, batch)
                await pipe.save(batch.step)
            await anyio.sleep(10)
            assert pipe.ledger.claimed == 12
            copy = crashed_copy(run_directory, tmp_path / "copy")
        directory = run_directory if way == "closed" else copy
        async with inline_pipeline(given, directory=directory, capacity=6, concurrency=6) as pipe:
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 2)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 12
            with pytest.raises(EndOfSource):
                await pipe.get_batch(2)
        assert trained.items == list(range(12))


@virtual
async def test_a_slow_item_in_flight_at_the_crash_is_run_again_and_nothing_else(
    run_directory: str, tmp_path: Path
) -> None:
    """CASES 2: item 3 takes a hundred times longer; 0, 1, 2, 4 and 5 are done when the process dies."""
    runs: list[int] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        runs.append(item["n"])
        return await lasting({3: 100.0, 6: 2.0})(item, ctx)

    async with inline_pipeline(task(20, run), directory=run_directory, capacity=20, concurrency=4) as pipe:
        await begin(pipe, trained=Trained())
        await anyio.sleep(2.5)
        states = {n: pipe.ledger.state(n) for n in range(9)}
        assert [n for n in range(9) if states[n] == "buffered"] == [0, 1, 2, 4, 5]
        copy = crashed_copy(run_directory, tmp_path / "copy")
    runs.clear()
    trained = Trained()
    async with inline_pipeline(task(20, run), directory=copy, capacity=20, concurrency=4) as pipe:
        resumed = await begin(pipe, trained=trained)
        assert (resumed.buffered, resumed.waiting) == (5, 4)
        await finish(pipe, trained, 4)
    assert trained.items == list(range(20))
    assert runs[:4] == [3, 6, 7, 8], "what was in flight is run again before what is new"
    assert sorted(runs) == [3, *range(6, 20)], "and nothing that was done is run again"


class TestEpochs:
    """CASES 4 and 33: a checkpoint at an epoch's end, and the order of the epochs after it."""

    @virtual
    @pytest.mark.parametrize("way", ["closed", "crashed"])
    async def test_a_resume_at_an_epochs_end_trains_exactly_the_steps_that_are_left(
        self, run_directory: str, tmp_path: Path, way: str
    ) -> None:
        given = task(12, lasting({}), epochs=2)
        trained = Trained()
        options = {"strategy": "synchronous", "concurrency": 4}
        async with inline_pipeline(given, directory=run_directory, **options) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=3):
                await train(pipe, trained, batch)
            await (await pipe.save(3)).committed()
            copy = crashed_copy(run_directory, tmp_path / "copy")
        directory = run_directory if way == "closed" else copy
        async with inline_pipeline(given, directory=directory, **options) as pipe:
            await begin(pipe, trained=trained)
            steps = []
            async for batch in pipe.batches(groups=4, until=6):
                steps.append(batch.step)
                await train(pipe, trained, batch)
            assert steps == [4, 5, 6]
            assert pipe.ledger.step == 6
            with pytest.raises(EndOfSource):
                await pipe.get_batch(4)
        assert sorted(n for batch in trained.batches[3:] for n in batch) == list(range(12))
        assert trained.items == sorted([*range(12)] * 2)

    @virtual
    async def test_sources_that_end_before_the_last_step_are_an_error(self, run_directory: str) -> None:
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            batches = pipe.batches(groups=4, until=6)
            for _ in range(3):
                await train(pipe, trained, await anext(batches))
            with pytest.raises(EndOfSource, match="step 4"):
                await anext(batches)
            await pipe.save(3)
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            await begin(pipe, trained=Trained())
            with pytest.raises(EndOfSource, match="step 4"):
                await anext(pipe.batches(groups=4, until=6))

    @virtual
    async def test_the_orders_of_epochs_differ_and_survive_a_restart_at_each_boundary(self, tmp_path: Path) -> None:
        async def orders(directory: str, restarts: bool) -> list[list[int]]:
            drawn: list[int] = []
            for life in range(3 if restarts else 1):
                given = task(20, lasting({}), epochs=3, shuffle=True)
                until = 2 * (life + 1) if restarts else 6
                options = {"order": "strict", "strategy": "synchronous"}
                async with inline_pipeline(given, directory=directory, seed=0, **options) as pipe:
                    await begin(pipe)
                    async for batch in pipe.batches(groups=10, until=until):
                        drawn += ids(batch)
                    await pipe.save(until)
            return [drawn[:20], drawn[20:40], drawn[40:]]

        once = await orders(str(tmp_path / "once"), restarts=False)
        assert [sorted(epoch) for epoch in once] == [list(range(20))] * 3
        assert once[0] != once[1] != once[2] != once[0]
        assert await orders(str(tmp_path / "thrice"), restarts=True) == once


class TestRoundTrips:
    """CASES 6 and 13: resuming and committing again changes nothing and copies nothing."""

    @virtual
    @pytest.mark.parametrize("steps", [0, 1, 2, 5, 6])
    async def test_rounds_of_resume_without_training_keep_the_state_byte_for_byte(
        self, run_directory: str, steps: int
    ) -> None:
        given = task(12, lasting({n: 5.0 - (n * 5) % 12 / 4 for n in range(12)}))  # they do not end in their order
        async with inline_pipeline(given, directory=run_directory, concurrency=12, capacity=12) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=2, until=steps):
                await train(pipe, trained, batch)
            await pipe.save(steps)
            leased = ids(await pipe.get_batch(2)) if steps < 6 else []  # and not acked when the run closes
        states = []
        for _ in range(6):
            async with inline_pipeline(given, directory=run_directory, concurrency=3, keep=None) as pipe:
                pipe.attach(trained=Trained())
                await pipe.resume()
            newest = max((Path(run_directory) / "generations").iterdir(), key=lambda path: int(path.name))
            states.append([(newest / name).read_bytes() for name in ("consumer.json", "progress.json")])
        assert states[1:] == states[:1] * 5
        async with inline_pipeline(given, directory=run_directory, concurrency=3, order="strict") as pipe:
            await begin(pipe, trained=(again := Trained()))
            await finish(pipe, again, 2)
        assert again.items == list(range(12))
        assert again.batches[steps : steps + 1] == ([leased] if leased else []), "it is handed out again"

    async def test_resumes_without_new_data_do_not_grow_the_folder(self, run_directory: str) -> None:
        async def megabyte(item: Item, ctx: Context) -> Rollout:
            return Rollout({"x": np.full(2**20, item["n"], np.uint8)}, reward=0.0)

        given = task(7, megabyte)
        sizes, uids = [], []
        for _ in range(4):
            async with pipeline(given, directory=run_directory, capacity=7) as pipe:
                model = Trained()
                model.weight = model.weight.repeat(2**16)
                await begin(pipe, trained=model)
                batch = await pipe.get_batch(7)
                uids.append(batch.uids)
                assert [rollout["x"].sum().item() for rollout in batch.rollouts] == [n * 2**20 for n in ids(batch)]
                batch.release()
                await (await pipe.save(0)).committed()
            sizes.append(bytes_of(run_directory))
        assert [sorted(each) for each in uids] == [list(range(7))] * 4
        assert max(sizes) <= sizes[0] * 1.05


class TestAnotherSource:
    """CASES 16: rows are never skipped because another source once had as many."""

    @staticmethod
    async def train_five(directory: str) -> None:
        source = SequenceSource([{"n": n} for n in range(10)], name="A")
        given = Task("numbers", source=source, run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory, capacity=5) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(5)
            await pipe.save(batch.step)
            await anyio.sleep(1)
            await pipe.get_batch(2)  # leased at the end; three more are buffered

    @staticmethod
    def other(name: str = "A", epochs: int = 1) -> Task:
        source = SequenceSource([{"n": 100 + n} for n in range(3)], name=name)
        return Task("numbers", source=source, run=lasting({}), shuffle=False, epochs=epochs)

    @virtual
    @pytest.mark.parametrize("name", ["A", "B"])
    async def test_it_is_an_error_that_names_both(self, run_directory: str, name: str) -> None:
        await self.train_five(run_directory)
        async with inline_pipeline(self.other(name), directory=run_directory) as pipe:
            before = pipe.ledger.snapshot()
            with pytest.raises(SourceMismatch, match=rf"'numbers'.*A \(10 items.*{name} \(3 items.*restart"):
                await pipe.resume()
            assert pipe.ledger.snapshot() == before

    @virtual
    @pytest.mark.parametrize("epochs", [1, 2, 3])
    @pytest.mark.parametrize("groups", [1, 2])
    @pytest.mark.parametrize("options", [{}, {"order": "strict"}, {"max_staleness": 2}])
    async def test_a_task_can_be_begun_anew_with_it(
        self, run_directory: str, tmp_path: Path, epochs: int, groups: int, options: dict[str, Any]
    ) -> None:
        await self.train_five(run_directory)
        copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(self.other("B", epochs), directory=copy, **options) as pipe:
            resumed = await pipe.resume(restart=["numbers"])
            assert resumed.step == 1
            await pipe.start(weights_current=True)
            drawn = (await finish(pipe, Trained(1), groups)).items
            pipe.ledger.check()
        assert drawn == sorted([0, 1, 2] * epochs), "every epoch that the task asks for is of the new source"
        async with inline_pipeline(self.other("B", epochs), directory=copy) as pipe:
            await pipe.resume()
            await pipe.start(weights_current=True)
            again = sorted([n for each in [ids(b) async for b in pipe.batches(groups=1)] for n in each])
        assert again == drawn, "the new source is the run's from there on"

    @virtual
    async def test_a_source_that_has_grown_goes_on_where_it_was(self, run_directory: str) -> None:
        async with inline_pipeline(task(10, lasting({}), epochs=2), directory=run_directory, capacity=5) as pipe:
            await begin(pipe)
            await pipe.save((await pipe.get_batch(5)).step)
        grown = Task("numbers", source=numbers(13), run=lasting({}), shuffle=False, epochs=2)
        async with inline_pipeline(grown, directory=run_directory, capacity=5) as pipe:
            await begin(pipe)
            drawn = [n for batch_ids in [ids(b) async for b in pipe.batches(groups=1)] for n in batch_ids]
        assert drawn == [*range(5, 10), *range(13)], "new rows count from the next epoch"


@virtual
async def test_a_resumed_run_works_with_the_restored_version_and_touches_no_old_file(run_directory: str) -> None:
    """CASES 18: resumed at step 7, the first rollout has version 7 and is not stale."""
    options = {"strategy": "synchronous", "max_staleness": 0, "concurrency": 2}
    async with inline_pipeline(task(40, lasting({})), directory=run_directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=2, until=7):
            await train(pipe, trained, batch)
        await pipe.save(7)
    old = files_of(run_directory, "segments") | files_of(run_directory, "journals")
    seen: list[int] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        seen.append(ctx.version)
        return Rollout(reward=0.0)

    async with inline_pipeline(task(40, run), directory=run_directory, **options) as pipe:
        resumed = await begin(pipe, trained=Trained())
        assert resumed.version == pipe.version == 7
        batch = await pipe.get_batch(2)
        assert seen == [7, 7]
        assert (batch.step, batch.staleness) == (8, 0)
        assert [group.oldest for group in batch] == [7, 7]
        assert pipe.metrics()["incarnation"] == 2
    now = files_of(run_directory, "segments") | files_of(run_directory, "journals")
    assert {path: now[path] for path in old} == old
    assert sorted(os.path.basename(path)[:6] for path in now.keys() - old.keys()) == ["000002", "000002"]


async def test_a_run_closed_and_resumed_in_the_synchronous_form(run_directory: str) -> None:
    def life(until: int | None, trained: Trained) -> list[int]:
        with Pipeline(task(12), directory=run_directory, watchdog=None, capacity=6).sync() as pipe:
            pipe.attach(trained=trained)
            with pipe.weight_update(version=pipe.resume().version):
                pass
            pipe.start()
            steps = []
            for batch in pipe.batches(groups=2, until=until):
                trained.step(batch)
                steps.append(batch.step)
                with pipe.weight_update(version=batch.step):
                    pass
                pipe.save(batch.step)
            pipe.ledger.check()
            return steps

    first, second = Trained(), Trained()
    assert await anyio.to_thread.run_sync(life, 2, first) == [1, 2]
    assert await anyio.to_thread.run_sync(life, None, second) == [3, 4, 5, 6]
    assert second.batches[:2] == first.batches
    assert second.items == list(range(12))
