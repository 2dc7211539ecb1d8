"""``verify`` reads in two threads: what it finds, says and tells is what one alone would, in the same order."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import Verified, bulk, verify
from pipeline.checkpoint.verify import bytes_to_verify
from pipeline.store.layout import Layout

MB = 1 << 20


class Learner:
    """Its state is larger than what one thread reads at a time."""

    def state_dict(self) -> dict[str, Any]:
        return {"weight": np.random.default_rng(3).integers(0, 256, 5 * MB + 77, np.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["weight"]) == 5 * MB + 77


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two lives, each with a segment of 6 MB."""
    monkeypatch.setattr(bulk, "_STRETCH", MB)
    directory = str(tmp_path / "run")
    for life in range(2):
        with ReplayBuffer(10_000, directory=directory, seed=5, keep=None) as buffer:
            buffer.attach(learner=Learner())
            buffer.resume()
            buffer.extend({"obs": np.random.default_rng(life).random((1500, 1024), np.float32)})
            buffer.save(life, wait=True)
    assert len(os.listdir(os.path.join(directory, "segments"))) == 2
    return directory


def alone(directory: str, monkeypatch: pytest.MonkeyPatch) -> Verified:
    """What one thread finds."""
    with monkeypatch.context() as patched:
        patched.setattr(bulk, "_LITTLE", 1 << 60)
        return verify(directory)


def flipped(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_what_is_whole_is_whole_and_every_byte_is_told_once(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    heard = set()

    def tell(count: int) -> None:
        told.append(count)
        heard.add(threading.current_thread())

    found = verify(run, told=tell)
    assert (found.whole, found.damages, found.unpromised) == (True, [], [])
    assert found == alone(run, monkeypatch)
    manifests = sum(path.stat().st_size for path in Path(run).rglob("manifest.json"))
    assert sum(told) == bytes_to_verify(run) - manifests
    assert heard == {threading.current_thread()}


def test_two_segments_are_read_at_one_time(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    scanned = bulk.Scan.scanned

    def beside_another(self: bulk.Scan, told: Any) -> bulk.Scanned:
        both.wait()
        return scanned(self, told)

    monkeypatch.setattr(bulk.Scan, "scanned", beside_another)
    before = threading.active_count()
    assert verify(run).whole
    assert threading.active_count() == before


def test_what_is_damaged_is_found_in_the_order_in_which_one_thread_finds_it(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = [str(path) for path in sorted(Path(run).rglob("learner.safetensors"))]
    segments = [os.path.join(run, "segments", name) for name in Layout(run).list_segments()]
    assert len(trained) >= 2
    for path in segments:
        flipped(path, 3 * MB)
    flipped(trained[0], 4 * MB)  # in a stretch that is not the first
    os.truncate(trained[1], 2 * MB)
    found = verify(run)
    assert found == alone(run, monkeypatch)
    paths = dict.fromkeys(os.path.join(run, each.path) for each in found.damages)
    assert list(paths) == [*trained[:2], *segments]
    assert "crc32c" in found.damages[0].what
    assert found.damages[1].offset == 2 * MB
