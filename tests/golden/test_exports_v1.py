"""Exports that format version 1 left behind are imported by every version after it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import Prioritized, ReplayBuffer, TrajectoryBuffer
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.rollouts_out import rollouts_of
from pipeline.tools.interchange.runs import open_run
from tests.golden.make_exports_v1 import FORMATS, TARGET, rows, trajectory


@pytest.mark.parametrize("to", FORMATS)
def test_the_rows_their_priorities_and_the_open_episode(tmp_path: Path, to: str) -> None:
    assert import_data(TARGET / f"buffer-{to}", tmp_path / "run").count == 6
    with ReplayBuffer(6, select=Prioritized(alpha=0.5), directory=tmp_path / "run", seed=1) as buffer:
        assert buffer.resume(continue_episodes=True).step == 3
        keys = buffer.ring.keys()
        assert keys.tolist() == list(range(6))
        for name, given in rows().items():
            held = buffer.ring.storage.view(name)[buffer.ring.slots(keys)]
            expected = given.view(torch.int16).numpy() if isinstance(given, torch.Tensor) else given
            assert held.tobytes() == expected.tobytes(), name
        assert np.allclose(buffer.drawer.mass(keys), np.sqrt(np.arange(6) + 1.0))
        assert buffer.ring.mark("#end", keys).tolist() == [0, 1, 0, 2, 0, 0]
        assert buffer.ring.mark("#version", keys).tolist() == [2] * 6
        assert buffer.statistics().open_episodes == 1


@pytest.mark.parametrize("to", FORMATS)
def test_the_trajectories(tmp_path: Path, to: str) -> None:
    import_data(TARGET / f"trajectories-{to}", tmp_path / "run")
    with TrajectoryBuffer(directory=tmp_path / "run", seed=1) as buffer:
        assert buffer.resume().step == 4
        for number in range(2):
            expected, found = trajectory(number), buffer.trajectory(number)
            for name in ("rewards", "actions"):
                assert torch.equal(torch.as_tensor(found[name]), expected[name])
        assert [info.model_weights_id for info in buffer.infos()] == ["w0", "w1"]


@pytest.mark.parametrize("to", FORMATS)
def test_the_rollouts(tmp_path: Path, to: str) -> None:
    assert import_data(TARGET / f"rollouts-{to}", tmp_path / "run").count == 4
    found = list(rollouts_of(open_run(str(tmp_path / "run"))).records())
    assert [record.fields["index"] for record in found] == [0, 1, 2, 3]
    assert [record.fields["reward"] for record in found] == [0.0, -1.0, 2 / 3, 1.0]
    assert [record.fields["agents"] for record in found] == [["solver", "judge"], [], *[["solver", "judge"]] * 2]
    last = {name: (each.dtype, tuple(each.shape)) for name, each in found[3].tensors.items()}
    assert last == {"0.prompt_ids": ("I64", (3,)), "0.logprobs": ("F32", (3,)), "1.score": ("F32", ())}
    assert found[3].tensors["0.logprobs"].array.view(np.float32).tolist() == [0.0, -0.125, -0.25]
    info = found[1].fields["info"]
    assert info["bytes"] == b"\x00\xff"
    assert math.isnan(info["nan"])
    assert info["tuple"] == {"\x00forebay": ["tuple", [1, None]]}
