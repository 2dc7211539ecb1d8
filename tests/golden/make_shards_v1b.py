"""Wrote ``tests/golden/shards_v1b``: the folder of a replay buffer of format version 1 of which two ranks have shards,
and of which others than the oldest rows go first.

    python -m tests.golden.make_shards_v1b

The first life is of one rank and the second one of two, so that a rank has rows that another one made; each has had
more rows than it holds, some have no end yet, and a column of rows was changed after they had been written.
``expected.json`` says what each of two ranks holds and draws next, and what each of three ranks holds. As with ``v1``,
these files are never written again.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pipeline import Prioritized, Ranks, ReplayBuffer
from pipeline.buffer.transitions.layout import END
from tests.golden.make_v1 import fixed_machine
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter

TARGET = Path(__file__).parent / "shards_v1b"
NAMES = ("n", "score", "value", "half", "#version")


def made(directory: str | Path, ranks: Ranks, capacity: int = 12) -> tuple[ReplayBuffer, Counter]:
    """A rank's part of the buffer, and what is attached to it."""
    options: dict[str, Any] = {"select": Prioritized(alpha=0.7, beta=0.4), "remove": {"by": "min", "field": "score"}}
    buffer, counter = ReplayBuffer(capacity, directory=directory, seed=6, ranks=ranks, **options), Counter()
    buffer.attach(counter=counter)
    return buffer, counter


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows whose columns follow from their number."""
    n = np.arange(first, first + count)
    return {
        "n": n,
        "score": n * 37 % 101,
        "value": n / 8,
        "half": (n / 2).astype(np.float16),
        "image": np.repeat(n % 251, 1100).astype(np.uint8).reshape(count, 11, 100),
        "terminated": n % 5 == 4,
    }


def life(ranks: Ranks, begin: int) -> None:
    """Add, and save twice."""
    buffer, counter = made("run", ranks)
    with buffer:
        assert buffer.resume().step == begin
        for step in (begin + 1, begin + 2):
            first = 1000 * ranks.rank + 100 * step
            for at in range(first, first + 9, 3):
                keys = np.array(buffer.extend(rows(at, 3), env=at % 2, version=step))
                buffer.update_priorities(keys, 1 + keys % 7)
            there = buffer.ring.keys()[1::4]
            buffer.write_back(there, {"value": there - 0.5})
            buffer.sample(2 + ranks.rank)
            counter.step = step
            buffer.save(step, wait=True)


def seen(buffer: ReplayBuffer) -> Any:
    """What a rank holds, oldest first, and draws next."""
    ring = buffer.ring
    keys = ring.keys()
    slots = ring.slots(keys)
    found = {name: ring.storage.view(name)[slots].tolist() for name in (*NAMES, END)}
    found["image"] = ring.storage.view("image")[slots][:, 0, 0].tolist()
    found["mass"] = np.round(buffer.drawer.mass(keys), 9).tolist()
    found["added"] = ring.added
    found["draws"] = [buffer.sample(5)["n"].tolist() for _ in range(20)]
    return json.loads(json.dumps(found))


def held(ranks: Ranks, directory: str | Path, capacity: int) -> Any:
    """What a rank holds and draws next."""
    buffer, counter = made(directory, ranks, capacity)
    with buffer:
        assert buffer.resume().step == counter.step == 4
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
        fine(on_ranks(1, lambda ranks: life(ranks, 0)))
        fine(on_ranks(2, lambda ranks: life(ranks, 2)))
        shutil.copytree("run", target / "run")
        (target / "run" / "lock").unlink()
        expected = {"two": fine(on_ranks(2, lambda ranks: held(ranks, "run", 12)))}
        expected["three"] = fine(on_ranks(3, lambda ranks: held(ranks, "run", 10)))
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
