"""What an interrupted attempt had so far is gone on from, by its own weights' versions; or it never mixes, when off."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import ConfigError, Context, Item, Pipeline, Retry, Rollout, RolloutInvalid, Task
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, train
from tests.support.runs import numbers, pipeline

pytestmark = pytest.mark.virtual_time

TOKENS = 6


class Writer:
    """Makes ``TOKENS`` tokens, one a second, each marked with the version that made it, and keeps them as it goes."""

    def __init__(self, fail: set[tuple[int, int]] | None = None) -> None:
        self.made: Counter[int] = Counter()
        self.fail = fail or set()

    async def __call__(self, item: Item, ctx: Context) -> Rollout:
        before = ctx.partial
        versions: list[int] = [] if before is None else before["versions"].tolist()
        while len(versions) < TOKENS:
            await anyio.sleep(1.0)
            if (item["n"], len(versions)) in self.fail:
                self.fail.remove((item["n"], len(versions)))
                raise ValueError("broken off")
            now = ctx._run.version_now
            versions.append(now() if now else 0)
            self.made[item["n"]] += 1
            ctx.save_partial(Rollout({"versions": versions}, info={"attempt": ctx.attempt}, tokens=len(versions)))
        info = {"attempt": ctx.attempt, "from": None if before is None else before.info["attempt"]}
        return Rollout({"versions": versions}, reward=1.0, info=info, tokens=len(versions))


def task(run: Any, count: int = 4, **more: Any) -> Task:
    return Task("numbers", source=numbers(count), run=run, shuffle=False, **more)


async def update(pipe: Pipeline, version: int, running: Any) -> None:
    async with pipe.weight_update(version=version, running=running):
        pass


async def test_an_aborted_attempt_goes_on_with_a_version_for_each_token() -> None:
    run = Writer()
    async with pipeline(task(run)) as pipe:
        await pipe.start()
        await anyio.sleep(2.5)
        await update(pipe, 3, "abort")
        began = anyio.current_time()
        batch = await pipe.get_batch(4)
        assert anyio.current_time() - began == pytest.approx(TOKENS - 2)
        for group in batch:
            (rollout,) = group.rollouts
            assert rollout["versions"].tolist() == [0, 0, 3, 3, 3, 3]
            assert (rollout.oldest, rollout.newest, group.oldest) == (0, 3, 0)
            assert rollout.info == {"attempt": 2, "from": 1}
        assert set(run.made.values()) == {TOKENS}
        assert len(pipe._run.state.partials) == 0
        assert pipe.ledger.totals["numbers"].interrupted == 4


async def test_aborted_again_and_again_it_goes_on_from_the_last() -> None:
    run = Writer()
    async with pipeline(task(run, 1)) as pipe:
        await pipe.start()
        for version in (1, 2, 3):
            await anyio.sleep(1.5)
            await update(pipe, version, "abort")
        (group,) = await pipe.get_batch(1)
        assert group.rollouts[0]["versions"].tolist() == [0, 1, 2, 3, 3, 3]
        assert (group.oldest, group.newest) == (0, 3)


async def test_what_keeps_running_needs_nothing_kept() -> None:
    async with pipeline(task(Writer(), 1)) as pipe:
        await pipe.start()
        await anyio.sleep(2.5)
        await update(pipe, 1, "keep")
        (group,) = await pipe.get_batch(1)
        assert group.rollouts[0]["versions"].tolist() == [0, 0, 1, 1, 1, 1]
        assert (group.oldest, group.newest) == (0, 1)


async def test_a_failure_begins_afresh() -> None:
    run = Writer(fail={(0, 3)})
    async with pipeline(task(run, 1, on_failure=Retry(attempts=2))) as pipe:
        await pipe.start()
        (group,) = await pipe.get_batch(1)
        assert group.rollouts[0].info == {"attempt": 2, "from": None}
    assert run.made[0] == TOKENS + 3


@pytest.mark.parametrize("how", ["crash", "save", "discard", "close"])
async def test_it_survives_the_process(tmp_path: Path, how: str) -> None:
    directory = str(tmp_path / "run")
    run = Writer()
    async with inline_pipeline(task(run), directory=directory) as pipe:
        pipe.attach(trained=Trained())
        await pipe.start()
        await anyio.sleep(2.5)
        if how in ("save", "discard"):
            await (await pipe.save(0)).committed()
        if how == "discard":
            await anyio.sleep(2.0)  # two more tokens, which do not count then
        folder = crashed_copy(directory, tmp_path / "copy")
    made = Counter(run.made)
    folder = directory if how == "close" else folder
    after = {"after_crash": "discard"} if how == "discard" else {}
    async with inline_pipeline(task(run), directory=folder, **after) as pipe:
        trained = Trained()
        pipe.attach(trained=trained)
        await pipe.resume()
        await pipe.start(weights_current=True)
        await finish(pipe, trained, 4)
    assert trained.items == [0, 1, 2, 3]
    kept = 2
    assert {run.made[n] - made[n] for n in range(4)} == {TOKENS - kept}


async def test_without_the_buffer_everything_begins_afresh(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    run = Writer()
    async with inline_pipeline(task(run), directory=directory) as pipe:
        await pipe.start()
        await anyio.sleep(2.5)
        await (await pipe.save(0, replay_buffer=False)).committed()
    made = Counter(run.made)
    async with inline_pipeline(task(run), directory=directory) as pipe:
        await pipe.resume()
        await pipe.start(weights_current=True)
        await finish(pipe, Trained(), 4)
    assert {run.made[n] - made[n] for n in range(4)} == {TOKENS}


async def test_versions_of_a_dead_life_are_no_newer_than_what_was_restored(tmp_path: Path) -> None:
    """An attempt is cut at version 7, and the weights go back to 2: its tokens count as of 2, and never as newer."""
    directory = str(tmp_path / "run")
    async with inline_pipeline(task(Writer(), 12), directory=directory, concurrency=4) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.start()
        for step in (1, 2):
            batch = await pipe.get_batch(1)
            await train(pipe, trained, batch)
            await (await pipe.save(step)).committed()
        await update(pipe, 7, "abort")
        await anyio.sleep(2.5)
        folder = crashed_copy(directory, tmp_path / "copy")
    async with inline_pipeline(task(Writer(), 12), directory=folder, concurrency=4, max_staleness=9) as pipe:
        pipe.attach(trained=(trained := Trained()))
        assert (await pipe.resume()).version == 2
        assert {part.oldest for _, _, part in pipe._run.state.partials.items()} <= {0, 1, 2}
        await pipe.start(weights_current=True)
        while trained.batches[-1:] != [[11]] and len(trained.batches) < 12:
            batch = await pipe.get_batch(1)
            assert 0 <= batch.staleness <= 9
            await train(pipe, trained, batch)
            await pipe.ack(batch.step)
    assert trained.items == list(range(12))


async def test_what_would_be_too_old_when_it_ends_begins_afresh() -> None:
    run = Writer()

    gone_on: list[tuple[int, int | None]] = []

    async def mixed(item: Item, ctx: Context) -> Rollout:
        if item["n"] == 0:
            least = pipe.ledger.next_step - 2
            gone_on.append((least, None if ctx.partial is None else ctx.partial.oldest))
            return await run(item, ctx)
        await anyio.sleep(0.6)
        return Rollout(reward=0.0)

    async with pipeline(task(mixed, 60), max_staleness=1, batch_groups=2, concurrency=4) as pipe:
        await pipe.start()
        for _ in range(20):
            batch = await pipe.get_batch(2)
            assert batch.staleness <= 1
            slow = [group for group in batch if group.index == 0]
            if slow:
                break
            await pipe.ack(batch.step)
            await update(pipe, batch.step, "abort" if batch.step < 4 else "keep")
            await anyio.sleep(1.2 if batch.step < 4 else 4.0)
        (rollout,) = slow[0].rollouts
        assert rollout.oldest is not None
        assert rollout.oldest >= batch.step - 2
        assert rollout["versions"].tolist()[0] == rollout.oldest
    assert run.made[0] > TOKENS  # some of it was let go
    assert len(gone_on) > 2
    assert all(oldest is None or oldest >= least for least, oldest in gone_on), gone_on


class TestOff:
    async def test_nothing_is_kept_and_no_rollout_mixes_versions(self) -> None:
        run = Writer()
        async with pipeline(task(run), partial=False) as pipe:
            await pipe.start()
            await anyio.sleep(2.5)
            await update(pipe, 1, "abort")
            await anyio.sleep(2.5)
            await update(pipe, 2, None)  # finishes what runs
            batch = await pipe.get_batch(4)
            for group in batch:
                assert group.rollouts[0]["versions"].tolist() == [1] * TOKENS
                assert (group.oldest, group.newest) == (1, 1)
                assert group.rollouts[0].info == {"attempt": 2, "from": None}
            assert not pipe._run.state.partials.by_uid

    async def test_keeping_what_runs_is_refused(self) -> None:
        async with pipeline(task(Writer()), partial=False) as pipe:
            await pipe.start()
            with pytest.raises(ConfigError, match="partial=False"):
                await update(pipe, 1, "keep")
            await update(pipe, 1, "finish")

    async def test_what_a_run_with_partials_kept_is_let_go(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        run = Writer()
        async with inline_pipeline(task(run), directory=directory) as pipe:
            await pipe.start()
            await anyio.sleep(2.5)
        async with inline_pipeline(task(run), directory=directory, partial=False) as pipe:
            await pipe.resume()
            await pipe.start(weights_current=True)
            await finish(pipe, Trained(), 4)
        assert set(run.made.values()) == {TOKENS + 2}


async def test_what_cannot_be_stored_fails_the_attempt_that_tried() -> None:
    seen: list[BaseException] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1.0)
        try:
            ctx.save_partial(Rollout({"bad": object()}))
        except RolloutInvalid as error:
            seen.append(error)
            raise
        return Rollout()

    async with pipeline(task(run, 1, on_failure="skip")) as pipe:
        await pipe.start()
        await finish(pipe, Trained(), 1)
        assert pipe.ledger.totals["numbers"].dropped == {"failed": 1}
    assert "bad" in str(seen[0])


async def test_an_attempt_that_is_over_keeps_nothing() -> None:
    kept: list[Context] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        kept.append(ctx)
        await anyio.sleep(1.0)
        return Rollout(reward=1.0)

    async with pipeline(task(run, 1)) as pipe:
        await pipe.start()
        await anyio.sleep(2.0)
        kept[0].save_partial(Rollout({"late": [1]}))
        assert len(pipe._run.state.partials) == 0
        assert len(await pipe.get_batch(1)) == 1
        kept[0].save_partial(Rollout({"late": [1]}))
        assert len(pipe._run.state.partials) == 0


async def test_without_a_run_nothing_is_kept() -> None:
    rollout = await Pipeline.try_one(task(Writer(), 1))
    assert rollout["versions"] == [0] * TOKENS


async def test_a_fork_goes_on_where_the_attempts_were_and_so_does_what_is_resumed_of_it(tmp_path: Path) -> None:
    run = Writer()
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    async with inline_pipeline(task(run), directory=source) as pipe:
        await begin(pipe)
        await anyio.sleep(2.5)
        copy = crashed_copy(source, tmp_path / "copy")
    run.made.clear()
    async with inline_pipeline(task(run), directory=target) as pipe:
        resumed = await pipe.resume(from_=copy)
        assert resumed.waiting == 4
        assert len(pipe._run.state.partials) == 4
        forked = crashed_copy(target, tmp_path / "forked")
    shutil.rmtree(copy)
    async with inline_pipeline(task(run), directory=forked) as pipe:
        await begin(pipe)
        batch = await pipe.get_batch(4)
        assert [rollout["versions"].tolist() for rollout in batch.rollouts] == [[0] * TOKENS] * 4
    assert set(run.made.values()) == {TOKENS - 2}
