"""Wrote ``tests/golden/replay_v1``: two folders of replay buffers of format version 1.

    python -m tests.golden.make_replay_v1

``prioritized`` was saved by two lives, over a wrap-around of its ring, with a half-done draw of two environments and a
cut episode; ``shared`` shares next observations and draws without replacement, in the middle of an epoch. Beside them,
``expected.json`` says what they hold and what they draw next. As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pipeline import Anneal, Limiter, Prioritized, ReplayBuffer, WithoutReplacement
from tests.golden.make_v1 import fixed_machine
from tests.support.replaying import Counter, contents

TARGET = Path(__file__).parent / "replay_v1"
OPTIONS: dict[str, dict[str, Any]] = {
    "prioritized": {
        "select": Prioritized(alpha=0.7, beta=Anneal(start=0.4, end=1.0, over=50)),
        "limiter": Limiter(min_size=2, ratio=100.0, error_buffer=10_000),
        "seed": 3,
    },
    "shared": {"select": WithoutReplacement(), "share_next_obs": True, "seed": 4},
}
CAPACITY = 40


def made(name: str, directory: str | Path) -> tuple[ReplayBuffer, Counter]:
    """The buffer of a folder, and what is attached to it."""
    buffer, counter = ReplayBuffer(CAPACITY, directory=directory, **OPTIONS[name]), Counter()
    buffer.attach(counter=counter)
    return buffer, counter


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows of every kind of column, whose values tell their number."""
    number = np.arange(first, first + count)
    return {
        "obs": {"n": number, "half": (number / 2).astype(np.float16)},
        "image": np.repeat(number % 251, 1100).astype(np.uint8).reshape(count, 11, 100),
        "reward": (number % 5 / 4).astype(np.float32),
        "next_obs": {"n": number + 2, "half": ((number + 2) / 2).astype(np.float16)},
        "terminated": number % 9 == 8,
        "truncated": number % 14 == 13,
    }


def life(name: str, begin: int, until: int) -> None:
    """Add and save at some steps."""
    buffer, counter = made(name, name)
    with buffer:
        assert buffer.resume(continue_episodes=True).step == begin
        for step in range(begin + 1, until + 1):
            keys = np.array(buffer.extend(rows(6 * step, 6), envs=2, version=step))
            if name == "prioritized":
                buffer.update_priorities(keys, 1 + keys % 7)
            buffer.sample(4)
            counter.step = step
            if step == 5:
                buffer.end_episode(1)
            if step in (4, 7, 10, 11):
                buffer.save(step, wait=True)


def seen(buffer: ReplayBuffer) -> dict[str, Any]:
    """What a buffer holds, images aside, and what it draws next."""
    found = contents(buffer)
    found["image"] = [image[0][0] for image in found["image"]]
    batches = [buffer.sample(6) for _ in range(20)]
    found["draws"] = [
        [each.keys.tolist(), each["next_obs"]["n"].tolist(), np.round(each.weights.double().numpy(), 4).tolist()]
        for each in batches
    ]
    found["limiter"] = buffer.can_add(10), buffer.can_sample(10)
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def make(target: Path) -> None:
    """Write the folders to ``target``, which must not exist."""
    expected = {}
    with fixed_machine(), mock.patch("pipeline.replay.store.datetime") as clock:
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        target.mkdir()
        for name in OPTIONS:
            life(name, 0, 7)
            life(name, 7, 11)
            shutil.copytree(name, target / name)
            (target / name / "lock").unlink()
            buffer, _ = made(name, name)
            with buffer:
                buffer.resume(continue_episodes=True)
                expected[name] = seen(buffer)
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
