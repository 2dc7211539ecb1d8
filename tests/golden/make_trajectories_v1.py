"""Wrote ``tests/golden/trajectories_v1``: a folder of a buffer of trajectories of format version 1.

    python -m tests.golden.make_trajectories_v1

It was saved by two lives, the second of which wrote trajectories as they came; the oldest are gone, and some were
never saved. Beside the folder, ``expected.json`` says what its generations hold and what they draw next. As with
``v1``, these files are never written again.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from pipeline import TrajectoryBuffer
from tests.golden.make_v1 import fixed_machine
from tests.support.replaying import Counter

TARGET = Path(__file__).parent / "trajectories_v1"
OPTIONS: dict[str, Any] = {"sample_window_size": 6, "capacity": 9, "cache_size": 4, "seed": 7}


def made(directory: str | Path, **more: Any) -> tuple[TrajectoryBuffer, Counter]:
    """The buffer of the folder, and what is attached to it."""
    buffer, counter = TrajectoryBuffer(directory=directory, **OPTIONS, **more), Counter()
    buffer.attach(counter=counter)
    return buffer, counter


def trajectory(number: int) -> dict[str, Any]:
    """Fields of every kind, whose values tell where they are from."""
    steps, envs = 1 + number % 3, 1 + number % 2
    where = 100 * number + 10 * np.arange(steps)[:, None] + np.arange(envs)
    return {
        "rewards": (where / 4).astype(np.float32),
        "actions": np.repeat(where[..., None], 3, axis=-1),
        "dones": where % 10 == 0,
        "curr_obs": {
            "states": torch.from_numpy(where)[..., None].to(torch.bfloat16),
            "image": np.repeat(where[..., None] % 251, 1100, axis=-1).astype(np.uint8),
        },
        "max_episode_length": number,
        "model_weights_id": f"step-{number // 4}",
    }


def life(begin: int, until: int, **more: Any) -> None:
    """Add and save at some steps."""
    buffer, counter = made("run", **more)
    with buffer:
        assert buffer.resume().step == begin
        for step in range(begin + 1, until + 1):
            buffer.add_trajectories([trajectory(2 * step), trajectory(2 * step + 1)])
            buffer._shelving.join()
            buffer.sample(4)
            counter.step = step
            if step in (2, 4, 7):
                buffer.save(step, wait=True)


def seen(buffer: TrajectoryBuffer) -> dict[str, Any]:
    """What a buffer holds, images aside, and what it draws next."""
    rows = buffer.arrays()
    rows["curr_obs.image"] = rows["curr_obs.image"][:, 1099]
    found = {
        "infos": [
            [each.trajectory_id, each.shape, each.max_episode_length, each.model_weights_id] for each in buffer.infos()
        ],
        "rows": {name: array.tolist() for name, array in rows.items()},
        "draws": [buffer.sample(5)["actions"][:, 0].tolist() for _ in range(20)],
        "counter": buffer.trajectory_counter,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def make(target: Path) -> None:
    """Write the folder to ``target``, which must not exist."""
    expected = {}
    with fixed_machine(), mock.patch("pipeline.replay.store.datetime") as clock:
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        target.mkdir()
        life(0, 4)
        life(4, 8, auto_save=True)
        shutil.copytree("run", target / "run")
        (target / "run" / "lock").unlink()
        for step in (2, 4, 7):
            shutil.copytree("run", f"copy-{step}")
            buffer, _ = made(f"copy-{step}")
            with buffer:
                buffer.resume(step)
                expected[step] = seen(buffer)
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
