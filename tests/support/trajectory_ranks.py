"""Ranks that train on trajectories, each a process of a gloo group, until they are killed: run by a fork server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipeline import TrajectoryBuffer
from tests.support.ranked import Place, reduced
from tests.support.replaying import Counter

LONGEST = 7 * 3
"""Transitions of the longest trajectory."""
EVERY = 3
"""Steps from one save to the next."""


def rows_of(uid: int) -> int:
    """How many transitions a trajectory has."""
    return (1 + uid % 7) * (1 + uid % 3)


def played(uid: int) -> dict[str, Any]:
    """A trajectory whose transitions say which it is, and where they are in it."""
    steps, envs = 1 + uid % 7, 1 + uid % 3
    t = np.repeat(np.arange(steps)[:, None], envs, axis=1)
    env = np.repeat(np.arange(envs)[None], steps, axis=0)
    obs = np.repeat((uid + 7 * t + env)[..., None] % 251, 1200, axis=-1).astype(np.uint8)
    return {"uid": np.full((steps, envs), uid), "t": t, "env": env, "obs": obs, "model_weights_id": str(uid % 5)}


def check(batch: dict[str, Any]) -> set[int]:
    """Compare what was read with what was added; return which trajectories it is of."""
    uid, t, env = (batch[name].numpy() for name in ("uid", "t", "env"))
    assert (t < 1 + uid % 7).all()
    assert (env < 1 + uid % 3).all()
    assert (batch["obs"].numpy() == ((uid + 7 * t + env) % 251)[..., None]).all()
    return set(uid.reshape(-1).tolist())


def held(buffer: TrajectoryBuffer) -> list[int]:
    """Read all trajectories whole; return which they are, oldest first."""
    found = []
    for info in buffer.infos():
        whole = buffer.trajectory(info.trajectory_id)
        (uid,) = check(whole)
        assert whole["t"].numel() == rows_of(uid)
        assert whole["model_weights_id"] == str(uid % 5)
        found.append(uid)
    return found


def new_ones(life: int, rank: int) -> Iterator[int]:
    """Names of trajectories that nobody else gives."""
    return itertools.count((100 * life + rank) * 10_000)


def train(pipe: Connection, place: Place, directory: str, life: int) -> None:
    """Say what is there; then train for ever, an all-reduce in each step, and say at each save what it is of."""
    options: dict[str, Any] = {"cache_size": 3, "sample_window_size": 0, "auto_save": place.rank % 2 == 0, "keep": 2}
    with TrajectoryBuffer(directory=directory, seed=4, ranks=place.join(), signals=[], **options) as buffer:
        counter, names = Counter(), new_ones(life, place.rank)
        buffer.attach(counter=counter)
        begun = buffer.resume().step
        assert counter.step == begun
        old = held(buffer)
        pipe.send(("resumed", begun, old))
        seen: set[int] = set()
        for step in itertools.count(begun + 1):
            for _ in range(1 + place.rank % 2):
                buffer.add_trajectories([played(next(names))])
            seen |= check(buffer.sample(16))
            counter.step = step
            assert reduced(step) == step * place.size
            if step % EVERY == 0:
                assert not old or seen & set(old), "nothing of before is sampled"
                pipe.send(("saving", step, held(buffer)))
                buffer.save(step, wait=True)
                pipe.send(("saved", step))
