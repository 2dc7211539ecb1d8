"""Progress files of XTuner, of before and after pull request 1899."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import Damaged
from pipeline.sampler import read_xtuner_progress
from pipeline.sampler.progress import Progress, decode_progress, encode_progress

BEFORE: dict[str, Any] = {
    "status": "EXPIRED_BATCH",
    "model_step": 7,
    "next_consumer_step": 8,
    "producer_future_step": 10,
    "consumed_samples": {"math": 21, "code": 7},
    "target_samples": {"math": 30, "code": 10},
    "target_upto_future_step": 10,
}
AFTER: dict[str, Any] = {
    **BEFORE,
    "status": "UPDATE_WEIGHT_AND_ABORT",
    "producer_future_step": 8,
    "target_samples": {"math": 21, "code": 7},
    "target_upto_future_step": 7,
    "raw_rewards_sum": {"math": 0.0, "code": 0.0},
    "raw_rewards_count": {"math": 0, "code": 0},
    "produced_samples": {"math": 0, "code": 0},
    "produced_tokens": {"math": 0, "code": 0},
    "produce_time_s": 0.0,
    "replay_buffer_saved": False,
}


def read(fields: Any) -> Any:
    return read_xtuner_progress(json.dumps(fields).encode())


def test_a_file_of_before_held_a_buffer_and_has_no_counts_of_the_window() -> None:
    progress, status, unknown = read(BEFORE)
    assert status == "EXPIRED_BATCH"
    assert unknown == {}
    assert progress == Progress(
        model_step=7,
        next_consumer_step=8,
        producer_future_step=10,
        consumed_samples={"math": 21, "code": 7},
        target_samples={"math": 30, "code": 10},
        target_upto_future_step=10,
        replay_buffer_saved=True,
    )
    assert progress.deficit("math", available=4) == 5


def test_a_file_of_after_says_that_it_has_none_and_its_deficit_is_zero() -> None:
    progress, status, unknown = read(AFTER)
    assert status == "UPDATE_WEIGHT_AND_ABORT"
    assert unknown == {}
    assert progress.replay_buffer_saved is False
    assert progress.produced_samples == {"math": 0, "code": 0}
    assert progress.produce_time_s == {"": 0.0}
    assert [progress.deficit(task, 0) for task in ("math", "code")] == [0, 0]
    assert decode_progress(encode_progress(progress))[0] == progress


def test_the_window_of_a_file_with_its_buffer_is_kept() -> None:
    progress, _, _ = read({**AFTER, "replay_buffer_saved": True, "raw_rewards_sum": {"math": 2}, "produce_time_s": 1.5})
    assert progress.replay_buffer_saved
    assert progress.raw_rewards_sum == {"math": 2.0}
    assert progress.produce_time_s == {"": 1.5}


def test_what_has_no_counterpart_is_returned() -> None:
    progress, _, unknown = read({**AFTER, "stopped_prompts": {"math": 2}, "format_version": 99, "window_marks": 3})
    assert unknown == {"stopped_prompts": {"math": 2}, "format_version": 99, "window_marks": 3}
    assert progress.format_version == Progress().format_version


@pytest.mark.parametrize(
    "fields",
    [
        [],
        "text",
        {},
        {"status": "NORMAL"},
        {**AFTER, "consumed_samples": 3},
        {**AFTER, "target_samples": {"math": "many"}},
        {**AFTER, "next_consumer_step": 0},
        {**AFTER, "target_upto_future_step": -1},
        {**AFTER, "produce_time_s": "long"},
    ],
)
def test_anything_else_is_refused_by_name(fields: Any) -> None:
    with pytest.raises(Damaged, match=r"agent_loop_manager_state\.json: not a progress file of XTuner"):
        read(fields)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(Damaged, match="my file: not a progress file"):
        read_xtuner_progress(b"\x80\x04pickle", "my file")
