"""Evaluation beside the training: outside its counts, never in its way, and not done twice because of a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import (
    ClosedError,
    ConfigError,
    Context,
    EndOfSource,
    Item,
    Pipeline,
    Retry,
    Rollout,
    RolloutFailed,
    RolloutInvalid,
    SourceMark,
    Starved,
    Task,
    UsageError,
)
from pipeline.errors import SourceError
from tasks import EnvSeeds, SequenceSource
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.gates import turn
from tests.support.runs import ids, numbers, task

pytestmark = pytest.mark.virtual_time


class Exam:
    """A runner that notes what it is given; its reward is the item's number plus the version."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.runs: list[tuple[int, int]] = []
        self.kinds: set[str] = set()
        self.now = self.peak = 0

    async def __call__(self, item: Item, ctx: Context) -> Rollout:
        self.runs.append((item["n"], ctx.version))
        self.kinds.add(ctx.kind)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await anyio.sleep(self.seconds)
        finally:
            self.now -= 1
        return Rollout({"x": ctx.rng.random(2)}, reward=float(item["n"] + 100 * ctx.version), tokens=3)


def exam(run: Any, count: int = 8, **more: Any) -> Task:
    return Task("exam", source=numbers(count), run=run, **more)


async def update(pipe: Pipeline, version: int) -> None:
    async with pipe.weight_update(version=version):
        pass


class TestBesideTheTraining:
    async def test_results_come_in_the_order_of_the_items_and_count_nowhere(self, run_directory: str) -> None:
        run = Exam()

        async def reversed_order(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(10.0 - item["n"])
            return await run(item, ctx)

        async with inline_pipeline(task(6, lasting({})), directory=run_directory, capacity=6) as pipe:
            await begin(pipe)
            await update(pipe, 2)
            await anyio.sleep(5)
            before = pipe.ledger.snapshot()
            progress = pipe.progress.produced_samples
            result = await pipe.evaluate(exam(reversed_order))
            assert (pipe.ledger.snapshot(), pipe.progress.produced_samples) == (before, progress)
            assert list(pipe.ledger.totals) == ["numbers"]
        assert [outcome.index for outcome in result] == list(range(8))
        assert [rollout.reward for rollout in result.rollouts] == [200.0 + n for n in range(8)]
        assert (result.task, result.version, len(result), result.failed, result.reused) == ("exam", 2, 8, 0, 0)
        assert result.reward_mean == 203.5
        assert result.seconds == pytest.approx(11.0)
        assert all((each.oldest, each.newest, each.tokens) == (2, 2, 3) for each in result.rollouts)
        assert result.outcomes[0].rollout is result.outcomes[0].rollout
        assert run.kinds == {"evaluation"}
        assert repr(result) == "Evaluation('exam', version=2, outcomes=8, failed=0)"

    async def test_the_training_goes_on_and_is_the_same(self) -> None:
        async def trained(evaluating: bool) -> list[list[int]]:
            run = Exam(20.0)
            options: dict[str, Any] = {"concurrency": 8, "capacity": 8, "order": "strict"}
            async with inline_pipeline(task(40, lasting({})), **options) as pipe, anyio.create_task_group() as group:
                await pipe.start()
                if evaluating:
                    group.start_soon(pipe.evaluate, exam(run))
                    await turn()
                result = Trained()
                with anyio.fail_after(15):
                    await finish(pipe, result, 4)
                assert (run.peak, pipe.statistics().rollouts.evaluating) == ((2, 2) if evaluating else (0, 0))
                assert pipe.metrics()["rollouts/evaluating"] == (2.0 if evaluating else 0.0)
                group.cancel_scope.cancel()
            return result.batches

        assert await trained(True) == await trained(False)

    async def test_with_one_slot_they_take_turns(self) -> None:
        run, order = Exam(), []

        async def training(item: Item, ctx: Context) -> Rollout:
            order.append("train")
            await anyio.sleep(1)
            return Rollout()

        async def examined(item: Item, ctx: Context) -> Rollout:
            order.append("exam")
            return await run(item, ctx)

        async with inline_pipeline(task(9, training), concurrency=1, capacity=4) as pipe:
            await pipe.start()
            await pipe.evaluate(exam(examined, 6))
            assert order[:8] == ["train", "exam"] * 4
            assert order[8:] == ["exam"] * 2, "nothing more may start for the training"

    async def test_a_trainer_is_told_of_an_end_though_something_is_evaluated(self) -> None:
        run = Exam(1000.0)
        async with inline_pipeline(task(2, lasting({}))) as pipe, anyio.create_task_group() as group:
            await pipe.start()
            group.start_soon(pipe.evaluate, exam(run))
            with anyio.fail_after(20):
                assert [ids(batch) async for batch in pipe.batches(groups=2)] == [[0, 1]]
                with pytest.raises(EndOfSource):
                    await pipe.get_batch(1)
            group.cancel_scope.cancel()

    async def test_a_task_of_the_run_can_be_evaluated_by_name(self) -> None:
        run = Exam()
        async with inline_pipeline(task(4, run), strategy="synchronous") as pipe:
            await pipe.start()
            result = await pipe.evaluate("numbers", items=[3, 1], samples=2)
            assert [(each.index, each.member) for each in result] == [(3, 0), (3, 1), (1, 0), (1, 1)]
            assert run.kinds == {"evaluation"}
            assert ids(await pipe.get_batch(4)) == [0, 1, 2, 3], "nothing of it was drawn"

    async def test_an_item_has_the_same_random_stream_for_every_version(self) -> None:
        async with inline_pipeline(task(1, lasting({})), seed=3) as pipe:
            await pipe.start()
            first = await pipe.evaluate(exam(Exam()), items=3, samples=2)
            await update(pipe, 5)
            second = await pipe.evaluate(exam(Exam()), items=3, samples=2)
        draws = [tuple(rollout["x"].tolist()) for rollout in first.rollouts]
        assert draws == [tuple(rollout["x"].tolist()) for rollout in second.rollouts]
        assert len(set(draws)) == 6

    async def test_several_at_once_share_their_part(self) -> None:
        runs = [Exam(), Exam()]
        both = [Task(f"exam {n}", source=numbers(4), run=runs[n]) for n in range(2)]
        results: dict[int, Any] = {}

        async def one(n: int) -> None:
            results[n] = await pipe.evaluate(both[n])

        async with inline_pipeline(task(1, lasting({})), concurrency=8, evaluation_share=0.5) as pipe:
            await pipe.start()
            async with anyio.create_task_group() as group:
                group.start_soon(one, 0)
                group.start_soon(one, 1)
        assert [len(results[n].rollouts) for n in range(2)] == [4, 4]
        assert runs[0].peak == 4

    async def test_parking_means_nothing_to_it(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            ctx.park()
            return Rollout(reward=2.0)

        async with inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            assert (await pipe.evaluate(exam(run, 1))).reward_mean == 2.0


class TestFailures:
    async def test_what_fails_is_tried_again_and_then_given_up(self) -> None:
        tries: list[tuple[int, int]] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            tries.append((item["n"], ctx.attempt))
            if item["n"] == 1 or (item["n"] == 2 and ctx.attempt == 1):
                raise ValueError(f"no answer to {item['n']}")
            return Rollout(reward=float("nan") if item["n"] == 3 else 1.0)

        async with inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            result = await pipe.evaluate(exam(run, 4, on_failure=Retry(attempts=2)))
            assert pipe.statistics().rollouts.failed == 0
        errors = [each.error for each in result]
        assert errors[:3] == [None, "ValueError: no answer to 1", None]
        assert errors[3] is not None
        assert errors[3].endswith("reward is float nan")
        assert (result.failed, result.reward_mean, len(result.rollouts)) == (2, 1.0, 2)
        assert result.outcomes[1].rollout is None
        assert sorted(tries) == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]

    async def test_a_failure_that_stops_it_does_not_stop_the_run(self) -> None:
        run = Exam(5.0)

        async def fails(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 2:
                raise ValueError("broken")
            return await run(item, ctx)

        async with inline_pipeline(task(4, lasting({})), concurrency=16) as pipe:
            await pipe.start()
            with pytest.raises(RolloutFailed, match=r"item 2 of epoch 0 of task 'exam'.*broken") as caught:
                await pipe.evaluate(exam(fails, on_failure="fail_fast"))
            assert isinstance(caught.value.__cause__, ValueError)
            await turn()
            assert (run.now, pipe.statistics().rollouts.evaluating) == (0, 0), "the others were cut"
            assert len(await pipe.get_batch(4)) == 4

    async def test_what_is_no_rollout_and_a_failing_source_end_it_alone(self) -> None:
        async def nothing(item: Item, ctx: Context) -> Any:
            return None

        class Broken(SequenceSource):
            def item(self, index: int) -> Any:
                if index == 1:
                    raise OSError("disk")
                return super().item(index)

            def mark(self) -> SourceMark:
                return SourceMark("broken", self.length())

        class Nameless(Broken):
            def mark(self) -> SourceMark:
                raise OSError("gone")

        async with inline_pipeline(task(2, lasting({}))) as pipe:
            await pipe.start()
            with pytest.raises(RolloutInvalid, match="returned NoneType"):
                await pipe.evaluate(exam(nothing))
            with pytest.raises(SourceError, match=r"task 'broken': the source failed at item 1.*disk"):
                await pipe.evaluate(Task("broken", source=Broken([{"n": 0}, {"n": 1}]), run=Exam()))
            with pytest.raises(SourceError, match=r"task 'broken': its source's mark\(\) failed.*gone"):
                await pipe.evaluate(Task("broken", source=Nameless([{"n": 0}]), run=Exam()))
            assert len(await pipe.get_batch(2)) == 2

    async def test_each_attempt_has_its_timeout(self) -> None:
        async with inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            result = await pipe.evaluate(exam(Exam(100.0), 2, timeout=3.0, on_failure="skip"))
        assert [each.error and each.error[:12] for each in result] == ["TimeoutError"] * 2
        assert result.seconds == pytest.approx(3.0)
        assert result.reward_mean is None

    async def test_a_cancelled_call_stops_what_it_has_in_flight(self) -> None:
        run = Exam(100.0)
        async with inline_pipeline(task(3, lasting({})), concurrency=8) as pipe:
            await pipe.start()
            with anyio.move_on_after(5) as scope:
                await pipe.evaluate(exam(run))
            assert scope.cancelled_caught
            await turn()
            assert (run.now, pipe.statistics().rollouts.in_flight) == (0, 0)
            assert len(await pipe.get_batch(3)) == 3
            await anyio.sleep(1000)
            assert len(run.runs) == 2, "and begins nothing more"

    async def test_the_end_of_the_pipeline_ends_it(self) -> None:
        errors: list[BaseException] = []

        async def evaluate(pipe: Pipeline) -> None:
            try:
                await pipe.evaluate(exam(Exam(100.0)))
            except ClosedError as error:
                errors.append(error)

        async with anyio.create_task_group() as group, inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            group.start_soon(evaluate, pipe)
            await anyio.sleep(1)
        assert len(errors) == 1

    @pytest.mark.parametrize(
        ("arguments", "more", "match"),
        [
            (("other",), {}, "task='other': a Task, or one of the run's tasks is needed: numbers"),
            ((3,), {}, "task=3"),
            ((task(2),), {}, "the run has another task named 'numbers'"),
            ((exam(Exam()), 1), {}, "version=1: a version of 0 to 0"),
            ((exam(Exam()), -1), {}, "version=-1"),
            ((exam(Exam()), True), {}, "version=True"),
            ((exam(Exam()),), {"items": 9}, "the source of 'exam' has the items 0 to 7"),
            ((exam(Exam()),), {"items": [0, 8]}, "has the items 0 to 7"),
            ((exam(Exam()),), {"items": [1, 1]}, "each index may stand there once"),
            ((exam(Exam()),), {"items": "01"}, "how many items, or a list of indices"),
            ((exam(Exam()),), {"items": True}, "how many items, or a list of indices"),
            ((exam(Exam()),), {"samples": 0}, "samples=0"),
            ((Task("seeds", source=EnvSeeds(1), run=Exam()),), {}, "the source of 'seeds' is endless"),
        ],
    )
    async def test_arguments_that_cannot_be(self, arguments: Any, more: Any, match: str) -> None:
        async with inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            with pytest.raises(ConfigError, match=match):
                await pipe.evaluate(*arguments, **more)

    async def test_no_items_are_no_work(self) -> None:
        async with inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            result = await pipe.evaluate(exam(Exam()), items=0)
            assert (len(result), result.reward_mean) == (0, None)

    @pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
    def test_its_part_of_the_slots_is_a_part(self, share: float) -> None:
        with pytest.raises(ConfigError, match="evaluation_share"):
            inline_pipeline(task(1), evaluation_share=share)


class TestWeights:
    async def test_it_comes_after_start_and_not_inside_an_update(self) -> None:
        async with inline_pipeline(task(1, lasting({}))) as pipe:
            with pytest.raises(UsageError, match="after start"):
                await pipe.evaluate(exam(Exam()))
            await pipe.start()
            async with pipe.weight_update(version=1):
                with pytest.raises(UsageError, match="a weight_update is open"):
                    await pipe.evaluate(exam(Exam()))

    async def test_an_update_that_cuts_it_lets_it_begin_again_with_the_new_weights(self) -> None:
        run = Exam(10.0)
        results: list[Any] = []

        async def evaluate(pipe: Pipeline) -> None:
            results.append(await pipe.evaluate(exam(run, 2)))

        async with inline_pipeline(task(1, lasting({})), concurrency=8) as pipe, anyio.create_task_group() as group:
            await pipe.start()
            group.start_soon(evaluate, pipe)
            await anyio.sleep(5)
            async with pipe.weight_update(version=3, running="abort"):
                await anyio.sleep(5)
                assert run.now == 0, "and nothing of it starts meanwhile"
        (result,) = results
        assert [(each.oldest, each.newest) for each in result.rollouts] == [(3, 3)] * 2
        assert result.version == 0
        assert sorted(run.runs) == [(0, 0), (0, 3), (1, 0), (1, 3)]

    async def test_after_a_failed_push_it_says_so(self) -> None:
        async with inline_pipeline(task(9, lasting({}))) as pipe, anyio.create_task_group() as group:
            await pipe.start()

            async def push() -> None:
                await anyio.sleep(1.5)
                with pytest.raises(OSError, match="server"):
                    async with pipe.weight_update(version=1):
                        raise OSError("server")

            group.start_soon(push)
            with pytest.raises(Starved, match=r"evaluate\('exam'\): \d+ items are left, the last weight_update failed"):
                await pipe.evaluate(exam(Exam(1.0), 100))


OPTIONS: dict[str, Any] = {"concurrency": 8, "evaluation_share": 0.25}  # two at a time


class TestCrashes:
    async def cut(self, directory: str, copy: Path, at: float, version: int = 2, **options: Any) -> str:
        """Evaluate at ``version``, with a generation of it behind, and die after ``at`` seconds."""
        given = task(40, lasting({}))
        async with inline_pipeline(given, directory=directory, **{**OPTIONS, **options}) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            for _ in range(version):
                batch = await pipe.get_batch(1)
                await train(pipe, trained, batch)
                await (await pipe.save(batch.step)).committed()
            with anyio.move_on_after(at):
                await pipe.evaluate(exam(Exam()), version=version)
            return crashed_copy(directory, copy)

    @pytest.mark.parametrize("at", [0.5, 1.5, 2.5, 3.5, 9.0])
    async def test_the_same_call_runs_only_what_had_not_finished(
        self, run_directory: str, tmp_path: Path, at: float
    ) -> None:
        copy = await self.cut(run_directory, tmp_path / "copy", at)
        done = min(8, 2 * int(at))
        run = Exam()
        async with inline_pipeline(task(40, lasting({})), directory=copy, **OPTIONS) as pipe:
            resumed = await begin(pipe, trained=Trained())
            assert resumed.step == 2
            before = pipe.ledger.snapshot()["dropped"]
            result = await pipe.evaluate(exam(run), version=2)
            pipe.ledger.check()
            assert pipe.ledger.snapshot()["dropped"] == before
            assert [(each.reward, each.reused) for each in result] == [(200.0 + n, n < done) for n in range(8)]
            assert [rollout.reward for rollout in result.rollouts] == [200.0 + n for n in range(8)]
            assert result.reused == done
            assert run.runs == [(n, 2) for n in range(done, 8)]
            again = await pipe.evaluate(exam(run))
            assert again.reused == 8, "nor is it done twice in one life"
            assert [r["x"].tolist() for r in again.rollouts] == [r["x"].tolist() for r in result.rollouts]
            more = await pipe.evaluate(exam(run), items=2, samples=2)
            assert [each.reused for each in more] == [True, False, True, False]

    async def test_another_version_another_source_or_another_task_is_run(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        copy = await self.cut(run_directory, tmp_path / "copy", 9.0)
        async with inline_pipeline(task(40, lasting({})), directory=copy, **OPTIONS) as pipe:
            await begin(pipe, trained=Trained())
            assert (await pipe.evaluate(exam(Exam()), version=1)).reused == 0
            assert (await pipe.evaluate(exam(Exam(), 9))).reused == 0, "its source is another one"
            assert (await pipe.evaluate(Task("quiz", source=numbers(8), run=Exam()))).reused == 0
            await update(pipe, 3)
            assert (await pipe.evaluate(exam(Exam()))).reused == 0
            assert (await pipe.evaluate(exam(Exam()), version=2)).reused == 8

    async def test_results_of_weights_that_went_back_are_not_used(self, run_directory: str, tmp_path: Path) -> None:
        """A version 2 that is trained anew after a crash is no version 2 of before."""
        copy = await self.cut(run_directory, tmp_path / "copy", 9.0)
        async with inline_pipeline(task(40, lasting({})), directory=copy, **OPTIONS) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            assert (await pipe.resume(step=1)).version == 1
            await update(pipe, 1)
            await pipe.start()
            batch = await pipe.get_batch(1)
            assert batch.step == 2
            await train(pipe, trained, batch)
            run = Exam()
            result = await pipe.evaluate(exam(run), version=2)
            assert (result.reused, len(run.runs)) == (0, 8)
            await (await pipe.save(2)).committed()
            again = crashed_copy(copy, tmp_path / "again")
        async with inline_pipeline(task(40, lasting({})), directory=again, **OPTIONS) as pipe:
            await begin(pipe, trained=Trained())
            assert (await pipe.evaluate(exam(Exam()), version=2)).reused == 8, "the line went on from there"

    async def test_a_run_in_memory_keeps_nothing(self) -> None:
        async with inline_pipeline(task(1, lasting({}))) as pipe:
            await pipe.start()
            assert [(await pipe.evaluate(exam(Exam()))).reused for _ in range(2)] == [0, 0]

    async def test_what_cannot_be_read_any_more_is_made_again(self, run_directory: str, tmp_path: Path) -> None:
        copy = await self.cut(run_directory, tmp_path / "copy", 9.0, segment_bytes=1)
        segments = sorted(Path(copy, "segments").iterdir())
        async with inline_pipeline(task(40, lasting({})), directory=copy, **OPTIONS) as pipe:
            await begin(pipe, trained=Trained())
            kept = pipe._run.state.evaluations.find("exam", 2, self.mark(pipe), pipe._run.state.incarnation)
            path = next(p for p in segments if p.name == f"000001-0000-{kept[3, 0].location.segment:06d}.fbs")
            path.write_bytes(path.read_bytes()[:70])
            run = Exam()
            result = await pipe.evaluate(exam(run), version=2)
            assert [each.index for each in result if not each.reused] == [3]
            assert run.runs == [(3, 2)]
            assert len(result.rollouts) == 8

    @staticmethod
    def mark(pipe: Pipeline) -> str:
        from pipeline.wiring.evaluating import examine

        return examine(pipe._run.state, exam(Exam()), None, None, 1).mark
