"""Where the rows of a pool lie is read piece by piece, and what there is of each comes to its block."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.bodies import some_rows
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.errors import Damaged, WriteFailed
from pipeline.replay.pool_files import AT, KEYS, SERIALS, ByBlock, Changes, PoolFiles
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader
from tests.support.pooled import CHOICES, in_pieces, made, rows, wander

OPTIONS = [CHOICES["min-uniform"], CHOICES["lowest_priority-prioritized"], {"compress": {"image": "zlib"}}]


def saved(directory: Path) -> tuple[Layout, int, Stored, BufferState]:
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    stored = find_generations(layout, run.run_id).complete[-1]
    return layout, run.tag, stored, read_buffer_state(stored.folder)[0]


def array(stored: Stored, name: str) -> np.ndarray:
    return np.fromfile(Path(stored.folder) / "values" / name, name.rpartition(".")[2])


def opened(stored: Stored, state: BufferState) -> PoolFiles:
    return PoolFiles(stored, state, "the pool")


@pytest.fixture(params=[1, 3, 7, 1 << 18])
def small(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of so many rows."""
    in_pieces(monkeypatch, request.param, request.param + 1)
    return int(request.param)


@pytest.mark.parametrize("seed", range(5))
def test_which_rows_lie_in_which_block(tmp_path: Path, seed: int, small: int) -> None:
    found = wander(tmp_path / "a", seed, **OPTIONS[seed % 3])
    _, _, stored, state = saved(tmp_path / "a")
    files, at = opened(stored, state), array(stored, AT)
    assert array(stored, KEYS).tolist() == found["key"]
    assert sum(count for _, count in files.pieces()) == files.size == len(at) == len(found["key"])
    there = [block.first + files.there(number) for number, block in enumerate(files.blocks)]
    assert sorted(np.concatenate(there).tolist()) == sorted(at.tolist()), seed
    assert files.rows.tolist() == [len(each) for each in there]
    assert files.needed == [number for number, each in enumerate(there) if len(each)]
    assert files.bytes == sum(files.blocks[number].length for number in files.needed)
    of, place = files.lying(at)
    firsts = np.array([block.first for block in files.blocks])[of]
    assert (at - firsts).tolist() == (place - files.offsets[of]).tolist()
    for keys in ([], found["key"][::3], [*found["key"][:2], 10**9]):
        expected = [int(at[found["key"].index(key)]) for key in keys if key in found["key"]]
        assert files.places_of(keys).tolist() == sorted(expected)


@pytest.mark.parametrize("seed", range(8))
def test_what_there_is_of_each_row_comes_to_its_block(tmp_path: Path, seed: int, small: int) -> None:
    """Of all rows, of some, and of none of a piece; with what was written back into them."""
    found = wander(tmp_path / "a", seed, **OPTIONS[seed % 3])
    layout, tag, stored, state = saved(tmp_path / "a")
    files = opened(stored, state)
    chosen = np.random.default_rng(seed).random(files.size) < [1, 0.5, 0.1][seed % 3]
    told = 100 + np.arange(files.size)
    seen: list[int] = []
    assert state.schema is not None
    with closing(ByBlock(files, str(tmp_path), [("told", np.int32), ("one", np.float64)])) as by_block:
        for begin, count in files.pieces():
            part = slice(begin, begin + count)
            by_block.add(begin, {"told": told[part], "one": 0.5}, np.flatnonzero(chosen[part]), count)
        assert by_block.rows.sum() == chosen.sum()
        for number in by_block.needed:
            which, records = by_block.of(number)
            block = files.blocks[number]
            ((_, raw),) = PayloadReader(layout, tag).each([block.place])
            assert not isinstance(raw, Damaged)
            arrays = some_rows(decode_block(raw, state.schema, block.count, "there", block.sums), which)
            first = {name: each.copy() for name, each in arrays.items()}
            by_block.into(arrays, records)
            assert (np.diff(which) > 0).all()
            assert records["told"].tolist() == told[records["row"]].tolist()
            assert (records["one"] == 0.5).all()
            assert records["key"].tolist() == [found["key"][row] for row in records["row"]]
            assert [each.tobytes() for each in arrays["value"]] == [found["value"][row] for row in records["row"]]
            assert [each.tobytes() for each in arrays["t"]] == [found["t"][row] for row in records["row"]]
            if arrays["image"].dtype != object:
                assert [each.tobytes() for each in arrays["image"]] == [found["image"][row] for row in records["row"]]
            alone, given = {"value": first["value"]}, first["value"].tobytes()
            by_block.into(alone, records)  # of some columns, and what was given stays as it is
            assert first["value"].tobytes() == given
            assert alone.keys() == {"value"}
            assert alone["value"].tobytes() == arrays["value"].tobytes()
            seen += records["row"].tolist()
    assert sorted(seen) == np.flatnonzero(chosen).tolist(), seed
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_what_was_written_back_in_any_order_is_found(tmp_path: Path, small: int) -> None:
    """Writers list it oldest row first; others need not."""
    with made(tmp_path / "a", remove="lifo") as buffer:
        buffer.resume()
        buffer.extend(rows(1, 0, 20))
        buffer.save(1, wait=True)
        changed = buffer.ring.keys()[[2, 3, 7, 11, 19]]
        buffer.write_back(changed, {"value": changed + 0.5})
        buffer.save(2, wait=True)
    _, _, stored, state = saved(tmp_path / "a")
    keys, folder = array(stored, KEYS), Path(stored.folder) / "values"
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 2, 1, 3, 4], [1, 4, 0, 2, 3]):
        changed[order].tofile(folder / "written.0.keys.int64")
        (changed[order] + 0.5).tofile(folder / "written.0.values.float64")
        changes = Changes(opened(stored, state))
        ((name, dtype),) = changes.fields
        records = np.empty(20, [(name, dtype)])
        for begin in range(0, 20, small):
            records[name][begin : begin + small] = changes.of(keys[begin : begin + small])[name]
        assert records[name][[2, 3, 7, 11, 19]].tolist() == [order.index(at) for at in range(5)]
        assert (records[name] >= 0).sum() == 5
        arrays = {"value": np.zeros(20), "t": np.arange(20)}
        changes.into(arrays, records)
        assert arrays["value"][[2, 3, 7, 11, 19]].tolist() == (changed + 0.5).tolist()
        assert (arrays["value"] != 0).sum() == 5


def test_a_pool_without_rows_and_a_ring(tmp_path: Path) -> None:
    for name, remove in (("none", "lifo"), ("ring", "fifo")):
        with made(tmp_path / name, remove=remove) as buffer:
            buffer.resume()
            if remove == "fifo":
                buffer.extend(rows(1, 0, 5))
            buffer.save(1, wait=True)
        _, _, stored, state = saved(tmp_path / name)
        files = opened(stored, state)
        assert (files.size, files.needed, files.bytes, list(files.pieces())) == (0, [], 0, [])
        assert len(files.places_of([0, 1])) == 0
        with closing(ByBlock(files, str(tmp_path), [])) as by_block:
            by_block.add(0, {}, np.arange(0), 0)
            assert by_block.needed == []


def test_rows_are_found_by_their_numbers(tmp_path: Path, small: int) -> None:
    with made(tmp_path / "a", 20, remove={"by": "min", "field": "score"}) as buffer:
        buffer.resume()
        buffer.extend(rows(1, 0, 60))
        buffer.save(1, wait=True)
        serials = buffer.ring.serials(buffer.ring.keys()).tolist()
    files = opened(*saved(tmp_path / "a")[2:])
    expected = [serials.index(serial) if serial in serials else -1 for serial in range(70)]
    assert files.rows_of(list(range(70))) == expected
    assert -1 in expected[:60]


class TestDamaged:
    """Whatever the files say, it is an error that says where."""

    @pytest.fixture
    def pool(self, tmp_path: Path, small: int) -> tuple[Stored, BufferState]:
        with made(tmp_path / "a", 20, remove="lifo") as buffer:
            buffer.resume()
            buffer.extend(rows(1, 0, 13))
            buffer.save(1, wait=True)
            buffer.write_back(buffer.ring.keys()[:4], {"value": np.zeros(4)})
            buffer.extend(rows(1, 13, 5))
            buffer.save(2, wait=True)
        return saved(tmp_path / "a")[2:]

    @pytest.mark.parametrize(
        ("name", "row", "instead", "said"),
        [
            (AT, 5, lambda all_, row: all_[row + 7], "said to be one"),
            (AT, 17, lambda all_, row: all_[0], "said to be one"),
            (AT, 3, lambda all_, row: 18, "1 of its rows are in no block"),
            (AT, 0, lambda all_, row: -1, "in no block"),
            (AT, 0, lambda all_, row: 2**63 - 1, "in no block"),
            (AT, 0, lambda all_, row: -(2**63), "in no block"),
            (SERIALS, 6, lambda all_, row: all_[5], "numbers of its rows"),
            (SERIALS, 6, lambda all_, row: all_[5] - 1, "numbers of its rows"),
            (SERIALS, 0, lambda all_, row: -1, "numbers of its rows"),
            (SERIALS, 17, lambda all_, row: 18, "numbers of its rows"),
            (KEYS, 4, lambda all_, row: all_[14], "said to be one"),
            (KEYS, 17, lambda all_, row: all_[16], "said to be one"),
            (KEYS, 4, lambda all_, row: -1, "keys that cannot be theirs"),
            (KEYS, 4, lambda all_, row: 19, "keys that cannot be theirs"),
            (KEYS, 4, lambda all_, row: all_[row] + 20, "keys that cannot be theirs"),
            (KEYS, 4, lambda all_, row: 2**63 - 1, "keys that cannot be theirs"),
        ],
    )
    def test_numbers_that_cannot_be(
        self, pool: tuple[Stored, BufferState], name: str, row: int, instead: Any, said: str
    ) -> None:
        stored, state = pool
        assert opened(stored, state).size == 18
        found = array(stored, name)
        found[row] = instead(found, row)
        found.tofile(Path(stored.folder) / "values" / name)
        with pytest.raises(Damaged, match=f"the pool: .*{said}"):
            opened(stored, state)

    @pytest.mark.parametrize("beyond", [True, False])
    def test_a_key_that_no_row_has_had(self, tmp_path: Path, beyond: bool) -> None:
        """Each slot has a row still, and its key is one of that slot."""
        with made(tmp_path / "b", 20, remove="stalest") as buffer:
            buffer.resume()
            for _ in range(2):
                buffer.extend(rows(1, 0, 20))
                buffer.clear()
            buffer.extend(rows(1, 0, 20))
            buffer.extend(rows(1, 20, 5), version=1)
            buffer.save(1, wait=True)
        _, _, stored, state = saved(tmp_path / "b")
        floor, end = state.pool[:2]
        assert floor == 40
        assert end > 60
        keys = array(stored, KEYS)
        assert opened(stored, state).size == 20
        other = end if beyond else floor - 1
        keys[keys % 20 == other % 20] = other
        keys.tofile(Path(stored.folder) / "values" / KEYS)
        with pytest.raises(Damaged, match="keys that cannot be theirs"):
            opened(stored, state)

    def test_keys_that_begin_where_no_slot_does(self, pool: tuple[Stored, BufferState]) -> None:
        stored, state = pool
        state.pool[0] -= 1
        with pytest.raises(Damaged, match="keys are said to begin with -1"):
            opened(stored, state)

    @pytest.mark.parametrize("name", [KEYS, SERIALS, AT])
    def test_files_that_are_too_short_or_not_there(self, pool: tuple[Stored, BufferState], name: str) -> None:
        stored, state = pool
        path = Path(stored.folder) / "values" / name
        os.truncate(path, 17 * 8)
        with pytest.raises(Damaged, match=f"{name}: ends at value 17"):
            opened(stored, state)
        files = [
            msgspec.structs.replace(each, bytes=17 * 8) if each.path == f"values/{name}" else each
            for each in stored.manifest.files
        ]
        shorter = Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=files))
        with pytest.raises(Damaged, match="the pool: does not say where each of its 18 rows lies"):
            opened(shorter, state)
        os.truncate(path, 17 * 8 + 3)
        with pytest.raises(Damaged, match="no array of int64"):
            opened(stored, state)
        path.unlink()
        with pytest.raises(Damaged, match=f"{name}: missing"):
            opened(stored, state)

    def test_blocks_that_are_not_listed(self, pool: tuple[Stored, BufferState]) -> None:
        stored, state = pool
        (Path(stored.folder) / "blocks.msgpack").write_bytes(msgspec.msgpack.encode([]))
        with pytest.raises(Damaged, match="rows are in no block"):
            opened(stored, state)

    def test_what_was_written_back_is_too_short(self, pool: tuple[Stored, BufferState], tmp_path: Path) -> None:
        stored, state = pool
        os.truncate(Path(stored.folder) / "values/written.0.values.float64", 3 * 8)
        with pytest.raises(Damaged, match="what was written back into column value has 24 bytes"):
            ByBlock(opened(stored, state), str(tmp_path), [])
        os.truncate(Path(stored.folder) / "values/written.0.keys.int64", 3 * 8)
        with pytest.raises(Damaged):
            ByBlock(opened(stored, state), str(tmp_path), [])
        other = msgspec.structs.replace(state, written_columns=["none"])
        with pytest.raises(Damaged, match="what was written back into column none"):
            ByBlock(opened(stored, other), str(tmp_path), [])

    def test_a_folder_in_which_nothing_can_be_written(self, pool: tuple[Stored, BufferState], tmp_path: Path) -> None:
        with pytest.raises(WriteFailed, match="none: no file"):
            ByBlock(opened(*pool), str(tmp_path / "none"), [])
