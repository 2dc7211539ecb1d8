"""A process that shares a buffer is killed: nothing is half done, nobody waits for it, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import blocks
from pipeline.checkpoint import verify
from pipeline.config import Ordered, StalenessWeighted, Uniform, WithoutReplacement
from tests.support.children import ChildProcess, Ended, child
from tests.support.sharing import (
    BACK,
    CAPACITY,
    OPERATIONS,
    Slow,
    busy,
    busy_adding,
    check,
    check_next_obs,
    contents,
    die_inside,
    linked,
    operate,
    own_and_share,
    read,
    rows,
    shared,
    until,
    used,
    write_when_told,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is a thing of Linux")
SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
KILLS = 8 if SOAK == 1 else 100
EVERY_LINE = 47 if SOAK == 1 else 1


AGES = StalenessWeighted(half_life=3.0)
WINDOW = Uniform(window_trajectories=3)
USES, EPOCHS, QUEUE = Uniform(uses=1000), WithoutReplacement(uses=1000), Ordered(by="lifo", uses=1000)
OTHERS: list[Any] = [
    ("write back", "prioritized"),
    *((what, AGES) for what in ("extend", "sample", "clear")),
    *((what, WINDOW) for what in ("mixed", "clear", "first")),
    *((what, USES) for what in ("sample", "many")),
    ("sample", EPOCHS),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save takes several copies, so that there is something to overwrite between them."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20_000)


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
@pytest.mark.parametrize(("what", "select"), [*((what, "prioritized") for what in OPERATIONS), *OTHERS])
def test_killed_within_any_line_of_an_operation_it_leaves_nothing_half_done(what: str, select: Any) -> None:
    line, number = random.Random(what).randrange(1, 1 + EVERY_LINE), 0
    buffer = shared(select=select)
    while True:
        number += 1
        if what == "first":
            buffer = shared(select=select)
        else:
            buffer.extend(rows(1000 * number, 30), envs=3)
            operate(buffer, "append", 1000 * number + 30)
        before = np.array(buffer.ring.keys())
        if not killed_inside(buffer, what, 1000 * number + 100, line):
            break
        line += EVERY_LINE
        check(buffer)
        kept = buffer.ring.keys()
        most = {"many": CAPACITY + 20, "clear": CAPACITY}.get(what, 12)
        assert len(np.setdiff1d(before, kept)) <= most, "rows were lost that nobody was about to overwrite"
    check(buffer)


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
def test_killed_while_it_writes_back_it_has_written_all_or_nothing() -> None:
    line, buffer, going_on = random.Random(4).randrange(1, 1 + EVERY_LINE), shared(), True
    buffer.extend(rows(0, 60), envs=3)
    outcomes = set()
    while going_on:
        before = buffer.ring.mark("a", buffer.ring.keys())
        going_on = killed_inside(buffer, "write back", 0, line)
        line += EVERY_LINE // 4 + 1
        check(buffer)
        written = buffer.ring.mark("a", buffer.ring.keys()) - before
        outcomes.add((int((written == BACK).sum()), int((written == 0).sum())))
        assert outcomes <= {(0, 60), (12, 48)}
    assert len(outcomes) == 2


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
@pytest.mark.parametrize("select", [USES, EPOCHS, QUEUE])
def test_killed_while_it_draws_it_has_taken_a_use_of_each_row_or_of_none(select: Any) -> None:
    line, buffer, going_on = random.Random(5).randrange(1, 1 + EVERY_LINE), shared(select=select), True
    buffer.extend(rows(0, 60), envs=3)
    while going_on:
        before, sampled = used(buffer), buffer.statistics().sampled
        going_on = killed_inside(buffer, "draw some", 0, line)
        line += EVERY_LINE // 4 + 1
        check(buffer)
        assert used(buffer) - before == buffer.statistics().sampled - sampled
        assert used(buffer) - before in (0, 8)
        if select is EPOCHS:
            buffer.sample(57)
            times = buffer.drawer.arrays()["used"]
            assert times.max() - times.min() <= 1, "an epoch has each row once"


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
@pytest.mark.parametrize("select", ["prioritized", WINDOW])
def test_killed_while_it_loads_a_state_it_leaves_the_rows_of_before_or_none_or_all(select: Any) -> None:
    line, number, going_on, found = random.Random(6).randrange(1, 1 + EVERY_LINE), 0, True, set()
    while going_on:
        buffer, number = shared(select=select), number + 1
        buffer.extend(rows(1000 * number, 72), envs=3)
        buffer.sample(8, slices={"length": 2, "pad": True})  # now it knows how long episodes are
        before = contents(buffer)
        going_on = killed_inside(buffer, "load", 1000 * number + 500, line)
        line += EVERY_LINE
        check(buffer)
        after = contents(buffer) if len(buffer) else None
        new = list(range(1000 * number + 510, 1000 * number + 600))
        assert after is None or after == before or after["a"] == new
        found.add("none" if after is None else "old" if after == before else "new")
        buffer.extend(rows(1000 * number, 30), envs=3)
        check(buffer)
    assert found == {"none", "old", "new"}


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
def test_killed_at_any_line_it_leaves_known_where_episodes_began() -> None:
    line, number, buffer = random.Random(7).randrange(1, 1 + EVERY_LINE), 0, shared(select=WINDOW)
    left = {"extend", "mixed", "append", "many", "cut"}
    while left:
        what = sorted(left)[number % len(left)]
        number += 1
        buffer.extend(rows(1000 * number, 10), envs=2)
        keys = buffer.ring.keys()
        firsts, begun = buffer.ring.firsts(keys), buffer.ring.begun()
        if not killed_inside(buffer, what, 1000 * number + 100, line):
            left.remove(what)
        line += max(1, EVERY_LINE // 5)
        check(buffer)
        there = buffer.ring.alive(keys)
        assert np.array_equal(buffer.ring.firsts(keys[there]), firsts[there])
        assert all(each in begun or each[1] >= keys[0] for each in buffer.ring.begun())


def killed_inside(buffer: ReplayBuffer, what: str, first: int, line: int) -> bool:
    """Whether a process that did ``what`` came to that line, and was killed there."""
    with child(die_inside, buffer.share(), what, first, line) as process:
        try:
            said = process.hear()
            assert isinstance(said, int), said
            return False
        except Ended:
            return True


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
def test_who_repairs_the_sharing_of_observations_may_be_killed_as_well() -> None:
    buffer = shared(share_next_obs=True)
    buffer.extend(linked(0, CAPACITY), envs=3)
    number, line = 1, random.Random(1).randrange(1, 1 + EVERY_LINE)
    while True:
        assert killed_inside(buffer, ("linked", "linked many")[number % 2], 1050 * number, 420 - 40 * (number % 4))
        if not killed_inside(buffer, "repair", 0, line):
            break
        check(buffer)
        check_next_obs(buffer)
        buffer.extend(linked(1050 * number + 120, 30), envs=3)
        check_next_obs(buffer)
        number, line = number + 1, line + EVERY_LINE // 3 + 1
    check_next_obs(buffer)


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
def test_who_repairs_may_be_killed_as_well() -> None:
    buffer = shared()
    buffer.extend(rows(0, 60), envs=3)
    number, line = 1, random.Random(1).randrange(1, 1 + EVERY_LINE)
    while True:
        operation = ("extend", "mixed", "cut all", "update", "write back")[number % 5]
        assert killed_inside(buffer, operation, 1000 * number, 150 if operation == "write back" else 100)
        if not killed_inside(buffer, "repair", 0, line):
            break
        if number % 3 == 0:
            assert killed_inside(buffer, "repair", 0, max(1, line - 5))
        check(buffer)
        buffer.extend(rows(1000 * number + 500, 30), envs=3)
        number, line = number + 1, line + EVERY_LINE
    check(buffer)


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
def test_killed_while_rows_are_set_aside_for_a_save_it_spoils_nothing(tmp_path: Path) -> None:
    line, step, going_on = random.Random(2).randrange(1, 1 + EVERY_LINE), 0, True
    while going_on:
        step += 1
        files = Slow()
        with shared(directory=tmp_path / str(step), files=files) as buffer:
            buffer.extend(rows(1000 * step, CAPACITY), envs=3)
            expected = contents(buffer)
            saving = buffer.save(1)
            assert files.begun.wait(30)
            for number in range(6):
                going_on = killed_inside(buffer, "extend", 1000 * step + 200 + 20 * number, line)
                line += EVERY_LINE
                if not going_on:
                    break
            check(buffer)
            files.go_on.set()
            assert saving.wait(30)
        with shared(directory=tmp_path / str(step)) as again:
            again.resume(1, continue_episodes=True)
            assert contents(again) == expected


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 10))
def test_killed_at_any_moment_it_leaves_nothing_half_done_and_others_go_on() -> None:
    chance = random.Random(3)
    buffer = shared()
    buffer.extend(rows(0, 20))
    with child(busy, buffer.share(), 5) as other:
        assert other.hear() == "ready"
        for _ in range(KILLS):
            with child(busy, buffer.share(), 6) as process:
                assert process.hear() == "ready"
                process.process.join(chance.uniform(0, 0.05))
                assert process.process.exitcode is None, process.rest()
                process.kill()
            check(buffer)
            added = buffer.statistics().added
            until(lambda added=added: buffer.statistics().added > added + 12)
            assert other.process.exitcode is None, other.rest()
    check(buffer)


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 30))
@pytest.mark.parametrize("what", ["linked", "linked append", "linked many", "linked at once", "linked load", "clear"])
def test_killed_within_any_line_it_leaves_each_row_its_next_observation(what: str) -> None:
    line, number, going_on = random.Random(what).randrange(1, 1 + EVERY_LINE), 0, True
    buffer = shared(share_next_obs=True)
    while going_on:
        number += 1
        first = 1050 * number
        buffer.extend(linked(first, 30), envs=3)
        check_next_obs(buffer)
        going_on = killed_inside(buffer, what, first + 30, line)
        line += EVERY_LINE * (8 if what in ("linked load", "linked at once") and SOAK == 1 else 1)
        check(buffer)
        check_next_obs(buffer)
        for next_ in ("linked", "linked append"):  # whoever goes on finds places that are free
            operate(buffer, next_, first + 42)
            check_next_obs(buffer)


@pytest.mark.slow
@pytest.mark.timeout(120 * (1 if SOAK == 1 else 10))
@pytest.mark.parametrize("select", ["prioritized", AGES, WINDOW])
def test_four_readers_see_whole_rows_alone_while_writers_are_killed(select: Any) -> None:
    chance = random.Random(8)
    buffer = shared(2000, select=select)
    buffer.extend(rows(0, 200))
    kind = 1 if select == "prioritized" else 2
    with ExitStack() as stack:
        readers = [stack.enter_context(child(read, buffer.share(), kind, 10**9)) for _ in range(4)]
        for process in readers:
            assert process.hear() == "ready"
            process.pipe.send("go")
        for _ in range(KILLS):
            with child(busy if select == "prioritized" else busy_adding, buffer.share(), 6) as writer:
                assert writer.hear() == "ready"
                writer.process.join(chance.uniform(0, 0.1))
                assert writer.process.exitcode is None, writer.rest()
                writer.kill()
            sampled = buffer.statistics().sampled
            until(lambda sampled=sampled: buffer.statistics().sampled > sampled + 200)
        check(buffer)
        for process in readers:
            assert not process.pipe.poll(), process.rest()
            assert process.process.exitcode is None
    check(buffer)


def test_who_holds_the_lock_and_is_killed_keeps_nobody_out() -> None:
    buffer = shared()
    buffer.extend(rows(0, 20))
    with ExitStack() as stack:
        held = stack.enter_context(child(hold, buffer.share()))
        assert held.hear() == "held"
        looking = threading.Thread(target=lambda: check(buffer))
        looking.start()
        held.kill()
        looking.join(30)
        assert not looking.is_alive()
    assert len(buffer) == 20


def hold(pipe: Any, handle: Any) -> None:
    """Have the lock for ever, with a row half written."""
    buffer = ReplayBuffer.join(handle)
    with buffer.gate.lock:
        buffer.ring.append({name: each[0] for name, each in rows(999, 1).items()}, 0, 0, 0)
        pipe.send("held")
        threading.Event().wait()


def test_nothing_is_left_when_everybody_was_killed(tmp_path: Path) -> None:
    with child(hold, shared().share()):
        pass  # the fork server has what it needs by now
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = ChildProcess(own_and_share, str(tmp_path / "run"), str(temporary))
    pids = process.hear()
    assert len(pids) == 3, pids
    assert all(memory_of(pid) for pid in pids)
    assert not [path for pid in pids for path in named_memory_of(pid)], (
        "the kernel frees what has no name, and only that"
    )
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.pipe.close()
    until(lambda: not any(memory_of(pid) for pid in pids))
    assert list(temporary.iterdir()) == []
    assert verify(str(tmp_path / "run")).whole


def named_memory_of(pid: int) -> list[str]:
    """Return what a process has mapped of the memory that all have in common, and that has a name still."""
    places = {line.split(maxsplit=5)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return [path for path in places if path.startswith("/dev/shm/") and not path.endswith("(deleted)")]


def memory_of(pid: int) -> bool:
    """Whether a process has our memory."""
    try:
        return any("memfd:forebay" in os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def test_when_the_owner_is_killed_the_others_go_on(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.get_context("forkserver").Pipe()
    with child(own_until_killed, str(tmp_path), theirs) as owner:
        theirs.close()
        assert ours.poll(30)
        assert ours.recv() == "ready"
        assert owner.hear() == "saving"
        ours.send(12)
        assert ours.recv() == 1_000_012
        owner.kill()
        for number in range(1, 4):
            ours.send(600)
            assert ours.poll(30)
            assert ours.recv() == 1_000_012 + 600 * number
    ours.send("what ends it")
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()


def own_until_killed(pipe: Any, directory: str, far: Any) -> None:
    """Share a buffer with a process of our own, and be in the midst of a save for ever."""
    files = Slow()
    buffer = shared(directory=directory, files=files)
    buffer.extend(rows(0, CAPACITY))
    writer = multiprocessing.get_context("fork").Process(target=write_when_told, args=(far, buffer.share(), 1))
    writer.start()
    far.close()
    buffer.save(1)
    files.begun.wait()
    pipe.send("saving")
    threading.Event().wait()
