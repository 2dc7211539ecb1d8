"""Small columns of rows that lie together in a block, as in memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import ReplayBuffer
from pipeline.buffer.transitions.blocks import KEPT_MARKS, blob_head, decode_block, encode_arrays, encode_block
from pipeline.buffer.transitions.bodies import BODIES, RowArrays, some_rows, without
from pipeline.buffer.transitions.checked import CheckedBlock
from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.layout import MARKS
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.errors import Damaged
from pipeline.replay.feeding import schema_of
from pipeline.store.block_sums import checksum_of

DTYPES = ["bool", "uint8", "int16", "float16", "bfloat16", "float8_e5m2", "float32", "int64", "complex64", "float64"]
NUMPY = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I16": "<i2", "U8": "u1", "BOOL": "?", "C64": "<c8"}


def columns_of(draw: Any) -> list[Column]:
    count = draw(st.integers(1, 6))
    shapes = st.sampled_from([(), (3,), (2, 5), (0,), (1,), (300,), (1100,)])
    return [Column(f"c{at}", draw(st.sampled_from(DTYPES)), draw(shapes)) for at in range(count)]


def values(column: Column, count: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 2, (count, column.nbytes)).astype(np.uint8)
    return raw.view(column.bits).reshape(count, *column.shape) if column.nbytes else raw.reshape(count, *column.shape)


def given_rows(columns: list[Column], count: int) -> dict[str, np.ndarray]:
    arrays = {column.name: values(column, count, at).astype(column.bits) for at, column in enumerate(columns)}
    return arrays | {name: np.arange(count).astype(MARKS[name]) % 2 for name in KEPT_MARKS}


@given(st.data(), st.integers(1, 40))
@settings(max_examples=200)
def test_what_is_written_is_read(data: st.DataObject, count: int) -> None:
    columns = columns_of(data.draw)
    schema, arrays = Schema(tuple(columns)), given_rows(columns, count)
    blob = encode_arrays(schema, arrays, count)
    found = decode_block(blob, schema, count, "a block")
    small = [each.nbytes for each in columns if each.nbytes < 1024]
    assert isinstance(found, RowArrays) == (len(small) > 1 and sum(small) > 0)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].tobytes() == array.tobytes(), name
    storage = TransitionStorage(count + 3, schema)
    storage.write(slice(2, 2 + count), found)
    for name, array in arrays.items():
        assert storage.view(name)[2 : 2 + count].tobytes() == array.tobytes(), name
    assert bytes(encode_arrays(schema, found, count)) == bytes(blob)  # what no column fills up is 0, too
    every = np.arange(count)
    assert bytes(encode_arrays(schema, some_rows(some_rows(found, every[::-1]), every[::-1]), count)) == bytes(blob)


def test_rows_that_are_taken_by_their_numbers_keep_what_no_column_fills() -> None:
    body = np.dtype({"names": ["a", "b"], "formats": ["<f4", "u1"], "offsets": [0, 4], "itemsize": 24})
    raw = np.full((4000, 24), 7, np.uint8)
    which = np.arange(0, 4000, 2)
    for _ in range(3):
        junk = np.full((len(which), 24), 171, np.uint8)  # what memory held before is nobody's to write to the disk
        del junk
        part = some_rows(RowArrays({}, raw.view(body)[:, 0]), which)
        assert isinstance(part, RowArrays)
        assert part.bodies.tobytes() == raw[which].tobytes()
        part["a"][3] = 5  # they are the caller's to change, and so are the bodies
        assert part.bodies["a"][3] == 5
        assert (raw == 7).all()


def test_anybody_can_read_it_with_the_format_s_own_library() -> None:
    buffer = ReplayBuffer(50)
    reward = np.arange(50, dtype=np.float32)
    obs = np.random.default_rng(0).random((50, 3)).astype(np.float64)
    buffer.extend({"obs": obs, "reward": reward, "done": reward % 7 == 6, "image": np.ones((50, 40, 40), np.uint8)})
    blob = bytes(encode_block(buffer.ring, 5, 40))
    tensors = safetensors.numpy.load(blob)
    length = int.from_bytes(blob[:8], "little")
    said = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["bodies"])
    bodies = tensors[BODIES]
    assert sorted(name for name, *_ in said) == ["done", "obs", "reward"]
    found = {}
    for name, dtype, shape, begin in said:
        size = np.dtype(NUMPY[dtype]).itemsize * int(np.prod(shape))
        raw = np.ascontiguousarray(bodies[:, begin : begin + size])
        found[name] = raw.view(NUMPY[dtype]).reshape(len(bodies), *shape)
    assert (found["obs"] == obs[5:45]).all()
    assert (found["reward"] == reward[5:45]).all()
    assert (found["done"] == (reward[5:45] % 7 == 6)).all()
    assert tensors["image"].shape == (40, 40, 40)


COLUMNS = [Column("a", "float32", (3,)), Column("b", "int16"), Column("c", "float64")]
SCHEMA = Schema(tuple(COLUMNS))


def block_of(said: Any, width: int, count: int = 4, dtype: str = "U8") -> bytes:
    """A block whose bodies are described in some way."""
    marks = [(name, {"<i8": "I64", "<i4": "I32", "|u1": "U8"}[MARKS[name].str], (count,)) for name in KEPT_MARKS]
    parts = [(BODIES, dtype, (count, width)), *sorted(marks, key=lambda each: -int(each[1][1:]))]
    head, offsets = blob_head(parts, said if isinstance(said, str) else json.dumps(said))
    return head + bytes(range(256)) * (offsets[-1] // 256) + bytes(offsets[-1] % 256)


def test_bodies_that_lie_otherwise_than_in_memory_are_read_too() -> None:
    said = [["b", "I16", [], 30], ["gone", "F32", [], 0], ["c", "F64", [], 1], ["a", "F32", [3], 9]]
    blob = block_of(said, 40)
    found = decode_block(blob, SCHEMA, 4, "a block")
    begin = 8 + int.from_bytes(blob[:8], "little")
    raw = np.frombuffer(blob, np.uint8, 160, begin).reshape(4, 40)
    assert found["b"].tobytes() == raw[:, 30:32].tobytes()
    assert found["c"].tobytes() == raw[:, 1:9].tobytes()
    assert found["a"].tobytes() == raw[:, 9:21].tobytes()
    storage = TransitionStorage(4, SCHEMA)
    storage.write(slice(0, 4), found)
    assert storage.view("a")[:].tobytes() == raw[:, 9:21].tobytes()


@pytest.mark.parametrize(
    ("said", "width", "dtype", "count"),
    [
        ("[", 40, "U8", 4),
        ("", 40, "U8", 4),
        ([["a", "F32", [3], 29], ["b", "I16", [], 0], ["c", "F64", [], 2]], 40, "U8", 4),  # past the end
        ([["a", "F32", [3], -1], ["b", "I16", [], 0], ["c", "F64", [], 2]], 40, "U8", 4),
        ([["a", "F32", [2], 0], ["b", "I16", [], 20], ["c", "F64", [], 24]], 40, "U8", 4),  # another shape
        ([["a", "I32", [3], 0], ["b", "I16", [], 20], ["c", "F64", [], 24]], 40, "U8", 4),  # another dtype
        ([["a", "F32", [3], 0], ["b", "I16", [], 20]], 40, "U8", 4),  # nothing of c
        ([["a", "F32", [3], 0], ["b", "I16", [], 20], ["c", "F64", [], 24]], 40, "U8", 5),  # other rows
        ([["a", "F32", [3], 0], ["b", "I16", [], 20], ["c", "F64", [], 24]], 20, "I16", 4),
        ([["a", "F32", [3]]], 40, "U8", 4),
        ([["a", "F32", [3], 0], ["b", "I16", [], 20], ["c", "F64", [], 24]], 0, "U8", 4),
        ({"a": 1}, 40, "U8", 4),
        ([["a", "F32", [3], 0], ["b", "I16", [], 20], ["c", "F64", [], 24], ["b", "I16", [], 12]], 40, "U8", 4),
    ],
)
def test_what_does_not_fit_is_damage(said: Any, width: int, dtype: str, count: int) -> None:
    blob = block_of(said, width, dtype=dtype)
    with pytest.raises(Damaged, match="a block"):
        decode_block(blob, SCHEMA, count, "a block")


@pytest.mark.parametrize(
    "place",
    [
        ["d", "F32", [2], 1000],  # past the end: it has no values, and yet a shape
        ["d", "F32", [2], -20],
        ["d", "F32", [1 << 40], 24],
        ["d", "F32", [-1], 24],
        ["d", "G99", [], 24],
        ["a", "F32", [3], 24],  # twice
    ],
)
def test_columns_of_a_block_are_those_that_lie_in_it(place: list[Any]) -> None:
    said = [["a", "F32", [3], 0], ["b", "I16", [], 12], ["c", "F64", [], 16]]
    assert schema_of(block_of(said, 40), "a block") == SCHEMA
    with pytest.raises(Damaged, match="a block"):
        schema_of(block_of([*said, place], 40), "a block")


def checked_of(blob: bytes | memoryview, count: int) -> CheckedBlock:
    columns = [*COLUMNS, *(Column(name, MARKS[name].name) for name in KEPT_MARKS)]
    raw = memoryview(bytes(blob))
    return CheckedBlock(
        lambda begin, size: bytes(raw[begin : begin + size]),
        len(raw),
        checksum_of(raw),
        columns,
        count,
        lambda at: Damaged(f"at {at}"),
    )


def moved(blob: bytes, name: str, change: Any) -> bytes:
    """A block of which the header says something else of a tensor; its checksums are right."""
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header[name] |= change(header[name])
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    return blob[:8] + text + blob[8 + length :]


@pytest.mark.parametrize("name", [BODIES, "#end", "#sums"])
def test_what_has_no_checksum_is_damage(name: str) -> None:
    blob = bytes(encode_arrays(SCHEMA, given_rows(COLUMNS, 40), 40)) + bytes(4096)
    behind = len(blob) - 8 - int.from_bytes(blob[:8], "little") - 4096

    def change(each: dict[str, Any]) -> dict[str, Any]:
        size = each["data_offsets"][1] - each["data_offsets"][0]
        if name == "#sums":
            return {"shape": [2], "data_offsets": [each["data_offsets"][0], each["data_offsets"][0] + 2]}
        return {"data_offsets": [behind, behind + size]}

    def read(given: bytes) -> Any:
        checked, rows = checked_of(given, 40), slice(0, 40)
        return checked.read(rows, checked.ranges(rows, ["a", "#end"]))

    assert read(blob)
    with pytest.raises(Damaged, match="at "):
        read(moved(blob, name, change))


@pytest.mark.parametrize("others", [{}, {"a": 1, "b": 2}], ids=["alone", "beside"])
@pytest.mark.parametrize("shape", [(), (300,)], ids=["small", "large"])
def test_a_column_may_be_called_as_a_header_calls_its_texts(
    others: dict[str, float], shape: tuple[int, ...], tmp_path: Any
) -> None:
    given = np.random.default_rng(0).random((20, *shape)).astype(np.float32)
    rows = {"__metadata__": given} | {name: np.full(20, value) for name, value in others.items()}
    with ReplayBuffer(20, directory=tmp_path / "run") as buffer:
        buffer.extend(rows)
        blob = bytes(encode_block(buffer.ring, 0, 20))
        buffer.save(1, wait=True)
    schema = Schema.of(rows)
    assert schema_of(blob, "a block") == schema
    assert decode_block(blob, schema, 20, "a block")["__metadata__"].tobytes() == given.tobytes()
    for verify in ("full", "lazy"):
        with ReplayBuffer(20, directory=tmp_path / "run") as buffer:
            buffer.resume(verify=verify)
            batch = buffer.sample(50)
            assert (batch["__metadata__"].numpy() == given[batch.keys]).all()


def test_a_column_that_was_exchanged_counts() -> None:
    arrays = given_rows(COLUMNS, 9)
    found = decode_block(encode_arrays(SCHEMA, arrays, 9), SCHEMA, 9, "a block")
    assert isinstance(found, RowArrays)
    found["b"] = found["b"] + 5
    for which in (slice(2, 7), np.array([4, 1, 8])):
        part = some_rows(found, which)
        assert isinstance(part, RowArrays)
        assert (part["b"] == arrays["b"][which] + 5).all()
        for rows in (part, part.copy(), without(part, KEPT_MARKS)):
            count = len(rows["b"])
            storage = TransitionStorage(count, SCHEMA)
            storage.write(slice(0, count), rows)
            assert (storage.view("b") == arrays["b"][which] + 5).all()
            assert (storage.view("a") == arrays["a"][which]).all()
        assert KEPT_MARKS[0] not in without(part, KEPT_MARKS)


def test_parts_of_a_block_are_read_alone() -> None:
    count = 1000
    arrays = given_rows(COLUMNS, count)
    arrays["a"] = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    blob = encode_arrays(SCHEMA, arrays, count)
    asked: list[tuple[int, int]] = []

    def read(begin: int, size: int) -> bytes:
        asked.append((begin, size))
        return bytes(blob[begin : begin + size])

    columns = [*COLUMNS, *(Column(name, MARKS[name].name) for name in KEPT_MARKS)]
    checked = CheckedBlock(read, len(blob), checksum_of(blob), columns, count, lambda at: Damaged(f"at {at}"))
    asked.clear()
    rows = slice(700, 720)
    found = checked.read(rows, checked.ranges(rows, ["a", "c", "b"]))
    assert len(asked) == 1  # the three of them together
    for name in "abc":
        assert (found[name] == arrays[name][rows]).all(), name
    damaged = bytearray(blob)
    damaged[asked[0][0] + 3] ^= 1
    blob = memoryview(bytes(damaged))
    with pytest.raises(Damaged, match="at "):
        checked.read(rows, checked.ranges(rows, ["a"]))


def test_special_dtypes_come_back_as_tensors(tmp_path: Any) -> None:
    with ReplayBuffer(8, directory=tmp_path / "run") as buffer:
        buffer.extend({"x": torch.arange(8).to(torch.bfloat16), "y": torch.arange(8.0), "z": torch.arange(8) > 3})
        buffer.save(1, wait=True)
    with ReplayBuffer(8, directory=tmp_path / "run") as buffer:
        buffer.resume()
        batch = buffer.sample(64)
        assert batch["x"].dtype is torch.bfloat16
        assert (batch["x"].float() == batch["y"]).all()
        assert ((batch["y"] > 3) == batch["z"]).all()


@pytest.mark.parametrize("storage", ["memory", "mapped"])
def test_blocks_of_thousands_of_rows_come_back(tmp_path: Any, storage: Any) -> None:
    def rows(first: int, count: int) -> dict[str, np.ndarray]:
        number = np.arange(first, first + count)
        return {"n": number, "half": (number / 2).astype(np.float32), "terminated": number % 700 == 699}

    with ReplayBuffer(5000, directory=tmp_path / "run", storage=storage) as buffer:
        for first in range(0, 8000, 4000):  # the ring goes round
            buffer.extend(rows(first, 4000), version=first)
        buffer.save(1, wait=True)
        ring = buffer.ring
        before = {name: view[ring.slots(ring.keys())].tobytes() for name, view in ring.storage.views.items()}
    with ReplayBuffer(5000, directory=tmp_path / "run", storage=storage) as buffer:
        assert buffer.resume(continue_episodes=True).rows == 5000
        ring = buffer.ring
        found = {name: view[ring.slots(ring.keys())] for name, view in ring.storage.views.items()}
    assert found["n"].tolist() == list(range(3000, 8000))
    assert {name: each.tobytes() for name, each in found.items()} == before
