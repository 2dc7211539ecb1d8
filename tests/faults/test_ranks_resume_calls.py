"""An error in any function that one rank calls while ranks resume: all raise, at once and with its name, and nothing is
changed on any of them; or all go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.distributed import Ranks
from pipeline.errors import RankFailed
from pipeline.replay import ReplayBuffer, TrajectoryBuffer
from tests.support.failing_calls import Calls, Injected, watch_what_is_agreed
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
Buffer = ReplayBuffer | TrajectoryBuffer
_calls: dict[int, Calls] = {}  # of the rank that is looked at


def transitions(directory: Path, ranks: Ranks, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(60, directory=directory, ranks=ranks, select="prioritized", seed=2, **options)
    buffer.attach(counter=Counter())
    return buffer


def in_any_order(directory: Path, ranks: Ranks) -> ReplayBuffer:
    return transitions(directory, ranks, remove="lowest_priority")


def trajectories(directory: Path, ranks: Ranks) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(directory=directory, ranks=ranks, sample_window_size=3, cache_size=2, seed=2)
    buffer.attach(counter=Counter())
    return buffer


def add(buffer: Buffer, rank: int, step: int) -> None:
    if isinstance(buffer, ReplayBuffer):
        uid = np.arange(12) + 1000 * rank + 100 * step
        buffer.extend({"uid": uid, "done": uid % 5 == 4})
    else:
        for each in range(3):
            buffer.add_trajectories([{"uid": np.full((2 + each, 1), 1000 * rank + 100 * step + each)}])


def plain(buffer: Buffer) -> Any:
    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: of(each) for name, each in value.items()}
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return of(buffer.state_dict())


def saved(directory: Path, make: Callable[..., Any], size: int) -> Path:
    def train(ranks: Ranks) -> None:
        with make(directory, ranks) as buffer:
            buffer.resume()
            for step in (1, 2):
                add(buffer, ranks.rank, step)
                buffer.save(step, wait=True)

    fine(on_ranks(size, train))
    return directory


class Attempt(NamedTuple):
    """What came of a resume."""

    failed: bool
    """Whether there was an error in the function, on the rank that is looked at."""
    errors: list[Any]
    """What each rank raised."""


def lives(
    directory: Path, make: Callable[..., Any], how: dict[str, Any], victim: int, attempts: Sequence[Calls]
) -> tuple[list[Attempt], list[Any]]:
    """Resume on two ranks, of which one is looked at, again and again as long as it fails; and once more, if it always
    did. Return what came of each attempt, and what was there on each rank in the end."""

    def go_on(ranks: Ranks) -> tuple[list[Any], Any]:
        errors: list[Any] = []
        with make(directory, ranks) as buffer:
            before = plain(buffer)
            for calls in attempts:
                error: Any = None
                if ranks.rank == victim:
                    _calls[victim] = calls
                try:
                    buffer.resume(**how)
                except Exception as raised:
                    error = raised
                _calls.pop(ranks.rank, None)
                errors.append(error)
                if not any(ranks.all("tests: how", error is not None)):
                    break
                assert plain(buffer) == before, f"rank {ranks.rank} was changed: {error!r}"
            else:
                buffer.resume(**how)
            after = plain(buffer)
            ranks.all("tests: looked")
            return errors, after

    (first, own), (second, other) = fine(on_ranks(2, go_on))
    tried = zip(attempts, first, second, strict=False)
    return [Attempt(calls.failed, list(errors)) for calls, *errors in tried], [own, other]


CASES: list[Any] = [
    (make, size, how)
    for make in (transitions, in_any_order, trajectories)
    for size, how in ((2, {}), (2, {"rebalance": True}), (3, {}), (2, {"step": 1}), (2, {"allow_partial": True}))
    if not (make is in_any_order and "allow_partial" in how)
]


@pytest.mark.parametrize(
    ("make", "size", "how"),
    CASES,
    ids=[f"{make.__name__}-{size}-{'-'.join(how) or 'newest'}" for make, size, how in CASES],
)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.timeout(600)
def test_an_error_of_one_rank_is_one_of_all_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], size: int, how: Any, victim: int
) -> None:
    begun = saved(tmp_path / "run", make, size)
    watch_what_is_agreed(monkeypatch, _calls.get)
    number = 0

    def life(*attempts: Calls) -> tuple[list[Attempt], list[Any]]:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        found = lives(folder, make, how, victim, attempts)
        shutil.rmtree(folder)
        return found

    seen = Calls()
    attempts, expected = life(seen)
    assert attempts == [Attempt(False, [None, None])]
    codes = list(seen.seen)
    codes = codes if SOAK else codes[(victim + 3 * CASES.index((make, size, how))) % 11 :: 11]
    failures = 0
    while codes:
        attempts, found = life(*map(Calls, codes))
        assert found == expected, [code.co_qualname for code in codes[: len(attempts)]]
        if len(attempts) > 1 and not attempts[-1].failed:  # what is called in the first attempt alone
            attempts.pop()
        for code, attempt in zip(codes, attempts, strict=False):
            assert attempt.failed, code.co_qualname
            if attempt.errors == [None, None]:  # it was taken for less than an error
                continue
            failures += 1
            own, other = attempt.errors[victim], attempt.errors[1 - victim]
            assert isinstance(own, Injected) or isinstance(own.__context__, Injected), (code.co_qualname, own)
            assert isinstance(other, RankFailed), (code.co_qualname, other)
            assert f"rank {victim} failed" in str(other), (code.co_qualname, other)
        codes = codes[len(attempts) :]
    assert failures > 3
