"""What a generation says of the segments that it counts on, and what goes when older ones have gone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from pipeline.checkpoint.generations import RETRY
from pipeline.errors import Damaged, WriteFailed
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, SegmentKey, segment_key, segment_name
from pipeline.store.segments import SegmentInfo
from pipeline.wiring.state import RunState


def live_segments(state: RunState) -> dict[SegmentKey, int]:
    """Return the bytes of payloads that are still needed, by segment.

    Results of evaluations of weights that are older than the trained ones are not: whoever asks for them again gets
    them while they are there.
    """
    live = dict(state.buffer.storage.live)
    places = [part.location for _, _, part in state.partials.items()]
    places += state.evaluations.places(state.ledger.step)
    for place in places:
        if place is not None:
            live[place.segment_key] = live.get(place.segment_key, 0) + place.length
    for key in state.moving:  # an event after this capture may say that something lies there
        live.setdefault(key, 1)
    return live


def listed_segments(
    layout: Layout, own: Sequence[SegmentInfo], live: Mapping[SegmentKey, int], incarnation: int, open_segment: int
) -> list[SegmentInfo]:
    """Return what the manifest says of the segments: those with something live, and those that had not ended. Blocks.

    Args:
        layout: the run's paths.
        own: this incarnation's, as synced.
        live: bytes of what is live, by segment.
        incarnation: this one.
        open_segment: the number of the segment that was being written at the capture.

    Raises:
        Damaged: one in which something is live is gone: whoever removed it, the generation could not be resumed.
    """
    found = []
    for info in own:
        key = segment_key(info.name)
        if key in live or key[2] >= open_segment:
            found.append(msgspec.structs.replace(info, live=live.get(key, 0)))
    for key in sorted(live):
        if key[0] != incarnation:
            path = layout.segment(*key)
            try:
                size = os.path.getsize(path)
            except FileNotFoundError:
                raise Damaged(f"{path}: the segment is missing, and rollouts in it are still to be trained") from None
            found.append(SegmentInfo(name=segment_name(key), bytes=size, sealed=True, live=live[key]))
    return found


def sync_dead_lives(layout: Layout, files: FilesLike, since: int, before: int) -> None:
    """Sync what lives of the process wrote that were killed before they could, from incarnation ``since`` on. Blocks.

    The generation that a resume commits counts on it; a loss of power must not take what a kill had left.

    Raises:
        WriteFailed: something could not be synced.
    """
    try:
        for journal in layout.list_journals():
            if since <= journal.incarnation < before:
                files.sync_path(journal.path)
        for name in layout.list_segments():
            if since <= segment_key(name)[0] < before:
                files.sync_path(os.path.join(layout.segments, name))
        for folder in (layout.journals, layout.segments):
            files.sync_directory(folder)
    except OSError as error:
        raise WriteFailed(f"{layout.directory}: could not be synced: {error}. {RETRY}") from error
