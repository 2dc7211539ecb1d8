"""A file layer that remembers every change, so that a folder can be made as it was after any of them.

What ``kill -9`` leaves is what had been handed to the operating system: every call that returned, and nothing of the
ones to come. So each prefix of the calls is a crash.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.store.files import OsFiles


class Change(NamedTuple):
    """One call that changed the folder, with paths relative to its root."""

    verb: str
    path: str
    other: str = ""
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.verb} {self.path}{' ' + self.other if self.other else ''}"


class RecordingFiles(OsFiles):
    """Does every call, and notes it. Nothing is synced: a process that is killed cannot tell."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self.changes: list[Change] = []
        self._paths: dict[int, str] = {}

    def _note(self, verb: str, path: str, other: str = "", data: bytes = b"") -> None:
        paths = [os.path.relpath(each, self.root) if each else "" for each in (path, other)]
        self.changes.append(Change(verb, paths[0], paths[1], data))

    def makedirs(self, path: str) -> None:
        super().makedirs(path)
        self._note("makedirs", path)

    def create(self, path: str) -> int:
        handle = super().create(path)
        self._paths[handle] = path
        self._note("create", path)
        return handle

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        written = super().write(handle, chunks)
        self._note("write", self._paths[handle], data=b"".join(chunks))
        return written

    def close(self, handle: int) -> None:
        super().close(handle)
        self._paths.pop(handle, None)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._note("rename", old, new)

    def link(self, old: str, new: str) -> None:
        super().link(old, new)
        self._note("link", old, new)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._note("unlink", path)

    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        self._note("rmdir", path)

    def sync(self, handle: int) -> None:
        """Do nothing."""

    def sync_path(self, path: str) -> None:
        """Do nothing."""

    def sync_directory(self, path: str) -> None:
        """Do nothing."""


class Replay:
    """A folder, new or as it was when the recording began, that is brought forward change by change."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.done = 0
        os.makedirs(root, exist_ok=True)

    def forward(self, changes: Sequence[Change], upto: int) -> None:
        """Make the folder as it was after the first ``upto`` of ``changes``."""
        for change in changes[self.done : upto]:
            self._do(change)
        self.done = upto

    def tear(self, change: Change, part: float) -> None:
        """Write ``part`` (0 to 1) of what a write wrote, as a kill in its midst leaves it; then go no further."""
        self._do(change._replace(data=change.data[: int(len(change.data) * part)]))

    def copy(self, target: str) -> str:
        """Copy the folder as it is now."""
        shutil.copytree(self.root, target)
        return target

    def _do(self, change: Change) -> None:
        path, other = os.path.join(self.root, change.path), os.path.join(self.root, change.other)
        calls: dict[str, Any] = {
            "makedirs": lambda: os.makedirs(path, exist_ok=True),
            "create": lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644)),
            "write": lambda: _append(path, change.data),
            "rename": lambda: os.rename(path, other),
            "link": lambda: os.link(path, other),
            "unlink": lambda: os.unlink(path),
            "rmdir": lambda: os.rmdir(path),
        }
        calls[change.verb]()


def _append(path: str, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder, in memory where there is such a file system: making a file is far cheaper there."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(prefix="forebay-recording-", dir=memory if os.access(memory, os.W_OK) else None)
