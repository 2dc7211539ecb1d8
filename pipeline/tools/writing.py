"""Writing rows, in the order in which they are to be, as one generation of a new run's buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import encode_rows, rows_of_block
from pipeline.buffer.transitions.bodies import changed, some_rows
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.compressed import CompressedColumn
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, PLACE
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import BLOCKS_FILE, PIPELINE, REPLAY, Manifest
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ForebayError
from pipeline.records import AnyEvent, Closed
from pipeline.replay.next_obs import KEYS_FILE, file_of
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, encode_state
from pipeline.store.block_sums import checksum_of
from pipeline.store.files import FilesLike
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout, RunFile, SegmentKey, segment_key
from pipeline.store.segments import Block, SegmentInfo
from pipeline.store.writer import StoreWriter
from pipeline.tools.kept_rows import KEY_FILE, PART_FILE, Chunk
from pipeline.tools.output import GrowingFile

Ints = np.ndarray
_MOST = 4 << 20  # bytes that are held before they are written
_SMALL = 64 << 10  # bytes of a view that is copied; a larger one is written at once


class Wrote(NamedTuple):
    """What a journal and its segments hold, as synced."""

    position: JournalPosition
    segments: list[SegmentInfo]


class SegmentWriter:
    """Writes payloads into segments of a new run, and events into its journal: sooner or later, and before
    :meth:`finish` returns."""

    def __init__(self, layout: Layout, files: FilesLike, tag: int, *, incarnation: int = 1, rank: int = 0) -> None:
        self._writer = StoreWriter(layout, files, run_tag=tag, incarnation=incarnation, rank=rank)
        self._live: dict[SegmentKey, int] = {}
        self.bytes = 0

    @property
    def store(self) -> StoreWriter:
        """What writes, for payloads that are no blocks."""
        return self._writer

    def payload(
        self, blob: bytes | memoryview, uid: int, count: int, *, member: int = 0, life: int = 0, sums: int = -1
    ) -> Block:
        """Write one, and return where it lies. What a view is of may be used for something else afterwards."""
        if not isinstance(blob, bytes) and len(blob) < _SMALL:
            blob = bytes(blob)
        place = self._writer.place(blob, uid, member, life)
        self._live[place.segment_key] = self._live.get(place.segment_key, 0) + len(blob)
        self.bytes += len(blob)
        self._write(_MOST if isinstance(blob, bytes) else 0)
        return Block(uid, count, place.incarnation, place.rank, place.segment, place.offset, place.length, sums)

    def append(self, event: AnyEvent) -> None:
        """Write an event; payloads that came before it are written before."""
        self._writer.append(event)
        self._write(_MOST)

    def _write(self, least: int) -> None:
        if self._writer.queued_bytes >= least:
            batch = self._writer.take()
            self._writer.write(batch)
            self._writer.done(batch)

    def finish(self, wall: float, tool: str, events: Sequence[AnyEvent] = ()) -> Wrote:
        """Write some events, end the journal, and make everything survive a loss of power."""
        writer = self._writer
        for event in (*events, Closed(wall, "closed", tool)):
            writer.append(event)
        self._write(0)
        position, segments = writer.sync()
        position = msgspec.structs.replace(position, segment=writer.open_segment)
        writer.close()
        infos = [msgspec.structs.replace(each, live=self._live.get(segment_key(each.name), 0)) for each in segments]
        return Wrote(position, infos)

    def close(self) -> None:
        """Give the files back, after an error."""
        with suppress(ForebayError, OSError):
            self._writer.close()


class BlockWriter:
    """Puts rows into blocks. Large columns of which a block gets a row that is compressed are so in all of it: those
    that come as they are held stay as they are, and others are compressed."""

    def __init__(self, writer: SegmentWriter, schema: Schema, first: int) -> None:
        """Args:
        writer: of the segments.
        schema: the rows' columns.
        first: the key of the first row.
        """
        self._writer, self._next = writer, first
        most = rows_of_block(Ring(TransitionStorage(1, schema)))
        self._ring = Ring(TransitionStorage(most, schema))
        self._most, self._filled = most, 0
        self._memory = Recycler()
        self._dense: dict[str, np.ndarray] = {}  # where columns lie that are compressed in the block that is filled
        self.blocks: list[Block] = []

    @property
    def storage(self) -> TransitionStorage:
        """Where rows wait."""
        return self._ring.storage

    def add(self, arrays: Arrays) -> None:
        """Add rows: columns and marks [n, ...] by name."""
        count, at = len(next(iter(arrays.values()))), 0
        while at < count:
            room = min(self._most - self._filled, count - at)
            slots = slice(self._filled, self._filled + room)
            self._hold(arrays)
            self.storage.write(slots, some_rows(arrays, slice(at, at + room)))
            self._fill(room)
            at += room

    def add_records(self, records: np.ndarray, large: Mapping[str, np.ndarray]) -> None:
        """Add rows that are packed as memory has them."""
        at = 0
        while at < len(records):
            room = min(self._most - self._filled, len(records) - at)
            slots = np.arange(self._filled, self._filled + room)
            self.storage.write_records(slots, records[at : at + room])
            self._hold(large)
            self.storage.write(slots, {name: each[at : at + room] for name, each in large.items()})
            self._fill(room)
            at += room

    def _hold(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Have columns compressed of which there are rows that are."""
        for name, rows in arrays.items():
            if rows.dtype == object and name not in self._dense:
                held = self.storage.view(name)
                column: Any = CompressedColumn(held.shape, held.dtype)
                column[: self._filled] = held[: self._filled]
                self._dense[name] = self.storage.lay(name, column)

    def _fill(self, count: int) -> None:
        self._filled += count
        if self._filled == self._most:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._filled:
            blob = encode_rows(self._ring, slice(0, self._filled), self._filled, self._memory)
            self.blocks.append(self._writer.payload(blob, self._next, self._filled, sums=checksum_of(blob)))
            self._next, self._filled = self._next + self._filled, 0
            for name, memory in self._dense.items():
                self.storage.lay(name, memory)
            self._dense = {}


class AsideWriter:
    """Writes the next observations that are kept aside, by the keys of their rows."""

    def __init__(self, files: FilesLike, generation: GenerationWriter, folder: str, columns: Sequence[Column]) -> None:
        """Args:
        files, generation: what writes.
        folder: of the files, with its slash.
        columns: of next observations; none: rows do not share them.
        """
        self._grown: list[GrowingFile] = []
        names = [KEYS_FILE, *(file_of(number, column) for number, column in enumerate(columns))] if columns else []
        try:
            for name in names:
                self._grown.append(GrowingFile(files, generation, folder + name))
        except BaseException:
            self.close()
            raise

    def add(self, keys: Ints, nexts: Sequence[np.ndarray]) -> None:
        """Add those [n, ...], by column, of rows of some keys, which rise."""
        for file, each in zip(self._grown, [keys, *nexts], strict=bool(self._grown)):
            file.write(np.ascontiguousarray(each).tobytes())

    def finish(self) -> None:
        """Write the rest, and list the files."""
        for file in self._grown:
            file.finish()

    def close(self) -> None:
        """Give the files up, if they were not finished."""
        for file in self._grown:
            file.close()


class RowsWriter:
    """Writes the rows of one buffer: they get keys, and their episodes numbers, as they come."""

    def __init__(
        self,
        layout: Layout,
        run: RunFile,
        files: FilesLike,
        schema: Schema | None,
        nexts: Sequence[Column] = (),
        *,
        added: int,
        rows: int,
        episodes: int,
        extras: Sequence[str],
    ) -> None:
        """Args:
        layout, run: the new run.
        files: the file layer.
        schema: the rows' columns; None: there are no rows.
        nexts: columns of next observations, if rows share these.
        added: how many rows are to have been added in all.
        rows: how many there will be.
        episodes: how many there will be.
        extras: files of what the selection has of each row.
        """
        self._layout, self._run, self._files = layout, run, files
        self.oldest = self._next = added - rows
        self._writer = SegmentWriter(layout, files, run.tag)
        self._blocks = None if schema is None else BlockWriter(self._writer, schema, self.oldest)
        self._newest = np.full(episodes, -1, np.int64)  # by episode, of its newest row: key and place
        self._places = np.zeros(episodes, np.int64)
        self.cuts: list[int] = []
        self.most = 0.0
        """The largest of the first extra."""
        self._generation = GenerationWriter(layout, files, 0)
        self._grown: list[GrowingFile] = []
        self._aside: AsideWriter | None = None
        try:
            self._generation.begin()
            self._aside = AsideWriter(files, self._generation, f"{VALUES_FOLDER}/", nexts)
            for name in [*(f"{VALUES_FOLDER}/{name}" for name in extras), PART_FILE, KEY_FILE]:
                self._grown.append(GrowingFile(files, self._generation, name))
        except BaseException:
            self.close()
            raise

    def add(self, chunk: Chunk, episodes: Ints, numbers: Ints) -> None:
        """Add rows, whose episodes are given as places among ``numbers``, by which the marks call them."""
        count = len(episodes)
        if not count or self._blocks is None:
            return
        keys = np.arange(self._next, self._next + count)
        behind = self._link(keys, episodes, chunk)
        self._blocks.add(changed(chunk.arrays, {EPISODE: numbers[episodes], BEHIND: behind}))
        self.cuts += keys[chunk.arrays[END] == CUT].tolist()
        for file, values in zip(self._grown, [*chunk.extras, chunk.part, chunk.key], strict=True):
            file.write(np.ascontiguousarray(values, np.int32 if values is chunk.part else values.dtype).tobytes())
        assert self._aside is not None
        self._aside.add(keys[chunk.aside], chunk.nexts)
        if chunk.extras:
            self.most = max(self.most, float(chunk.extras[0].max()))
        self._next += count

    def _link(self, keys: Ints, episodes: Ints, chunk: Chunk) -> Ints:
        """Return how far behind each row the one before it lies."""
        order = np.argsort(episodes, kind="stable")
        sorted_keys, sorted_episodes = keys[order], episodes[order]
        before = np.empty(len(keys), np.int64)
        before[1:] = sorted_keys[:-1]
        begins = np.flatnonzero(np.diff(sorted_episodes, prepend=-1))
        before[begins] = self._newest[sorted_episodes[begins]]
        known = np.empty(len(keys), np.int64)
        known[order] = before
        ends = np.append(begins[1:], len(keys)) - 1
        self._newest[sorted_episodes[ends]] = sorted_keys[ends]
        place = chunk.arrays[PLACE].astype(np.int64)
        self._places[sorted_episodes[ends]] = place[order[ends]]
        # Where the start of an episode is gone, its first row leads to before all that there is.
        gone = np.where(place > 0, np.maximum(chunk.arrays[BEHIND], keys - self.oldest + 1), 0)
        return np.minimum(np.where(known >= 0, keys - known, gone), MOST_ROWS)

    @property
    def written(self) -> int:
        """Bytes of payloads that were written."""
        return self._writer.bytes

    def tail(self, episode: int) -> tuple[int, int]:
        """Return the key and the place of the newest row of an episode."""
        return int(self._newest[episode]), int(self._places[episode])

    def file(self, path: str, content: bytes | memoryview) -> None:
        """Add a file to the generation."""
        self._generation.add(path, content)

    def finish(
        self,
        state: BufferState,
        unknown: dict[str, Any],
        manifest: Manifest,
        wall: float,
        *,
        kind: str = REPLAY,
        events: Sequence[AnyEvent] = (),
    ) -> Manifest:
        """Make the generation exist, of a run of some kind, whose journal begins with some events."""
        if self._blocks is not None:
            self._blocks.flush()
        wrote = self._writer.finish(wall, manifest.reason, events)
        assert self._aside is not None
        self._aside.finish()
        for file in self._grown:
            file.finish()
        blocks = [] if self._blocks is None else self._blocks.blocks
        self._generation.add(STATE_FILE, encode_state(state, unknown))
        self._generation.add(BLOCKS_FILE, msgspec.msgpack.encode(blocks))
        return committed(self._generation, [wrote], manifest, self._run, kind=kind)

    def close(self) -> None:
        """Give everything back, after an error; the folder is the caller's to remove."""
        self._writer.close()
        for file in self._grown:
            file.close()
        if self._aside is not None:
            self._aside.close()
        self._generation.abandon()


def committed(
    generation: GenerationWriter, wrote: Sequence[Wrote], manifest: Manifest, run: RunFile, *, kind: str
) -> Manifest:
    """Make a new run's first generation exist, and return its manifest."""
    whole = msgspec.structs.replace(
        manifest,
        kind=kind,
        run_id=run.run_id,
        incarnation=max((each.position.incarnation for each in wrote), default=1),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        journals=[each.position for each in wrote],
        segments=[info for each in wrote for info in each.segments],
        files=sorted(generation.infos, key=lambda info: info.path),
        reusable=[0] if kind == PIPELINE else [],
    )
    generation.commit(whole)
    return whole
