"""Copies of generations elsewhere, and checkpoints of the trainer's own beside them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from pipeline import Committed, Pipeline, Stopped, StoreError
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.store.layout import Layout
from pipeline.wiring.sharing import Sharing
from tests.faults.test_triggers import manifests, stops
from tests.support.crashes import Trained, begin, finish, inline_pipeline, train
from tests.support.runs import pipeline, task


def copy(told: Committed, target: str | os.PathLike[str]) -> str:
    """Copy a generation to a new folder, as a user would."""
    for name, path in zip(told.files, told.paths, strict=True):
        to = os.path.join(target, name)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copyfile(path, to)
    return os.fspath(target)


def make(directory: str, on_commit: Any = None, **options: Any) -> Pipeline:
    return inline_pipeline(task(60), directory=directory, segment_bytes=800, on_commit=on_commit, **options)


async def goes_on(directory: str, step: int) -> None:
    trained = Trained()
    async with make(directory) as pipe:
        assert (await begin(pipe, trained=trained)).step == step
        await finish(pipe, trained, 4)
    assert trained.items == list(range(60))
    assert verify(directory).whole


@pytest.mark.virtual_time
class TestCopies:
    async def test_each_copy_is_a_run(self, run_directory: str, tmp_path: Path) -> None:
        told: list[Committed] = []

        def elsewhere(each: Committed) -> None:
            told.append(each)
            copy(each, tmp_path / f"{each.generation}")

        trained = Trained()
        async with make(run_directory, elsewhere, save_every=1, keep=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=9):
                await train(pipe, trained, batch)
                if batch.step == 5:
                    async with pipe.checkpoint(5) as folder:
                        Path(folder, "mine").write_text("x")
                if batch.step > 5 and pipe.save_due(batch.step):
                    await pipe.save(batch.step, replay_buffer=batch.step != 7)
        steps = [each.step for each in told]
        assert steps == sorted(steps)
        assert {0, 5, 7, 9} <= set(steps)
        assert len(steps) >= 8  # one that the next overtakes is left out
        assert [each.reason for each in told[:2]] == ["start", "every 1 steps"]
        for each in told:
            await goes_on(str(tmp_path / f"{each.generation}"), each.step)
            if each.step == 5:  # the generation of the resume carries it along
                assert list((tmp_path / f"{each.generation}").glob("generations/*/files/mine"))
            if each.step == 7:  # without the buffer it needs no segment
                assert not any(name.startswith("segments") for name in each.files)

    async def test_it_stays_while_it_is_copied_and_those_between_are_left_out(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        begun, go = anyio.Event(), anyio.Event()
        told: list[int] = []

        async def slow(each: Committed) -> None:
            told.append(each.step)
            if each.step == 1:
                begun.set()
                await go.wait()
                copy(each, tmp_path / "copy")

        trained = Trained()
        async with make(run_directory, slow, save_every=1, keep=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=8):
                await train(pipe, trained, batch)
            await begun.wait()
            assert {manifest.step for manifest in manifests(run_directory)} >= {1, 8}
            go.set()
        assert told == [0, 1, 8]
        await goes_on(str(tmp_path / "copy"), 1)

    async def test_the_last_one_is_told_of_before_the_end(self, run_directory: str) -> None:
        told: list[int] = []

        async def slow(each: Committed) -> None:
            await anyio.sleep(100)
            told.append(each.step)

        async with make(run_directory, slow) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(4)
            await pipe.save(batch.step)
        assert told == [0, 1]

    async def test_whoever_waits_for_the_end_waits_for_what_has_not_begun(self, run_directory: str) -> None:
        """The order in which tasks are started is the loop's, and on trio nobody's."""
        told: list[int] = []
        async with make(run_directory) as pipe:
            await begin(pipe)
            stored = find_generations(Layout(run_directory), pipe._run.state.run_id).complete[-1]
            layout = Layout(run_directory)
            sharing = Sharing(pipe._run.state, layout, lambda each: told.append(each.step), pipe._run.in_thread)
            assert sharing.add(stored)
            async with anyio.create_task_group() as group:

                async def end() -> None:
                    await sharing.idle()
                    assert told == [0]

                group.start_soon(end)
                await anyio.sleep(1)
                group.start_soon(sharing.run)

    async def test_an_error_in_it_is_logged_and_the_run_goes_on(self, run_directory: str) -> None:
        def fails(each: Committed) -> None:
            raise ConnectionError("the bucket is gone")

        with capture_logs() as logs:
            async with make(run_directory, fails, save_every=1) as pipe:
                trained = Trained()
                await begin(pipe, trained=trained)
                await finish(pipe, trained, 4)
        lines = [line for line in logs if line["event"] == "generation.unshared"]
        assert {line["error"] for line in lines} == {"ConnectionError('the bucket is gone')"}
        assert lines[-1]["step"] == 15

    async def test_copied_again_and_again_into_one_folder_only_what_is_new(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        """What another rank or machine would do: names that are there already are not copied again."""
        target, count = tmp_path / "mirror", 0

        def mirror(each: Committed) -> None:
            nonlocal count
            newest = max(name for name in each.files if name.startswith("journals"))
            ends = {newest, *(name for name in each.files if name.startswith("segments"))}
            for name, path in zip(each.files, each.paths, strict=True):
                if name in ends or not (target / name).exists():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target / name)
                    count += 1

        trained = Trained()
        async with make(run_directory, mirror, save_every=1, keep=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=9):
                await train(pipe, trained, batch)
        await goes_on(str(target), 9)


async def test_a_plain_function_gets_a_thread(run_directory: str) -> None:
    ready = anyio.Event()
    told: list[int] = []
    loop_goes_on = anyio.Event()

    def blocks(each: Committed) -> None:
        anyio.from_thread.run_sync(ready.set)
        anyio.from_thread.run(loop_goes_on.wait)
        told.append(each.step)

    async with pipeline(task(12), directory=run_directory, on_commit=blocks) as pipe:
        await begin(pipe)
        await ready.wait()
        await pipe.get_batch(4)
        loop_goes_on.set()
    assert told == [0]


@pytest.mark.virtual_time
class TestExternal:
    async def life(self, directory: str, tmp_path: Path, upto: int, **resume: Any) -> Any:
        """Train with checkpoints of the trainer's own alone; returns what the resume said."""
        async with make(directory, keep=None) as pipe:
            resumed = await pipe.resume(**resume)
            async with pipe.weight_update(version=resumed.version):
                pass
            await pipe.start()
            async for batch in pipe.batches(groups=4, until=upto):
                path = tmp_path / f"mine-{batch.step}"
                path.mkdir(exist_ok=True)
                await pipe.save(batch.step, external=path)
        return resumed

    async def test_a_resume_says_which_it_was(self, run_directory: str, tmp_path: Path) -> None:
        assert (await self.life(run_directory, tmp_path, 3)).external == ""
        resumed = await self.life(run_directory, tmp_path, 3)
        assert (resumed.step, resumed.external) == (3, str(tmp_path / "mine-3"))
        again = await self.life(run_directory, tmp_path, 3)  # carried along by the generation of the resume
        assert again.external == resumed.external

    async def test_it_can_be_asked_for(self, run_directory: str, tmp_path: Path) -> None:
        await self.life(run_directory, tmp_path, 5)
        resumed = await self.life(run_directory, tmp_path, 2, external=tmp_path / "mine-2")
        assert (resumed.step, resumed.external) == (2, str(tmp_path / "mine-2"))
        with pytest.raises(StoreError, match=r"no generation goes with other.*mine-2 \(step 2\)"):
            await self.life(run_directory, tmp_path, 2, external="other")
        with pytest.raises(StoreError, match=r"no generation of step 4 goes with .*mine-2"):
            await self.life(run_directory, tmp_path, 2, step=4, external=tmp_path / "mine-2")

    async def test_one_that_is_gone_is_an_error_and_an_older_one_is_offered(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        await self.life(run_directory, tmp_path, 3)
        (tmp_path / "mine-3").rmdir()
        with pytest.raises(StoreError, match=r"step 3, was saved with .*mine-3, which is not there"):
            await self.life(run_directory, tmp_path, 3)
        assert (await self.life(run_directory, tmp_path, 2, step=2)).step == 2

    async def test_one_that_is_not_there_is_refused_before_anything_is_acked(self, run_directory: str) -> None:
        async with make(run_directory) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(4)
            with pytest.raises(StoreError, match="write it before save"):
                await pipe.save(batch.step, external="nowhere")
            assert pipe.ledger.step == 0

    async def test_a_trigger_leaves_it_to_the_trainer(self, run_directory: str, tmp_path: Path) -> None:
        with stops() as stopped:
            async with make(run_directory, save_every=1) as pipe:
                await begin(pipe)
                async for batch in pipe.batches(groups=4):
                    if batch.step == 3:
                        pipe.request_save("a person", then="stop")
                    if batch.step == 1 or (batch.step == 2 and pipe.save_due(batch.step)):
                        await pipe.save(batch.step, external=tmp_path)
        assert isinstance(stopped[0], Stopped)
        assert [(each.step, each.external) for each in manifests(run_directory)] == [
            (0, ""),
            (1, str(tmp_path)),
            (2, str(tmp_path)),
        ]
