"""Arrays beside rows that are read in parts, and which rows some blocks cover."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from pipeline.buffer.transitions.columns import Column
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import FileInfo, Manifest
from pipeline.errors import Damaged
from pipeline.replay import values as values_module
from pipeline.replay.state import BufferState
from pipeline.replay.values import Values, ValuesFile, WrittenBack
from pipeline.store.segments import Block
from pipeline.tools.salvaging_rows import Covered

COLUMNS = [Column("pair", "float32", (2,)), Column("flag", "bool")]


def values_of(folder: Path, **arrays: np.ndarray) -> Values:
    """A generation that holds these, with ``_`` for the dots of names."""
    infos = []
    for name, each in arrays.items():
        path = f"values/{name.replace('_', '.')}.{each.dtype.name}"
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(each.tobytes())
        infos.append(FileInfo(path=path, bytes=each.nbytes, crc32c=""))
    return Values(Stored(str(folder), Manifest(files=infos)))


def written(folder: Path, keys: list[int]) -> Values:
    return values_of(
        folder,
        written_0_keys=np.array(keys),
        written_0_values=np.arange(2 * len(keys), dtype=np.float32) + 100,
        written_1_keys=np.array([5]),
        written_1_values=np.array([True]),
    )


STATE = BufferState(columns=COLUMNS, written_columns=["pair", "flag"])


@pytest.mark.parametrize("span", [1, 24, 1 << 16])
def test_values_at_places_in_any_order(tmp_path: Path, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "_SPAN", span)
    rows = np.arange(300, dtype=np.float32).reshape(100, 3)
    file = values_of(tmp_path, rows=rows).file("rows.float32")
    rng = np.random.default_rng(3)
    for count in (0, 1, 7, 100):
        places = rng.choice(100, count, replace=False)
        assert file.at(places, 3).tolist() == rows[places].tolist()
    assert file.at(np.array([5, 5, 0]), 3).tolist() == rows[[5, 5, 0]].tolist()
    with pytest.raises(Damaged, match="ends at value"):
        file.at(np.array([0, 100]), 3)


def test_what_was_written_back_counts_whichever_rows_are_asked_for(tmp_path: Path) -> None:
    keys = [3, 4, 7, 11, 12]
    values = WrittenBack(STATE, written(tmp_path, keys))
    for begin in range(14):
        for end in range(begin, 15):
            arrays = {"pair": np.zeros((end - begin, 2), np.float32), "flag": np.zeros(end - begin, bool)}
            values.into(arrays, np.arange(begin, end))
            expected = [
                [100.0 + 2 * keys.index(key), 101.0 + 2 * keys.index(key)] if key in keys else [0.0, 0.0]
                for key in range(begin, end)
            ]
            assert arrays["pair"].tolist() == expected
            assert np.flatnonzero(arrays["flag"]).tolist() == ([5 - begin] if begin <= 5 < end else [])


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("keys", [[3, 4, 4, 9, 12], [3, 4, 9, 8, 12], [-5, -7, 1, 2, 3], [1, 2, 3, 4, 3]])
def test_keys_that_are_in_no_order_are_damage(
    tmp_path: Path, keys: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values_module, "AT_ONCE", at_once)
    with pytest.raises(Damaged, match=r"written\.0\.keys\.int64: the keys in it are in no order"):
        WrittenBack(STATE, written(tmp_path, keys))
    assert written(tmp_path, sorted(set(keys))).rising("written.0.keys.int64")


def test_what_is_not_there_as_it_is_said_is_damage(tmp_path: Path) -> None:
    values = written(tmp_path, [1, 2])
    for columns in (["pair", "flag", "flag"], ["other"], ["#end"]):
        with pytest.raises(Damaged, match="not there as it is said to be"):
            WrittenBack(BufferState(columns=COLUMNS, written_columns=columns), values)
    with pytest.raises(Damaged, match="its dtype is unknown"):
        values.count("selector.nothing.that_is_none")
    (tmp_path / "values/written.0.keys.int64").write_bytes(b"\0" * 8)
    with pytest.raises(Damaged, match="ends at value 1"):
        values.all("written.0.keys.int64")


def block(first: int, count: int) -> Block:
    return Block(first, count, 1, 0, 1, 0, 10)


def test_a_row_is_of_the_first_whole_block_that_has_it() -> None:
    covered = Covered(10, 50)
    found = [covered.add(block(*each)) for each in ((5, 10), (12, 3), (13, 7), (30, 10), (31, 2), (45, 20))]
    assert [(begin, end) if begin < end else None for begin, end in found] == [
        (10, 15),
        None,
        (15, 20),
        (30, 40),
        None,
        (45, 50),
    ]
    assert covered.absent(10, 50) == 10 + 5
    assert covered.absent(18, 32) == 10
    assert covered.absent(20, 30) == 10
    assert covered.absent(46, 50) == 0


def test_a_file_that_was_never_opened_is_not_closed(tmp_path: Path) -> None:
    """An error, or Ctrl-C, before it was opened: nothing is told of what was to be closed."""
    for message, dtype in (("its dtype is unknown", "none"), ("missing", "int64")):
        with pytest.raises(Damaged, match=message):
            ValuesFile(str(tmp_path / f"absent.{dtype}"))
        gc.collect()
