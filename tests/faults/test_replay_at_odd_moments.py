"""A buffer that is saved, closed, cleared, forked and interrupted when nobody expects it."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ClosedError, Locked, ReplayBuffer, WriteFailed
from pipeline.checkpoint import verify
from pipeline.errors import StoppedExit
from pipeline.replay.store import Saving
from pipeline.store.files import OsFiles
from tests.support.replaying import Counter, contents, fill, rows

BEFORE = 2500  # rows: two blocks


class Held(OsFiles):
    """Writes no segment until it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def create(self, path: str) -> int:
        if path.endswith(".fbs"):
            self.begun.set()
            assert self.go_on.wait(30)
        return super().create(path)


def begun(directory: Path) -> tuple[ReplayBuffer, Held, Saving]:
    """A buffer of three rows whose first save is under way."""
    files = Held()
    buffer = ReplayBuffer(100, directory=directory, files=files)
    buffer.resume()
    buffer.extend({"x": np.arange(3)})
    saving = buffer.save(1)
    assert files.begun.wait(30)
    return buffer, files, saving


def there(directory: Path, capacity: int = 100) -> tuple[int, list[int]]:
    """The step and the column x that come back."""
    assert verify(str(directory)).whole
    with ReplayBuffer(capacity, directory=directory) as buffer:
        return buffer.resume().step, contents(buffer)["x"]


# -- what happens between the moment that is saved and the writing ---------------------------------------------------


def clear(buffer: ReplayBuffer) -> None:
    buffer.clear()
    buffer.extend(rows(9000, 500))


def clear_for_other_columns(buffer: ReplayBuffer) -> None:
    buffer.clear()
    buffer.extend({"y": np.arange(500)})


def end_every_episode(buffer: ReplayBuffer) -> None:
    assert buffer.end_episode() == 1


def overwrite(buffer: ReplayBuffer) -> None:
    buffer.extend(rows(BEFORE, 1500))


@pytest.mark.parametrize("then", [clear, clear_for_other_columns, end_every_episode, overwrite])
def test_a_save_is_of_the_moment_at_which_it_was_asked_for(
    tmp_path: Path, then: Callable[[ReplayBuffer], None]
) -> None:
    files = Held()
    with ReplayBuffer(3000, directory=tmp_path, files=files) as buffer:
        buffer.resume()
        fill(buffer, 0, BEFORE, block=500)
        before = contents(buffer)
        saving = buffer.save(1)
        assert files.begun.wait(30)
        then(buffer)
        files.go_on.set()
        saving.wait()
        after = contents(buffer)
        buffer.save(2, wait=True)
    assert verify(str(tmp_path)).whole
    for step, expected in ((1, before), (2, after)):
        with ReplayBuffer(3000, directory=tmp_path, keep=None) as again:
            again.resume(step, continue_episodes=True)
            assert contents(again) == expected


# -- forks -----------------------------------------------------------------------------------------------------------


def in_a_fork(act: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_forked_child_that_closes_the_buffer_leaves_its_files_alone(tmp_path: Path) -> None:
    with ReplayBuffer(100, directory=tmp_path) as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(3)})
        buffer.save(1, wait=True)
        in_a_fork(buffer.close)
        buffer.extend({"x": np.arange(3, 6)})
        buffer.save(2, wait=True)
    assert there(tmp_path) == (2, [0, 1, 2, 3, 4, 5])


def test_a_child_that_was_forked_while_a_save_is_written_does_not_wait_for_it(tmp_path: Path) -> None:
    buffer, files, _ = begun(tmp_path)
    in_a_fork(buffer.close)
    files.go_on.set()
    buffer.close()
    assert there(tmp_path) == (1, [0, 1, 2])


# -- threads, signals and the end of a buffer ------------------------------------------------------------------------


def test_saves_of_several_threads_come_one_after_the_other(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def train(buffer: ReplayBuffer, first: int) -> None:
        try:
            for step in range(first, first + 10):
                buffer.extend({"x": np.full(7, step)})
                buffer.save(step)
        except BaseException as error:
            errors.append(error)

    with ReplayBuffer(500, directory=tmp_path) as buffer:
        buffer.resume()
        threads = [threading.Thread(target=train, args=(buffer, 100 * number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = contents(buffer)["x"]
        buffer.save(1000, wait=True)
    assert not errors
    assert there(tmp_path, 500) == (1000, expected)


def interrupted(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let ``act`` be interrupted where it waits for a save."""

    def interrupt(saving: Saving) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "wait_until_done", interrupt)
        with pytest.raises(KeyboardInterrupt):
            act()


def test_a_close_that_is_interrupted_keeps_the_folder_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, files, saving = begun(tmp_path)
    interrupted(monkeypatch, buffer.close)
    with ReplayBuffer(100, directory=tmp_path) as other, pytest.raises(Locked):
        other.resume()
    files.go_on.set()
    buffer.close()
    assert saving.error is None
    assert there(tmp_path) == (1, [0, 1, 2])


def test_a_save_that_is_interrupted_is_followed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, files, saving = begun(tmp_path)
    interrupted(monkeypatch, lambda: buffer.save(2))
    files.go_on.set()
    buffer.extend({"x": np.arange(3, 6)})
    buffer.save(3, wait=True)
    assert saving.done
    buffer.close()
    assert there(tmp_path) == (3, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_without_a_thread_nothing_of_a_save_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def start(thread: threading.Thread) -> None:
        raise error

    with ReplayBuffer(100, directory=tmp_path) as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(3)})
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(WriteFailed if isinstance(error, RuntimeError) else KeyboardInterrupt):
                buffer.save(1)
        assert not os.listdir(tmp_path / "generations")
        buffer.save(2, wait=True)
    assert there(tmp_path) == (2, [0, 1, 2])


def test_a_buffer_that_was_closed_is_not_saved_over_what_came_after(tmp_path: Path) -> None:
    with ReplayBuffer(4, directory=tmp_path, keep=1) as first:
        first.resume()
        first.extend({"x": np.arange(3)})
        first.save(1, wait=True)
    with ReplayBuffer(4, directory=tmp_path, keep=1) as second:
        second.resume()
        second.extend({"x": np.arange(10, 14)})
        second.save(2, wait=True)
    for verb in (lambda: first.save(3), first.resume):
        with pytest.raises(ClosedError, match="given back"):
            verb()
    first.close()
    assert len(first.sample(2)) == 2
    assert there(tmp_path, 4) == (2, [10, 11, 12, 13])


def test_a_buffer_that_was_dropped_without_being_closed_lets_go_of_its_folder(tmp_path: Path) -> None:
    buffer = ReplayBuffer(100, directory=tmp_path, signals=())
    buffer.resume()
    buffer.extend({"x": np.arange(3)})
    buffer.save(1, wait=True)
    del buffer
    gc.collect()
    assert there(tmp_path) == (1, [0, 1, 2])


def test_a_stop_file_that_is_gone_again_stops_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(100, directory=tmp_path) as buffer:
        buffer.resume()
        buffer.extend({"x": np.arange(3)})
        (tmp_path / "stop").touch()
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        assert buffer.save_due()
        (tmp_path / "stop").unlink()
        with pytest.raises(StoppedExit):
            buffer.save(1)
    assert there(tmp_path) == (1, [0, 1, 2])


# -- folders and disks -----------------------------------------------------------------------------------------------


class NoLinks(OsFiles):
    """Cannot link, and has no space for the trainer's files while ``full``."""

    full = False

    def link(self, old: str, new: str) -> None:
        raise OSError(errno.EPERM, "no links here", new)

    def create(self, path: str) -> int:
        if self.full and "trainer" in path:
            raise OSError(errno.ENOSPC, "full", path)
        return super().create(path)


@pytest.mark.parametrize("full", [False, True])
def test_going_back_where_links_are_impossible(tmp_path: Path, full: bool) -> None:
    options: dict[str, Any] = {"directory": tmp_path, "keep": None}
    with ReplayBuffer(60, **options) as buffer:
        counter = Counter()
        buffer.attach(counter=counter)
        buffer.resume()
        for step in (1, 2):
            counter.step = step
            fill(buffer, 9 * step, 9)
            buffer.save(step, wait=True)
    files = NoLinks()
    files.full = full
    with ReplayBuffer(60, files=files, **options) as buffer:
        buffer.attach(counter=counter)
        if full:
            with pytest.raises(WriteFailed, match="full"):
                buffer.resume(1)
            assert sorted(os.listdir(tmp_path / "generations")) == ["00000000", "00000001"]
        else:
            assert buffer.resume(1).generation == 2
    assert verify(str(tmp_path)).whole
    with ReplayBuffer(60, **options) as buffer:
        buffer.attach(counter=counter)
        assert buffer.resume().step == (2 if full else 1) == counter.step


@pytest.mark.parametrize("name", [b"bytes \xff that are no text", b"a b\n", ("ü" * 120).encode(), b"-rf"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = os.fsdecode(name)
    with ReplayBuffer(100, directory=relative) as buffer:
        buffer.resume()
        monkeypatch.chdir("/")
        buffer.extend({"x": np.arange(3)})
        buffer.save(1, wait=True)
    assert there(tmp_path / relative) == (1, [0, 1, 2])
