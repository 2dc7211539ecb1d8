"""A trainer with a buffer of trajectories is killed for real."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from pipeline import TrajectoryBuffer
from pipeline.checkpoint import verify
from tests.support.children import Ended, child
from tests.support.trajectories import check, numbers, run_for_ever

KILLS = 10 * int(os.environ.get("FOREBAY_SOAK", "1"))


def look(directory: Path, least: int) -> int:
    """Resume: trajectories and what is attached are of one step, which was not before ``least``."""
    buffer, net = TrajectoryBuffer(directory=directory, cache_size=4, sample_window_size=0), torch.nn.Linear(64, 64)
    buffer.attach(net=net)
    with buffer:
        step = buffer.resume().step
        assert step >= least, "committed, and gone"
        if step:
            assert bool((net.weight == step).all() and (net.bias == step).all())
            expected = list(range(10, 10 * step + 10))[-60:]
            assert [info.max_episode_length for info in buffer.infos()] == expected
            for _ in range(5):
                batch = buffer.sample(100)
                check(batch)
                assert numbers(batch) <= set(expected)
            for info in buffer.infos():
                check(buffer.trajectory(info.trajectory_id))
    return step


def test_killed_at_any_moment_it_goes_on_with_what_was_committed(tmp_path: Path) -> None:
    chance, committed, waited = random.Random(2), 0, 0
    for _ in range(KILLS):
        with child(run_for_ever, str(tmp_path)) as process:
            kind, step = process.hear()
            assert kind == "resumed", step
            assert step >= committed
            for _ in range(chance.randrange(4)):
                kind, committed = process.hear()
                assert kind == "committed", committed
                waited += 1
            process.process.join(chance.uniform(0, 0.05))
            assert process.process.exitcode is None, process.rest()
            process.kill()
            try:
                while True:
                    kind, step = process.hear()
                    assert kind == "committed", step
                    committed = max(committed, step)
            except Ended:
                pass
        committed = look(tmp_path, committed)
    assert verify(str(tmp_path)).whole
    assert committed >= waited > 0
