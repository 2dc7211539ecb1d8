"""What a runner must not return: refused with the names of the task, the item and the field."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Context, FailFast, Item, Retry, Rollout, RolloutFailed, RolloutInvalid, Trace
from tests.support.crashes import Trained, finish, inline_pipeline, lasting
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time

NAMED = r"item 2 of epoch 0 of task 'numbers' \(uid 2\)"


def returning(value: Any, *, once: bool = False) -> Any:
    """A runner that returns ``value`` for item 2."""

    async def run(item: Item, ctx: Context) -> Rollout:
        good = await lasting({})(item, ctx)
        return value() if item["n"] == 2 and not (once and ctx.attempt > 1) else good

    return run


INVALID: dict[str, tuple[Any, str]] = {
    "None": (lambda: None, "returned NoneType"),
    "a dict": (lambda: {"reward": 1.0}, "returned dict"),
    "a tuple": (lambda: ({}, 1.0), "returned tuple"),
    "a reward in words": (lambda: Rollout(reward="x"), "field reward"),  # type: ignore[arg-type]
    "no reward": (lambda: Rollout(reward=None), "field reward"),  # type: ignore[arg-type]
    "a yes": (lambda: Rollout(reward=True), "field reward"),
    "a complex reward": (lambda: Rollout(reward=1j), "field reward"),  # type: ignore[arg-type]
    "a tensor for a reward": (lambda: Rollout(reward=torch.ones(2)), "field reward"),  # type: ignore[arg-type]
    "an array of objects": (lambda: Rollout({"obs": np.array([object()])}), "field 'obs'"),
    "an array of texts": (lambda: Rollout({"obs": np.array(["a"])}), "field 'obs'"),
    "a ragged list": (lambda: Rollout({"obs": [[1], [1, 2]]}), "field 'obs'"),
    "a sparse tensor": (lambda: Rollout({"obs": torch.eye(2).to_sparse()}), "field 'obs'"),
    "a tensor without a name": (lambda: Rollout({"": [1]}), r"field traces\[0\]"),
    "a number for a name": (lambda: Rollout({5: [1]}), r"field traces\[0\]"),
    "a number for traces": (lambda: Rollout(5), "field traces"),
    "no traces": (lambda: Rollout(None), "field traces"),
    "a text for traces": (lambda: Rollout("abc"), "field traces"),
    "a trace of nothing": (lambda: Rollout(Trace(None)), r"field traces\[0\]"),  # type: ignore[arg-type]
    "a list of numbers": (lambda: Rollout([1, 2]), r"field traces\[0\]"),
    "a number for info": (lambda: Rollout(info=5), "field info"),  # type: ignore[arg-type]
    "an object in info": (lambda: Rollout(info={"a": {"b": object()}}), "field info"),
    "a negative version": (lambda: Rollout(oldest=-1), "field oldest"),
    "versions that fall": (lambda: Rollout(oldest=5, newest=4), "field newest"),
    "a version in words": (lambda: Rollout(newest="5"), "field newest"),  # type: ignore[arg-type]
    "a version beyond 64 bits": (lambda: Rollout(newest=2**64), "field newest"),
    "a negative length": (lambda: Rollout(tokens=-1), "field tokens"),
    "a length that is no count": (lambda: Rollout(tokens=1.5), "field tokens"),  # type: ignore[arg-type]
    "a length beyond 64 bits": (lambda: Rollout(tokens=2**64), "field tokens"),
}


@pytest.mark.parametrize(("value", "field"), INVALID.values(), ids=INVALID)
async def test_what_is_no_rollout_ends_the_run_with_an_error_that_names_it(
    run_directory: str, value: Any, field: str
) -> None:
    async with inline_pipeline(task(4, returning(value)), directory=run_directory) as pipe:
        await pipe.start()
        with pytest.raises(RolloutInvalid, match=f"{NAMED}.*{field}"):
            await pipe.get_batch(4)
        with pytest.raises(RolloutInvalid):
            await pipe.get_batch(1)
    # Nothing of it was taken in, and with a runner that is mended the run goes on.
    async with inline_pipeline(task(4, lasting({})), directory=run_directory) as pipe:
        await pipe.resume()
        await pipe.start(weights_current=True)
        assert (await finish(pipe, Trained(), 4)).items == [0, 1, 2, 3]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float64("nan"), np.float32("inf"), 10**400])
async def test_a_reward_that_is_not_finite_is_a_failed_attempt(reward: Any) -> None:
    given = task(4, returning(lambda: Rollout(reward=reward), once=True), on_failure=Retry(2))
    async with inline_pipeline(given) as pipe:
        await pipe.start()
        assert sorted(ids(await pipe.get_batch(4))) == [0, 1, 2, 3]
        assert pipe.ledger.totals["numbers"].failed == 1
    async with inline_pipeline(task(4, returning(lambda: Rollout(reward=reward)), on_failure=FailFast())) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match=f"{NAMED}.*reward is"):
            await pipe.get_batch(4)


@pytest.mark.parametrize("reward", [1, np.float32(1), np.float64(1), np.int64(1), decimal.Decimal(1)])
async def test_any_real_number_is_a_reward(reward: Any) -> None:
    accepted = not isinstance(reward, decimal.Decimal)  # which is no number among numbers in Python
    async with inline_pipeline(task(4, returning(lambda: Rollout(reward=reward)))) as pipe:
        await pipe.start()
        if accepted:
            batch = await pipe.get_batch(4)
            assert sorted(zip(ids(batch), batch.rewards.tolist(), strict=True))[2] == (2, 1.0)
        else:
            with pytest.raises(RolloutInvalid, match="field reward"):
                await pipe.get_batch(4)
