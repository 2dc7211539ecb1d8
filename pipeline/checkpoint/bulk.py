"""What ``verify`` reads in bulk: segments from end to end, and the files of generations. Each is a job for
:func:`~pipeline.store.abreast.abreast`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pipeline.checkpoint.generations import Stored, check_listed
from pipeline.checkpoint.manifest import FileInfo
from pipeline.errors import ForebayError
from pipeline.locations import Location
from pipeline.store.abreast import Job, Told, abreast
from pipeline.store.blocks import LARGE_BLOCK, Blocks, crc32c_joined
from pipeline.store.frames import PAYLOAD, scan
from pipeline.store.layout import segment_key
from pipeline.store.segments import Place

T = TypeVar("T")
_LITTLE = 4 << 20  # bytes: less is read before threads have started
_STRETCH = 32 << 20  # bytes of a file that one thread reads at a time


def done(jobs: Sequence[Job[T]], size: int, told: Told) -> list[T]:
    """Do jobs that read about so many bytes, and return what they return."""
    return abreast(jobs, told, threads=0) if size < _LITTLE else abreast(jobs, told)


class Scanned(NamedTuple):
    """What is in a segment: payloads that are whole, how many bytes of another one follow, and what is wrong."""

    whole: list[Place]
    torn: int
    error: Exception | None


class Scan(NamedTuple):
    """To go through a segment, from its beginning to its end."""

    path: str
    tag: int
    promised: int

    def scanned(self, told: Told) -> Scanned:
        """Return what is there."""
        incarnation, rank, number = segment_key(os.path.basename(self.path))
        whole: list[Place] = []
        torn = 0

        def ended(at: int, left: int) -> None:
            nonlocal torn
            torn = left

        try:
            frames = scan(self.path, run_tag=self.tag, promised=self.promised, ended=ended, payloads=False, told=told)
            for offset, header, _ in frames:
                if header.kind == PAYLOAD:
                    at = Location(incarnation, rank, number, offset, header.length)
                    whole.append((header.sequence, header.number, at))
        except (ForebayError, OSError) as error:
            return Scanned(whole, torn, error)
        return Scanned(whole, torn, None)


class Read(NamedTuple):
    """To read a part of a file of a generation."""

    path: str
    begin: int
    length: int

    def checksum(self, told: Told) -> int | None:
        """Return its checksum, or None if there is none of it."""
        try:
            with Blocks(self.path, block=min(LARGE_BLOCK, self.length), told=told) as blocks:
                return blocks.checksum(self.begin, self.length)
        except (ForebayError, OSError):  # who compares will meet it again
            return None


def reads_of(stored: Stored, info: FileInfo) -> list[Read]:
    """Return what is to be read of a file that a generation lists; nothing of one that is not what it should be."""
    try:
        check_listed(stored, info, size_alone=True)
    except (ForebayError, OSError):
        return []
    path = os.path.join(stored.folder, info.path)
    return [Read(path, at, min(_STRETCH, info.bytes - at)) for at in range(0, info.bytes, _STRETCH)]


def compare(stored: Stored, info: FileInfo, reads: Sequence[Read], checksums: Sequence[int | None]) -> None:
    """Compare a file with its line in the manifest, its parts having been read.

    Raises:
        Damaged: as :func:`~pipeline.checkpoint.generations.check_listed`.
    """
    whole = 0
    for read, checksum in zip(reads, checksums, strict=True):
        if checksum is None:
            break
        whole = crc32c_joined(whole, checksum, read.length)
    # Of what is not as it was, that one says what is wrong.
    check_listed(stored, info, size_alone=f"{whole:08x}" == info.crc32c)
