"""``assert_exact_resume`` on runs of many kinds, and shown to find what it is there to find."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import msgspec
import pytest

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task, ZeroVariance
from pipeline.checkpoint.generations import Found, find_generations
from pipeline.ledger import Entry
from pipeline.store.layout import Layout
from pipeline.testing import Numbers, assert_exact_resume
from pipeline.wiring import resuming
from pipeline.wiring.consuming import Consumer
from pipeline.wiring.producing import Producer

pytestmark = pytest.mark.virtual_time


async def run(item: Item, ctx: Context) -> Rollout:
    """Takes another time at each member, and fails now and then."""
    await anyio.sleep(0.2 + 3 * ctx.rng.random() ** 3)
    if ctx.rng.random() < 0.15:
        raise ValueError("a bad day")
    return Rollout({"n": [item["n"]]}, reward=float(ctx.rng.random() > 0.3))


def tasks(**more: Any) -> list[Task]:
    common: dict[str, Any] = {"run": run, "on_failure": Retry(attempts=50), **more}
    return [Task("a", source=Numbers(7), share=2, **common), Task("b", source=Numbers(5), group_size=2, **common)]


EXACT: list[dict[str, Any]] = [
    {"strategy": "synchronous"},
    {"order": "strict", "capacity": 7},
    {"order": "strict", "max_staleness": 1, "batch_groups": 3},
]
LOOSE: list[dict[str, Any]] = [{"capacity": 7}, {"max_staleness": 2, "batch_groups": 3, "selector": "fifo"}]


@pytest.mark.parametrize("options", [*EXACT, *LOOSE], ids=str)
async def test_cut_at_every_event(options: dict[str, Any]) -> None:
    report = await assert_exact_resume(
        lambda **how: Pipeline(tasks(), concurrency=3, max_rerolls=99, **options, **how), groups=3, most=120
    )
    assert report.exact == (options in EXACT)
    assert report.cuts == 120 < report.changes


async def test_groups_that_a_filter_rejects_are_the_same_ones() -> None:
    def make(**how: Any) -> Pipeline:
        given = Task("a", source=Numbers(8), run=run, group_size=3, filter=ZeroVariance(), on_failure=Retry(99))
        return Pipeline(given, order="strict", capacity=6, concurrency=4, **how)

    assert (await assert_exact_resume(make, groups=2, most=60)).exact


async def test_up_to_a_step_of_an_endless_source() -> None:
    def make(**how: Any) -> Pipeline:
        return Pipeline(Task("a", source=Numbers(), run=run, on_failure=Retry(99)), order="strict", capacity=6, **how)

    report = await assert_exact_resume(make, groups=2, until=5, most=40, save_every=1)
    assert report.exact


class TestItFinds:
    """What it must find is done to the library on purpose."""

    async def test_a_batch_that_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Consumer, "_repeat", lambda self, step, groups: self._state.pending.clear())
        with pytest.raises(AssertionError, match=r"cut after change \d+ of \d+"):
            await assert_exact_resume(lambda **how: Pipeline(tasks(), order="strict", capacity=7, **how), groups=3)

    async def test_an_order_that_hangs_on_the_life(self) -> None:
        lives = itertools.count()

        def make(**how: Any) -> Pipeline:
            life = next(lives)

            async def moody(item: Item, ctx: Context) -> Rollout:
                await anyio.sleep(1.0 + (item["n"] * (1 + life) * 7) % 5)
                return Rollout(reward=1.0)

            return Pipeline(Task("a", source=Numbers(9), run=moody), selector="fifo", capacity=9, **how)

        def boasting(**how: Any) -> Pipeline:
            """Says of itself that its batches are in draw order, and they are not."""
            pipe = make(**how)
            pipe.options = msgspec.structs.replace(pipe.options, order="strict")
            return pipe

        report = await assert_exact_resume(make, groups=3, most=20)  # the items are the same: no more is asked of it
        assert not report.exact
        with pytest.raises(AssertionError, match=r"the batch of step \d is"):
            await assert_exact_resume(boasting, groups=3, most=20)

    async def test_an_item_too_many(self) -> None:
        counts = iter([9, *[10] * 99])

        def make(**how: Any) -> Pipeline:
            given = Task("a", source=Numbers(next(counts)), run=run, on_failure=Retry(99))
            return Pipeline(given, capacity=6, **how)

        with pytest.raises(AssertionError, match="beyond the unbroken run"):
            await assert_exact_resume(make, groups=3, most=20)

    async def test_an_item_that_waits_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requeue = Producer.requeue

        def forgets(self: Producer, entry: Entry) -> None:
            if entry.index != 4:
                requeue(self, entry)

        monkeypatch.setattr(Producer, "requeue", forgets)
        with pytest.raises(AssertionError, match=r"never trained, and not dropped: \[\"\(\('\w+', 0, 4\)"):
            await assert_exact_resume(lambda **how: Pipeline(tasks(), capacity=7, concurrency=3, **how), groups=3)

    async def test_a_checkpoint_that_was_committed_and_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def all_but_the_newest(layout: Layout, run_id: str) -> Found:
            found = find_generations(layout, run_id)
            return found._replace(complete=found.complete[:-1] or found.complete)

        monkeypatch.setattr(resuming, "find_generations", all_but_the_newest)
        with pytest.raises(AssertionError, match=r"resumed at step \d+; the checkpoint of \d+ was committed"):
            await assert_exact_resume(lambda **how: Pipeline(tasks(), capacity=7, keep=None, **how), groups=3)
