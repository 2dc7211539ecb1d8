"""Cut anywhere and resumed: in strict order exactly the unbroken run, otherwise the same items within every bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train, uneven
from tests.support.runs import ids, numbers

pytestmark = pytest.mark.virtual_time

ITEMS, EPOCHS, GROUPS = 10, 2, 4
STEPS = ITEMS * EPOCHS // GROUPS
EXACT: list[dict[str, Any]] = [
    {"strategy": "synchronous"},
    {"order": "strict", "capacity": 9},
    {"order": "strict", "max_staleness": 2, "batch_groups": GROUPS},
    {"strategy": "synchronous", "order": "strict", "max_staleness": 0},
]
LOOSE: list[dict[str, Any]] = [
    {"capacity": 9},
    {"max_staleness": 1, "batch_groups": GROUPS},
    {"selector": "fifo", "max_staleness": 2, "batch_groups": GROUPS},
    {"segment_bytes": 1, "write_queue_bytes": 1},
]


def shown(options: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def make(seed: int, directory: str | None = None, size: int = 1, **options: Any) -> Pipeline:
    """A pipeline over two shuffled epochs, whose attempts take times drawn with ``seed``."""
    given = Task(
        "numbers", source=numbers(ITEMS), run=uneven(seed), epochs=EPOCHS, group_size=size, on_failure=Retry(1000)
    )
    common: dict[str, Any] = {"concurrency": 3, "seed": 5, "keep": None, "max_deaths": 100}
    return inline_pipeline(given, directory=directory, **common, **options)


async def unbroken(**options: Any) -> list[list[int]]:
    async with make(1, **options) as pipe:
        await begin(pipe)
        return (await finish(pipe, Trained(), GROUPS)).batches


async def cut_after(step: int, directory: str, copy: str, **options: Any) -> None:
    """Train and save ``step`` steps, go on a little, and die in the midst of it."""
    async with make(100 + step, directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=GROUPS, until=step):
            await train(pipe, trained, batch)
        await (await pipe.save(step)).committed()
        with anyio.move_on_after(0.7 * step):  # perhaps a batch is leased, and perhaps only waited for
            if step < STEPS:
                await pipe.get_batch(GROUPS)
            await anyio.sleep_forever()
        crashed_copy(directory, copy)


class TestExact:
    """``concat(before, after) == uninterrupted``, to the last id."""

    @pytest.mark.parametrize("step", range(STEPS + 1))
    @pytest.mark.parametrize("options", EXACT, ids=shown)
    async def test_a_run_cut_after_a_step_goes_on_as_if_it_had_not_been(
        self, tmp_path: Path, options: dict[str, Any], step: int
    ) -> None:
        expected = await unbroken(**options)
        assert [len(batch) for batch in expected] == [GROUPS] * STEPS
        closed, crashed = str(tmp_path / "run"), str(tmp_path / "copy")
        await cut_after(step, closed, crashed, **options)
        for life, directory in enumerate((closed, crashed)):
            async with make(200 + life, directory, **options) as pipe:
                trained = Trained()
                assert (await begin(pipe, trained=trained)).step == step
                await finish(pipe, trained, GROUPS)
            assert trained.batches == expected

    @pytest.mark.parametrize("options", EXACT, ids=shown)
    async def test_a_run_that_dies_again_and_again_is_the_unbroken_one(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        expected = await unbroken(**options)
        trained = Trained()
        directory = str(tmp_path / "0")
        for life in range(1, 9):
            async with make(300 + life, directory, **options) as pipe:
                await begin(pipe, trained=trained)
                copy = str(tmp_path / str(life))
                with anyio.move_on_after(3.1):
                    async for batch in pipe.batches(groups=GROUPS):
                        await train(pipe, trained, batch)
                        if batch.step % 2 == 0:
                            await (await pipe.save(batch.step)).committed()
                        await anyio.sleep(0.3)
                crashed_copy(directory, copy)
            directory = copy
        async with make(400, directory, **options) as pipe:
            await begin(pipe, trained=trained)
            await finish(pipe, trained, GROUPS)
        assert trained.batches == expected


class TestLoose:
    """Batches in the order of finishing: the multiset of what is trained and the staleness bound hold."""

    @pytest.mark.parametrize("step", range(STEPS + 1))
    @pytest.mark.parametrize("options", LOOSE, ids=shown)
    async def test_a_run_cut_after_a_step_trains_the_same_items_within_the_bound(
        self, tmp_path: Path, options: dict[str, Any], step: int
    ) -> None:
        closed, crashed = str(tmp_path / "run"), str(tmp_path / "copy")
        await cut_after(step, closed, crashed, **options)
        for life, directory in enumerate((closed, crashed)):
            async with make(200 + life, directory, **options) as pipe:
                trained = Trained()
                await begin(pipe, trained=trained)
                async for batch in pipe.batches(groups=GROUPS):
                    assert batch.staleness <= options.get("max_staleness", 99)
                    await train(pipe, trained, batch)
                pipe.ledger.check()
                assert pipe.statistics().tasks["numbers"].totals.dropped == {}
            assert Counter(trained.items) == dict.fromkeys(range(ITEMS), EPOCHS)
            assert len(trained.batches) == STEPS


def settled(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A ledger's snapshot as it is once attempts in flight are waiting again and leases are open."""
    entries = {}
    for uid, entry in snapshot["entries"].items():
        members = [0 if member == 1 else member for member in entry["members"]]
        state = {1: 0, 4: 3}.get(entry["state"], entry["state"])
        lost = dict.fromkeys(("in_flight", "interruptions", "deaths"), 0)
        entries[uid] = {**entry, **lost, "members": members, "state": state}
    totals = {name: {**each, "interrupted": 0} for name, each in snapshot["totals"].items()}
    consumer = {**snapshot["consumer"], "leases": []}
    return {**snapshot, "entries": entries, "totals": totals, "consumer": consumer}


class TestRecoverEqualsLive:
    """CASES 6: what a copy recovers is what the live pipeline is, attempts in flight apart."""

    @staticmethod
    async def flaky(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0.3 + 0.05 * item["n"] + 0.4 * ctx.member)
        if (item["n"] in (2, 7) and ctx.attempt <= 2) or item["n"] == 5:
            raise ValueError("not yet")
        return Rollout({"n": [item["n"]]}, reward=float(item["n"]), tokens=item["n"])

    @pytest.mark.parametrize("moment", [0.0, 0.31, 0.72, 1.0, 1.9, 2.8, 4.1, 6.0, 20.0])
    @pytest.mark.parametrize("leased", [0, 1, 2])
    async def test_at_any_moment_after_a_save(self, tmp_path: Path, moment: float, leased: int) -> None:
        given = Task(
            "numbers", source=numbers(12), run=self.flaky, group_size=2, min_group=1, on_failure=Retry(3), shuffle=False
        )
        directory, copy = str(tmp_path / "run"), str(tmp_path / "copy")
        options: dict[str, Any] = {"concurrency": 5, "capacity": 8}
        async with inline_pipeline(given, directory=directory, **options) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train(pipe, trained, await pipe.get_batch(2))
            await (await pipe.save(1)).committed()
            batches = [ids(await pipe.get_batch(2)) for _ in range(leased)]
            await anyio.sleep(moment + 1e-6)
            crashed_copy(directory, copy)
            live, leases = settled(pipe.ledger.snapshot()), pipe.ledger.snapshot()["consumer"]["leases"]
            progress = pipe.progress.produced_samples, pipe.progress.failed_samples
        async with inline_pipeline(given, directory=copy, **options) as pipe:
            pipe.attach(trained=trained)
            resumed = await pipe.resume()
            assert settled(pipe.ledger.snapshot()) == live
            assert resumed.repeated == len(leases) == leased
            if not leased:
                assert (pipe.progress.produced_samples, pipe.progress.failed_samples) == progress
            await pipe.start(weights_current=True)
            again = [await pipe.get_batch(2) for _ in range(leased)]
            assert [ids(batch) for batch in again] == batches
            assert all(batch.repeated for batch in again)


class TestMoments:
    """Crashes at the moments that are easily forgotten."""

    @staticmethod
    async def finish_copy(copy: str, given: Task, groups: int, **options: Any) -> Trained:
        async with inline_pipeline(given, directory=copy, **options) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            return await finish(pipe, trained, groups)

    async def test_a_group_that_was_half_finished_keeps_its_finished_members(self, tmp_path: Path) -> None:
        runs: list[tuple[int, int]] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            runs.append((item["n"], ctx.member))
            await anyio.sleep(1.0 + 10 * ctx.member)
            return Rollout({"member": [ctx.member], "noise": ctx.rng.random(2)}, reward=0.0)

        given = Task("numbers", source=numbers(2), run=run, group_size=3, shuffle=False)
        async with inline_pipeline(given, directory=str(tmp_path / "run"), concurrency=6) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(12)
            copy = crashed_copy(str(tmp_path / "run"), tmp_path / "copy")
        runs.clear()
        async with inline_pipeline(given, directory=copy, concurrency=6) as pipe:
            await begin(pipe, trained=Trained())
            batch = await pipe.get_batch(2)
        assert sorted(runs) == [(0, 2), (1, 2)], "only the members that were in flight"
        assert [[rollout["member"].item() for rollout in group] for group in batch] == [[0, 1, 2]] * 2

    async def test_in_the_midst_of_a_weight_update(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(12), run=lasting({}), shuffle=False)
        for running in ("keep", "finish", "abort"):
            async with inline_pipeline(given, directory=directory, concurrency=3, capacity=6) as pipe:
                trained = Trained()
                await begin(pipe, trained=trained)
                batch = await pipe.get_batch(2)
                trained.step(batch)
                async with pipe.weight_update(version=batch.step, running=running):
                    copy = crashed_copy(directory, tmp_path / running)
                    await anyio.sleep(5)
            assert (await self.finish_copy(copy, given, 2, concurrency=3)).items == list(range(12))

    async def test_between_the_capture_and_the_commit_of_a_generation(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(8), run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            batch = await pipe.get_batch(2)
            await train(pipe, trained, batch)
            saving = await pipe.save(1)
            before = crashed_copy(directory, tmp_path / "before")
            await saving.committed()
            after = crashed_copy(directory, tmp_path / "after")
        for copy, step in ((before, 0), (after, 1)):
            async with inline_pipeline(given, directory=copy) as pipe:
                again = Trained()
                assert (await begin(pipe, trained=again)).step == step
                assert (await finish(pipe, again, 2)).items == list(range(8))

    async def test_before_the_first_generation_and_right_after_it(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(6), run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory) as pipe:
            opened = crashed_copy(directory, tmp_path / "opened")
            await begin(pipe, trained=Trained())
            started = crashed_copy(directory, tmp_path / "started")
        for copy in (opened, started):
            assert (await self.finish_copy(copy, given, 2)).items == list(range(6))

    @pytest.mark.parametrize("saved", [True, False])
    async def test_with_the_last_item_of_the_last_epoch_in_flight_leased_or_trained(
        self, tmp_path: Path, saved: bool
    ) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(5), run=lasting({4: 9.0}), shuffle=False, epochs=2)
        copies = []
        async with inline_pipeline(given, directory=directory, concurrency=5, capacity=10) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            for moment in range(5):
                batch = await pipe.get_batch(2)
                copies.append(crashed_copy(directory, tmp_path / f"leased-{moment}"))
                await train(pipe, trained, batch)
                await pipe.ack(batch.step)
                if saved:
                    await (await pipe.save(batch.step)).committed()
                copies.append(crashed_copy(directory, tmp_path / f"acked-{moment}"))
                await anyio.sleep(0.7)
                copies.append(crashed_copy(directory, tmp_path / f"later-{moment}"))
        for copy in copies:
            again = await self.finish_copy(copy, given, 2, concurrency=5, capacity=10)
            assert Counter(again.items) == dict.fromkeys(range(5), 2), copy

    async def test_nothing_written_since_a_save_is_run_again_when_nothing_is_written_as_it_comes(
        self, tmp_path: Path
    ) -> None:
        directory = str(tmp_path / "run")
        given = Task("numbers", source=numbers(12), run=lasting({}), shuffle=False)
        async with inline_pipeline(given, directory=directory, durability="none", concurrency=2) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            for _ in range(3):
                batch = await pipe.get_batch(2)
                await train(pipe, trained, batch)
                if batch.step == 2:
                    await (await pipe.save(2)).committed()
            await pipe.ack(3)
            await anyio.sleep(5)
            copy = crashed_copy(directory, tmp_path / "copy")
        again = await self.finish_copy(copy, given, 2, durability="none")
        assert again.batches[:2] == trained.batches[:2]
        assert again.items == list(range(12))
