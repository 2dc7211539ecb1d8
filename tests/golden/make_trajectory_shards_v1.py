"""Wrote ``tests/golden/trajectory_shards_v1``: the folder of a buffer of trajectories of format version 1 of which
three ranks have shards.

    python -m tests.golden.make_trajectory_shards_v1

The first life is of two ranks and the second one of three, so that ranks have trajectories that others wrote, under
other numbers; the second rank wrote its own as they came. The oldest are gone, and the last ones were never saved.
``expected.json`` says what each of three ranks holds and draws next, and what each of two ranks holds. As with ``v1``,
these files are never written again.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline import Ranks, TrajectoryBuffer
from tests.golden.make_trajectories_v1 import seen, trajectory
from tests.golden.make_v1 import fixed_machine
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter

TARGET = Path(__file__).parent / "trajectory_shards_v1"
OPTIONS: dict[str, Any] = {"sample_window_size": 4, "capacity": 7, "cache_size": 3, "seed": 7}


def made(directory: str | Path, ranks: Ranks, **more: Any) -> tuple[TrajectoryBuffer, Counter, Counter]:
    """A rank's part of the buffer, and what is attached to it, and as its own."""
    buffer = TrajectoryBuffer(directory=directory, ranks=ranks, **{**OPTIONS, **more})
    counter, own = Counter(), Counter()
    buffer.attach(counter=counter)
    buffer.attach_own(env=own)
    return buffer, counter, own


def life(ranks: Ranks, begin: int) -> None:
    """Save two steps, and add more than that."""
    buffer, counter, own = made("run", ranks, auto_save=ranks.rank == 1)
    with buffer:
        assert buffer.resume(evict_oldest=True).step == begin
        for step in (begin + 1, begin + 2):
            for number in range(2 + ranks.rank):
                buffer.add_trajectories([trajectory(100 * ranks.rank + 10 * step + number)])
                buffer._shelving.join()
            buffer.sample(3 + ranks.rank)
            counter.step, own.step = step, 10 * step + ranks.rank
            buffer.save(step, wait=True)
        buffer.add_trajectories([trajectory(900 + ranks.rank)])


def three(ranks: Ranks, directory: str | Path) -> Any:
    """What a rank of three holds and draws next, as it was."""
    buffer, counter, own = made(directory, ranks)
    with buffer:
        assert buffer.resume().step == counter.step == 4
        assert own.step == 40 + ranks.rank
        return seen(buffer)


def two(ranks: Ranks, directory: str | Path) -> Any:
    """What a rank of two holds."""
    buffer, counter, _ = made(directory, ranks, capacity=20)
    with buffer:
        found = buffer.resume()
        assert found.step == counter.step == 4
        assert found.left == ("env",)
        return seen(buffer)


def make(target: Path) -> None:
    """Write the folder to ``target``, which must not exist."""
    with (
        fixed_machine(),
        mock.patch("pipeline.replay.store.datetime") as clock,
        mock.patch("pipeline.replay.rank_store.datetime", clock),
    ):
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        target.mkdir()
        fine(on_ranks(2, lambda ranks: life(ranks, 0)))
        fine(on_ranks(3, lambda ranks: life(ranks, 2)))
        shutil.copytree("run", target / "run")
        (target / "run" / "lock").unlink()
        expected = {"three": fine(on_ranks(3, lambda ranks: three(ranks, "run")))}
        expected["two"] = fine(on_ranks(2, lambda ranks: two(ranks, "run")))
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
