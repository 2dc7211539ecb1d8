"""Processes that share a replay buffer, and what must be true of it whatever became of them."""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import numpy as np

from pipeline import ReplayBuffer, Starved, UsageError
from pipeline.buffer.transitions.ageing import AgeingDrawer
from pipeline.buffer.transitions.consuming import ConsumingDrawer
from pipeline.buffer.transitions.layout import AHEAD, BEHIND, END, EPISODE, OPEN, PLACE, SERIAL
from pipeline.buffer.transitions.priorities import PriorityDrawer
from pipeline.buffer.transitions.shared.next_obs import CommonNextObs
from pipeline.buffer.transitions.shared.ring import SharedRing
from pipeline.buffer.transitions.sums import FAN
from tests.support.disk import ScriptedFiles

CAPACITY = 90


def shared(capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, storage="shared", **{"select": "prioritized", "seed": 1, **options})


class Slow(ScriptedFiles):
    """Rows are written when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def create(self, path: str) -> int:
        if path.endswith(".fbs"):
            self.begun.set()
            assert self.go_on.wait(30)
        return super().create(path)


def until(predicate: Any) -> None:
    deadline = time.monotonic() + 60
    while not predicate():
        assert time.monotonic() < deadline
        os.sched_yield()


def contents(buffer: ReplayBuffer) -> dict[str, Any]:
    with buffer.gate.lock:
        keys = buffer.ring.keys()
        marks = {name: buffer.ring.mark(name, keys).tolist() for name in ("a", "#episode", "#place", "#end")}
        return marks | {"keys": keys.tolist(), "open": buffer.ring.episodes.state()}


def rows(first: int, count: int, wide: int = 300) -> dict[str, Any]:
    """Rows whose columns all hold the same number; one of them lies in an array of its own."""
    number = np.arange(first, first + count)
    return columns(number, wide) | {"terminated": number % 7 == 6}


def columns(number: np.ndarray, wide: int = 300) -> dict[str, Any]:
    """Such columns, but for those that say where episodes end."""
    return {
        "a": number,
        "b": number.astype(np.float64),
        "image": np.repeat(number, wide).reshape(len(number), wide),
        "reward": number.astype(np.float32),
    }


def linked(first: int, count: int) -> dict[str, Any]:
    """Rows of three environments that are each followed by the one 3 further on, as its next observation says."""
    number = np.arange(first, first + count)
    wide = np.repeat(number, 300).reshape(count, 300)
    return {**rows(first, count), "obs": wide, "next_obs": wide + 3, "terminated": number % 21 >= 18}


def check_next_obs(buffer: ReplayBuffer) -> None:
    """Each row has its own next observation, and no place is lost or has two rows."""
    with buffer.gate.lock:
        if not len(buffer):
            return
        ring, aside, keys = buffer.ring, buffer.next_obs, buffer.ring.keys()
        assert isinstance(aside, CommonNextObs)
        nexts = aside.gather(keys, ["next_obs"])["next_obs"]
        assert (nexts == ring.mark("a", keys)[:, None] + 3).all()
        places = aside._place[ring.slots(keys)]
        own = places[places > 0] - 1
        assert len(np.unique(own)) == len(own) == aside.kept
        assert (aside._keys[own] == keys[places > 0]).all()
        top, free = aside._counts.tolist()
        assert sorted([*own.tolist(), *aside._stack[:free].tolist()]) == list(range(top))


def whole(batch: Any) -> bool:
    """Whether no row of a batch is torn."""
    a = batch["a"]
    return bool((batch["b"] == a).all() and (batch["image"] == a[..., None]).all() and (batch["reward"] == a).all())


def check(buffer: ReplayBuffer) -> None:
    """No row is torn, all marks fit together, and every sum is that of its leaves."""
    with buffer.gate.lock:
        ring = buffer.ring
        assert 0 <= ring.size <= min(ring.added, ring.capacity)
        if ring.storage.layout is None or not ring.size:
            return
        keys = ring.keys()
        assert (ring.mark(SERIAL, keys) == keys.astype(np.uint32)).all()
        a = ring.mark("a", keys)
        assert (ring.mark("b", keys) == a).all()
        assert (ring.mark("image", keys) == a[:, None]).all()
        _check_links(buffer, keys)
        if isinstance(buffer._drawer, PriorityDrawer):
            buffer._drawer._settle()
            _check_sums(buffer._drawer.tree, buffer, keys)
        if isinstance(buffer._drawer, AgeingDrawer):
            ages = buffer._drawer.mass(keys)
            versions = ring.mark("#version", keys).astype(np.int64)
            assert np.allclose(ages / ages[-1], np.exp2((versions - versions[-1]) / 3.0))
            _check_sums(buffer._drawer._tree, buffer, keys)
        if isinstance(buffer._drawer, ConsumingDrawer):
            buffer._drawer._settle()
            left = buffer._drawer._uses.left(keys)
            assert (buffer._drawer._tree.values[ring.slots(keys)] == (left > 0)).all()
            _check_sums(buffer._drawer._tree, buffer, keys)
        if isinstance(ring, SharedRing) and ring._begins is not None:
            _check_firsts(ring, keys)
    everything: tuple[dict[str, Any], ...] = ({}, {"n_step": 3, "gamma": 0.9}, {"slices": {"length": 3, "pad": True}})
    for more in everything if not drawn_up(buffer) else ():
        with buffer.gate.lock:
            batch = buffer.sample(64, **more)
            assert ring.alive(batch.keys).all()
        assert "n_step" in more or whole(batch)


def _check_links(buffer: ReplayBuffer, keys: np.ndarray) -> None:
    ring = buffer.ring
    behind, ahead = (ring.mark(name, keys).astype(np.int64) for name in (BEHIND, AHEAD))
    episode, place, end = (ring.mark(name, keys) for name in (EPISODE, PLACE, END))
    assert ((behind > 0) == (place > 0)).all()
    linked = (behind > 0) & (keys - behind >= ring.oldest)
    before = np.flatnonzero(linked) - behind[linked]
    assert (episode[before] == episode[linked]).all()
    assert (place[before] + 1 == place[linked]).all()
    assert (ahead[before] == behind[linked]).all()
    assert np.count_nonzero(ahead) == len(before)
    for _, key, number, at in ring.episodes.state():
        assert key < ring.added
        assert number < ring.episodes.next
        if key >= ring.oldest:
            row = key - ring.oldest
            assert (episode[row], place[row], end[row], ahead[row]) == (number, at, OPEN, 0)
    lengths = {number: place[episode == number].max() + 1 for number in np.unique(episode)}
    assert ring.following(keys).tolist() == [lengths[e] - p for e, p in zip(episode, place, strict=True)]


def drawn_up(buffer: ReplayBuffer) -> bool:
    """Whether a look by drawing would take uses of rows."""
    return getattr(buffer.options.select, "uses", None) is not None


def used(buffer: ReplayBuffer) -> int:
    """How often the rows that are there were drawn."""
    with buffer.gate.lock:
        return int(buffer._drawer.arrays()["used"].sum())


def _check_firsts(ring: Any, keys: np.ndarray) -> None:
    firsts, episode, place = ring.firsts(keys), ring.mark(EPISODE, keys), ring.mark(PLACE, keys)
    assert (firsts[place == 0] == keys[place == 0]).all()
    assert (firsts[place > 0] < keys[place > 0]).all()
    for number in np.unique(episode):
        assert len(np.unique(firsts[episode == number])) == 1
    for _, key, number, _ in ring.episodes.state():
        if key >= ring.oldest:
            assert ring._firsts_of(np.array([number])) == firsts[key - ring.oldest]
    for count in (1, 2, 5, 100):
        begun = np.unique(firsts)
        assert ring.begin_of_newest(count) == begun[-min(count, len(begun))]


def _check_sums(tree: Any, buffer: ReplayBuffer, keys: np.ndarray) -> None:
    leaves = tree.values.tolist()
    there = set(buffer.ring.slots(keys).tolist())
    assert all(value == 0 for slot, value in enumerate(leaves) if slot not in there)
    assert math.isclose(tree.total, math.fsum(leaves), rel_tol=1e-12)
    positive = [value for value in leaves if value > 0]
    assert tree.most == max(leaves)
    assert tree.least == min(positive, default=math.inf)
    for level in range(1, len(tree._sums)):
        below = tree._sums[level - 1].reshape(-1, FAN).sum(axis=1)
        assert np.allclose(tree._sums[level][: len(below)], below, rtol=1e-14, atol=0)


# -- what processes do -----------------------------------------------------------------------------------------


def write(pipe: Any, handle: Any, number: int, blocks: int) -> None:
    """Add blocks of rows, and say the keys."""
    buffer = ReplayBuffer.join(handle)
    pipe.send("ready")
    pipe.recv()
    for block in range(blocks):
        first = 1_000_000 * number + 5 * block
        if block % 3:
            keys = buffer.extend(rows(first, 5), env=number, timeout=None)
        else:
            one = [buffer.append({n: v[0] for n, v in rows(first + i, 1).items()}, env=number) for i in range(5)]
            keys = one
        pipe.send([(key, first + i) for i, key in enumerate(keys)])


def read(pipe: Any, handle: Any, number: int, batches: int) -> None:
    """Sample, look, and update priorities."""
    buffer = ReplayBuffer.join(handle)
    buffer.wait_to_sample(1, None)
    pipe.send("ready")
    pipe.recv()
    for _ in range(batches):
        batch = buffer.sample(32)
        assert whole(batch)
        assert whole(buffer.sample(8, slices={"length": 2, "pad": True}))
        buffer.sample(8, n_step=3, gamma=0.9)
        if number % 2:
            buffer.update_priorities(batch.keys, np.arange(1, 33))
    pipe.send("done")


def step_on(pipe: Any, handle: Any, number: int, steps: int) -> None:
    """Step two environments that reset themselves in a call of their own, and sample in every way; say how many rows
    came of it."""
    buffer, rng = ReplayBuffer.join(handle), np.random.default_rng(number)
    over, obs, added = np.zeros(2, bool), np.zeros((2, 3), np.float32), 0
    for _ in range(steps):
        nexts = rng.random((2, 3), np.float32)
        ended = (rng.random(2) < 0.2) & ~over
        values = (obs, np.arange(2), np.ones(2), nexts, ended, np.zeros(2, bool))
        keys = buffer.add(*values, autoreset="next_step", env=2 * number)
        assert len(keys) == 2 - over.sum()
        added, over, obs = added + len(keys), ended, nexts
        ways: tuple[dict[str, Any], ...] = ({"stack": 3}, {"where": {"reward": 1.0}}, {"n_step": 3, "gamma": 0.9})
        for more in ways:
            buffer.sample(8, **more)
    pipe.send(added)


def busy(pipe: Any, handle: Any, number: int) -> None:
    """Do everything for ever, as if nobody ever killed us."""
    buffer = ReplayBuffer.join(handle)
    pipe.send("ready")
    done = 0
    while True:
        first = 1000 * done
        buffer.extend(rows(first, 6), envs=3)
        buffer.extend(rows(first + 6, 5), env=np.array([1, 0, 4, 4, 1]))
        buffer.append({n: v[0] for n, v in rows(first + 11, 1).items()}, env=number)
        batch = buffer.sample(16)
        assert whole(batch)
        buffer.update_priorities(batch.keys, np.arange(16) % 5)
        buffer.update_priorities(batch.keys[:3], [1, 2, 3])
        buffer.write_back(batch.keys[:4], columns(batch["a"].numpy()[:4] + 1))
        if done % 5 == 4:
            buffer.end_episode(done % 3)
        done += 1


def busy_adding(pipe: Any, handle: Any, number: int) -> None:
    """As :func:`busy`, where priorities play no part; versions go up."""
    buffer = ReplayBuffer.join(handle)
    pipe.send("ready")
    with buffer.gate.lock:
        version = int(buffer.ring.mark("#version", buffer.ring.keys()[-1:])[0])
    for first in itertools.count(0, 20):
        version += 1
        buffer.extend(rows(first, 6), envs=3, version=version)
        buffer.extend(rows(first + 6, 5), env=np.array([1, 0, 4, 4, 1]), version=version)
        buffer.append({n: v[0] for n, v in rows(first + 11, 1).items()}, env=number, version=version)
        batch = buffer.sample(16)
        assert whole(batch)
        buffer.write_back(batch.keys[:4], columns(batch["a"].numpy()[:4] + 1))
        if first % 100 == 80:
            buffer.end_episode(first // 100 % 3)


BACK = 50_000_000
"""What is added to the rows that are written back."""

OPERATIONS = ("extend", "mixed", "append", "many", "sample", "update", "cut", "cut all", "clear", "first")


def operate(buffer: ReplayBuffer, what: str, first: int) -> None:
    """Change the buffer in one way."""
    if what in ("extend", "first"):
        buffer.extend(rows(first, 12), envs=3)
    elif what == "mixed":
        buffer.extend(rows(first, 5), env=np.array([1, 0, 4, 4, 1]))
    elif what == "append":
        buffer.append({name: each[0] for name, each in rows(first, 1).items()}, env=2)
    elif what == "many":
        buffer.extend(rows(first, CAPACITY + 20), env=1)
    elif what == "sample":
        buffer.extend(rows(first, 8), env=1)
        buffer.sample(8)
    elif what == "update":
        with buffer.gate.lock:
            keys = buffer.ring.keys()
        buffer.update_priorities(keys, 1 + (keys * 7 + first) % 13)
    elif what in ("cut", "cut all"):
        buffer.end_episode(1 if what == "cut" else None)
    elif what == "clear":
        buffer.clear()
    elif what == "draw some":
        buffer.sample(8)
    elif what == "write back":
        with buffer.gate.lock:
            keys = buffer.ring.keys()[-12:]
            number = buffer.ring.mark("a", keys)
        assert buffer.write_back(keys, columns(number + BACK)).applied.all()
    elif what in ("linked", "linked many"):
        buffer.extend(linked(first, 12 if what == "linked" else 111), envs=3)
    elif what == "linked at once":
        with buffer.gate.lock:  # places are taken, given back, and taken again before any of it is committed
            for begin in range(first, first + 60, 12):
                buffer.extend(linked(begin, 12), envs=3)
    elif what == "linked append":
        buffer.append({name: each[0] for name, each in linked(first, 1).items()}, env=0)
    elif what == "linked load":
        other = ReplayBuffer(CAPACITY, share_next_obs=True, select="prioritized", seed=1)
        other.extend(linked(first, CAPACITY + 12), envs=3)
        ReplayBuffer.load_state_dict(buffer, other.state_dict())
    elif what == "load":
        other = ReplayBuffer(CAPACITY, select=buffer.options.select, seed=buffer.options.seed)
        other.extend(rows(first, CAPACITY + 10), envs=5)
        ReplayBuffer.load_state_dict(buffer, other.state_dict(), continue_episodes=True)  # a member refuses it
    elif what == "repair":
        len(buffer)


def die_inside(pipe: Any, handle: Any, what: str, first: int, line: int) -> None:
    """Be killed when so many lines of the library were run within an operation; else say how many there are."""
    buffer = ReplayBuffer.join(handle)
    if what != "repair":
        len(buffer)
    reached = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        if os.sep + "pipeline" + os.sep not in frame.f_code.co_filename:
            return None
        if event == "line":
            reached += 1
            if reached == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    operate(buffer, what, first)
    sys.settrace(None)
    pipe.send(reached)


def own_and_share(pipe: Any, directory: str, temporary: str) -> None:
    """Build a buffer, have others work on it, and say who they are. Temporary files go where they are alone."""
    import multiprocessing
    import tempfile

    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    context = multiprocessing.get_context("fork")
    buffer = ReplayBuffer(CAPACITY, storage="shared", select="prioritized", directory=directory)
    buffer.extend(rows(0, 20))
    handle = buffer.share()
    told, ends = [], []
    for number in range(2):
        ours, theirs = context.Pipe()
        ends.append(theirs)
        process = context.Process(target=busy, args=(theirs, handle, number))
        process.start()
        told.append(process.pid)
        assert ours.recv() == "ready"
    buffer.save(1, wait=True)
    pipe.send([os.getpid(), *told])
    step = 1
    while True:
        step += 1
        buffer.save(step)


def write_when_told(pipe: Any, handle: Any, number: int) -> None:
    """Add as many rows as it is told, in blocks of 6, each in one piece."""
    buffer = ReplayBuffer.join(handle)
    pipe.send("ready")
    first = 1_000_000 * number
    while True:
        for _ in range(pipe.recv() // 6):
            buffer.extend(rows(first, 6), env=number)
            first += 6
        pipe.send(first)


def follow(pipe: Any, handle: Any) -> None:
    """Do what it is told by name, and say what came of it."""
    buffer = ReplayBuffer.join(handle)
    while True:
        what, first = pipe.recv()
        pipe.send(outcome(buffer, what, first))


def outcome(buffer: ReplayBuffer, what: str, first: int) -> Any:
    """What an operation, or a look, gives."""
    if what == "look":
        with buffer.gate.lock:
            ring = buffer.ring
            keys = ring.keys()
            names = (EPISODE, PLACE, AHEAD, BEHIND, END, SERIAL, "a")
            marks = [ring.mark(name, keys).tolist() for name in names] if len(keys) else []
            following = ring.following(keys).tolist() if len(keys) else []
            return keys.tolist(), marks, following, ring.episodes.state(), ring.stride, buffer._drawer.numbers
    if what == "draw":
        return buffer.sample(first).keys.tolist()
    operate(buffer, what, first)
    return None


def drain(pipe: Any, handle: Any) -> None:
    """Draw, as long as there is anything that was not drawn too often; say the keys."""
    buffer = ReplayBuffer.join(handle)
    pipe.send("ready")
    pipe.recv()
    keys: list[int] = []
    while True:
        try:
            keys += buffer.sample(3).keys.tolist()
        except Starved:
            break
    pipe.send(keys)


def add_limited(pipe: Any, handle: Any, count: int) -> None:
    """Add rows one by one, as the limiter lets them in."""
    buffer = ReplayBuffer.join(handle)
    for number in range(count):
        buffer.append({"x": np.float32(number)}, timeout=None)
    pipe.send("done")


def sample_limited(pipe: Any, handle: Any, count: int, many: int) -> None:
    """Sample, as the limiter lets it."""
    buffer = ReplayBuffer.join(handle)
    pipe.send("ready")
    for _ in range(count):
        buffer.sample(many, timeout=None)
        pipe.send(buffer.statistics().sampled)
    pipe.send("done")


def use_after_fork(pipe: Any) -> None:
    """Fork with a shared buffer, use it in the child, and join it there; say what came of it."""
    import multiprocessing

    buffer = ReplayBuffer(CAPACITY, storage="shared")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_in_fork, args=(pipe, buffer, buffer.share()))
    process.start()
    process.join()
    pipe.send(len(buffer))


def _in_fork(pipe: Any, buffer: ReplayBuffer, handle: Any) -> None:
    try:
        buffer.append({"x": 1.0})
    except UsageError as error:
        pipe.send(str(error))
    joined = ReplayBuffer.join(handle)
    del buffer, handle
    joined.append({"x": 2.0})
    pipe.send(ReplayBuffer.join(joined.share()) is joined)


def hold_two(pipe: Any, first: Any, second: Any) -> None:
    """One thread has the first buffer's lock, another waits for the second one's."""
    one, two = ReplayBuffer.join(first), ReplayBuffer.join(second)
    held, let_go = threading.Event(), threading.Event()

    def keep() -> None:
        with one.gate.lock:
            held.set()
            let_go.wait()

    keeper = threading.Thread(target=keep)
    keeper.start()
    held.wait()
    pipe.send("held")
    pipe.recv()
    pipe.send("waits")
    with two.gate.lock:
        pipe.send("has it")
    let_go.set()
    keeper.join()


def work_in_threads(pipe: Any, handle: Any, number: int, many: int) -> None:
    """See :func:`work`."""
    pipe.send(work(ReplayBuffer.join(handle), number, many))


def work(buffer: ReplayBuffer, number: int, many: int) -> list[str]:
    """Add blocks, sample and update in three threads; return what went wrong."""
    errors: list[str] = []

    def run(number: int) -> None:
        try:
            for block in range(many):
                buffer.extend(rows(1_000_000 * number + 5 * block, 5), env=number)
                batch = buffer.sample(8)
                assert whole(batch)
                buffer.update_priorities(batch.keys, np.arange(1, 9))
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=run, args=(number + each,)) for each in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
