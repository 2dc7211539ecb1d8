"""Columns of a replay buffer: what goes in comes out as it was, or is refused by name and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Column, ConfigError, MixedReplay, ReplayBuffer, Schema, TrajectoryBuffer
from pipeline.buffer.transitions.columns import flat
from tests.support.disk import ScriptedFiles
from tests.support.replay import everything

_RNG = np.random.default_rng(0)
VALUES: dict[str, Any] = {
    "uint8": np.array([0, 7, 255], np.uint8),
    "bool": np.array([True, False, True]),
    "int64": np.array([2**53 + 1, -(2**63), 2**63 - 1]),
    "uint64": np.array([2**64 - 1, 0, 2**63], np.uint64),
    "uint16": np.array([65535, 0, 1], np.uint16),
    "float16": np.array([65504, 6e-8, -0.0], np.float16),
    "float64": np.array([5e-324, -np.inf, np.nan]),
    "complex64": np.array([1 + 2j, -1j, np.nan], np.complex64),
    "bfloat16": torch.tensor([1.5, -3e38, float("inf")], dtype=torch.bfloat16),
    "float8_e4m3fn": torch.tensor([1.5, -448.0, 0.0]).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.tensor([1.5, -57344.0, 0.0]).to(torch.float8_e5m2),
    "image": _RNG.integers(0, 255, (3, 3, 32, 32)).astype(np.uint8),
    "large bfloat16": torch.arange(3 * 1024).reshape(3, 1024).to(torch.bfloat16),
    "large complex64": (np.arange(3 * 600) * 1j).astype(np.complex64).reshape(3, 600),
    "Fortran": np.asfortranarray(np.arange(6).reshape(3, 2)),
    "backwards": np.arange(3)[::-1],
    "transposed": torch.arange(6).reshape(2, 3).T,
    "broadcast": np.broadcast_to(np.arange(2), (3, 2)),
    "big endian": np.arange(3).astype(">i4"),
    "empty": np.zeros((3, 0), np.float32),
    "empty within": np.zeros((3, 2, 0, 4), bool),
    "conjugated": torch.tensor([1 + 1j, 2j, 3], dtype=torch.complex64).conj(),
    "with a gradient": torch.ones(3, requires_grad=True) * 2,
}


def tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj()
    return torch.from_numpy(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits[0], bits[1])


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("names", [[name] for name in VALUES] + [list(VALUES)])
def test_values_come_back_in_their_dtype_and_shape(names: list[str], one_by_one: bool) -> None:
    values = {name: VALUES[name] for name in names}
    buffer = ReplayBuffer(3, select="fifo")
    if one_by_one:
        buffer.append({name: each[1] for name, each in values.items()})
        for at in range(3):
            buffer.append({name: each[at] for name, each in values.items()})
    else:
        buffer.extend({name: each[1:2] for name, each in values.items()})
        buffer.extend(values)
    batch = buffer.sample(3)
    for name, each in values.items():
        assert same(batch[name], tensor(each)), name
    slices = buffer.sample(1, slices={"length": 3})
    assert all(same(slices[name][0], tensor(each)) for name, each in values.items())


ODD_MEMORY: dict[str, Any] = {
    "Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::2],
    "transposed": np.arange(6).reshape(2, 3).T,
    "backwards": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "backwards in two": np.arange(6).reshape(2, 3)[::-1, ::-1],
    "large": np.asfortranarray(np.arange(2000).reshape(20, 100)),
    "tensor": torch.arange(6).reshape(2, 3).T,
}
EMPTY: dict[str, Any] = {
    "a": np.zeros((0, 4), np.float32),
    "b": np.zeros((0, 4), np.float32),
    "c": np.array(3.5),
    "d": np.float32(3.5),
    "e": np.zeros((3, 0, 2), bool),
    "f": {"g": True, "h": np.float16(1.5), "i": {"j": 2**53 + 1}},
}


@pytest.mark.parametrize("how", ["in memory", "saved", "state", "mixed"])
@pytest.mark.parametrize("rows", [VALUES, {f"{name} row": each for name, each in ODD_MEMORY.items()}, EMPTY])
def test_values_come_back_wherever_rows_go(rows: dict[str, Any], how: str, tmp_path: Path) -> None:
    def made() -> ReplayBuffer:
        return ReplayBuffer(3, select="fifo", directory=tmp_path if how == "saved" else None, files=ScriptedFiles())

    buffer = made()
    if rows is VALUES:
        buffer.extend(rows)
    else:
        for _ in range(2):
            buffer.append(rows)
    expected = dict(flat(rows))
    source: Any = buffer
    if how == "saved":
        buffer.save(1, wait=True)
        buffer.close()
        source = made()
        source.resume()
    elif how == "state":
        source = ReplayBuffer(3, select="fifo")
        source.load_state_dict(buffer.state_dict())
    elif how == "mixed":
        source = MixedReplay({"one": (buffer, 1)})
    batch = source.sample(len(buffer))
    found = dict(flat({name: batch[name] for name in batch.columns}))
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        one = each if isinstance(each, torch.Tensor) else np.asarray(each)
        want = tensor(one) if rows is VALUES else torch.stack([tensor(one).reshape(one.shape)] * 2)
        assert same(found[name], want), name
    if how == "saved":
        source.close()


@pytest.mark.parametrize("name", ["a\0b", "\ufffe", "x" * 1_000_000, "\u202eabc", "\U0001f600", "\ud83d", "ok \ud83d"])
def test_a_column_of_any_name_is_saved_or_refused_before_it_is_stored(name: str, tmp_path: Path) -> None:
    given: Any = {name: np.arange(3)}
    with ReplayBuffer(4, directory=tmp_path, files=ScriptedFiles()) as buffer:
        if "\ud83d" in name:
            for add in (buffer.extend, buffer.append):
                with pytest.raises(ConfigError, match="half a surrogate pair"):
                    add(given)
            assert buffer.schema is None
            given = {"x": np.arange(3)}
        buffer.extend(given)
        buffer.save(1, wait=True)
    with ReplayBuffer(4, directory=tmp_path, files=ScriptedFiles(), select="fifo") as again:
        again.resume()
        assert again.sample(3)[next(iter(given))].tolist() == [0, 1, 2]


def deep(levels: int, kind: Any) -> Any:
    value: Any = 1.0
    for _ in range(levels):
        value = kind(value)
    return value


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value
    return value


NESTED: dict[str, Any] = {
    "dicts": deep(5000, lambda each: {"a": each}),
    "tuples": deep(5000, lambda each: (each,)),
    "lists": deep(5000, lambda each: [each]),
    "itself": endless(),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize(
    "verb", ["append", "extend", "add", "final_obs", "reward", "extras", "write_back", "trajectory"]
)
def test_what_is_nested_without_end_is_one_clear_error(verb: str, kind: str) -> None:
    buffer, value, two = ReplayBuffer(8), NESTED[kind], np.zeros(2)
    flags = np.ones(2, bool), np.zeros(2, bool)
    buffer.add(two, two, two, two, *flags, {"final_obs": two}, autoreset="same_step")
    before = everything(buffer)
    verbs: dict[str, Callable[[], object]] = {
        "append": lambda: buffer.append({"obs": value}),
        "extend": lambda: ReplayBuffer(8).extend({"obs": value}),
        "add": lambda: buffer.add(value, 0, 1.0, value, False, False),
        "final_obs": lambda: buffer.add(two, two, two, two, *flags, {"final_obs": value}, autoreset="same_step"),
        "reward": lambda: buffer.add(0.0, 0, value, 0.0, False, False),
        "extras": lambda: buffer.add(0.0, 0, 1.0, 0.0, False, False, extras={"more": value}),
        "write_back": lambda: buffer.write_back([0], {"obs": value}),
        "trajectory": lambda: TrajectoryBuffer().add_trajectories([{"obs": value}]),
    }
    with pytest.raises(ConfigError):
        verbs[verb]()
    assert everything(buffer) == before
    buffer.append({"obs": 0.0, "action": 0.0, "reward": 0.0, "next_obs": 0.0, "terminated": False, "truncated": False})


def test_a_row_may_be_nested_as_deep_as_anybody_nests_it() -> None:
    buffer, row = ReplayBuffer(8, returns="numpy"), deep(60, lambda each: {"a": each})
    buffer.append(row)
    assert buffer.sample(1).columns == ("a",)


def test_numpy_batches_have_numpy_dtypes_and_name_what_numpy_lacks() -> None:
    buffer = ReplayBuffer(3, select="fifo", returns="numpy")
    buffer.extend(VALUES)
    batch = buffer.sample(3)
    assert batch["float16"].dtype == np.float16
    with pytest.raises(ConfigError, match="column bfloat16: numpy has no such dtype"):
        batch["bfloat16"]
    assert same(batch.torch()["bfloat16"], VALUES["bfloat16"])


def test_nested_columns_come_back_nested() -> None:
    buffer = ReplayBuffer(2, returns="numpy")
    given = {"obs": {"camera": np.zeros((2, 40, 40), np.uint8), "arm": {"left": np.ones(2)}}, "action": np.arange(2)}
    buffer.extend(given)
    batch = buffer.sample(2)
    assert batch.columns == ("action", "obs")
    assert batch["obs"]["arm"]["left"].tolist() == [1, 1]
    assert batch["obs"]["camera"].shape == (2, 40, 40)
    assert batch.torch().to("cpu")["obs"]["arm"]["left"].dtype == torch.float64
    assert "obs" in batch
    assert "arm" not in batch
    with pytest.raises(KeyError, match=r"action, obs\.arm\.left"):
        batch["nothing"]


def test_a_row_is_a_copy_of_what_the_environment_reuses() -> None:
    buffer = ReplayBuffer(9, select="fifo", returns="numpy")
    small, large, several = np.zeros(2), np.zeros(500), torch.zeros(2, 3)
    for value in (1, 2, 3):
        small[:], large[:], several[:] = value, value, value
        buffer.append({"small": small, "large": large, "tensor": several[0]})
    for value in (4, 5, 6):
        small[:], large[:], several[:] = value, value, value
        buffer.extend({"small": small[None], "large": large[None], "tensor": several[:1]})
    batch = buffer.sample(6)
    for name in ("small", "large", "tensor"):
        assert batch[name][:, 0].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("returns", ["torch", "numpy"])
def test_a_batch_is_the_callers(returns: Any) -> None:
    buffer = ReplayBuffer(8, select="fifo", returns=returns)
    numbers = np.arange(8, dtype=np.float32)
    buffer.extend({"reward": numbers, "obs": np.repeat(numbers[:, None], 4096, axis=1), "next_obs": numbers})
    before = everything(buffer)
    kept = buffer.sample(8)
    for asked in ({}, {"n_step": 2, "gamma": 0.5}, {"slices": {"length": 2}}, {"stack": 2}):
        batch = buffer.sample(5, **asked)
        for name in batch:
            batch[name][:] = -1
        batch.weights[:] = -1
        batch.versions[:] = -1
    assert kept["reward"].tolist() == numbers.tolist()
    assert kept["obs"][:, 7].tolist() == numbers.tolist()
    assert everything(buffer)["rows"] == before["rows"]
    assert everything(buffer)["large"] == before["large"]


def test_memory_that_is_used_again_is_not_a_batch_that_somebody_holds() -> None:
    buffer = ReplayBuffer(64, select="fifo")
    buffer.extend({"x": np.arange(64), "obs": np.repeat(np.arange(64)[:, None], 1000, axis=1)})
    held = []
    for _ in range(10):
        held.append(buffer.sample(64)["obs"][3:5, :2])
        buffer.extend({"x": np.zeros(64, int), "obs": np.full((64, 1000), -len(held))})
    assert [int(each[0, 0]) for each in held] == [3] + [-at for at in range(1, 10)]


GOOD: dict[str, Any] = {"a": np.zeros((2, 3), np.float32), "n": np.zeros(2, np.uint8), "terminated": np.zeros(2, bool)}
ODD: dict[Any, Any] = {**GOOD, 3: GOOD["n"]}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a shape": ({"a": np.zeros((2, 4), np.float32)}, {}, r"column a: shape \[4\] in a row, \[3\] expected"),
    "a length": ({"n": np.zeros(3, np.uint8)}, {}, "column n: 3 rows, where the columns before it have 2"),
    "no length": ({"n": 3}, {}, "column n: a single number"),
    "more than a byte": ({"n": np.array([1, 300])}, {}, "column n: int64 values that uint8 cannot hold"),
    "less than a byte": ({"n": np.array([1, -1], np.int8)}, {}, "column n"),
    "a fraction": ({"n": np.array([0.5, 1])}, {}, "column n: float64 values that uint8"),
    "no number": ({"n": np.array([np.nan, 1])}, {}, "column n"),
    "no bool": ({"terminated": np.zeros(2, int)}, {}, "column terminated: int64 values that bool cannot hold"),
    "a complex number": ({"a": np.zeros((2, 3), np.complex64)}, {}, "column a: complex64"),
    "a wider complex number": ({"a": np.zeros((2, 3), complex)}, {}, "column a: complex128"),
    "infinite when narrow": ({"a": np.full((2, 3), 1e300)}, {}, "column a: float64 values that float32"),
    "not exact": ({"a": np.full((2, 3), 2**24 + 1)}, {}, "column a: int64 values that float32"),
    "bfloat16": ({"a": torch.zeros((2, 3), dtype=torch.bfloat16)}, {}, "column a: bfloat16 values that float32"),
    "float8": ({"n": torch.zeros(2).to(torch.float8_e5m2)}, {}, "column n: float8_e5m2 values that uint8"),
    "another float8": ({"n": torch.zeros(2).to(torch.float8_e4m3fnuz)}, {}, "column n: .*cannot be stored"),
    "text": ({"n": ["1", "2"]}, {}, "column n: <U1 values cannot be stored"),
    "objects": ({"n": [None, 1]}, {}, "column n: object"),
    "ragged": ({"a": [[1, 2, 3], [1]]}, {}, "column a: rows of one shape"),
    "sparse": ({"a": torch.zeros(2, 3).to_sparse()}, {}, "column a: .*to_dense"),
    "masked": ({"n": np.ma.MaskedArray([1, 2], [True, False])}, {}, "column n: a masked array"),
    "missing": ({"a": ...}, {}, "a missing; each row has a, n, terminated"),
    "unknown": ({"b": np.zeros(2)}, {}, "b unknown; each row has"),
    "version": ({}, {"version": 2**31}, "version=2147483648"),
    "a negative version": ({}, {"version": -1}, "version=-1"),
    "no version": ({}, {"version": None}, "version=None"),
    "a negative environment": ({}, {"env": -1}, "env=.*-1"),
    "environments": ({}, {"env": np.array([0, -1])}, "env="),
    "too few environments": ({}, {"env": [0]}, r"env=.*\[2\] of them"),
    "an environment too many": ({}, {"env": 2**20}, "env=.*from 0 to 1048575"),
    "half an environment": ({}, {"env": 0.5}, "env="),
    "an uneven number": ({}, {"envs": 3}, "envs=3: a number that divides the 2 rows"),
    "no environments": ({}, {"envs": 0}, "envs=0"),
    "a broken number": ({}, {"envs": 2.0}, r"envs=2\.0"),
    "both": ({}, {"envs": 2, "env": 1}, "envs=2"),
    "ends": ({}, {"ends": np.zeros(3, bool)}, r"ends=.*\[2\] bool"),
    "numbers for ends": ({}, {"ends": [0, 1]}, "ends=.*bool is needed"),
}


@pytest.mark.parametrize("waiting", [False, True], ids=["new", "with rows"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_and_nothing_changes(case: str, waiting: bool) -> None:
    changed, options, said = BAD[case]
    columns = {name: each for name, each in (GOOD | changed).items() if each is not ...}
    buffer = ReplayBuffer(8, schema=Schema.of(GOOD), select="prioritized")
    if waiting:
        buffer.extend(GOOD)
        buffer.append({name: each[0] for name, each in GOOD.items()}, env=3)
    before = everything(buffer)
    with pytest.raises(ConfigError, match=said):
        buffer.extend(columns, **options)
    if options and set(options) <= {"env", "version"}:
        with pytest.raises(ConfigError):
            buffer.append({name: each[0] for name, each in GOOD.items()}, **options)
    assert everything(buffer) == before


def _update(keys: Any, priorities: Any) -> Callable[[ReplayBuffer], object]:
    return lambda buffer: buffer.update_priorities(keys, priorities)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (_update([0, 1], [1.0, -1.0]), r"priorities=-1\.0.*number 1"),
        (_update([0, 1], [float("nan"), 1.0]), "priorities=nan"),
        (_update([0, 1], torch.tensor([1.0, float("inf")])), "priorities=inf"),
        (_update([0, 1], [1.0]), "priorities=1: as many as keys are needed: 2"),
        (_update([0], ["1.0"]), "priorities: numbers"),
        (_update([0], [None]), "priorities"),
        (_update([0], [[1.0], [1.0, 2.0]]), "priorities: numbers"),
        (_update([0], torch.tensor([1j])), "priorities: numbers"),
        (_update([0.0], [1.0]), "keys="),
        (_update(2.5, 1.0), "keys="),
        (_update([True], [1.0]), "keys="),
        (_update([0, 3], [1.0, 1.0]), "keys=3: it was never the key"),
        (_update([-1], [1.0]), "keys=-1"),
        (lambda buffer: buffer.append({"a": np.zeros(3)}), "n, terminated missing"),
        (lambda buffer: buffer.append({"a": np.zeros(3), "n": 300, "terminated": False}), "column n"),
        (lambda buffer: buffer.append([1, 2, 3]), "rows: a mapping"),
        (lambda buffer: buffer.extend(None), "rows: a mapping"),
        (lambda buffer: buffer.extend(ODD), "column 3: a name is needed"),
        (lambda buffer: buffer.end_episode(-1), "env=-1"),
        (lambda buffer: buffer.end_episode(2**20), "env=1048576"),
    ],
)
def test_a_verb_that_is_refused_changes_nothing(verb: Callable[[ReplayBuffer], object], said: str) -> None:
    buffer = ReplayBuffer(8, select="prioritized")
    buffer.extend(GOOD)
    buffer.append({"a": np.ones(3), "n": 1, "terminated": False})
    before = everything(buffer)
    with pytest.raises(ConfigError, match=said):
        verb(buffer)
    assert everything(buffer) == before


def test_priorities_are_refused_where_they_play_no_part() -> None:
    buffer = ReplayBuffer(8)
    buffer.extend(GOOD)
    with pytest.raises(ConfigError, match="select='prioritized'"):
        buffer.update_priorities([0], [1.0])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "at least one column"),
        ({"": [1]}, "a name is needed"),
        ({"#episode": [1]}, "without # in front"),
        ({"a.b": [1], "a": {"b": [1]}}, r"column a\.b: it is there twice"),
        ({"a": [1], "a.b": [1]}, "a is a column, not a group"),
        ({"terminated": np.zeros((1, 2), bool)}, "column terminated: .*one flag"),
        ({"terminated": np.zeros((1, 0), bool)}, "column terminated: .*one flag"),
    ],
)
def test_columns_that_cannot_be_are_refused_and_others_may_come(columns: dict[str, Any], said: str) -> None:
    buffer = ReplayBuffer(8)
    with pytest.raises(ConfigError, match=said):
        buffer.extend(columns)
    with pytest.raises(ConfigError):
        buffer.append(
            {name: each[0] if isinstance(each, (list, np.ndarray)) else each for name, each in columns.items()}
        )
    assert buffer.ring.storage.schema is None
    buffer.extend({"a": {"b": [1]}})
    with pytest.raises(ConfigError, match="once nested and once by its dotted name"):
        buffer.extend({"a.b": [1], "a": {"b": [1]}})


@pytest.mark.parametrize(
    "column",
    [
        Column("x", "float31"),
        Column("x", "object"),
        Column("x", "complex128"),
        Column("x", "save"),
        Column("x", "float32", (-1,)),
        Column("", "float32"),
    ],
)
def test_a_schema_of_what_cannot_be_stored_is_refused(column: Column) -> None:
    with pytest.raises(ConfigError, match="column"):
        Schema((column,))


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema="):
        ReplayBuffer(4, schema={"x": "float32"})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_large_gathers_are_exact(dtype: torch.dtype) -> None:
    buffer = ReplayBuffer(64, select="lifo")
    given = torch.arange(64 * 20_000).reshape(64, 200, 100).to(dtype)
    buffer.extend({"image": given, "n": np.arange(64)})
    assert torch.equal(buffer.sample(64)["image"], given.flip(0))
    assert torch.equal(buffer.sample(32, slices={"length": 2})["image"][0], given[-2:])


def test_rows_that_would_not_fit_into_memory_are_refused_with_their_bytes() -> None:
    buffer = ReplayBuffer(2**31 - 1)
    with pytest.raises(ConfigError, match=r"[0-9,]{15,} bytes of memory are needed"):
        buffer.append({"image": np.zeros((3, 1024, 1024))})
    assert buffer.ring.storage.schema is None
    with pytest.raises(ConfigError, match="at most 2147483647 rows"):
        ReplayBuffer(2**31)


@pytest.mark.parametrize("storage", ["memory", "shared"])
@pytest.mark.parametrize("select", ["prioritized", {"select": "staleness", "half_life": 2.0}])
def test_what_rows_weigh_is_refused_before_it_is_tried_and_never_when_rows_go(
    storage: Any, select: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a buffer that is cleared the memory was had all along."""
    buffer = ReplayBuffer(1000, storage=storage, select=select)
    buffer.extend({"number": np.arange(10)})
    monkeypatch.setattr("pipeline.buffer.transitions.memory.available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="bytes of memory are needed"):
        ReplayBuffer(1000, storage=storage, select=select)
    buffer.clear()
    monkeypatch.undo()
    buffer.extend({"number": np.arange(3)})
    assert set(buffer.sample(20)["number"].tolist()) == {0, 1, 2}
