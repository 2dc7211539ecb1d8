"""Rows of tokens as tensors for a trainer: padded, or packed to a budget of tokens, and shared out evenly over ranks.

Nothing is cut: a row that does not fit is an error. Nothing is random: the same rows give the same tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from pipeline.errors import ConfigError
from tasks.llm.rows import TokenRow


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one forward and backward pass takes. With R sequences side by side in T tokens:

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64: of each token in its own row, from 0.
        sequence_ids: [1, T] int64: which of the R a token is of, from 0; -1 in the padding at the end.
        cu_seqlens: [R + 1] int32: where each row begins, and the last one ends, for attention kernels that take rows
            of different lengths.
        completion_mask: [1, T] bool: what is trained on.
        old_log_probs: [1, T] float32.
        advantages: [1, T] float32: that of the token's row where ``completion_mask`` is set, else 0.
        rows: the R rows.
        loss_tokens: how many tokens are trained on.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    completion_mask: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    rows: tuple[TokenRow, ...]
    loss_tokens: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: each for name, each in msgspec.structs.asdict(self).items() if isinstance(each, torch.Tensor)}


def padded(
    rows: Sequence[TokenRow], *, pad_id: int = 0, side: str = "right", multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Return n rows one below the other, [n, L], L the longest of them, rounded up.

    ``input_ids``, ``attention_mask`` and ``position_ids`` are int64, ``completion_mask`` is bool, ``old_log_probs`` and
    ``advantages`` float32: 0 where nothing is trained on. Beside them stand ``lengths`` and ``group`` int64 [n], and
    ``rewards`` float32 [n].

    Args:
        rows: of :func:`tasks.llm.token_rows`; there may be none.
        pad_id: what ``input_ids`` is filled with.
        side: where the filling goes, ``right`` or ``left``.
        multiple_of: L is one.

    Raises:
        ConfigError: an argument is out of range.
    """
    if side not in ("right", "left"):
        raise ConfigError.of("side", side, "right or left is needed")
    _whole("multiple_of", multiple_of)
    longest = _rounded(max((len(row) for row in rows), default=0), multiple_of)
    shape = (len(rows), longest)
    out = {
        "input_ids": torch.full(shape, pad_id, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "completion_mask": torch.zeros(shape, dtype=torch.bool),
        "old_log_probs": torch.zeros(shape),
        "advantages": torch.zeros(shape),
    }
    for place, row in enumerate(rows):
        here = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        out["attention_mask"][place, here] = 1
        out["position_ids"][place, here] = torch.arange(len(row))
        for name, values in _of_tokens(row).items():
            out[name][place, here] = values
    out["lengths"] = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    out["group"] = torch.tensor([row.group for row in rows], dtype=torch.int64)
    out["rewards"] = torch.tensor([row.reward for row in rows], dtype=torch.float32)
    return out


def packed(
    rows: Sequence[TokenRow], *, tokens: int, at_least: int = 1, pad_id: int = 0, multiple_of: int = 1
) -> list[MicroBatch]:
    """Return the rows in micro-batches of at most ``tokens`` tokens each: as few as they fit into, about equally long.

    Args:
        rows: of :func:`tasks.llm.token_rows`.
        tokens: the budget.
        at_least: how many micro-batches there are to be, if that is more: what another rank needs, say.
        pad_id: what ``input_ids`` is filled with up to ``multiple_of``.
        multiple_of: the length of each is one; the budget is, too.

    Raises:
        ConfigError: a row is longer than the budget, or there are fewer rows than micro-batches are to be.
    """
    _whole("at_least", at_least)
    parts = _shared_out(rows, tokens, at_least, multiple_of)
    return [_side_by_side([rows[at] for at in part], pad_id, multiple_of) for part in parts]


def micro_batches(
    rows: Sequence[TokenRow], *, tokens: int, ranks: int, pad_id: int = 0, multiple_of: int = 1
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each of ``ranks`` ranks, equally many for all of them, none empty.

    Every rank calls this with all rows of the step, and takes its own. A rank that has rows of its own alone agrees
    with the others on the number instead: ``packed(own, tokens=..., at_least=most)``.

    Raises:
        ConfigError: as :func:`packed`.
    """
    _whole("ranks", ranks)
    parts = _shared_out(rows, tokens, ranks, multiple_of)
    while len(parts) % ranks:  # evenly long ones may need one more than there is a multiple of
        parts = _shared_out(rows, tokens, _rounded(len(parts), ranks), multiple_of)
    made = [_side_by_side([rows[at] for at in part], pad_id, multiple_of) for part in parts]
    return [made[rank::ranks] for rank in range(ranks)]


def _shared_out(rows: Sequence[TokenRow], tokens: int, at_least: int, multiple_of: int) -> list[list[int]]:
    """Return which rows go together: the longest first, each to the shortest part that there is.

    If a row finds no room there is one part more, and all begin anew; with as many parts as rows there is room.
    """
    _whole("tokens", tokens)
    _whole("multiple_of", multiple_of)
    if tokens % multiple_of:
        raise ConfigError.of("tokens", tokens, f"a multiple of multiple_of={multiple_of} is needed")
    lengths = [len(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda at: (-lengths[at], at))
    if order and lengths[order[0]] > tokens:
        row = rows[order[0]]
        raise ConfigError(
            f"trace {row.trace} of member {row.member} of uid {row.uid}: {len(row)} tokens, and tokens={tokens} at "
            "once. Nothing is cut: raise tokens=, bound the length where rollouts are made, or leave the row out",
            option="tokens",
        )
    if len(rows) < at_least and (rows or at_least > 1):
        raise ConfigError(
            f"{at_least} micro-batches are needed of {len(rows)} rows, and none may be empty; ask for more groups, or "
            "for fewer ranks",
            option="rows",
        )
    count = max(at_least, -(-sum(lengths) // tokens))
    while rows:
        parts = _filled(order, lengths, tokens, count)
        if parts is not None:
            return [sorted(part) for part in parts]
        count += 1
    return []


def _filled(order: Sequence[int], lengths: Sequence[int], tokens: int, count: int) -> list[list[int]] | None:
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]  # tokens, rows, number
    for at in order:
        used, rows, number = heap[0]
        if used + lengths[at] > tokens:
            return None  # the shortest has no room, so none has
        parts[number].append(at)
        heapq.heapreplace(heap, (used + lengths[at], rows + 1, number))
    return parts


def _side_by_side(rows: Sequence[TokenRow], pad_id: int, multiple_of: int) -> MicroBatch:
    lengths = [len(row) for row in rows]
    used = sum(lengths)
    filling = _rounded(used, multiple_of) - used
    columns: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        for name, values in _of_tokens(row).items():
            columns.setdefault(name, []).append(values)
    found: dict[str, Any] = {name: _filled_up(torch.cat(each), filling, 0) for name, each in columns.items()}
    if filling:
        found["input_ids"][0, used:] = pad_id
    sequences = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths, dtype=torch.int64))
    return MicroBatch(
        position_ids=_filled_up(torch.cat([torch.arange(each) for each in lengths]), filling, 0),
        sequence_ids=_filled_up(sequences, filling, -1),
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        rows=tuple(rows),
        loss_tokens=int(found["completion_mask"].sum()),
        **found,
    )


def _of_tokens(row: TokenRow) -> dict[str, torch.Tensor]:
    return {
        "input_ids": row.input_ids,
        "completion_mask": row.completion_mask,
        "old_log_probs": row.old_log_probs,
        "advantages": row.completion_mask * torch.tensor(row.advantage, dtype=torch.float32),
    }


def _filled_up(values: torch.Tensor, filling: int, with_: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, filling), value=with_)[None]


def _rounded(count: int, multiple_of: int) -> int:
    return -(-count // multiple_of) * multiple_of


def _whole(option: str, value: Any) -> None:
    if value.__class__ is not int or value < 1:
        raise ConfigError.of(option, value, "a whole number of at least 1 is needed")
