"""Writing a buffer of transitions anew for a number of ranks: what is the same whether rows follow each other in
episodes or lie in any order."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.generations import GenerationWriter, Stored
from pipeline.checkpoint.manifest import SHARDS, FileInfo, Manifest, ShardInfo, shard_prefix
from pipeline.replay.handing import SomeRows, Wanted, extras_named
from pipeline.replay.moving import Gone
from pipeline.replay.resharding import Rank, state_of_rank
from pipeline.replay.selecting import Selected, extras_of, selection_of
from pipeline.replay.shards import common_schema
from pipeline.replay.state import BufferState
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, RunFile
from pipeline.tools.linking import life_after
from pipeline.tools.made import Made
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.packing import PackedWriter
from pipeline.tools.resharded import TOOL, manifest_of, own_left
from pipeline.tools.scattered import Heap, ScatteredRows
from pipeline.tools.sources import Source
from pipeline.tools.writing import SegmentWriter, Wrote, committed


class ShardLike(Protocol):
    """A rank's part of what is read."""

    @property
    def rank(self) -> int: ...
    @property
    def stored(self) -> Stored: ...
    @property
    def state(self) -> BufferState: ...
    @property
    def unknown(self) -> dict[str, Any]: ...


class Settled(NamedTuple):
    """What a rank has of what comes to it.

    Attributes:
        rows: how many.
        episodes: how many the manifest says.
        state: of the buffer: what follows from how rows lie.
        values: what there is of rows, or episodes, beside the selection's, piece by piece, by the names of files.
    """

    rows: int
    episodes: int
    state: dict[str, Any]
    values: Mapping[str, Iterable[np.ndarray]]


class Job(ABC):
    """Rows that come to ranks, others or the same."""

    reason = TOOL
    partial = False
    """Whether to go on without what is damaged."""
    units = "episodes"
    """What goes as a whole."""
    scattered = False
    """Whether rows lie in any order, and their keys begin with 0."""

    def __init__(self, source: Source, shards: Sequence[ShardLike]) -> None:
        self.source = source
        self._read = list(shards)
        self.gone: list[Gone] = []
        """Blocks that could not be read."""
        self.split = 0
        """Episodes that go on as another one after a gap."""
        self.unfollowed = 0
        """Rows that were left out as their next observations lie in rows that are gone."""

    # -- what kinds of buffers differ in ------------------------------------------------------------------------

    @property
    @abstractmethod
    def rows(self) -> list[int]:
        """How many rows come to each rank."""

    @property
    @abstractmethod
    def firsts(self) -> list[int]:
        """The key of the first of them: what was counted of rows is divided among the ranks."""

    @property
    @abstractmethod
    def evicted(self) -> tuple[int, int]:
        """How many units have no room, and how many rows these are."""

    @property
    @abstractmethod
    def there(self) -> int:
        """How many units there are, before some go."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Of payloads that are read."""

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """What the buffer of each rank has to be built with; None: that is up to whoever builds it."""

    @abstractmethod
    def handed(self, files: FilesLike, folder: str, told: Told | None) -> Iterator[tuple[int, SomeRows]]:
        """Yield ranks, and the rows of blocks that come to each; afterwards :attr:`gone` says what could not be read.

        Args:
            files: the file layer.
            folder: where what is on its way lies meanwhile, without a name.
            told: as of tools.

        Raises:
            Damaged: a block is not whole, where not all may go on.
        """

    @abstractmethod
    def settled(self, rank: int, life: int, aside: ScatteredRows | None) -> Settled:
        """Return what a rank has, now that all has come that comes."""

    # -- what they have in common -------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def states(self) -> list[BufferState]:
        return [each.state for each in self._read]

    @property
    def schema(self) -> Schema | None:
        """The columns of rows; None: there are none.

        Raises:
            Damaged: shards differ in them.
        """
        return common_schema(self._read)

    def selected(self) -> Selected:
        return selection_of(self.states, [extras_of(each.stored) for each in self._read])

    def wanted(self) -> Wanted | None:
        """Return what there is of each row; None: there are no rows."""
        schema = self.schema
        return None if schema is None else Wanted(schema, extras_named(self.selected().extras), self.nexts)

    @property
    def nexts(self) -> list[Column]:
        """Columns of next observations, if rows share these."""
        having = [state for state in self.states if state.columns is not None]
        return (having[0].next_obs_columns or []) if having else []

    def told(self, directory: str, run_id: str = "", written: int | None = None) -> Made:
        """Return what is made."""
        evicted, rows = self.evicted
        notes = self.selected().left_out | own_left(self.source)
        if evicted:
            notes[self.units] = f"no room for the {evicted} oldest, {rows} rows"
        return Made(
            directory=directory,
            kind=SHARDS,
            run_id=run_id,
            step=self.source.stored.manifest.step,
            units=self.there - evicted,
            rows=sum(self.rows),
            shards=list(self.rows),
            capacity=self.capacity,
            bytes=self.bytes if written is None else written,
            left_out=notes,
            made_of=[self.source.part()],
        )

    def made(self, outputs: Outputs, told: Told | None) -> Made:
        """Make it."""
        with outputs:
            made = self.write(outputs.each[0], told)
            outputs.finish()
        return made

    def write(self, output: Output, told: Told | None) -> Made:
        """Write the new run into a place that has begun."""
        layout = Layout(output.folder)
        source = self.source
        came = ways_after(source.layout, source.run_id, source.stored.manifest)
        run = layout.create_folders(output.files, made_of=came)
        # Names of episodes are of a life: those that the job itself gives are of none that was, and none that comes.
        life = life_after(self.source.layout, self.source.stored.manifest.incarnation)
        life = life if self.partial else life - 1
        with contextlib.ExitStack() as stack:
            aside = self._scattered(layout, output.files, stack, told)
            generation = GenerationWriter(layout, output.files, 0)
            stack.callback(generation.abandon)  # does nothing once it was committed
            generation.begin_with((), self.files())
            target = _Target(layout, run, output.files, generation, life)
            wrote, shards = [], []
            for rank in range(self.ranks):
                one, info = self._rank(rank, target, aside[rank] if aside else None)
                wrote.append(one)
                shards.append(info)
            made = self.told(output.directory, run.run_id, sum(info.bytes for info in shards))
            manifest = self.manifest(shards, output.directory, made.left_out)
            committed(generation, wrote, manifest, run, kind=SHARDS)
        layout.write_marker(output.files, run)
        return made

    def files(self) -> list[tuple[str, FileInfo]]:
        """Return the files that come along as they are."""
        return self.source.stored.trainer_files()

    def manifest(self, shards: list[ShardInfo], directory: str, left_out: dict[str, str]) -> Manifest:
        """Return what the generation says."""
        return manifest_of(self.source, shards, directory, left_out, self.reason)

    def _scattered(
        self, layout: Layout, files: FilesLike, stack: contextlib.ExitStack, told: Told | None
    ) -> list[ScatteredRows]:
        wanted = self.wanted()
        if wanted is None:
            return []
        heap = Heap(layout.directory)
        stack.callback(heap.close)
        aside = [ScatteredRows(layout.directory, wanted, rows, heap) for rows in self.rows]
        for each in aside:
            stack.callback(each.close)
        for rank, rows in self.handed(files, layout.directory, told):
            aside[rank].put(rows)
        return aside

    def _rank(self, rank: int, target: _Target, aside: ScatteredRows | None) -> tuple[Wrote, ShardInfo]:
        added, schema = self.firsts[rank] + self.rows[rank], self.schema
        own = self.settled(rank, target.life, aside)
        part = target.part(rank, self.selected().extras, self.nexts)
        with contextlib.closing(part):
            if aside is not None and schema is not None and own.rows:
                first = 0 if self.scattered else added - own.rows
                part.write(schema, first, aside.each(self.source.directory, first))
            state = self._state(Rank(rank, self.ranks, self._seed, target.life + 1), own, added, part.cuts)
            wrote = part.finish(state, self._read[0].unknown, own.values, TOOL)
        source = self.source
        ages = [each.age for each in source.stored.manifest.shards] if source.kind == SHARDS else []
        return wrote, ShardInfo(
            rank=rank,
            rows=own.rows,
            saved=own.rows,
            added=added,
            bytes=part.bytes,
            episodes=own.episodes,
            age=max(ages or [self.states[0].added]),
        )

    @property
    def _seed(self) -> int:
        return int(self.source.stored.manifest.options.get("seed", 0))

    @property
    def room(self) -> int:
        """What the state of each rank says of its capacity."""
        return self.capacity or max([*self.rows, *(state.capacity for state in self.states)])

    def _state(self, rank: Rank, own: Settled, added: int, cuts: list[int]) -> BufferState:
        """Return the state of a rank's buffer."""
        schema, selected = self.schema, self.selected()
        selection = selected.selection if own.rows else self.states[0].selection
        state = BufferState(
            columns=None if schema is None else list(schema.columns),
            capacity=self.room,
            added=added,
            size=own.rows,
            cut_keys=cuts,
            selection=selection,
            selector=selected.state(added) if selection else {},
            next_obs_columns=self.nexts or None,
            **own.state,
        )
        return state_of_rank(self._read, rank, state)


class _Target(NamedTuple):
    """The new run."""

    layout: Layout
    run: RunFile
    files: FilesLike
    generation: GenerationWriter
    life: int

    def part(self, rank: int, extras: Sequence[str], nexts: Sequence[Column]) -> PackedWriter:
        """Return what writes a rank's part."""
        segments = SegmentWriter(self.layout, self.files, self.run.tag, incarnation=self.life, rank=rank)
        return PackedWriter(self.files, self.generation, segments, shard_prefix(rank), extras, nexts)
