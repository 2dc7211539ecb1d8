"""The rows of a state that somebody gives back, checked before one of them is put anywhere.

Blocks on the disk have checksums; what :meth:`~pipeline.ReplayBuffer.state_dict` gave may have come any way. What is
wrong raises ``ValueError`` or ``LookupError``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.buffer.transitions.blocks import KEPT_MARKS
from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.given import distinct, wholes
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, MARKS, OPEN, PLACE, VERSION
from pipeline.config.replay import MOST_ROWS
from pipeline.replay.arguments import MOST_VERSION
from pipeline.replay.state import BufferState

Ints = np.ndarray


def check_rows(state: BufferState, rows: Mapping[str, np.ndarray], *, scattered: bool) -> None:
    """Refuse rows that are not those of a state.

    Args:
        state: all but the rows; it was checked.
        rows: columns and marks [size, ...], oldest first.
        scattered: whether they lie in any order, and none knows its neighbours.

    Raises:
        ValueError, LookupError: a column is missing, or of another dtype or shape; or marks contradict each other.
    """
    if state.schema is None:
        if rows or state.size:
            raise ValueError(f"{state.size} rows, and {', '.join(map(repr, sorted(rows))) or 'nothing'} of no columns")
        return
    columns = {each.name: each for each in state.schema.columns}
    columns |= {name: Column(name, MARKS[name].name) for name in KEPT_MARKS}
    if rows.keys() != columns.keys():
        raise LookupError(f"rows have {', '.join(sorted(rows))}; {', '.join(sorted(columns))} are needed")
    for name, column in columns.items():
        _check_column(column, rows[name], state.size)
    ends = wholes(END, rows[END], OPEN, CUT)
    wholes(VERSION, rows[VERSION], 0, MOST_VERSION)
    wholes(EPISODE, rows[EPISODE], 0, state.next_episode - 1)
    wholes(PLACE, rows[PLACE], 0, MOST_ROWS)
    behind = wholes(BEHIND, rows[BEHIND], 0, 0 if scattered else MOST_ROWS).astype(np.int64)
    if not scattered:
        _check_order(state, rows[EPISODE], rows[PLACE], ends, behind)


def _check_column(column: Column, array: np.ndarray, count: int) -> None:
    if isinstance(array, np.ndarray) and array.dtype == object and not column.name.startswith("#"):  # packed rows
        if array.shape != (count,) or not all(isinstance(each, bytes) for each in array.tolist()):
            raise ValueError(f"{column}: {list(array.shape)} packed rows; {count} are needed")
        return
    if not isinstance(array, np.ndarray) or array.dtype != column.bits or array.shape != (count, *column.shape):
        given = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{column}: {given} is given; {count} rows of it are needed")


def _check_order(state: BufferState, episodes: Ints, places: Ints, ends: Ints, behind: Ints) -> None:
    """Refuse rows of which not every episode is one chain, and open episodes that end elsewhere."""
    first, count = state.added - state.size, state.size
    before = np.arange(count) - behind
    led = (behind > 0) & (before >= 0)
    rows, last = np.flatnonzero(led), before[led]
    wrong = rows[(episodes[rows] != episodes[last]) | (places[rows] != places[last] + 1) | (ends[last] != OPEN)]
    if len(wrong):
        raise ValueError(f"row {first + wrong[0]} is said to follow row {first + before[wrong[0]]}, and does not")
    followed = np.bincount(last, minlength=count) if count else np.zeros(0, np.int64)
    if (followed > 1).any():
        raise ValueError(f"row {first + int(followed.argmax())} is said to be followed by several")
    if ((places == 0) & (behind > 0)).any():
        raise ValueError("the first row of an episode is said to follow another one")
    distinct("the first rows of episodes", episodes[~led])
    for key in (*state.cut_keys, *state.truncated_keys):
        if key >= first and followed[key - first]:
            raise ValueError(f"an episode is said to have been cut with row {key}, and goes on")
    for env, key, number, place in state.open_episodes:
        if key < first:
            there = bool((episodes == number).any())
        else:
            at = key - first
            there = (episodes[at], places[at], ends[at], followed[at]) != (number, place, OPEN, 0)
        if there:
            raise ValueError(f"environment {env}: its open episode {number} does not end with row {key}")
