"""Ranks that train on a buffer they share out, each a process of a gloo group: run by a fork server."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed

from pipeline import Prioritized, Ranks, ReplayBuffer

ENVS, LENGTH, STEPS = 3, 11, 40
group: Any = torch.distributed


def server() -> Any:
    """Return a store of the calling process, which outlives every rank."""
    return group.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Line:
    """An environment whose observations say which episode they are of, and where in it."""

    def __init__(self, life: int, rank: int) -> None:
        self.begun, self.t = 0, [0] * ENVS
        self.uids = [0] * ENVS
        self._first = (life * 100 + rank) * 10_000
        self.begin(range(ENVS))

    def begin(self, envs: Any) -> None:
        for env in envs:
            self.begun += 1
            self.uids[env], self.t[env] = self._first + self.begun, 0

    def step(self) -> dict[str, np.ndarray]:
        """Return one row of each environment."""
        uid, t = np.array(self.uids), np.array(self.t)
        done = t + 1 >= LENGTH - uid % 5
        rows = {"uid": uid, "t": t, "obs": np.stack([uid % 97, t], 1).astype(np.float32), "done": done}
        self.t = (t + 1).tolist()
        self.begin(np.flatnonzero(done).tolist())
        return rows


def train(pipe: Connection, port: int, directory: str, rank: int, size: int, life: int, select: str) -> None:
    """Resume, say what is there, train on, save at the end, and say what is there then. Stays until it is killed."""
    torch.set_num_threads(1)
    store = group.PrefixStore(f"life{life}", group.TCPStore("127.0.0.1", port, None, False))
    group.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks.torch(timeout_s=60.0)
    model = torch.nn.Linear(2, 1)
    by: Any = Prioritized(alpha=0.6, beta=0.4) if select == "prioritized" else "uniform"
    with ReplayBuffer(6_000, directory=directory, seed=life, select=by, ranks=ranks) as buffer:
        buffer.attach(model=model)
        resumed = buffer.resume()
        pipe.send((resumed.step, contents(buffer)))
        played, before = Line(life, rank), set(contents(buffer)[0])
        seen: set[tuple[int, int]] = set()
        for step in range(resumed.step + 1, resumed.step + STEPS + 1 + rank):  # uneven: the last ones add alone
            buffer.extend(played.step(), envs=ENVS)
            if step <= resumed.step + STEPS:
                seen |= learn(buffer, model, size)
        if before:
            assert seen & before, "nothing of before was sampled"
        pipe.send(contents(buffer))
        buffer.save(resumed.step + STEPS, wait=True)
        pipe.send("saved")
        pipe.recv()  # killed here


def learn(buffer: ReplayBuffer, model: torch.nn.Module, size: int) -> set[tuple[int, int]]:
    """Sample and train once, together with the other ranks; return what was sampled."""
    batch = buffer.sample(8, slices={"length": 4, "pad": True})
    mask, uid, t = batch.mask.numpy(), batch["uid"].numpy(), batch["t"].numpy()
    assert np.all((uid == uid[:, :1]) | ~mask), "a slice goes on in another episode"
    assert np.all((np.diff(t, axis=1) == 1) | ~mask[:, 1:]), "a slice is not contiguous"
    assert np.isfinite(batch.weights).all()
    assert (np.asarray(batch.weights) > 0).all()
    loss = (model(batch["obs"][:, 0]) ** 2).mean()
    assert torch.isfinite(loss)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        group.all_reduce(parameter.grad)
        parameter.data -= 1e-4 / size * parameter.grad
        parameter.grad = None
    if buffer.drawer.takes_priorities:
        buffer.update_priorities(batch.keys, np.abs(np.sin(uid[:, 0] + t[:, 0])) + 0.05)
    return set(zip(uid[:, 0].tolist(), t[:, 0].tolist(), strict=True))


def contents(buffer: ReplayBuffer) -> tuple[list[tuple[int, int]], list[float]]:
    """Return (uid, t) of every row, oldest first, and what each weighs."""
    ring = buffer.ring
    if ring.storage.schema is None:
        return [], []
    keys = ring.keys()
    slots = ring.slots(keys)
    uid, t = (ring.storage.view(name)[slots].tolist() for name in ("uid", "t"))
    return list(zip(uid, t, strict=True)), buffer.drawer.mass(keys).tolist()
