"""Limits that change between lives, waits that cannot end, and a loop that stays free while others wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from pipeline import (
    Starved,
    Task,
)
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.runs import ids, numbers, pipeline, task

virtual = pytest.mark.virtual_time


class TestOldLimits:
    """CASES 103: the limits of the resumed pipeline count, not those it was saved with."""

    @virtual
    async def test_a_run_saved_while_it_was_blocked_goes_on_with_more_room(self, run_directory: str) -> None:
        async with inline_pipeline(task(40, lasting({})), directory=run_directory, capacity=4) as pipe:
            await begin(pipe)
            await anyio.sleep(10)
            assert pipe.ledger.claimed == 4
            await pipe.save(0)
        async with inline_pipeline(task(40, lasting({})), directory=run_directory, capacity=10) as pipe:
            await begin(pipe)
            with anyio.fail_after(2):
                assert len(await pipe.get_batch(10)) == 10

    @virtual
    async def test_and_with_less_room_starts_nothing_until_there_is_some(self, run_directory: str) -> None:
        async with inline_pipeline(task(40, lasting({})), directory=run_directory, capacity=12) as pipe:
            await begin(pipe)
            await anyio.sleep(10)
        async with inline_pipeline(task(40, lasting({})), directory=run_directory, capacity=4) as pipe:
            await begin(pipe)
            for taken in (4, 8, 12):
                assert pipe.ledger.claimed == 12
                await pipe.ack((await pipe.get_batch(4)).step)
                assert pipe.ledger.totals["numbers"].trained == taken
            assert pipe.ledger.claimed == 16

    @virtual
    async def test_a_smaller_batch_than_before_sets_a_smaller_flood(self, run_directory: str) -> None:
        options: dict[str, Any] = {"directory": run_directory, "max_staleness": 1, "concurrency": 100}
        async with inline_pipeline(task(200, lasting({})), batch_groups=20, capacity=20, **options) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            for _ in range(2):
                await train(pipe, trained, await pipe.get_batch(20))
                await pipe.ack(pipe.ledger.next_step - 1)
            before = pipe.ledger.claimed
            await pipe.save(2)
        async with inline_pipeline(task(200, lasting({})), batch_groups=2, **options) as pipe:
            await begin(pipe, trained=trained)
            await anyio.sleep(10)
            assert pipe.ledger.claimed == before, "what was claimed for batches of 20 is plenty for batches of 2"
            await pipe.get_batch(2)


class TestNothingCanCome:
    """A wait that cannot end is an error that says what to do."""

    @virtual
    async def test_leases_that_are_never_acked(self) -> None:
        async with inline_pipeline(task(40, lasting({})), capacity=8) as pipe:
            await pipe.start()
            for _ in range(2):
                await pipe.get_batch(4)
            with pytest.raises(Starved, match=r"ack\(step\)"):
                await pipe.get_batch(4)
            await pipe.ack(1)
            assert ids(await pipe.get_batch(4)) == [8, 9, 10, 11]

    @virtual
    async def test_weights_that_are_never_published(self) -> None:
        async with inline_pipeline(task(40, lasting({})), max_staleness=1, batch_groups=4) as pipe:
            await pipe.start()
            for _ in range(2):
                await pipe.ack((await pipe.get_batch(4)).step)
            with pytest.raises(Starved, match=r"weight_update\(\) after each step"):
                await pipe.get_batch(4)
            async with pipe.weight_update(version=2):
                pass
            assert len(await pipe.get_batch(4)) == 4

    @virtual
    async def test_a_crowd_that_comes_back_after_a_crash_with_less_room_is_trained_all_the_same(
        self, tmp_path: Path
    ) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(30), run=lasting({0: 500.0, 1: 500.0}), shuffle=False)
        async with inline_pipeline(given, directory=directory, capacity=20, concurrency=8) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(100)
            copy = crashed_copy(directory, tmp_path / "copy")
        for options in ({"capacity": 4}, {"max_staleness": 0, "batch_groups": 4}, {"strategy": "synchronous"}):
            for order in ("finished", "strict"):
                target = crashed_copy(copy, tmp_path / f"{order}-{'-'.join(options)}")
                more: dict[str, Any] = {**options, "order": order, "concurrency": 8}
                async with inline_pipeline(given, directory=target, **more) as pipe:
                    trained = Trained()
                    await begin(pipe, trained=trained)
                    with anyio.fail_after(100_000):
                        assert (await finish(pipe, trained, 4)).items == list(range(30)), more


class TestLoopStaysFree:
    """CASES 104: others run while the trainer waits and while a generation is written."""

    @virtual
    async def test_while_a_batch_is_waited_for(self) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await anyio.sleep(0.1)
                ticks += 1

        async with inline_pipeline(task(1, lasting({}, 3.0))) as pipe, anyio.create_task_group() as group:
            await pipe.start()
            group.start_soon(tick)
            await pipe.get_batch(1)
            assert ticks >= 20
            group.cancel_scope.cancel()

    async def test_while_200_megabytes_are_saved(self, run_directory: str) -> None:
        class Model:
            def __init__(self) -> None:
                self.weights = {f"layer{n}": torch.ones(5 * 2**20) for n in range(10)}

            def state_dict(self) -> dict[str, Any]:
                return self.weights

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.weights.update(state)

        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.sleep(0.001)

        async with pipeline(task(4), directory=run_directory) as pipe, anyio.create_task_group() as group:
            pipe.attach(model=Model())
            await pipe.start()
            group.start_soon(turn)
            before = turns
            await (await pipe.save(0)).committed()
            assert turns - before >= 20
            group.cancel_scope.cancel()
