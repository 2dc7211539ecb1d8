"""An error of one rank while a pipeline of ranks resumes is one of all, at once and with its name; no generation is
made of it, and the next life goes on as if nothing had been."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from pipeline import Pipeline, Ranks, UsageError
from pipeline.errors import RankFailed
from pipeline.sync_form import SyncPipeline
from pipeline.wiring import run
from tests.support.failing_calls import Calls, Injected, watch_what_is_agreed
from tests.support.ranked import manifests
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter
from tests.support.runs import task

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
_calls: dict[int, Calls] = {}  # of the rank that is looked at


def opened(ranks: Ranks, directory: Path) -> SyncPipeline:
    pipe = Pipeline(task(24), directory=str(directory), ranks=ranks, watchdog=None, seed=3, order="strict").sync()
    pipe.attach(counter=Counter())
    return pipe


def train(ranks: Ranks, directory: Path, steps: int = 2) -> list[int]:
    uids = []
    with opened(ranks, directory) as pipe:
        begun = pipe.resume()
        pipe.start(weights_current=True)
        for batch in pipe.batches(4, until=begun.step + steps):
            uids += [group.uid for group in batch]
        pipe.save(begun.step + steps).committed()
    return sorted(uids)


def check_told(errors: list[Any], victim: int, what: str) -> None:
    own, other = errors[victim], errors[1 - victim]
    assert isinstance(own, Injected) or isinstance(own.__context__, Injected), (what, own)
    assert isinstance(other, RankFailed), (what, other)
    assert f"rank {victim} failed" in str(other), (what, other)


class Refuses(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise Injected("load_state_dict")


def resume_all(directory: Path, victim: int | None = None, name: str = "", **how: Any) -> list[Any]:
    """Resume on two ranks, of which one fails in a method of its run, or in what it has attached; return what each
    raised."""

    def fail(*args: Any, **more: Any) -> Any:
        raise Injected(name)

    def go_on(ranks: Ranks) -> Any:
        with opened(ranks, directory) as pipe:
            if ranks.rank == victim and name == "load_state_dict":
                pipe.attach(counter=Refuses())
            elif ranks.rank == victim and name:
                setattr(pipe._run, name, fail)
            try:
                pipe.resume(**how)
            except Exception as error:
                return [error]
        return [None]

    return [each[0] for each in fine(on_ranks(2, go_on))]


def check_goes_on(directory: Path, generations: int) -> None:
    """No generation was made, and the next life goes on."""
    assert len(manifests(directory)) == generations
    trained = fine(on_ranks(2, lambda ranks: train(ranks, directory)))
    assert sorted(uid for each in trained for uid in each) == list(range(8, 16))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    fine(on_ranks(2, lambda ranks: train(ranks, tmp_path / "run")))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["load_state_dict", "check_sources", "_open_writer", "_bring", "require_open", "_look"]
)
@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_beside_what_ranks_agree_on_is_told_too(begun: Path, victim: int, name: str) -> None:
    generations = len(manifests(begun))
    check_told(resume_all(begun, victim, name), victim, name)
    check_goes_on(begun, generations)


@pytest.mark.parametrize("name", ["adopt", "settle", "load_for_filters"])
@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_while_it_is_put_in_use_makes_no_generation(
    begun: Path, monkeypatch: pytest.MonkeyPatch, victim: int, name: str
) -> None:
    wanted, generations = getattr(run, name), len(manifests(begun))
    failing = [True]

    def fail(state: Any, *args: Any) -> Any:
        if failing and state.options.rank == victim:
            raise Injected(name)
        return wanted(state, *args)

    monkeypatch.setattr(run, name, fail)

    def go_on(ranks: Ranks) -> Any:
        with opened(ranks, begun) as pipe:
            try:
                pipe.resume()
            except Exception as error:
                if ranks.rank == victim:  # half of it is in use
                    with pytest.raises(UsageError, match="in its midst"):
                        pipe.start(weights_current=True)
                return [error]

    check_told([each[0] for each in fine(on_ranks(2, go_on))], victim, name)
    failing.clear()
    check_goes_on(begun, generations)


@pytest.mark.parametrize("how", [{}, {"rebalance": True}, {"step": 0}], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.timeout(600)
def test_an_error_in_what_is_looked_at_is_one_of_all(
    tmp_path: Path, begun: Path, monkeypatch: pytest.MonkeyPatch, victim: int, how: dict[str, Any]
) -> None:
    watch_what_is_agreed(monkeypatch, _calls.get)

    def life(fails: CodeType | None) -> tuple[Calls, list[Any]]:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(begun, tmp_path / "copy")
        _calls[victim] = calls = Calls(fails)
        errors = resume_all(tmp_path / "copy", **how)
        _calls.clear()
        return calls, errors

    seen, errors = life(None)
    assert errors == [None, None]
    codes = list(seen.seen)
    failures = 0
    for code in codes if SOAK else codes[victim::9]:
        _, errors = life(code)
        if errors != [None, None]:
            failures += 1
            check_told(errors, victim, code.co_qualname)
    assert failures > 3
