"""A training process on a disk that is full: by the kernel's own limits, not by a file layer."""

from __future__ import annotations

import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipeline import Batch, Context, Item, Pipeline, ReplayBuffer, Rollout, StoreError
from tests.support.replaying import Counter
from tests.support.runs import pipeline, task

COUNT, GROUPS = 24, 2


class Weights:
    """As large as the test says; every number of it is the last step trained."""

    def __init__(self, size: int) -> None:
        self.weight, self.batches = torch.zeros(size // 4), list[list[int]]()

    def train(self, batch: Batch) -> None:
        self.weight.fill_(batch.step)
        self.batches.append([group.index for group in batch])

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])
        self.batches = [list(batch) for batch in state["batches"]]

    def whole(self) -> bool:
        return bool((self.weight == len(self.batches)).all())


async def work(item: Item, ctx: Context) -> Rollout:
    return Rollout({"x": torch.full((500,), item["n"])}, reward=0.0)


def make(directory: str) -> Pipeline:
    return pipeline(task(COUNT, work), directory=directory, capacity=8, concurrency=2, keep=None)


def entries(directory: str) -> list[str]:
    """What lies under a generation's name, final or not, and any file that is not finished."""
    found = os.listdir(os.path.join(directory, "generations"))
    return sorted(found) + [str(path) for path in Path(directory).rglob("*.part") if path.name not in found]


def finish(directory: str, size: int) -> tuple[int, list[int]]:
    """A new life: resume, and train what is left. Returns the step resumed, and every item trained."""
    weights = Weights(size)
    with make(directory).sync() as pipe:
        pipe.attach(weights=weights)
        with pipe.weight_update(version=pipe.resume().version):
            pass
        assert weights.whole()
        step = len(weights.batches)
        pipe.start()
        for batch in pipe.batches(groups=GROUPS):
            weights.train(batch)
    return step, sorted(n for batch in weights.batches for n in batch)


class Attempt:
    """What a save came to: told to the test as a dict."""

    def __init__(self) -> None:
        self.error, self.name, self.family = "", "", False

    def note(self, error: BaseException) -> None:
        self.error, self.name, self.family = str(error), type(error).__name__, isinstance(error, (OSError, StoreError))


def a_save_fails(directory: str, size: int, make_full: Any, make_room: Any) -> dict[str, Any]:
    """A first step is saved; the disk is full at the save of the second; then it has room again.

    Returns what the save raised, what lay in the folder then, whether the trainer's state was as before, and whether
    another save in the same life went well.
    """
    weights, attempt, again = Weights(size), Attempt(), Attempt()
    told: dict[str, Any] = {}
    closed = Attempt()
    try:
        with make(directory).sync() as pipe:
            pipe.attach(weights=weights)
            with pipe.weight_update(version=pipe.resume().version):
                pass
            pipe.start()
            for step in (1, 2):
                weights.train(pipe.get_batch(GROUPS))
                if step == 1:
                    pipe.save(1).committed()
            before = entries(directory)
            make_full()
            try:
                pipe.save(2).committed()
            except Exception as error:
                attempt.note(error)
            told["left"] = [name for name in entries(directory) if name not in before]
            told["kept"] = set(before) <= set(entries(directory))
            told["state"] = weights.whole() and len(weights.batches) == 2
            make_room()
            try:
                pipe.save(2).committed()
            except Exception as error:
                again.note(error)
    except Exception as error:
        closed.note(error)
    finally:
        make_room()
    return {**told, "attempt": vars(attempt), "again": vars(again), "closed": vars(closed)}


def limited(pipe: Connection, directory: str, limits: list[int], state: int) -> None:
    """For each limit on the size of files, a run of its own."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))

    for each in limits:
        run = os.path.join(directory, str(each))
        found = a_save_fails(run, state, lambda each=each: limit(each), lambda: limit(most[0]))
        pipe.send((each, found, finish(run, state)))


def limited_producing(pipe: Connection, directory: str, limits: list[int]) -> None:
    """The limit holds from the beginning, for whatever is written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for each in limits:
        run, attempt = os.path.join(directory, str(each)), Attempt()
        resource.setrlimit(resource.RLIMIT_FSIZE, (each, most[1]))
        try:
            finish(run, 64)
        except Exception as error:
            attempt.note(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        pipe.send((each, vars(attempt), finish(run, 64)))


def limited_buffer(pipe: Connection, directory: str, limit: int) -> None:
    """A replay buffer of 4 MiB is saved; another 4 MiB are added, and saved again and again past the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    counter, attempts = Counter(), []
    with ReplayBuffer(16, directory=directory, keep=None, seed=1) as buffer:
        buffer.attach(counter=counter)
        buffer.resume()
        for counter.step in (1, 2):
            buffer.extend({"x": torch.full((8, 1 << 17), counter.step, dtype=torch.float32)})
            if counter.step == 1:
                buffer.save(1, wait=True)
        before, there = state_of(buffer, counter), entries(directory)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most[1]))
        for _ in range(5):
            attempt = Attempt()
            try:
                buffer.save(2, wait=True)
            except Exception as error:
                attempt.note(error)
            left = [name for name in entries(directory) if name not in there]
            sizes = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
            attempts.append((vars(attempt), left, sizes, state_of(buffer, counter) == before))
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        pipe.send(attempts)
        pipe.recv()
        buffer.save(2, wait=True)
    pipe.send("saved")


def state_of(buffer: ReplayBuffer, counter: Counter) -> Any:
    """What the training loop goes on with; not what the newest save says of itself."""
    statistics = msgspec.structs.replace(buffer.statistics(), save={})
    return counter.step, buffer.ring.added, statistics, buffer._rng.bit_generator.state


if __name__ == "__main__":
    import json
    import subprocess
    import sys

    folder, sizes, size = sys.argv[1], [int(each) for each in sys.argv[2].split(",")], int(sys.argv[3])
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  the log goes there
    filler = Path(folder, "filler")

    def fill(leave: int) -> None:
        space = os.statvfs(folder)
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - leave))

    def empty() -> None:
        filler.unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,size=32m", folder], check=True)

    results = []
    for free in sizes:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
        run = os.path.join(folder, "run")
        found = a_save_fails(run, size, lambda free=free: fill(free), empty)
        results.append((free, found, finish(run, size)))
        subprocess.run(["umount", folder], check=True)
    # And read only, by a mount: root may write where permissions say no.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    finish(os.path.join(folder, "run"), 64)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    refused = []
    for run in ("run", "new"):
        seen = Attempt()
        try:
            with make(os.path.join(folder, run)).sync():
                pass
        except Exception as error:
            seen.note(error)
        refused.append(vars(seen))
    out.write(json.dumps([results, refused]))
