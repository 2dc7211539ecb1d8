"""The disk's own speed for the same bytes, and files beside which checkpoints are measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.store.memory import aligned_memory

BLOCK, LARGE = 1 << 20, 64 << 20
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def in_memory(folder: str) -> bool:
    """Whether ``folder`` lies in a file system of memory alone, so that nothing measured there says anything."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            lines = [line.split() for line in mounts]
    except FileNotFoundError:
        return False
    path = os.path.realpath(folder)
    for _, where, what, *_ in lines:
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best):
            best, kind = where, what
    return kind in _IN_MEMORY


def warm_array(size: int) -> None:
    """As :func:`warm_memory`, for memory of the process's own, before something is loaded."""
    np.ones(size, np.uint8)


def warm_memory(folder: str, size: int) -> None:
    """Have the page cache take ``size`` bytes and let them go again, before a side is timed.

    A virtual machine may give memory that was free for seconds back to its host, and then it is slow to touch: 2 s for
    1 GB were seen, in whichever side happened to come upon it.
    """
    path, block = os.path.join(folder, "warm"), bytes(min(size, LARGE))  # as large as a segment: the same kind of pages
    with open(path, "wb", buffering=0) as file:
        file.writelines(block for _ in range(-(-size // len(block))))
    os.unlink(path)


def write_synced(path: str, chunks: Iterable[memoryview]) -> float:
    """Seconds for writing a new file from its beginning to its end, one ``fsync`` of it, and one of its folder."""
    begun = time.perf_counter()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for chunk in chunks:
        while chunk:
            chunk = chunk[os.write(handle, chunk) :]
    _sync(handle, path)
    return time.perf_counter() - begun


def torch_saved(path: str, state: Any) -> float:
    """Seconds for ``torch.save`` to a new file, and the same ``fsync``."""
    begun = time.perf_counter()
    torch.save(state, path)
    _sync(os.open(path, os.O_RDONLY), path)
    return time.perf_counter() - begun


def _sync(handle: int, path: str) -> None:
    os.fsync(handle)
    os.close(handle)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)


def read_through(paths: Sequence[str]) -> float:
    """Seconds for reading files through one block of memory: the least that reading can cost."""
    block = aligned_memory(BLOCK)
    begun = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - begun


def read_whole(paths: Sequence[str]) -> float:
    """Seconds for reading files into memory of their own, as who wants to use what is in them must."""
    begun = time.perf_counter()
    held = []
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            held.append(file.readall())
    return time.perf_counter() - begun


def evict(paths: Sequence[str]) -> bool:
    """Ask for files that were synced to be dropped from the page cache. Returns whether that can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return True


def files_of(folder: str) -> Iterator[str]:
    """Yield the path of every file in a folder, in order."""
    for where, folders, names in os.walk(folder):
        folders.sort()
        yield from (os.path.join(where, name) for name in sorted(names))


def needed_by_resume(run: str) -> list[str]:
    """Return the files that a resume of the newest generation reads: journals, segments, and that generation's."""
    newest = max(os.listdir(os.path.join(run, "generations")), key=int)
    parts = ("journals", "segments", os.path.join("generations", newest))
    return [path for part in parts for path in files_of(os.path.join(run, part))]
