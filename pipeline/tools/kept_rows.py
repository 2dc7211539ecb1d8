"""The rows of one buffer of transitions on the disk, in the order of their keys and block by block.

Each row has an id: the part that it belongs to, and the key that it had there. The part is the run itself, or a shard
of it; of a run that a tool made, part and key of each row lie beside the rows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import KEPT_MARKS, decode_block
from pipeline.buffer.transitions.bodies import some_rows
from pipeline.buffer.transitions.checked import CheckedBlock
from pipeline.buffer.transitions.columns import LARGE, Arrays, Column, Schema
from pipeline.buffer.transitions.compressed import as_held, dense
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, MARKS, OPEN, PLACE, VERSION
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.manifest import BLOCKS_FILE, SHARDS, MadeOf
from pipeline.checkpoint.parts import shard_of
from pipeline.config import Fields
from pipeline.errors import Damaged
from pipeline.replay.feeding import schema_of
from pipeline.replay.loading import blocks_of
from pipeline.replay.next_obs import KEYS_FILE, Aside, Batch, OwnNextObs, file_of
from pipeline.replay.selecting import extras_of
from pipeline.replay.state import LISTED, VALUES_FOLDER, Ends, read_buffer_state
from pipeline.replay.values import Values, ValuesFile, WrittenBack
from pipeline.store.held import HeldSegments
from pipeline.store.segments import Block, needed_blocks
from pipeline.tools.environments import ENVIRONMENTS_FILE, Home, homes_listed
from pipeline.tools.later_rows import LaterRows, Reads
from pipeline.tools.sources import Source, check_columns

Ints = np.ndarray
PART_FILE, KEY_FILE, EPISODES_FILE = "origin/part.int32", "origin/key.int64", "origin/episodes.int64"
"""By row: which of the manifest's ``made_of`` it is of, and its key there; by episode: its number, part and number
there."""


class Chunk(NamedTuple):
    """Some rows, [n, ...] each, in the order of their keys.

    Attributes:
        arrays: columns and marks by name.
        part, key: what names each row.
        extras: what the selection has of each.
        aside: [m] which of the rows, rising, have a next observation that is kept aside.
        nexts: these, [m, ...] by column.
    """

    arrays: Arrays
    part: Ints
    key: Ints
    extras: list[np.ndarray]
    aside: Ints
    nexts: list[np.ndarray]

    def at(self, places: Ints | slice) -> Chunk:
        """Return those at some places, which rise."""
        now = np.full(len(self.key), -1)
        part = self.part[places]
        now[places] = np.arange(len(part))
        own = np.flatnonzero(now[self.aside] >= 0)
        return Chunk(
            some_rows(self.arrays, places),
            part,
            self.key[places],
            [each[places] for each in self.extras],
            now[self.aside[own]],
            [each[own] for each in self.nexts],
        )


class EpisodesThere(NamedTuple):
    """The episodes of which rows are there, by column [n], by rising number.

    Attributes:
        number: that which the rows' marks have.
        part, origin: what names each: its part, and its number there.
        rows: how many are there.
        place: of the first of them.
        first, last: where that lies among the rows, oldest first, and where the last of them does.
        version: of the weights that made it.
        met: whether a condition is met by one of its rows.
    """

    number: Ints
    part: Ints
    origin: Ints
    rows: Ints
    place: Ints
    first: Ints
    last: Ints
    version: Ints
    met: Ints


class RowsOnDisk:
    """See the module. What is read is checked; blocks that were opened stay readable whoever removes their files."""

    def __init__(self, source: Source, stored: Stored, own: MadeOf, later: LaterRows | None = None) -> None:
        """Args:
        source: the run.
        stored: the generation, or a shard as if it were one.
        own: what names the rows, if nothing was made of the run before.
        later: rows that came after the generation, where rollouts fill the buffer; all of them lie somewhere.

        Raises:
            Damaged: something is missing or was changed.
        """
        check_generation(stored)
        self.source, self.stored = source, stored
        self.state, self.unknown = read_buffer_state(stored.folder)
        self.where = where_of(source, own)
        blocks = blocks_of(os.path.join(stored.folder, BLOCKS_FILE), self.state)
        self._saved, self._later = self.state, later
        if later is not None:
            blocks, self.state = [*blocks, *later.blocks], later.state_of(self.state)
        self.oldest = self.state.added - self.state.size
        self.blocks = needed_blocks(blocks, self.oldest) if self.state.size else []
        self._held = HeldSegments(source.layout, source.tag, self.blocks, stored.manifest.segments)
        if self.state.columns is None and self.blocks:  # all rows came later
            schema = schema_of(bytes(self._held.payload(self.blocks[0])), self._held.where(self.blocks[0]))
            self.state = msgspec.structs.replace(self.state, columns=list(schema.columns))
        self._cut = np.empty(0, np.int64)
        self.schema = self.state.schema
        self.nexts = self.state.next_obs_columns or []
        """Columns of next observations, if rows share these."""
        self.owning = False
        """Whether rows that share next observations are to have their own."""
        self.options = stored.manifest.options
        """What their buffer was built with."""
        self.fields = Fields.of(self.options.get("fields"))
        self._kept = self._listed() if self.state.dropped else {}
        self._there = {info.path for info in stored.manifest.files}
        gone_on = later is not None and bool(later.blocks)
        self.made = PART_FILE in self._there and not gone_on
        own = msgspec.structs.replace(own, numbered=self.state.numbered)
        self.parts = list(stored.manifest.made_of) if self.made else [own]
        """What names the rows; :attr:`ranks` says where each stands among the parts of all that is read."""
        self.ranks: Ints = np.zeros(len(self.parts), np.int64)
        self._part_file = self._file(PART_FILE) if self.made else None
        self._key_file = self._file(KEY_FILE) if self.made else None

    @property
    def size(self) -> int:
        """How many rows there are: those that a save has dropped are not."""
        return self.state.held

    @property
    def bytes(self) -> int:
        """Of payloads that are read."""
        return sum(block.length for block in self.blocks)

    @property
    def columns(self) -> list[Column]:
        """Those of a row that has its own next observation."""
        return sorted([*(self.state.columns or ()), *self.nexts], key=lambda column: column.name)

    def _file(self, path: str) -> ValuesFile:
        return ValuesFile(os.path.join(self.stored.folder, path))

    @property
    def extras(self) -> set[str]:
        """Names of the files of what the selection has of each row."""
        return {name for name in extras_of(self.stored) if self._extra(name) is not None}

    def _extra(self, name: str) -> Reads | None:
        file = self._file(f"{VALUES_FOLDER}/{name}")
        return file if self._later is None else self._later.extended(file, name, self._saved)

    def _listed(self) -> dict[str, np.ndarray]:
        """Return the list of the episodes that a save has not dropped, under its name, if it is there."""
        path = f"{VALUES_FOLDER}/{LISTED}"
        size = next((info.bytes for info in self.stored.manifest.files if info.path == path), None)
        return {} if size is None else {LISTED: self._file(path).read(0, size // 8)}

    def chunks(self, extras: Sequence[str] = (), wanted: Ints | None = None) -> Iterator[Chunk]:
        """Yield all rows, block by block; what is yielded is valid until the next is asked for. Blocks.

        Args:
            extras: names of the files of what the selection has of each row.
            wanted: [n, 2] where rows begin and end, among all and rising, that are wanted; of other rows come those
                that lie in one block with such. None: all are.
        """
        if self.schema is None:
            return
        alone = self.nexts and self.owning  # what the next observation of a row is, others say
        found = self._chunks(self.schema, extras, None if alone else wanted)
        for chunk in self._with_own(found) if alone else (chunk for chunk, _ in found):
            yield chunk if not self.state.dropped else chunk.at(self._coming_back(chunk.arrays[EPISODE]))

    def _chunks(self, schema: Schema, extras: Sequence[str], wanted: Ints | None) -> Iterator[tuple[Chunk, Ints]]:
        """Yield all rows, also those that a save has dropped, and what keys they have here."""
        files = [each for name in extras if (each := self._extra(name)) is not None]
        written, ends = WrittenBack(self.state, Values(self.stored)), Ends(self.state)
        aside = self._aside(self.nexts)
        for block, keep, at in self._ranges():
            if wanted is not None and not _meets(wanted, at, at + keep.stop - keep.start):
                continue
            arrays = decode_block(self._held.payload(block), schema, block.count, self._held.where(block), block.sums)
            arrays = some_rows(arrays, keep)
            arrays |= {each.name: as_held(arrays[each.name], each) for each in schema.columns}
            keys = np.arange(block.first, block.first + block.count)[keep]
            written.into(arrays, keys)
            arrays[END] = ends.of(keys, arrays[END])
            if self._later is not None:
                self._later.cap(arrays, block.first)
                low, high = np.searchsorted(self._cut, (keys[0], keys[-1] + 1))
                arrays[END][self._cut[low:high] - keys[0]] = CUT
            own, nexts = aside.among(int(keys[0]), int(keys[-1]) + 1)
            part, key = self._ids(at, keys)
            yield Chunk(arrays, part, key, [file.read(at, len(keys)) for file in files], own - keys[0], nexts), keys

    def ids(self) -> Iterator[Chunk]:
        """Yield what names all rows, block by block, and nothing else of them."""
        none = np.empty(0, np.int64)
        marks = self._marks(()) if self.state.dropped else itertools.repeat(None)
        for (_, keep, at), marked in zip(self._ranges() if self.schema is not None else (), marks, strict=False):
            keys = self.oldest + at + np.arange(keep.stop - keep.start)
            chunk = Chunk({}, *self._ids(at, keys), [], none, [])
            yield chunk if marked is None else chunk.at(self._coming_back(marked[0][EPISODE]))

    def _aside(self, columns: Sequence[Column]) -> Aside:
        """Return the next observations that are kept aside, of some of their columns."""
        if not columns or not self.state.size:  # rows that a save has dropped are read, too
            return Aside(np.empty(0, np.int64), (), ())
        names = [f"{VALUES_FOLDER}/{file_of(self.nexts.index(column), column)}" for column in columns]
        keys = f"{VALUES_FOLDER}/{KEYS_FILE}"
        count = next((info.bytes // 8 for info in self.stored.manifest.files if info.path == keys), 0)
        return Aside(self._file(keys).read(0, count), columns, [self._file(name).read for name in names])

    def _with_own(self, found: Iterator[tuple[Chunk, Ints]]) -> Iterator[Chunk]:
        """Give rows their own next observations."""

        twins = twins_of(self.nexts, self.fields).values()

        def batches() -> Iterator[Batch[Chunk]]:
            for chunk, keys in found:
                arrays = {name: each.copy() for name, each in chunk.arrays.items()}  # it may be held for a while
                observed = {name: dense(arrays[name], self._column(name)) for name in twins}
                yield Batch(chunk._replace(arrays=arrays), keys, arrays[BEHIND], observed)

        none = np.empty(0, np.int64)
        for chunk, nexts in OwnNextObs(self.nexts, self.fields, self._aside(self.nexts), self.where).filled(batches()):
            yield chunk._replace(arrays={**chunk.arrays, **nexts}, aside=none, nexts=[])

    def _column(self, name: str) -> Column:
        assert self.schema is not None
        return self.schema.column(name)

    def _coming_back(self, episodes: Ints) -> Ints:
        """Return which rows, by the episode of each, a save has not dropped."""
        return np.flatnonzero(self.state.coming_back(self._kept, episodes))

    def _ids(self, at: int, keys: Ints) -> tuple[Ints, Ints]:
        if self._part_file is None or self._key_file is None:
            return np.full(len(keys), self.ranks[0]), keys
        return self.ranks[self._part_file.read(at, len(keys))], self._key_file.read(at, len(keys))

    def _ranges(self) -> Iterator[tuple[Block, slice, int]]:
        """Yield each block, which of its rows count, and where the first of them lies among all."""
        expected = self.oldest
        for block in self.blocks:
            end = min(block.first + block.count, self.state.added)
            if end > expected:
                yield block, slice(expected - block.first, end - block.first), expected - self.oldest
                expected = end

    # -- episodes ----------------------------------------------------------------------------------------------

    def episodes(self, names: Sequence[str] = (), met: object = None) -> EpisodesThere:
        """Return which episodes have rows there. Their marks are read, and no columns but those of ``names``, which
        ``met`` is called with: arrays by name, and how many rows; it returns [n] bool."""
        found: list[tuple[Ints, ...]] = []
        for arrays, at in self._marks(names):
            there = self._coming_back(arrays[EPISODE])
            arrays = {name: each[there] for name, each in arrays.items()}
            number = arrays[EPISODE]
            episode, first, of = np.unique(number, return_index=True, return_inverse=True)
            hits = np.zeros(len(episode), bool)
            if callable(met):
                hits[of[np.asarray(met(arrays, len(number)), bool)]] = True
            rows, last = np.bincount(of, minlength=len(episode)), np.zeros(len(episode), np.int64)
            last[of] = at + there  # of one episode the last one counts
            ends = arrays[END][np.searchsorted(there, last - at)]
            first_at = at + there[first]
            found.append((episode, rows, arrays[PLACE][first], first_at, arrays[VERSION][first], last, hits, ends))
        columns = [np.concatenate(each) for each in zip(*found, strict=True)] if found else [np.empty(0, np.int64)] * 8
        number, begin, of = np.unique(columns[0], return_index=True, return_inverse=True)
        (rows, last), hits = np.zeros((2, len(number)), np.int64), np.zeros(len(number), bool)
        np.add.at(rows, of, columns[1])
        np.maximum.at(last, of, columns[5].astype(np.int64))
        np.logical_or.at(hits, of, columns[6].astype(bool))
        if self._later is not None:  # whoever played is gone: what has no end was left where it is
            newest = columns[5] == last[of]
            self._cut = np.sort(self.oldest + columns[5][newest & ((columns[7] == OPEN) | (columns[7] == CUT))])
        part, origin = self._origins(number)
        place, first, version = (each[begin].astype(np.int64) for each in columns[2:5])
        return EpisodesThere(number, part, origin, rows, place, first, last, version, hits)

    def _origins(self, number: Ints) -> tuple[Ints, Ints]:
        if not self.made:
            return np.full(len(number), self.ranks[0]), number
        count = next(info.bytes for info in self.stored.manifest.files if info.path == EPISODES_FILE) // 8
        part, origin = origins_listed(self._file(EPISODES_FILE).read(0, count), number, self.where)
        return self.ranks[part], origin

    def homes(self, env: int) -> list[Home]:
        """Return the ids of an environment."""
        size = next((info.bytes for info in self.stored.manifest.files if info.path == ENVIRONMENTS_FILE), 0)
        table = self._file(ENVIRONMENTS_FILE).read(0, size // 8) if size else np.empty(0, np.int64)
        return homes_listed(table, self.ranks, env)

    def _marks(self, names: Sequence[str]) -> Iterator[tuple[Arrays, int]]:
        """Yield marks and columns of all rows, block by block, and where the first of them lies among all."""
        shared = [each for each in self.nexts if each.name in names]
        twins = twins_of(shared, self.fields)
        found = self._stored_marks([*(name for name in names if name not in twins), *twins.values()])
        if not shared:
            yield from found
            return

        def batches() -> Iterator[Batch[tuple[Arrays, int]]]:
            for each, at in found:
                arrays = {name: array.copy() for name, array in each.items()}  # it may be held for a while
                keys = self.oldest + at + np.arange(len(arrays[EPISODE]))
                yield Batch((arrays, at), keys, arrays[BEHIND], arrays)

        for (arrays, at), nexts in OwnNextObs(shared, self.fields, self._aside(shared), self.where).filled(batches()):
            yield {**arrays, **nexts}, at

    def _stored_marks(self, names: Sequence[str]) -> Iterator[tuple[Arrays, int]]:
        if self.schema is None:
            return
        written = WrittenBack(self.state, Values(self.stored), names)
        for block, keep, at in self._ranges():
            arrays = columns_of_block(self._held, block, self.schema, [*KEPT_MARKS, *names], keep)
            if self._later is not None:
                self._later.cap(arrays, block.first)
            written.into(arrays, np.arange(block.first + keep.start, block.first + keep.stop))
            yield arrays, at


def _meets(wanted: Ints, begin: int, end: int) -> bool:
    """Return whether something from ``begin`` up to ``end`` is wanted."""
    at = int(np.searchsorted(wanted[:, 0], end)) - 1
    return at >= 0 and int(wanted[at, 1]) > begin


def columns_of_block(held: HeldSegments, block: Block, schema: Schema, names: Sequence[str], keep: slice) -> Arrays:
    """Return some columns and marks of those rows of a block that are wanted.

    Raises:
        Damaged: it is not whole.
    """
    own = [each for each in schema.columns if each.name in names]
    marks = [Column(name, MARKS[name].name) for name in names if name in (MARKS.names or ())]
    wanted = [each.name for each in (*marks, *own)]
    if block.sums < 0 or any(each.nbytes >= LARGE for each in own):  # which may be compressed
        arrays = decode_block(held.payload(block), schema, block.count, held.where(block), block.sums)
        found = {name: arrays[name][keep] for name in wanted}
        packed = [each for each in own if found[each.name].dtype == object]
        return {**found, **{each.name: dense(found[each.name], each) for each in packed}}
    reader = held.reader(block)
    columns = [*marks, *own]
    checked = CheckedBlock(reader, block.length, block.sums, columns, block.count, lambda at: held.damaged(block, at))
    return dict(checked.read(keep, checked.ranges(keep, wanted)))


def origins_listed(table: np.ndarray, number: Ints, where: str) -> tuple[Ints, Ints]:
    """Return the parts that episodes are of, and their numbers there, as a flat ``EPISODES_FILE`` says.

    Raises:
        Damaged: it does not say it of one.
    """
    known = table.reshape(-1, 3)
    known = known[np.argsort(known[:, 0])]
    at = np.minimum(np.searchsorted(known[:, 0], number), len(known) - 1)
    if len(number) and not (len(known) and np.array_equal(known[at, 0], number)):
        raise Damaged(f"{where}: holds rows of episodes of which it is not said where they came from")
    return known[at, 1], known[at, 2]


def stored_parts(source: Source) -> list[tuple[Stored, MadeOf]]:
    """Return the generation of a source, or each of its shards as if it were one, and what names it.

    Raises:
        Damaged: one is missing.
    """
    manifest = source.stored.manifest
    if manifest.kind != SHARDS:
        return [(source.stored, source.part())]
    if [each.rank for each in manifest.shards] != list(range(manifest.world_size)):
        raise Damaged(f"{source.stored.folder}: {manifest.world_size} ranks wrote it, and shards are listed of others")
    found = []
    for rank in range(manifest.world_size):
        shard = shard_of(source.stored, rank)
        if not shard.manifest.files:
            raise Damaged(f"{source.stored.folder}: the shard of rank {rank} is missing. Restore it from a copy")
        found.append((shard, source.part(rank)))
    return found


def where_of(source: Source, own: MadeOf) -> str:
    """Return what a source, or a shard of it, is called, for people."""
    return source.directory if own.shard < 0 else f"{source.directory}, shard {own.shard}"


def rows_of(source: Source) -> list[RowsOnDisk]:
    """Return the rows of a source: one, or one for each shard.

    Raises:
        Damaged: something is missing or was changed.
    """
    return [RowsOnDisk(source, stored, own) for stored, own in stored_parts(source)]


def telling(every: Sequence[RowsOnDisk]) -> list[RowsOnDisk]:
    """Return those that say how rows lie: which have rows, or, if none has, which have columns."""
    having = [each for each in every if each.schema is not None]
    return [each for each in having if each.size] or having


def common_nexts(every: Sequence[RowsOnDisk]) -> list[Column]:
    """Return the columns of next observations that rows share; none, if not all that have rows share them, and in one
    way."""
    having = telling(every)
    ways = [sorted(twins_of(each.nexts, each.fields).items()) for each in having]
    return having[0].nexts if having and all(way == ways[0] for way in ways) else []


def common_schema(every: Sequence[RowsOnDisk]) -> Schema | None:
    """Return the columns that all have which have any; without those of :func:`common_nexts`.

    Raises:
        ConfigError: they differ; the column is named.
    """
    check_columns("column", [(each.where, each.columns) for each in every if each.schema is not None])
    having = telling(every)
    if not having:
        return None
    return having[0].schema if common_nexts(every) else Schema(tuple(having[0].columns))
