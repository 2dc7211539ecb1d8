"""A replay buffer's folder in which somebody put pickles: an error of ours, nothing is run, and nothing was changed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, ForebayError, ReplayBuffer
from tests.support.disk import ScriptedFiles
from tests.support.opening import reseal
from tests.support.replaying import Counter, fill


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def made(directory: Path) -> ReplayBuffer:
    buffer = ReplayBuffer(60, directory=directory, select="prioritized", files=ScriptedFiles())
    buffer.attach(counter=Counter())
    return buffer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with made(tmp_path / "run") as buffer:
        fill(buffer, 0, 70)
        buffer.save(1, wait=True)
    return tmp_path / "run"


def test_a_pickle_under_any_of_our_names_is_refused_and_not_run(run: Path, tmp_path: Path) -> None:
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    names = [name for name in names if name != "lock" and not name.startswith("journals")]
    assert len(names) >= 6, names
    for name in names:
        path, bomb = run / name, pickle.dumps(Bomb(tmp_path / "touched"))
        before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
        path.write_bytes(bomb + bytes(max(0, len(before[path]) - len(bomb)) if name.startswith("segments") else 0))
        if name.startswith("generations") and not name.endswith("manifest.json"):
            reseal(str(run))
        with made(run) as buffer:
            with pytest.raises(ForebayError) as refused:
                buffer.resume()
            assert path.name in str(refused.value)
            assert len(buffer) == 0, name
        assert not (tmp_path / "touched").exists(), name
        for each, content in before.items():
            each.write_bytes(content)
    with made(run) as buffer:
        assert buffer.resume().rows == 60


def test_nothing_is_unpickled_on_the_way(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpickles(*args: Any, **more: Any) -> Any:
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler", "_loads", "_load"):
        monkeypatch.setattr(pickle, name, unpickles)
    monkeypatch.setattr(torch, "load", unpickles)
    with pytest.raises(AssertionError, match="is unpickled"):
        pickle.loads(b"N.")  # noqa: S301
    with made(run) as buffer:
        assert buffer.resume().rows == 60
        state = buffer.state_dict()
        assert len(buffer.sample(8, n_step=3, gamma=0.9)) == 8
    again = ReplayBuffer(60, select="prioritized")
    again.load_state_dict(state)
    assert len(again) == 60


def test_objects_are_not_stored() -> None:
    buffer = ReplayBuffer(4)
    with pytest.raises(ConfigError, match="column x: object values cannot be stored"):
        buffer.extend({"x": np.array([Bomb(Path()), None], object)})
    assert buffer.schema is None
