"""Memory that two processes see: without a name, so that nothing is left of it when both have ended, however.

The producer writes payloads into it once, and seals it; the trainer maps it for reading.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

from pipeline.errors import PeerLost

ALIGN = 64
_SEALS = 0 if not hasattr(fcntl, "F_ADD_SEALS") else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_AT_ONCE = 512  # buffers of one system call


def laid(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where payloads of these lengths begin, and how many bytes they take."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length + -length % ALIGN
    return starts, at


def share(payloads: Sequence[bytes | memoryview]) -> tuple[int, int]:
    """Copy payloads into new memory. Blocks; returns its descriptor and its size."""
    fd = os.memfd_create("forebay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        buffers: list[bytes | memoryview] = []
        for payload in payloads:
            buffers += [payload, bytes(-len(payload) % ALIGN)]
        size = _write(fd, [each for each in buffers if len(each)])
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, size


def _write(fd: int, buffers: list[bytes | memoryview]) -> int:
    at = place = skip = 0
    while place < len(buffers):
        first = memoryview(buffers[place])[skip:]
        wrote = os.pwritev(fd, [first, *buffers[place + 1 : place + _AT_ONCE]], at)
        at += wrote
        wrote += skip
        while place < len(buffers) and wrote >= len(buffers[place]):
            wrote -= len(buffers[place])
            place += 1
        skip = wrote
    return at


def view(fd: int, size: int, lengths: Sequence[int]) -> list[memoryview]:
    """Map what :func:`share` made and return its payloads; it is let go with the last of them.

    Raises:
        PeerLost: it is not that.
    """
    starts, total = laid(lengths)
    # What could be cut while it is mapped would end this process by a signal.
    if total != size or os.fstat(fd).st_size < size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PeerLost(f"the memory of a batch is not what was announced: {size} bytes for payloads of {total}")
    if not size:
        return [memoryview(b"") for _ in lengths]
    whole = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]
