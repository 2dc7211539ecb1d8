"""Segments go when nothing that is kept needs them, and never before: whatever is kept can be resumed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from pipeline import Context, Damaged, Item, Pipeline, Rollout, Task, WriteFailed
from pipeline.checkpoint import verify
from pipeline.checkpoint.collect import archived
from pipeline.store.layout import Layout
from pipeline.testing import RecordingFiles, Replay
from pipeline.testing.recording import folder_in_memory
from tests.faults.test_triggers import manifests
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.disk import ScriptedFiles
from tests.support.power import VolatileFiles
from tests.support.runs import numbers, task

pytestmark = pytest.mark.virtual_time

SMALL = 700  # bytes: two rollouts fill a segment


def make(directory: str, given: Any = None, **options: Any) -> Pipeline:
    options.setdefault("capacity", 8)
    return inline_pipeline(given or task(60, lasting({})), directory=directory, segment_bytes=SMALL, **options)


def segments(directory: str) -> list[str]:
    return Layout(directory).list_segments()


def whole(directory: str) -> bool:
    found = verify(directory)
    assert found.whole, found.damages
    return True


async def all_generations_resume(directory: str, target: Path, count: int, **options: Any) -> int:
    """Resume each kept generation in a copy of its own, and train all that is left. Returns how many there were."""
    steps = sorted({manifest.step for manifest in manifests(directory)})
    for step in steps:
        copy = str(target / f"step-{step}")
        shutil.copytree(directory, copy)
        trained = Trained()
        async with make(copy, task(count, lasting({})), **options) as pipe:
            pipe.attach(trained=trained)
            resumed = await pipe.resume(step=step)
            assert resumed.step == step
            async with pipe.weight_update(version=resumed.version):
                pass
            await pipe.start()
            await finish(pipe, trained, 4)
        assert trained.items == list(range(count))
        assert whole(copy)
        shutil.rmtree(copy)
    return len(steps)


class TestBounded:
    async def test_the_disk_holds_what_is_kept_and_no_more(self, run_directory: str, tmp_path: Path) -> None:
        most, trained = 0, Trained()
        async with make(run_directory, keep=2, save_every=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4):
                await train(pipe, trained, batch)
                most = max(most, len(segments(run_directory)))
                if batch.step == 8:
                    crashed_copy(run_directory, tmp_path / "copy")
        # Two generations of 8 groups at the most, and what is in flight; all 60 would be 30 segments.
        assert 4 <= most <= 12
        assert segments(run_directory)[0] > "000001-0000-000010.fbs"
        assert whole(run_directory)
        assert await all_generations_resume(str(tmp_path / "copy"), tmp_path, 60) == 2

    async def test_an_old_generation_that_stays_keeps_its_segments(self, run_directory: str, tmp_path: Path) -> None:
        trained = Trained()
        async with make(run_directory, keep=1, keep_every=5, save_every=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=13):
                await train(pipe, trained, batch)
        assert {manifest.step for manifest in manifests(run_directory)} == {0, 5, 10, 13}
        assert await all_generations_resume(run_directory, tmp_path, 60) == 4

    async def test_what_is_kept_for_good_does_not_keep_what_came_after(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        most, trained = 0, Trained()
        async with make(run_directory, keep=1, keep_every=4, save_every=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4):
                await train(pipe, trained, batch)
                most = max(most, len(segments(run_directory)))
        assert most <= 14  # generations 0, 4, 8 and 12 are there, and all would be 30 segments
        with capture_logs() as logs:
            assert await all_generations_resume(run_directory, tmp_path, 60) == 5
        told = [line["step"] for line in logs if line["event"] == "run.set_aside"]
        assert told == [0, 4, 8, 12]

    async def test_what_waits_long_keeps_its_segment(self, run_directory: str, tmp_path: Path) -> None:
        """A parked group, from the first segment to the last step."""

        async def parks(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1 + item["n"] / 1000)
            if item["n"] == 0:
                ctx.park()
            return Rollout({"n": [item["n"]]}, reward=1.0)

        trained = Trained()
        given = Task("numbers", source=numbers(40), run=parks, shuffle=False)
        async with make(run_directory, given, keep=1, save_every=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=8):
                await train(pipe, trained, batch)
        assert segments(run_directory)[0] == "000001-0000-000001.fbs"
        async with make(run_directory, given, keep=1) as pipe:
            assert (await begin(pipe, trained=trained)).parked == 1
            await pipe.reward(0, 2.0)
            await finish(pipe, trained, 4)
        assert trained.items == list(range(40))

    async def test_a_failed_removal_is_tried_again(self, run_directory: str) -> None:
        class Stubborn(ScriptedFiles):
            broken = False

            def unlink(self, path: str) -> None:
                if self.broken and path.endswith(".fbs"):
                    raise PermissionError(1, "not now")
                super().unlink(path)

        files, trained, counts = Stubborn(), Trained(), []
        async with make(run_directory, keep=1, save_every=1, files=files) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4):
                await train(pipe, trained, batch)
                counts.append(len(segments(run_directory)))
                files.broken = 5 <= batch.step < 10
        assert counts[9] > counts[4] + 4
        assert counts[-1] <= counts[4] + 1

    @pytest.mark.parametrize(("archive", "share"), [("all", 1.0), (0.25, 0.25), ("none", 0.0)])
    async def test_archive(self, run_directory: str, archive: Any, share: float) -> None:
        trained = Trained()
        async with make(run_directory, keep=1, save_every=1, archive=archive) as pipe:
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 4)
        there, last = segments(run_directory), int(segments(run_directory)[-1][-10:-4])
        assert abs(len(there) - share * last) <= 4 * (share < 1)
        assert whole(run_directory)

    def test_a_share_is_spread_evenly(self) -> None:
        assert [number for number in range(1, 13) if archived(number, 0.25)] == [4, 8, 12]
        assert all(archived(number, 1.0) for number in range(1, 100))
        assert not any(archived(number, 0.0) for number in range(1, 100))

    async def test_without_the_buffer_what_is_live_stays(self, run_directory: str) -> None:
        """A generation without its buffer needs no segment, but the life that goes on does."""
        trained = Trained()
        async with make(run_directory, keep=1) as pipe:
            await begin(pipe, trained=trained)
            await train(pipe, trained, await pipe.get_batch(4))
            await anyio.sleep(10)  # what there is room for is buffered
            await (await pipe.save(1)).committed()
        async with make(run_directory, keep=1) as pipe:  # it holds no payload in memory
            await begin(pipe, trained=trained)
            await (await pipe.save(1, replay_buffer=False)).committed()
            await finish(pipe, trained, 4)
        assert trained.items == list(range(60))


async def test_killed_at_any_change_whatever_is_kept_resumes() -> None:
    """Every prefix of the changes that the last commits made, removals among them."""
    with folder_in_memory() as memory:
        files, trained = RecordingFiles(os.path.join(memory, "run")), Trained()
        given = task(40, lasting({}))
        directory = os.path.join(memory, "run")
        async with make(directory, given, keep=2, save_every=1, files=files) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=6):
                await train(pipe, trained, batch)
                if batch.step == 4:
                    first = len(files.changes)
        changes = files.changes
        gone = [at for at, each in enumerate(changes) if each.verb == "unlink" and each.path.endswith(".fbs")]
        assert gone
        assert gone[-1] > first
        replay = Replay(os.path.join(memory, "replayed"))
        for upto in range(first, len(changes)):
            replay.forward(changes, upto)
            copy = replay.copy(os.path.join(memory, "copy"))
            assert await all_generations_resume(copy, Path(memory), 40) >= 1
            shutil.rmtree(copy)


@pytest.mark.parametrize("seed", range(12))
async def test_lives_that_go_back_and_forth(seed: int, tmp_path: Path) -> None:
    """Killed, resumed, gone back to older steps: all that is kept resumes after every life."""
    chance = random.Random(seed)
    directory = str(tmp_path / "run")
    for life in range(5):
        trained = Trained()
        async with make(directory, task(60, lasting({})), keep=3, save_every=chance.choice([1, 2])) as pipe:
            pipe.attach(trained=trained)
            steps = sorted({manifest.step for manifest in manifests(directory)}) if life else [None]
            resumed = await pipe.resume(step=chance.choice(steps))
            async with pipe.weight_update(version=resumed.version):
                pass
            await pipe.start()
            until = resumed.step + chance.randrange(1, 5)
            async for batch in pipe.batches(groups=4, until=min(until, 14)):
                await train(pipe, trained, batch)
            copy = crashed_copy(directory, tmp_path / f"life-{life}")
        assert whole(copy)
        await all_generations_resume(copy, tmp_path / "each", 60)
        directory = copy


async def test_what_a_kill_left_outlives_a_loss_of_power_after_the_resume(run_directory: str) -> None:
    """The generation of a resume counts on what a killed life had written and never synced."""
    files, trained = VolatileFiles(), Trained()
    async with make(run_directory, task(40, lasting({})), files=files) as pipe:
        await begin(pipe, trained=trained)
        await anyio.sleep(10)
        killed = {path: path.read_bytes() for path in Path(run_directory).rglob("*.fb?")}
    for path, content in killed.items():  # as if the process had not closed, and so had synced nothing
        path.write_bytes(content)
    async with make(run_directory, task(40, lasting({})), files=files) as pipe:
        resumed = await begin(pipe, trained=trained)
        assert resumed.buffered == 8
        copy = files.after_power_loss(run_directory, run_directory + ".copy")
    files.end()
    assert whole(copy)
    async with make(copy, task(40, lasting({}))) as pipe:
        again = await begin(pipe, trained=trained)
        assert (again.generation, again.buffered) == (1, 8)


async def test_a_resume_that_cannot_sync_says_so_and_can_be_tried_again(run_directory: str) -> None:
    async with make(run_directory) as pipe:
        await begin(pipe)

    class Broken(ScriptedFiles):
        def sync_path(self, path: str) -> None:
            raise OSError(5, "Input/output error")

    async with make(run_directory, files=Broken()) as pipe:
        with pytest.raises(WriteFailed, match="Input/output error"):
            await pipe.resume()
    async with make(run_directory) as pipe:
        assert (await pipe.resume()).generation == 0


async def test_an_older_line_needs_what_later_lives_made(run_directory: str, tmp_path: Path) -> None:
    """Going back, the weights forget; what the rollouts did meanwhile is used, so it must be there."""
    for until in (5, 13):
        trained = Trained()
        async with make(run_directory, keep=1, keep_every=4, save_every=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=until):
                await train(pipe, trained, batch)
    by_step = {manifest.step: manifest.incarnation for manifest in manifests(run_directory)}
    assert by_step == {0: 1, 4: 1, 8: 2, 12: 2, 13: 2}
    assert await all_generations_resume(run_directory, tmp_path, 60) == 5


async def test_a_segment_that_is_being_written_stays(run_directory: str) -> None:
    """Nothing in it is live yet, and the generation without its buffer needs none."""
    trained = Trained()
    async with inline_pipeline(task(12, lasting({})), directory=run_directory, keep=1, capacity=4) as pipe:
        await begin(pipe, trained=trained)
        await train(pipe, trained, await pipe.get_batch(4))
        await (await pipe.save(1, replay_buffer=False)).committed()
        await anyio.sleep(10)
        await (await pipe.save(1)).committed()
    async with inline_pipeline(task(12, lasting({})), directory=run_directory, keep=1) as pipe:
        assert (await begin(pipe, trained=trained)).buffered == 4
        await finish(pipe, trained, 4)
    assert trained.items == list(range(12))


async def test_what_an_attempt_has_kept_stays(run_directory: str) -> None:
    went_on: list[Any] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        if item["n"] == 0:
            if ctx.partial is not None:
                went_on.append(ctx.partial["n"].tolist())
            else:
                ctx.save_partial(Rollout({"n": [77]}))
                await anyio.sleep_forever()
        await anyio.sleep(1)
        return Rollout({"n": [item["n"]]}, reward=1.0)

    trained = Trained()
    given = Task("numbers", source=numbers(40), run=run, shuffle=False)
    async with make(run_directory, given, keep=1, save_every=1) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=8):
            await train(pipe, trained, batch)
    assert segments(run_directory)[0] == "000001-0000-000001.fbs"
    async with make(run_directory, given, keep=1) as pipe:
        await begin(pipe, trained=trained)
        await finish(pipe, trained, 4)
    assert (went_on, trained.items) == ([[77]], list(range(40)))


async def test_results_of_an_evaluation_stay_while_its_weights_are_the_newest(run_directory: str) -> None:
    ran: list[int] = []

    async def judge(item: Item, ctx: Context) -> Rollout:
        ran.append(item["n"])
        return Rollout({"n": [item["n"]] * 200}, reward=1.0)

    given, exam = task(60, lasting({})), task(6, judge, name="held_out")
    trained = Trained()
    async with make(run_directory, given, keep=1) as pipe:
        await begin(pipe, trained=trained)
        await train(pipe, trained, await pipe.get_batch(4))
        await pipe.evaluate(exam, 1)
        await (await pipe.save(1)).committed()
    async with make(run_directory, given, keep=1) as pipe:
        await begin(pipe, trained=trained)
        again = await pipe.evaluate(exam, 1)
        assert [rollout["n"].tolist()[0] for rollout in again.rollouts] == list(range(6))
        assert len(ran) == 6
        for _ in range(8):
            batch = await pipe.get_batch(4)
            await train(pipe, trained, batch)
            await (await pipe.save(batch.step)).committed()
        held = [manifest.segments[0].name for manifest in manifests(run_directory)]
        assert held[-1] > "000001-0000-000010.fbs"  # nobody will ask for those of step 1 any more
        assert len((await pipe.evaluate(exam, 1)).rollouts) == 6  # and if somebody does, they are made again


async def test_an_end_that_a_loss_of_power_left_is_not_looked_for_among_what_was_removed(run_directory: str) -> None:
    files, trained = VolatileFiles(), Trained()
    async with make(run_directory, task(40, lasting({})), files=files, keep=1) as pipe:
        await begin(pipe, trained=trained)
        await anyio.sleep(10)
        killed = {path: path.read_bytes() for path in Path(run_directory).rglob("*.fb?")}
    for path, content in killed.items():  # no synced mark: the process was killed
        path.write_bytes(content)
    async with make(run_directory, task(40, lasting({})), files=files, keep=1) as pipe:
        await begin(pipe, trained=trained)
        for _ in range(3):
            batch = await pipe.get_batch(4)
            await train(pipe, trained, batch)
            await (await pipe.save(batch.step)).committed()
        assert segments(run_directory)[0] > "000002"
        await anyio.sleep(10)
        copy = files.after_power_loss(
            run_directory, run_directory + ".copy", lucky=lambda name: name.startswith("000002") and name[-1] == "j"
        )
    files.end()
    with capture_logs() as logs:
        async with make(copy, task(40, lasting({})), keep=1) as pipe:
            resumed = await begin(pipe, trained=trained)
            assert (resumed.step, resumed.set_aside > 0) == (3, True)
            await finish(pipe, trained, 4)
    assert trained.items == list(range(40))
    cut = [os.path.basename(line["file"]) for line in logs if line["event"] == "journal.unwritten"]
    assert cut == ["000002-0000.fbj"]


async def test_a_save_that_could_not_be_resumed_is_refused(run_directory: str) -> None:
    """Somebody removed a segment with rollouts that are still to be trained; the one before stands."""
    trained = Trained()
    async with make(run_directory) as pipe:
        await begin(pipe, trained=trained)
        await anyio.sleep(10)
    async with make(run_directory) as pipe:
        assert (await begin(pipe, trained=trained)).buffered == 8
        removed = [name for name in segments(run_directory) if name.startswith("000001")][-1]
        os.unlink(os.path.join(Layout(run_directory).segments, removed))
        batch = await pipe.get_batch(4)
        await train(pipe, trained, batch)
        saving = await pipe.save(batch.step)
        with pytest.raises(Damaged, match=f"{removed}: the segment is missing"):
            await saving.committed()
    assert manifests(run_directory)[-1].step == 0
