"""Which segments are still needed, and the removal of those that are not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from pipeline.checkpoint.manifest import REPLAY_BUFFER, Manifest
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout

SegmentKey: TypeAlias = tuple[int, int, int]
"""Incarnation, rank and number: what names a segment."""


class Needs:
    """What one generation needs of the segments."""

    def __init__(self, manifest: Manifest) -> None:
        self._none = REPLAY_BUFFER in manifest.left_out
        self._incarnation, self._base = manifest.incarnation, manifest.base
        self._open = {each.rank: each.segment for each in manifest.journals if each.incarnation == self._incarnation}
        # A generation of before live bytes were listed says nothing of the segments that it needs.
        self._lists = any(self._open.values())
        self._live = {info.name for info in manifest.segments if info.live != 0}

    def __contains__(self, key: SegmentKey) -> bool:
        """Whether the generation needs this segment: something in it was live, or it had not ended."""
        incarnation, rank, number = key
        if self._none or incarnation < self._base:
            return False
        if not self._lists or incarnation > self._incarnation:
            return True
        if incarnation == self._incarnation and number >= self._open.get(rank, 0):
            return True
        return segment_name(key) in self._live


class Collected(NamedTuple):
    """Segments that were removed."""

    segments: int
    bytes: int


def collect(
    layout: Layout, files: FilesLike, kept: Iterable[Manifest], used: Callable[[SegmentKey], bool], archive: float
) -> Collected:
    """Remove the segments that neither a kept generation nor this life of the process needs. Blocks.

    Args:
        layout: the run's paths.
        files: the file layer.
        kept: manifests of the generations that stay.
        used: whether this life still reads or writes a segment.
        archive: the share of segments, by their numbers, that stay though nobody needs them.
    """
    needs = list(map(Needs, kept))
    count = freed = 0
    for name in layout.list_segments():
        key = segment_key(name)
        if used(key) or archived(key[2], archive) or any(key in each for each in needs):
            continue
        path = os.path.join(layout.segments, name)
        size = os.path.getsize(path)
        files.unlink(path)
        count, freed = count + 1, freed + size
    return Collected(count, freed)


def archived(number: int, share: float) -> bool:
    """Whether the segment of this number, from 1, is among the ``share`` (0 to 1) of them that stay."""
    return int(number * share) > int((number - 1) * share)


def segment_name(key: SegmentKey) -> str:
    """Return the name of a segment's file."""
    return "{:06d}-{:04d}-{:06d}.fbs".format(*key)


def segment_key(name: str) -> SegmentKey:
    """Return what the name of a segment's file says."""
    incarnation, rank, number = map(int, os.path.splitext(name)[0].split("-"))
    return incarnation, rank, number
