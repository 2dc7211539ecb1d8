"""A trainer with a replay buffer is killed for real, and asked to stop by signals."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import ReplayBuffer, StoreError
from pipeline.checkpoint import verify
from tests.support.children import Ended, child
from tests.support.disk import Killed, ScriptedFiles, tree
from tests.support.replaying import Counter, add_after_saving, contents, run_for_ever, run_until_asked

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
KILLS = 10 * SOAK


class DiesAsItCommits(ScriptedFiles):
    """Kills when everything was written, and the generation is to get its name."""

    def rename(self, old: str, new: str) -> None:
        self.fail_next()
        super().rename(old, new)


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


def test_what_was_added_after_the_save_dies_with_the_process(tmp_path: Path) -> None:
    with child(add_after_saving, str(tmp_path)) as process:
        assert process.hear() == ("added", 15)
        process.kill()
    before = {name: hashlib.sha256(content).hexdigest() for name, content in tree(tmp_path).items()}
    with ReplayBuffer(20, directory=tmp_path) as buffer:
        assert tuple(buffer.resume())[::2] == (10, 10)
        assert contents(buffer)["x"] == list(range(10))
        assert buffer.ring.added == 10
        assert buffer.extend({"x": [100]}) == range(10, 11)
        buffer.save(11, wait=True)
    after = {name: hashlib.sha256(content).hexdigest() for name, content in tree(tmp_path).items()}
    assert {name for name, digest in before.items() if after.get(name) != digest} <= {"lock"}
    with ReplayBuffer(20, directory=tmp_path) as first:
        first.resume(10)
        assert contents(first)["x"] == list(range(10))


def test_what_lives_left_that_were_killed_in_a_save_goes_with_the_next_commit(tmp_path: Path) -> None:
    """Each of them had written its rows, and would have left them for as long as no generation went."""
    sizes = []
    for life in range(6):
        files = ScriptedFiles() if life in (0, 5) else DiesAsItCommits(error=Killed, stays=True)
        buffer = ReplayBuffer(8, directory=tmp_path, files=files)
        with contextlib.suppress(Killed, StoreError), buffer:
            buffer.resume()
            buffer.extend({"x": np.full((8, 1 << 14), life, np.float64)})
            buffer.save(life, wait=True)
        files.end()
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "segments").iterdir()))
    assert sizes[4] > 4 * sizes[0]
    assert sizes[5] < 2.1 * sizes[0], "those of the two generations"
    assert verify(str(tmp_path)).whole


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
