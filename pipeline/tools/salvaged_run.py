"""The new run that a salvage of one process's buffer writes, and the blocks of the damaged one, one at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.compressed import packed_rows
from pipeline.buffer.transitions.layout import RowLayout
from pipeline.checkpoint.generations import GenerationWriter, Stored, check_generation
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import BLOCKS_FILE, REPLAY, TRAINER_FOLDER, FileInfo, Manifest, ShardInfo
from pipeline.errors import Damaged
from pipeline.replay.ahead import ahead
from pipeline.replay.salvage_choice import Chosen, salvage_notes
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, encode_state
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader
from pipeline.tools.output import GrowingFile
from pipeline.tools.writing import BlockWriter, SegmentWriter, committed

Ints = np.ndarray


class Looked(NamedTuple):
    """What there is of a damaged buffer.

    Attributes:
        kept, missing: rows.
        split: episodes that go on as another one after a gap.
        losses: each place that is not whole, of the rows.
    """

    kept: int
    missing: int
    split: int
    losses: list[Loss]


class Content(NamedTuple):
    """What a payload holds: its bytes, and columns and marks in them."""

    blob: bytes
    arrays: Arrays


class DamagedBlocks:
    """The blocks of a run of which some are damaged."""

    def __init__(self, layout: Layout, run_tag: int, schema: Schema) -> None:
        self._layout, self._schema = layout, schema
        self._reader = PayloadReader(layout, run_tag, forgiving=True)

    def each(self, blocks: Sequence[Block]) -> Generator[tuple[Block, Content | Damaged], None, None]:
        """Yield blocks in their order, with what they hold, or with what is wrong with them. Blocks."""
        with contextlib.closing(ahead(self._payloads(blocks))) as found:
            for block, payload in found:
                yield block, payload if isinstance(payload, Damaged) else self._decoded(block, payload)

    def whole(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, Content]]:
        """As :meth:`each`, of blocks that were whole a moment ago.

        Raises:
            Damaged: one is not any more.
        """
        with contextlib.closing(self.each(blocks)) as found:
            for block, content in found:
                if isinstance(content, Damaged):
                    raise content
                yield block, content

    def _payloads(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, bytes | Damaged]]:
        """A reader goes through files in the order of their names, and through each from its front: it is asked for
        what lies so."""
        edges = [at for at in range(1, len(blocks)) if not _follows(blocks[at - 1], blocks[at])]
        for begin, end in pairwise([0, *edges, len(blocks)]):
            part = blocks[begin:end]
            for block, (_, found) in zip(part, self._reader.each(each.place for each in part), strict=True):
                yield block, found

    def _decoded(self, block: Block, payload: bytes) -> Content | Damaged:
        where = f"{self._layout.segment(*block.segment_key)} at byte {block.offset}"
        try:
            return Content(payload, decode_block(payload, self._schema, block.count, where, block.sums))
        except Damaged as error:
            return error


def _follows(one: Block, other: Block) -> bool:
    return one.segment_key == other.segment_key and one.offset < other.offset


class Packing:
    """Which large columns are compressed in some of the blocks: they are to be so in all, as in a buffer."""

    def __init__(self, schema: Schema | None) -> None:
        self.schema = schema
        self._large = [] if schema is None else RowLayout(schema).large
        self.columns: list[Column] = []
        """Those that are."""

    def note(self, arrays: Arrays) -> None:
        """Take in how a block has them."""
        found = {each.name for each in self.columns} | {
            each.name for each in self._large if arrays[each.name].dtype == object
        }
        self.columns = [each for each in self._large if each.name in found]

    def lacking(self, arrays: Arrays) -> list[Column]:
        """Return those that a block has dense."""
        return [each for each in self.columns if arrays[each.name].dtype != object]

    def packed(self, arrays: Arrays) -> Arrays:
        """Return what a block holds, with all of them compressed."""
        return {**arrays, **{each.name: packed_rows(arrays[each.name], each.bits) for each in self.lacking(arrays)}}


class SalvagedRun:
    """A run whose first generation is written. What a failure leaves is the caller's to remove."""

    def __init__(self, chosen: Chosen, directory: str, files: FilesLike, *, origin: str, called: str) -> None:
        """Args:
        chosen: what it is made from.
        directory: where it goes, absent or empty.
        files: the file layer.
        origin: run id and generation of ``chosen``.
        called: what the directory will be called.
        """
        self._chosen, self._files, self._called, self._origin = chosen, files, called, origin
        self.layout = Layout(directory)
        self._run = self.layout.create_folders(files)
        self._generation = GenerationWriter(self.layout, files, 0)
        self._grown: list[GrowingFile] = []
        self.kept: Sequence[tuple[int, int, int]] = ()
        """Keys of rows that came along, from one up to another, and what the first of them is now."""
        self.segments = SegmentWriter(self.layout, files, self._run.tag)
        try:
            self._generation.begin_with((), self._taken_over())
        except BaseException:
            self.close()
            raise

    def _taken_over(self) -> list[tuple[str, FileInfo]]:
        """Return where the files lie that come along as they are."""
        return Stored(self._chosen.stored.folder, self._source()).trainer_files()

    def _source(self) -> Manifest:
        """Return the manifest of what it is made from, without files of the trainer's that do not come along."""
        manifest = self._chosen.stored.manifest
        files = [info for info in manifest.files if info.path not in self._chosen.left_out]
        return msgspec.structs.replace(manifest, files=files)

    @property
    def generation(self) -> GenerationWriter:
        """What its files are added to."""
        return self._generation

    @property
    def files(self) -> FilesLike:
        """The file layer."""
        return self._files

    def copy(self, blocks: Iterator[tuple[Block, Content]], packing: Packing) -> list[Block]:
        """Take blocks over as they lie, but for columns that are compressed in others of them; return where they lie
        now."""
        schema, found = packing.schema, list[Block]()
        for block, content in blocks:
            if schema is None or not packing.lacking(content.arrays):
                found.append(self.segments.payload(content.blob, block.first, block.count, sums=block.sums))
                continue
            writer = BlockWriter(self.segments, schema, block.first)
            writer.add(packing.packed(content.arrays))
            writer.flush()
            found += writer.blocks
        return found

    def keep(self, path: str) -> None:
        """Take over a file of the generation."""
        (info,) = (info for info in self._chosen.stored.manifest.files if info.path == path)
        self._generation.link(path, os.path.join(self._chosen.stored.folder, path), info)

    def keep_values(self, but: Sequence[str] = ()) -> None:
        """Take over everything that the generation has beside its rows, ``but`` for some arrays."""
        for info in self._chosen.stored.manifest.files:
            folder, _, name = info.path.partition("/")
            if folder == VALUES_FOLDER and name not in but:
                self.keep(info.path)

    def values(self, name: str) -> GrowingFile:
        """Return an array that is written piece by piece."""
        file = GrowingFile(self._files, self._generation, f"{VALUES_FOLDER}/{name}")
        self._grown.append(file)
        return file

    def finish(self, state: BufferState, unknown: dict[str, Any], blocks: Sequence[Block]) -> str:
        """Make the run whole, and return its id.

        Args:
            state: of the buffer.
            unknown: fields of it that this version does not know.
            blocks: where its rows lie.

        Raises:
            Damaged: what was copied was whole a moment ago.
        """
        for file in self._grown:
            file.finish()
        self._generation.add(STATE_FILE, encode_state(state, unknown))
        self._generation.add(BLOCKS_FILE, msgspec.msgpack.encode(sorted(blocks, key=lambda block: block.first)))
        made = self._committed(self._manifest(state, sum(block.length for block in blocks)))
        check_generation(Stored(self._generation.final, made))  # it was copied from a disk that may have faults
        self.layout.write_marker(self._files, self._run)
        return made.run_id

    def _committed(self, manifest: Manifest) -> Manifest:
        wrote = self.segments.finish(time.time(), manifest.reason)
        return committed(self._generation, [wrote], manifest, self._run, kind=REPLAY)

    def _manifest(self, state: BufferState, nbytes: int) -> Manifest:
        source = self._source()
        trainer = [info.path for info in source.files if info.path.startswith(TRAINER_FOLDER + "/")]
        names = {os.path.splitext(os.path.basename(path))[0] for path in trainer}
        shard = ShardInfo(rank=0, rows=state.size, saved=state.size, added=state.added, bytes=nbytes)
        return Manifest(
            step=source.step,
            reason="salvage",
            shards=[shard],
            attached=sorted(name for name in source.attached if name in names),
            options={**source.options, "directory": self._called},
            left_out=salvage_notes(self._chosen),
            origin=self._origin,
            external=source.external,
        )

    def close(self) -> None:
        """Give files back, if it was not finished."""
        self.segments.close()
        for file in self._grown:
            file.close()
        self._generation.abandon()  # does nothing once it was committed
