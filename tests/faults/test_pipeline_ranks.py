"""Ranks that have one pipeline together, as threads: what they get, what they save, and what becomes of an error."""

from __future__ import annotations

import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from pipeline import (
    ConfigError,
    Context,
    Damaged,
    EndOfSource,
    FailFast,
    Item,
    Pipeline,
    Ranks,
    Rollout,
    RolloutFailed,
    Skip,
    Stopped,
    Task,
    UsageError,
)
from pipeline.checkpoint import status_of, verify
from pipeline.checkpoint.status import BROKEN, CONTINUES, FINISHED
from pipeline.control.place import find_places
from pipeline.errors import RankFailed, RankLost, WriteFailed
from pipeline.ledger import PARKED
from pipeline.sampler.progress import decode_progress
from pipeline.sampler.turns import TURN
from pipeline.store.segments import SegmentInfo
from pipeline.sync_form import SyncPipeline
from pipeline.wiring.rank_saving import _together
from tests.support.controlled import Asker
from tests.support.ranked import manifests
from tests.support.ranks import fine, on_ranks
from tests.support.runs import numbers, solve, task

COUNTS = {"a": 54, "b": 18}
ITEMS = sum(COUNTS.values())
GROUPS = 6


async def noisy(item: Item, ctx: Context) -> Rollout:
    """What comes of it hangs on the item, whichever rank runs it."""
    await anyio.sleep(0.0005 * (item["n"] % 5))
    return Rollout({"n": [item["n"]], "noise": ctx.rng.random(2)}, reward=float(item["n"]))


def tasks(run: Any = noisy) -> list[Task]:
    return [
        Task(name, source=numbers(count), run=run, share=count / 18, group_size=2) for name, count in COUNTS.items()
    ]


def opened(ranks: Ranks | None, directory: Path | None, given: Any = None, **options: Any) -> SyncPipeline:
    how: dict[str, Any] = {"watchdog": None, "seed": 3, **options}
    where = None if directory is None else str(directory)
    return Pipeline(tasks() if given is None else given, directory=where, ranks=ranks, **how).sync()


class Seen:
    """What one rank has got: by step, uid and content of each group."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[int, Any]] = {}

    def take(self, batch: Any) -> None:
        self.steps[batch.step] = {
            group.uid: (group.task, group.index, [rollout["noise"].tolist() for rollout in group]) for group in batch
        }


def life(directory: Path | None, size: int | None, steps: int, **options: Any) -> dict[int, dict[int, Any]]:
    """Train some steps with so many ranks and save; None: without ranks. Return what all got, by step."""
    how: dict[str, Any] = {key: options.pop(key) for key in ("rebalance", "step") if key in options}

    def run(ranks: Ranks | None) -> Seen:
        seen = Seen()
        with opened(ranks, directory, **options) as pipe:
            begun = pipe.resume(**how)
            pipe.start(weights_current=True)
            last = begun.step
            for batch in pipe.batches(GROUPS, until=begun.step + steps):
                seen.take(batch)
                last = batch.step
            pipe.save(last).committed()
            pipe.ledger.check()
        return seen

    found = [run(None)] if size is None else fine(on_ranks(size, run, timeout_s=30.0))
    together: dict[int, dict[int, Any]] = {}
    for each in found:
        assert each.steps.keys() == found[0].steps.keys()
        assert {len(groups) for groups in each.steps.values()} == {GROUPS // len(found)}
        for step, groups in each.steps.items():
            together[step] = together.get(step, {}) | groups
    return together


def all_once(steps: dict[int, dict[int, Any]]) -> None:
    assert Counter(uid for groups in steps.values() for uid in groups) == dict.fromkeys(range(ITEMS), 1)


@pytest.mark.parametrize("options", [{"order": "strict"}, {"strategy": "synchronous"}], ids=str)
def test_in_draw_order_any_number_of_ranks_trains_what_one_process_trains(options: dict[str, Any]) -> None:
    alone = life(None, None, 12, **options)
    for size in (1, 2, 3):
        assert life(None, size, 12, **options) == alone
    all_once(alone)


def test_in_the_order_in_which_rollouts_finish_ranks_train_the_same_items() -> None:
    all_once(life(None, 3, 12))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *(((*sizes,), {"order": "strict"}) for sizes in [(2, 2, 2), (1, 2, 3), (3, 2, 1), (2, 3, 2), (None, 2, 3)]),
        *(((2, 3, 2), options) for options in ({"strategy": "synchronous"}, {})),
    ],
    ids=str,
)
def test_another_number_of_ranks_goes_on_with_the_same_sequence(
    tmp_path: Path, sizes: tuple[int | None, ...], options: dict[str, Any]
) -> None:
    steps: dict[int, dict[int, Any]] = {}
    for size in sizes:
        steps |= life(tmp_path, size, 4, **options)
    all_once(steps)
    if options:
        assert steps == life(None, None, 12, **options)
    found = verify(str(tmp_path))
    assert found.whole, found.damages
    assert manifests(tmp_path)[-1].world_size == sizes[-1]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 3), (3, 2, 1), (None, 2, 3)], ids=str)
def test_its_status_says_what_a_resume_would_find_to_do(tmp_path: Path, sizes: tuple[int | None, ...]) -> None:
    for turn, size in enumerate(sizes, 1):
        assert len(life(tmp_path, size, 4)) == 4
        found = status_of(str(tmp_path))
        assert found.work is not None
        assert not found.damages
        assert found.work.left == sum(task.drawn for task in found.work.tasks.values()) - turn * 4 * GROUPS
        assert (found.state == FINISHED) == (turn == 3), found.why
        assert turn < 3 or {name: task.drawn for name, task in found.work.tasks.items()} == COUNTS


@pytest.mark.parametrize(("size", "how"), [(2, {}), (3, {}), (2, {"rebalance": True})], ids=str)
def test_ranks_go_back_to_a_generation_of_before_there_were_ranks(
    tmp_path: Path, size: int, how: dict[str, Any]
) -> None:
    """The line of the ranks that went on from it is let go: what they trained is trained in this one, once."""
    alone = life(tmp_path, None, 3)
    assert sorted(life(tmp_path, 2, 2)) == [4, 5]
    again = life(tmp_path, size, 4, step=3, **how)
    assert sorted(again) == [4, 5, 6, 7]
    rest = life(tmp_path, 2, 5)  # and the next life goes on from there
    assert sorted(rest) == [8, 9, 10, 11, 12]
    all_once(alone | again | rest)
    assert verify(str(tmp_path)).whole


def test_one_process_does_not_go_back_behind_ranks_though_the_generation_is_its_own(tmp_path: Path) -> None:
    life(tmp_path, None, 3)
    life(tmp_path, 2, 2)
    before = manifests(tmp_path)
    with opened(None, tmp_path) as pipe, pytest.raises(UsageError, match="open it with what wrote it"):
        pipe.resume(3)
    assert manifests(tmp_path) == before
    assert sorted(life(tmp_path, 2, 2)) == [6, 7]


def test_lives_that_had_shared_out_anew_and_saved_nothing_do_not_count(tmp_path: Path) -> None:
    life(tmp_path, 2, 4, keep=None)
    before, kept = status_of(str(tmp_path)).work, {each.generation for each in manifests(tmp_path)}
    life(tmp_path, 3, 4, keep=None)
    for each in manifests(tmp_path):
        if each.generation not in kept:
            shutil.rmtree(tmp_path / "generations" / f"{each.generation:08d}")
    found = status_of(str(tmp_path))
    assert (found.state, found.damages, found.work) == (CONTINUES, [], before)


def test_a_journal_that_is_gone_breaks_a_run_of_ranks(tmp_path: Path) -> None:
    life(tmp_path, 2, 4)
    (journal,) = (tmp_path / "journals").glob("*-0001.fbj")
    journal.unlink()
    assert status_of(str(tmp_path)).state == BROKEN

    def run(ranks: Ranks) -> None:
        with opened(ranks, tmp_path) as pipe:
            pipe.resume()

    assert any(isinstance(each, Damaged) for each in on_ranks(2, run))


def test_groups_of_a_batch_that_is_to_be_handed_out_again_come_first_for_other_ranks(tmp_path: Path) -> None:
    async def run(item: Item, ctx: Context) -> Rollout:
        if item.uid == 1:
            ctx.park()
        return await solve(item, ctx)

    def trains(pipe: SyncPipeline, ranks: Ranks) -> list[int]:
        batch = pipe.get_batch(GROUPS)
        if ranks.size == 2 and ranks.rank == 1:
            pipe.reward(1, 2.0)  # the oldest of all that are finished
        return batch.uids

    given = Task("t", source=numbers(48), run=run, shuffle=False)
    before, after = (fine(on(size, tmp_path, trains, given=given, concurrency=1)) for size in (2, 3))
    first = sorted(uid for got in before for uid in got)
    assert first == [0, 2, 3, 4, 5, 7]
    assert sorted(uid for got in after for uid in got) == first


def test_what_is_parked_or_half_done_goes_on_at_whichever_rank_gets_it(tmp_path: Path) -> None:
    first = True

    async def run(item: Item, ctx: Context) -> Rollout:
        if ctx.partial is not None:
            went_on.append(item.uid)
        elif first and item.uid % 4 == 1:
            ctx.save_partial(Rollout({"n": [item.uid]}))
            await anyio.sleep(3600)
        if item.uid % 4 == 2:
            ctx.park()
        return Rollout({"n": [item["n"]]}, reward=1.0)

    def trains(pipe: SyncPipeline, ranks: Ranks) -> tuple[list[int], int]:
        got, parked = list[int](), pipe.ledger.count(PARKED)
        for batch in pipe.batches(GROUPS):
            got += batch.uids
            if first:
                pipe.save(batch.step)
                break
            for uid in [each.uid for each in pipe.ledger.entries.values() if each.state == PARKED]:
                pipe.reward(uid, 2.0)
        pipe.ledger.check()
        return got, parked

    went_on: list[int] = []
    source = Task("t", source=numbers(48), run=run, shuffle=False)
    before = fine(on(2, tmp_path, trains, given=source, capacity=24))
    first = False
    after = fine(on(3, tmp_path, trains, given=source, capacity=24))
    trained = [uid for got, _ in (*before, *after) for uid in got]
    assert sorted(trained) == list(range(48))
    assert sorted(went_on) == [uid for uid in range(48) if uid % 4 == 1]
    assert [parked for _, parked in after] == [4, 4, 4]


def test_the_progress_that_is_saved_is_that_of_all_ranks_together(tmp_path: Path) -> None:
    saved = []
    for size in (None, 1, 2, 3):
        directory = tmp_path / str(size)
        for _ in range(2):
            life(directory, size, 3, strategy="synchronous")
        path = directory / "generations" / f"{manifests(directory)[-1].generation:08d}" / "progress.json"
        progress, _ = decode_progress(path.read_bytes())
        progress.produce_time_s, progress.window_marks = {}, {}
        saved.append(progress)
    assert all(each == saved[0] for each in saved[1:])
    assert sum(saved[0].consumed_samples.values()) == 6 * GROUPS


def test_a_run_of_ranks_is_not_opened_without_them(tmp_path: Path) -> None:
    life(tmp_path, 2, 1)
    with opened(None, tmp_path) as pipe, pytest.raises(UsageError, match="pipeline of ranks"):
        pipe.resume()


def test_a_generation_of_before_another_number_of_ranks_is_gone_back_to_without_what_came_after(tmp_path: Path) -> None:
    how = {"order": "strict", "keep": None}
    first = life(tmp_path, 2, 3, **how)
    life(tmp_path, 3, 3, **how)
    life(tmp_path, 3, 1, **how)
    steps = first | life(tmp_path, 2, 3, step=3, **how) | life(tmp_path, 2, 6, **how)
    all_once(steps)
    assert steps == life(None, None, 12, order="strict")


def on(size: int, directory: Path | None, do: Callable[[SyncPipeline, Ranks], Any], **options: Any) -> list[Any]:
    """Call ``do`` on every rank with a pipeline that was started; return what each gave, or raised."""

    def run(ranks: Ranks) -> Any:
        with opened(ranks, directory, **options) as pipe:
            pipe.resume()
            pipe.start(weights_current=True)
            return do(pipe, ranks)

    return on_ranks(size, run, timeout_s=limit.get(directory, 30.0))


limit: dict[Any, float] = {}
SHORT_S = 3.0
"""A time limit that is waited for, and that a rank which lives keeps on a machine with other work, too."""


async def broken(item: Item, ctx: Context) -> Rollout:
    if item.uid == 9:
        raise ValueError("broken")
    return await solve(item, ctx)


def train(pipe: SyncPipeline, ranks: Ranks) -> int:
    step = 0
    for batch in pipe.batches(GROUPS):
        step = batch.step
    return step


def test_a_failure_that_ends_one_rank_ends_all_of_them() -> None:
    zero, one = on(2, None, train, given=task(60, run=broken, on_failure=FailFast()))
    assert isinstance(zero, RankFailed)
    assert "rank 1 failed: RolloutFailed: item 9" in str(zero)
    assert isinstance(one, RolloutFailed)


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_one_rank_is_told_to_the_others_and_makes_no_generation(tmp_path: Path, who: int) -> None:
    def fails(pipe: SyncPipeline, ranks: Ranks) -> None:
        for batch in pipe.batches(GROUPS):
            if batch.step == 3 and ranks.rank == who:
                raise KeyError("mine")

    found = on(2, tmp_path, fails)
    assert isinstance(found[who], KeyError)
    assert isinstance(found[1 - who], RankFailed)
    assert f"rank {who} failed: KeyError" in str(found[1 - who])
    assert [each.reason for each in manifests(tmp_path)] == ["start"]
    assert life(tmp_path, 2, 3).keys() == {1, 2, 3}


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_while_it_waits_for_the_others_is_no_riddle_to_them(who: int) -> None:
    """It has told them what it has already, so that they may get one more batch; but not that it leaves."""
    asked, left = threading.Event(), threading.Event()

    def leaves(pipe: SyncPipeline, ranks: Ranks) -> None:
        consumer: Any = pipe._run.consumer
        if ranks.rank != who:
            assert asked.wait(30)
            for _ in range(3):
                pipe.get_batch(GROUPS)
                assert left.wait(30)
        consumer.listen = heard_of(consumer.listen)
        pipe.get_batch(GROUPS)

    def heard_of(listen: Any) -> Any:
        async def cut(work: Any) -> Any:
            await listen(work)  # for a while: nobody else has come
            asked.set()
            raise KeyError("mine")

        return cut

    def run(ranks: Ranks) -> None:
        try:
            with opened(ranks, None, given=task(60)) as pipe:
                pipe.resume()
                pipe.start(weights_current=True)
                leaves(pipe, ranks)
        finally:
            left.set()

    found = on_ranks(2, run, timeout_s=4.0)
    assert isinstance(found[who], KeyError)
    assert isinstance(found[1 - who], RankFailed), found
    assert f"rank {who} failed: KeyError" in str(found[1 - who])


def test_a_rank_that_is_not_heard_from_is_named_within_the_limit() -> None:
    gone = threading.Event()

    def stays(pipe: SyncPipeline, ranks: Ranks) -> int:
        pipe.get_batch(GROUPS)
        if ranks.rank == 1:
            assert gone.wait(30)
            return 0
        try:
            pipe.get_batch(GROUPS)
        finally:
            gone.set()
        return 1

    limit[None] = SHORT_S
    try:
        found = on(2, None, stays)
    finally:
        del limit[None]
    assert isinstance(found[0], RankLost)
    assert f"rank 1 was not heard from within {SHORT_S:g} s" in str(found[0])


def test_a_rank_that_waited_and_gives_no_sign_of_life_any_more_is_named_within_the_limit() -> None:
    async def stuck(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0 if item.uid % 2 == 0 else 3600)
        return await solve(item, ctx)

    gone = threading.Event()

    def waits(pipe: SyncPipeline, ranks: Ranks) -> None:
        consumer: Any = pipe._run.consumer
        look = consumer._look

        async def dies(count: int) -> None:
            if count > 2:
                await anyio.to_thread.run_sync(gone.wait, 30)
            await look(count)

        if ranks.rank == 1:
            consumer._look = dies
        try:
            pipe.get_batch(GROUPS)
        finally:
            gone.set()

    limit[None] = SHORT_S
    try:
        found = on(2, None, waits, given=task(60, run=stuck))
    finally:
        del limit[None]
    assert isinstance(found[0], RankLost)
    assert isinstance(found[1], RankFailed)
    assert f"rank 1 was not heard from within {SHORT_S:g} s" in str(found[0])


def test_a_rank_whose_rollouts_take_longer_than_the_limit_is_waited_for() -> None:
    async def slow(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(2.2 * SHORT_S if item.uid == 1 else 0)
        return await solve(item, ctx)

    limit[None] = SHORT_S
    try:
        assert on(2, None, train, given=task(6, run=slow)) == [1, 1]
    finally:
        del limit[None]


def test_ranks_that_ask_for_different_batches_are_told_so() -> None:
    found = on(2, None, lambda pipe, ranks: pipe.get_batch(GROUPS + 2 * ranks.rank))
    assert [type(each) for each in found] == [RankFailed, RankFailed]
    assert "get_batch(8) for step 1 on rank 1 met get_batch(6) for step 1 on rank 0" in str(found[0])


@pytest.mark.parametrize("groups", [0, 5, "6", True])
def test_a_batch_that_cannot_be_shared_evenly_is_refused(groups: Any) -> None:
    for each in on(2, None, lambda pipe, ranks: pipe.get_batch(groups)):
        assert isinstance(each, ConfigError)
        assert "groups" in str(each)


# -- the end of a source -----------------------------------------------------------------------------------------------


async def odd_ones_fail(item: Item, ctx: Context) -> Rollout:
    if item.uid % 2 and item.uid > 6:
        raise ValueError("odd")
    return await solve(item, ctx)


def test_a_rank_that_waits_hears_that_the_order_has_ended_without_a_draw_of_its_own() -> None:
    def run(ranks: Ranks) -> Any:
        waits = threading.Event()
        with opened(ranks, None, given=task(1)) as pipe:
            pipe.resume()
            consumer: Any = pipe._run.consumer
            sampler: Any = pipe._run.state.sampler
            answer, reserve = consumer._answer, sampler.reserve

            def looked(share: int) -> bool:
                found: bool = answer(share)
                waits.set()
                return found

            def slow(agreed: Any) -> Any:
                assert waits.wait(30)
                return reserve(agreed)

            consumer._answer, sampler.reserve = looked, slow
            pipe.start(weights_current=True)
            with pytest.raises(EndOfSource, match="rank 0 has 1, rank 1 has 0 groups left"):
                pipe.get_batch(2)

    fine(on_ranks(2, run, timeout_s=10.0))


def test_a_rank_reserves_no_more_than_a_turn_ahead() -> None:
    def reserved(pipe: SyncPipeline, ranks: Ranks) -> int:
        for _ in range(8):
            pipe.get_batch(GROUPS).release()
        sampler: Any = pipe._run.state.sampler
        return len(sampler.reserved)

    assert max(fine(on(2, None, reserved, given=task(400), capacity=6))) <= TURN


def test_what_one_rank_has_left_at_the_end_is_shared_out_by_a_later_resume(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> tuple[list[int], str]:
        how: dict[str, Any] = {"given": task(40, run=odd_ones_fail, on_failure=Skip()), "capacity": 30}
        with opened(ranks, tmp_path, **how) as pipe:
            begun, got = pipe.resume(rebalance=True), list[int]()
            pipe.start(weights_current=True)
            step = begun.step
            try:
                while True:
                    batch = pipe.get_batch(4)
                    pipe.ack(batch.step)
                    got, step = [*got, *batch.uids], batch.step
            except EndOfSource as error:
                pipe.save(step)
                return got, str(error)

    first, second = fine(on_ranks(2, run, timeout_s=30.0)), fine(on_ranks(2, run, timeout_s=30.0))
    assert len(first[0][0]) == len(first[1][0])
    assert "groups left to train" in first[0][1]
    trained = [uid for got, _ in (*first, *second) for uid in got]
    assert len(trained) == len(set(trained)) >= 22  # of 23: one is left over
    assert all(uid % 2 == 0 or uid <= 6 for uid in trained)
    status = status_of(str(tmp_path))
    assert status.state == FINISHED
    assert "all items but 1 left, which 2 ranks cannot share out" in status.why


# -- what is asked for meanwhile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["continue", "stop"])
@pytest.mark.parametrize("who", [0, 2])
def test_what_one_rank_is_asked_for_all_do_once_at_one_step(tmp_path: Path, who: int, then: Any) -> None:
    def asked(pipe: SyncPipeline, ranks: Ranks) -> int:
        for batch in pipe.batches(GROUPS, until=6):
            if batch.step == 3 and ranks.rank == who:
                pipe.request_save("somebody", then=then)
                pipe.request_save("somebody", then=then)
        return batch.step

    found = on(3, tmp_path, asked)
    if then == "continue":
        assert found == [6, 6, 6]
    else:
        assert all(isinstance(each, Stopped) for each in found), found
    assert [(each.step, each.world_size) for each in manifests(tmp_path)] == [(0, 3), (3, 3)]
    assert manifests(tmp_path)[-1].reason.startswith("somebody")


@pytest.mark.parametrize("then", ["continue", "stop"])
def test_any_rank_can_be_asked_over_http(tmp_path: Path, then: str) -> None:
    said: list[dict[str, Any]] = []

    def look(asker: Asker, ticket: str) -> None:
        said.append(asker.end(ticket))

    looking: list[threading.Thread] = []

    def asked(pipe: SyncPipeline, ranks: Ranks) -> int:
        for batch in pipe.batches(GROUPS, until=6):
            if batch.step == 3 and ranks.rank == 1:
                (place,) = (each for each in find_places(str(tmp_path), 1) if each.rank == 1)
                asker = Asker(place.address)
                looking.append(threading.Thread(target=look, args=(asker, asker.save(then))))
                looking[0].start()
        return batch.step

    found = on(2, tmp_path, asked, control="127.0.0.1:0")
    if then == "continue":
        assert found == [6, 6]
    else:
        assert all(isinstance(each, Stopped) for each in found), found
    looking[0].join()
    newest = manifests(tmp_path)[-1]
    assert (newest.step, newest.world_size, newest.reason) == (3, 2, "HTTP at rank 1")
    (answer,) = said
    assert (answer["state"], answer["generation"], answer["step"]) == ("done", newest.generation, 3)


def test_a_wish_that_a_rank_cannot_answer_yet_waits_until_the_next_batch(tmp_path: Path) -> None:
    """The ranks meet once for it, and then for the batch; not again and again."""

    async def slow(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0 if item.uid < GROUPS else 0.3)
        return await solve(item, ctx)

    def asked(pipe: SyncPipeline, ranks: Ranks) -> tuple[int, int]:
        consumer: Any = pipe._run.consumer
        first = pipe.get_batch(GROUPS)
        if ranks.rank == 1:
            pipe.ack(first.step)
            pipe.request_save("somebody")
        rounds, second = consumer.round, pipe.get_batch(GROUPS)
        met = consumer.round - rounds
        pipe.ack(second.step)
        pipe.get_batch(GROUPS)
        return met, second.step

    assert fine(on(2, tmp_path, asked, given=task(60, run=slow))) == [(2, 2), (2, 2)]
    assert [each.step for each in manifests(tmp_path)] == [0, 2]


def test_ranks_that_wait_for_rollouts_hear_of_a_wish(tmp_path: Path) -> None:
    async def stuck(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0 if item.uid < GROUPS else 3600)
        return await solve(item, ctx)

    def waits(pipe: SyncPipeline, ranks: Ranks) -> None:
        for batch in pipe.batches(GROUPS):
            if ranks.rank == 1 and batch.step == 1:
                threading.Timer(0.3, lambda: pipe.request_save("somebody", then="stop")).start()

    assert all(isinstance(each, Stopped) for each in on(2, tmp_path, waits, given=task(60, run=stuck)))
    assert [each.step for each in manifests(tmp_path)] == [0, 1]


def test_a_stop_that_cannot_be_answered_in_time_is_said_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def stuck(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0 if item.uid < GROUPS else 1.0)
        return await solve(item, ctx)

    def late(pipe: SyncPipeline, ranks: Ranks) -> None:
        pipe.get_batch(GROUPS)
        if ranks.rank == 1:
            pipe.request_save("somebody", then="stop", within=0.1)
        pipe.get_batch(GROUPS)

    with caplog.at_level(logging.WARNING, logger="forebay"):
        assert on(2, tmp_path, late, given=task(60, run=stuck)) == [None, None]
    assert sum("checkpoint.late" in record.getMessage() for record in caplog.records) == 1


def test_a_signal_that_no_batch_came_for_is_sent_again() -> None:
    class Trap:
        arrived = False
        again: bool | None = None

        def taken_over(self) -> list[str]:
            return []

        def remove(self, *, again: bool) -> None:
            self.again = again

    def asked(pipe: SyncPipeline, ranks: Ranks) -> Trap:
        trap = Trap()
        pipe._run.triggers.trap = trap  # type: ignore[assignment]
        pipe.request_save("SIGTERM", then="stop")
        return trap

    assert [trap.again for trap in fine(on(2, None, asked))] == [True, True]


def test_a_save_that_only_the_trainers_can_write_is_due_on_all_ranks(tmp_path: Path) -> None:
    def writes(pipe: SyncPipeline, ranks: Ranks) -> list[bool]:
        due = []
        for step in (1, 2, 3):
            assert pipe.get_batch(GROUPS).step == step
            due.append(pipe.save_due(step))
            if step == 1 or due[-1]:
                with pipe.checkpoint(step) as folder:
                    Path(folder, f"{ranks.rank}.bin").write_bytes(b"1")
            else:
                pipe.ack(step)
                if ranks.rank == 1:
                    pipe.request_save("somebody")
        return due

    assert fine(on(2, tmp_path, writes)) == [[False, False, True]] * 2
    assert [each.step for each in manifests(tmp_path)] == [0, 1, 3]


def test_every_so_many_steps_all_ranks_save_without_a_word(tmp_path: Path) -> None:
    on(2, tmp_path, lambda pipe, ranks: [batch.step for batch in pipe.batches(GROUPS, until=7)], save_every=3)
    assert [each.step for each in manifests(tmp_path)] == [0, 3, 6]


# -- saving ------------------------------------------------------------------------------------------------------------


def test_files_that_every_rank_writes_are_part_of_one_checkpoint(tmp_path: Path) -> None:
    def saves(pipe: SyncPipeline, ranks: Ranks) -> None:
        batch = pipe.get_batch(GROUPS)
        with pipe.checkpoint(batch.step) as folder:
            Path(folder, f"{ranks.rank}.bin").write_bytes(bytes([ranks.rank]))

    fine(on(3, tmp_path, saves))
    newest = manifests(tmp_path)[-1]
    assert {info.path for info in newest.files if info.path.startswith("files/")} == {
        f"files/{rank}.bin" for rank in range(3)
    }
    assert verify(str(tmp_path)).whole


def test_what_is_attached_is_the_first_ranks_and_is_loaded_on_all(tmp_path: Path) -> None:
    class Counter:
        value = 0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    def run(ranks: Ranks) -> int:
        counter = Counter()
        with opened(ranks, tmp_path) as pipe:
            pipe.attach(counter=counter)
            pipe.resume()
            found = counter.value
            counter.value = 7 + ranks.rank
            pipe.start(weights_current=True)
            pipe.save(pipe.get_batch(GROUPS).step)
        return found

    assert fine(on_ranks(2, run)) == [0, 0]
    assert fine(on_ranks(3, run)) == [7, 7, 7]


def test_ranks_that_save_different_steps_save_nothing(tmp_path: Path) -> None:
    def saves(pipe: SyncPipeline, ranks: Ranks) -> None:
        pipe.get_batch(GROUPS)
        pipe.get_batch(GROUPS)
        pipe.save(1 + ranks.rank).committed()

    found = on(2, tmp_path, saves)
    assert [type(each) for each in found] == [RankFailed, RankFailed]
    assert "step 2 on rank 1 met that of step 1 on rank 0" in str(found[1])
    assert [each.step for each in manifests(tmp_path)] == [0]


def test_a_part_that_is_damaged_is_an_error_on_every_rank(tmp_path: Path) -> None:
    life(tmp_path, 2, 2)
    newest = tmp_path / "generations" / f"{manifests(tmp_path)[-1].generation:08d}"
    (newest / "shards" / "0001" / "consumer.json").write_bytes(b"{}")
    for size in (1, 2, 3):

        def run(ranks: Ranks) -> None:
            with opened(ranks, tmp_path) as pipe:
                pipe.resume()

        found = on_ranks(size, run)
        assert all(isinstance(each, (Damaged, RankFailed)) for each in found), found
        assert any(isinstance(each, Damaged) and "0001/consumer.json" in str(each) for each in found)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_a_retry_works(tmp_path: Path) -> None:
    def saves(pipe: SyncPipeline, ranks: Ranks) -> tuple[str, int]:
        step, said = pipe.get_batch(GROUPS).step, ""
        saver: Any = pipe._run._saver
        own = saver._own
        if ranks.rank == 1:
            saver._own = fail
        try:
            pipe.save(step).committed()
        except Exception as error:
            said = repr(error)
        saver._own = own
        pipe.save(step).committed()
        return said, step

    def fail(*given: Any) -> None:
        raise WriteFailed("no room")

    zero, one = fine(on(2, tmp_path, saves))
    assert "rank 1 failed: WriteFailed: no room" in zero[0]
    assert "no room" in one[0]
    assert [each.step for each in manifests(tmp_path)] == [0, 1]


def test_a_save_that_one_rank_could_not_begin_fails_on_all_and_a_retry_works(tmp_path: Path) -> None:
    def saves(pipe: SyncPipeline, ranks: Ranks) -> str:
        step, said = pipe.get_batch(GROUPS).step, ""
        saver: Any = pipe._run._saver
        begin = saver.begin
        if ranks.rank == 1:
            saver.begin = fail
        try:
            pipe.save(step).committed()
        except (WriteFailed, RankFailed) as error:
            said = str(error)
        saver.begin = begin
        pipe.save(step).committed()
        return said

    def fail(*given: Any, **more: Any) -> None:
        raise WriteFailed("no room")

    zero, one = fine(on(2, tmp_path, saves))
    assert "a save failed on rank 1 before it had begun" in zero
    assert one == "no room"
    assert [each.step for each in manifests(tmp_path)] == [0, 1]


def test_after_a_save_each_rank_knows_what_all_have_trained(tmp_path: Path) -> None:
    def saves(pipe: SyncPipeline, ranks: Ranks) -> tuple[int, int]:
        for _ in range(2):  # the second one waits until all of the first is done
            pipe.save(pipe.get_batch(GROUPS).step).committed()
        return pipe.ledger.trained.ranges()[0]

    for first, last in fine(on(2, tmp_path, saves, order="strict")):
        assert first == 0
        assert last >= GROUPS - 1


def test_segments_of_before_that_several_ranks_need_are_listed_once() -> None:
    def report(*segments: SegmentInfo) -> Any:
        return SimpleNamespace(segments=segments)

    one, other = SegmentInfo(name="1", bytes=500, live=200), SegmentInfo(name="2", bytes=300, live=100)
    also = SegmentInfo(name="1", bytes=640, live=150)
    assert _together([report(other, one), report(also)]) == [
        SegmentInfo(name="1", bytes=640, live=350),
        SegmentInfo(name="2", bytes=300, live=100),
    ]


# -- what is not there -------------------------------------------------------------------------------------------------


def test_what_ranks_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    def refused(pipe: SyncPipeline, ranks: Ranks) -> list[str]:
        batch = pipe.get_batch(GROUPS)
        said = []
        for verb in (
            lambda: pipe.submit("a", {"n": 1}),
            lambda: pipe.put("a", Rollout({"n": [1]})),
            lambda: pipe.set_share("a", 2.0),
            pipe.serve,
            lambda: pipe.save(batch.step, replay_buffer=False),
        ):
            with pytest.raises(UsageError) as raised:
                verb()
            said.append(str(raised.value))
        return said

    for said in fine(on(2, tmp_path, refused)):
        assert [each.split("=")[0].split("(")[0] for each in said] == [
            "submit",
            "put",
            "set_share",
            "serve",
            "replay_buffer",
        ]


def test_what_ranks_cannot_have_is_refused_when_the_pipeline_is_made() -> None:
    def refused(ranks: Ranks) -> list[str]:
        said = []
        for how in ({"mixing": "batch"}, {"batch_groups": 5}, {"rank": 1 - ranks.rank or 5}):
            with pytest.raises(ConfigError) as raised:
                Pipeline(task(), ranks=ranks, **how)
            said.append(str(raised.value.option))
        return said

    assert fine(on_ranks(2, refused)) == [["mixing", "batch_groups", "rank"]] * 2
