"""A run that is killed again and again, for real, trains every item exactly once."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from typing import Literal

import anyio
import pytest

from tests.support.killed import child, train

Strategy = Literal["asynchronous", "synchronous"]
SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))


def kill_until_finished(folder: Path, *, strategy: Strategy, kills: int, count: int, rng: random.Random) -> int:
    """Start a run, kill it up to ``kills`` times at random moments, and let it finish. Returns how many kills hit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.killed"])
    folder.mkdir()
    directory, log = str(folder / "run"), str(folder / "log")
    hits = 0
    while True:
        process = context.Process(target=child, args=(directory, count, strategy, log))
        process.start()
        process.join(rng.uniform(0.02, 0.35) if hits < kills else 100)
        if process.exitcode is None:
            assert hits < kills, "the run does not come to its end"
            process.kill()
            process.join()
            hits += 1
            continue
        text = Path(log).read_text() if os.path.exists(log) else ""
        assert process.exitcode == 0, text
        return hits


@pytest.mark.slow
@pytest.mark.timeout(300 * SOAK)
@pytest.mark.parametrize("seed", range(SOAK))
@pytest.mark.parametrize(("strategy", "kills", "count"), [("asynchronous", 50, 1500), ("synchronous", 15, 300)])
def test_every_item_is_trained_once_through_random_kills(
    tmp_path: Path, strategy: Strategy, kills: int, count: int, seed: int
) -> None:
    """As many kills on a fast machine as on a slow one: a run that ends too early leaves the rest to another."""
    rng = random.Random(seed)
    left, runs = kills, 0
    while left:
        folder = tmp_path / str(runs)
        left -= kill_until_finished(folder, strategy=strategy, kills=left, count=count, rng=rng)
        # Open the finished run once more: nothing is left, and what the weights have seen is each item, once.
        tally = anyio.run(train, str(folder / "run"), count, strategy)
        assert tally.seen.tolist() == [1] * count
        assert sum(map(len, tally.steps)) == count
        runs += 1
