"""A file system that forgets what was not synced when the power goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from pipeline.store.files import OsFiles


class VolatileFiles(OsFiles):
    """Knows what would be there after a loss of power: the entries and the content that were synced last."""

    def __init__(self) -> None:
        self.syncs = 0
        self._content: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._paths: dict[int, str] = {}
        self._kept: list[int] = []  # open for ever, so that no inode's number is used again

    def create(self, path: str) -> int:
        handle = super().create(path)
        self._paths[handle] = path
        self._kept.append(os.dup(handle))
        return handle

    def sync(self, handle: int) -> None:
        self.syncs += 1
        with open(self._paths[handle], "rb") as file:
            self._content[os.fstat(handle).st_ino] = file.read()

    def sync_path(self, path: str) -> None:
        self.syncs += 1
        with open(path, "rb") as file:
            self._content[os.fstat(file.fileno()).st_ino] = file.read()

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._paths = {handle: new if path == old else path for handle, path in self._paths.items()}

    def close(self, handle: int) -> None:
        self._paths.pop(handle, None)
        super().close(handle)

    def sync_directory(self, path: str) -> None:
        self._entries[os.stat(path).st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}

    def end(self) -> None:
        """Let go of the files that were kept open."""
        for handle in self._kept:
            os.close(handle)
        self._kept.clear()

    def after_power_loss(
        self, directory: str, target: str, *, lucky: Callable[[str], bool] = lambda name: False
    ) -> str:
        """Make ``target`` what ``directory`` would be after a loss of power now.

        Args:
            directory: what is there.
            target: a new folder.
            lucky: files, by their name, that were written to the disk to their end though nobody had synced them.
        """
        now = {}
        for folder, _, names in os.walk(directory):
            now[os.stat(folder).st_ino] = folder
            now.update((os.stat(os.path.join(folder, name)).st_ino, os.path.join(folder, name)) for name in names)
        self._restore(os.stat(directory).st_ino, target, now, lucky)
        return target

    def _restore(self, folder: int, target: str, now: dict[int, str], lucky: Callable[[str], bool]) -> None:
        os.makedirs(target)
        for name, inode in self._entries.get(folder, {}).items():
            path = os.path.join(target, name)
            if os.path.isdir(now.get(inode, "")):
                self._restore(inode, path, now, lucky)
            elif inode in now and lucky(name):
                shutil.copyfile(now[inode], path)
            elif name != "lock":
                with open(path, "wb") as file:
                    file.write(self._content.get(inode, b""))
