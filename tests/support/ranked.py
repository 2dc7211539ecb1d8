"""Ranks as processes of a gloo group, over a store that the test serves, so that any of them may be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed

from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.distributed import Ranks
from pipeline.errors import RanksError, StoreError
from pipeline.replay import ReplayBuffer, TrajectoryBuffer
from pipeline.store.files import OsFiles
from pipeline.store.layout import Layout
from pipeline.testing import KillingFiles
from tests.support.children import ChildProcess
from tests.support.gone import GoneStore
from tests.support.replaying import Counter

group: Any = torch.distributed
ROWS = 5
"""How many a rank adds in a step."""
PATIENCE = 60.0


class Place(NamedTuple):
    """Which rank of which group a process is."""

    port: int
    name: str
    rank: int
    size: int
    timeout_s: float

    def store(self) -> Any:
        client = group.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        return group.PrefixStore(self.name, client)

    def join(self) -> Ranks:
        """Join the group of processes. Nobody waits for one of which :meth:`Group.gone` has told."""
        group.init_process_group("gloo", store=self.store(), rank=self.rank, world_size=self.size)
        store: Any = GoneStore(group.distributed_c10d._get_default_store(), self._is_gone)
        return Ranks(store, group.get_rank(), group.get_world_size(), timeout_s=self.timeout_s)

    def _is_gone(self, store: Any, rank: int) -> bool:
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return bool(store.check([f"{self.name}/gone/{rank}"]))

    def known(self) -> Ranks:
        """Return the ranks over a store of which the test knows what it calls the keys; as in :meth:`join`, nobody
        waits for one that is gone."""
        store: Any = GoneStore(self.store(), self._is_gone)
        return Ranks(store, self.rank, self.size, timeout_s=self.timeout_s)


class Group:
    """Processes that run ``body(pipe, place, directory, *args)``, one for each rank."""

    numbers = itertools.count()

    def __init__(self, server: Any, body: Callable[..., None], directory: Path, size: int, timeout_s: float) -> None:
        self.server, self.body, self.directory = server, body, directory
        name = str(next(self.numbers))
        self.places = [Place(server.port, name, rank, size, timeout_s) for rank in range(size)]
        self.ranks: list[ChildProcess] = []

    def start(self, *args: Any, of_rank: dict[int, tuple[Any, ...]] | None = None) -> None:
        """Start them; ``of_rank``: other arguments than ``args`` for some."""
        for place in self.places:
            given = (of_rank or {}).get(place.rank, args)
            self.ranks.append(ChildProcess(self.body, place, str(self.directory), *given))

    def told(self, key: str) -> None:
        """Return when a rank has told something under this key, in a store of :meth:`Place.known`."""
        prefix = self.places[0].name
        self.server.wait([f"{prefix}/{key}"], timedelta(seconds=PATIENCE))

    def gone(self, rank: int) -> None:
        """Wait until a rank has ended, and let the time limit be over for who waits for it."""
        self.ranks[rank].process.join(PATIENCE)
        assert self.ranks[rank].process.exitcode is not None, "it lives"
        self.server.set(f"{self.places[0].name}/gone/{rank}", "")

    def ends(self) -> list[int]:
        """Return the exit codes of all; negative for a signal."""
        codes = []
        for each in self.ranks:
            each.process.join(PATIENCE)
            code = each.process.exitcode
            assert code is not None, "a rank hangs"
            codes.append(code)
        return codes

    def close(self) -> None:
        for each in self.ranks:
            each.kill()
            each.pipe.close()


def serve() -> Any:
    """Return a store for any number of groups."""
    return group.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextlib.contextmanager
def processes(
    server: Any, body: Callable[..., None], directory: Path, size: int, *, timeout_s: float = PATIENCE
) -> Iterator[Group]:
    """Ranks that are gone afterwards."""
    ranks = Group(server, body, directory, size, timeout_s)
    try:
        yield ranks
    finally:
        ranks.close()


def manifests(directory: Path) -> list[Manifest]:
    """Return those of all complete generations."""
    layout = Layout(str(directory))
    run = layout.read_run()
    return [] if run is None else [each.manifest for each in find_generations(layout, run.run_id).complete]


def reduced(value: int) -> int:
    """What a trainer does between two steps: nobody leaves it before all have come."""
    tensor = torch.tensor([value])
    group.all_reduce(tensor)
    return int(tensor)


ROWS_ALONE, TRAJECTORIES, SHELVED = "rows", "trajectories", "shelved"
"""What ranks may have: rows; trajectories that a save writes; or such as are written when they come."""


def made(kind: str, directory: str, ranks: Ranks, files: Any = None, **options: Any) -> ReplayBuffer | TrajectoryBuffer:
    """Return one rank's part of a buffer."""
    if kind == ROWS_ALONE:
        return ReplayBuffer(100_000, directory=directory, ranks=ranks, files=files, **options)
    more: dict[str, Any] = {"auto_save": True, "cache_size": 2} if kind == SHELVED else {}
    return TrajectoryBuffer(sample_window_size=0, directory=directory, ranks=ranks, files=files, **more, **options)


def add(buffer: ReplayBuffer | TrajectoryBuffer, rank: int, step: int) -> None:
    """Add the rows of a step, or as many transitions as a trajectory: each says of which rank it is, and which of its
    rows."""
    t = np.arange(ROWS * (step - 1), ROWS * step)
    rows = {"rank": np.full(ROWS, rank), "t": t, "done": t % 7 == 6}
    if isinstance(buffer, ReplayBuffer):
        buffer.extend(rows)
        return
    buffer.add_trajectories([{name: each[:, None] for name, each in rows.items()}])
    if buffer.options.auto_save:
        buffer._shelving.join()  # so that a save makes the same changes each time


def held(buffer: ReplayBuffer | TrajectoryBuffer) -> list[tuple[int, int]]:
    """Return (rank, t) of all rows."""
    if isinstance(buffer, TrajectoryBuffer):
        arrays = buffer.arrays()
        return list(zip(arrays["rank"].tolist(), arrays["t"].tolist(), strict=True)) if arrays else []
    slots = buffer.ring.slots(buffer.ring.keys())
    if not len(slots):
        return []
    rank, t = (buffer.ring.storage.view(name)[slots].tolist() for name in ("rank", "t"))
    return list(zip(rank, t, strict=True))


class Gated(OsFiles):
    """Files of which one call says that it has come, and waits until it may go on."""

    def __init__(self, pipe: Connection, after: int) -> None:
        self.pipe, self.after = pipe, after

    def create(self, path: str) -> int:
        if "shards" in path and path.endswith("replay.json"):
            self.after -= 1
            if self.after == -1:
                self.pipe.send("writes")
                self.pipe.recv()
        return super().create(path)


def train(pipe: Connection, place: Place, directory: str, how: dict[str, Any]) -> None:
    """Train for ever, an all-reduce in each step.

    Args:
        how: ``known``: use such a store; ``hold``: wait for a word before ``resume``; ``gate``: so many saves are made
            before one waits for a word; ``quiet``: do not say the steps; ``every``: as ``save_every``.
    """
    ranks = place.join()
    ranks = place.known() if how.get("known") else ranks
    files = Gated(pipe, how["gate"]) if "gate" in how else None
    buffer = ReplayBuffer(100_000, directory=directory, save_every=how.get("every"), ranks=ranks, files=files)
    with buffer:
        counter = Counter()
        buffer.attach(counter=counter)
        if how.get("hold"):
            pipe.recv()
        begun = buffer.resume().step
        pipe.send("resumed")
        for step in itertools.count(begun + 1):
            add(buffer, place.rank, step)
            counter.step = step
            assert reduced(step) == step * place.size
            if not how.get("quiet"):
                pipe.send(step)
            if buffer.save_due(step):
                buffer.save(step)
            time.sleep(0.001)


def serve_and_train(pipe: Connection, place: Place, directory: str, how: dict[str, Any]) -> None:
    """The same, where the first rank serves the store, as in most scripts."""
    if place.rank == 0:
        server = serve()
        pipe.send(server.port)
        place = place._replace(port=server.port)
    else:
        place = place._replace(port=pipe.recv())
    train(pipe, place, directory, how)


class Dying(KillingFiles):
    """Kills some processes, this one last, instead of a change of the folder."""

    def __init__(self, whom: list[int]) -> None:
        super().__init__(after=10**9)
        self.whom = whom
        self.log: list[str] = []
        """The changes that were made."""

    def arm(self, after: int) -> None:
        """Let the change be the last but one that comes after so many more."""
        self.after = self.changes + after

    def _comes(self, verb: str) -> None:
        super()._comes(verb)
        self.log.append(verb)

    def _strike(self, verb: str) -> None:
        self.kill()

    def kill(self) -> None:
        for each in self.whom:
            os.kill(each, signal.SIGKILL)


TOLD = -1
"""In place of a change of the folder: when the rank has told what it has written."""


def save_and_die(
    pipe: Connection, place: Place, directory: str, after: int | None, of_all: bool, kind: str = ROWS_ALONE
) -> None:
    """Resume and say what is there; save three steps, and say what becomes of it.

    Args:
        after: in the second save, die instead of the change that comes after so many, or when it is :data:`TOLD`.
        of_all: all ranks die then.
        kind: what the buffer is of.
    """
    ranks = place.join()
    others = [pid for pid in ranks.all("process", os.getpid()) if of_all and pid != os.getpid()]
    files, counter = Dying([*others, os.getpid()]), Counter()
    with made(kind, directory, ranks, files, keep=2, signals=[]) as buffer:
        buffer.attach(counter=counter)
        try:
            begun = buffer.resume()
            pipe.send(("resumed", begun.generation, begun.step, counter.step, held(buffer)))
            for number in range(3):
                counter.step = begun.step + 1 + number
                add(buffer, place.rank, counter.step)
                files.log.clear()
                if number == 1 and after == TOLD:
                    _die_when_told(buffer, files)
                elif number == 1 and after is not None:
                    files.arm(after)
                saved = buffer.save(counter.step, wait=True)
                pipe.send(("saved", saved.generation, counter.step, list(files.log), leftovers(directory)))
        except (RanksError, StoreError) as error:
            pipe.send(("failed", str(error)))


def _die_when_told(buffer: ReplayBuffer | TrajectoryBuffer, files: Dying) -> None:
    saver: Any = buffer._saver
    ranks = saver.ranks
    tell = ranks.tell

    def tell_and_die(what: str, *given: Any, **more: Any) -> int:
        number = int(tell(what, *given, **more))
        if what in ("save part", "save"):
            ranks.look("nothing")  # what was told is there
            files.kill()
        return number

    ranks.tell = tell_and_die


def leftovers(directory: str) -> list[str]:
    """Return what lies in a run's folder that no generation needs."""
    layout = Layout(directory)
    complete = manifests(Path(directory))
    needed = {info.name for each in complete for info in each.segments}
    folders = {f"{each.generation:08d}" for each in complete}
    return sorted({*layout.list_segments()} - needed) + sorted({*os.listdir(layout.generations)} - folders)
