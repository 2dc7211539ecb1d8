"""Items without an index, and sources that learn: what cannot be given again is kept, and comes again after a crash."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import (
    ConfigError,
    Context,
    EndOfSource,
    Item,
    LearningSource,
    Pipeline,
    Rollout,
    Skip,
    SourceMark,
    Stream,
    Task,
)
from pipeline.errors import SourceError
from tasks import SequenceSource
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


class Queue:
    """A stream that gives what is put in, and notes when it was asked; ``None`` ends it."""

    def __init__(self, *items: int | None) -> None:
        self.items = list(items)
        self.asked = 0
        self.waiting = anyio.Event()
        self.came = anyio.Event()

    def put(self, *items: int | None) -> None:
        self.items += items
        self.came.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        self.asked += 1
        while not self.items:
            self.came = anyio.Event()
            await self.came.wait()
        item = self.items.pop(0)
        if item is None:
            raise StopAsyncIteration
        return {"n": item}


SEEN: list[int] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


async def seeing(item: Item, ctx: Context) -> Rollout:
    SEEN.append(item["n"])
    await anyio.sleep(1.0)
    return Rollout({"n": [item["n"]]}, reward=float(item["n"]))


def streaming(stream: Any, name: str = "stream", **more: Any) -> Task:
    return Task(name, source=stream, run=seeing, **more)


class TestStreams:
    async def test_an_async_generator_is_a_stream_and_ends_like_a_finite_source(self) -> None:
        async def three() -> AsyncIterator[Any]:
            for n in range(3):
                yield {"n": n}

        assert isinstance(three(), Stream)
        async with inline_pipeline(streaming(three(), group_size=2)) as pipe:
            await pipe.start()
            batches = [batch async for batch in pipe.batches(groups=2)]
            with pytest.raises(EndOfSource):
                await pipe.get_batch(1)
            pipe.ledger.check()
        assert [len(batch) for batch in batches] == [2, 1]
        assert sorted(index for batch in batches for index in ids(batch)) == [0, 1, 2]
        assert sorted(SEEN) == [0, 0, 1, 1, 2, 2]

    async def test_a_trainer_waits_for_what_may_still_come(self) -> None:
        queue = Queue()
        async with inline_pipeline(streaming(queue)) as pipe, anyio.create_task_group() as group:
            await pipe.start()

            async def later() -> None:
                await anyio.sleep(500)
                queue.put(7)
                await anyio.sleep(500)
                queue.put(None)

            group.start_soon(later)
            assert [batch.rewards.tolist() async for batch in pipe.batches(groups=1)] == [[7.0]]

    async def test_one_that_waits_blocks_no_other_task_and_catches_up(self) -> None:
        queue = Queue()
        both = [streaming(queue), task(200, lasting({}), name="other")]
        async with inline_pipeline(both, concurrency=2, capacity=400) as pipe:
            await pipe.start()
            await anyio.sleep(20.5)
            assert pipe.statistics().rollouts.in_flight == 2
            assert "stream" not in pipe.ledger.totals
            queue.put(*range(20))
            await anyio.sleep(40.5)
            totals = {name: each.claimed for name, each in pipe.ledger.totals.items()}
            assert totals["stream"] == 20
            assert pipe.statistics().rollouts.in_flight == 2
            pipe.ledger.check()

    async def test_shares_hold_between_a_stream_and_a_source(self) -> None:
        queue = Queue(*range(300))
        both = [streaming(queue, share=3), task(300, lasting({}), name="other")]
        async with inline_pipeline(both, concurrency=4, capacity=600) as pipe:
            await pipe.start()
            await anyio.sleep(50)
            totals = {name: each.claimed for name, each in pipe.ledger.totals.items()}
            assert abs(totals["stream"] - 3 * totals["other"]) <= 4

    @pytest.mark.parametrize(("options", "most"), [({"capacity": 3}, 3), ({"max_staleness": 1, "batch_groups": 1}, 2)])
    async def test_it_is_asked_only_when_there_is_room(self, options: dict[str, Any], most: int) -> None:
        queue = Queue(*range(50))
        async with inline_pipeline(streaming(queue), **options) as pipe:
            await pipe.start()
            await anyio.sleep(100)
            assert (queue.asked, pipe.ledger.claimed) == (most, most)
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=1):
                pass
            await pipe.ack(batch.step)
            await anyio.sleep(100)
            assert queue.asked == most + 1

    async def test_what_comes_when_the_room_was_taken_waits_for_the_next(self) -> None:
        queue = Queue()
        both = [streaming(queue), task(200, lasting({}), name="other")]
        async with inline_pipeline(both, concurrency=8, capacity=4) as pipe:
            await pipe.start()
            await anyio.sleep(5)
            assert pipe.statistics().groups.buffered == 4
            queue.put(1)
            await anyio.sleep(5)
            assert (pipe.ledger.state(4), SEEN) == ("waiting", [])
            batch = await pipe.get_batch(2)
            await pipe.ack(batch.step)
            await anyio.sleep(0.5)
            assert (pipe.ledger.state(4), SEEN) == ("running", [1])

    async def test_a_synchronous_run_takes_what_its_batch_needs(self) -> None:
        queue = Queue(*range(5), None)
        async with inline_pipeline(streaming(queue), strategy="synchronous") as pipe:
            await pipe.start()
            await anyio.sleep(10)
            assert queue.asked == 0
            batch = await pipe.get_batch(2)
            assert (ids(batch), queue.asked) == ([0, 1], 2)
            await pipe.ack(batch.step)
            assert [ids(batch) async for batch in pipe.batches(groups=2)] == [[2, 3], [4]]

    async def test_one_that_fails_ends_the_run_with_its_name(self) -> None:
        async def broken() -> AsyncIterator[Any]:
            yield {"n": 1}
            raise OSError("connection lost")

        async with inline_pipeline(streaming(broken())) as pipe:
            await pipe.start()
            with pytest.raises(SourceError, match=r"task 'stream': its stream failed: .*connection lost") as caught:
                await pipe.get_batch(2)
            assert isinstance(caught.value.__cause__, OSError)

    async def test_an_item_that_cannot_be_kept_ends_the_run_with_its_place(self) -> None:
        async def objects() -> AsyncIterator[Any]:
            yield {"n": object()}

        async with inline_pipeline(streaming(objects())) as pipe:
            await pipe.start()
            with pytest.raises(SourceError, match=r"task 'stream', an item of its stream: .*a object at \$\.n"):
                await pipe.get_batch(1)

    async def test_the_end_of_the_pipeline_does_not_wait_for_it(self) -> None:
        queue = Queue()
        async with inline_pipeline(streaming(queue)) as pipe:
            await pipe.start()
            await anyio.sleep(1)
            assert queue.asked == 1
        assert pipe.ledger.claimed == 0

    async def test_what_is_no_source_is_refused_and_one_item_of_a_stream_cannot_be_tried(self) -> None:
        with pytest.raises(ConfigError, match=r"has no item\(index\)"):
            streaming([1, 2, 3])
        with pytest.raises(SourceError, match="the items of a stream have no index"):
            await Pipeline.try_one(streaming(Queue(1)))
        async with inline_pipeline(streaming(Queue(1))) as pipe:
            await pipe.start()
            with pytest.raises(ConfigError, match="cannot be evaluated"):
                await pipe.evaluate("stream", items=1)

    @pytest.mark.parametrize("at", [0.5, 1.5, 2.5, 5.5])
    @pytest.mark.parametrize("options", [{}, {"order": "strict"}])
    async def test_after_a_crash_its_items_come_again_from_the_journal(
        self, run_directory: str, tmp_path: Path, at: float, options: dict[str, Any]
    ) -> None:
        queue = Queue(*range(6))
        common: dict[str, Any] = {"concurrency": 2, "capacity": 9, **options}
        async with inline_pipeline(streaming(queue), directory=run_directory, **common) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(at)
            copy = crashed_copy(run_directory, tmp_path / "copy")
            taken = 6 - len(queue.items)
        SEEN.clear()
        rest = Queue(*range(taken, 6), None)  # what another connection to the same queue would give
        async with inline_pipeline(streaming(rest), directory=copy, **common) as pipe:
            trained = Trained()
            resumed = await begin(pipe, trained=trained)
            done = min(6, 2 * int(at))
            assert (resumed.buffered, resumed.waiting) == (done, taken - done)
            await finish(pipe, trained, 2)
            pipe.ledger.check()
        assert trained.items == list(range(6))
        assert sorted(SEEN) == list(range(done, 6)), "nothing is lost, and nothing is run twice that had finished"

    async def test_a_run_can_begin_anew_with_it(self, run_directory: str) -> None:
        async with inline_pipeline(streaming(Queue(*range(3), None)), directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(5)
        async with inline_pipeline(streaming(Queue(8, 9, None)), directory=run_directory) as pipe:
            await pipe.resume(restart=["stream"])
            await pipe.start(weights_current=True)
            assert [batch.rewards.tolist() async for batch in pipe.batches(groups=1)] == [[8.0], [9.0]]
            assert pipe.ledger.totals["stream"].dropped == {"discarded": 3}
            pipe.ledger.check()


class Pool(SequenceSource):
    """A source that gives an item harder with each time that it was solved."""

    def __init__(self, count: int = 4) -> None:
        super().__init__([{"n": n} for n in range(count)], "pool")
        self.level = [0] * count
        self.told: list[tuple[int, float]] = []

    def item(self, index: int) -> Any:
        return {"n": index, "level": self.level[index]}

    def mark(self) -> SourceMark:
        return SourceMark("pool", self.length())

    def feedback(self, index: int, reward: float) -> None:
        self.told.append((index, reward))
        self.level[index] += reward > 0


class TestFeedback:
    @staticmethod
    def make(pool: Any, directory: str | None = None, run: Any = None, **more: Any) -> Pipeline:
        async def solve(item: Item, ctx: Context) -> Rollout:
            SEEN.append(10 * item["n"] + item["level"])
            await anyio.sleep(1.0)
            return Rollout({"n": [item["n"]]}, reward=float(item["n"] % 2 + ctx.member))

        options: dict[str, Any] = {"concurrency": 4, "capacity": 8, "order": "strict"}
        given = Task("pool", source=pool, run=run or solve, shuffle=False, epochs=3, **more)
        return inline_pipeline(given, directory=directory, **options)

    async def test_a_source_is_told_what_its_groups_came_to(self) -> None:
        pool = Pool()
        assert isinstance(pool, LearningSource)
        assert not isinstance(SequenceSource([]), LearningSource)
        async with self.make(pool, group_size=2) as pipe:
            await pipe.start()
            assert len([batch async for batch in pipe.batches(groups=4)]) == 3
        assert sorted(pool.told) == sorted([(0, 0.5), (1, 1.5), (2, 0.5), (3, 1.5)] * 3)
        assert sorted(set(SEEN)) == [10 * n + level for n in range(4) for level in range(3)]

    @pytest.mark.parametrize("how", ["finished", "failed", "late", "rewarded"])
    async def test_it_is_told_of_groups_that_a_filter_rejects(self, how: str, run_directory: str) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if how == "failed" and ctx.member == 1:
                raise ValueError("x")
            if how == "late" and ctx.member == 1:
                await anyio.sleep_forever()
            if how == "rewarded":
                ctx.park()
            return Rollout(reward=float(item["n"]))

        def rejects_all(rollouts: Any) -> bool:
            return False

        policy: dict[str, Any] = {"filter": rejects_all, "group_size": 2, "min_group": 1, "on_failure": Skip()}
        given = {**policy, "run": run, "group_timeout": 2.0}
        pool, again = Pool(2), Pool(2)
        async with self.make(pool, run_directory, **given) as pipe:
            await begin(pipe)
            if how == "rewarded":
                await anyio.sleep(1)
                for uid in sorted(pipe.ledger.parked)[:2]:
                    await pipe.reward(uid, float(uid), 0)
                    await pipe.reward(uid, float(uid), 1)
            await anyio.sleep(3)
            told, dropped = list(pool.told), pipe.ledger.totals["pool"].dropped["filtered"]
            assert told[:2] == [(0, 0.0), (1, 1.0)]
            assert len(told) == dropped
        async with self.make(again, run_directory, **given) as pipe:
            await pipe.resume()
        assert again.told == told

    async def test_it_is_told_of_parked_groups_with_the_given_rewards_and_of_nothing_by_hand(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            ctx.park()
            return Rollout(reward=9.0)

        pool = Pool(1)
        async with self.make(pool, run=run) as pipe:
            await pipe.start()
            await anyio.sleep(1)
            assert pool.told == []
            await pipe.reward(0, 0.25)
            assert pool.told == [(0, 0.25)]
            await pipe.put("pool", Rollout(reward=4.0))
            assert pool.told == [(0, 0.25)]

    async def test_it_is_told_when_the_last_member_gives_up(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(ctx.member)
            if ctx.member:
                raise ValueError("no")
            return Rollout(reward=2.0)

        pool = Pool(1)
        async with self.make(pool, run=run, group_size=2, min_group=1, on_failure="skip") as pipe:
            await pipe.start()
            await pipe.get_batch(1)
            assert pool.told[0] == (0, 2.0)

    @pytest.mark.parametrize("at", [0.5, 1.5, 2.5, 3.5])
    async def test_after_a_crash_it_knows_what_it_knew_and_items_are_what_they_were(
        self, run_directory: str, tmp_path: Path, at: float
    ) -> None:
        pool = Pool()
        async with self.make(pool, run_directory) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(at)
            copy = crashed_copy(run_directory, tmp_path / "copy")
            told, before = list(pool.told), list(SEEN)
            done = len(told)
        SEEN.clear()
        again = Pool()
        async with self.make(again, copy) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            await pipe.resume()
            assert (again.told, again.level) == (told, pool.level)
            await pipe.start(weights_current=True)
            await finish(pipe, trained, 2)
        assert SEEN[: len(before) - done] == before[done:], "what was in flight is run again with what it was then"
        assert len(before[:done] + SEEN) == 12
        assert (len(again.told), again.level) == (12, [0, 3, 0, 3])

    async def test_a_resume_that_is_refused_tells_it_nothing(self, run_directory: str) -> None:
        async with self.make(Pool(), run_directory) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(2.5)
        pool = Pool()
        async with self.make(pool, run_directory) as pipe:
            pipe.attach(other=Trained())
            for _ in range(2):
                with pytest.raises(RuntimeError, match="attached"):
                    await pipe.resume()
            assert pool.told == []

    async def test_one_that_fails_ends_the_run_with_its_name(self) -> None:
        class Broken(Pool):
            def feedback(self, index: int, reward: float) -> None:
                raise OSError("disk")

        async with self.make(Broken()) as pipe:
            await pipe.start()
            with pytest.raises(SourceError, match=r"task 'pool': its source's feedback\(\) failed at item 0.*disk"):
                await pipe.get_batch(4)
