"""Who is drawn next: shares are kept to within one draw, whatever the shares and however many the tasks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sampler.mixture import Mixture

SHARES = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.one_of(st.integers(1, 1000).map(float), st.floats(0.001, 1000), st.sampled_from([1 / 3, 0.1, 0.2, 1e-6, 1e6])),
    min_size=1,
    max_size=12,
)


def draws(mixture: Mixture, count: int, candidates: list[str] | None = None) -> list[str]:
    """Draw ``count`` times."""
    names = []
    for _ in range(count):
        name = mixture.next(candidates if candidates is not None else mixture.shares)
        assert name is not None
        mixture.count(name)
        names.append(name)
    return names


def mixture_of(shares: Mapping[str, float]) -> Mixture:
    mixture = Mixture()
    mixture.set_shares(shares)
    return mixture


@given(SHARES)
@settings(max_examples=80)
def test_after_any_number_of_draws_each_has_its_share_to_within_one(shares: dict[str, float]) -> None:
    mixture, total = mixture_of(shares), sum(shares.values())
    for number in range(1, 200):
        draws(mixture, 1)
        for name, share in shares.items():
            assert abs(mixture.drawn[name] - number * share / total) < 1 + 1e-6, (number, name, mixture.drawn)


def test_one_large_share_among_many_small_ones_does_not_crowd_them_out() -> None:
    mixture = mixture_of({"large": 50, **{f"small {n}": 1 for n in range(50)}})
    first = draws(mixture, 50)
    assert first.count("large") == 25
    assert mixture.drawn["large"] == 25


def test_whole_shares_come_in_whole_rounds() -> None:
    mixture = mixture_of({"a": 3, "b": 1})
    assert draws(mixture, 8) == ["a", "a", "a", "b"] * 2
    mixture = mixture_of({"a": 1, "b": 1, "c": 1})
    assert draws(mixture, 6) == ["a", "b", "c"] * 2


@given(SHARES.filter(lambda shares: len(shares) > 2), st.integers(0, 100), st.data())
@settings(max_examples=60)
def test_a_task_that_has_ended_leaves_its_place_to_the_others_at_once(
    shares: dict[str, float], before: int, data: st.DataObject
) -> None:
    mixture = mixture_of(shares)
    draws(mixture, before)
    ended = data.draw(st.sampled_from(sorted(shares)))
    rest = [name for name in shares if name != ended]
    at_end = dict(mixture.drawn)
    names = draws(mixture, 300, rest)
    assert ended not in names
    total = sum(shares[name] for name in rest)
    drawn = sum(at_end[name] for name in rest) + 300
    for name in rest:
        owed = drawn * shares[name] / total
        assert mixture.drawn[name] >= min(owed - 1 - 1e-6, at_end[name] + 300)
        assert mixture.drawn[name] <= max(owed + 1 + 1e-6, at_end[name])


def test_asking_changes_nothing() -> None:
    mixture = mixture_of({"a": 2, "b": 1})
    assert {mixture.next(["a", "b"]) for _ in range(10)} == {"a"}
    assert mixture.drawn == {"a": 0, "b": 0}
    assert mixture.next([]) is None


def test_counts_begin_anew_when_the_shares_change() -> None:
    """A task that is added late does not have to catch up on all that went before it."""
    mixture = mixture_of({"a": 1, "b": 1})
    draws(mixture, 100)
    mixture.set_shares({"a": 1, "b": 1, "c": 2})
    names = draws(mixture, 40)
    assert [names.count(name) for name in "abc"] == [10, 10, 20]
    assert names[:4].count("c") == 2


def test_a_task_that_is_not_in_the_mixture_is_counted_nowhere() -> None:
    mixture = mixture_of({"a": 1})
    mixture.count("gone")
    assert mixture.drawn == {"a": 1 - 1}


@pytest.mark.parametrize("count", [10**6])
def test_the_schedule_does_not_drift_in_a_long_run(count: int) -> None:
    mixture = mixture_of({"a": 0.1, "b": 0.2, "c": 0.7})
    mixture.drawn = {"a": count // 10, "b": count // 5, "c": count * 7 // 10}
    names = draws(mixture, 1000)
    assert [names.count(name) for name in "abc"] == [100, 200, 700]
