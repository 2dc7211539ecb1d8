"""What a resume gives back, to the byte and to the element: state, batches, orders, random streams."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Context, EndOfSource, Item, Rollout
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.runs import ids, pipeline, task

virtual = pytest.mark.virtual_time


def newest(directory: str) -> Path:
    return max((Path(directory) / "generations").iterdir(), key=lambda path: int(path.name))


def state_of(directory: str) -> list[bytes]:
    return [(newest(directory) / name).read_bytes() for name in ("consumer.json", "progress.json")]


@virtual
@pytest.mark.parametrize("way", ["closed", "crashed"])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 6, 7])
async def test_the_first_resume_commits_what_was_saved(
    run_directory: str, tmp_path: Path, steps: int, way: str
) -> None:
    """encode(load(saved)) == saved, from the very save on; 7: the end of the source has been met as well."""
    given = task(12, lasting({n: 5.0 - (n * 5) % 12 / 4 for n in range(12)}))
    async with inline_pipeline(given, directory=run_directory, concurrency=12, capacity=12, keep=None) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await anyio.sleep(100)
        for _ in range(min(steps, 6)):
            await train(pipe, trained, batch := await pipe.get_batch(2))
            await pipe.ack(batch.step)
        if steps == 7:
            with pytest.raises(EndOfSource):
                await pipe.get_batch(2)
        await (await pipe.save(min(steps, 6))).committed()
        copy = crashed_copy(run_directory, tmp_path / "copy")
    directory = run_directory if way == "closed" else copy
    saved = state_of(directory)
    for _ in range(5):
        async with inline_pipeline(given, directory=directory, concurrency=3, keep=None) as pipe:
            pipe.attach(trained=Trained())
            before = newest(directory)
            await pipe.resume()
            assert newest(directory) != before
        assert state_of(directory) == saved


@virtual
@pytest.mark.parametrize("order", ["strict", "finished"])
async def test_batches_after_a_save_are_handed_out_again_element_for_element(
    run_directory: str, tmp_path: Path, order: Any
) -> None:
    options: dict[str, Any] = {"capacity": 9, "concurrency": 3, "order": order, "seed": 11}

    def given(seed: int) -> Any:
        return task(12, lasting({n: 1.0 + (n * seed) % 7 for n in range(12)}), shuffle=True)

    async with inline_pipeline(given(5), directory=run_directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await train(pipe, trained, first := await pipe.get_batch(3))
        await (await pipe.save(1)).committed()
        reference = []
        for _ in range(3):
            batch = await pipe.get_batch(3)
            reference.append(ids(batch))
            await pipe.ack(batch.step)
        await anyio.sleep(0.1)
        copy = crashed_copy(run_directory, tmp_path / "copy")
    async with inline_pipeline(given(3), directory=copy, **options) as pipe:
        await begin(pipe, trained=Trained())
        again = [ids(await pipe.get_batch(3)) for _ in range(3)]
    assert again == reference
    assert sorted(n for each in [ids(first), *again] for n in each) == list(range(12))


@virtual
@pytest.mark.parametrize("ahead", [0, 1, 3, 8])
@pytest.mark.parametrize("order", ["strict", "finished"])
async def test_a_finite_source_gives_3_3_3_1_however_far_ahead(ahead: int, order: Any) -> None:
    options: dict[str, Any] = {"capacity": 3 * (ahead + 1)} if ahead else {"strategy": "synchronous"}
    given = task(10, lasting({n: 1.0 + (n * 7) % 10 for n in range(10)}), shuffle=True)
    async with inline_pipeline(given, order=order, concurrency=4, **options) as pipe:
        await pipe.start()
        await anyio.sleep(100)
        batches = []
        async for batch in pipe.batches(groups=3):
            batches.append(ids(batch))
            await anyio.sleep(100)  # all that may be ahead is
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(n for batch in batches for n in batch) == list(range(10))


@pytest.mark.parametrize("ahead", [0, 1, 3, 8])
def test_in_the_synchronous_form(ahead: int) -> None:
    options: dict[str, Any] = {"capacity": 3 * (ahead + 1)} if ahead else {"strategy": "synchronous"}
    with pipeline(task(10), **options).sync() as pipe:
        pipe.start()
        batches = [ids(batch) for batch in pipe.batches(groups=3)]
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(n for batch in batches for n in batch) == list(range(10))


@virtual
@pytest.mark.parametrize("options", [{"strategy": "synchronous"}, {"order": "strict", "capacity": 9}])
async def test_a_loop_left_by_break_goes_on_across_the_end_of_an_epoch(options: dict[str, Any]) -> None:
    async with inline_pipeline(task(12, lasting({}), epochs=None), concurrency=3, **options) as pipe:
        await pipe.start()
        seen = []
        for _ in range(4):
            async for batch in pipe.batches(groups=5):
                seen.append(ids(batch))
                break
            await pipe.ack(batch.step)
    assert seen == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2], [3, 4, 5, 6, 7]]


@virtual
async def test_a_loop_left_by_break_goes_on_item_by_item() -> None:
    """Items one at a time, break after five of them each time."""
    async with inline_pipeline(task(12, lasting({}), epochs=None), concurrency=3, order="strict") as pipe:
        await pipe.start()
        rounds = []
        for _ in range(4):
            seen: list[int] = []
            async for batch in pipe.batches(groups=1):
                seen += ids(batch)
                if len(seen) == 5:
                    break
            await pipe.ack(batch.step)
            rounds.append(seen)
    assert rounds == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2], [3, 4, 5, 6, 7]]


def contents(directory: str, *parts: str) -> dict[str, tuple[str, int]]:
    found = {}
    for part in parts:
        for folder, _, names in os.walk(os.path.join(directory, part)):
            for name in names:
                path = os.path.join(folder, name)
                key = os.path.relpath(path, directory)
                found[key] = (hashlib.sha256(Path(path).read_bytes()).hexdigest(), os.stat(path).st_size)
    return found


@virtual
@pytest.mark.parametrize("place", ["same", "new"])
async def test_what_came_after_the_save_is_gone_and_the_first_checkpoint_stays(
    run_directory: str, tmp_path: Path, place: str
) -> None:
    def given() -> Any:
        return task(200, lasting({}))

    options: dict[str, Any] = {"after_crash": "discard", "keep": None, "segment_bytes": 1 << 20}
    async with inline_pipeline(given(), directory=run_directory, capacity=10, concurrency=10, **options) as pipe:
        await begin(pipe, trained=Trained())
        await anyio.sleep(50)
        assert pipe.ledger.claimed == 10
        await (await pipe.save(0)).committed()
        first = newest(run_directory)
        copy0 = crashed_copy(run_directory, tmp_path / "copy0")
    # a life with more room: five more items are produced and never saved, then it dies
    async with inline_pipeline(given(), directory=copy0, capacity=15, concurrency=10, **options) as pipe:
        pipe.attach(trained=Trained())
        await pipe.resume()
        await pipe.start(weights_current=True)
        await anyio.sleep(50)
        assert [n for n in range(pipe.ledger.claimed) if pipe.ledger.state(n) == "buffered"] == list(range(15))
        copy = crashed_copy(copy0, tmp_path / "copy")
    before = contents(copy, "generations", "journals", "segments")
    target = copy if place == "same" else str(tmp_path / "new")
    async with inline_pipeline(given(), directory=target, capacity=110, concurrency=20, **options) as pipe:
        trained = Trained()
        pipe.attach(trained=trained)
        resumed = await (pipe.resume() if place == "same" else pipe.resume(from_=copy))
        assert (resumed.buffered, resumed.waiting) == (10, 0)
        assert pipe.ledger.claimed == 10, "the write position"
        assert sorted(pipe.ledger.entries) == list(range(10))
        await pipe.start(weights_current=True)
        await anyio.sleep(100)
        assert pipe.ledger.claimed == 110
        await (await pipe.save(0)).committed()
        batch = await pipe.get_batch(110)
        assert ids(batch) == list(range(110))
        assert [int(r["n"].item()) for r in batch.rollouts] == list(range(110))
    now = contents(copy, "generations", "journals", "segments")
    assert {name: now[name] for name in before} == before
    if place == "new":
        assert now == before
    async with inline_pipeline(given(), directory=copy, capacity=10, **options) as pipe:
        pipe.attach(trained=Trained())
        assert first.name in {p.name for p in (Path(copy) / "generations").iterdir()}
        assert (await pipe.resume()).step == 0


@virtual
@pytest.mark.parametrize("way", ["running", "closed", "crashed"])
async def test_what_a_batch_left_over_comes_next_before_anything_new(
    run_directory: str, tmp_path: Path, way: str
) -> None:
    """Four are begun for a batch of two; the two that are left over are the next batch, and nothing is drawn before."""
    options: dict[str, Any] = {"strategy": "synchronous", "oversample": 2.0, "concurrency": 4}
    started: list[int] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        started.append(item["n"])
        return await lasting({})(item, ctx)

    async with inline_pipeline(task(20, run), directory=run_directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await train(pipe, trained, batch := await pipe.get_batch(2))
        assert (ids(batch), started) == ([0, 1], [0, 1, 2, 3])
        await anyio.sleep(5)
        await (await pipe.save(1)).committed()
        if way == "running":
            batch = await pipe.get_batch(2)
            assert (ids(batch), started[:4]) == ([2, 3], [0, 1, 2, 3])
            return
        copy = crashed_copy(run_directory, tmp_path / "copy")
    started.clear()
    async with inline_pipeline(task(20, run), directory=run_directory if way == "closed" else copy, **options) as pipe:
        await begin(pipe, trained=(again := Trained()))
        now = anyio.current_time()
        batch = await pipe.get_batch(2)
        assert (ids(batch), started) == ([2, 3], [])
        assert anyio.current_time() == now
        await train(pipe, again, batch)
        await pipe.ack(batch.step)
        assert (await finish(pipe, again, 2)).items == list(range(20))
        assert started == list(range(4, 20))


@virtual
@pytest.mark.parametrize("way", ["crashed", "closed", "aborted"])
async def test_an_attempt_that_begins_again_has_the_same_random_stream(
    run_directory: str, tmp_path: Path, way: str
) -> None:
    drawn: dict[int, list[list[int]]] = {}

    async def run(item: Item, ctx: Context) -> Rollout:
        mine = [int(ctx.rng.integers(0, 1000, dtype=np.int32))]  # half of a 64-bit word
        drawn.setdefault(item["n"], []).append(mine)
        await anyio.sleep(1)
        mine += ctx.rng.integers(0, 1000, 3, dtype=np.int32).tolist()
        return Rollout({"x": mine}, reward=0.0)

    given = task(4, run)
    async with inline_pipeline(given) as pipe:
        await pipe.start()
        unbroken = {group.index: group.rollouts[0]["x"].tolist() for group in await pipe.get_batch(4)}
    drawn.clear()
    async with inline_pipeline(given, directory=run_directory, concurrency=4) as pipe:
        await begin(pipe)
        await anyio.sleep(0.5)
        if way == "aborted":
            async with pipe.weight_update(version=1, running="abort"):
                pass
            found = {group.index: group.rollouts[0]["x"].tolist() for group in await pipe.get_batch(4)}
        else:
            copy = crashed_copy(run_directory, tmp_path / "copy")
    if way in ("closed", "crashed"):
        async with inline_pipeline(given, directory=run_directory if way == "closed" else copy) as pipe:
            await begin(pipe)
            found = {group.index: group.rollouts[0]["x"].tolist() for group in await pipe.get_batch(4)}
    assert all(len(each) == 2 for each in drawn.values())
    assert found == unbroken
    assert all(first[0] == second[0] for first, second in drawn.values())


@virtual
async def test_with_nothing_in_hand_as_much_may_start_as_the_bound_allows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_staleness": 2, "batch_groups": 4, "concurrency": 100}
    directory = str(tmp_path / "run")

    async def step(pipe: Any) -> None:
        batch = await pipe.get_batch(4)
        await pipe.ack(batch.step)
        async with pipe.weight_update(version=batch.step):
            pass

    async with inline_pipeline(task(200, lasting({})), directory=directory, strategy="synchronous") as pipe:
        await begin(pipe)
        for _ in range(10):
            await step(pipe)
        await pipe.save(10)
    async with inline_pipeline(task(200, lasting({})), directory=directory, **options) as pipe:
        assert (await begin(pipe)).version == 10
        for done in range(3):
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 40 + 12 + 4 * done
            await step(pipe)


@virtual
async def test_saved_without_the_buffer_the_progress_is_the_saved_one_but_for_the_buffer(run_directory: str) -> None:
    given = task(12, lasting({}))
    async with inline_pipeline(given, directory=run_directory, concurrency=12, capacity=12, keep=None) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await anyio.sleep(100)
        await train(pipe, trained, await pipe.get_batch(2))
        await (await pipe.save(1, replay_buffer=False)).committed()
    states = [state_of(run_directory)]
    for _ in range(5):
        async with inline_pipeline(given, directory=run_directory, concurrency=3, keep=None) as pipe:
            pipe.attach(trained=Trained())
            await pipe.resume()
        states.append(state_of(run_directory))
    assert states[0][0] == states[1][0]
    # What resume() commits is a generation with its buffer, which is empty.
    assert states[0][1].replace(b'"replay_buffer_saved": false', b'"replay_buffer_saved": true') == states[1][1]
    assert states[2:] == states[1:2] * 4
