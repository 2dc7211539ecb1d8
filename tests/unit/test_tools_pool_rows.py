"""What is said of a pool, of each of its rows, and what goes out of it, is what the pool held."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ConfigError, Fields
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.cli import main
from pipeline.errors import Damaged, WriteFailed
from pipeline.store.layout import Layout
from pipeline.tools import inspect, one_item, show_item
from pipeline.tools.exporting import export
from pipeline.tools.figures import Figures
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.streams import END, EPISODE, KEY, PLACE, PRIORITY, VERSION, Rows, joined
from tests.support.disk import no_space
from tests.support.pooled import CAPACITY, CHOICES, fill, in_pieces, made, play, wander

OPTIONS: list[dict[str, Any]] = [
    CHOICES["min-uniform"],
    CHOICES["lowest_priority-prioritized"],
    {**CHOICES["lifo-prioritized"], "compress": {"image": "zlib"}},
    {**CHOICES["stalest-uses"], "capacity": 41},
]
DTYPES = {"#episode": np.int64, "#place": np.int32, "#version": np.int32, "#end": np.uint8, "score": np.float32}
ENDS = {1: "terminated", 2: "truncated", 3: "left where it was"}


@pytest.fixture(params=[1, 3, 7, 1 << 18])
def small(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of so many rows."""
    in_pieces(monkeypatch, request.param, request.param + 1)
    return int(request.param)


@pytest.fixture(params=range(6))
def pool(request: Any, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A pool that was changed by chance, and what it held."""
    options = OPTIONS[request.param % len(OPTIONS)]
    return str(tmp_path / "a"), wander(tmp_path / "a", request.param, fields=Fields(reward="score"), **options)


def numbers(found: dict[str, Any], name: str) -> np.ndarray:
    return np.frombuffer(b"".join(found[name]), DTYPES[name])


def at_of(run: str) -> np.ndarray:
    """The places of rows on the disk, oldest first."""
    stored = saved(run)
    return np.fromfile(os.path.join(stored.folder, "values/pool.at.int64"), np.int64)


def saved(run: str) -> Stored:
    layout = Layout(run)
    of = layout.read_run()
    assert of is not None
    return find_generations(layout, of.run_id).complete[-1]


def test_what_is_said_of_all_rows(pool: tuple[str, dict[str, Any]], small: int) -> None:
    run, held = pool
    (found,) = inspect(run).buffers
    assert (found.rows, found.unread) == (len(held["key"]), 0)
    order = np.argsort(at_of(run))
    ends = numbers(held, "#end")[order]
    lengths = numbers(held, "#place")[order][ends != 0] + 1
    for figures, of in ((found.rewards, numbers(held, "score")[order]), (found.lengths, lengths)):
        expected = Figures.of(of)
        assert (figures.count, figures.least, figures.most) == (expected.count, expected.least, expected.most)
        assert figures.spread == expected.spread
        assert figures.mean == pytest.approx(expected.mean)
    assert found.ends == {ENDS[end]: count for end, count in sorted(Counter(ends.tolist()).items()) if end}
    versions = Counter(numbers(held, "#version").tolist())
    assert found.versions == {str(version): versions[version] for version in sorted(versions)}


def test_what_is_said_of_each_row(
    pool: tuple[str, dict[str, Any]], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_item, "FIRST", 1)
    run, held = pool
    for row in range(0, len(held["key"]), 3):
        item = show_item(run, held["key"][row])
        first = {each.name: each.first[0] for each in item.tensors}
        assert (first["run"], first["t"]) == held["id"][row]
        assert first["score"] == numbers(held, "score")[row]
        assert item.facts["episode"] == numbers(held, "#episode")[row]
        assert item.facts["version"] == numbers(held, "#version")[row]
        assert item.facts["end"] == ENDS.get(int(numbers(held, "#end")[row]), "it went on")
    gone = max(held["key"], default=0) + 1
    named = str(held["key"][:3]).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ConfigError, match=f"no row of this key is there, as {named} and others are"):
        show_item(run, gone)


def test_what_goes_out(pool: tuple[str, dict[str, Any]], small: int, tmp_path: Path) -> None:
    """All there is of each row, by their places on the disk; and again, as often as it is asked for."""
    run, held = pool
    stream = transitions_of(open_run(run), str(tmp_path))
    assert stream.total == len(held["key"])
    order = np.argsort(at_of(run)).tolist()
    for _ in range(2):
        batches = list(stream.batches())
        if not order:
            assert batches == []
            continue
        rows: Rows = joined(batches)
        assert rows.marks[KEY].tolist() == [held["key"][row] for row in order]
        for name in ("run", "t", "score", "value", "image", "terminated"):
            assert [each.tobytes() for each in rows.columns[name]] == [held[name][row] for row in order], name
        for name in (EPISODE, PLACE, VERSION, END):
            assert rows.marks[name].tolist() == numbers(held, name)[order].tolist(), name
        if PRIORITY in rows.marks:
            assert np.round(rows.marks[PRIORITY], 12).tolist() == [held["mass"][row] for row in order]
    assert (PRIORITY in stream.marks) == ("selector.priorities.float64" in os.listdir(f"{saved(run).folder}/values"))
    assert sorted(os.listdir(tmp_path)) == ["a"]


class TestDamaged:
    @pytest.fixture
    def run(self, tmp_path: Path) -> str:
        play(tmp_path / "a", 1, 60)
        return str(tmp_path / "a")

    def test_places_that_cannot_be(self, run: str, tmp_path: Path, capsys: Any) -> None:
        """Of the buffer nothing is said then but that; and nothing goes out."""
        path = os.path.join(saved(run).folder, "values/pool.at.int64")
        at = np.fromfile(path, np.int64)
        at[3] = at[4]
        at.tofile(path)
        found = inspect(run)
        assert (found.buffers, len(found.notes)) == ([], 1)
        assert "two of its rows are said to be one" in found.notes[0]
        with pytest.raises(Damaged, match=r"pool\.at\.int64"):
            export(run, tmp_path / "out", to="safetensors")
        assert main(["inspect", run]) == 0
        assert "two of its rows are said to be one" in "".join(capsys.readouterr())
        assert sorted(os.listdir(tmp_path)) == ["a"]

    def test_a_block_that_is_damaged(self, run: str, tmp_path: Path) -> None:
        segment = max((Path(run) / "segments").iterdir(), key=lambda path: path.stat().st_size)
        raw = bytearray(segment.read_bytes())
        raw[len(raw) // 2] ^= 1
        segment.write_bytes(raw)
        with pytest.raises(Damaged, match=segment.name):
            export(run, tmp_path / "out", to="jsonl")
        assert sorted(os.listdir(tmp_path)) == ["a"]

    def test_a_full_disk(self, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def pwrite(*_: Any) -> int:
            raise no_space()

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(WriteFailed, match="No space left"):
            export(run, tmp_path / "deep" / "out", to="jsonl")
        assert not (tmp_path / "deep" / "out").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 60)
    told = export(tmp_path / "a", tmp_path / "deep" / "out", to="jsonl", dry_run=True)
    assert told.count == CAPACITY
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_an_episode_that_is_cut_after_its_rows_were_written(tmp_path: Path) -> None:
    """Which row that is is told by its key, and that is not its place."""
    with made(tmp_path / "a", remove="stalest") as buffer:
        buffer.resume()
        fill(buffer, 1, 0, 40)
        buffer.save(1, wait=True)
        fill(buffer, 1, 40, 20)
        buffer.save(2, wait=True)
        buffer.end_episode()
        buffer.save(3, wait=True)
        ends = buffer.ring.mark("#end", buffer.ring.keys())
    assert (ends == 3).sum() > 0
    assert inspect(tmp_path / "a").buffers[0].ends["left where it was"] == (ends == 3).sum()
