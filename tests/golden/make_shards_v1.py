"""Wrote ``tests/golden/shards_v1``: the folder of a replay buffer of format version 1 of which three ranks have shards.

    python -m tests.golden.make_shards_v1

Two lives of three ranks, prioritized. Lengths of episodes are those of ``LENGTHS``: the first rank has had more rows
than it holds, so that episodes lack their beginning; all have some that have no end yet, and one was cut; a column of
rows was changed after they had been written. The second rank has added little, and nothing in the first life.
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

import numpy as np

from pipeline import Prioritized, Ranks, ReplayBuffer
from tests.golden.make_replay_v1 import seen
from tests.golden.make_v1 import fixed_machine
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter, contents

TARGET = Path(__file__).parent / "shards_v1"
LENGTHS = [[5, 9, 3, 7, 4, 8, 6, 3, 9], [3, 4, 6, 9], [8, 3, 5, 9, 7, 4, 6]]
"""Of the episodes of each rank, in the order in which they begin."""
BLOCKS = [(9, 6), (0, 4), (5, 4)]
"""How many steps of its two environments each rank adds in each life."""


def made(directory: str | Path, ranks: Ranks, capacity: int = 24) -> tuple[ReplayBuffer, Counter]:
    """A rank's part of the buffer, and what is attached to it."""
    select = Prioritized(alpha=0.7, beta=0.4, new="current_max")
    buffer, counter = ReplayBuffer(capacity, directory=directory, seed=6, select=select, ranks=ranks), Counter()
    buffer.attach(counter=counter)
    return buffer, counter


def played(rank: int, steps: int) -> list[dict[str, Any]]:
    """The first steps of a rank's environments; each row says which episode it is of, and which row of that."""
    lengths = iter(LENGTHS[rank])
    begun, name, at, left = 0, [0, 0], [0, 0], [0, 0]
    found = []
    for _ in range(steps):
        for env in range(2):
            if not left[env]:
                begun, left[env], at[env] = begun + 1, next(lengths), 0
                name[env] = 100 * rank + begun
            left[env], at[env] = left[env] - 1, at[env] + 1
        n = np.array(name) * 100 + at
        found.append(
            {
                "n": n,
                "obs": {"half": (n / 2).astype(np.float16), "odd": np.where(n % 4 == 1, np.nan, -0.0)},
                "image": np.repeat(n % 251, 1100).astype(np.uint8).reshape(2, 11, 100),
                "next_obs": {"n": n + 1},
                "value": n / 8,
                "terminated": (np.array(left) == 0) & (n // 100 % 2 == 0),
                "truncated": (np.array(left) == 0) & (n // 100 % 2 == 1),
            }
        )
    return found


def life(ranks: Ranks, number: int) -> None:
    """Add, and save twice."""
    begin, count = sum(BLOCKS[ranks.rank][:number]), BLOCKS[ranks.rank][number]
    buffer, counter = made("run", ranks)
    with buffer:
        assert buffer.resume(continue_episodes=True).step == 2 * number
        for version, rows in enumerate(played(ranks.rank, begin + count)[begin:], begin):
            keys = np.array(buffer.extend(rows, envs=2, version=version))
            buffer.update_priorities(keys, 1 + (keys + ranks.rank) % 7)
        counter.step = 2 * number + 1
        buffer.save(counter.step, wait=True)
        if len(buffer):
            keys = buffer.ring.keys()[1::5]
            buffer.write_back(keys, {"value": keys - 0.5})
            buffer.sample(2 + ranks.rank)
        if number and ranks.rank == 2:
            buffer.end_episode(1)
        counter.step += 1
        buffer.save(counter.step, wait=True)


def three(ranks: Ranks, directory: str | Path) -> dict[str, Any]:
    """What a rank of three holds and draws next, as it was."""
    buffer, counter = made(directory, ranks)
    with buffer:
        assert buffer.resume(continue_episodes=True).step == counter.step == 4
        return seen(buffer)


def two(ranks: Ranks, directory: str | Path) -> dict[str, Any]:
    """What a rank of two holds."""
    buffer, counter = made(directory, ranks, 40)
    with buffer:
        assert buffer.resume().step == counter.step == 4
        found = contents(buffer)
        found["image"] = [image[0][0] for image in found["image"]]
        found["mass"] = np.round(buffer.drawer.mass(buffer.ring.keys()), 9).tolist()
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain


def make(target: Path) -> None:
    """Write the folder to ``target``, which must not exist."""
    with (
        fixed_machine(),
        mock.patch("pipeline.replay.store.datetime") as clock,
        mock.patch("pipeline.replay.rank_store.datetime", clock),
    ):
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        target.mkdir()
        fine(on_ranks(3, lambda ranks: life(ranks, 0)))
        fine(on_ranks(3, lambda ranks: life(ranks, 1)))
        shutil.copytree("run", target / "run")
        (target / "run" / "lock").unlink()
        expected = {"three": fine(on_ranks(3, lambda ranks: three(ranks, "run")))}
        expected["two"] = fine(on_ranks(2, lambda ranks: two(ranks, "run")))
    (target / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
