"""A batch that was handed out is the trainer's until it is acked, saved, or given back; and only steps that were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from pipeline import Batch, ConfigError, EndOfSource, Pipeline, UsageError
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


def states(pipe: Pipeline, uids: list[int]) -> set[str]:
    return {pipe.ledger.state(uid) for uid in uids}


@asynccontextmanager
async def twelve(**options: Any) -> AsyncIterator[Pipeline]:
    """A started pipeline whose twelve groups are all buffered, in the order of their items."""
    async with inline_pipeline(task(12, lasting({})), capacity=12, **options) as pipe:
        await begin(pipe)
        await anyio.sleep(100)
        yield pipe


class TestRelease:
    @pytest.mark.parametrize("options", [{}, {"selector": "fifo"}, {"order": "strict"}])
    async def test_a_released_batch_comes_again_before_everything_else(self, options: dict[str, Any]) -> None:
        async with twelve(**options) as pipe:
            first = await pipe.get_batch(4)
            assert ids(first) == [0, 1, 2, 3]
            first.release()
            assert states(pipe, first.uids) == {"buffered"}
            again = await pipe.get_batch(4)
            assert (ids(again), again.step) == ([0, 1, 2, 3], 1)
            pipe.release(again)
            assert ids(await pipe.get_batch(2)) == [0, 1]
            assert ids(await pipe.get_batch(2)) == [2, 3], "what one batch left over, the next one gets"
            assert ids(await pipe.get_batch(2)) == [4, 5]

    async def test_one_released_while_the_next_is_waited_for_comes_for_its_own_step(self) -> None:
        """The waiting call was for step 3; what it gets is the batch of step 2 again, as old as it was."""
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 2, "concurrency": 8}
        async with inline_pipeline(task(8, lasting(dict.fromkeys(range(4, 8), 1e6))), **options) as pipe:
            await begin(pipe)
            await pipe.ack((await pipe.get_batch(2)).step)
            async with pipe.weight_update(version=1):
                pass
            second = await pipe.get_batch(2)
            found: list[Batch] = []

            async def wait() -> None:
                found.append(await pipe.get_batch(2))

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.sleep(1)
                second.release()
            assert [(batch.step, batch.staleness, ids(batch)) for batch in found] == [
                (2, second.staleness, ids(second))
            ]

    async def test_releasing_twice_changes_nothing(self) -> None:
        async with twelve() as pipe:
            batch = await pipe.get_batch(4)
            batch.release()
            before = pipe.ledger.snapshot()
            batch.release()
            assert pipe.ledger.snapshot() == before

    async def test_an_old_batch_cannot_release_the_lease_of_another(self) -> None:
        async with twelve() as pipe:
            old = await pipe.get_batch(4)
            old.release()
            new = await pipe.get_batch(3)
            assert new.step == old.step
            old.release()
            assert states(pipe, new.uids) == {"leased"}

    async def test_the_loop_does_not_ack_a_batch_that_was_given_back_and_replaced(self) -> None:
        async with twelve() as pipe:
            batches = pipe.batches(groups=4)
            (await anext(batches)).release()
            inside = await pipe.get_batch(4)
            assert (inside.step, (await anext(batches)).step) == (1, 2)
            assert states(pipe, inside.uids) == {"leased"}

    async def test_a_batch_of_an_acked_step_can_no_longer_be_released(self) -> None:
        async with twelve() as pipe:
            batch = await pipe.get_batch(4)
            await pipe.ack(batch.step)
            batch.release()
            assert states(pipe, batch.uids) == {"trained"}

    async def test_a_released_batch_in_the_loop_is_not_acked_and_comes_again(self) -> None:
        async with twelve() as pipe:
            seen = []
            async for batch in pipe.batches(groups=4):
                seen.append((batch.step, ids(batch)))
                if len(seen) == 1:
                    batch.release()
            assert seen == [(1, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [4, 5, 6, 7]), (3, [8, 9, 10, 11])]
            assert pipe.ledger.totals["numbers"].trained == 12

    async def test_a_waiting_trainer_gets_what_another_gives_back(self) -> None:
        async with twelve() as pipe:
            batch = await pipe.get_batch(9)
            got: list[list[int]] = []

            async def wait() -> None:
                got.append(ids(await pipe.get_batch(3)))
                with pytest.raises(EndOfSource, match="leased"):
                    await pipe.get_batch(3)

            await wait()
            batch.release()
            got.append(ids(await pipe.get_batch(9)))
            assert got == [[9, 10, 11], list(range(9))]


class TestLeavingTheLoop:
    async def test_an_error_that_leaves_the_pipeline_gives_the_batch_back(
        self, run_directory: str, tmp_path: Any
    ) -> None:
        uids: list[int] = []
        failed = inline_pipeline(task(12, lasting({})), directory=run_directory, capacity=12)

        async def fails() -> None:
            async with failed as pipe:
                await begin(pipe, trained=Trained())
                async for batch in pipe.batches(groups=4):
                    uids.extend(batch.uids)
                    raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            await fails()
        assert states(failed, uids) == {"buffered"}
        async with inline_pipeline(task(12, lasting({})), directory=run_directory, capacity=12) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            assert states(pipe, uids) == {"buffered"}
            await finish(pipe, trained, 4)
        assert trained.items == list(range(12))

    async def test_break_keeps_the_lease_until_it_is_acked(self) -> None:
        async with twelve() as pipe:
            async for batch in pipe.batches(groups=4):
                if batch.step == 2:
                    break
            assert states(pipe, batch.uids) == {"leased"}
            assert pipe.ledger.step == 1
            await pipe.ack(2)
            assert states(pipe, batch.uids) == {"trained"}

    async def test_save_after_break_acks_in_the_same_commit(self, run_directory: str, tmp_path: Any) -> None:
        async with twelve(directory=run_directory) as pipe:
            async for batch in pipe.batches(groups=4):
                if batch.step == 2:
                    break
            assert pipe.ledger.step == 1
            await (await pipe.save(2)).committed()
            assert pipe.ledger.step == 2
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(task(12, lasting({})), directory=copy) as pipe:
            assert (await begin(pipe)).step == 2
            assert ids(await pipe.get_batch(4)) == [8, 9, 10, 11]

    async def test_the_loop_goes_on_where_it_was_broken_off(self) -> None:
        async with twelve() as pipe:
            seen = []
            for _ in range(3):
                async for batch in pipe.batches(groups=4):
                    seen += ids(batch)
                    break
                await pipe.ack(batch.step)
            assert seen == list(range(12))


class TestSteps:
    async def test_saving_acks_every_batch_up_to_the_step(self, run_directory: str) -> None:
        async with twelve(directory=run_directory) as pipe:
            batches = [await pipe.get_batch(3) for _ in range(4)]
            await pipe.save(3)
            assert [states(pipe, batch.uids) for batch in batches] == [{"trained"}] * 3 + [{"leased"}]
            assert pipe.progress.consumed_samples == {"numbers": 9}
            assert pipe.progress.target_samples == {"numbers": 12}

    @pytest.mark.parametrize("verb", ["ack", "save", "checkpoint"])
    @pytest.mark.parametrize("step", [3, 99])
    async def test_a_step_that_was_never_handed_out_is_refused(self, run_directory: str, verb: str, step: int) -> None:
        async with twelve(directory=run_directory) as pipe:
            batches = [await pipe.get_batch(3) for _ in range(2)]
            with pytest.raises(UsageError, match=f"step {step} was never handed out"):
                await self.call(pipe, verb, step)
            assert {state for batch in batches for state in states(pipe, batch.uids)} == {"leased"}
            assert pipe.progress.consumed_samples.get("numbers", 0) == 0
            await self.call(pipe, verb, 2)
            assert pipe.ledger.step == 2

    @pytest.mark.parametrize("verb", ["ack", "save", "checkpoint"])
    async def test_a_step_before_the_last_trained_is_refused(self, run_directory: str, verb: str) -> None:
        async with twelve(directory=run_directory) as pipe:
            for _ in range(3):
                await pipe.get_batch(3)
            await pipe.ack(2)
            for step in (0, 1, -1):
                with pytest.raises(UsageError, match="already trained"):
                    await self.call(pipe, verb, step)
            await self.call(pipe, verb, 2)
            await self.call(pipe, verb, 3)

    @staticmethod
    async def call(pipe: Pipeline, verb: str, step: int) -> None:
        if verb == "checkpoint":
            async with pipe.checkpoint(step):
                pass
        else:
            await getattr(pipe, verb)(step)

    @pytest.mark.parametrize("groups", [0, -1, True, 2.0, "4", None])
    async def test_a_batch_of_no_groups_is_refused(self, groups: Any) -> None:
        async with twelve() as pipe:
            with pytest.raises(ConfigError, match="groups="):
                await pipe.get_batch(groups)
            assert ids(await pipe.get_batch(2)) == [0, 1]

    async def test_several_batches_are_acked_at_once_and_the_counts_add_up(self) -> None:
        async with twelve() as pipe:
            for _ in range(5):
                await pipe.get_batch(2)
                pipe.ledger.check()
            await pipe.ack(4)
            pipe.ledger.check()
            groups = pipe.statistics().groups
            assert (groups.trained, groups.leased, groups.buffered) == (8, 2, 2)
