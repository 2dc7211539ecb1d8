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
from pipeline.checkpoint.planned import Plan
from pipeline.replay.moving import Found, Homes, Mover, PoolHomes, Wanted, extras_named
from pipeline.replay.pooling import block_of, numbers_of, places_of
from pipeline.replay.selecting import Selected, extras_of, selection_of
from pipeline.replay.shards import ShardOnDisk, Shares
from pipeline.replay.state import BufferState
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.store.segments import Block
from pipeline.tools.environments import ENVIRONMENTS_FILE, Environments, Going
from pipeline.tools.kept_rows import EPISODES_FILE, KEY_FILE, PART_FILE
from pipeline.tools.made import Made
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.packing import PackedWriter
from pipeline.tools.pools import EveryPool, PoolRows
from pipeline.tools.related import Descent
from pipeline.tools.routing import at_once, called_now, limiter_of, shares_of, write_ids
from pipeline.tools.scattered import Heap, ScatteredRows
from pipeline.tools.sources import counted, left_out_of
from pipeline.tools.writing import SegmentWriter, committed

Ints = np.ndarray


class PoolAim(NamedTuple):
    """What one new pool is to hold.

    Attributes:
        taken: which rows, rising.
        added: how many were ever added to it.
        not_kept: how many of these were not kept when they came.
        limiter: its counts.
    """

    taken: Ints
    added: int
    not_kept: int
    limiter: dict[str, int]


def aims_of(every: EveryPool, parts: Sequence[Ints]) -> list[PoolAim]:
    """Return what new pools are to hold, of which each has some of all rows, by their places, rising: what was counted
    is shared out, so that the sums over all parts stay."""
    states = [each.state for each in every.pools]
    rows = [len(taken) for taken in parts]
    gone = shares_of(sum(state.added - state.size for state in states), rows)
    not_kept = shares_of(sum(state.pool[2] for state in states if state.pool), rows)
    counts = {name: shares_of(value, rows) for name, value in limiter_of(states).items()}
    return [
        PoolAim(taken, rows[at] + gone[at], not_kept[at], {name: each[at] for name, each in counts.items()})
        for at, taken in enumerate(parts)
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


def _numbered(every: EveryPool, taken: Ints) -> _Numbered:
    own = np.unique(every.episode[taken])  # by the numbers that they had, and of one number by their parts
    given, end = called_now(every.origin[own, 1], [each.state for each in every.pools])
    numbers = np.full(len(every.origin), -1, np.int64)
    numbers[own] = given
    return _Numbered(numbers, np.column_stack([given, every.origin[own]]).astype(np.int64), end)


def told_of(every: EveryPool, aim: PoolAim, directory: str) -> Made:
    """Return what a new pool would be."""
    selected, rows = selected_of(every), len(aim.taken)
    own = np.bincount(every.run[aim.taken], minlength=len(every.pools)).tolist()
    return Made(
        directory=directory,
        kind=REPLAY,
        step=max(each.stored.manifest.step for each in every.sources),
        units=rows,
        rows=rows,
        capacity=_capacity(every, aim),
        bytes=sum(pool.bytes * of // max(1, len(pool.serials)) for pool, of in zip(every.pools, own, strict=True)),
        left_out=left_out_by(every, selected),
        made_of=every.parts,
    )


def _capacity(every: EveryPool, aim: PoolAim) -> int:
    return max([len(aim.taken), *(each.state.capacity for each in every.pools)])


class _Tail(NamedTuple):
    """The newest row of an open episode.

    Attributes:
        row: which it is of all of the new pool.
        number: what the episode is called there.
        place: of the row in it.
    """

    row: int
    number: int
    place: int


class _Targets:
    """Where all rows go, of some of the new pools."""

    def __init__(self, every: EveryPool, aims: Sequence[PoolAim]) -> None:
        count = len(every.run)
        target, place, number = (np.full(count, -1, np.int64) for _ in range(3))
        self.numbered = [_numbered(every, aim.taken) for aim in aims]
        for at, aim in enumerate(aims):
            own = aim.taken
            target[own], place[own] = at, np.arange(len(own))
            number[own] = self.numbered[at].numbers[every.episode[own]]
        self.target, self.place, self.number = (self._by_pool(every, each) for each in (target, place, number))
        self.part = self._by_pool(every, every.part)
        rows = [len(aim.taken) for aim in aims]
        nobody = Plan(targets=(), identity=False)
        self.shares = Shares(nobody, self.target, self.place, self.place, rows, [0] * len(aims))

    @staticmethod
    def _by_pool(every: EveryPool, values: Ints) -> list[Ints]:
        """Return what there is of all rows by pool, oldest row first."""
        begins = np.cumsum([0, *(len(each.serials) for each in every.pools)])
        found = np.empty_like(values)
        found[begins[every.run] + every.at] = values
        return np.split(found, begins[1:-1])

    def blocks(self, number: int, pool: PoolRows) -> list[Block]:
        """Return the blocks of a pool in which rows lie that go somewhere."""
        at = pool.shard.pool["at"][self.target[number] >= 0] if pool.blocks else np.empty(0, np.int64)
        return [pool.blocks[block] for block in np.unique(block_of(at, pool.blocks)).tolist()]

    def going(self, every: EveryPool, target: int) -> Iterator[tuple[Going, _Tail]]:
        """Yield the open episodes whose newest row goes to a target. Where that row was not kept, the environment
        begins anew."""
        for at, pool in enumerate(every.pools):
            for env, serial, _, place in pool.state.open_episodes:
                row = int(np.searchsorted(pool.serials, serial))
                if row < len(pool.serials) and pool.serials[row] == serial and self.target[at][row] == target:
                    found = (each[at][row] for each in (self.part, self.place, self.number))
                    part, own, number = map(int, found)
                    yield Going(part, at, env), _Tail(own, number, place)


class _Homes(PoolHomes):
    """Where the rows of a pool go, which go on as they are."""

    def __init__(self, shard: ShardOnDisk, shares: Shares, wanted: Wanted, numbers: Ints) -> None:
        super().__init__(shard, shares, wanted)
        self._called = numbers

    def ended(self, own: Ints, ends: Ints) -> Ints:
        return ends

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        super().mark(records, found, arrays)
        records[EPISODE] = self._called[found.at]


class _Mover(Mover):
    def __init__(self, pool: PoolRows, files: FilesLike, wanted: Wanted, numbers: Ints) -> None:
        super().__init__(pool.source.layout, pool.source.tag, files, life=0, rank=0, wanted=wanted)
        self._called = numbers

    def homes(self, shard: ShardOnDisk, shares: Shares) -> Homes:
        return _Homes(shard, shares, self._wanted, self._called)


def selected_of(every: EveryPool) -> Selected:
    """Return what a selection goes on from."""
    return selection_of([each.state for each in every.pools], [extras_of(each.stored) for each in every.pools])


def left_out_by(every: EveryPool, selected: Selected) -> dict[str, str]:
    """Return what is not taken over, and why."""
    said = list(dict.fromkeys(each.order for each in every.telling))
    other = {"remove": f"rows went in different orders: {'; '.join(said)}. The new run says the first"}
    return left_out_of(every.sources) | selected.left_out | (other if len(said) > 1 else {})


def route_pools(
    every: EveryPool, aims: Sequence[PoolAim], outputs: Outputs, tool: str, told: Told | None = None
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
    most = at_once(1)  # where rows lie until all are there
    for begin in range(0, len(aims), most):
        some, places = aims[begin : begin + most], outputs.each[begin : begin + most]
        targets = _Targets(every, some)
        with contextlib.ExitStack() as stack:
            each = enumerate(zip(places, some, strict=True))
            writers = [_Writer(output, every, targets, at, aim) for at, (output, aim) in each]
            aside = _scattered(every, targets, writers, selected, stack)
            for size in _read(every, targets, aside, selected, places[0].files):
                done += size
                if told is not None:
                    told(min(done, total), total)
            for at, writer in enumerate(writers):
                made.append(writer.write(aside[at] if aside else None, selected, descent, tool))
    return made


def _scattered(
    every: EveryPool,
    targets: _Targets,
    writers: Sequence[_Writer],
    selected: Selected,
    stack: contextlib.ExitStack,
) -> list[ScatteredRows]:
    """Return where the rows of each new pool are put in their order; none: there are no columns."""
    wanted = _wanted(every, selected)
    if wanted is None or not writers:
        return []
    heap = Heap(writers[0].layout.directory)
    stack.callback(heap.close)
    aside = []
    for writer, rows in zip(writers, targets.shares.rows, strict=True):
        aside.append(ScatteredRows(writer.layout.directory, wanted, rows, heap))
        stack.callback(aside[-1].close)
    return aside


def _wanted(every: EveryPool, selected: Selected) -> Wanted | None:
    return None if every.schema is None else Wanted(every.schema, extras_named(selected.extras), [])


def _read(
    every: EveryPool, targets: _Targets, aside: Sequence[ScatteredRows], selected: Selected, files: FilesLike
) -> Iterator[int]:
    """Put rows where they belong; yield how many bytes were read for some."""
    wanted = _wanted(every, selected)
    for number, pool in enumerate(every.pools if wanted is not None else ()):
        blocks = targets.blocks(number, pool)
        if not blocks:
            continue
        assert wanted is not None
        mover, before = _Mover(pool, files, wanted, targets.number[number]), 0
        for target, rows in mover.rows(pool.shard, targets.shares, blocks):
            aside[target].put(rows)
            yield mover.bytes_read - before
            before = mover.bytes_read


class _Writer:
    """Writes one new pool."""

    def __init__(self, output: Output, every: EveryPool, targets: _Targets, at: int, aim: PoolAim) -> None:
        self._output, self._every, self._targets, self._at, self._aim = output, every, targets, at, aim
        self.layout = Layout(output.folder)
        self._run = self.layout.create_folders(output.files)

    def write(self, rows: ScatteredRows | None, selected: Selected, descent: Descent, tool: str) -> Made:
        """Make the run whole."""
        every, files, schema = self._every, self._output.files, self._every.schema
        generation = GenerationWriter(self.layout, files, 0)
        with contextlib.ExitStack() as stack:
            stack.callback(generation.abandon)  # does nothing once it was committed
            generation.begin()
            segments = SegmentWriter(self.layout, files, self._run.tag)
            writer = stack.enter_context(
                contextlib.closing(PackedWriter(files, generation, segments, "", selected.extras, []))
            )
            if rows is not None and schema is not None:
                writer.write(schema, 0, rows.each(every.sources[0].directory, 0))
            self._origins(generation)
            state, environments = self._state(selected, writer)
            generation.add(ENVIRONMENTS_FILE, environments.table.tobytes())
            unknown = {name: value for each in reversed(every.pools) for name, value in each.shard.unknown.items()}
            wrote = writer.finish(state, unknown, places_of(state.added, state.size), tool)
            manifest = Manifest(
                step=max(each.stored.manifest.step for each in every.sources),
                reason=tool,
                options=self._options(state),
                left_out=left_out_by(every, selected),
                made_of=counted(every.parts, every.part[self._aim.taken]),
            )
            whole = committed(generation, [wrote], manifest, self._run, kind=REPLAY)
        table = self._targets.numbered[self._at].table
        run = descent.of(self._run, whole.made_of)
        ids = {"parts": whole.made_of, "episodes": table.tolist(), "environments": environments.told}
        write_ids(files, self.layout, run, ids)
        return msgspec.structs.replace(
            told_of(every, self._aim, self._output.directory),
            run_id=whole.run_id,
            bytes=writer.bytes,
            renumbered=int((table[:, 0] != table[:, 2]).sum()),
            made_of=whole.made_of,
        )

    def _origins(self, generation: GenerationWriter) -> None:
        every, taken = self._every, self._aim.taken
        generation.add(PART_FILE, every.part[taken].astype(np.int32).tobytes())
        generation.add(KEY_FILE, every.number[taken].astype(np.int64).tobytes())
        generation.add(EPISODES_FILE, self._targets.numbered[self._at].table.tobytes())

    def _state(self, selected: Selected, writer: PackedWriter) -> tuple[BufferState, Environments]:
        """Return the state, and the environments that it speaks of."""
        every, aim, schema = self._every, self._aim, self._every.schema
        states, size = [each.state for each in every.pools], len(aim.taken)
        going, first = dict(self._targets.going(every, self._at)), aim.added - size
        environments = Environments(every.pools, list(going))
        opened = [[environments.of(each), first + at.row, at.number, at.place] for each, at in going.items()]
        state = BufferState(
            columns=None if schema is None else list(schema.columns),
            capacity=_capacity(every, aim),
            added=aim.added,
            size=size,
            next_episode=self._targets.numbered[self._at].next,
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
