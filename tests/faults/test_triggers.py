"""Requests for a checkpoint: heard in every phase, one generation for all of them, and a stop that has saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from pipeline import ConfigError, Context, Item, Pipeline, Rollout, Stopped, UsageError, WriteFailed
from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.store.layout import Layout
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.disk import ScriptedFiles
from tests.support.gates import Gate, turn
from tests.support.runs import pipeline, task

virtual = pytest.mark.virtual_time


def manifests(directory: str) -> list[Manifest]:
    """Manifests of all generations, by number."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return [stored.manifest for stored in find_generations(layout, run.run_id).complete]


@contextmanager
def stops() -> Iterator[list[Stopped]]:
    """The body is left by a stop."""
    caught: list[Stopped] = []
    try:
        yield caught
    except Stopped as stopped:
        caught.append(stopped)
    assert caught, "the run was not stopped"


async def goes_on(directory: str, count: int, stopped_at: int, groups: int = 4) -> None:
    """Resume, and check that each item is trained once, by this life and those before."""
    trained = Trained()
    async with inline_pipeline(task(count), directory=directory, keep=None) as pipe:
        resumed = await begin(pipe, trained=trained)
        assert resumed.step == stopped_at
        await finish(pipe, trained, groups)
    assert trained.items == list(range(count))


@virtual
class TestSaving:
    async def test_every_n_steps(self, run_directory: str) -> None:
        trained = Trained()
        async with inline_pipeline(task(40), directory=run_directory, save_every=3, keep=None) as pipe:
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 4)
        assert [(m.step, m.reason) for m in manifests(run_directory)] == [
            (0, "start"),
            *((step, "every 3 steps") for step in (3, 6, 9)),
        ]
        async with inline_pipeline(task(40), directory=run_directory, save_every=3, keep=None) as again:
            assert (await begin(again, trained=Trained())).step == 9

    async def test_a_multiple_that_one_ack_passes_is_not_missed(self, run_directory: str) -> None:
        async with inline_pipeline(task(40), directory=run_directory, save_every=3, keep=None) as pipe:
            await begin(pipe)
            for _ in range(4):
                await pipe.get_batch(4)
            await pipe.ack(4)
            await pipe.get_batch(4)
            await pipe.ack(5)
        assert [m.step for m in manifests(run_directory)] == [0, 4]

    async def test_a_save_of_the_trainers_counts(self, run_directory: str) -> None:
        async with inline_pipeline(task(40), directory=run_directory, save_every=2, keep=None) as pipe:
            await begin(pipe)
            async for batch in pipe.batches(groups=4, until=5):
                if batch.step in (2, 3):
                    await pipe.save(batch.step)
        assert [(m.step, m.reason) for m in manifests(run_directory)] == [
            (0, "start"),
            (2, "save"),
            (3, "save"),
            (4, "every 2 steps"),
        ]

    async def test_every_t_seconds_while_a_batch_is_waited_for(self, run_directory: str) -> None:
        """With durability="none" what has finished is on no disk before: the wait for a slow batch is no excuse."""
        slow = lasting({11: 100.0}, other=1.0)
        options: dict[str, Any] = {"durability": "none", "save_every_s": 30.0, "keep": None}
        copies: list[str] = []
        async with inline_pipeline(task(12, slow), directory=run_directory, **options) as pipe:
            await begin(pipe)
            async with anyio.create_task_group() as group:
                group.start_soon(pipe.get_batch, 12)
                await anyio.sleep(50)
                copies.append(crashed_copy(run_directory, run_directory + ".copy"))
        assert [m.reason for m in manifests(copies[0])] == ["start", "every 30 s"]
        async with inline_pipeline(task(12), directory=copies[0]) as again:
            assert (await begin(again)).waiting == 1

    async def test_every_t_seconds_makes_nothing_that_is_there_already(self, run_directory: str) -> None:
        slow = lasting({11: 100.0}, other=1.0)
        async with inline_pipeline(task(12, slow), directory=run_directory, save_every_s=10.0) as pipe:
            await begin(pipe)
            await pipe.get_batch(12)
        assert [m.reason for m in manifests(run_directory)] == ["start"]

    async def test_requests_before_the_boundary_become_one(self, run_directory: str) -> None:
        async with inline_pipeline(task(40), directory=run_directory, save_every=1, keep=None) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(4)
            pipe.request_save("a person")
            pipe.request_save("a person")
            pipe.request_save("another")
            assert pipe.save_due(batch.step)
            await pipe.ack(batch.step)
            assert not pipe.save_due(batch.step)
            await pipe.get_batch(4)
        assert [(m.step, m.reason) for m in manifests(run_directory)] == [
            (0, "start"),
            (1, "a person, another, every 1 steps"),
        ]

    async def test_a_failed_one_surfaces_and_a_retry_works(self, run_directory: str) -> None:
        files = ScriptedFiles()
        trained = Trained()
        async with inline_pipeline(task(40), directory=run_directory, files=files) as pipe:
            await begin(pipe, trained=trained)
            batch = await pipe.get_batch(4)
            await train(pipe, trained, batch)
            pipe.request_save("a person", then="stop")
            files.fail_next()
            with pytest.raises(WriteFailed, match="No space left"):
                await pipe.ack(batch.step)
            with stops() as stopped:
                await pipe.get_batch(4)
        assert stopped[0].step == 1
        await goes_on(run_directory, 40, 1)


@virtual
class TestStopping:
    @pytest.mark.parametrize("how", ["next", "ack", "save", "checkpoint", "get_batch"])
    async def test_whichever_verb_comes_next(self, run_directory: str, how: str) -> None:
        trained = Trained()

        async def body(pipe: Pipeline) -> None:
            async for batch in pipe.batches(groups=4):
                await train(pipe, trained, batch)
                if batch.step < 3:
                    continue
                pipe.request_save("a person", then="stop")
                if how == "ack":
                    await pipe.ack(batch.step)
                elif how == "save":
                    await pipe.save(batch.step)
                elif how == "checkpoint":
                    async with pipe.checkpoint(batch.step) as folder:
                        Path(folder, "mine").write_text("x")
                elif how == "get_batch":
                    batch.release()
                    trained.batches.pop()
                    await pipe.get_batch(4)

        with stops() as stopped:
            async with inline_pipeline(task(40), directory=run_directory, keep=None) as pipe:
                await begin(pipe, trained=trained)
                await body(pipe)
        step = 2 if how == "get_batch" else 3
        last = manifests(run_directory)[-1]
        assert (last.step, last.reason) == (step, {"save": "save", "checkpoint": "checkpoint"}.get(how, "a person"))
        error = stopped[0]
        assert (error.step, error.generation, error.code) == (step, last.generation, 0)
        assert str(error) == f"stopped at step {step}, generation {last.generation}: a person"
        await goes_on(run_directory, 40, step)

    async def test_a_trainer_that_waits_is_let_go(self, run_directory: str) -> None:
        gate, trained = Gate(), Trained()
        with stops():
            async with pipeline(task(8, gate.run), directory=run_directory) as pipe:
                await begin(pipe, trained=trained)
                while len(gate.open) < 8:
                    await turn()
                for n in range(4):
                    gate.open[n].set()
                batch = await pipe.get_batch(4)
                await train(pipe, trained, batch)
                await pipe.ack(batch.step)
                async with anyio.create_task_group() as group:

                    async def ask() -> None:
                        while not pipe.statistics().buffer.waiters:
                            await turn()
                        pipe.request_save("a person", then="stop")

                    group.start_soon(ask)
                    try:
                        await pipe.get_batch(4)
                    except Stopped as stopped:
                        caught = stopped
                raise caught
        await goes_on(run_directory, 8, 1)

    async def test_what_is_leased_is_not_taken_for_trained(self, run_directory: str) -> None:
        """A trainer that fetches the next batch ahead is heard where it says what the weights hold."""
        trained = Trained()
        with stops():
            async with inline_pipeline(task(40), directory=run_directory, keep=None) as pipe:
                await begin(pipe, trained=trained)
                ahead = await pipe.get_batch(4)
                while True:
                    batch, ahead = ahead, await pipe.get_batch(4)
                    if batch.step == 3:
                        pipe.request_save("a person", then="stop")
                    trained.step(batch)
                    await pipe.ack(batch.step)
        assert [m.step for m in manifests(run_directory)] == [0, 3]
        await goes_on(run_directory, 40, 3)

    async def test_a_stop_file_that_cannot_be_removed_stops_all_the_same(self, run_directory: str) -> None:
        trained = Trained()
        with stops() as stopped:
            async with inline_pipeline(task(40), directory=run_directory, keep=None) as pipe:
                await begin(pipe, trained=trained)
                async for batch in pipe.batches(groups=4):
                    await train(pipe, trained, batch)
                    if batch.step == 2:
                        Path(run_directory, "stop").mkdir()
                        pipe.request_save("stop file", then="stop")
        assert (stopped[0].step, stopped[0].code) == (2, 0)
        await goes_on(run_directory, 40, 2)

    async def test_no_verb_in_time(self, run_directory: str) -> None:
        """Past the deadline what the rollouts did is synced. The trainer is heard all the same, should it come."""
        trained = Trained()
        with capture_logs() as logs, stops():
            async with inline_pipeline(task(40), directory=run_directory, max_deaths=0, grace_s=20.0) as pipe:
                await begin(pipe, trained=trained)
                batch = await pipe.get_batch(4)
                pipe.request_save("a person", then="stop")
                await anyio.sleep(19)
                assert not [line for line in logs if line["event"] == "checkpoint.late"]
                await anyio.sleep(2)
                assert [line["reason"] for line in logs if line["event"] == "checkpoint.late"] == ["a person"]
                # The launcher kills. Nothing that was in flight is to blame: max_deaths=0 would give it up.
                copy = crashed_copy(run_directory, run_directory + ".copy")
                await train(pipe, trained, batch)
                await pipe.ack(batch.step)
        await goes_on(copy, 40, 0)
        await goes_on(run_directory, 40, 1)

    async def test_a_deadline_that_passes_while_a_save_fails_counts_again(self, run_directory: str) -> None:
        """The save took the request and gave it back: nobody waits for ever because of that."""
        runner = lasting({39: 1e9})
        with stops() as stopped:
            async with inline_pipeline(task(40, runner), directory=run_directory, grace_s=20.0) as pipe:
                await begin(pipe)
                await pipe.get_batch(4)
                pipe.request_save("a person", then="stop")
                taken = pipe._run.triggers.take()
                await anyio.sleep(30)
                pipe._run.triggers.give_back(taken)
                await pipe.get_batch(36)
        assert stopped[0].step == 0

    async def test_late_and_leased_nothing_is_taken_for_trained(self, run_directory: str) -> None:
        trained = Trained()
        gate = lasting({39: 1000.0})
        with stops() as stopped:
            async with inline_pipeline(task(40, gate), directory=run_directory, grace_s=20.0) as pipe:
                await begin(pipe, trained=trained)
                await pipe.get_batch(4)
                pipe.request_save("a person", then="stop")
                await pipe.get_batch(36)
        assert (stopped[0].step, [m.step for m in manifests(run_directory)]) == (0, [0])
        await goes_on(run_directory, 40, 0)

    async def test_a_batch_that_waits_for_its_slowest_is_no_reason_to_push_late(self, run_directory: str) -> None:
        """``finish`` would wait for rollouts that the stop cuts anyway."""
        trained = Trained()
        runner = lasting(dict.fromkeys(range(4, 40), 1000.0))
        with stops():
            async with inline_pipeline(task(40, runner), directory=run_directory) as pipe:
                await begin(pipe, trained=trained)
                async for batch in pipe.batches(groups=4):
                    trained.step(batch)
                    async with anyio.create_task_group() as group:

                        async def ask() -> None:
                            await anyio.sleep(5)
                            pipe.request_save("a person", then="stop")

                        group.start_soon(ask)
                        before = anyio.current_time()
                        async with pipe.weight_update(version=batch.step, running="finish"):
                            assert anyio.current_time() - before < 10
        await goes_on(run_directory, 40, 1)

    async def test_an_evaluation_is_cut_where_the_weights_are_known_and_goes_on_later(self, run_directory: str) -> None:
        ran: list[int] = []

        async def judge(item: Item, ctx: Context) -> Rollout:
            ran.append(item["n"])
            await anyio.sleep(10)
            return Rollout(reward=1.0)

        exam = task(6, judge, name="held_out")
        with stops():
            async with inline_pipeline(task(40), directory=run_directory, concurrency=4) as pipe:
                await begin(pipe)
                async with anyio.create_task_group() as group:

                    async def ask() -> None:
                        await anyio.sleep(25)
                        pipe.request_save("a person", then="stop")

                    group.start_soon(ask)
                    try:
                        await pipe.evaluate(exam, 0)
                    except Stopped as error:
                        stopped = error
                raise stopped
        before = len(ran)
        async with inline_pipeline(task(40), directory=run_directory, concurrency=4) as again:
            await begin(again)
            result = await again.evaluate(exam, 0)
        assert (len(result.rollouts), result.failed) == (6, 0)
        assert (before, len(ran)) == (3, 3 + 4)  # two had ended and are not run again

    @pytest.mark.parametrize("when", ["before resume", "before start", "empty"])
    async def test_before_anything_has_run(self, run_directory: str, when: str) -> None:
        if when != "empty":
            trained = Trained()
            async with inline_pipeline(task(12), directory=run_directory) as pipe:
                await begin(pipe, trained=trained)
                await pipe.get_batch(4)
        pipe = inline_pipeline(task(12), directory=run_directory)
        with stops() as stopped:
            async with pipe:
                pipe.attach(trained=Trained())
                if when == "before start":
                    await pipe.resume()
                pipe.request_save("a person", then="stop")
                await (pipe.start(weights_current=True) if when == "before start" else pipe.resume())
        assert pipe.ledger.claimed == (0 if when != "before start" else 12)
        assert stopped[0].generation == (1 if when == "before start" else None)
        await goes_on(run_directory, 12, 0)

    async def test_without_a_directory_it_stops_as_well(self) -> None:
        async with inline_pipeline(task(12)) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(4)
            pipe.request_save("a person")
            await pipe.ack(batch.step)  # nothing to save in
            pipe.request_save("a person", then="stop")
            with stops() as stopped:
                await pipe.get_batch(4)
            assert str(stopped[0]) == "stopped at step 1: a person"

    async def test_files_that_only_the_trainer_can_write(self, run_directory: str) -> None:
        """No generation lacks them: the trigger makes none, and the trainer is told when to."""
        trained = Trained()

        async def life(pipe: Pipeline, *, asks: bool) -> None:
            async for batch in pipe.batches(groups=4):
                await train(pipe, trained, batch)
                if batch.step == 2:
                    pipe.request_save("a person", then="stop")
                if batch.step == 1 or (asks and pipe.save_due(batch.step)):
                    async with pipe.checkpoint(batch.step) as folder:
                        Path(folder, "mine").write_text(str(batch.step))

        for asks, step in ((False, 1), (True, 2)):
            trained = Trained()
            folder = f"{run_directory}{asks}"
            with stops(), capture_logs() as logs:
                async with inline_pipeline(task(40), directory=folder, save_every=1) as pipe:
                    await begin(pipe, trained=trained)
                    await life(pipe, asks=asks)
            left = [line["reason"] for line in logs if line["event"] == "checkpoint.left"]
            assert left == ([] if asks else ["a person, every 1 steps"])
            assert manifests(folder)[-1].step == step
            own = Path(Layout(folder).generations, f"{manifests(folder)[-1].generation:08d}", "files", "mine")
            assert own.read_text() == str(step)
            await goes_on(folder, 40, step)


class TestFileAndTime:
    async def test_the_stop_file(self, run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.wiring.triggering.LOOK_EVERY_S", 0.001)
        gate = Gate()
        with stops() as stopped:
            async with pipeline(task(8, gate.run), directory=run_directory) as pipe:
                await begin(pipe, trained=Trained())
                open(os.path.join(run_directory, "stop"), "x").close()  # noqa: ASYNC230
                await pipe.get_batch(4)
        assert (stopped[0].reason, stopped[0].code) == ("stop file", 0)
        assert not os.path.exists(os.path.join(run_directory, "stop"))  # the next life is not stopped by it
        await goes_on(run_directory, 8, 0)

    @virtual
    async def test_stop_at(self, run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        trained = Trained()
        pipe = inline_pipeline(task(40, lasting({})), directory=run_directory, stop_at="2030-01-31T18:00:00+00:00")
        begun = 0.0

        def calendar() -> float:
            return 1896112800.0 - 60 + anyio.current_time() - begun

        monkeypatch.setattr("time.time", calendar)
        begun = anyio.current_time()
        with stops() as stopped:
            async with pipe:
                await begin(pipe, trained=trained)
                async for batch in pipe.batches(groups=4):
                    await train(pipe, trained, batch)
                    await anyio.sleep(7)
        assert stopped[0].reason == "stop_at"
        assert 60 <= anyio.current_time() - begun <= 70
        monkeypatch.undo()
        await goes_on(run_directory, 40, stopped[0].step)

    async def test_a_time_that_is_past_is_refused(self, run_directory: str) -> None:
        with pytest.raises(ConfigError, match="lies in the past"):
            async with pipeline(task(8), directory=run_directory, stop_at=1.0):
                pass


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"save_every": 0}, "save_every"),
        ({"save_every_s": 0.0}, "save_every_s"),
        ({"save_every_s": float("nan")}, "save_every_s"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"stop_at": "tomorrow"}, "stop_at"),
        ({"stop_at": float("inf")}, "stop_at"),
        ({"signals": ["SIGKILL"]}, "signals"),
        ({"signals": ["TERM"]}, "signals"),
        ({"signals": "SIGTERM"}, "signals"),
        ({"save_signals": ["SIGTERM"]}, "save_signals"),
        ({"save_signals": ["SIG_DFL"]}, "save_signals"),
        ({"save_every": 1, "directory": None}, "save_every"),
    ],
)
def test_options_are_checked(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        pipeline(task(), **{"directory": "runs/x", **options})
    assert error.value.option == what


def test_options_come_back_as_they_went_in() -> None:
    given = {"directory": "x", "signals": ["SIGUSR1", "SIGTERM"], "stop_at": "2030-01-31T18:00", "save_every_s": 60}
    options = pipeline(task(), **given).options
    assert pipeline(task(), **options.to_dict()).options == options
    assert options.stop_signals == (10, 15)


def test_a_request_comes_after_opening() -> None:
    with pytest.raises(UsageError):
        pipeline(task()).request_save()
