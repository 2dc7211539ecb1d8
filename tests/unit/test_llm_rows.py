"""Rows of tokens out of batches, and the advantages in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pipeline import Batch, ConfigError, EndOfSource, Group, Item, Pipeline, Rollout, Skip, Task, Trace
from pipeline.store.codec import pack
from tasks import SequenceSource
from tasks.llm import advantages, packed, padded, token_rows

ONE = {
    "prompt_ids": np.array([5, 6]),
    "completion_ids": np.array([7, 8, 9]),
    "completion_mask": np.array([True, False, True]),
    "logprobs": np.array([-0.1, 0.0, -0.3], np.float32),
}


async def batch_of(make: Any, *, size: int = 1, **options: Any) -> Batch:
    async def run(item: Item, ctx: Any) -> Rollout:
        made: Rollout = make(ctx)
        return made

    task = Task("t", source=SequenceSource([0]), run=run, group_size=size, min_group=1, on_failure=Skip())
    async with Pipeline([task], **options) as pipe:
        await pipe.start()
        return await pipe.get_batch(groups=1)


def test_advantages_are_what_the_papers_say() -> None:
    assert advantages([1, 0, 1]).tolist() == pytest.approx([0.7071068, -1.4142136, 0.7071068])
    assert advantages([1, 0, 1], "mean").tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    for kind in ("rloo", "leave_one_out"):
        assert advantages([1, 0, 1], kind).tolist() == pytest.approx([0.5, -1, 0.5])
    assert advantages([1, 0, 1], "reward").tolist() == [1, 0, 1]
    assert advantages([3, 1], epsilon=1.0).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [1e9 / 3] * 7, [0.0], [2.0]])
def test_equal_rewards_have_no_advantage(rewards: list[float]) -> None:
    for kind in ("grpo", "mean", "rloo"):
        assert advantages(rewards, kind) == pytest.approx(0, abs=1e-6)
    assert not advantages(rewards).any()


def test_advantages_of_nobody_and_of_what_is_no_reward() -> None:
    assert advantages([]).tolist() == []
    for wrong in ([float("nan")], [[1.0]], [float("inf"), 1.0]):
        with pytest.raises(ConfigError, match="rewards"):
            advantages(wrong)
    with pytest.raises(ConfigError, match="kind='ppo': one of grpo, mean"):
        advantages([1.0], "ppo")
    with pytest.raises(ConfigError, match="epsilon"):
        advantages([1.0], epsilon=-1)


async def test_a_failed_member_is_no_row_and_no_part_of_the_mean() -> None:
    """CASES 145: three rows."""
    rewards = {0: 1.0, 1: 0.0, 3: 1.0}

    def make(ctx: Any) -> Rollout:
        return Rollout(ONE, reward=rewards[ctx.member])

    rows = token_rows(await batch_of(make, size=4))
    assert [row.member for row in rows] == [0, 1, 3]
    assert [row.advantage for row in rows] == pytest.approx([0.7071068, -1.4142136, 0.7071068])
    assert np.std([row.reward for row in rows]) == pytest.approx(0.4714045)
    (micro,) = packed(rows, tokens=100)
    assert micro.loss_tokens == 6


async def test_of_a_group_that_has_to_be_full_a_failed_member_leaves_no_row() -> None:
    """CASES 145: none, and the group is counted as dropped."""

    async def run(item: Item, ctx: Any) -> Rollout:
        if ctx.member == 2:
            raise ValueError("no")
        return Rollout(ONE, reward=1.0)

    task = Task("t", source=SequenceSource([0]), run=run, group_size=4, on_failure=Skip())
    async with Pipeline([task]) as pipe:
        await pipe.start()
        with pytest.raises(EndOfSource):
            await pipe.get_batch(groups=1)
        totals = pipe.ledger.totals["t"]
    assert (totals.trained, sum(totals.dropped.values())) == (0, 1)


async def test_a_row_has_the_tokens_of_prompt_and_completion_side_by_side() -> None:
    (row,) = token_rows(await batch_of(lambda ctx: Rollout(ONE, reward=2.0)), advantages="reward")
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.completion_mask.tolist() == [False, False, True, False, True]
    assert row.old_log_probs.tolist() == pytest.approx([0, 0, -0.1, 0, -0.3])
    assert (row.advantage, row.reward, row.member, row.trace, row.group) == (2.0, 2.0, 0, 0, 0)
    assert len(row) == 5


async def test_traces_of_one_rollout_count_once_in_the_mean_and_share_its_advantage() -> None:
    def make(ctx: Any) -> Rollout:
        return Rollout([Trace(ONE, agent="a"), Trace(ONE, agent="b")][: 2 - ctx.member], reward=float(ctx.member))

    rows = token_rows(await batch_of(make, size=2), advantages="mean")
    assert [(row.member, row.trace, row.advantage) for row in rows] == [(0, 0, -0.5), (0, 1, -0.5), (1, 0, 0.5)]


async def test_members_may_be_judged_side_by_side() -> None:
    batch = await batch_of(lambda ctx: Rollout(ONE, reward=float(ctx.member)), size=3)
    rows = token_rows(batch, advantages=lambda group: [each.reward * len(group) for each in group])
    assert [row.advantage for row in rows] == [0, 3, 6]
    for wrong in ([1.0], [1.0, float("nan"), 2.0]):
        with pytest.raises(ConfigError, match="advantages: the function returned"):
            token_rows(batch, advantages=lambda group, wrong=wrong: wrong)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"completion_ids": None}, "no 'completion_ids' among its tensors"),
        ({"prompt_ids": None}, "no 'prompt_ids'"),
        ({"logprobs": None}, "no 'logprobs'"),
        ({"logprobs": np.zeros(2, np.float32)}, r"'logprobs' is \(2,\) beside 3 tokens"),
        ({"completion_mask": np.ones(4, bool)}, r"'completion_mask' is \(4,\) beside 3 tokens"),
        ({"completion_ids": np.zeros(3, np.float32)}, "whole numbers"),
        ({"completion_ids": np.zeros((1, 3), np.int64)}, "whole numbers"),
    ],
)
async def test_what_does_not_belong_together_is_named(change: Mapping[str, Any], said: str) -> None:
    tensors = {name: each for name, each in {**ONE, **change}.items() if each is not None}
    batch = await batch_of(lambda ctx: Rollout(tensors))
    with pytest.raises(ConfigError, match=f"trace 0 of member 0 of uid {batch.groups[0].uid}.*{said}"):
        token_rows(batch)


async def test_log_probs_that_nobody_gave_are_not_made_up() -> None:
    tensors = {name: each for name, each in ONE.items() if name != "logprobs"}
    (row,) = token_rows(await batch_of(lambda ctx: Rollout(tensors)), logprobs=False)
    assert row.old_log_probs[:2].tolist() == [0, 0]
    assert row.old_log_probs[2:].isnan().all()


@pytest.mark.parametrize(
    ("versions", "trained"),
    [([0, 3, 3], [False, False, True]), ([0, 0, 2, 3, 0], [True, False, False]), ([1] * 7, [False] * 3)],
)
def test_tokens_that_are_too_old_are_not_trained_on(versions: list[int], trained: list[bool]) -> None:
    """Versions may be given for the completion, or for the prompt too; a trace of one version is judged as a whole."""
    (row,) = token_rows([masked({**ONE, "versions": np.array(versions)}, least=2)])
    assert row.completion_mask.tolist() == [False, False, *trained]


def test_versions_that_are_of_no_known_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="versions of 4 tokens, beside 2 of the prompt and 3 of the completion"):
        token_rows([masked({**ONE, "versions": np.array([0, 3, 3, 3])}, least=2)])


def masked(tensors: Mapping[str, Any], *, least: int) -> Group:
    blob = pack(Rollout(tensors), Item("t", 0, 0, 7), member=0, attempt=1, life=0, versions=(0, 3))
    parts: dict[str, Any] = {"uid": 7, "task": "t", "epoch": 0, "index": 0, "oldest": 0, "newest": 3}
    return Group(**parts, staleness=3, reward_mean=0.0, _blobs=[blob], _least=least)


async def test_rows_are_padded_on_either_side() -> None:
    def make(ctx: Any) -> Rollout:
        tensors = {name: each[: len(each) - ctx.member] for name, each in ONE.items()}
        return Rollout({**tensors, "prompt_ids": ONE["prompt_ids"]}, reward=float(ctx.member))

    rows = token_rows(await batch_of(make, size=2), advantages="mean")
    right, left = padded(rows, pad_id=-1, multiple_of=4), padded(rows, pad_id=-1, side="left")
    assert right["input_ids"].tolist() == [[5, 6, 7, 8, 9, -1, -1, -1], [5, 6, 7, 8, -1, -1, -1, -1]]
    assert left["input_ids"].tolist() == [[5, 6, 7, 8, 9], [-1, 5, 6, 7, 8]]
    assert left["attention_mask"].tolist() == [[1] * 5, [0, 1, 1, 1, 1]]
    assert left["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    assert left["advantages"].tolist() == [[0, 0, -0.5, 0, -0.5], [0, 0, 0, 0.5, 0]]
    assert right["lengths"].tolist() == [5, 4]
    assert right["rewards"].tolist() == [0.0, 1.0]
    assert right["group"].tolist() == [0, 0]
    assert padded([])["input_ids"].shape == (0, 0)
    with pytest.raises(ConfigError, match="side='middle'"):
        padded(rows, side="middle")
