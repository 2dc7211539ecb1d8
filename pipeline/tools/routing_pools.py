"""Rows of pools to one or more new ones: what merging and splitting of them write.

Each row goes by itself. Those of a new pool are in the order of their ids, and keep columns, versions, ends and the
places that they had in their episodes; what depends on where a row lies (its key, its number among all that were added,
the number of its episode) is made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.layout import EPISODE
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import REPLAY, Manifest
from pipeline.replay.handing import Wanted, extras_named
from pipeline.replay.homes import Found
from pipeline.replay.moving import Mover
from pipeline.replay.pooling import numbers_of
from pipeline.replay.selecting import Selected, extras_of, selection_of
from pipeline.replay.state import BufferState
from pipeline.store.layout import Layout
from pipeline.tools.environments import ENVIRONMENTS_FILE, Environments, Going
from pipeline.tools.kept_rows import EPISODES_FILE, KEY_FILE, PART_FILE
from pipeline.tools.made import Made
from pipeline.tools.output import GrowingFile, Output, Outputs, Told
from pipeline.tools.packing import PackedWriter, places_of
from pipeline.tools.pools import Division, EveryPool, PoolRows, Tail
from pipeline.tools.related import Descent
from pipeline.tools.routes import RoutedHomes, Routes
from pipeline.tools.routing import at_once, called_now, limiter_of, shares_of, write_ids
from pipeline.tools.scattered import Heap, Packed, ScatteredRows
from pipeline.tools.sources import left_out_of
from pipeline.tools.writing import SegmentWriter, committed

Ints = np.ndarray
_FILES = 3  # of a new pool, while rows are on their way to it


class PoolAim(NamedTuple):
    """What one new pool is to hold.

    Attributes:
        part: the number of the part of all that it is.
        counts: how many rows it has of each pool.
        added: how many were ever added to it.
        not_kept: how many of these were not kept when they came.
        limiter: its counts.
    """

    part: int
    counts: list[int]
    added: int
    not_kept: int
    limiter: dict[str, int]

    @property
    def rows(self) -> int:
        """How many it has."""
        return sum(self.counts)


def aims_of(every: EveryPool, division: Division, parts: Sequence[int]) -> list[PoolAim]:
    """Return what new pools are to hold, each of which is one of some parts: what was counted is shared out, so that
    the sums over all of these stay."""
    states = [each.state for each in every.pools]
    rows = [sum(division.counts[part]) for part in parts]
    gone = shares_of(sum(state.added - state.size for state in states), rows)
    not_kept = shares_of(sum(state.pool[2] for state in states if state.pool), rows)
    counts = {name: shares_of(value, rows) for name, value in limiter_of(states).items()}
    return [
        PoolAim(
            part,
            division.counts[part],
            rows[at] + gone[at],
            not_kept[at],
            {name: each[at] for name, each in counts.items()},
        )
        for at, part in enumerate(parts)
    ]


class _Numbered(NamedTuple):
    """The episodes of the rows of one new pool.

    Attributes:
        numbers: [m] by episode of all what each is called there; -1: it has no row there.
        table: [k, 3] of those that have: number, and part and number where they were.
        next: what comes after all numbers.
    """

    numbers: Ints
    table: Ints
    next: int


def _numbered(every: EveryPool, taken: np.ndarray) -> _Numbered:
    """Return what those episodes are called of which a new pool has rows: ``taken`` [n], of all."""
    own = np.flatnonzero(taken)  # by the numbers that they had, and of one number by their parts
    given, end = called_now(every.origin[own, 1], [each.state for each in every.pools])
    numbers = np.full(len(every.origin), -1, np.int64)
    numbers[own] = given
    return _Numbered(numbers, np.column_stack([given, every.origin[own]]).astype(np.int64), end)


def told_of(every: EveryPool, aim: PoolAim, directory: str) -> Made:
    """Return what a new pool would be."""
    selected, rows = selected_of(every), aim.rows
    return Made(
        directory=directory,
        kind=REPLAY,
        step=max(each.stored.manifest.step for each in every.sources),
        units=rows,
        rows=rows,
        capacity=_capacity(every, aim),
        bytes=sum(pool.bytes * of // max(1, len(pool)) for pool, of in zip(every.pools, aim.counts, strict=True)),
        left_out=left_out_by(every, selected),
        made_of=every.parts,
    )


def _capacity(every: EveryPool, aim: PoolAim) -> int:
    return max([aim.rows, *(each.state.capacity for each in every.pools)])


def selected_of(every: EveryPool) -> Selected:
    """Return what a selection goes on from."""
    return selection_of([each.state for each in every.pools], [extras_of(each.stored) for each in every.pools])


def left_out_by(every: EveryPool, selected: Selected) -> dict[str, str]:
    """Return what is not taken over, and why."""
    said = list(dict.fromkeys(each.order for each in every.telling))
    other = {"remove": f"rows went in different orders: {'; '.join(said)}. The new run says the first"}
    return left_out_of(every.sources) | selected.left_out | (other if len(said) > 1 else {})


def route_pools(
    every: EveryPool,
    division: Division,
    aims: Sequence[PoolAim],
    outputs: Outputs,
    tool: str,
    told: Told | None = None,
) -> list[Made]:
    """Write the pools that ``aims`` say into outputs that have begun.

    Raises:
        UsageError: priorities were raised to different powers.
        Damaged, StoreError: something cannot be read.
        WriteFailed: something cannot be written.
    """
    selected, made = selected_of(every), list[Made]()
    done, total = 0, sum(each.bytes for each in every.pools)
    descent = Descent(every.reads, len(aims))
    most = at_once(_FILES)
    for begin in range(0, len(aims), most):
        some, places = aims[begin : begin + most], outputs.each[begin : begin + most]
        with contextlib.ExitStack() as stack:
            writers = [_Writer(output, every, aim, stack) for output, aim in zip(places, some, strict=True)]
            for size in _Routing(every, division, writers, selected, stack).route():
                done += size
                if told is not None:
                    told(min(done, total), total)
            for writer in writers:
                made.append(writer.write(selected, descent, tool))
    return made


class _Routing:
    """Brings rows to some of the new pools."""

    def __init__(
        self,
        every: EveryPool,
        division: Division,
        writers: Sequence[_Writer],
        selected: Selected,
        stack: contextlib.ExitStack,
    ) -> None:
        self._every, self._division, self._writers, self._stack = every, division, writers, stack
        schema = every.schema
        self._wanted = None if schema is None else Wanted(schema, extras_named(selected.extras), [])

    def route(self) -> Iterator[int]:
        """Put rows where they belong; yield how many bytes were read for some."""
        if self._wanted is None:
            return
        folder = self._writers[0].layout.directory
        heap = Heap(folder)
        self._stack.callback(heap.close)
        for writer in self._writers:
            writer.rows = ScatteredRows(writer.layout.directory, self._wanted, writer.aim.rows, heap)
            self._stack.callback(writer.rows.close)
        routes = [Routes(pool.files, folder, self._wanted.extras) for pool in self._every.pools]
        for each in routes:
            self._stack.callback(each.close)
        self._find_out(routes)
        for number, each in enumerate(routes):
            yield from self._move(number, each, self._wanted)
            each.close()

    def _find_out(self, routes: Sequence[Routes]) -> None:
        """Say of each row where it goes."""
        every = self._every
        target_of = np.full(len(self._division.counts), -1, np.int64)
        target_of[[writer.aim.part for writer in self._writers]] = np.arange(len(self._writers))
        tails = [pool.tails() for pool in every.pools]
        for step in every.in_order():
            target = target_of[self._division.of(step)]
            place = np.full(len(target), -1, np.int64)
            for number, writer in enumerate(self._writers):
                own = np.flatnonzero(target == number)
                place[own] = writer.named(step.ids[1][own], step.ids[0][own])
            for run, each in enumerate(routes):
                begin, own = step.of_run(run)
                each.add(begin, target[own], place[own])
                while tails[run] and tails[run][0].at < begin + len(own):
                    tail = tails[run].pop(0)
                    row = own[tail.at - begin]
                    if target[row] >= 0:
                        part, at = int(step.ids[1][row]), int(place[row])
                        self._writers[int(target[row])].note_tail(Going(part, run, tail.env), at, tail)

    def _move(self, number: int, routes: Routes, wanted: Wanted) -> Iterator[int]:
        pool, before = self._every.pools[number], 0
        homes = _Homes(routes, pool, self._every.episodes[number], self._writers)
        mover = Mover(pool.source.layout, pool.source.tag, self._writers[0].files, life=0, rank=0, wanted=wanted)
        for target, rows in mover.rows_by(homes, number, [pool.files.blocks[block] for block in routes.needed]):
            aside = self._writers[target].rows
            assert aside is not None
            aside.put(rows)
            yield mover.bytes_read - before
            before = mover.bytes_read


class _Homes(RoutedHomes):
    """Where the rows of a pool go, which go on as they are."""

    def __init__(self, routes: Routes, pool: PoolRows, episodes: Ints, writers: Sequence[_Writer]) -> None:
        super().__init__(routes)
        self._pool, self._episodes, self._writers = pool, episodes, writers

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        super().mark(records, found, arrays)
        # What each is called in a new pool is known when all its rows are.
        of = self._episodes[self._pool.of_episodes(arrays[EPISODE].astype(np.int64))]
        records[EPISODE] = of
        for number, writer in enumerate(self._writers):
            writer.taken[of[found.rank == number]] = True


class _Writer:
    """Writes one new pool."""

    def __init__(self, output: Output, every: EveryPool, aim: PoolAim, stack: contextlib.ExitStack) -> None:
        self._output, self._every, self.aim, self.files = output, every, aim, output.files
        self.layout = Layout(output.folder)
        self._run = self.layout.create_folders(output.files)
        self._generation = GenerationWriter(self.layout, output.files, 0)
        stack.callback(self._generation.abandon)  # does nothing once it was committed
        self._generation.begin()
        self._origin: list[GrowingFile] = []
        for path in (PART_FILE, KEY_FILE):
            self._origin.append(GrowingFile(output.files, self._generation, path))
            stack.callback(self._origin[-1].close)
        self.rows: ScatteredRows | None = None
        self.taken = np.zeros(len(every.origin), bool)
        """[n] The episodes, of all, of which it has rows."""
        self._named, self._counts = 0, np.zeros(len(every.parts), np.int64)
        self._tails: dict[Going, tuple[int, Tail]] = {}

    def named(self, part: Ints, number: Ints) -> Ints:
        """Take in what names the rows that come next, and return the place of each."""
        for file, ids, kind in zip(self._origin, (part, number), (np.int32, np.int64), strict=True):
            file.write(ids.astype(kind).tobytes())
        self._counts += np.bincount(part, minlength=len(self._counts))
        begin, self._named = self._named, self._named + len(part)
        return np.arange(begin, self._named)

    def note_tail(self, going: Going, row: int, tail: Tail) -> None:
        """Take in that an open episode's newest row is one of these."""
        self._tails[going] = row, tail

    def write(self, selected: Selected, descent: Descent, tool: str) -> Made:
        """Make the run whole."""
        every, schema, generation = self._every, self._every.schema, self._generation
        numbered = _numbered(every, self.taken)
        segments = SegmentWriter(self.layout, self.files, self._run.tag)
        with contextlib.closing(PackedWriter(self.files, generation, segments, "", selected.extras, [])) as writer:
            if self.rows is not None and schema is not None:
                writer.write(schema, 0, self._called(numbered))
            for file in self._origin:
                file.finish()
            generation.add(EPISODES_FILE, numbered.table.tobytes())
            state, environments = self._state(selected, writer, numbered)
            generation.add(ENVIRONMENTS_FILE, environments.table.tobytes())
            unknown = {name: value for each in reversed(every.pools) for name, value in each.unknown.items()}
            wrote = writer.finish(state, unknown, places_of(state.added, state.size), tool)
            parts = zip(every.parts, self._counts.tolist(), strict=True)
            manifest = Manifest(
                step=max(each.stored.manifest.step for each in every.sources),
                reason=tool,
                options=self._options(state),
                left_out=left_out_by(every, selected),
                made_of=[msgspec.structs.replace(part, units=count) for part, count in parts],
            )
            whole = committed(generation, [wrote], manifest, self._run, kind=REPLAY)
        run = descent.of(self._run, whole.made_of)
        ids = {"parts": whole.made_of, "episodes": numbered.table, "environments": environments.told}
        write_ids(self.files, self.layout, run, ids)
        return msgspec.structs.replace(
            told_of(every, self.aim, self._output.directory),
            run_id=whole.run_id,
            bytes=writer.bytes,
            renumbered=int((numbered.table[:, 0] != numbered.table[:, 2]).sum()),
            made_of=whole.made_of,
        )

    def _called(self, numbered: _Numbered) -> Iterator[Packed]:
        """Yield all rows, their episodes called what they are now."""
        assert self.rows is not None
        for each in self.rows.each(self._every.sources[0].directory, 0):
            each.records[EPISODE] = numbered.numbers[each.records[EPISODE]]
            yield each

    def _state(self, selected: Selected, writer: PackedWriter, numbered: _Numbered) -> tuple[BufferState, Environments]:
        """Return the state, and the environments that it speaks of."""
        every, aim, schema = self._every, self.aim, self._every.schema
        states, size = [each.state for each in every.pools], aim.rows
        first = aim.added - size
        environments = Environments(every.pools, list(self._tails))
        opened = []
        for each, (row, tail) in self._tails.items():
            pool = every.pools[each.stream]
            episode = every.episodes[each.stream][pool.of_episodes(np.array([tail.episode]))]
            opened.append([environments.of(each), first + row, int(numbered.numbers[episode[0]]), tail.place])
        state = BufferState(
            columns=None if schema is None else list(schema.columns),
            capacity=_capacity(every, aim),
            added=aim.added,
            size=size,
            next_episode=numbered.next,
            open_episodes=sorted(opened),
            cut_keys=writer.cuts,
            stale_updates=sum(state.stale_updates for state in states),
            limiter=aim.limiter,
            selection=selected.selection,
            selector=selected.state(aim.added, writer.most),
            remove=every.telling[0].state.remove,
            awaiting_reset=environments.resting,
            pool=numbers_of(size, aim.not_kept),
        )
        return state, environments

    def _options(self, state: BufferState) -> dict[str, Any]:
        telling = self._every.telling
        compress = {name: how for each in telling for name, how in (each.options.get("compress") or {}).items()}
        own = {"compress": compress or None, "capacity": state.capacity, "directory": self._output.directory}
        return {**telling[0].options, **own}
