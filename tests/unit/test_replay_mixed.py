"""One batch out of several buffers, by weights, and what is learned from it goes back to where its rows came from."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import (
    Anneal,
    ClosedError,
    ConfigError,
    Limiter,
    MixedBatch,
    MixedReplay,
    Prioritized,
    ReplayBuffer,
    Slices,
    Starved,
    TimedOut,
    UsageError,
    WithoutReplacement,
)
from pipeline.replay import mixed as mixed_module
from tests.support.replay import as_likely, everything, filled, probabilities, rows

PRIORITIZED = Prioritized(alpha=1, beta=Anneal(start=0.5, end=1, over=7))


def two(weights: tuple[Any, Any] = (3, 1), **options: Any) -> MixedReplay:
    """Rows 0 to 20 in the first buffer, 100 to 150 in the second."""
    online, offline = filled(20, 20, seed=1), ReplayBuffer(50, returns="numpy", seed=2)
    offline.extend(rows(50, 100))
    return MixedReplay({"online": (online, weights[0]), "offline": (offline, weights[1])}, **options)


# -- sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "count", "expected"),
    [((3, 1), 8, [6, 2]), ((3, 1), 10, [8, 2]), ((1, 1), 3, [2, 1]), ((0.1, 0.9), 5, [1, 4]), ((0, 2), 4, [0, 4])],
)
def test_a_batch_is_split_to_the_largest_remainder(weights: Any, count: int, expected: list[int]) -> None:
    mixed = two(weights)
    for _ in range(3):
        batch = mixed.sample(count)
        assert batch.sources.tolist() == [0] * expected[0] + [1] * expected[1]
        assert ((batch["id"] >= 100) == batch.is_of("offline")).all()
        assert (batch.keys == batch["id"] - 100 * batch.sources).all()
    assert mixed.statistics().drawn == {"online": 3 * expected[0], "offline": 3 * expected[1]}
    assert mixed.statistics().batches == 3


def test_a_split_at_random_is_that_of_single_rows() -> None:
    mixed = two((3, 1), split="random", seed=4)
    sizes = np.array([mixed.sample(2).is_of("online").sum() for _ in range(4000)])
    assert as_likely(sizes, [1 / 16, 6 / 16, 9 / 16])
    batch = mixed.sample(30_000)
    shares = np.r_[np.full(20, 0.75 / 20), np.full(50, 0.25 / 50)]
    assert as_likely(np.where(batch.is_of("online"), batch.keys, batch.keys + 20), shares)


def test_weights_move_with_the_batches() -> None:
    mixed = two((Anneal(start=0, end=1, over=4), Anneal(start=1, end=0, over=4)))
    assert [mixed.sample(8).is_of("online").sum() for _ in range(6)] == [0, 2, 4, 6, 8, 8]
    assert mixed.statistics().shares == {"online": 1, "offline": 0}


def test_everything_that_can_be_asked_of_a_buffer_can_be_asked_of_several() -> None:
    mixed = two((1, 1))
    batch = mixed.sample(12, n_step=3, gamma=0.5, stack=1, where={"id": [(">", 4), ("<", 110)]})
    assert batch["reward"].shape == batch.discount.shape == batch.steps.shape == (12,)
    assert ((batch["id"] > 4) & (batch["id"] < 110)).all()
    slices = mixed.sample(12, slices=Slices(length=3, pad=True))
    assert slices["id"].shape == slices.mask.shape == slices.versions.shape == (12, 3)
    assert (slices["id"][:, 0] == slices.keys + 100 * slices.sources).all()
    assert list(mixed.sample(4, columns=["id"])) == ["id"]


def test_a_batch_gives_out_tensors_and_comes_back_from_its_state() -> None:
    batch = two().sample(8).torch()
    assert isinstance(batch["id"], torch.Tensor)
    assert batch.weights.tolist() == [1] * 8
    again = MixedBatch.restored(batch.state(), "torch")
    assert torch.equal(again["id"], batch["id"])
    assert again.sources.tolist() == batch.sources.tolist()
    assert set(batch.to("cpu")) == {"id", "reward", "truncated", "weights"}


def test_columns_must_be_the_same_or_those_in_common_are_given() -> None:
    online, offline = filled(5), ReplayBuffer(5, returns="numpy")
    offline.extend({"id": np.arange(5), "reward": np.ones(5, np.float32), "expert": np.ones(5)})
    sources: Any = {"online": (online, 1), "offline": (offline, 1)}
    with pytest.raises(ConfigError, match="differ in expert, truncated; columns='common'"):
        MixedReplay(sources).sample(4)
    batch = MixedReplay(sources, columns="common").sample(4)
    assert set(batch) == {"id", "reward"}
    assert (online.statistics().sampled, offline.statistics().sampled) == (2, 2)
    other = ReplayBuffer(5)
    other.extend({"id": np.arange(5, dtype=np.int32)})
    with pytest.raises(ConfigError, match=r"id: int64\[\] in source online, id: int32\[\] in other"):
        MixedReplay({"online": (online, 1), "other": (other, 1)}, columns="common").sample(2)
    with pytest.raises(ConfigError, match="no columns yet"):
        MixedReplay({"online": (online, 1), "empty": (ReplayBuffer(5), 1)}).sample(2)


def test_what_cannot_be_had_of_one_source_is_drawn_of_none() -> None:
    mixed = two((1, 1))
    mixed.sources["offline"].clear()
    mixed.sources["offline"].extend(rows(3, 100))
    before = {name: everything(buffer) for name, buffer in mixed.sources.items()}
    for more in ({"slices": Slices(length=60)}, {"columns": ["other"]}, {"where": {"other": 1}}, {"n_step": 2}):
        with pytest.raises(ConfigError):
            mixed.sample(4, **more)
    waiting = filled(5, limiter=Limiter(min_size=9))
    held = MixedReplay({"a": (mixed.sources["online"], 1), "b": (waiting, 1)})
    with pytest.raises(TimedOut):
        held.sample(4)
    assert not held.can_sample(4)
    assert {name: everything(buffer) for name, buffer in mixed.sources.items()} == before
    with pytest.raises(Starved):
        mixed.sample(4, slices=Slices(length=4), where={"id": (">", 50)})
    assert mixed.statistics().batches == held.statistics().batches == 0


@pytest.mark.parametrize(
    ("sources", "options", "said"),
    [
        ({}, {}, "at least one source"),
        ({"a": 3}, {}, "a ReplayBuffer, its weight"),
        ({"a": (None, 1)}, {}, "a ReplayBuffer, its weight"),
        ({"a": -1}, {}, "from 0 to"),
        ({"a": float("nan")}, {}, "from 0 to"),
        ({"a": "x"}, {}, "numbers are needed"),
        ({"a": 0}, {}, "all of them are 0 after 0 batches"),
        ({"a": Anneal(start=1, end=0, over=3)}, {}, "all of them are 0 after 3 batches"),
        ({"a": 1}, {"split": "half"}, "split"),
        ({"a": 1}, {"columns": "any"}, "columns"),
        ({"a": 1}, {"read_only": "b"}, "the sources are a"),
        ({"a": 1}, {"other": 1}, "no option 'other'"),
        ({"a": 1}, {"seed": -1}, "seed"),
    ],
)
def test_what_is_no_mixture_is_refused(sources: dict[str, Any], options: dict[str, Any], said: str) -> None:
    given = {name: each if each in (3, (None, 1)) else (filled(3), each) for name, each in sources.items()}
    with pytest.raises(ConfigError, match=said):
        MixedReplay(given, **options)


def test_a_buffer_is_one_source() -> None:
    buffer = filled(3)
    with pytest.raises(ConfigError, match="twice"):
        MixedReplay({"a": (buffer, 1), "b": (buffer, 1)})


# -- priorities ------------------------------------------------------------------------------------------------


def prioritized(**options: Any) -> MixedReplay:
    buffers = {name: filled(4, 4, select=PRIORITIZED, seed=at) for at, name in enumerate("abc")}
    return MixedReplay({name: (buffer, 1) for name, buffer in buffers.items()}, **options)


def test_priorities_go_to_the_source_of_each_row() -> None:
    mixed = prioritized()
    plain = filled(4)
    mixed = MixedReplay({**{name: (each, 1) for name, each in mixed.sources.items()}, "d": (plain, 1)})
    batch = mixed.sample(200)
    mixed.sources["b"].extend(rows(1, 4))
    applied = mixed.update_priorities(batch, 1 + batch.keys + 10 * batch.sources).applied
    assert (applied == (batch.sources < 3) & ~((batch.sources == 1) & (batch.keys == 0))).all()
    for at, name in enumerate("ac"):
        expected = 1 + np.arange(4) + 20.0 * at
        assert np.allclose(probabilities(mixed.sources[name]), expected / expected.sum())


def test_a_priority_that_comes_too_late_is_given_to_no_row_of_any_source() -> None:
    mixed = prioritized()
    batch = mixed.sample(200)
    for source in mixed.sources.values():
        source.extend(rows(4, 4))
    updated = mixed.update_priorities(batch, np.full(200, 100.0))
    assert updated.stale == 200
    for source in mixed.sources.values():
        assert probabilities(source) == [0.25] * 4


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf, 1e308])
def test_bad_priorities_change_nothing(wrong: float) -> None:
    mixed = prioritized()
    batch = mixed.sample(9)
    values = np.ones(9)
    values[-1] = wrong
    alone: Any = mixed.sources["a"].sample(9)
    before = {name: everything(buffer) for name, buffer in mixed.sources.items()}
    with pytest.raises(ConfigError):
        mixed.update_priorities(batch, values)
    with pytest.raises(ConfigError):
        mixed.update_priorities(batch, values[:-1])
    with pytest.raises(ConfigError, match="that this mixture sampled"):
        mixed.update_priorities(alone, np.ones(9))
    assert {name: everything(buffer) for name, buffer in mixed.sources.items()} == before


def test_a_source_that_is_read_only_takes_no_priorities() -> None:
    mixed = prioritized(read_only="b")
    batch = mixed.sample(30)
    applied = mixed.update_priorities(batch, np.full(30, 5.0)).applied
    assert (applied == ~batch.is_of("b")).all()
    assert probabilities(mixed.sources["b"]) == [0.25] * 4


# -- state -----------------------------------------------------------------------------------------------------

OFFLINE: dict[str, Any] = {
    "uniform": "uniform",
    "epochs": WithoutReplacement(),
    "uses": WithoutReplacement(uses=20),
    "prioritized": PRIORITIZED,
}


def life(directory: Path, select: Any, split: str) -> tuple[ReplayBuffer, MixedReplay]:
    online = ReplayBuffer(30, directory=directory, select=PRIORITIZED, seed=1, returns="numpy")
    offline = ReplayBuffer(100, select=select, seed=2, returns="numpy")
    offline.extend(rows(100, 1000))
    weights = Anneal(start=0.2, end=0.8, over=9), 0.5
    sources: Any = {"online": (online, weights[0]), "offline": (offline, weights[1])}
    mixed = MixedReplay(sources, read_only=("offline",), split=split, seed=3)
    online.attach(mixed=mixed)
    return online, mixed


def train(online: ReplayBuffer, mixed: MixedReplay, first: int, steps: int) -> list[Any]:
    found = []
    for step in range(first, first + steps):
        online.extend(rows(5, 5 * step), version=step)
        batch = mixed.sample(8)
        mixed.update_priorities(batch, 1 + batch["id"] % 7)
        found.append([batch.sources.tolist(), batch.keys.tolist(), batch["id"].tolist(), batch.weights.tolist()])
    return found


@pytest.mark.parametrize("split", ["exact", "random"])
@pytest.mark.parametrize("select", OFFLINE)
def test_a_mixture_that_is_attached_goes_on_as_if_it_had_not_stopped(tmp_path: Path, select: str, split: str) -> None:
    online, mixed = life(tmp_path, OFFLINE[select], split)
    with online:
        train(online, mixed, 0, 12)
        online.save(12, wait=True)
        state = mixed.statistics()
        expected = train(online, mixed, 12, 20)
    online, mixed = life(tmp_path, OFFLINE[select], split)
    with online:
        assert online.resume(continue_episodes=True).step == 12
        assert mixed.statistics() == state
        assert train(online, mixed, 12, 20) == expected


def test_a_state_of_other_rows_is_refused_and_nothing_changes() -> None:
    mixed, other = (two(read_only="offline", split="random") for _ in range(2))
    mixed.sample(5)
    state = mixed.state_dict()
    other.sources["offline"].extend(rows(1, 150))
    before = other.state_dict()
    with pytest.raises(UsageError, match="added is 51 now, and was 50"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="offline was saved otherwise"):
        two().load_state_dict(state)
    for broken in ({}, {**state, "generator": {}}, {**state, "batches": -1}, {**state, "read_only": {"offline": {}}}):
        with pytest.raises(ConfigError):
            other.load_state_dict(broken)
    assert str(other.state_dict()) == str(before)


def test_a_batch_that_could_not_be_had_takes_no_throw() -> None:
    one, other = two((1, 1), split="random", seed=4), two((1, 1), split="random", seed=4)
    for _ in range(8):
        with pytest.raises(ConfigError):
            one.sample(9, columns=["none"])
        assert one.sample(9).sources.tolist() == other.sample(9).sources.tolist()


# -- others at the same time -----------------------------------------------------------------------------------


def test_who_gives_up_takes_nothing_back_of_what_others_drew() -> None:
    limiter = Limiter(min_size=1, ratio=1.0, error_buffer=40.0)
    buffer = filled(20, 20, limiter=limiter)
    mixed = MixedReplay({"a": (buffer, 1)}, split="random")
    ended: list[BaseException] = []

    def ask() -> None:
        try:
            mixed.sample(61, timeout=None)
        except ClosedError as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not buffer.gate.waiters:
        os.sched_yield()
    mixed.sample(4)
    buffer.close()
    asking.join()
    assert len(ended) == 1
    assert mixed.statistics().batches == 1
    assert mixed.statistics().drawn == {"a": 4}


def test_timed_out_means_that_nothing_was_drawn_whoever_is_quicker() -> None:
    limiter = Limiter(min_size=1, ratio=1.0, error_buffer=4.0)
    buffers = {name: filled(5, 5, limiter=limiter) for name in "ab"}
    mixed = MixedReplay({name: (buffer, 1) for name, buffer in buffers.items()})
    taken: list[int] = []

    def take() -> None:
        if buffers["b"].gate.lock.acquire(blocking=False):
            taken.append(len(buffers["b"].sample(5)))
            buffers["b"].gate.lock.release()

    def meanwhile(reward: Any) -> Any:
        """Another thread samples of the second source while the first one is drawn from."""
        if len(reward) > 1:
            other = threading.Thread(target=take)
            other.start()
            other.join()
        return np.ones(len(reward), bool)

    before = {name: everything(buffer) for name, buffer in buffers.items()}
    try:
        assert len(mixed.sample(8, where=meanwhile)) == 8
    except TimedOut:
        assert everything(buffers["a"]) == before["a"], "the first source was drawn from"
    assert not taken


def test_the_timeout_is_that_of_all_sources_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = 100.0, []
    monkeypatch.setattr(mixed_module, "time", SimpleNamespace(monotonic=lambda: now))
    buffers = {name: filled(5, limiter=Limiter(min_size=9), timeout=7.0) for name in "ab"}
    mixed = MixedReplay({name: (buffer, 1) for name, buffer in buffers.items()})

    def wait(count: int, timeout: float | None) -> None:
        nonlocal now
        waited.append(timeout)
        if not timeout:
            raise TimedOut("too late")
        now += 3.0

    for buffer in buffers.values():
        monkeypatch.setattr(buffer, "wait_to_sample", wait)
    for given, expected in (({"timeout": 5.0}, [5.0, 2.0, 0.0]), ({}, [7.0, 4.0, 1.0, 0.0]), ({"timeout": 0}, [0.0])):
        with pytest.raises(TimedOut):
            mixed.sample(4, **given)
        assert waited == expected
        waited.clear()


def test_two_mixtures_of_the_same_buffers_wait_for_each_other_and_never_for_ever() -> None:
    buffers = {name: filled(20, 20) for name in "abc"}
    orders = ("abc", "cba", "bca", "acb")
    mixtures = [MixedReplay({name: (buffers[name], 1) for name in order}) for order in orders]

    def sample(mixed: MixedReplay) -> None:
        for _ in range(60):
            assert len(mixed.sample(6)) == 6
            with buffers["b"].gate.lock:
                mixed.state_dict()

    with ThreadPoolExecutor(len(mixtures)) as pool:
        list(pool.map(sample, mixtures))
    assert [mixed.statistics().batches for mixed in mixtures] == [60] * 4


def test_priorities_that_one_source_refuses_are_written_to_none() -> None:
    first, second = (filled(4, 4, select=PRIORITIZED, seed=seed) for seed in (1, 2))
    mixed = MixedReplay({"first": (first, 1), "second": (second, 1)})
    batch = mixed.sample(8)
    with pytest.raises(ConfigError, match="priorities"):
        mixed.update_priorities(batch, [5.0] * 7 + [1e308])
    assert probabilities(first) == probabilities(second) == [0.25] * 4
