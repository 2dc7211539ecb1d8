"""A format whose package is not installed says which extra to install, before anything is made."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.errors import ConfigError
from pipeline.tools.exporting import export
from pipeline.tools.formats.registry import FROM, TO
from pipeline.tools.importing import import_data

OWN = {"jsonl", "safetensors", "rlinf", "torchrl", "xtuner"}


def test_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(10, directory=str(tmp_path / "run"), seed=1) as buffer:
        buffer.resume()
        buffer.extend({"obs": np.zeros((4, 2), np.float32), "action": [0, 1, 0, 1], "reward": np.zeros(4)})
        buffer.save(1, wait=True)
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if not name.startswith("pipeline."):
            raise ImportError(f"no {name}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    for name in sorted({*TO} - OWN):
        with pytest.raises(ConfigError, match=r"pip install 'forebay\[tools"):
            export(str(tmp_path / "run"), tmp_path / "out", to=name)
    for name in sorted({*FROM} - OWN):
        with pytest.raises(ConfigError, match=r"pip install 'forebay\[tools"):
            import_data(tmp_path / "run", tmp_path / "out", from_=name)
    assert not (tmp_path / "out").exists()
