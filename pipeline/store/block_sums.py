"""By what a block of rows is known to be the one that a generation lists.

The last tensor of a block, ``#sums``, has checksums of the data before it. Their own crc32c, after that of the block's
header, stands in the list of blocks (:class:`~pipeline.store.segments.Block`). A frame does not say of which segment it
is, and ranks give their rows the same keys: a file that lies under another one's name is told by this alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pipeline.errors import Damaged, StoreError
from pipeline.store.blocks import Blocks, crc32c_more
from pipeline.store.codec import read_layout
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout, SegmentKey
from pipeline.store.segments import Block

SUMS = "#sums"
OTHER_BLOCK = (
    "a whole block of rows, but not the one that is listed; does the file lie under another one's name? Give each its "
    "own name, or restore it from a copy"
)


def checksum_of(blob: memoryview) -> int:
    """Return the crc32c of a block's header, with the length in front, and of its sums; -1 if it has none.

    Raises:
        Damaged: it is no block.
    """
    return checksum_by(lambda at, count: blob[at : at + count], len(blob))


def checksum_by(take: Callable[[int, int], bytes | memoryview], size: int) -> int:
    """As :func:`checksum_of`, of a payload of ``size`` bytes of which ``take`` reads a part: from where, how many.

    Raises:
        Damaged: it is no block.
    """
    head = take(0, min(size, 8 + int.from_bytes(take(0, 8), "little")))
    laid = read_layout(head, size).get(SUMS)
    if laid is None:
        return -1
    return crc32c_more(crc32c_more(0, head), take(laid.begin, laid.end - laid.begin))


def other_blocks(layout: Layout, blocks: Iterable[Block]) -> Iterator[tuple[Block, Damaged]]:
    """Yield those of some blocks, which are whole, that are not as they are listed; a few of their bytes are read.
    Blocks."""
    by_file: dict[SegmentKey, list[Block]] = {}
    for block in blocks:
        if block.sums >= 0:
            by_file.setdefault(block.segment_key, []).append(block)
    for key in sorted(by_file):
        path = layout.segment(*key)
        try:
            with Blocks(path) as file:
                looked = [(block, _wrong(file, path, block)) for block in by_file[key]]
        except (FileNotFoundError, StoreError) as error:
            looked = [(block, Damaged(f"{path}: {error}", offset=block.offset)) for block in by_file[key]]
        yield from ((block, error) for block, error in looked if error is not None)


def _wrong(file: Blocks, path: str, block: Block) -> Damaged | None:
    def take(at: int, count: int) -> bytes:
        return file.exactly(block.offset + HEADER_BYTES + at, count)

    where = f"{path} at byte {block.offset}"
    try:
        found = checksum_by(take, block.length)
    except Damaged as error:
        return Damaged(f"{where}: {error}", offset=block.offset)
    return None if found == block.sums else Damaged(f"{where}: {OTHER_BLOCK}", offset=block.offset)
