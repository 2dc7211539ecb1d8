"""A saved buffer that is looked at and is not what it was: said so, or drawn as it is; and no file stays open."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline import Damaged, ReplayBuffer
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.checkpoint.manifest import MANIFEST_FILE, FileInfo, encode_manifest
from pipeline.replay import looking
from pipeline.replay.looking import look_at, look_at_trajectories
from pipeline.store.frames import crc32c
from pipeline.store.layout import Layout
from pipeline.tools import sample_run
from tests.support import kept

Change = Callable[[bytes], bytes]
ORDERS: dict[str, Any] = {
    "uses": {"select": "uniform", "uses": 2},
    "epochs": {"select": "without_replacement", "uses": 2},
    "prioritized": {"select": "prioritized"},
    "ageing": {"select": "staleness", "half_life": 2.0},
    "best": {"select": "ordered", "by": "max", "field": "reward"},
}


def saved(directory: str, select: Any, lives: int = 1, **options: Any) -> Stored:
    """A run of 30 rows in each life, of which some were drawn, and one was changed."""
    for life in range(lives):
        with ReplayBuffer(100, directory=directory, select=select, seed=3, **options) as buffer:
            buffer.resume()
            buffer.extend({"reward": np.arange(30.0), "big": np.zeros((30, 50, 40), np.uint8)})
            buffer.save(life, wait=True)
            buffer.write_back(buffer.ring.keys()[-5:], {"reward": np.zeros(5)})
            buffer.sample(4)
            buffer.save(life, wait=True)
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return find_generations(layout, run.run_id).complete[-1]


def forge(stored: Stored, change: Change, path: str, to: str | None = None) -> None:
    """Have a file of a generation, and its line in the manifest, be others."""
    files = {info.path: info for info in stored.manifest.files}
    own = os.path.join(stored.folder, path)
    raw = change(Path(own).read_bytes())
    os.unlink(own)
    del files[path]
    Path(stored.folder, to or path).write_bytes(raw)
    files[to or path] = FileInfo(path=to or path, bytes=len(raw), crc32c=f"{crc32c(raw):08x}")
    manifest = msgspec.structs.replace(stored.manifest, files=list(files.values()))
    Path(stored.folder, MANIFEST_FILE).write_bytes(encode_manifest(manifest))


def look(directory: str) -> ReplayBuffer:
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return look_at(layout, run.tag, find_generations(layout, run.run_id).complete[-1])


def same(raw: bytes) -> bytes:
    return raw


def ends_early(raw: bytes) -> bytes:
    return raw[:-1]


def is_longer(raw: bytes) -> bytes:
    return raw + bytes(3)


def names_one_twice(raw: bytes) -> bytes:
    return raw[:8] + raw[:8] + raw[16:]


def lacks_one(raw: bytes) -> bytes:
    return raw[8:]


USED, ORDER, PRIORITIES = "values/selector.used.uint32", "values/selector.order.int64", "values/selector.priorities."
KEYS, WRITTEN = "values/written.0.keys.int64", "values/written.0.values."
WRONG: list[tuple[str, Change, str, str | None]] = [
    ("uses", same, USED, "values/selector.used.nothing"),
    ("uses", same, USED, "values/selector.used."),
    ("uses", same, USED, "values/selector.used.V0"),
    ("uses", same, USED, "values/selector.used.O"),
    ("uses", ends_early, USED, None),
    ("uses", is_longer, USED, None),
    ("epochs", ends_early, ORDER, None),
    ("epochs", names_one_twice, ORDER, None),
    ("prioritized", same, PRIORITIES + "float64", PRIORITIES + "object"),
    ("prioritized", is_longer, PRIORITIES + "float64", None),
    ("best", ends_early, KEYS, None),
    ("best", lacks_one, KEYS, None),
    ("best", same, KEYS, "values/written.0.keys.nothing"),
    ("best", lacks_one, WRITTEN + "float64", None),
    ("best", is_longer, WRITTEN + "float64", None),
    ("best", same, WRITTEN + "float64", WRITTEN + "object"),
    ("best", same, WRITTEN + "float64", WRITTEN + "V0"),
]


def opened() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize(("select", "change", "path", "to"), WRONG)
def test_files_that_are_none_of_these_numbers_are_damage(
    run_directory: str, select: str, change: Change, path: str, to: str | None
) -> None:
    forge(saved(run_directory, ORDERS[select]), change, path, to)
    gc.collect()
    gc.disable()
    try:
        before = opened()
        with pytest.raises(Damaged):
            sample_run(run_directory, 8)
        assert opened() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_was_written_back_is_of_its_column_whatever_the_name_says(run_directory: str, dtype: str) -> None:
    forge(saved(run_directory, ORDERS["best"]), same, WRITTEN + "float64", WRITTEN + dtype)
    assert look(run_directory).sample(30)["reward"].tolist() == [*range(24, -1, -1), *5 * [0.0]]


def test_how_often_rows_were_drawn_may_be_said_in_any_whole_numbers(run_directory: str) -> None:
    stored = saved(run_directory, ORDERS["uses"])
    expected = look(run_directory).sample(8).keys.tolist()
    forge(stored, lambda raw: np.frombuffer(raw, np.uint32).astype(np.uint64).tobytes(), USED, USED[:-6] + "uint64")
    assert look(run_directory).sample(8).keys.tolist() == expected


@pytest.mark.parametrize("number", [1, 5, 6])
@pytest.mark.parametrize("value", [2**40, 2**61, 2**63])
def test_blocks_that_cannot_be_are_damage(run_directory: str, number: int, value: int) -> None:
    """However many rows are said to be in one: no memory is taken for them."""

    def larger(raw: bytes) -> bytes:
        blocks = msgspec.msgpack.decode(raw)
        blocks[0][number] = value
        return msgspec.msgpack.encode(blocks)

    forge(saved(run_directory, ORDERS["best"]), larger, "blocks.msgpack")
    with pytest.raises(Damaged):
        sample_run(run_directory, 8)
    with ReplayBuffer(100, directory=run_directory, select=ORDERS["best"]) as real, pytest.raises(Damaged):
        real.resume(verify="lazy")


@pytest.mark.parametrize("shape", [[50], [50, 41]])
def test_compressed_rows_of_another_length_are_damage(run_directory: str, shape: list[int]) -> None:
    def reshaped(raw: bytes) -> bytes:
        state = json.loads(raw)
        (column,) = [each for each in state["columns"] if each["name"] == "big"]
        column["shape"] = shape
        return json.dumps(state).encode()

    forge(saved(run_directory, ORDERS["best"], compress={"big": "zlib"}), reshaped, "replay.json")
    with pytest.raises(Damaged, match="byte 0: damaged"):
        sample_run(run_directory, 8)


@pytest.mark.parametrize("columns", [None, []])
def test_rows_without_columns_are_damage(run_directory: str, columns: Any) -> None:
    def without(raw: bytes) -> bytes:
        return json.dumps({**json.loads(raw), "columns": columns, "written_columns": []}).encode()

    forge(saved(run_directory, ORDERS["best"]), without, "replay.json")
    with pytest.raises(Damaged, match="columns"):
        sample_run(run_directory, 8)


@pytest.mark.parametrize("shape", [[2**62], [2**61, 2**61], [2**70]])
def test_columns_that_no_memory_has_room_for_are_refused(run_directory: str, shape: list[int]) -> None:
    def reshaped(raw: bytes) -> bytes:
        state = json.loads(raw)
        state["columns"][0]["shape"] = shape
        return json.dumps(state).encode()

    forge(saved(run_directory, ORDERS["best"]), reshaped, "replay.json")
    with pytest.raises(ValueError, match="bytes"):
        sample_run(run_directory, 8)
    real = ReplayBuffer(100, directory=run_directory, select=ORDERS["best"])
    with real, pytest.raises(ValueError, match="bytes"):
        real.resume()


@pytest.mark.parametrize("select", ORDERS)
def test_no_file_stays_open(run_directory: str, select: str) -> None:
    """Whether or not memory that is part of a circle was looked for meanwhile."""
    saved(run_directory, ORDERS[select], lives=3)
    gc.collect()
    gc.disable()
    try:
        before = opened()
        for _ in range(3):
            sample_run(run_directory, 8)
        assert opened() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["check_generation", "read_trajectories"])
def test_a_generation_that_goes_meanwhile_is_damage(
    run_directory: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files had been found whole; who samples then takes a newer one, if there is one."""
    of_rows = name == "check_generation"
    make = kept.transitions if of_rows else kept.trajectories
    make(run_directory)
    real = getattr(looking, name)

    def goes(*given: Any, **more: Any) -> Any:
        (stored,) = [each for each in given if isinstance(each, Stored)]
        found = real(*given, **more) if of_rows else None
        shutil.rmtree(stored.folder)
        return found if of_rows else real(*given, **more)

    monkeypatch.setattr(looking, name, goes)
    layout = Layout(run_directory)
    run = layout.read_run()
    assert run is not None
    look = look_at if of_rows else look_at_trajectories
    with pytest.raises(Damaged, match="missing"):
        look(layout, run.tag, find_generations(layout, run.run_id).complete[-1])
