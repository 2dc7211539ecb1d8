"""Which segments are still needed, and the removal of those that are not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from pipeline.checkpoint.manifest import REPLAY_BUFFER, Manifest
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, SegmentKey, segment_key


class Needs:
    """What some generations need of the segments, together."""

    def __init__(self) -> None:
        self._live: set[SegmentKey] = set()
        self._open: dict[tuple[int, int], int] = {}  # by incarnation and rank: the least number that had not ended
        self._owners: set[int] = set()
        self._oldest = sys.maxsize  # of incarnations: segments of later ones are needed, whatever lies in them
        self._all_from = sys.maxsize  # incarnation from which on every segment is needed

    def add(self, manifest: Manifest, *, reusable: bool) -> None:
        """Take in what a generation needs.

        Args:
            manifest: the generation's.
            reusable: whether a resume of it is to use what the rollouts did afterwards too. An old one that is kept for
                good would otherwise keep every segment that came after it.
        """
        if REPLAY_BUFFER in manifest.left_out:
            return
        own = manifest.incarnation
        begun = {each.rank: each.segment for each in manifest.journals if each.incarnation == own}
        if not any(begun.values()):  # it is of before live bytes were listed, and says nothing of what it needs
            self._all_from = min(self._all_from, manifest.base)
            return
        self._live.update(segment_key(info.name) for info in manifest.segments if info.live != 0)
        if not reusable:
            return
        self._owners.add(own)
        for rank, number in begun.items():
            self._open[own, rank] = min(number, self._open.get((own, rank), number))
        self._oldest = min(self._oldest, own)

    def __contains__(self, key: SegmentKey) -> bool:
        """Whether a generation needs this segment: something in it was live, or it had not ended."""
        incarnation, rank, number = key
        if incarnation >= self._all_from or incarnation > self._oldest:
            return True
        if incarnation in self._owners and number >= self._open.get((incarnation, rank), 0):
            return True
        return key in self._live


class Collected(NamedTuple):
    """Segments that were removed."""

    segments: int
    bytes: int


def collect(
    layout: Layout, files: FilesLike, needs: Needs, used: Callable[[SegmentKey], bool], archive: float
) -> Collected:
    """Remove the segments that neither a kept generation nor this life of the process needs. Blocks.

    Args:
        layout: the run's paths.
        files: the file layer.
        needs: what the generations need that stay.
        used: whether this life still reads or writes a segment.
        archive: the share of segments, by their numbers, that stay though nobody needs them.
    """
    count = freed = 0
    for name in layout.list_segments():
        key = segment_key(name)
        if used(key) or archived(key[2], archive) or key in needs:
            continue
        path = os.path.join(layout.segments, name)
        size = os.path.getsize(path)
        files.unlink(path)
        count, freed = count + 1, freed + size
    return Collected(count, freed)


def archived(number: int, share: float) -> bool:
    """Whether the segment of this number, from 1, is among the ``share`` (0 to 1) of them that stay."""
    return int(number * share) > int((number - 1) * share)
