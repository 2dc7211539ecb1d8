"""Reading payloads out of segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pipeline.errors import Damaged, StoreError
from pipeline.locations import Location
from pipeline.store.blocks import Blocks
from pipeline.store.files import open_plain
from pipeline.store.frames import (
    ALIGN,
    FOOTER,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD,
    Header,
    crc32c,
    decode_header,
    frame_bytes,
)
from pipeline.store.layout import Layout, SegmentKey

_FOOTER_LOOK = 1 << 16


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One payload in the footer of a sealed segment."""

    uid: int
    member: int
    life: int
    offset: int
    length: int


class Footer(msgspec.Struct, frozen=True, array_like=True):
    """What a sealed segment holds, in the order of the file."""

    entries: list[SegmentEntry] = []


class FooterBuilder:
    """The footer of a segment that is being written. Held as the bytes that it will be: a tenth of the objects, and a
    segment of small payloads has a hundred thousand of them."""

    def __init__(self) -> None:
        self.count = 0
        self._raw = bytearray()

    def add(self, entry: SegmentEntry) -> None:
        """Add the next payload of the file."""
        _encoder.encode_into(entry, self._raw, -1)
        self.count += 1

    def encode(self) -> bytes:
        """Return a :class:`Footer` of everything added, as MessagePack."""
        if self.count < 16:
            head = bytes([0x90 | self.count])
        elif self.count < 1 << 16:
            head = b"\xdc" + self.count.to_bytes(2)
        else:
            head = b"\xdd" + self.count.to_bytes(4)
        return b"\x91" + head + self._raw


_encoder = msgspec.msgpack.Encoder()


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as a manifest lists it."""

    name: str
    bytes: int
    sealed: bool = False
    live: int = -1
    """Bytes of payloads in it that are still needed; -1: not said."""


Place = tuple[int, int, Location]
"""(uid, member, where its frame begins)."""


_MOST = 2**62  # no number of a row, and no file, is larger


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the rows of a replay buffer lie, of ``count`` keys from ``first`` on."""

    first: int
    count: int
    incarnation: int
    rank: int
    segment: int
    offset: int
    length: int
    sums: int = -1
    """crc32c of the payload's header and of the sums in it, with which parts of it are checked; -1: it has none."""

    @classmethod
    def at(cls, first: int, count: int, at: Location) -> Block:
        """Return the block of rows that lie ``at``."""
        return cls(first, count, at.incarnation, at.rank, at.segment, at.offset, at.length)

    @property
    def place(self) -> Place:
        """As others name it."""
        at = Location(self.incarnation, self.rank, self.segment, self.offset, self.length)
        return self.first, 0, at

    @property
    def segment_key(self) -> SegmentKey:
        """What names the segment."""
        return self.incarnation, self.rank, self.segment


def read_blocks(path: str) -> list[Block]:
    """Return the blocks that a generation of a replay buffer lists.

    Raises:
        Damaged: it is no such list.
    """
    with open_plain(path) as file:
        try:
            blocks = msgspec.msgpack.decode(file.read(), type=list[Block])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Damaged(f"{path}: the list of blocks is damaged ({error})") from None
    for block in blocks:
        # Of a row there is more than a byte; and that a file is so long is found out where it is opened.
        few = 1 <= block.count <= block.length and max(block.first + block.count, block.offset + block.length) <= _MOST
        if not few or min(block.first, *block.segment_key, block.offset) < 0:
            raise Damaged(f"{path}: a block is said to be {block}")
    return blocks


def needed_blocks(blocks: Iterable[Block], oldest: int) -> list[Block]:
    """Return those of some blocks that have rows from ``oldest`` on, in their order; of two that begin with one row the
    later one."""
    found = {block.first: block for block in blocks if block.first + block.count > oldest}
    return [found[first] for first in sorted(found)]


class PayloadReader:
    """Reads payload frames by location, keeping no file open between calls. Blocks: call it in a thread."""

    def __init__(self, layout: Layout, run_tag: int, *, forgiving: bool = False) -> None:
        """Args:
        layout: the run's paths.
        run_tag: the run's tag.
        forgiving: whether what cannot be read is damaged, as for who looks for damage. By default it is a StoreError:
            what the disk, the network or a limit of open files refuses now may be read again later.
        """
        self._layout = layout
        self._run_tag = run_tag
        self._damaged: tuple[type[StoreError], ...] = (Damaged, StoreError) if forgiving else (Damaged,)

    def read_many(self, places: Iterable[Place]) -> dict[tuple[int, int], bytes]:
        """Return the blobs of some places by (uid, member).

        Raises:
            Damaged: a segment is missing, or the payload in it is not whole or not the right one.
        """
        blobs = {}
        for (uid, member, _), found in self._look(places, keep=True):
            if isinstance(found, Damaged):
                raise found
            blobs[uid, member] = found
        return blobs

    def verify(self, places: Iterable[Place]) -> None:
        """Read every place and compare its checksums; nothing is kept.

        Raises:
            Damaged: as :meth:`read_many`.
        """
        for _, found in self._look(places, keep=False):
            if isinstance(found, Damaged):
                raise found

    def damaged(self, places: Iterable[Place]) -> list[tuple[Place, Damaged]]:
        """Read every place, and return those that are not whole, each with what is wrong; nothing is kept."""
        return [(place, found) for place, found in self._look(places, keep=False) if isinstance(found, Damaged)]

    def misplaced(self, places: Iterable[Place]) -> list[tuple[Place, Damaged]]:
        """As :meth:`damaged`, but look at headers and sizes alone: no payload is read."""
        looked = self._look(places, keep=False, payloads=False)
        return [(place, found) for place, found in looked if isinstance(found, Damaged)]

    def each(self, places: Iterable[Place]) -> Iterator[tuple[Place, bytes | Damaged]]:
        """Yield each place with its blob, or with what is wrong there; file by file, and one blob at a time."""
        return self._look(places, keep=True)

    def _look(
        self, places: Iterable[Place], *, keep: bool, payloads: bool = True
    ) -> Iterator[tuple[Place, bytes | Damaged]]:
        """Yield each place with what lies there, file by file; without ``keep`` with nothing, if that is whole, and
        without ``payloads`` if its header is."""
        by_file: dict[tuple[int, int, int], list[Place]] = {}
        gone: tuple[type[Exception], ...] = (FileNotFoundError, *self._damaged)
        for place in places:
            where = place[2]
            by_file.setdefault(where.segment_key, []).append(place)
        for number in sorted(by_file):
            path = self._layout.segment(*number)
            wanted = sorted(by_file[number], key=_offset)
            try:
                blocks = Blocks(path)
            except gone as error:
                how = "the segment is missing" if isinstance(error, FileNotFoundError) else str(error)
                absent = Damaged(f"{path}: {how}; it holds uid {wanted[0][0]} and more. Restore the file from a copy.")
                yield from ((place, absent) for place in wanted)
                continue
            with blocks:
                for place in wanted:
                    yield place, self._frame(blocks, path, place, keep, payloads)

    def _frame(self, blocks: Blocks, path: str, place: Place, keep: bool, payloads: bool) -> bytes | Damaged:
        try:
            return self._whole_frame(blocks, path, place, keep, payloads)
        except self._damaged as error:
            return Damaged(f"{error}; it holds uid {place[0]}, member {place[1]}. Restore the file from a copy.")

    def _whole_frame(self, blocks: Blocks, path: str, place: Place, keep: bool, payloads: bool) -> bytes | Damaged:
        uid, member, location = place
        begin = location.offset + HEADER_BYTES
        # What is kept lies here and there: no more is read than is wanted.
        around = payloads and not keep
        raw = blocks.take(location.offset, HEADER_BYTES) if around else blocks.exactly(location.offset, HEADER_BYTES)
        header = decode_header(raw, path)
        if header is not None and self._is(header, uid, member) and blocks.holds(begin + header.length):
            if not payloads:
                return b""
            payload = blocks.exactly(begin, header.length) if keep else b""
            checksum = crc32c(payload) if keep else blocks.checksum(begin, header.length)
            if checksum == header.checksum:
                return payload
        return Damaged(
            f"{path} at byte {location.offset}: the payload of uid {uid}, member {member} is damaged or missing. "
            "Restore the file from a copy.",
            offset=location.offset,
        )

    def _is(self, header: Header, uid: int, member: int) -> bool:
        return header[0] == PAYLOAD and (header.run_tag, header.sequence, header.number) == (self._run_tag, uid, member)


def find_footer(path: str, run_tag: int) -> tuple[int, Footer] | None:
    """Return where the footer of a sealed segment begins, and what it says; None if no whole one ends the file. Only
    the end of the file is read. Blocks.

    Raises:
        Damaged, StoreError: the file cannot be read.
        FileNotFoundError: it is not there.
    """
    with Blocks(path) as blocks:
        size = blocks.size()
        for back in (_FOOTER_LOOK, 64 * _FOOTER_LOOK, size):
            start = max(0, size - back) // ALIGN * ALIGN
            tail = blocks.exactly(start, size - start)
            place = tail.rfind(MAGIC)
            while place >= 0:
                header = decode_header(tail[place : place + HEADER_BYTES], path) if place % ALIGN == 0 else None
                if header is not None and header.kind == FOOTER:
                    return _footer(tail, start, place, header, run_tag)
                place = tail.rfind(MAGIC, 0, place)
            if not start:
                break
    return None


def _footer(tail: bytes, start: int, place: int, header: Header, run_tag: int) -> tuple[int, Footer] | None:
    payload = tail[place + HEADER_BYTES : place + HEADER_BYTES + header.length]
    ends = place + frame_bytes(header.length) >= len(tail)
    if not ends or header.run_tag != run_tag or crc32c(payload) != header.checksum:
        return None
    try:
        return start + place, msgspec.msgpack.decode(payload, type=Footer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _offset(place: Place) -> int:
    return place[2].offset
