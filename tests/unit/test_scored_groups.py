"""Members that are scored together wait for each other, and nobody is left to be scored alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Retry, Rollout, RolloutFailed, Task
from tasks import SequenceSource
from tasks.verifiers.groups import Groups

SIZE = 3


class Play:
    """Plays members, whose state is their number; each is rewarded by how far it lies above the least of its group."""

    def __init__(self) -> None:
        self.groups = Groups(SIZE)
        self.played: list[int] = []
        self.scored: list[list[int]] = []
        self.after = self.hook

    async def hook(self, ctx: Context) -> None:
        """Comes after a member's scoring, and before it returns."""

    async def score(self, states: Sequence[dict[str, Any]]) -> None:
        self.scored.append([each["member"] for each in states])
        for each in states:
            each["reward"] = float(each["member"] - min(other["member"] for other in states))

    async def run(self, item: Item, ctx: Context) -> Rollout:
        known = self.groups.known(ctx)
        if known is not None:
            return known
        self.played.append(ctx.member)
        state: dict[str, Any] = {"member": ctx.member}

        def made() -> Rollout:
            return Rollout(reward=state["reward"], info={"member": ctx.member})

        async with ctx.scoring():
            rollout = await self.groups.score(ctx, state, self.score, made)
        await self.after(ctx)
        return rollout

    def task(self, items: int = 2, **options: Any) -> Task:
        return Task(
            "t", source=SequenceSource([*range(items)]), run=self.run, group_size=SIZE, shuffle=False, **options
        )


async def test_all_members_are_scored_at_once_in_their_order_and_need_one_slot() -> None:
    play = Play()
    async with Pipeline([play.task()], concurrency=1) as pipe:
        await pipe.start()
        batch = await pipe.get_batch(groups=2)
    for group in batch.groups:
        assert [each.reward for each in group.rollouts] == [0.0, 1.0, 2.0]
        assert [dict(each.info) for each in group.rollouts] == [{"member": n} for n in range(SIZE)]
    assert play.scored == [[0, 1, 2]] * 2
    assert not play.groups._open


async def test_what_raises_while_they_are_scored_fails_them_all_and_they_are_played_again() -> None:
    play = Play()
    score, fails = play.score, [ValueError("no"), None]

    async def flaky(states: Sequence[dict[str, Any]]) -> None:
        error = fails.pop(0) if fails else None
        if error is not None:
            raise error
        await score(states)

    play.score = flaky  # type: ignore[method-assign]
    async with Pipeline([play.task(on_failure=Retry(attempts=2))]) as pipe:
        await pipe.start()
        batch = await pipe.get_batch(groups=1)
    assert [each.reward for each in batch.rollouts] == [0.0, 1.0, 2.0]
    assert sorted(play.played[: 2 * SIZE]) == [0, 0, 1, 1, 2, 2]


async def test_the_error_of_scoring_is_the_one_that_is_raised() -> None:
    play = Play()

    async def broken(states: Sequence[dict[str, Any]]) -> None:
        raise ValueError("no")

    play.score = broken  # type: ignore[method-assign]
    async with Pipeline([play.task(on_failure="fail_fast")]) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="no"):
            await pipe.get_batch(groups=1)
    assert not play.groups._open


async def test_members_that_a_crash_cut_after_the_first_had_finished_have_what_they_were_scored_with(
    run_directory: str,
) -> None:
    first, done = Play(), anyio.Event()

    async def only_one_returns(ctx: Context) -> None:
        if ctx.member:
            await anyio.sleep_forever()
        done.set()

    first.after = only_one_returns
    async with Pipeline([first.task(items=1)], directory=run_directory) as pipe:
        await pipe.start()
        await done.wait()
        while not pipe.ledger.totals["t"].finished:
            await anyio.lowlevel.checkpoint()
    second = Play()
    async with Pipeline([second.task(items=1)], directory=run_directory) as pipe:
        await pipe.resume()
        await pipe.start(weights_current=True)
        batch = await pipe.get_batch(groups=1)
    assert [each.reward for each in batch.rollouts] == [0.0, 1.0, 2.0]
    assert [dict(each.info) for each in batch.rollouts] == [{"member": n} for n in range(SIZE)]
    assert not second.played
    assert not second.scored
