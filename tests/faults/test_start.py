"""Nothing is rolled out before it is certain where the run stands and which weights it has."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from pipeline import ClosedError, ConfigError, Context, ForebayError, Item, Pipeline, Rollout, Starved, UsageError
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.disk import ScriptedFiles
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def used(directory: str, **options: Any) -> AsyncIterator[Pipeline]:
    """Open, once more, a run that trained and saved three steps."""
    async with inline_pipeline(task(40, lasting({})), directory=directory, capacity=8) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=2, until=3):
            await train(pipe, trained, batch)
        await pipe.save(3)
    async with inline_pipeline(task(40, lasting({})), directory=directory, capacity=8, **options) as pipe:
        pipe.attach(trained=Trained())
        yield pipe


class TestUsedDirectory:
    async def test_start_without_resume_is_refused_and_resume_still_works(self, run_directory: str) -> None:
        async with used(run_directory) as pipe:
            with pytest.raises(UsageError, match=r"resume\(\) before start\(\)"):
                await pipe.start()
            with pytest.raises(UsageError, match=r"resume\(\) before start\(\)"):
                await pipe.start(weights_current=True)
            assert (await pipe.resume()).step == 3
            await pipe.start(weights_current=True)
            assert (await pipe.get_batch(2)).step == 4

    @pytest.mark.parametrize("moment", ["after start", "after a rollout"])
    async def test_so_it_is_after_a_crash_that_left_no_save(
        self, run_directory: str, tmp_path: Any, moment: str
    ) -> None:
        async with inline_pipeline(task(40, lasting({})), directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(0 if moment == "after start" else 5)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(task(40, lasting({})), directory=copy) as pipe:
            with pytest.raises(UsageError, match=r"resume\(\) before start\(\)"):
                await pipe.start()

    async def test_a_directory_that_was_only_opened_is_not_used(self, run_directory: str) -> None:
        for _ in range(2):
            async with inline_pipeline(task(2), directory=run_directory):
                pass
        async with inline_pipeline(task(2), directory=run_directory) as pipe:
            await pipe.start()
            assert len(await pipe.get_batch(2)) == 2

    async def test_resume_comes_once_and_before_start(self, run_directory: str) -> None:
        async with used(run_directory) as pipe:
            await pipe.resume()
            with pytest.raises(UsageError, match="once, before start"):
                await pipe.resume()
            await pipe.start(weights_current=True)
            for verb in (pipe.resume, pipe.start):
                with pytest.raises(UsageError):
                    await verb()
            with pytest.raises(UsageError, match="before start"):
                pipe.attach(late=Trained())

    async def test_resume_in_an_empty_directory_says_that_there_is_nothing(self, run_directory: str) -> None:
        async with inline_pipeline(task(2), directory=run_directory) as pipe:
            resumed = await pipe.resume()
            assert (resumed.step, resumed.version, resumed.generation) == (0, 0, None)
            await pipe.start()

    async def test_other_things_attached_than_were_saved_are_refused_by_name(self, run_directory: str) -> None:
        async with used(run_directory) as pipe:
            pipe.attach(optimizer=Trained())
            with pytest.raises(UsageError, match=r"not in the generation: optimizer"):
                await pipe.resume()
        async with inline_pipeline(task(40), directory=run_directory) as pipe:
            with pytest.raises(UsageError, match=r"not attached: trained"):
                await pipe.resume()

    async def test_another_seed_is_refused_with_both(self, run_directory: str) -> None:
        async with used(run_directory, seed=3) as pipe:
            with pytest.raises(UsageError, match=r"seed=3.*seed=0"):
                await pipe.resume()


class TestRestoredWeights:
    async def test_start_is_refused_until_an_update_has_set_the_version(self, run_directory: str) -> None:
        async with used(run_directory) as pipe:
            resumed = await pipe.resume()
            assert resumed.version == pipe.version == 3
            with pytest.raises(UsageError, match="weight_update"):
                await pipe.start()
            with pytest.raises(RuntimeError, match="server is away"):
                await self.failing_push(pipe, 3)
            with pytest.raises(UsageError, match="weight_update"):
                await pipe.start()
            async with pipe.weight_update(version=3):
                pass
            await pipe.start()
            batch = await pipe.get_batch(2)
            assert batch.step == 4

    async def test_servers_that_hold_them_already_can_be_vouched_for(self, run_directory: str) -> None:
        async with used(run_directory) as pipe:
            await pipe.resume()
            await pipe.start(weights_current=True)
            assert (await pipe.get_batch(2)).step == 4

    @pytest.mark.parametrize("version", [0, 2])
    async def test_an_older_version_is_refused(self, run_directory: str, version: int) -> None:
        async with used(run_directory) as pipe:
            await pipe.resume()
            with pytest.raises(ConfigError, match="never fall"):
                async with pipe.weight_update(version=version):
                    pass
            assert pipe.version == 3
            with pytest.raises(UsageError, match="weight_update"):
                await pipe.start()

    @staticmethod
    async def failing_push(pipe: Pipeline, version: int, **more: Any) -> None:
        async with pipe.weight_update(version=version, **more):
            raise RuntimeError("the server is away")


class TestPushes:
    @staticmethod
    @asynccontextmanager
    async def recorded() -> AsyncIterator[tuple[Pipeline, list[tuple[float, int]]]]:
        """A pipeline, and the time and version of each attempt that started; each takes a second."""
        starts: list[tuple[float, int]] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            starts.append((anyio.current_time(), ctx.version))
            await anyio.sleep(1.0)
            return Rollout(reward=0.0)

        async with inline_pipeline(task(1000, run), concurrency=4, capacity=100) as pipe:
            await pipe.start()
            yield pipe, starts

    @pytest.mark.parametrize("running", ["keep", "finish", "abort"])
    async def test_after_a_failed_push_nothing_starts_until_one_succeeds(self, running: str) -> None:
        async with self.recorded() as (pipe, starts):
            await anyio.sleep(0.5)
            with pytest.raises(RuntimeError, match="away"):
                await TestRestoredWeights.failing_push(pipe, 1, running=running)
            assert pipe.version == 0
            before = len(starts)
            await anyio.sleep(100)
            assert len(starts) == before
            with pytest.raises(Starved, match="weight_update failed"):
                await pipe.get_batch(50)
            now = anyio.current_time()
            async with pipe.weight_update(version=1):
                pass
            await anyio.lowlevel.checkpoint()
            assert starts[before:] == [(now, 1)] * 4
            assert len(await pipe.get_batch(50)) == 50

    async def test_a_push_that_is_cancelled_has_failed(self) -> None:
        async with self.recorded() as (pipe, starts):
            with anyio.move_on_after(5):
                async with pipe.weight_update(version=1, running="finish"):
                    await anyio.sleep_forever()
            before = len(starts)
            await anyio.sleep(10)
            assert len(starts) == before
            assert pipe.version == 0

    async def test_one_cancelled_before_its_body_leaves_everything_as_it_was(self) -> None:
        async with self.recorded() as (pipe, starts):
            entered = False
            with anyio.move_on_after(0.25):
                async with pipe.weight_update(version=1, running="finish"):
                    entered = True
            assert not entered
            await anyio.sleep(2)
            assert [version for _, version in starts][4:8] == [0] * 4

    async def test_nothing_starts_in_the_body_and_what_starts_after_it_has_the_new_version(self) -> None:
        async with self.recorded() as (pipe, starts):
            await anyio.sleep(2.5)
            async with pipe.weight_update(version=7):
                before = len(starts)
                await anyio.sleep(10)
                assert len(starts) == before
            await anyio.sleep(0.1)
            assert [version for _, version in starts[before:]] == [7] * 4

    async def test_versions_never_fall_and_may_stay_or_leap(self) -> None:
        async with self.recorded() as (pipe, _):
            for version in (0, 0, 1, 1, 5):
                async with pipe.weight_update(version=version):
                    pass
                assert pipe.version == version
            for wrong in (4, 0, -1, True, 5.5, "6", None):
                with pytest.raises(ConfigError, match="version="):
                    await TestRestoredWeights.failing_push(pipe, wrong)  # type: ignore[arg-type]
            assert pipe.version == 5
            await anyio.sleep(1)
            assert len(await pipe.get_batch(4)) == 4, "a refused update is no failed push"

    async def test_what_becomes_of_those_that_run_is_one_of_three_things(self) -> None:
        async with self.recorded() as (pipe, _):
            with pytest.raises(ConfigError, match="'keep', 'finish' or 'abort'"):
                await TestRestoredWeights.failing_push(pipe, 1, running="pause")
            async with pipe.weight_update(version=1):
                with pytest.raises(UsageError, match="open already"):
                    await TestRestoredWeights.failing_push(pipe, 2)
            assert pipe.version == 1

    async def test_aborted_attempts_begin_again_and_are_no_failures(self) -> None:
        async with self.recorded() as (pipe, starts):
            await anyio.sleep(0.5)
            async with pipe.weight_update(version=1, running="abort"):
                assert pipe.statistics().rollouts.in_flight == 0
            batch = await pipe.get_batch(4)
            assert sorted(ids(batch)) == [0, 1, 2, 3]
            assert [version for _, version in starts[:8]] == [0] * 4 + [1] * 4
            totals = pipe.ledger.totals["numbers"]
            assert (totals.failed, totals.interrupted) == (0, 4)

    async def test_attempts_that_have_not_begun_to_run_are_aborted_as_well(self) -> None:
        begun = anyio.current_time()
        async with self.recorded() as (pipe, starts):  # in the turn of the loop in which they were assigned
            async with pipe.weight_update(version=1, running="abort"):
                assert pipe.statistics().rollouts.in_flight == 0
                assert anyio.current_time() == begun
            await anyio.sleep(1.5)  # and those that idle workers were just given
            assert {version for _, version in starts} == {1}
            assert len(await pipe.get_batch(8)) == 8


class TestVerbs:
    async def test_before_opening_and_after_closing_every_verb_says_so(self) -> None:
        pipe = inline_pipeline(task(4))

        async def update() -> None:
            async with pipe.weight_update(version=0):
                pass

        verbs: list[Callable[[], Awaitable[Any]]]
        verbs = [pipe.resume, pipe.start, lambda: pipe.get_batch(1), lambda: pipe.ack(0), lambda: pipe.save(0), update]
        for verb in verbs:
            with pytest.raises(ClosedError, match="not open"):
                await verb()
        async with pipe:
            await pipe.start()
        for verb in verbs:
            with pytest.raises(ClosedError, match="closed"):
                await verb()

    async def test_batches_and_saves_come_after_start(self, run_directory: str) -> None:
        async with inline_pipeline(task(4), directory=run_directory) as pipe:
            with pytest.raises(UsageError, match="after start"):
                await pipe.get_batch(1)
            with pytest.raises(UsageError, match="after start"):
                await pipe.save(0)

    async def test_a_pipeline_is_opened_once(self) -> None:
        pipe = inline_pipeline(task(4))
        async with pipe:
            pass
        with pytest.raises(UsageError, match="opened before"):
            async with pipe:
                pass


async def test_a_start_that_failed_on_the_disk_never_goes_on_without_generation_zero(tmp_path: Any) -> None:
    """The k-th call to the file system fails, once; then start is called again, and then the process dies."""
    outcomes = set()
    for number in range(1, 60):
        directory = str(tmp_path / str(number))
        files = ScriptedFiles(fail_at=number)
        failed = 0
        try:
            async with inline_pipeline(task(6, lasting({})), directory=directory, files=files) as pipe:
                pipe.attach(trained=Trained())
                for _ in range(3):
                    try:
                        await pipe.start()
                        break
                    except (ForebayError, OSError):
                        failed += 1
                if pipe.statistics().rollouts.in_flight:
                    assert os.listdir(os.path.join(directory, "generations")), f"call {number} failed"
                    outcomes.add("went on" if failed else "never failed")
                    await anyio.sleep(0.5)
                copy = crashed_copy(directory, tmp_path / f"copy-{number}")
        except (ForebayError, OSError):
            continue
        async with inline_pipeline(task(6, lasting({})), directory=copy) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            assert (await finish(pipe, trained, 2)).items == list(range(6)), f"call {number} failed"
    assert outcomes == {"went on", "never failed"}
