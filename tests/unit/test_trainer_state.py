"""Whatever was attached comes back equal, without pickle; what cannot is refused by its place at once."""

from __future__ import annotations

import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from pipeline.checkpoint.trainer_state import TREE_KEY, CapturedState, read_state
from pipeline.errors import Damaged, StoreError, UsageError
from pipeline.store.files import OsFiles
from pipeline.store.memory import available_memory
from tests.support.disk import ScriptedFiles, no_space


def round_trip(folder: Path, state: Any, name: str = "state") -> Any:
    path = str(folder / name)
    size, checksum = CapturedState("thing", state).write(OsFiles(), path)
    assert os.path.getsize(path) == size
    return read_state(path, size=size, checksum=checksum)


def same(found: Any, given: Any) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(given, torch.Tensor):
        if type(found) is not torch.Tensor or found.dtype != given.dtype or found.shape != given.shape:
            return False
        found, given = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (found, given))
        return bool(torch.equal(found.reshape(-1).view(torch.uint8), given.reshape(-1).view(torch.uint8)))
    if isinstance(given, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == given.dtype and bool(np.array_equal(found, given))
    if isinstance(given, dict):
        if not isinstance(found, dict) or list(found) != list(given) or [*map(type, found)] != [*map(type, given)]:
            return False
        return all(same(found[key], given[key]) for key in given)
    if isinstance(given, (list, tuple)) and type(given) in (list, tuple):
        return type(found) is type(given) and len(found) == len(given) and all(map(same, found, given))
    return type(found) is type(given) and bool(found == given or (found != found and given != given))


STATES: dict[str, Any] = {
    "nesting": {"a": [1, (2.5, None), {"b": {3: "x", (1, 2): True}}], "": b"\0", "big": 2**125 + 1},
    "floats": {"best": float("-inf"), "last": float("nan"), "lr": 5e-324, "x": -0.0},
    "no dict": [torch.ones(2), 3],
    "nothing": {},
    "int keys": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}},
    "dtypes": {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.uint16,
            torch.int32,
            torch.uint64,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    },
    "shapes": {"0-d": torch.tensor(2**53 + 1), "empty": torch.zeros((3, 0, 2)), "one": torch.zeros(1)},
    "memory": {
        "transposed": torch.arange(6).reshape(2, 3).T,
        "strided": torch.arange(10)[::3],
        "expanded": torch.ones(3).expand(2, 3),
        "offset": torch.arange(10)[4:],
        "with grad": nn.Parameter(torch.ones(2)).data,
    },
    "arrays": {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "r": np.arange(5)[::-1],
        "0-d": np.array(7, np.int16),
        "bool": np.array([True, False]),
    },
    "torch's own": {"dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([2, 3])},
    "random": {"bits": np.random.default_rng(7).bit_generator.state, "torch": torch.Generator().get_state()},
    "views of one memory": {"z": torch.tensor([1 + 2j, 3 - 4j]), "conj": torch.tensor([1 + 2j, 3 - 4j]).conj()},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_equal(tmp_path: Path, name: str) -> None:
    """CASES 114 and 31 among them: infinities, NaN, and the words of PCG64."""
    assert same(round_trip(tmp_path, STATES[name]), STATES[name])


def test_a_random_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    """CASES 30: PCG64 keeps half of a 64-bit word after one draw of 32 bits."""
    rng = np.random.default_rng(7)
    rng.integers(0, 1000, dtype=np.int32)
    saved = round_trip(tmp_path, rng.bit_generator.state)
    expected = rng.integers(0, 1000, 3, dtype=np.int32).tolist()
    other = np.random.default_rng()
    other.bit_generator.state = saved
    assert other.integers(0, 1000, 3, dtype=np.int32).tolist() == expected


def trained(optimizer_of: Any, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ],
    ids=["adam", "adamw", "momentum", "sgd"],
)
def test_a_model_and_its_optimizer_go_on_as_if_they_had_not_stopped(tmp_path: Path, optimizer_of: Any) -> None:
    model, optimizer = trained(optimizer_of)
    assert same(round_trip(tmp_path, optimizer.state_dict()), optimizer.state_dict())
    saved = [round_trip(tmp_path, each.state_dict(), f"s{n}") for n, each in enumerate((model, optimizer))]
    other, other_optimizer = trained(optimizer_of, steps=1)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    data = torch.randn(5, 3)
    for net, opt in ((model, optimizer), (other, other_optimizer)):
        opt.zero_grad()
        net(data).sum().backward()
        opt.step()
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["lambda", "cosine", "plateau"],
)
def test_a_scheduler_comes_back_where_it_was(tmp_path: Path, scheduler_of: Any) -> None:
    _, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1))
    scheduler = scheduler_of(optimizer)
    steps = {"metrics": 1.0} if "Plateau" in type(scheduler).__name__ else {}
    for _ in range(3):
        optimizer.step()
        scheduler.step(**steps)
    saved = round_trip(tmp_path, scheduler.state_dict())
    assert same(saved, scheduler.state_dict())
    fresh = scheduler_of(trained(lambda p: torch.optim.SGD(p, lr=0.1))[1])
    fresh.load_state_dict(saved)
    assert fresh.last_epoch == scheduler.last_epoch == 3


def test_a_shared_tensor_is_stored_once_and_comes_back_shared(tmp_path: Path) -> None:
    tied = torch.randn(1000)
    alone = round_trip(tmp_path, {"a": tied}, "alone")
    assert torch.equal(alone["a"], tied)
    state = {"a": tied, "b": [tied, {"c": tied.view(1000)}], "copy": tied.clone()}
    found = round_trip(tmp_path, state, "tied")
    assert found["b"][0] is found["a"]
    assert found["b"][1]["c"] is found["a"]
    assert found["copy"] is not found["a"]
    assert torch.equal(found["copy"], tied)
    found["a"].zero_()
    assert torch.equal(found["copy"], tied)
    sizes = [os.path.getsize(tmp_path / name) for name in ("alone", "tied")]
    assert sizes[1] - sizes[0] < 4000 + 1000, "one copy more, for the clone"


def test_tensors_that_only_share_an_address_are_kept_apart(tmp_path: Path) -> None:
    base = torch.arange(6, dtype=torch.float32)
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {
        "row": base[:3],
        "all": base,
        "matrix": base.view(2, 3),
        "turned": base.view(3, 2).T,
        "bits": base.view(torch.int32),
        "z": z,
        "conj": z.conj(),
        "imag": z.imag,
        "conj imag": z.conj().imag,
        "empty a": base[:0],
        "empty b": base[:0].reshape(0, 4),
    }
    assert same(round_trip(tmp_path, state), state)


def test_the_file_is_valid_safetensors_and_its_tensors_are_aligned(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.arange(4), "c": torch.ones((2, 2), dtype=torch.bfloat16)}
    round_trip(tmp_path, state)
    opened = safetensors.torch.load_file(tmp_path / "state")
    assert set(opened) == {"0", "1", "2", TREE_KEY}
    assert same({name: opened[n] for n, name in zip("012", "abc", strict=True)}, state)


class Thing:
    def __repr__(self) -> str:
        return "Thing()"


REFUSED: dict[str, tuple[Any, str]] = {
    "object": ({"a": [Thing()]}, r"a Thing at \$\.a\[0\]"),
    "function": ({"lr": {"f": len}}, r"at \$\.lr\.f"),
    "set": ({"a": {1}}, r"a set at \$\.a"),
    "object array": ({"a": np.array([{}])}, r"object.*\$\.a"),
    "text array": ({"a": np.array(["x"])}, r"\$\.a"),
    "sparse": ({"w": {"x": torch.eye(2).to_sparse()}}, r"sparse.*\$\.w\.x"),
    "meta": ({"w": torch.zeros(2, device="meta")}, r"meta.*\$\.w"),
    "complex128": ([torch.zeros(2, dtype=torch.complex128)], r"complex128.*\$\[0\]"),
    "cycle": ({}, "nested deeper"),
}
REFUSED["cycle"][0]["self"] = REFUSED["cycle"][0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_at_capture_with_its_place(name: str) -> None:
    state, place = REFUSED[name]
    with pytest.raises(UsageError, match=f"attached 'agent'.*{place}"):
        CapturedState("agent", state)


def test_the_captured_values_are_those_of_then(tmp_path: Path) -> None:
    """Plain values are copied at capture; tensors are read by write, which is over before the trainer goes on."""
    state: dict[str, Any] = {"steps": [1, 2], "weight": torch.ones(2)}
    captured = CapturedState("agent", state)
    state["steps"].append(3)
    state["more"] = 1
    size, checksum = captured.write(OsFiles(), str(tmp_path / "s"))
    state["weight"].zero_()
    found = read_state(str(tmp_path / "s"), size=size, checksum=checksum)
    assert same(found, {"steps": [1, 2], "weight": torch.ones(2)})


def test_every_flipped_byte_and_every_cut_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    size, checksum = CapturedState("a", {"w": torch.arange(5), 1: ("x", None)}).write(OsFiles(), str(path))
    raw = path.read_bytes()
    for place in range(size):
        bad = bytearray(raw)
        bad[place] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(Damaged, match=f"{path}: crc32c"):
            read_state(str(path), size=size, checksum=checksum)
    for cut in range(size):
        path.write_bytes(raw[:cut])
        with pytest.raises(Damaged, match=f"{cut} bytes long, {size} expected"):
            read_state(str(path), size=size, checksum=checksum)
    path.unlink()
    with pytest.raises(Damaged, match="missing"):
        read_state(str(path), size=size, checksum=checksum)


def checked(path: Path) -> dict[str, Any]:
    from pipeline.store.frames import crc32c_of_file

    size, checksum = crc32c_of_file(str(path))
    return {"size": size, "checksum": checksum}


def test_a_file_with_right_checksums_that_is_no_state_is_damage_and_is_never_unpickled(tmp_path: Path) -> None:
    """CASES 135: a pickle under our file's name touches nothing."""
    sentinel = tmp_path / "sentinel"

    class Touch:
        def __reduce__(self) -> Any:
            return (open, (str(sentinel), "w"))

    foreign = safetensors.torch.save({"w": torch.ones(2)})
    for raw in (pickle.dumps(Touch()), b"", b"\x80\x02", foreign, b"\0" * 100):
        path = tmp_path / "s"
        path.write_bytes(raw)
        with pytest.raises(Damaged, match=str(path)):
            read_state(str(path), **checked(path))
    assert not sentinel.exists()


def test_a_state_is_read_into_memory_once_and_is_the_readers_own(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    size, checksum = CapturedState("a", {"w": torch.arange(2 << 20)}).write(ScriptedFiles(), path)
    tracemalloc.start()
    try:
        found = read_state(path, size=size, checksum=checksum)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * size
    finally:
        tracemalloc.stop()
    found["w"].zero_()
    assert read_state(path, size=size, checksum=checksum)["w"][-1] == (2 << 20) - 1


def test_large_tensors_are_written_in_pieces(tmp_path: Path) -> None:
    """A full disk is noticed, and nothing but the largest tensor is ever copied."""
    state = {"w": torch.arange(5 << 20), "v": torch.ones(10)}
    files = ScriptedFiles()
    size, checksum = CapturedState("a", state).write(files, str(tmp_path / "s"))
    assert files.calls.count("write") == 1 + 10 + 1 + 1
    assert same(read_state(str(tmp_path / "s"), size=size, checksum=checksum), state)
    for call in range(1, len(files.calls)):
        path = tmp_path / f"s{call}"
        failing = ScriptedFiles(call, no_space)
        with pytest.raises(OSError, match="No space left"):
            CapturedState("a", {"v": torch.ones(10)}).write(failing, str(path))
        assert failing.open == set()
        if len(failing.calls) < call + 2:
            break
    assert issubclass(StoreError, OSError)


@pytest.mark.parametrize("available", [0, 1 << 40])
def test_a_state_that_memory_may_not_hold_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    """It is equal, it is the caller's to change, and the file stays as it is and may go."""
    monkeypatch.setattr("pipeline.checkpoint.trainer_state.available_memory", lambda: available)
    path = str(tmp_path / "state.safetensors")
    state: dict[str, Any] = {
        "w": torch.arange(5000, dtype=torch.float64),
        "n": np.arange(7),
        "empty": torch.empty(0),
        "x": 0.5,
    }
    size, checksum = CapturedState("m", state).write(OsFiles(), path)
    before = Path(path).read_bytes()
    found = read_state(path, size=size, checksum=checksum)
    found["w"] += 1
    assert Path(path).read_bytes() == before
    os.unlink(path)
    assert torch.equal(found["w"], state["w"] + 1)
    assert (found["n"].tolist(), found["x"], tuple(found["empty"].shape)) == (list(range(7)), 0.5, (0,))


def test_a_mapped_state_is_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.checkpoint.trainer_state.available_memory", lambda: 0)
    path = str(tmp_path / "state.safetensors")
    size, checksum = CapturedState("m", {"w": torch.arange(5000)}).write(OsFiles(), path)
    content = bytearray(Path(path).read_bytes())
    content[-100] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(Damaged, match="was changed"):
        read_state(path, size=size, checksum=checksum)


def test_the_memory_that_can_be_had_is_known() -> None:
    assert 1 << 20 < available_memory() <= sys.maxsize
