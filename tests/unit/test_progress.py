"""The progress file: old ones load, newer ones are refused, unknown fields and every byte survive."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pipeline.errors import Damaged, NewerFormat
from pipeline.sampler import Progress
from pipeline.sampler.progress import (
    PROGRESS_VERSION,
    add_counts,
    decode_progress,
    encode_progress,
    restore_in_place,
)


def full() -> Progress:
    return Progress(
        next_consumer_step=5,
        producer_future_step=7,
        target_upto_future_step=4,
        target_samples={"math": 12, "é \U0001f600": 2},
        consumed_samples={"math": 8},
        produced_samples={"math": 3},
        produced_tokens={"math": 2**53 + 1},
        failed_samples={"math": 1},
        filtered_samples={"math": 0},
        raw_rewards_sum={"math": -0.5},
        raw_rewards_count={"math": 3},
        produce_time_s={"math": 5e-324},
        model_step=4,
        replay_buffer_saved=False,
        batch_groups=4,
        window_marks={"math": [3, 10, 0, 0, 2.5, 3, 0.125]},
    )


def test_it_comes_back_equal_and_byte_for_byte_however_often_it_is_loaded() -> None:
    """CASES 6."""
    for progress in (full(), Progress()):
        first = raw = encode_progress(progress)
        for _ in range(5):
            found, unknown = decode_progress(raw)
            assert found == progress
            assert unknown == {}
            raw = encode_progress(found, unknown)
            assert raw == first


def test_a_person_can_read_it() -> None:
    assert encode_progress(full()).decode().startswith('{\n  "format_version": 1,\n  "next_consumer_step": 5,\n')
    assert encode_progress(full()).endswith(b"}\n")


@pytest.mark.parametrize("field", Progress.__struct_fields__)
def test_a_missing_field_takes_its_default(field: str) -> None:
    fields = msgspec.json.decode(encode_progress(full()))
    del fields[field]
    found, _ = decode_progress(msgspec.json.encode(fields))
    expected = PROGRESS_VERSION if field == "format_version" else getattr(Progress(), field)
    assert getattr(found, field) == expected
    setattr(found, field, getattr(full(), field))
    assert found == full()


def test_a_file_from_before_there_were_fields_is_a_fresh_progress_with_a_buffer() -> None:
    found, _ = decode_progress(b"{}")
    assert found == Progress()
    assert found.replay_buffer_saved is True


def test_an_unknown_field_is_kept_and_written_back() -> None:
    """CASES 118."""
    fields = msgspec.json.decode(encode_progress(full()))
    fields["of_the_future"] = {"a": [1, None, 0.5]}
    found, unknown = decode_progress(msgspec.json.encode(fields))
    assert unknown == {"of_the_future": {"a": [1, None, 0.5]}}
    assert found == full()
    again, still = decode_progress(encode_progress(found, unknown))
    assert (again, still) == (found, unknown)
    assert encode_progress(again, still) == encode_progress(found, unknown)


def test_a_newer_format_is_refused_with_both_numbers_whatever_else_it_holds() -> None:
    raw = msgspec.json.encode({"format_version": PROGRESS_VERSION + 8, "target_samples": "retyped"})
    with pytest.raises(NewerFormat, match=f"here: .*format {PROGRESS_VERSION + 8}; .* up to {PROGRESS_VERSION}"):
        decode_progress(raw, "here")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'{"target_samples": 3}',
        b'{"target_samples": {"a": 1.5}}',
        b'{"target_samples": {"a": "1"}}',
        b'{"format_version": "1"}',
        b'{"next_consumer_step": null}',
        b'{"a": "\xff"}',
        b"[" * 10**5,
        b'{"a": NaN}',
    ],
)
def test_what_is_no_progress_is_damage(raw: bytes) -> None:
    with pytest.raises(Damaged, match="here"):
        decode_progress(raw, "here")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308])
def test_floats_that_json_lacks_survive(value: float) -> None:
    """CASES 114: finite rewards may sum up to infinity, and the run must still be resumed."""
    progress = Progress(raw_rewards_sum={"a": value}, window_marks={"a": [value, 1.0]}, produce_time_s={"inf": value})
    raw = encode_progress(progress)
    found, _ = decode_progress(raw)
    given: list[float] = [found.raw_rewards_sum["a"], found.window_marks["a"][0], found.produce_time_s["inf"]]
    for each in given:
        assert type(each) is float
        assert str(each) == str(value)
        assert math.copysign(1, each) == math.copysign(1, value) or math.isnan(value)
    assert encode_progress(found) == raw


def test_a_value_of_another_type_is_an_error_at_the_save_and_not_at_the_load() -> None:
    wrong: Any = {"a": "many"}
    with pytest.raises(msgspec.ValidationError, match=r"\$\.target_samples"):
        encode_progress(Progress(target_samples=wrong))


def test_restoring_in_place_keeps_the_object_that_everybody_holds() -> None:
    held = Progress()
    saved = full()
    restore_in_place(held, saved)
    assert held == saved
    assert held is not saved
    for field in Progress.__struct_fields__:
        assert getattr(held, field) == getattr(saved, field)


def test_the_deficit_is_what_was_asked_and_is_neither_trained_nor_there() -> None:
    progress = Progress(target_samples={"a": 12}, consumed_samples={"a": 8})
    assert [progress.deficit("a", available) for available in (0, 3, 4, 9)] == [4, 1, 0, 0]
    assert progress.deficit("new", 0) == 0


def test_counting_makes_a_new_dict() -> None:
    before = {"a": 1}
    assert add_counts(before, ["a", "b", "a"]) == {"a": 3, "b": 1}
    assert before == {"a": 1}
