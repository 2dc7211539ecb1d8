"""A trainer and rollouts that wait for each other by a limiter: whatever the sizes, they end, and say how."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pipeline import Context, EndOfSource, Item, Limiter, ReplayBuffer, Rollout, RolloutFailed, Starved
from tests.support.experience import block, fed

ITEMS, PARTS = 5, 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 7),
    batch=st.integers(1, 12),
    least=st.integers(1, 12),
    ratio=st.sampled_from([None, 0.25, 1.0, 3.0]),
    room=st.floats(1.0, 30.0),
    capacity=st.integers(7, 30),
    concurrency=st.integers(1, 4),
    draws=st.integers(1, 3),
)
@example(rows=3, batch=4, least=1, ratio=1.0, room=2.0, capacity=20, concurrency=2, draws=1)
def test_every_combination_of_sizes_ends(
    backend: str,
    rows: int,
    batch: int,
    least: int,
    ratio: float | None,
    room: float,
    capacity: int,
    concurrency: int,
    draws: int,
) -> None:
    assume(least <= capacity)  # other sizes are refused when the buffer is built, or the batch asked for
    limiter = Limiter(min_size=least)
    if ratio is not None:
        limiter = Limiter(min_size=least, ratio=ratio, error_buffer=max(1.0, ratio, room))
        assume(batch <= 2 * limiter.buffer)

    async def play(item: Item, ctx: Context) -> Rollout:
        for part in range(PARTS):
            await anyio.lowlevel.checkpoint()
            await ctx.extend(block(item, part, rows, ends=part == PARTS - 1))
        return Rollout(reward=0.0)

    async def live() -> None:
        buffer, sampled = ReplayBuffer(capacity, limiter=limiter), 0
        async with fed(buffer, ITEMS, run=play, concurrency=concurrency, on_failure="fail_fast") as pipe:
            await pipe.start()
            with anyio.fail_after(10):
                while sampled < 400:
                    try:
                        for _ in range(draws):
                            sampled += len(await pipe.sample(batch))
                    except EndOfSource:
                        assert buffer.ring.added == ITEMS * PARTS * rows
                        return
                    except Starved:
                        assert ratio is not None
                        assert ratio * rows + batch > 2 * limiter.buffer, "these sizes are said to work"
                        return
                    except RolloutFailed:
                        assert ratio is not None
                        assert rows * ratio > 2 * limiter.buffer, "only a block that never fits is refused"
                        return
                    pipe.ledger.check()
            assert ratio is None or ratio * buffer.ring.added > sampled - 2 * limiter.buffer - ratio * least

    anyio.run(live, backend=backend)
