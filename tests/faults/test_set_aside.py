"""Lines that leave something behind: generations saved without their buffer, and ``after_crash="discard"``."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Damaged, Item, Pipeline, Retry, Rollout, Task, UsageError
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train, uneven
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

EVERY: list[dict[str, Any]] = [{"strategy": "synchronous"}, {"order": "strict", "capacity": 9}, {"capacity": 9}]


def make(seed: int, directory: str, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(12), run=uneven(seed), epochs=2, group_size=2)
    return inline_pipeline(given, directory=directory, concurrency=3, keep=None, max_deaths=99, **options)


async def train_until(pipe: Pipeline, trained: Trained, until: int) -> None:
    async for batch in pipe.batches(groups=4, until=until):
        await train(pipe, trained, batch)


async def saved_without(directory: str, step: int, **options: Any) -> Trained:
    """Train ``step`` steps, save without the buffer, and go on for a while with a batch leased."""
    async with make(step, directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await train_until(pipe, trained, step)
        await (await pipe.save(step, replay_buffer=False)).committed()
        saved = list(trained.batches)
        with anyio.move_on_after(2.0):
            await pipe.get_batch(4)
            await anyio.sleep_forever()
    trained.batches = saved
    return trained


def generation(directory: str) -> Path:
    """The folder of the newest generation."""
    return max(Path(directory, "generations").iterdir())


class TestSavingWithoutTheBuffer:
    @pytest.mark.parametrize("options", EVERY)
    @pytest.mark.parametrize("step", [0, 1, 3, 5])
    async def test_everything_unconsumed_is_drawn_again_oldest_first(
        self, tmp_path: Path, options: dict[str, Any], step: int
    ) -> None:
        directory = str(tmp_path / "run")
        before = await saved_without(directory, step, **options)
        started: list[int] = []
        run = uneven(99)

        async def watched(item: Item, ctx: Context) -> Rollout:
            started.append(item.uid)
            return await run(item, ctx)

        given = Task("numbers", source=numbers(12), run=watched, epochs=2, group_size=2)
        async with inline_pipeline(given, directory=directory, concurrency=1, keep=None, **options) as pipe:
            trained = Trained()
            resumed = await begin(pipe, trained=trained)
            assert (resumed.step, resumed.buffered, resumed.repeated) == (step, 0, 0)
            pipe.ledger.check()
            waiting = [uid for uid in range(pipe.ledger.next_uid) if pipe.ledger.state(uid) in ("waiting", "running")]
            assert len(waiting) == resumed.waiting
            assert resumed.set_aside > 0
            assert pipe.progress.deficit("numbers", 0) == 0
            await finish(pipe, trained, 4)
        assert trained.batches[:step] == before.batches
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)
        first = list(dict.fromkeys(started))
        assert first[: len(waiting)] == waiting  # with one slot: oldest first, and before anything new
        assert first == sorted(first)

    async def test_progress_is_rolled_back_in_the_file_and_not_in_life(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        async with make(1, directory, capacity=12) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train_until(pipe, trained, 2)
            batch = await pipe.get_batch(4)
            await anyio.sleep(3.0)
            live = pipe.progress
            assert live.target_samples == {"numbers": 12}
            await (await pipe.save(2, replay_buffer=False)).committed()
            assert live is pipe.progress
            assert (live.target_samples, live.target_upto_future_step) == ({"numbers": 12}, 3)
            assert live.replay_buffer_saved
            await pipe.ack(batch.step)
        saved = json.loads((generation(directory) / "progress.json").read_text())
        assert saved["target_samples"] == saved["consumed_samples"] == {"numbers": 8}
        assert saved["next_consumer_step"] == saved["producer_future_step"] == 3
        assert saved["target_upto_future_step"] == 2
        assert saved["replay_buffer_saved"] is False
        assert saved["produced_samples"] == saved["raw_rewards_sum"] == saved["produce_time_s"] == {"numbers": 0}
        manifest = json.loads((generation(directory) / "manifest.json").read_text())
        assert list(manifest["left_out"]) == ["replay_buffer"]
        assert manifest["segments"] == []
        async with make(2, directory, capacity=12) as pipe:
            trained = Trained()
            resumed = await begin(pipe, trained=trained)
            assert resumed.step == 2
            assert pipe.progress.target_samples == {"numbers": 8}
            batch = await pipe.get_batch(4)
            assert pipe.progress.target_samples == {"numbers": 12}
            assert pipe.progress.target_upto_future_step == 3

    @pytest.mark.parametrize("gone", [("journals", "segments"), ("segments",), ("journals",)])
    async def test_neither_journals_nor_segments_are_needed(self, tmp_path: Path, gone: tuple[str, ...]) -> None:
        directory = str(tmp_path / "run")
        await saved_without(directory, 3, capacity=9)
        for part in gone:
            shutil.rmtree(Path(directory, part))
            os.makedirs(Path(directory, part))
        await self._go_on_twice(directory, tmp_path)

    async def test_a_damaged_journal_is_in_nobodys_way(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        await saved_without(directory, 3, capacity=9)
        for path in Path(directory, "journals").iterdir():
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 0xFF
            path.write_bytes(raw)
        await self._go_on_twice(directory, tmp_path)

    @staticmethod
    async def _go_on_twice(directory: str, tmp_path: Path) -> None:
        async with make(7, directory, capacity=9) as pipe:
            trained = Trained()
            assert (await begin(pipe, trained=trained)).step == 3
            await train_until(pipe, trained, 4)
            await (await pipe.save(4)).committed()
            await anyio.sleep(1.0)
            crashed = crashed_copy(directory, tmp_path / "copy")
        for folder in (directory, crashed):
            async with make(8, folder, capacity=9) as pipe:
                trained = Trained()
                assert (await begin(pipe, trained=trained)).step == 4
                await finish(pipe, trained, 4)
            assert Counter(trained.items) == dict.fromkeys(range(12), 2)

    async def test_failures_are_counted_on_and_members_that_gave_up_stay_so(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        tries: list[tuple[int, int]] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1.0 if item["n"] != 1 else 0.4)
            if item["n"] == 1:
                tries.append((ctx.member, ctx.attempt))
                raise ValueError("always")
            return Rollout({"n": [item["n"]]}, reward=1.0)

        def task() -> Task:
            return Task("numbers", source=numbers(4), run=run, shuffle=False, on_failure=Retry(attempts=3))

        async with inline_pipeline(task(), directory=directory, concurrency=1) as pipe:
            await begin(pipe)
            await pipe.get_batch(1)
            await anyio.sleep(0.5)
            await (await pipe.save(1, replay_buffer=False)).committed()
        assert tries == [(0, 1)]
        async with inline_pipeline(task(), directory=directory, concurrency=1) as pipe:
            trained = Trained(1)
            await begin(pipe)
            await finish(pipe, trained, 1)
            assert pipe.ledger.totals["numbers"].dropped == {"failed": 1}
        assert len(tries) == 3
        assert trained.items == [2, 3]

    async def test_no_number_is_used_twice(self, tmp_path: Path) -> None:
        """Neither an item's, though the journals go on beyond the generation, nor an incarnation's."""
        directory = str(tmp_path / "run")
        async with make(1, directory, capacity=12) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train_until(pipe, trained, 1)
            await (await pipe.save(1, replay_buffer=False)).committed()
            claimed = pipe.ledger.next_uid
            await train_until(pipe, trained, 3)
            used = pipe.ledger.next_uid
        assert used > claimed
        shutil.copytree(directory, tmp_path / "copy")
        async with make(2, directory, capacity=12) as pipe:
            await begin(pipe, trained=Trained())
            assert pipe.ledger.next_uid >= used
            await anyio.sleep(3.0)
            assert pipe._run.state.incarnation == 2
        # The first generation alone, beside the segments of both lives.
        for folder in Path(directory, "generations").iterdir():
            if folder.name not in {each.name for each in Path(tmp_path, "copy", "generations").iterdir()}:
                shutil.rmtree(folder)
        shutil.rmtree(Path(directory, "journals"))
        os.makedirs(Path(directory, "journals"))
        async with make(3, directory, capacity=12) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            assert pipe._run.state.incarnation == 3
            await finish(pipe, trained, 4)
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)

    async def test_another_seed_is_refused_with_no_journal_to_tell(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        await saved_without(directory, 2, capacity=9)
        shutil.rmtree(Path(directory, "journals"))
        os.makedirs(Path(directory, "journals"))
        given = Task("numbers", source=numbers(12), run=uneven(1), epochs=2, group_size=2)
        async with inline_pipeline(given, directory=directory, seed=7) as pipe:
            pipe.attach(trained=Trained())
            with pytest.raises(UsageError, match=r"seed=7.*seed=0"):
                await pipe.resume()

    async def test_a_damaged_list_is_named(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        await saved_without(directory, 2, capacity=9)
        path = generation(directory) / "producer.msgpack"
        path.write_bytes(path.read_bytes()[:-3])
        async with make(1, directory) as pipe:
            pipe.attach(trained=Trained())
            with pytest.raises(Damaged, match=r"producer\.msgpack"):
                await pipe.resume()

    async def test_the_synchronous_form_saves_without_as_well(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")

        def rounds() -> int:
            given = Task("numbers", source=numbers(12), run=lasting({}, 0.001), shuffle=False)
            with Pipeline(given, directory=directory, watchdog=None).sync() as pipe:
                resumed = pipe.resume()
                pipe.start(weights_current=True)
                batch = pipe.get_batch(4)
                pipe.save(batch.step, replay_buffer=False).committed()
                return resumed.step

        assert [await anyio.to_thread.run_sync(rounds) for _ in range(3)] == [0, 1, 2]
        assert "left_out" in (generation(directory) / "manifest.json").read_text()


class TestDiscarding:
    @pytest.mark.parametrize("options", EVERY)
    async def test_the_buffer_is_what_it_was_at_the_save(self, tmp_path: Path, options: dict[str, Any]) -> None:
        directory = str(tmp_path / "run")
        async with make(1, directory, **options) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train_until(pipe, trained, 2)
            saving = await pipe.save(2)
            then = copy.deepcopy(pipe.ledger.snapshot())  # in the turn of the save
            await saving.committed()
            await train_until(pipe, trained, 3)
            await anyio.sleep(1.5)
            crashed = crashed_copy(directory, tmp_path / "copy")
        async with make(2, crashed, after_crash="discard", **options) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            resumed = await pipe.resume()
            assert resumed.set_aside > 0
            now = pipe.ledger.snapshot()
            assert now["entries"].keys() == then["entries"].keys()
            assert now["order"] == then["order"]
            assert now["consumer"]["trained"] == then["consumer"]["trained"]
            finished = {uid: bytes(each["members"]).count(2) for uid, each in now["entries"].items()}
            assert finished == {uid: bytes(each["members"]).count(2) for uid, each in then["entries"].items()}
            await pipe.start(weights_current=True)
            await finish(pipe, trained, 4)
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)

    async def test_what_was_set_aside_stays_so_in_later_lives(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        async with make(1, directory, capacity=9) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train_until(pipe, trained, 1)
            await (await pipe.save(1)).committed()
            await train_until(pipe, trained, 3)
            await anyio.sleep(1.0)
        for life in range(3):  # the first sets aside, the others merely resume
            async with make(2 + life, directory, capacity=9, after_crash=("discard", "reuse", "reuse")[life]) as pipe:
                trained = Trained()
                assert (await begin(pipe, trained=trained)).step == 1 + life
                await train_until(pipe, trained, 2 + life)
                await (await pipe.save(2 + life)).committed()
                pipe.ledger.check()
        async with make(9, directory, capacity=9) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 4)
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)

    @pytest.mark.parametrize("options", EVERY)
    async def test_a_generation_of_the_part_that_was_set_aside_can_be_gone_back_to(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        """Step 4 lies in what a life that went back to step 1 set aside; whoever goes back to it has its line again."""
        directory = str(tmp_path / "run")
        async with make(1, directory, **options) as pipe:
            first = Trained()
            await begin(pipe, trained=first)
            for step in range(1, 5):
                await train_until(pipe, first, step)
                await (await pipe.save(step)).committed()
            await anyio.sleep(1.0)
        async with make(2, directory, after_crash="discard", **options) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            await pipe.resume(1)
            await pipe.start(weights_current=True)
            await train_until(pipe, trained, 2)
            await (await pipe.save(2)).committed()
            await anyio.sleep(1.0)
        for life in range(2):  # the second finds it by the journals of the first
            async with make(3 + life, directory, **options) as pipe:
                trained = Trained()
                pipe.attach(trained=trained)
                resumed = await pipe.resume(4 if life == 0 else None)
                assert trained.batches == first.batches
                assert resumed.step == 4
                pipe.ledger.check()
                await pipe.start(weights_current=True)
                if life == 0:
                    await anyio.sleep(1.0)
                    crashed = crashed_copy(directory, tmp_path / "copy")
                await finish(pipe, trained, 4)
            assert Counter(trained.items) == dict.fromkeys(range(12), 2)
            directory = crashed

    @pytest.mark.parametrize("seed", range(40))
    async def test_lines_of_every_kind_one_after_another(self, tmp_path: Path, seed: int) -> None:
        """Saves with and without the buffer, resumes of any step that reuse or discard, crashes at any time."""
        chance = random.Random(seed)
        options = chance.choice(EVERY)
        directory = str(tmp_path / "0")
        steps: dict[int, list[list[int]]] = {0: []}
        for life in range(1, 9):
            back = chance.choice([None, *steps])
            mode = chance.choice(["reuse", "discard"])
            async with make(100 * seed + life, directory, after_crash=mode, **options) as pipe:
                trained = Trained()
                pipe.attach(trained=trained)
                if life > 1:
                    resumed = await pipe.resume(step=back)
                    assert trained.batches == steps[resumed.step]
                await pipe.start(weights_current=True)
                pipe.ledger.check()
                with anyio.move_on_after(chance.uniform(0.1, 4.0)):
                    async for batch in pipe.batches(groups=4, until=6):
                        await train(pipe, trained, batch)
                        if chance.random() < 0.7:
                            await (await pipe.save(batch.step, replay_buffer=chance.random() < 0.5)).committed()
                            steps[batch.step] = list(trained.batches)
                pipe.ledger.check()
                crashed = crashed_copy(directory, tmp_path / str(life))
            directory = chance.choice([directory, crashed])
        async with make(seed, directory, **options) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 4)
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)
