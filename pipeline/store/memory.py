"""How much memory can be had."""

from __future__ import annotations

import os
import re
import sys

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
