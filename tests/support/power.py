"""A file system that forgets what was not synced when the power goes."""

from __future__ import annotations

import os

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

    def after_power_loss(self, directory: str, target: str) -> str:
        """Make ``target`` what ``directory`` would be after a loss of power now."""
        folders = {os.stat(folder).st_ino for folder, _, _ in os.walk(directory)}
        self._restore(os.stat(directory).st_ino, target, folders)
        return target

    def _restore(self, folder: int, target: str, folders: set[int]) -> None:
        os.makedirs(target)
        for name, inode in self._entries.get(folder, {}).items():
            if inode in folders:
                self._restore(inode, os.path.join(target, name), folders)
            elif name != "lock":
                with open(os.path.join(target, name), "wb") as file:
                    file.write(self._content.get(inode, b""))
