"""Resuming an older step, tasks that come and go between lives, and items that kill their process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import EndOfSource, Pipeline, Retry, StoreError, Task
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train, uneven
from tests.support.runs import ids, numbers

pytestmark = pytest.mark.virtual_time

EXACT: list[dict[str, Any]] = [{"strategy": "synchronous"}, {"order": "strict", "capacity": 9}]


def make(seed: int, directory: str, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(12), run=uneven(seed), epochs=2)
    return inline_pipeline(given, directory=directory, concurrency=3, keep=None, max_deaths=99, **options)


async def train_and_save(pipe: Pipeline, trained: Trained, until: int) -> None:
    async for batch in pipe.batches(groups=4, until=until):
        await train(pipe, trained, batch)
        await (await pipe.save(batch.step)).committed()


class TestGoingBack:
    @pytest.mark.parametrize("options", [*EXACT, {"capacity": 9}])
    @pytest.mark.parametrize("back", [0, 2, 5])
    async def test_an_older_step_is_gone_on_from_and_the_line_after_it_is_forgotten(
        self, tmp_path: Path, options: dict[str, Any], back: int
    ) -> None:
        directory = str(tmp_path / "run")
        async with make(1, directory, **options) as pipe:
            first = Trained()
            await begin(pipe, trained=first)
            await train_and_save(pipe, first, 5)
            await anyio.sleep(1.0)
        async with make(2, directory, **options) as pipe:
            again = Trained()
            pipe.attach(trained=again)
            assert (await pipe.resume(step=back)).version == back
            assert again.batches == first.batches[:back]
            await pipe.start(weights_current=True)
            await train_and_save(pipe, again, back + 1)
            copy = crashed_copy(directory, tmp_path / "copy")
        # What was handed out after that step is handed out again: both lines are the same, and the new one is newest.
        assert again.batches == [*first.batches, *again.batches[5:]][: back + 1]
        for life, folder in enumerate((directory, copy)):
            async with make(3 + life, folder, **options) as pipe:
                trained = Trained()
                assert (await begin(pipe, trained=trained)).step == back + 1
                await finish(pipe, trained, 4)
            assert Counter(trained.items) == dict.fromkeys(range(12), 2)
            assert trained.batches[: back + 1] == again.batches

    async def test_again_and_again(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        for life, (back, until) in enumerate([(None, 4), (2, 5), (1, 3), (3, 5), (0, 2), (5, 6)]):
            async with make(10 + life, directory, capacity=9, max_staleness=3) as pipe:
                trained = Trained()
                pipe.attach(trained=trained)
                resumed = await pipe.resume(step=back)
                assert resumed.step == (back or 0)
                await pipe.start(weights_current=True)
                await train_and_save(pipe, trained, until)
                pipe.ledger.check()
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)

    async def test_a_step_without_a_generation_is_refused_with_those_that_there_are(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        async with make(1, directory) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            await train_and_save(pipe, trained, 2)
        async with make(1, directory) as pipe:
            pipe.attach(trained=trained)
            with pytest.raises(StoreError, match=r"no generation of step 7.*0, 1, 2"):
                await pipe.resume(step=7)
            assert (await pipe.resume(step=1)).step == 1
        async with make(1, str(tmp_path / "empty")) as pipe:
            with pytest.raises(StoreError, match="step=1"):
                await pipe.resume(step=1)

    async def test_nothing_is_trained_beyond_the_last_step_asked_for(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        for _ in range(2):
            async with make(1, directory) as pipe:
                await begin(pipe, trained=(trained := Trained()))
                await train_and_save(pipe, trained, 3)
                assert pipe.ledger.step == len(trained.batches) == 3
            async with make(1, directory) as pipe:
                await begin(pipe, trained=(trained := Trained()))
                assert [batch async for batch in pipe.batches(groups=4, until=3)] == []
                assert [batch async for batch in pipe.batches(groups=4, until=0)] == []


class TestBatchesHandedOutAgain:
    async def test_the_last_composition_of_a_step_counts(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(12), run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory, capacity=12) as pipe:
            await begin(pipe)
            await anyio.sleep(10)
            (await pipe.get_batch(4)).release()
            await pipe.get_batch(3)
            await pipe.get_batch(2)
            await anyio.sleep(1)
            copy = crashed_copy(directory, tmp_path / "copy")
        async with inline_pipeline(given, directory=copy, capacity=12) as pipe:
            assert (await begin(pipe)).repeated == 2
            batches = [await pipe.get_batch(3), await pipe.get_batch(2), await pipe.get_batch(7)]
            assert [ids(batch) for batch in batches] == [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9, 10, 11]]
            assert [batch.repeated for batch in batches] == [True, True, False]

    @pytest.mark.parametrize("selector", ["stalest", "fifo"])
    async def test_another_size_takes_their_groups_first_and_in_order(self, tmp_path: Path, selector: str) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(12), run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory, capacity=12) as pipe:
            await begin(pipe)
            await anyio.sleep(10)
            for _ in range(2):
                await pipe.get_batch(4)
            await anyio.sleep(1)
            copy = crashed_copy(directory, tmp_path / "copy")
        async with inline_pipeline(given, directory=copy, capacity=12, selector=selector) as pipe:
            await begin(pipe)
            batches = [await pipe.get_batch(6) for _ in range(2)]
            assert [ids(batch) for batch in batches] == [list(range(6)), list(range(6, 12))]
            assert not any(batch.repeated for batch in batches)

    async def test_what_became_too_old_for_its_step_is_run_again_instead(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(12), run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory, capacity=12) as pipe:
            await begin(pipe)
            await anyio.sleep(10)
            for _ in range(3):
                await pipe.get_batch(4)
            await anyio.sleep(1)
            copy = crashed_copy(directory, tmp_path / "copy")
        async with inline_pipeline(given, directory=copy, max_staleness=0) as pipe:
            trained = Trained()
            assert (await begin(pipe)).repeated == 3
            async for batch in pipe.batches(groups=4):
                assert (batch.repeated, batch.staleness) == (batch.step == 1, 0)
                await train(pipe, trained, batch)
            assert pipe.ledger.totals["numbers"].reopened == 8
        assert trained.items == list(range(12))


class TestVersionsOfADeadLife:
    async def test_a_number_above_the_restored_one_counts_as_the_restored_one(self, tmp_path: Path) -> None:
        """Saved at step 2, dead at step 5: what the weights of step 5 made is no newer than those of step 2 now."""
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(60), run=lasting({}), shuffle=False)
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 4, "concurrency": 20}
        async with inline_pipeline(given, directory=directory, **options) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4, until=5):
                await train(pipe, trained, batch)
                if batch.step == 2:
                    await (await pipe.save(2)).committed()
            await anyio.sleep(10)
            made = {entry.uid for entry in pipe.ledger.entries.values() if entry.oldest == 5}
            assert len(made) >= 4
            copy = crashed_copy(directory, tmp_path / "copy")
        async with inline_pipeline(given, directory=copy, **options) as pipe:
            again = Trained()
            assert (await begin(pipe, trained=again)).version == 2
            async for batch in pipe.batches(groups=4):
                assert batch.staleness <= 1
                for group in batch:
                    assert group.oldest <= pipe.version
                    assert group.uid not in made or pipe.ledger.entries[group.uid].life or batch.step <= 4
                await train(pipe, again, batch)
        assert again.items == list(range(60))


class TestTasksComeAndGo:
    @staticmethod
    def tasks(*names: str, slow: float = 1.0) -> list[Task]:
        return [
            Task(name, source=numbers(9), run=lasting(dict.fromkeys(range(9), slow)), shuffle=False) for name in names
        ]

    @pytest.mark.parametrize("options", [{}, {"order": "strict"}, {"strategy": "synchronous"}, {"max_staleness": 1}])
    @pytest.mark.parametrize("moment", [0.5, 1.5])
    async def test_a_task_that_is_away_is_kept_and_goes_on_when_it_is_back(
        self, tmp_path: Path, options: dict[str, Any], moment: float
    ) -> None:
        more = {"batch_groups": 2, "concurrency": 6, **options}
        seen: list[tuple[str, int]] = []

        async def life(directory: str, names: list[str]) -> bool:
            """Train what there is, or die a moment after the first batch."""
            async with inline_pipeline(self.tasks(*names), directory=directory, **more) as pipe:
                await begin(pipe)
                with anyio.fail_after(10_000):
                    async for batch in pipe.batches(groups=2):
                        seen.extend((group.task, group.index) for group in batch)
                        async with pipe.weight_update(version=batch.step):
                            pass
                        if names == ["a", "b"] and len(seen) == 2:
                            await pipe.ack(batch.step)
                            await (await pipe.save(batch.step)).committed()
                            await anyio.sleep(moment)
                            crashed_copy(directory, tmp_path / "copy")
                            return False
                pipe.ledger.check()
                await pipe.save(pipe.ledger.step)
            return True

        directory, copy = str(tmp_path / "run"), str(tmp_path / "copy")
        assert not await life(directory, ["a", "b"])
        assert await life(copy, ["b", "c"])
        assert {n for task, n in seen if task == "c"} == {n for task, n in seen if task == "b"} == set(range(9))
        assert await life(copy, ["a", "b", "c"])
        assert Counter(seen) == dict.fromkeys([(task, n) for task in "abc" for n in range(9)], 1)

    @pytest.mark.parametrize("order", ["strict", "finished"])
    async def test_what_waits_for_an_absent_task_is_in_nobodys_way(self, tmp_path: Path, order: str) -> None:
        directory = str(tmp_path / "run")
        both = self.tasks("a", "b", slow=50.0)
        async with inline_pipeline(both, directory=directory, capacity=12, concurrency=12) as pipe:
            await begin(pipe)
            await anyio.sleep(1)
            assert pipe.ledger.claimed == 12
            copy = crashed_copy(directory, tmp_path / "copy")
        for options in ({"capacity": 2}, {"max_staleness": 0, "batch_groups": 2}):
            target = crashed_copy(copy, tmp_path / "-".join(options))
            more: dict[str, Any] = {**options, "order": order}
            async with inline_pipeline(self.tasks("b"), directory=target, **more) as pipe:
                await begin(pipe)
                assert (await finish(pipe, Trained(), 2)).items == list(range(9))


class TestQuarantine:
    """An item that takes its process down each time must not do so for ever."""

    @staticmethod
    def given() -> Task:
        return Task("numbers", source=numbers(4), run=lasting({2: 1e6}), shuffle=False, on_failure=Retry(1000))

    async def test_one_that_was_in_flight_at_too_many_crashes_is_dropped(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "0")
        for crash in range(1, 4):
            async with inline_pipeline(self.given(), directory=directory, max_deaths=2) as pipe:
                await begin(pipe)
                await anyio.sleep(100)
                assert pipe.ledger.state(2) == "running"
                directory = crashed_copy(directory, tmp_path / str(crash))
        async with inline_pipeline(self.given(), directory=directory, max_deaths=2) as pipe:
            trained = Trained()
            assert (await begin(pipe)).waiting == 0
            assert (await finish(pipe, trained, 2)).items == [0, 1, 3]
            assert pipe.ledger.totals["numbers"].dropped == {"quarantined": 1}

    async def test_closing_and_aborting_are_no_deaths(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        for version in range(5):
            async with inline_pipeline(self.given(), directory=directory, max_deaths=0) as pipe:
                await begin(pipe)
                await anyio.sleep(100)
                async with pipe.weight_update(version=version, running="abort"):
                    pass
                assert pipe.ledger.state(2) == "running"
                assert pipe.ledger.entries[2].deaths == 0


@pytest.mark.parametrize("options", EXACT)
async def test_the_last_short_batch_is_the_same_after_a_crash(tmp_path: Path, options: dict[str, Any]) -> None:
    given = Task("numbers", source=numbers(10), run=uneven(4), shuffle=False)
    directory = str(tmp_path / "run")
    async with inline_pipeline(given, directory=directory, **options) as pipe:
        await begin(pipe, trained=(trained := Trained()))
        await train_and_save(pipe, trained, 2)
        assert ids(await pipe.get_batch(4)) == [8, 9]
        await anyio.sleep(1)
        copy = crashed_copy(directory, tmp_path / "copy")
    async with inline_pipeline(given, directory=copy, **options) as pipe:
        await begin(pipe, trained=trained)
        assert ids(await pipe.get_batch(4)) == [8, 9]
        with pytest.raises(EndOfSource):
            await pipe.get_batch(4)
