"""Reading payloads out of segments."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipeline.errors import Damaged
from pipeline.records import Location
from pipeline.store.frames import PAYLOAD, Header, read_frame
from pipeline.store.layout import Layout


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True):
    """One payload in the footer of a sealed segment."""

    uid: int
    member: int
    life: int
    offset: int
    length: int


class Footer(msgspec.Struct, frozen=True, array_like=True):
    """What a sealed segment holds, in the order of the file."""

    entries: list[SegmentEntry] = []


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as a manifest lists it."""

    name: str
    bytes: int
    sealed: bool = False


class PayloadReader:
    """Reads payload frames by location, keeping no file open between calls of :meth:`read_many`."""

    def __init__(self, layout: Layout, run_tag: int) -> None:
        self._layout = layout
        self._run_tag = run_tag

    def read_many(self, places: Iterable[tuple[int, int, Location]]) -> dict[tuple[int, int], bytes]:
        """Return the blobs of (uid, member, location) triples by (uid, member). Blocks: call it in a thread.

        Raises:
            Damaged: a segment is missing, or the payload in it is not whole or not the right one.
        """
        by_file: dict[str, list[tuple[int, int, Location]]] = {}
        for uid, member, location in places:
            path = self._layout.segment(location.incarnation, location.rank, location.segment)
            by_file.setdefault(path, []).append((uid, member, location))
        blobs: dict[tuple[int, int], bytes] = {}
        for path, wanted in by_file.items():
            wanted.sort(key=lambda each: each[2].offset)
            try:
                with open(path, "rb") as file:
                    for uid, member, location in wanted:
                        frame = read_frame(file, location.offset, path)
                        if frame is None or not self._is(frame.header, uid, member):
                            raise Damaged(
                                f"{path} at byte {location.offset}: the payload of uid {uid}, member {member} is "
                                "damaged or missing. Restore the file from a copy."
                            )
                        blobs[uid, member] = frame.payload
            except FileNotFoundError:
                raise Damaged(
                    f"{path}: the segment is missing; it holds uid {wanted[0][0]} and more. "
                    "Restore the file from a copy."
                ) from None
        return blobs

    def _is(self, header: Header, uid: int, member: int) -> bool:
        return header[0] == PAYLOAD and (header.run_tag, header.sequence, header.number) == (self._run_tag, uid, member)
