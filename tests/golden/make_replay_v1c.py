"""Wrote ``tests/golden/replay_v1c``: the folder of a replay buffer of format version 1 whose newer blocks have bodies.

    python -m tests.golden.make_replay_v1c

It is ``replay_v1/prioritized`` with one more life: so it has blocks of both kinds. ``expected.json`` says what it holds
and draws next. As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import numpy as np

from tests.golden.make_replay_v1 import made, rows, seen
from tests.golden.make_v1 import fixed_machine

TARGET = Path(__file__).parent / "replay_v1c"
BEFORE = Path(__file__).parent / "replay_v1" / "prioritized"


def make(target: Path) -> None:
    """Write the folder to ``target``, which must not exist."""
    with fixed_machine(), mock.patch("pipeline.replay.store.datetime") as clock:
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        target.mkdir()
        shutil.copytree(BEFORE, "run")
        buffer, counter = made("prioritized", "run")
        with buffer:
            assert buffer.resume(continue_episodes=True).step == 11
            for step in (12, 13):
                keys = np.array(buffer.extend(rows(6 * step, 6), envs=2, version=step))
                buffer.update_priorities(keys, 1 + keys % 7)
                counter.step = step
            buffer.save(13, wait=True)
        shutil.copytree("run", target / "run")
        (target / "run" / "lock").unlink()
        buffer, _ = made("prioritized", "run")
        with buffer:
            buffer.resume(continue_episodes=True)
            expected = seen(buffer)
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
