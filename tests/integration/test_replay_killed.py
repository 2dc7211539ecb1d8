"""A trainer with a replay buffer is killed for real, and asked to stop by signals."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from pipeline import ReplayBuffer
from pipeline.checkpoint import verify
from tests.support.children import Ended, child
from tests.support.replaying import Counter, run_for_ever, run_until_asked

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
KILLS = 10 * SOAK


def look(directory: Path, least: int) -> int:
    """Resume: rows, priorities and what is attached are of one step, which was not before ``least``."""
    buffer = ReplayBuffer(200, directory=directory, select="prioritized", seed=4)
    counter, net = Counter(), torch.nn.Linear(64, 64)
    buffer.attach(counter=counter, net=net)
    with buffer:
        step = buffer.resume().step
        assert step >= least, "committed, and gone"
        if step:
            assert counter.step == step
            assert bool((net.weight == step).all() and (net.bias == step).all())
            batch = buffer.sample(200)
            assert (batch["next_obs"]["n"] == batch["obs"]["n"] + 1).all()
            assert (batch["image"][:, 0, 0].long() == batch["obs"]["n"] % 251).all()
            newest = buffer.ring.keys()[-20:]
            slots = buffer.ring.slots(newest)
            assert buffer.ring.storage.view("obs.n")[slots].tolist() == list(range(20 * step, 20 * step + 20))
    return step


def test_killed_at_any_moment_it_goes_on_with_what_was_committed(tmp_path: Path) -> None:
    chance, committed, waited = random.Random(1), 0, 0
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


@pytest.mark.parametrize("how", ["signal", "file"])
def test_asked_to_stop_it_saves_and_leaves(tmp_path: Path, how: str) -> None:
    with child(run_until_asked, str(tmp_path)) as process:
        heard = [process.hear()]
        if how == "signal":
            process.send(signal.SIGTERM)
        else:
            (tmp_path / "stop").touch()
        last = max(step for kind, step in heard + process.rest() if kind == "step")
        process.process.join(30)
        assert process.process.exitcode == (143 if how == "signal" else 0)
    assert not (tmp_path / "stop").exists()
    with ReplayBuffer(200, directory=tmp_path) as buffer:
        assert buffer.resume().step == last
        assert len(buffer) == min(200, 20 * last)
