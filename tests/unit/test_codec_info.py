"""What stands beside the tensors: plain values of any shape come back as they were, or are refused by name."""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Rollout
from pipeline.errors import Damaged, RolloutInvalid
from pipeline.records import Item, Trace
from pipeline.runner.policies import check_rollout
from pipeline.store.codec import pack, unpack
from pipeline.store.plain import MARK, PlainValueError, from_plain, to_plain

ITEM = Item("math", 0, 5, 77)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    __slots__ = ()


def packed(rollout: Rollout) -> bytes:
    return pack(rollout, ITEM, member=1, attempt=2, life=3, versions=(4, 6))


def back(info: dict[Any, Any]) -> Any:
    return unpack(packed(Rollout({"x": [1]}, info=info)))[1].info


def identical(a: Any, b: Any) -> bool:
    """Equal, of the same types throughout, NaN equal to NaN, signs of zeros compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True) if len(a) == len(b) else [((0, 0), (1, 1))]
        return all(identical(x, y) and identical(v, w) for (x, v), (y, w) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)


VALUES: dict[str, Any] = {
    "none and bools": [None, True, False],
    "tuples": (1, (2, [3, (4,)]), ()),
    "keys": {1: "a", 2.5: "b", None: "c", (1, "x"): "d", b"e": "f", "g": 3},
    "true and one as keys apart": [{True: 1}, {1: True}],
    "64 bits": [2**63 - 1, 2**63, 2**64 - 1, -(2**63)],
    "beyond 64 bits": [2**64, -(2**63) - 1, 2**70, -(2**70), 3**400, {2**70: 2**125 + 1}],
    "floats": [math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1.7976931348623157e308, 0.1],
    "text": ["", "é", "\U0001f600", "nul \0 inside", "￾", "‮right to left", "y" * 2**20],
    "lone surrogates": ["ok \ud83d", "\udc00\ud800", {"k \ud83d": "v \ud83d"}],
    "emoji keys": {"\U0001f600\U0001f3fd": {"é": 1}},
    "bytes": [b"", b"\x00\xff" * 9],
    "empty": [{}, [], (), ""],
    "the reserved key": {MARK: ["tuple", [1]], "other": {MARK: MARK}},
    "something like the reserved key": {MARK + "x": 1},
    "order of keys": {"z": 1, "a": 2, "m": 3},
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back_with_their_types(name: str) -> None:
    """CASES 31, 114, 117: never a float for an integer, never null for NaN, never a lost surrogate."""
    info = {"value": VALUES[name]}
    found = back(info)
    assert identical(found, info), found


def test_subclasses_and_numpy_scalars_come_back_as_what_they_are() -> None:
    given = {
        "a": np.int64(2**53 + 1),
        "b": np.float32(0.5),
        "c": np.float64(-0.0),
        "d": np.bool_(True),
        "e": np.uint64(2**64 - 1),
        "f": Level.HIGH,
        "g": Name("n"),
        "h": np.str_("s"),
        "i": bytearray(b"x"),
        "j": memoryview(b"abcdef")[::2],
        "k": torch.Size([2, 3]),
    }
    expected = {
        "a": 2**53 + 1,
        "b": 0.5,
        "c": -0.0,
        "d": True,
        "e": 2**64 - 1,
        "f": 3,
        "g": "n",
        "h": "s",
        "i": b"x",
        "j": b"ace",
        "k": (2, 3),
    }
    assert identical(back(given), expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (Color.RED, "Color"),
        (np.zeros(2), "ndarray"),
        (torch.zeros(2), "Tensor"),
        (np.longdouble(1), "longdouble"),
        (np.datetime64("2024-01-01"), "datetime64"),
        (1 + 2j, "complex"),
        (object(), "object"),
        (len, "builtin_function_or_method"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else "",
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(RolloutInvalid, match=f"field info: a {kind} at ") as caught:
        packed(Rollout(info={"outer": [0, {"inner": value}]}))
    assert "$.outer[1].inner" in str(caught.value)
    assert str(ITEM) in str(caught.value)


WRAP: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "dict": lambda value: {"k": value},
    "tuple": lambda value: (value,),
    "int keys": lambda value: {1: value},
    "surrogate keys": lambda value: {"\ud83d": value},
}


def deep(kind: str, levels: int) -> Any:
    value: Any = "core"
    for _ in range(levels):
        value = WRAP[kind](value)
    return value


def at_stack_depth(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else at_stack_depth(frames - 1, call)


@pytest.mark.parametrize("kind", WRAP)
def test_nesting_that_is_accepted_comes_back_and_what_is_deeper_is_refused(kind: str) -> None:
    """CASES 120: 5000 levels are one clear error for the item, and what is stored can be read, from deep in a stack."""
    with pytest.raises(RolloutInvalid, match="field info: nested deeper than 200 levels"):
        back({"x": deep(kind, 5000)})
    most = 0
    for levels in (1, 10, 50, 66, 99, 150, 199, 250):
        try:
            blob = packed(Rollout(info={"x": deep(kind, levels)}))
        except RolloutInvalid:
            continue
        most = levels
        _, rollout = at_stack_depth(300, lambda blob=blob: unpack(blob))  # type: ignore[misc]
        assert rollout.info == {"x": deep(kind, levels)}
    assert most >= 66 if kind != "list" else most == 199


def test_a_cycle_is_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(RolloutInvalid, match="nested deeper"):
        packed(Rollout(info=cycle))


def test_a_stack_that_is_nearly_full_refuses_the_item_instead_of_breaking_the_run() -> None:
    room = sys.getrecursionlimit() - len(inspect.stack(0)) - 120
    with pytest.raises(RolloutInvalid, match="cannot be encoded"):
        at_stack_depth(room, lambda: packed(Rollout(info={"x": deep("list", 190)})))


def test_what_goes_in_is_copied_and_what_comes_out_is_the_callers() -> None:
    """CASES 122, info: lists and dicts that are used again, and results that are changed."""
    shared: dict[str, Any] = {"list": [], "nested": {"n": 0}, "bytes": bytearray(b"0")}
    blobs = []
    for number in (1, 2, 3):
        shared["list"].append(number)
        shared["nested"]["n"] = number
        shared["bytes"][0] = 48 + number
        blobs.append(packed(Rollout(info=shared)))
    shared.clear()
    assert [unpack(blob)[1].info["list"] for blob in blobs] == [[1], [1, 2], [1, 2, 3]]
    assert [unpack(blob)[1].info["nested"]["n"] for blob in blobs] == [1, 2, 3]
    assert [unpack(blob)[1].info["bytes"] for blob in blobs] == [b"1", b"2", b"3"]
    unpack(blobs[0])[1].info["list"].append("mine")
    assert unpack(blobs[0])[1].info["list"] == [1]


def test_the_header_says_whose_payload_it_is() -> None:
    header, rollout = unpack(packed(Rollout(Trace({"x": [1]}, "a", "p"), reward=1.5, info={"k": 1}, tokens=9)))
    assert (header.uid, header.task, header.epoch, header.index) == (77, "math", 0, 5)
    assert (header.member, header.attempt, header.life) == (1, 2, 3)
    assert (rollout.reward, rollout.oldest, rollout.newest, rollout.tokens) == (1.5, 4, 6, 9)
    plain, _ = unpack(pack(Rollout(), Item("t", 0, 0, 0), member=0, attempt=1, life=0, versions=(0, 0)))
    assert (plain.uid, plain.task, plain.attempt, plain.reward, plain.info) == (0, "t", 1, 0.0, {})


@pytest.mark.parametrize("reward", [np.float64(0.5), np.float32(0.5), np.float16(0.5), np.int64(2), 3, 2**60])
def test_a_reward_of_any_number_type_is_stored_as_a_float(reward: Any) -> None:
    rollout = Rollout({"x": [1]}, reward=reward)
    assert check_rollout(rollout, ITEM) is None
    found = unpack(packed(rollout))[1].reward
    assert found == float(reward)
    assert type(found) is float


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400])
def test_a_reward_that_no_float_holds_is_a_failed_attempt_with_a_reason(reward: Any) -> None:
    fault = check_rollout(Rollout({"x": [1]}, reward=reward), ITEM)
    assert fault is not None
    assert fault.startswith("reward is ")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": None}, "reward"),
        ({"traces": None}, "traces"),
        ({"traces": 5}, "traces"),
        ({"traces": "text"}, "traces"),
        ({"traces": torch.ones(3)}, "traces"),
        ({"traces": [5]}, r"traces\[0\]"),
        ({"traces": [Trace(5)]}, r"traces\[0\]"),  # type: ignore[arg-type]
        ({"traces": {1: [1]}}, r"traces\[0\]"),
        ({"traces": {"": [1]}}, r"traces\[0\]"),
        ({"info": None}, "info"),
        ({"info": [("a", 1)]}, "info"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"tokens": 2**70}, "tokens"),
        ({"oldest": -1}, "oldest"),
        ({"oldest": True}, "oldest"),
        ({"newest": 2**70}, "newest"),
        ({"oldest": 5, "newest": 4}, "newest"),
    ],
)
def test_what_is_no_rollout_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RolloutInvalid, match=f"uid 77.*field {named}"):
        check_rollout(Rollout(**fields), ITEM)


@pytest.mark.parametrize(
    "traces",
    [{"\ud83d": [1]}, Trace({}, agent="\ud83d"), Trace({}, policy="\ud83d"), Trace({}, agent=5)],  # type: ignore[arg-type]
)
def test_a_name_that_could_not_be_read_again_is_refused(traces: Any) -> None:
    with pytest.raises(RolloutInvalid, match="uid 77"):
        packed(Rollout(traces))


def test_a_flipped_byte_of_a_blob_is_damage_or_another_value_and_never_another_error() -> None:
    """Frames have checksums; a blob that somebody cut out has none, and still must not break its reader."""
    blob = packed(Rollout([{"a": [1, 2]}, {"b": 1.5}], info={"t": (1, 2**70, "\ud83d"), "keys": {3: [b"x"]}}))
    for place in range(len(blob)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            bad = bytearray(blob)
            bad[place] ^= mask
            with contextlib.suppress(Damaged):
                unpack(bytes(bad))
    for cut in range(len(blob)):
        with pytest.raises(Damaged):
            unpack(blob[:cut])


def test_an_unknown_wrapping_says_that_a_newer_version_wrote_it() -> None:
    with pytest.raises(PlainValueError, match=r"'future'.*newer"):
        from_plain({MARK: ["future", 1]})
    assert from_plain(to_plain({"a": (1,)})) == {"a": (1,)}
