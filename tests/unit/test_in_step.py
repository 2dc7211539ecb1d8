"""Streams of ids as one, whatever is read of them at a time."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.tools import in_step
from pipeline.tools.in_step import Step

Ints = np.ndarray


class Listed:
    """Ids in memory, of which nothing is read beyond the end."""

    def __init__(self, *columns: Ints) -> None:
        self._columns = columns
        self.most = 0

    def __len__(self) -> int:
        return len(self._columns[0])

    def ids(self, begin: int, count: int) -> tuple[Ints, ...]:
        assert begin + count <= len(self)
        self.most = max(self.most, count)
        return tuple(each[begin : begin + count] for each in self._columns)


def streams_of(rng: np.random.Generator) -> list[Listed]:
    found = []
    for _ in range(rng.integers(0, 5)):
        count = int(rng.choice([0, 1, 3, 40]))
        first = np.sort(rng.integers(0, rng.choice([1, 5, 60]), count))
        found.append(Listed(first, rng.integers(0, 3, count), rng.integers(0, 3, count)))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_as_if_all_had_been_sorted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(in_step, "AT_ONCE", int(rng.choice([1, 2, 7, 1000])))
    streams = streams_of(rng)
    steps = list(in_step.in_step(streams))
    rows = [
        (*(int(column[at]) for column in stream.ids(0, len(stream))), run, at)
        for run, stream in enumerate(streams)
        for at in range(len(stream))
    ]
    found = [
        (*ids, run, at)
        for step in steps
        for *ids, run, at in zip(*(each.tolist() for each in (*step.ids, step.run, step.at)), strict=True)
    ]
    assert found == sorted(rows)
    assert [step.begin for step in steps] == np.cumsum([0, *(len(step.run) for step in steps)]).tolist()[:-1]
    firsts = [set(step.ids[0].tolist()) for step in steps]
    assert sum(map(len, firsts)) == len(set[int]().union(*firsts))  # what is equal there comes together
    for run in range(len(streams)):
        check_follows(steps, run, len(streams[run]))


def check_follows(steps: list[Step], run: int, count: int) -> None:
    """Of one stream the rows of each step follow those of the step before."""
    end = 0
    for step in steps:
        begin, own = step.of_run(run)
        if len(own):
            assert begin == end
            assert step.at[own].tolist() == list(range(begin, begin + len(own)))
            assert (step.run[own] == run).all()
            end += len(own)
    assert end == count


def test_of_many_streams_together_no_more_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_step, "AT_ONCE", 40)
    streams = [Listed(np.arange(1000) * 4 + number) for number in range(4)]
    steps = list(in_step.in_step(streams))
    assert {each.most for each in streams} == {10}
    assert max(len(step.run) for step in steps) <= 80
