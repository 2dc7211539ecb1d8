"""Packed rows are the rows, and every rank has as many micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import ConfigError
from tasks.llm import MicroBatch, TokenRow, micro_batches, packed

BUDGET = 16
LENGTHS = st.lists(st.integers(0, BUDGET), max_size=24)


def row(number: int, length: int) -> TokenRow:
    mask = torch.arange(length) % 3 == 1
    return TokenRow(
        input_ids=torch.arange(length) + 1000 * number,
        completion_mask=mask,
        old_log_probs=-torch.arange(length, dtype=torch.float32) - number,
        advantage=float(number),
        reward=0.0,
        uid=number,
        member=0,
        trace=0,
        group=number,
    )


def rows_of(lengths: Sequence[int]) -> list[TokenRow]:
    return [row(number, length) for number, length in enumerate(lengths)]


def check(found: Sequence[MicroBatch], rows: Sequence[TokenRow], multiple_of: int = 1) -> None:
    """Look whether micro-batches hold the rows, each once and whole, and nothing else."""
    assert sorted(each.uid for micro in found for each in micro.rows) == [each.uid for each in rows]
    for micro in found:
        assert micro.rows
        size = micro.input_ids.shape[1]
        assert size % multiple_of == 0
        assert size <= BUDGET
        assert all(each.shape == (1, size) for name, each in micro.tensors().items() if name != "cu_seqlens")
        ends = micro.cu_seqlens.tolist()
        assert len(ends) == len(micro.rows) + 1
        assert size - ends[-1] < multiple_of
        assert micro.sequence_ids[0, ends[-1] :].tolist() == [-1] * (size - ends[-1])
        assert not micro.completion_mask[0, ends[-1] :].any()
        for number, each in enumerate(micro.rows):
            here = slice(ends[number], ends[number + 1])
            assert torch.equal(micro.input_ids[0, here], each.input_ids)
            assert torch.equal(micro.position_ids[0, here], torch.arange(len(each)))
            assert (micro.sequence_ids[0, here] == number).all()
            assert torch.equal(micro.completion_mask[0, here], each.completion_mask)
            assert torch.equal(micro.old_log_probs[0, here], each.old_log_probs)
            assert torch.equal(micro.advantages[0, here], each.completion_mask * each.advantage)
        assert micro.loss_tokens == sum(int(each.completion_mask.sum()) for each in micro.rows)


@given(lengths=LENGTHS, at_least=st.integers(1, 6), multiple_of=st.sampled_from([1, 2, 8]))
def test_packed_rows_are_the_rows(lengths: list[int], at_least: int, multiple_of: int) -> None:
    rows = rows_of(lengths)
    if at_least > max(1, len(rows)):
        with pytest.raises(ConfigError, match=f"{at_least} micro-batches are needed of {len(rows)} rows"):
            packed(rows, tokens=BUDGET, at_least=at_least)
        return
    found = packed(rows, tokens=BUDGET, at_least=at_least, multiple_of=multiple_of)
    check(found, rows, multiple_of)
    assert not rows or len(found) >= at_least
    # No two of the parts would fit into one, unless so many were asked for: none is half empty for nothing.
    assert len(found) <= max(at_least, 2 * -(-sum(lengths) // BUDGET), 1)
    again = packed(rows, tokens=BUDGET, at_least=at_least, multiple_of=multiple_of)
    assert [[each.uid for each in micro.rows] for micro in again] == [[e.uid for e in m.rows] for m in found]


@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_every_rank_has_as_many_and_none_is_empty(lengths: list[int], ranks: int) -> None:
    rows = rows_of(lengths)
    budgets = math.ceil(sum(lengths) / BUDGET)
    fewest = max(1, math.ceil(budgets / ranks)) * ranks
    if fewest > max(1, len(rows)):
        with pytest.raises(ConfigError, match=f"of {len(rows)} rows, and none may be empty"):
            micro_batches(rows, tokens=BUDGET, ranks=ranks)
        return
    if len(rows) // ranks * ranks < len(packed(rows, tokens=BUDGET, at_least=fewest)):
        return  # so many micro-batches as are needed cannot be had of so few rows
    found = micro_batches(rows, tokens=BUDGET, ranks=ranks)
    assert len(found) == ranks
    assert len({len(each) for each in found}) == 1
    check([micro for each in found for micro in each], rows)


def test_a_row_that_does_not_fit_is_named_and_not_cut() -> None:
    rows = rows_of([3, BUDGET + 1])
    with pytest.raises(ConfigError, match=f"trace 0 of member 0 of uid 1: {BUDGET + 1} tokens, and tokens={BUDGET}"):
        packed(rows, tokens=BUDGET)
    with pytest.raises(ConfigError, match="tokens=15: a multiple of multiple_of=2"):
        packed(rows, tokens=15, multiple_of=2)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="tokens="):
            packed(rows, tokens=wrong)  # type: ignore[arg-type]


def test_the_filling_is_what_was_asked_for() -> None:
    (micro,) = packed(rows_of([3]), tokens=BUDGET, multiple_of=8, pad_id=7)
    assert micro.input_ids.tolist() == [[0, 1, 2, 7, 7, 7, 7, 7]]


def test_parts_are_about_equally_long() -> None:
    found = packed(rows_of([9, 8, 7, 6, 5, 4, 3, 2]), tokens=BUDGET, at_least=4)
    assert [micro.input_ids.shape[1] for micro in found] == [11, 11, 11, 11]
