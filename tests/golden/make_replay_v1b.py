"""Wrote ``tests/golden/replay_v1b``: the folder of a replay buffer of format version 1 with a compressed column.

    python -m tests.golden.make_replay_v1b

Its first life did not compress, its second did: so it has blocks of both kinds. ``expected.json`` says what it holds
and draws next. As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline import ReplayBuffer
from tests.golden.make_replay_v1 import rows, seen
from tests.golden.make_v1 import fixed_machine

TARGET = Path(__file__).parent / "replay_v1b"


def made(directory: str | Path, *, compress: bool) -> ReplayBuffer:
    """The buffer of the folder."""
    how: Any = {"image": "zlib"} if compress else None
    return ReplayBuffer(40, directory=directory, seed=5, compress=how)


def life(begin: int, until: int, *, compress: bool) -> None:
    """Add at some steps, and save at the last."""
    with made("run", compress=compress) as buffer:
        assert buffer.resume(continue_episodes=True).step == begin
        for step in range(begin + 1, until + 1):
            buffer.extend(rows(6 * step, 6), envs=2, version=step)
        buffer.save(until, wait=True)


def make(target: Path) -> None:
    """Write the folder to ``target``, which must not exist."""
    with fixed_machine(), mock.patch("pipeline.replay.store.datetime") as clock:
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        target.mkdir()
        life(0, 4, compress=False)
        life(4, 8, compress=True)
        shutil.copytree("run", target / "run")
        (target / "run" / "lock").unlink()
        with made("run", compress=True) as buffer:
            buffer.resume(continue_episodes=True)
            expected = seen(buffer)
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
