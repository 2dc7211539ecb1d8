"""What a generation says of the segments that it counts on, and what goes when older ones have gone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pipeline.checkpoint.generations import RETRY
from pipeline.errors import Damaged, WriteFailed
from pipeline.store.files import FilesLike
from pipeline.store.frames import whole_bytes
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


class DeadSegments:
    """How far the segments of earlier lives are whole: a life that was killed, or whose disk was full, may have left
    half a record at the end of its newest ones, and no generation may promise that. Blocks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bytes: dict[SegmentKey, int] = {}  # nobody writes them any more

    def promise(self, infos: Iterable[SegmentInfo]) -> None:
        """Take a generation's word for how far its segments are whole: nothing beyond that is counted on."""
        for info in infos:
            self._bytes.setdefault(segment_key(info.name), info.bytes)

    def path(self, key: SegmentKey) -> str:
        """Return the path of a segment."""
        return self._layout.segment(*key)

    def bytes_of(self, key: SegmentKey, run_tag: int) -> int:
        """Return how many bytes of a segment are whole records.

        Raises:
            FileNotFoundError: it is not there.
        """
        path = self.path(key)
        size = os.path.getsize(path)  # asked for each time: somebody may have removed it since
        if key not in self._bytes:
            later = self._layout.segment(key[0], key[1], key[2] + 2)
            if not os.path.lexists(later):  # what is older was sealed and synced before the next but one was begun
                size = min(size, whole_bytes(path, run_tag))  # padding alone may be missing at its end
            self._bytes[key] = size
        return self._bytes[key]


def listed_segments(
    dead: DeadSegments,
    run_tag: int,
    own: Sequence[SegmentInfo],
    live: Mapping[SegmentKey, int],
    incarnation: int,
    open_segment: int,
) -> list[SegmentInfo]:
    """Return what the manifest says of the segments: those with something live, and those that had not ended. Blocks.

    Args:
        dead: knows of those of earlier lives.
        run_tag: the run's tag.
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
            try:
                size = dead.bytes_of(key, run_tag)
            except FileNotFoundError:
                path = dead.path(key)
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
