"""What is drawn from a saved buffer that is looked at is what the buffer itself would have drawn next, whatever its
selection looks at; and of the rows only those that are drawn are kept."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pipeline import ConfigError, ReplayBuffer, UsageError
from pipeline.buffer.transitions import drawing, elsewhere, unread_sums
from pipeline.buffer.transitions.uses import Uses
from pipeline.buffer.transitions.windows import EpisodeWindow
from pipeline.replay import looked
from pipeline.replay.looked import LookedRing
from pipeline.tools import sample_run
from tests.support.looked import KINDS, SELECTIONS, change, draw, rows, seen

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
SEEDS = range(200) if SOAK else range(6)


def lived(directory: str, select: Mapping[str, Any], kind: Mapping[str, Any], seed: int, capacity: int) -> None:
    """A buffer that was filled, drawn from, changed and saved, some of it several times."""
    rng = np.random.default_rng(seed)
    with ReplayBuffer(capacity, directory=directory, select=select, seed=seed, **kind) as buffer:
        buffer.resume()
        for step in range(int(rng.integers(1, 4))):
            for _ in range(int(rng.integers(1, 7))):
                envs = int(rng.integers(1, 4))
                count = envs * int(rng.integers(1, 12))
                version = int(rng.integers(0, 2 + 3 * step))
                buffer.extend(rows(rng, count, big="compress" in kind), envs=envs, version=version)
                if rng.random() < 0.2:
                    buffer.end_episode()
            for _ in range(int(rng.integers(0, 3))):
                if rng.random() < 0.5:
                    change(buffer, rng)
                draw(buffer, int(rng.integers(1, 9)))
            buffer.save(step, wait=True)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "AT_ONCE", 8)
    monkeypatch.setattr(unread_sums, "_AT_ONCE", 16)
    monkeypatch.setattr(looked, "_SPAN", 300)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_comes_next_is_drawn(run_directory: str, selection: str, kind: str) -> None:
    select, options = SELECTIONS[selection], KINDS[kind]
    for seed in SEEDS:
        capacity = 10 + 17 * (seed % 5)
        directory = f"{run_directory}/{seed}"
        lived(directory, select, options, seed, capacity)
        found = seen(directory)
        assert isinstance(found.ring, LookedRing)
        with ReplayBuffer(capacity, directory=directory, select=select, seed=seed, **options) as real:
            real.resume()
            assert len(found) == len(real)
            for count in (1, 5, 3, 10, 2, 7):
                assert draw(found, count) == draw(real, count), (seed, count)


def test_rows_that_are_not_drawn_are_not_kept(run_directory: str) -> None:
    for number, select in enumerate(SELECTIONS.values()):
        directory = f"{run_directory}/{number}"
        with ReplayBuffer(50_000, directory=directory, select=select) as buffer:
            buffer.resume()
            for version in range(5):
                buffer.extend(rows(np.random.default_rng(version), 10_000, big=False), version=version)
            buffer.save(1, wait=True)
        found = seen(directory)
        draw(found, 4)
        assert found.ring.storage.view("obs").any(axis=1).sum() < 4_000


def test_the_newest_of_episodes_whose_first_rows_are_gone(run_directory: str) -> None:
    """They are known by the keys that these had, not by those of the rows that are left."""
    for capacity in (9, 10, 11):
        directory, select = f"{run_directory}/{capacity}", {"select": "uniform", "window_trajectories": 2}
        with ReplayBuffer(capacity, directory=directory, select=select) as buffer:
            buffer.resume()
            buffer.extend({"obs": np.arange(40)}, envs=4)
            buffer.save(1, wait=True)
            found = seen(directory)
            drawn = [each.sample(30).episodes.tolist() for each in (found, buffer)]
        assert drawn[0] == drawn[1]
        assert set(drawn[0]) == {2, 3}


def test_an_epoch_that_begins_anew_is_of_the_seed_that_was_saved(run_directory: str) -> None:
    """Where rows were dropped, nothing of the order before is left."""
    select = {"select": "without_replacement", "uses": 2}
    with ReplayBuffer(50, directory=run_directory, select=select, seed=7, incomplete="drop") as buffer:
        buffer.resume()
        buffer.extend({"number": np.arange(40), "done": np.arange(40) % 9 == 0})
        buffer.sample(3)
        buffer.save(1, wait=True)
    found = seen(run_directory)
    with ReplayBuffer(50, directory=run_directory, select=select, seed=7, incomplete="drop") as real:
        real.resume()
        assert draw(found, 20) == draw(real, 20)


def test_few_of_many_compressed_rows(run_directory: str) -> None:
    """Their block is read whole, and what is not drawn is not kept."""
    with ReplayBuffer(3000, directory=run_directory, compress={"big": "zlib"}, select="prioritized") as buffer:
        buffer.resume()
        buffer.extend({"big": np.arange(3000 * 1200).reshape(3000, 30, 40) % 251, "number": np.arange(3000)})
        buffer.save(1, wait=True)
        found = seen(run_directory)
        assert draw(found, 3) == draw(buffer, 3)
    assert found.ring.storage.view("number").astype(bool).sum() < 3 * 16


@pytest.mark.parametrize("select", SELECTIONS.values())
def test_no_more_rows_are_listed_at_a_time_than_are_read(
    run_directory: str, select: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nearly all rows were drawn as often as they may be, too."""
    monkeypatch.setattr(drawing, "AT_ONCE", 64)
    with ReplayBuffer(4000, directory=run_directory, select=select) as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), 4000, big=False), envs=4)
        for _ in range(3):
            if "uses" in select and "window_trajectories" not in select:
                draw(buffer, 3960)
        buffer.save(1, wait=True)
        expected = [draw(buffer, count) for count in (3, 8, 2, 100)]
    listed: list[int] = []
    for place, name in ((Uses, "left"), (EpisodeWindow, "holds")):
        own: Any = getattr(place, name)

        def noted(self: Any, keys: np.ndarray, *more: Any, real: Any = own) -> np.ndarray:
            listed.append(len(keys))
            found: np.ndarray = real(self, keys, *more)
            return found

        monkeypatch.setattr(place, name, noted)
    assert [draw(seen(run_directory), 3), draw(found := seen(run_directory), 3)] == 2 * expected[:1]
    assert [draw(found, count) for count in (8, 2, 100)] == expected[1:]
    assert max(listed, default=0) <= 1024


@pytest.mark.parametrize("length", [1, 3])
def test_next_observations_that_are_kept_aside_stay_where_they_are(run_directory: str, length: int) -> None:
    """Of short episodes these are as much as the rows."""
    number = np.arange(3000)
    given = {"obs": number[:, None] * np.ones((1, 400)), "next_obs": -number[:, None] * np.ones((1, 400))}
    with ReplayBuffer(3000, directory=run_directory, share_next_obs=True) as buffer:
        buffer.resume()
        buffer.extend({**given, "done": number % length == 0})
        buffer.save(1, wait=True)
        tracemalloc.start()
        found = seen(run_directory)
        drawn = draw(found, 4)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert drawn == draw(buffer, 4)
    assert most < 7_000_000  # of more than 9.6 MB; 4 MB of a file are compared with its manifest at a time


def test_more_rows_than_there_is_memory(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(1000, directory=run_directory, select="prioritized") as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(0), 1000, big=False))
        buffer.save(1, wait=True)
        expected = draw(buffer, 9)
    monkeypatch.setattr("pipeline.buffer.transitions.memory.available_memory", lambda: 1000)
    assert draw(seen(run_directory), 9) == expected
    with pytest.raises(ConfigError, match="bytes of memory are needed"):
        ReplayBuffer(1000, schema=buffer.ring.storage.schema)


def test_sequences_are_refused(run_directory: str) -> None:
    lived(run_directory, {"select": "uniform"}, {}, 1, 50)
    with pytest.raises(UsageError, match="one by one"):
        seen(run_directory).sample(2, n_step=3, gamma=0.9)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_is_read_is_told(run_directory: str, selection: str) -> None:
    with ReplayBuffer(3000, directory=run_directory, select=SELECTIONS[selection]) as buffer:
        buffer.resume()
        buffer.extend(rows(np.random.default_rng(1), 3000, big=False), version=3)
        draw(buffer, 5)
        buffer.save(1, wait=True)
    told: list[tuple[int, int]] = []
    sample_run(run_directory, 8, told=lambda *each: told.append(each))
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1
    assert sorted(done) == list(done)
    assert 0.6 * totals[0] < done[-1] <= totals[0]
