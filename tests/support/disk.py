"""A file layer that fails or kills at the k-th call, and folders of runs to write into."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.checkpoint.removing import PART
from pipeline.store.files import OsFiles
from pipeline.store.journal import read_journal
from pipeline.store.layout import Layout, RunFile
from pipeline.store.writer import StoreWriter


def lying_in(folder: str) -> set[str]:
    """The names in a folder that all processes have in common, but for those of tests that run at the same time."""
    return {name for name in os.listdir(folder) if not name.startswith("forebay-recording-")}


class Killed(BaseException):
    """The process is gone: no handler of the library's may catch this."""


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ScriptedFiles(OsFiles):
    """The operating system's files, until call number ``fail_at`` (from 1); that call raises ``error()``.

    ``torn``: a write that fails has written half of its bytes. ``after``: the call is done, and raises then.
    ``stays``: every later call fails as well, as on a full disk. ``power``: with the call that raises, the content of
    every file that was not synced since it was written is gone. Syncing itself is only noted: without a loss of power
    nobody can tell, and it takes most of a test's time.
    """

    def __init__(
        self,
        fail_at: int = 0,
        error: Callable[[], BaseException] = no_space,
        *,
        torn: bool = False,
        after: bool = False,
        stays: bool = False,
        power: bool = False,
    ) -> None:
        self.calls: list[str] = []
        self.open: set[int] = set()
        self._fail_at, self._error, self._torn, self._after, self._stays = fail_at, error, torn, after, stays
        self._power, self._root = power, ""
        self._unsynced: set[tuple[int, int]] = set()

    def _enter(self, verb: str) -> bool:
        self.calls.append(verb)
        due = len(self.calls) == self._fail_at or (self._stays and 0 < self._fail_at < len(self.calls))
        if not self._after:
            self._leave(due)
        return due

    def _leave(self, due: bool) -> None:
        if due and self._power:
            self._lose_power()
        if due:
            raise self._error()

    def fail_next(self) -> None:
        """Let the next call fail, and that one alone."""
        self._fail_at = len(self.calls) + 1

    def _lose_power(self) -> None:
        for where, _, names in os.walk(os.path.dirname(self._root)):
            for name in names:
                if self._key(os.path.join(where, name)) in self._unsynced:
                    os.truncate(os.path.join(where, name), 0)

    @staticmethod
    def _key(file: str | int) -> tuple[int, int]:
        status = os.stat(file)
        return status.st_dev, status.st_ino

    def unsynced(self, folder: str) -> list[str]:
        """Return the names of the files in a folder that were not synced since they were written."""
        return [name for name in os.listdir(folder) if self._key(os.path.join(folder, name)) in self._unsynced]

    def end(self) -> None:
        """Close what is open, as the kernel does when a process ends."""
        while self.open:
            os.close(self.open.pop())

    def makedirs(self, path: str) -> None:
        due = self._enter("makedirs")
        super().makedirs(path)
        self._leave(due)

    def create(self, path: str) -> int:
        due = self._enter("create")
        handle = super().create(path)
        self._root = os.path.commonpath([self._root or path, path])
        if due:
            super().close(handle)
        self._leave(due)
        self.open.add(handle)
        return handle

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        try:
            due = self._enter("write")
        except BaseException:
            if self._torn:
                whole = b"".join(bytes(chunk) for chunk in chunks)
                super().write(handle, [whole[: len(whole) // 2]])
            raise
        written = super().write(handle, chunks)
        self._unsynced.add(self._key(handle))
        self._leave(due)
        return written

    def sync(self, handle: int) -> None:
        due = self._enter("sync")
        self._unsynced.discard(self._key(handle))
        self._leave(due)

    def sync_path(self, path: str) -> None:
        due = self._enter("sync_path")
        self._unsynced.discard(self._key(path))
        self._leave(due)

    def close(self, handle: int) -> None:
        self.open.discard(handle)
        super().close(handle)  # the kernel frees the descriptor even when close() reports an error
        self._leave(self._enter("close"))

    def rename(self, old: str, new: str) -> None:
        # What takes a generation out of the way cleans up, and what gives a file or a folder its name commits.
        due = self._enter("set_aside" if new.endswith(PART) else "rename")
        super().rename(old, new)
        self._leave(due)

    def link(self, old: str, new: str) -> None:
        due = self._enter("link")
        super().link(old, new)
        self._leave(due)

    def unlink(self, path: str) -> None:
        due = self._enter("unlink")
        super().unlink(path)
        self._leave(due)

    def rmdir(self, path: str) -> None:
        due = self._enter("rmdir")
        super().rmdir(path)
        self._leave(due)

    def sync_directory(self, path: str) -> None:
        self._leave(self._enter("sync_directory"))


def new_run(directory: str | os.PathLike[str]) -> tuple[Layout, RunFile]:
    """An empty run."""
    layout = Layout(os.fspath(directory))
    return layout, layout.create_run(ScriptedFiles())


def new_writer(
    layout: Layout, run: RunFile, files: OsFiles | None = None, *, incarnation: int = 1, segment_bytes: int = 1 << 20
) -> StoreWriter:
    """A writer of an incarnation of ``run``, not driven by anybody."""
    return StoreWriter(
        layout, files or ScriptedFiles(), run_tag=run.tag, incarnation=incarnation, segment_bytes=segment_bytes
    )


def flush(writer: StoreWriter) -> None:
    """Write what is queued, as the service would, on this thread."""
    batch = writer.take()
    writer.write(batch)
    writer.done(batch)


def events_of(layout: Layout, run: RunFile, *, promised: int = 0) -> list[object]:
    """Every event of the only journal there is."""
    (name,) = layout.list_journals()
    return [logged.event for logged in read_journal(name, run_tag=run.tag, promised=promised)]


def tree(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Content of every file below ``folder``, by its path there."""
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def says_no_machine(folder: str | os.PathLike[str], *, most: int) -> None:
    """Check that files are small, and name nothing of the machine that made them."""
    content = tree(folder)
    assert sum(map(len, content.values())) < most
    for path, raw in content.items():
        assert not any(part in raw for part in (b"/tmp", b"/home", b"/root", b"/work")), path
