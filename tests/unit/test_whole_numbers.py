"""Whole numbers of any size come back as they were, wherever they are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.trainer_state import CapturedState, read_state
from pipeline.sampler import Progress
from pipeline.sampler.progress import decode_progress, encode_progress
from pipeline.store.files import OsFiles
from tests.support.runs import pipeline

BIG = [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]


@pytest.mark.parametrize("value", BIG)
def test_whole_numbers_of_any_size_in_what_is_attached(tmp_path: Path, value: int) -> None:
    path = str(tmp_path / "state")
    size, checksum = CapturedState("thing", {"x": value, "in": [value], value: 1}).write(OsFiles(), path)
    found = read_state(path, size=size, checksum=checksum)
    assert found == {"x": value, "in": [value], value: 1}
    assert type(found["x"]) is int


@pytest.mark.parametrize("value", BIG)
def test_in_progress(value: int) -> None:
    progress = Progress(target_samples={"a": value}, produced_tokens={"a": value})
    found, unknown = decode_progress(encode_progress(progress))
    assert (found, unknown) == (progress, {})
    assert type(found.target_samples["a"]) is int


@pytest.mark.parametrize("value", BIG)
def test_unknown_fields_of_progress(value: int) -> None:
    raw = json.dumps({"of_the_future": {"state": value}}).encode()
    found, unknown = decode_progress(raw)
    assert unknown["of_the_future"]["state"] == value, unknown
    assert type(unknown["of_the_future"]["state"]) is int
    _, still = decode_progress(encode_progress(found, unknown))
    assert still == unknown


async def test_a_pcg64_state_through_save_and_resume(run_directory: str) -> None:
    class Rng:
        def __init__(self, seed: int) -> None:
            self.rng = np.random.default_rng(seed)

        def state_dict(self) -> Any:
            return self.rng.bit_generator.state

        def load_state_dict(self, state: Any) -> None:
            self.rng.bit_generator.state = state

    one, two = Rng(7), Rng(8)
    one.rng.integers(0, 1000, dtype=np.int32)
    async with pipeline(directory=run_directory) as pipe:
        pipe.attach(rng=one)
        await pipe.start()
        await (await pipe.save(0)).committed()
    expected = one.rng.integers(0, 1000, 3, dtype=np.int32).tolist()
    async with pipeline(directory=run_directory) as pipe:
        pipe.attach(rng=two)
        await pipe.resume()
    assert two.rng.integers(0, 1000, 3, dtype=np.int32).tolist() == expected
