"""Looking at a lock: who has it is known, and whoever has it keeps it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeline import Locked
from pipeline.store.lock import Holder, RunLock, Seen, is_alive, look
from tests.support import standing
from tests.support.children import child


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def refused(path: str) -> None:
    with pytest.raises(Locked):
        RunLock(path).acquire()


def test_another_process_is_seen_while_it_lives_and_keeps_its_lock(path: str) -> None:
    with child(standing.holds, path) as holder:
        holder.hear()
        for _ in range(2):
            seen = look(path)
            assert (seen.held, seen.holder.process, seen.holder.incarnation) == (True, holder.process.pid, 7)
            assert seen.holder.host == socket.gethostname()
            assert is_alive(seen.holder)
        refused(path)
        holder.kill()
    assert look(path) == Seen(False, seen.holder)
    assert is_alive(seen.holder) is False


def test_a_look_in_the_process_that_has_it_does_not_free_it(path: str) -> None:
    """Closing any descriptor of the file would."""
    with child(standing.holds, path) as holder:
        before, after = holder.hear()
        assert before == Seen(True, Holder())
        assert (after.held, after.holder.incarnation) == (True, 7)
        refused(path)
        holder.pipe.send("release")
        assert holder.hear() == Seen(False, after.holder)
        RunLock(path).acquire()


def test_who_has_it_is_known_before_it_has_said_so(path: str) -> None:
    """Between taking the lock and writing into the file, which another life has written to."""
    with child(standing.holds, path) as holder:
        holder.hear()
        for content in (b"", b'{"host": "%s", "boot": "%s", "process": 1}' % (_here(), _boot())):
            Path(path).write_bytes(content)
            seen = look(path)
            assert (seen.held, seen.holder.process, seen.holder.incarnation) == (True, holder.process.pid, 0)


def _here() -> bytes:
    return socket.gethostname().encode()


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 5000, b"\xff\xfe", b'{"process": "x"}', b"null"])
def test_a_file_that_says_nothing_names_nobody(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    os.chmod(path, 0o444)
    assert look(path) == Seen(False, Holder())


def test_what_is_no_file_names_nobody_and_is_not_waited_for(path: str, tmp_path: Path) -> None:
    assert look(path) == Seen(False, Holder())
    assert look(str(tmp_path / "a" / "lock")) == Seen(False, Holder())
    os.mkfifo(path)
    with pytest.raises(OSError, match=r".*"):
        look(path)
    os.unlink(path)
    os.symlink(tmp_path / "other", path)
    with pytest.raises(OSError, match=r".*"):
        look(path)


def test_whether_a_process_is_there_is_said_of_this_machine_as_it_runs_alone() -> None:
    own = Holder(host=socket.gethostname(), boot=_boot().decode(), process=os.getpid())
    assert is_alive(own) is True
    assert is_alive(Holder(host=own.host, boot=own.boot, process=2**40)) is False
    assert is_alive(Holder(host=own.host, boot="before", process=own.process)) is False
    assert is_alive(Holder(host="elsewhere", boot=own.boot, process=own.process)) is None
    assert is_alive(Holder()) is None
