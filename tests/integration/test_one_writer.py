"""One process writes in a folder: the others are told who does, and nobody takes it over while that one lives."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline import Locked, WriteFailed
from pipeline.sync_form import SyncPipeline
from tests.support import locked
from tests.support.children import ChildProcess, child
from tests.support.runs import pipeline, task


def saved(pipe: SyncPipeline) -> None:
    """Train a step and save it, to the end: what is not kept any more goes after the commit, and asks for the lock."""
    pipe.save(pipe.get_batch(2).step).committed()
    saver = pipe._run._saver
    assert saver is not None
    pipe._call(saver.idle)


def refused(directory: str, holder: ChildProcess) -> None:
    who = rf"process {holder.process.pid} on host .*Stop it, or choose another directory"
    with pytest.raises(Locked, match=who), pipeline(task(40), directory=directory).sync():
        raise AssertionError("was opened")


def test_another_process_is_told_who_writes_and_may_go_on_once_that_one_is_dead(run_directory: str) -> None:
    with child(locked.train, run_directory) as holder:
        assert holder.hear() == "saved"
        for _ in range(2):
            refused(run_directory, holder)
        holder.pipe.send("1")
        uid = holder.hear()
        holder.kill()
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        assert pipe.resume().step == 2
        assert pipe.ledger.state(uid) == "buffered", "what was acknowledged is there"


def test_a_generation_whose_writer_is_busy_is_waited_for_by_nobody(run_directory: str) -> None:
    """Its writer holds the folder, so none can be found that will be complete in a while: once the folder is free, what
    is not complete never will be, and the one before it is the newest."""
    with child(locked.stuck, run_directory) as holder:
        assert holder.hear() == "busy"
        refused(run_directory, holder)
        holder.kill()
    assert sorted(os.listdir(Path(run_directory, "generations"))) == ["00000000", "00000001", "00000002"]
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        resumed = pipe.resume()
        assert (resumed.generation, resumed.step) == (1, 1)


def test_a_holder_that_was_stopped_keeps_the_folder_and_goes_on(run_directory: str) -> None:
    """No lease runs out, so nobody can take the folder over from one who is only slow: it has to be killed."""
    with child(locked.train, run_directory) as holder:
        assert holder.hear() == "saved"
        holder.send(signal.SIGSTOP)
        for _ in range(3):
            refused(run_directory, holder)
        holder.send(signal.SIGCONT)
        holder.pipe.send("1")
        assert isinstance(holder.hear(), int)
        holder.send(signal.SIGSTOP)
        holder.kill()  # which a stopped process heeds
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        assert pipe.resume().step == 2


def test_a_forked_child_has_no_lock_and_keeps_none(run_directory: str) -> None:
    """A worker of a data loader that outlives its trainer is in nobody's way, though it has every descriptor."""
    with child(locked.forks, run_directory) as holder:
        heard = {who: (number, said) for who, number, said in (holder.hear(), holder.hear())}
        parent, (forked, said) = heard["parent"][0], heard["child"]
        assert parent == holder.process.pid != forked
        assert re.match(rf"Locked: .*process {parent} on host", said), said
        refused(run_directory, holder)  # the child's attempt and its end of the descriptors freed nothing
        holder.kill()
        with pipeline(task(40), directory=run_directory).sync() as pipe:
            assert pipe.resume().generation == 0
            os.kill(forked, 0)  # it lives
            holder.pipe.send("go on")
            _, _, said = holder.hear()
            assert re.match(rf"Locked: .*process {os.getpid()} on host", said), said
            holder.pipe.send("end")


def test_one_takes_over_from_another_again_and_again(run_directory: str) -> None:
    with child(locked.attempts, run_directory) as other:
        for _ in range(5):
            with pipeline(task(40), directory=run_directory).sync():
                other.pipe.send("try")
                assert f"process {os.getpid()} on host" in other.hear()
            other.pipe.send("try")
            assert other.hear() == ""
        other.pipe.send("end")


def test_a_lock_that_was_lost_is_taken_back_by_a_save_or_the_save_is_refused(run_directory: str) -> None:
    """Closing any descriptor of the file frees the lock of its process, so a copy of the folder does."""
    with child(locked.attempts, run_directory) as other, pipeline(task(40), directory=run_directory).sync() as pipe:

        def tries() -> str:
            other.pipe.send("try")
            return str(other.hear())

        pipe.start()
        shutil.copytree(run_directory, run_directory + "-copy")
        saved(pipe)
        assert f"process {os.getpid()} on host" in tries()
        shutil.copytree(run_directory, run_directory + "-again")
        with child(locked.train, run_directory) as taker:
            assert taker.hear() == "saved"
            with pytest.raises(Locked, match=f"process {taker.process.pid} on host"):
                pipe.save(pipe.get_batch(2).step).committed()
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        assert pipe.resume().step == 2


def test_a_holder_that_was_overtaken_commits_nothing_though_the_folder_is_free_again(run_directory: str) -> None:
    """Paused, its lock lost, and another life came and went: it wakes, and must not write over what that one did."""
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        pipe.start()
        saved(pipe)
        shutil.copytree(run_directory, run_directory + "-copy")  # frees the lock
        with child(locked.train, run_directory) as other:
            assert other.hear() == "saved"
            other.pipe.send("end")
        with pytest.raises(Locked, match="has written in this folder meanwhile, as incarnation 2"):
            pipe.save(pipe.get_batch(2).step).committed()
    with pipeline(task(40), directory=run_directory).sync() as again:
        assert again.resume().step == 2


def test_a_lock_file_that_was_replaced_holds_nobody_off(run_directory: str) -> None:
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        pipe.start()
        os.unlink(os.path.join(run_directory, "lock"))
        with pytest.raises(WriteFailed, match="was removed, or replaced"):
            pipe.save(pipe.get_batch(2).step)


def test_a_lock_file_that_cannot_be_looked_at_is_not_called_removed(
    run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a network that does not answer now may answer later."""
    stat = os.stat

    def refuses(path: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **more)

    with pipeline(task(40), directory=run_directory).sync() as pipe:
        pipe.start()
        step = pipe.get_batch(2).step
        with monkeypatch.context() as patched:
            patched.setattr("os.stat", refuses)
            with pytest.raises(WriteFailed, match=r"cannot be looked at now.*a retry may work"):
                pipe.save(step)
        pipe.save(step).committed()
