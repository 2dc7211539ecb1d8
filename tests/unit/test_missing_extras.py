"""A format whose package is not installed says which extra to install, before anything is made."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Context, Item, Pipeline, ReplayBuffer, Rollout, Task
from pipeline.errors import ConfigError
from pipeline.tools.exporting import export
from pipeline.tools.formats.registry import FROM, TO
from pipeline.tools.importing import import_data
from tasks import SequenceSource, chat
from tasks.trl import RolloutWorker
from tasks.verifiers import verifiers_task

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


def test_adapters_of_other_packages_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "trl"):
        monkeypatch.setitem(sys.modules, name, None)
    client = chat.client("http://localhost:1/v1", model="policy")
    with pytest.raises(ImportError, match=r"pip install 'forebay\[verifiers\]'"):
        verifiers_task(object(), client=client)
    pipe = Pipeline([Task("t", source=SequenceSource([0]), run=_never)])
    with pytest.raises(ImportError, match=r"pip install 'forebay\[trl\]'"):
        RolloutWorker(pipe, None, groups=1)


async def _never(item: Item, ctx: Context) -> Rollout:
    raise AssertionError
