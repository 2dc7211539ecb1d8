"""Items and rollouts that come from outside: before what is new, within every bound, and after a crash again."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from pipeline import ConfigError, Context, EndOfSource, Item, Rollout, RolloutInvalid, Task, UsageError
from pipeline.errors import SourceError
from tasks import SequenceSource
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time

SEEN: list[tuple[int, Any, str]] = []


async def seeing(item: Item, ctx: Context) -> Rollout:
    """Notes (index, content, kind), and takes a second."""
    SEEN.append((item.index, item.content, ctx.kind))
    await anyio.sleep(1.0)
    return Rollout({"n": [item["n"]]}, reward=float(item["n"]))


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def nobody(name: str = "numbers", **more: Any) -> Any:
    """A task whose items all come by hand."""
    return Task(name, source=SequenceSource([]), run=seeing, **more)


class TestSubmit:
    async def test_it_is_run_before_what_is_new_and_takes_no_place_of_the_epoch(self) -> None:
        async with inline_pipeline(task(4, seeing), concurrency=1, capacity=9) as pipe:
            await pipe.start()
            await anyio.sleep(0.5)
            uid = await pipe.submit("numbers", {"n": 100})
            assert (uid, pipe.ledger.state(uid)) == (1, "waiting")
            assert pipe.ledger.entries[uid].kind == "external"
            batches = [ids(batch) async for batch in pipe.batches(groups=5)]
            pipe.ledger.check()
        assert [(index, kind) for index, _, kind in SEEN] == [
            (0, "train"),
            (-1, "external"),
            (1, "train"),
            (2, "train"),
            (3, "train"),
        ]
        assert batches == [[0, -1, 1, 2, 3]]
        assert pipe.ledger.totals["numbers"].trained == 5

    async def test_it_takes_nothing_from_the_tasks_share(self) -> None:
        two = [task(40, seeing, name="a"), task(40, seeing, name="b")]
        async with inline_pipeline(two, concurrency=1, capacity=80) as pipe:
            await pipe.start()
            for n in range(10):
                await pipe.submit("a", {"n": n})
            await anyio.sleep(30.5)
            claimed = {name: totals.claimed for name, totals in pipe.ledger.totals.items()}
            assert claimed == {"a": 10 + 11, "b": 10}

    async def test_a_group_of_the_tasks_size_shares_the_content(self) -> None:
        async with inline_pipeline(nobody(group_size=3)) as pipe:
            await pipe.start()
            await pipe.submit(pipe._tasks[0], {"n": 7, "pair": (1, 2**70), "raw": b"\0"})
            batch = await pipe.get_batch(1)
        assert SEEN == [(-1, {"n": 7, "pair": (1, 2**70), "raw": b"\0"}, "external")] * 3
        assert (len(batch.groups[0]), batch.groups[0].index, batch.groups[0].epoch) == (3, -1, -1)

    async def test_what_goes_in_is_copied(self) -> None:
        content = {"n": 1}
        async with inline_pipeline(nobody()) as pipe:
            await pipe.start()
            await pipe.submit("numbers", content)
            content["n"] = 2
            await pipe.get_batch(1)
        assert SEEN[0][1] == {"n": 1}

    async def test_a_waiting_trainer_gets_it_and_without_any_the_source_is_at_its_end(self) -> None:
        async with inline_pipeline(nobody()) as pipe:
            await pipe.start()
            with pytest.raises(EndOfSource):
                await pipe.get_batch(1)
            await pipe.submit("numbers", {"n": 5})
            assert ids(await pipe.get_batch(2)) == [-1]

    @pytest.mark.parametrize(
        "options", [{"capacity": 2}, {"max_staleness": 1, "batch_groups": 1}, {"strategy": "synchronous"}]
    )
    async def test_admission_holds_for_it_too(self, options: dict[str, Any]) -> None:
        async with inline_pipeline(nobody(), **options) as pipe:
            await pipe.start()
            for n in range(6):
                await pipe.submit("numbers", {"n": n})
            await anyio.sleep(10)
            assert len(SEEN) == (0 if "strategy" in options else 2), "what starts too early would be too old"
            assert pipe.statistics().groups.waiting == 6 - len(SEEN)
            trained = Trained()
            async for batch in pipe.batches(groups=1):
                assert batch.staleness <= options.get("max_staleness", 99)
                trained.step(batch)
                async with pipe.weight_update(version=batch.step):
                    pass
                pipe.ledger.check()
        assert [content["n"] for _, content, _ in SEEN] == list(range(6))
        assert len(trained.batches) == 6

    async def test_before_start_in_memory_it_waits_for_it(self) -> None:
        async with inline_pipeline(nobody()) as pipe:
            await pipe.submit("numbers", {"n": 1})
            await anyio.sleep(5)
            assert SEEN == []
            await pipe.start()
            assert ids(await pipe.get_batch(1)) == [-1]

    @pytest.mark.parametrize(
        ("name", "content", "error", "match"),
        [
            ("other", {"n": 1}, ConfigError, "task='other': the run's tasks are numbers"),
            (None, {"n": 1}, ConfigError, "task=None"),
            (["numbers"], {"n": 1}, ConfigError, "task="),
            ("numbers", {"n": object()}, SourceError, r"task 'numbers', an item by hand: .*a object at \$\.n cannot"),
            ("numbers", {"n": torch.zeros(2)}, SourceError, "a Tensor at"),
        ],
    )
    async def test_what_cannot_be_is_refused_and_changes_nothing(
        self, name: Any, content: Any, error: type[Exception], match: str
    ) -> None:
        async with inline_pipeline(nobody()) as pipe:
            await pipe.start()
            before = copy.deepcopy(pipe.ledger.snapshot())
            with pytest.raises(error, match=match):
                await pipe.submit(name, content)
            assert pipe.ledger.snapshot() == before

    @pytest.mark.parametrize("at", [0.0, 0.5, 1.5, 3.5])
    async def test_a_resume_runs_it_again_wherever_the_run_was_cut(
        self, run_directory: str, tmp_path: Path, at: float
    ) -> None:
        options: dict[str, Any] = {"concurrency": 1, "capacity": 9}
        async with inline_pipeline(task(3, seeing), directory=run_directory, **options) as pipe:
            await begin(pipe, trained=Trained())
            uids = [await pipe.submit("numbers", {"n": n, "text": "\ud83d"}) for n in (100, 200)]
            await anyio.sleep(at)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        done = int(at)
        SEEN.clear()
        async with inline_pipeline(task(3, seeing), directory=copy, **options) as pipe:
            trained = Trained()
            resumed = await begin(pipe, trained=trained)
            pipe.ledger.check()
            assert resumed.buffered == done
            await finish(pipe, trained, 1)
            assert [pipe.ledger.state(uid) for uid in uids] == ["trained", "trained"]
        assert trained.items == [-1, -1, 0, 1, 2]
        assert [content["n"] for _, content, _ in SEEN] == [0, 100, 200, 1, 2][done:]
        assert all(content["text"] == "\ud83d" for index, content, _ in SEEN if index < 0)

    async def test_it_is_written_when_the_call_returns(self, run_directory: str, tmp_path: Path) -> None:
        async with inline_pipeline(nobody(), directory=run_directory) as pipe:
            await begin(pipe)
            await pipe.submit("numbers", {"n": 3})
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(nobody(), directory=copy) as pipe:
            await begin(pipe)
            assert (await pipe.get_batch(1)).rewards.tolist() == [3.0]


def done(*numbers: float, **more: Any) -> list[Rollout]:
    return [Rollout({"n": np.array([number])}, reward=number, tokens=3, **more) for number in numbers]


class TestPut:
    async def test_it_goes_straight_into_the_buffer_in_groups_of_any_size(self, run_directory: str) -> None:
        async with inline_pipeline(nobody(), directory=run_directory) as pipe:
            await begin(pipe)
            first = await pipe.put("numbers", done(1.0, 2.0))
            second = await pipe.put("numbers", done(3.0)[0])
            assert [pipe.ledger.state(uid) for uid in (first, second)] == ["buffered", "buffered"]
            pipe.ledger.check()
            batch = await pipe.get_batch(2)
        assert (batch.uids, batch.rewards.tolist()) == ([first, second], [1.0, 2.0, 3.0])
        assert [rollout["n"].tolist() for rollout in batch.rollouts] == [[1.0], [2.0], [3.0]]
        assert [group.members for group in batch] == [[0, 1], [0]]
        assert SEEN == []
        totals = pipe.ledger.totals["numbers"]
        assert (totals.claimed, totals.finished, totals.produced, totals.tokens) == (2, 3, 2, 9)

    async def test_a_waiting_trainer_gets_it(self) -> None:
        async with inline_pipeline(task(1, lasting({0: 50.0}))) as pipe, anyio.create_task_group() as group:
            await pipe.start()

            async def later() -> None:
                await anyio.sleep(1)
                await pipe.put("numbers", done(9.0))

            group.start_soon(later)
            with anyio.fail_after(2):
                assert (await pipe.get_batch(1)).rewards.tolist() == [9.0]

    async def test_it_outlives_a_crash(self, run_directory: str, tmp_path: Path) -> None:
        async with inline_pipeline(nobody(), directory=run_directory) as pipe:
            await begin(pipe, trained=Trained())
            await pipe.put("numbers", done(1.0, 2.0))
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(nobody(), directory=copy) as pipe:
            resumed = await begin(pipe, trained=Trained())
            assert (resumed.buffered, resumed.waiting) == (1, 0)
            assert (await pipe.get_batch(1)).rewards.tolist() == [1.0, 2.0]

    async def test_its_versions_are_those_in_use_or_its_own(self) -> None:
        async with inline_pipeline(nobody()) as pipe:
            await pipe.start()
            async with pipe.weight_update(version=4):
                pass
            for more in ({}, {"oldest": 2}, {"newest": 3}, {"oldest": 1, "newest": 2}):
                await pipe.put("numbers", done(1.0, **more))
            found = [(group.oldest, group.newest) for group in await pipe.get_batch(4)]
        assert sorted(found) == [(1, 2), (2, 4), (3, 3), (4, 4)]

    @pytest.mark.parametrize("content", [None, {"n": 8}])
    async def test_once_too_old_it_is_run_again_if_it_says_of_what(self, content: Any) -> None:
        async with inline_pipeline(nobody(), max_staleness=0, batch_groups=2) as pipe:
            await pipe.start()
            await pipe.put("numbers", done(5.0))
            uid = await pipe.put("numbers", done(1.0, 2.0), content)
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=batch.step):
                pass
            await pipe.ack(batch.step)
            if content is None:
                with pytest.raises(EndOfSource):
                    await pipe.get_batch(1)
                assert pipe.ledger.totals["numbers"].dropped == {"expired": 1}
            else:
                batch = await pipe.get_batch(1)
                assert (batch.uids, batch.rewards.tolist(), batch.staleness) == ([uid], [8.0, 8.0], 0)
                assert [(index, kept) for index, kept, _ in SEEN] == [(-1, content)] * 2
            pipe.ledger.check()

    async def test_what_is_too_old_when_it_is_put_is_never_trained(self) -> None:
        async with inline_pipeline(task(3, lasting({})), max_staleness=0, batch_groups=1) as pipe:
            await pipe.start()
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=1):
                pass
            await pipe.ack(batch.step)
            uid = await pipe.put("numbers", done(5.0, oldest=0, newest=0))
            assert pipe.ledger.state(uid) == "dropped"
            pipe.ledger.check()

    @pytest.mark.parametrize(
        ("rollouts", "error", "match"),
        [
            ([], ConfigError, "a list of at least one"),
            ([Rollout(reward=math.nan)], ConfigError, "member 0: reward is float nan"),
            ([Rollout(reward=1.0), Rollout(reward=math.inf)], ConfigError, "member 1: reward is float inf"),
            ([Rollout(reward=1.0), None], RolloutInvalid, "returned NoneType"),
            ("text", RolloutInvalid, "returned str"),
            ([Rollout({"x": object()})], RolloutInvalid, "field 'x'"),
            ([Rollout(oldest=3, newest=1)], RolloutInvalid, "newest=1 lies before oldest=3"),
            ([Rollout(info={"x": object()})], RolloutInvalid, "field info"),
        ],
    )
    async def test_what_cannot_be_is_refused_and_changes_nothing(
        self, run_directory: str, rollouts: Any, error: type[Exception], match: str
    ) -> None:
        async with inline_pipeline(nobody(), directory=run_directory) as pipe:
            await begin(pipe)
            before = copy.deepcopy(pipe.ledger.snapshot())
            writer = pipe._run.state.writer
            assert writer is not None
            queued = writer.writer.sequence, writer.writer.queued_bytes
            with pytest.raises(error, match=match):
                await pipe.put("numbers", rollouts)
            assert pipe.ledger.snapshot() == before
            assert (writer.writer.sequence, writer.writer.queued_bytes) == queued
            assert len(pipe._run.state.buffer.storage) == 0
            uid = await pipe.put("numbers", done(1.0))
            assert (await pipe.get_batch(1)).uids == [uid]

    async def test_in_a_directory_it_comes_after_start(self, run_directory: str) -> None:
        async with inline_pipeline(nobody(), directory=run_directory) as pipe:
            for verb in (pipe.put("numbers", done(1.0)), pipe.submit("numbers", {"n": 1})):
                with pytest.raises(UsageError, match=r"comes after start\(\), or after resume\(\)"):
                    await verb


async def test_a_group_of_a_task_that_is_not_here_waits_for_it_when_it_becomes_too_old(
    run_directory: str, tmp_path: Path
) -> None:
    """It cannot be run again in this life: it must neither end the run nor stand in anybody's way."""
    both = [task(1, lasting({0: 10.0}), name="a"), task(6, lasting({}), name="b")]
    async with inline_pipeline(both, directory=run_directory, capacity=3) as pipe:
        await begin(pipe, trained=Trained())
        for step in (1, 2):
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=step):
                pass
        await (await pipe.save(2)).committed()
        await anyio.sleep(20)
        assert pipe.ledger.state(0) == "buffered"
        copy = crashed_copy(run_directory, tmp_path / "copy")
    async with inline_pipeline(both[1], directory=copy, max_staleness=0) as pipe:
        await begin(pipe, trained=Trained())
        assert (pipe.ledger.state(0), pipe._run.state.absent) == ("buffered", 0)
        drawn = []
        async for batch in pipe.batches(groups=1):
            drawn += [(group.task, group.index) for group in batch]
            async with pipe.weight_update(version=batch.step):
                pass
        assert (pipe.ledger.state(0), pipe._run.state.absent) == ("waiting", 1)
        assert sorted(drawn) == [("b", n) for n in range(2, 6)]
        pipe.ledger.check()
        await (await pipe.save(6)).committed()
    async with inline_pipeline(both, directory=copy, max_staleness=0) as pipe:
        await begin(pipe, trained=Trained())
        assert [group.task for group in await pipe.get_batch(1)] == ["a"]


async def test_what_is_quarantined_of_a_task_that_is_not_here_takes_no_place(
    run_directory: str, tmp_path: Path
) -> None:
    both = [task(2, lasting({}, 50.0), name="a"), task(6, lasting({}), name="b")]
    async with inline_pipeline(both, directory=run_directory, concurrency=4, capacity=4) as pipe:
        await begin(pipe, trained=Trained())
        await anyio.sleep(2)
        assert pipe.ledger.counts["a"] == [0, 2, 0, 0, 0]
        copy = crashed_copy(run_directory, tmp_path / "copy")
    async with inline_pipeline(both[1], directory=copy, max_deaths=0, capacity=4) as pipe:
        await begin(pipe, trained=Trained())
        assert pipe.ledger.totals["a"].dropped == {"quarantined": 2}
        assert pipe._run.state.absent == 0
        await anyio.sleep(5)
        assert pipe.ledger.outstanding == 4, "the capacity is neither more nor less"
