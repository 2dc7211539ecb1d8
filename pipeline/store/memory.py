"""How much memory can be had, and memory that files are read into."""

from __future__ import annotations

import os
import re
import sys

import numpy as np

_LINE = 64  # bytes of a line of a processor's cache
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Return how many bytes of memory can be had without swapping, as far as the system tells; else very many."""
    return min(_of_machine(), *(_of_group(*paths) for paths in _CGROUPS))


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", "rb") as file:
            found = re.search(rb"^MemAvailable:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    try:  # macOS does not say what is free; more than there is cannot be had
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return sys.maxsize


def _of_group(limit: str, used: str) -> int:
    """What a container may still take. Its page cache counts as used, and can be had all the same: that is added."""
    try:
        with open(limit) as file:
            most = int(file.read())
        with open(used) as file:
            now = int(file.read())
        cached = 0
        with open(os.path.join(os.path.dirname(used), "memory.stat")) as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "active_file"):
                    cached += int(value)
    except (OSError, ValueError):  # no limit reads "max"
        return sys.maxsize
    return max(0, most - now + cached)


def aligned_memory(size: int) -> memoryview:
    """Return so many bytes that begin with a line of the cache: the kernel copies into these up to twice as fast as
    into what begins within one, as most large memory of the interpreter does."""
    raw = np.empty(size + _LINE, np.uint8)
    begin = -raw.ctypes.data % _LINE
    return raw.data[begin : begin + size]
