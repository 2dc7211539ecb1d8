"""Rows of which others than the oldest go first, on another number of ranks: each goes by itself, by its age."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pipeline import Prioritized, Ranks, ReplayBuffer
from pipeline.buffer.transitions.layout import CUT, END, EPISODE, OPEN
from pipeline.checkpoint import verify
from pipeline.errors import ConfigError, RankFailed, UsageError
from tests.support.ranks import fine, on_ranks
from tests.unit.test_replay_removers import REMOVERS

PAIRS = [(1, 2), (2, 1), (4, 3), (3, 4)]
SELECTS: dict[str, Any] = {"uniform": "uniform", "prioritized": Prioritized(alpha=0.7, beta=0.4, new="current_max")}
CHOICES = {
    f"{name}-{kind}": (remove, select)
    for name, remove in REMOVERS.items()
    for kind, select in SELECTS.items()
    if (remove, select) != ("lowest_priority", "uniform")  # which has no priorities
}
CAPACITY = 23


def made(directory: Path, ranks: Ranks, remove: Any, capacity: int = 100, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, directory=directory, seed=3, remove=remove, ranks=ranks, **options)


def rows(rank: int, first: int, count: int) -> dict[str, Any]:
    """Rows whose columns follow from their number, which no other row has."""
    number = 1000 * rank + np.arange(first, first + count)
    return {
        "n": number,
        "image": np.repeat(number % 251, 2048).astype(np.uint8).reshape(count, 32, 64),
        "score": (number * 37 % 101).astype(np.float32),
        "value": number / 8,
        "terminated": number % 7 == 6,
    }


def fill(buffer: ReplayBuffer, rank: int, first: int, count: int) -> None:
    for begin in range(first, first + count, 5):
        size = min(5, first + count - begin)
        keys = np.array(buffer.extend(rows(rank, begin, size), version=begin * 7 % 5, env=begin % 3))
        if buffer.drawer.takes_priorities:
            buffer.update_priorities(keys, 1 + np.arange(begin, begin + size) % 11)


def held(buffer: ReplayBuffer) -> dict[int, tuple[Any, ...]]:
    """What there is of each row, by its number, oldest first."""
    ring = buffer.ring
    if ring.storage.schema is None:
        return {}
    keys = ring.keys()
    slots = ring.slots(keys)
    names = ("n", "score", "value", "terminated", "#version")
    columns = [ring.storage.view(name)[slots].tolist() for name in names]
    image = ring.storage.view("image")[slots][:, 31, 63].tolist()
    assert image == [number % 251 for number in columns[0]]
    mass = np.round(buffer.drawer.mass(keys), 9).tolist()
    ends = ring.storage.view(END)[slots].tolist()
    return {row[0]: row for row in zip(*columns, mass, ends, strict=True)}


def save_some(directory: Path, size: int, remove: Any, select: Any) -> list[dict[int, tuple[Any, ...]]]:
    """Have ranks save, of more rows than there is room for, some of them changed; return by rank what each holds."""

    def train(ranks: Ranks) -> Any:
        with made(directory, ranks, remove, CAPACITY, select=select) as buffer:
            buffer.resume()
            fill(buffer, ranks.rank, 0, 14 + 9 * ranks.rank)
            buffer.save(1, wait=True)
            fill(buffer, ranks.rank, 100, 8)
            changed = buffer.ring.keys()[::3]
            buffer.write_back(changed, {"value": changed + 0.5})
            buffer.save(2, wait=True)
            return held(buffer)

    return fine(on_ranks(size, train))


def resumed(
    directory: Path, size: int, remove: Any, select: Any, capacity: int = 100, **how: Any
) -> list[dict[int, tuple[Any, ...]]]:
    """Have ranks take back what was saved; return by rank what each holds."""

    def go_on(ranks: Ranks) -> Any:
        with made(directory, ranks, remove, capacity, select=select) as buffer:
            found = buffer.resume(**how)
            there = held(buffer)
            assert found.rows == len(buffer) == len(there)
            if len(buffer):
                drawn = buffer.sample(40)["n"].tolist()
                assert set(drawn) <= there.keys()
            if there:
                number, marks = (buffer.ring.storage.view(name)[: len(buffer)] for name in ("n", EPISODE))
                assert marks.max() < buffer.ring.episodes.next
                makers = {(mark, n // 1000) for mark, n in zip(marks.tolist(), number.tolist(), strict=True)}
                assert len(makers) == len(set(marks.tolist()))  # no two ranks' episodes have become one
            return there

    return fine(on_ranks(size, go_on))


def whole(of: list[dict[int, tuple[Any, ...]]]) -> dict[int, tuple[Any, ...]]:
    """All rows, each of which is there once; how they end aside, as environments begin anew."""
    assert len({number for each in of for number in each}) == sum(map(len, of))
    return {number: row[:-1] for each in of for number, row in each.items()}


@pytest.mark.parametrize(("remove", "select"), CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_rows_are_shared_out_one_by_one_the_oldest_first(
    tmp_path: Path, before: int, after: int, remove: Any, select: Any
) -> None:
    saved = save_some(tmp_path, before, remove, select)
    found = resumed(tmp_path, after, remove, select)
    assert whole(found) == whole(saved)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    # How old a row is, is how many its rank had added before it.
    added = {number: at for rank in range(before) for at, number in enumerate(all_added(rank))}
    aged = sorted(whole(saved), key=lambda number: (added[number], number // 1000))
    assert [list(each) for each in found] == [aged[rank::after] for rank in range(after)]


def all_added(rank: int) -> list[int]:
    """The numbers of all rows that a rank has added, in their order."""
    return [1000 * rank + number for number in [*range(14 + 9 * rank), *range(100, 108)]]


@pytest.mark.parametrize("remove", ["lifo", REMOVERS["min"]], ids=["lifo", "min"])
def test_as_many_ranks_take_their_own_or_share_out_anew_and_it_does_not_matter_where_rows_have_been(
    tmp_path: Path, remove: Any
) -> None:
    select = SELECTS["prioritized"]
    saved = save_some(tmp_path, 4, remove, select)
    own = resumed(tmp_path, 4, remove, select, capacity=CAPACITY)
    assert [list(each) for each in own] == [list(each) for each in saved]
    assert whole(own) == whole(saved)
    at_once = resumed(tmp_path, 4, remove, select, rebalance=True)

    def through(ranks: Ranks) -> None:
        with made(tmp_path, ranks, remove, select=select) as buffer:
            buffer.resume()
            buffer.save(2, wait=True)

    for size in (3, 1, 2):
        fine(on_ranks(size, through))
        assert verify(str(tmp_path)).whole
    assert resumed(tmp_path, 4, remove, select) == at_once


@pytest.mark.parametrize("remove", REMOVERS.values(), ids=REMOVERS)
def test_ranks_go_on_and_what_they_save_comes_back_to_the_last_bit(tmp_path: Path, remove: Any) -> None:
    select = SELECTS["prioritized"]
    save_some(tmp_path, 2, remove, select)

    def go_on(ranks: Ranks) -> Any:
        with made(tmp_path, ranks, remove, CAPACITY, select=select) as buffer:
            buffer.resume()
            count = buffer.ring.added
            fill(buffer, 5 + ranks.rank, 0, 31)
            assert len(buffer) == CAPACITY
            assert buffer.ring.added == count + 31
            buffer.save(3, wait=True)
            return held(buffer), [buffer.sample(8)["n"].tolist() for _ in range(5)]

    def back(ranks: Ranks) -> Any:
        with made(tmp_path, ranks, remove, CAPACITY, select=select) as buffer:
            assert buffer.resume().step == 3
            return held(buffer), [buffer.sample(8)["n"].tolist() for _ in range(5)]

    then, found = fine(on_ranks(3, go_on)), fine(on_ranks(3, back))
    assert whole([rows for rows, _ in found]) == whole([rows for rows, _ in then])
    assert [draws for _, draws in found] == [draws for _, draws in then]
    others = resumed(tmp_path, 2, remove, select)
    assert whole(others) == whole([rows for rows, _ in then])
    for each in others:  # what came later is younger
        assert [number >= 5000 for number in each] == sorted(number >= 5000 for number in each)
    assert verify(str(tmp_path)).whole


def test_open_episodes_end_where_they_are(tmp_path: Path) -> None:
    saved = save_some(tmp_path, 2, "lifo", "uniform")
    found = resumed(tmp_path, 3, "lifo", "uniform")
    before = {number: row[-1] for each in saved for number, row in each.items()}
    after = {number: row[-1] for each in found for number, row in each.items()}
    changed = {number for number in after if after[number] != before[number]}
    assert {before[number] for number in changed} <= {OPEN}
    assert {after[number] for number in changed} <= {CUT}


def test_too_many_rows_are_an_error_or_the_oldest_go(tmp_path: Path) -> None:
    saved = whole(save_some(tmp_path, 3, "lifo", "uniform"))

    def refused(ranks: Ranks) -> None:
        with made(tmp_path, ranks, "lifo", 20) as buffer, pytest.raises(ConfigError, match="capacity=20"):
            buffer.resume()

    fine(on_ranks(2, refused))
    found = resumed(tmp_path, 2, "lifo", "uniform", capacity=20, evict_oldest=True)
    assert list(map(len, found)) == [20, 20]
    assert whole(found).items() <= saved.items()


def test_what_was_counted_of_rows_that_were_not_kept_adds_up(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> tuple[int, int]:
        with made(tmp_path, ranks, "lifo", 10) as buffer:
            buffer.resume()
            buffer.extend(rows(ranks.rank, 0, 25))
            buffer.save(1, wait=True)
            return buffer.ring.not_kept, buffer.ring.added

    def go_on(ranks: Ranks) -> tuple[int, int]:
        with made(tmp_path, ranks, "lifo", 10) as buffer:
            buffer.resume()
            return buffer.ring.not_kept, buffer.ring.added

    assert fine(on_ranks(2, train)) == [(15, 25)] * 2
    assert fine(on_ranks(3, go_on)) == [(10, 17), (10, 17), (10, 16)]


def test_another_order_than_before_is_refused(tmp_path: Path) -> None:
    save_some(tmp_path, 2, "lifo", "uniform")

    def refused(ranks: Ranks) -> None:
        with (
            made(tmp_path, ranks, "fifo") as buffer,
            pytest.raises((UsageError, RankFailed), match="saved with remove='lifo'"),
        ):
            buffer.resume()

    fine(on_ranks(3, refused))


def test_rows_that_were_saved_without_names_get_them_from_as_many_ranks(tmp_path: Path) -> None:
    """As by a version before."""
    with mock.patch("pipeline.replay.rank_saver.values_of_rows", return_value={}):
        saved = save_some(tmp_path, 2, "lifo", "uniform")

    def refused(ranks: Ranks) -> None:
        with (
            made(tmp_path, ranks, "lifo") as buffer,
            pytest.raises((ConfigError, RankFailed), match="as many ranks as saved them"),
        ):
            buffer.resume()

    fine(on_ranks(3, refused))

    def through(ranks: Ranks) -> None:
        with made(tmp_path, ranks, "lifo", CAPACITY) as buffer:
            buffer.resume()
            buffer.save(2, wait=True)

    fine(on_ranks(2, through))
    assert whole(resumed(tmp_path, 3, "lifo", "uniform")) == whole(saved)
