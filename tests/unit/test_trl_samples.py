"""Samples for TRL's trainer out of batches; the trainer itself is in ``tests/integration/test_trl.py``."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest

from pipeline import Context, Item, Pipeline, Rollout, Task
from tasks import SequenceSource
from tasks.trl.samples import Samples, samples_of

BATCH: Any = object()


async def two_traces(item: Item, ctx: Context) -> Rollout:
    said = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": str(n)}] for n in range(2)]
    traces = [
        {
            "prompt_ids": np.array([1, 2]),
            "completion_ids": np.array([3, 4 + n]),
            "completion_mask": np.array([False, True]),
            "logprobs": np.array([0.0, -0.5], np.float32),
        }
        for n in range(2)
    ]
    info = {"chats": said, "rewards": {"right": float(ctx.member)}, "metrics": {"turns": 2, "note": "text"}}
    return Rollout(traces, reward=float(ctx.member), info=info)


async def test_one_for_each_trace_with_the_groups_oldest_version_and_its_advantage() -> None:
    task = Task("t", source=SequenceSource([0]), run=two_traces, group_size=2)
    async with Pipeline([task]) as pipe:
        async with pipe.weight_update(version=7):
            pass
        await pipe.start()
        batch = await pipe.get_batch(groups=1)
        made = samples_of(batch, dict, lambda version: version * 10, "grpo", 0.0)
    assert [each["input_ids"].tolist() for each in made] == [[1, 2, 3, 4], [1, 2, 3, 5]] * 2
    assert [each["completion_mask"].tolist() for each in made] == [[0, 0, 0, 1]] * 4
    assert [each["old_log_probs"].tolist() for each in made] == [[0, 0, 0, -0.5]] * 4
    assert [each["advantage"] for each in made] == [-1.0, -1.0, 1.0, 1.0]
    assert {each["model_version"] for each in made} == {70}
    assert {each["group_id"] for each in made} == {batch.groups[0].uid}
    assert made[3]["metrics"] == {"reward": 1.0, "reward_std": 0.5, "rewards/right": 1.0, "metrics/turns": 2.0}
    assert (made[3]["prompt"], made[3]["completion"]) == (
        [{"role": "user", "content": "q"}],
        [{"role": "assistant", "content": "1"}],
    )


def test_the_queue_fetches_when_it_is_empty_and_not_before() -> None:
    asked: list[float | None] = []
    given: list[list[int]] = [[1, 2], [], [3]]
    taken: list[int] = []

    def fetch(timeout: float | None) -> Any:
        asked.append(timeout)
        if not given:
            raise queue.Empty
        return BATCH

    samples = Samples(fetch, lambda batch: given.pop(0), taken.append)
    assert isinstance(samples, queue.Queue)
    assert (samples.qsize(), samples.empty(), asked) == (0, True, [])
    assert samples.get(timeout=5.0) == 1
    assert (samples.qsize(), samples.empty(), asked) == (1, False, [5.0])
    assert [samples.get(), samples.get(block=False)] == [2, 3], "a batch without samples is passed over"
    assert asked == [5.0, 0.0, 0.0]
    with pytest.raises(queue.Empty):
        samples.get()
    assert taken == [1, 2, 3]
    samples.clear()
    assert samples.empty()
