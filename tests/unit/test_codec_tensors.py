"""Tensors to bytes and back: every dtype and memory layout, in a blob that the safetensors package opens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from pipeline import Rollout
from pipeline.errors import Damaged, RolloutInvalid
from pipeline.records import Item, Trace
from pipeline.store.codec import ITEM_KEY, pack, read_blob, unpack

ITEM = Item("math", 2, 5, 77)


def packed(tensors: Any = (), **more: Any) -> bytes:
    return pack(Rollout(tensors, **more), ITEM, member=1, attempt=2, life=3, versions=(4, 6))


def back(value: Any) -> torch.Tensor:
    _, rollout = unpack(packed({"x": value}))
    tensor: torch.Tensor = rollout["x"]
    return tensor


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Same dtype, shape and bits; NaN is NaN."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return found.numpy(force=True).tobytes() == expected.numpy(force=True).tobytes()


TORCH = [
    torch.tensor([True, False, True]),
    torch.tensor([0, 255], dtype=torch.uint8),
    torch.tensor([-128, 127], dtype=torch.int8),
    torch.tensor([0, 2**16 - 1], dtype=torch.uint16),
    torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
    torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
    torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
    torch.tensor([0, 2**64 - 1], dtype=torch.uint64),
    torch.tensor([-(2**63), 2**53 + 1, 2**63 - 1]),
    torch.tensor([0.1, -0.0, float("nan"), float("-inf"), 65504], dtype=torch.float16),
    torch.tensor([0.1, -0.0, float("nan"), float("inf"), 3e38]),
    torch.tensor([0.1, 5e-324, float("nan"), float("inf")], dtype=torch.float64),
    torch.tensor([1 + 2j, complex(float("nan"), -0.0)], dtype=torch.complex64),
    torch.tensor(3.5),
    torch.tensor(2**53 + 1),
    torch.zeros(0),
    torch.zeros((0, 4)),
    torch.zeros((3, 0, 2), dtype=torch.bool),
]


@pytest.mark.parametrize("tensor", TORCH, ids=lambda each: f"{each.dtype} {tuple(each.shape)}")
def test_a_torch_tensor_comes_back_bit_for_bit(tensor: torch.Tensor) -> None:
    assert same(back(tensor), tensor)


@pytest.mark.parametrize("tensor", TORCH, ids=lambda each: f"{each.dtype} {tuple(each.shape)}")
def test_the_same_in_numpy_gives_the_same_tensor(tensor: torch.Tensor) -> None:
    array = tensor.numpy()
    assert same(back(array), tensor)
    assert same(back(array.astype(array.dtype.newbyteorder(">"))), tensor), "big-endian"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(5,), (), (0, 2), (2, 2)])
def test_types_that_numpy_lacks_keep_their_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.linspace(-3, 3, steps=int(np.prod(shape))).reshape(shape).to(dtype)
    found = back(tensor)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.float(), tensor.float())
    if tensor.dim() == 2:
        assert torch.equal(back(tensor.T).float(), tensor.T.float())


LAYOUTS: dict[str, np.ndarray] = {
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::2],
    "transposed": np.arange(6).reshape(2, 3).T,
    "reversed": np.arange(10)[::-1],
    "reversed rows": np.arange(6).reshape(2, 3)[::-1, ::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "broadcast scalar": np.broadcast_to(np.float32(2.5), (2, 2)),
    "window": np.arange(24).reshape(2, 3, 4)[:, 1:, ::3],
    "big-endian strided": np.arange(10, dtype=">i2")[::3],
    "field of records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])["b"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_memory_layout_of_numpy_gives_its_values(name: str) -> None:
    """CASES 110."""
    array = LAYOUTS[name]
    found = back(array)
    assert found.tolist() == array.tolist()
    assert tuple(found.shape) == array.shape


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.arange(10)[::3],
        torch.arange(3).expand(4, 3),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)[1:],
        torch.arange(4, dtype=torch.float32, requires_grad=True),
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "strided", "expanded", "permuted", "with grad", "conjugate", "negated view", "parameter"],
)
def test_any_view_of_torch_gives_its_values(tensor: torch.Tensor) -> None:
    found = back(tensor)
    assert found.tolist() == tensor.tolist()
    assert found.dtype == tensor.dtype
    assert not found.requires_grad


def test_numbers_and_lists_are_tensors_too() -> None:
    """CASES 111: scalars of numpy and Python, several empty tensors side by side."""
    given = {
        "a": np.zeros((0, 4), np.float32),
        "b": np.zeros((0, 4), np.float32),
        "c": 3.5,
        "d": np.float32(3.5),
        "e": torch.zeros((3, 0, 2), dtype=torch.bool),
        "f": [[1, 2], [3, 4]],
        "g": True,
        "h": 2**53 + 1,
        "i": [np.uint8(7)],
        "j": [],
    }
    _, rollout = unpack(packed(given))
    found = {name: (rollout[name].dtype, tuple(rollout[name].shape), rollout[name].tolist()) for name in given}
    assert found == {
        "a": (torch.float32, (0, 4), []),
        "b": (torch.float32, (0, 4), []),
        "c": (torch.float64, (), 3.5),
        "d": (torch.float32, (), 3.5),
        "e": (torch.bool, (3, 0, 2), [[], [], []]),
        "f": (torch.int64, (2, 2), [[1, 2], [3, 4]]),
        "g": (torch.bool, (), True),
        "h": (torch.int64, (), 2**53 + 1),
        "i": (torch.uint8, (1,), [7]),
        "j": (torch.float64, (0,), []),
    }
    assert set(rollout.traces[0].tensors) == set(given)


def nested(depth: int) -> list[Any]:
    value: list[Any] = [1.0]
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([{}, None]), "object"),
    "text": (["a", "b"], "<U1"),
    "none": (None, "object"),
    "ragged": ([[1], [2, 3]], "inhomogeneous"),
    "too large": ([2**70], "object"),
    "dates": (np.array(["2024-01-01"], "M8[D]"), "datetime64"),
    "records": (np.zeros(2, [("a", "f4")]), "f4"),
    "long double": (np.longdouble(1), "dtype"),
    "complex128": (np.zeros(2, np.complex128), "complex128"),
    "masked": (np.ma.masked_array([1, 2, 3], [False, True, False]), "masked"),
    "sparse": (torch.eye(2).to_sparse(), "sparse"),
    "meta": (torch.zeros(2, device="meta"), "meta"),
    "torch complex128": (torch.zeros(2, dtype=torch.complex128), "complex128"),
    "nested 5000 deep": (nested(5000), "dimension of 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_by_its_name(name: str) -> None:
    """CASES 135 (object arrays) and 120: one clear error for the item."""
    value, reason = REFUSED[name]
    with pytest.raises(RolloutInvalid, match="field 'thing' of trace 1") as caught:
        packed([{"fine": [1]}, {"thing": value}])
    assert "item 5 of epoch 2 of task 'math' (uid 77)" in str(caught.value)
    assert reason in str(caught.value)


def test_anybody_can_open_the_blob_with_safetensors() -> None:
    given = {f"{each.dtype} {place}": each for place, each in enumerate(TORCH)}
    given |= {"bf16": torch.ones(3, dtype=torch.bfloat16), "f8": torch.ones(3).to(torch.float8_e4m3fn)}
    opened = safetensors.torch.load(packed(given, info={"a": (1, 2)}))
    assert opened.pop(ITEM_KEY).dtype == torch.uint8
    assert set(opened) == {f"0.{name}" for name in given}
    for name, tensor in given.items():
        found = opened[f"0.{name}"]
        assert found.dtype == tensor.dtype, name
        assert found.shape == tensor.shape, name
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True, name


def test_every_tensor_is_aligned_to_its_items_and_the_data_to_64_bytes() -> None:
    dtypes = [torch.bool, torch.float64, torch.uint8, torch.int16, torch.float32, torch.int64, torch.bfloat16]
    given = {f"t{n}": torch.ones(n + 1, dtype=dtype) for n, dtype in enumerate(dtypes)}
    for blob in (packed(given), packed({"odd": torch.ones(3, dtype=torch.uint8)}, info={"x": "y" * 13}), packed()):
        length = int.from_bytes(blob[:8], "little")
        assert (8 + length) % 64 == 0
        header = json.loads(blob[8 : 8 + length])
        sizes = {"F64": 8, "I64": 8, "F32": 4, "I16": 2, "BF16": 2, "U8": 1, "BOOL": 1}
        spans = sorted((entry["data_offsets"], entry["dtype"]) for entry in header.values())
        for (start, _), dtype in spans:
            assert start % sizes[dtype] == 0
        ends = [0, *(end for (_, end), _ in spans)]
        assert ends[:-1] == [start for (start, _), _ in spans], "no gap and no overlap"
        assert ends[-1] == len(blob) - 8 - length


def test_what_comes_out_is_a_copy() -> None:
    """CASES 122: a caller who changes the tensors of a batch changes nothing that is stored."""
    blob = packed({"a": torch.arange(4), "b": torch.ones(2)})
    before = bytes(blob)
    first = unpack(blob)[1]
    first["a"].fill_(9)
    first["b"].zero_()
    again = unpack(blob)[1]
    assert blob == before
    assert again["a"].tolist() == [0, 1, 2, 3]
    assert again["b"].tolist() == [1, 1]


def test_what_goes_in_is_copied() -> None:
    """CASES 122: an environment that returns one array again and again has its values of then stored."""
    array, tensor, listed = np.zeros(2), torch.zeros(2), [0.0, 0.0]
    blobs = []
    for value in (1, 2, 3):
        array[:], tensor[:], listed[:] = value, value, [value, value]
        blobs.append(packed({"array": array, "tensor": tensor, "list": listed}))
    array[:], tensor[:] = 99, 99
    stored = [unpack(blob)[1] for blob in blobs]
    for name in ("array", "tensor", "list"):
        assert [rollout[name].tolist() for rollout in stored] == [[1, 1], [2, 2], [3, 3]]


def test_blobs_of_the_same_names_and_shapes_do_not_share_values() -> None:
    """The layout of a blob is remembered by names, dtypes and shapes: nothing else may be."""
    for number in range(3):
        header, rollout = unpack(packed({"a": [number], "b": [float(number)]}, reward=number, info={"n": number}))
        assert (rollout["a"].tolist(), rollout["b"].tolist()) == ([number], [float(number)])
        assert (header.reward, rollout.info) == (number, {"n": number})
    for number in range(600):  # more layouts than are remembered
        assert unpack(packed({f"name{number}": [number]}))[1][f"name{number}"].item() == number
    assert unpack(packed({"a": [1.5]}))[1]["a"].dtype == torch.float64
    assert unpack(packed({"a": [1]}))[1]["a"].dtype == torch.int64


def test_traces_keep_their_order_names_agents_and_policies() -> None:
    given = [
        Trace({"a.b": [1], "c": [2]}, agent="white", policy="p1"),
        Trace({}, agent="none"),
        Trace({"a.b": [3], 'é \U0001f600 " \\ \n': [4]}, agent="\U0001f600", policy="p2"),
    ]
    _, rollout = unpack(packed(given))
    assert [(each.agent, each.policy) for each in rollout] == [("white", "p1"), ("none", ""), ("\U0001f600", "p2")]
    assert [{name: value.tolist() for name, value in each.tensors.items()} for each in rollout] == [
        {"a.b": [1], "c": [2]},
        {},
        {"a.b": [3], 'é \U0001f600 " \\ \n': [4]},
    ]


@pytest.mark.parametrize(
    "blob", [b"", b"\x00", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}", b"\x08" + b"\0" * 7 + b'{"a":1} ']
)
def test_what_is_no_blob_is_damaged(blob: bytes) -> None:
    with pytest.raises(Damaged, match="somewhere"):
        unpack(blob, "somewhere")


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,0]}',
        '{"dtype":"F32","shape":[0,1000000000000000000000],"data_offsets":[0,0]}',
        '{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}',
        '{"dtype":"F32","shape":[2],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[2],"data_offsets":[4,12]}',
        '{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}',
        '{"dtype":"F32","shape":[1],"data_offsets":[8,4]}',
        '{"dtype":"F33","shape":[1],"data_offsets":[0,4]}',
    ],
)
def test_a_header_that_lies_about_sizes_is_damaged_and_allocates_nothing(entry: str) -> None:
    text = f'{{"x":{entry}}}'.encode()
    with pytest.raises(Damaged):
        read_blob(len(text).to_bytes(8, "little") + text + bytes(8))
