"""Rows come by their episodes, also where those that wait are more than may be held."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.errors import StoreError, WriteFailed
from pipeline.store import rearranged
from pipeline.tools.interchange import by_episode
from pipeline.tools.interchange.by_episode import episodes
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.streams import END, EPISODE, KEY, PLACE, RANK, About, Rows, Transitions, joined
from tests.support.disk import no_space

SCHEMA = Schema((Column("image", "uint8", (2, 3)), Column("none", "float32", (0,)), Column("value", "bfloat16")))


def rows_of(keys: np.ndarray, episode: np.ndarray, end: np.ndarray, rank: np.ndarray | None) -> Rows:
    columns: Arrays = {
        "image": (keys[:, None, None] + np.arange(6).reshape(2, 3)).astype(np.uint8),
        "none": np.zeros((len(keys), 0), np.float32),
        "value": keys.astype(np.uint16),
    }
    marks = {KEY: keys, EPISODE: episode, END: end.astype(np.uint8)}
    return Rows(columns, marks if rank is None else {**marks, RANK: rank.astype(np.int32)})


def stream_of(parts: list[Rows], most: int | None = None) -> Transitions:
    return Transitions(SCHEMA, tuple(parts[0].marks), About(), lambda: iter(parts), most=most)


def by_chance(seed: int, ranks: bool) -> list[Rows]:
    """Rows of several episodes at a time, of which some end, and some go on though they did."""
    rng = np.random.default_rng(seed)
    parts, key = [], 0
    for _ in range(int(rng.integers(1, 30))):
        count = int(rng.integers(0, 25))
        keys = key + np.arange(count)
        key += count
        of = rng.integers(0, 12, count) + key // 40 * (1 << [2, 40, 50][seed % 3])
        end = np.where(rng.random(count) < 0.1, rng.integers(1, 4, count), 0)
        parts.append(rows_of(rng.permutation(keys), of, end, rng.integers(0, 3, count) if ranks else None))
    return parts


def as_they_end(parts: list[Rows]) -> list[list[int]]:
    """The keys of what is to come, one row after the other."""
    found: list[list[int]] = []
    held: dict[Any, list[int]] = {}
    for rows in parts:
        ranks = rows.marks.get(RANK, np.zeros(len(rows), np.int32))
        names = list(zip(ranks.tolist(), rows.marks[EPISODE].tolist(), strict=True))
        for name, key in zip(names, rows.marks[KEY].tolist(), strict=True):
            held.setdefault(name, []).append(key)
        last = {name: at for at, name in enumerate(names)}
        found += [held.pop(name) for name, at in sorted(last.items(), key=lambda each: each[1]) if rows.marks[END][at]]
    return found + list(held.values())


@pytest.mark.parametrize("ranks", [False, True], ids=["one", "ranks"])
@pytest.mark.parametrize(("held", "window"), [(1 << 26, 8), (0, 1), (0, 8), (9000, 8), (40_000, 3), (0, 1 << 18)])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_held(
    tmp_path: Path, seed: int, held: int, window: int, ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_episode, "_MOST_HELD", held)
    monkeypatch.setattr(rearranged, "_WINDOW", window)
    parts = by_chance(seed, ranks)
    count = sum(map(len, parts))
    found = list(episodes(stream_of(parts, [None, count, 3 * count][seed % 3]), str(tmp_path)))
    assert [rows.marks[KEY].tolist() for rows in found] == as_they_end(parts), seed
    if found:
        whole, every = joined(found), joined(parts)
        order = np.argsort(every.marks[KEY])[whole.marks[KEY]]
        for own, given in ((whole.columns, every.columns), (whole.marks, every.marks)):
            assert own.keys() == given.keys()
            for name, array in own.items():
                assert (array.dtype, array.shape) == (given[name].dtype, given[name].shape)
                assert array.tobytes() == given[name][order].tobytes()
        assert all(rows.columns["value"].flags.writeable for rows in found)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("held", "window"), [(1 << 26, 8), (0, 3), (9000, 8)])
@pytest.mark.parametrize("seed", range(12))
def test_rows_in_any_order_come_in_that_of_their_places(
    tmp_path: Path, seed: int, held: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_episode, "_MOST_HELD", held)
    monkeypatch.setattr(rearranged, "_WINDOW", window)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 40)
    episode = np.repeat(np.arange(40), lengths)
    place = np.arange(len(episode)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    end = (place + 1 == lengths[episode]) * (episode % 3)
    there = rng.permutation(np.flatnonzero(rng.random(len(episode)) < 0.7))  # some are gone, ends among them
    rank = episode % 2 if seed % 2 else None
    every = rows_of(np.arange(len(episode)), episode, end, rank)
    every = Rows(every.columns, {**every.marks, PLACE: place}).part(there)
    parts = [every.part(slice(begin, begin + 11)) for begin in range(0, len(there), 11)]
    found = list(episodes(stream_of(parts, len(there))._replace(scattered=True), str(tmp_path)))
    expected = []
    for number in np.unique(episode[there]).tolist():
        own = np.sort(there[episode[there] == number])
        came = {row: at for at, row in enumerate(there.tolist())}
        first = (0, came[int(own[-1])]) if end[own[-1]] else (1, min(came[row] for row in own.tolist()))
        expected.append((first, own.tolist()))
    assert [rows.marks[KEY].tolist() for rows in found] == [own for _, own in sorted(expected)]


def test_of_a_pool_whose_rows_were_written_again_an_episode_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", 200)
    with ReplayBuffer(40, directory=tmp_path / "run", remove={"by": "min", "field": "worth"}) as buffer:
        buffer.resume()
        for begin in range(0, 120, 8):
            t = np.arange(begin, begin + 8)
            buffer.extend({"t": t, "worth": t * 7 % 31, "terminated": t % 30 == 29})
            buffer.save(begin, wait=True)
    stream = transitions_of(open_run(str(tmp_path / "run")))
    came = joined(list(stream.batches()))
    assert (np.diff(came.columns["t"]) < 0).any()  # rows of blocks that had lost many were written again
    found = list(episodes(stream, str(tmp_path)))
    assert len({int(rows.marks[EPISODE][0]) for rows in found}) == len(found)
    assert all((np.diff(rows.columns["t"]) > 0).all() for rows in found)
    assert sorted(t for rows in found for t in rows.columns["t"].tolist()) == sorted(came.columns["t"].tolist())


def endless(batches: int, count: int) -> Iterator[Rows]:
    """Rows of which none ends its episode; an episode has two, and they come together."""
    for first in range(0, batches * count, count):
        keys = np.arange(first, first + count)
        columns: Arrays = {
            "image": np.zeros((count, 2, 3), np.uint8),
            "none": np.zeros((count, 0), np.float32),
            "value": keys.astype(np.uint16),
        }
        yield Rows(columns, {KEY: keys, EPISODE: keys // 2, END: np.zeros(count, np.uint8)})


def test_what_is_held_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no episode ends."""
    monkeypatch.setattr(by_episode, "_MOST_HELD", 1 << 18)
    monkeypatch.setattr(rearranged, "_WINDOW", 1 << 10)

    def peak(batches: int) -> int:
        stream = Transitions(SCHEMA, (KEY, EPISODE, END), About(), lambda: endless(batches, 1000), most=batches * 1000)
        tracemalloc.start()
        try:
            for number, rows in enumerate(episodes(stream, str(tmp_path))):
                assert rows.marks[KEY].tolist() == [2 * number, 2 * number + 1]
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(40) < 1.25 * peak(10)


def test_episodes_that_end_are_held_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, nothing waits on the disk."""
    monkeypatch.setattr(by_episode, "_MOST_HELD", 1 << 16)
    numbers = np.arange(4000)
    every = rows_of(numbers, numbers // 5, (numbers % 5 == 4) * 1, None)
    parts = [every.part(slice(begin, begin + 7)) for begin in range(0, 4000, 7)]
    found = list(episodes(stream_of(parts), str(tmp_path / "none")))
    assert [rows.marks[KEY][-1] for rows in found] == list(range(4, 4000, 5))


def test_a_full_disk_and_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_episode, "_MOST_HELD", 0)
    parts = [rows_of(np.arange(9), np.arange(9), np.zeros(9), None)]
    with pytest.raises(WriteFailed, match=f"{tmp_path}/none"):
        list(episodes(stream_of(parts), str(tmp_path / "none")))

    def refused(*_: Any) -> Any:
        raise no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refused)
        with pytest.raises(StoreError, match=f"{tmp_path}: "):
            list(episodes(stream_of(parts), str(tmp_path)))
    monkeypatch.setattr(os, "pwrite", refused)
    with pytest.raises(WriteFailed, match="No space left"):
        list(episodes(stream_of(parts), str(tmp_path)))
