"""Rows of one or more buffers to one or more new buffers: what merging and splitting have in common.

Whole episodes go to one place. Their rows stay in the order of their ids, and keep columns, versions, ends and places;
what depends on where a row lies (its key, the number of its episode, how far the row before lies) is made anew.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.layout import EPISODE
from pipeline.checkpoint.manifest import PIPELINE, REPLAY, MadeOf, Manifest
from pipeline.errors import ConfigError
from pipeline.replay.selecting import Selected, selection_of
from pipeline.replay.state import BufferState
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, RunFile, write_file
from pipeline.tools.environments import ENVIRONMENTS_FILE, Environments, Going
from pipeline.tools.kept_rows import EPISODES_FILE, EpisodesThere, RowsOnDisk, common_nexts, common_schema, telling
from pipeline.tools.made import Made
from pipeline.tools.mixing import Mixed, mixed
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.played_runs import EveryItem, PlayedRun
from pipeline.tools.playing import Playing
from pipeline.tools.related import Descent, Read
from pipeline.tools.sources import OTHERS, Source, identity, in_order, left_out_of
from pipeline.tools.writing import RowsWriter

Ints = np.ndarray
IDS_FILE = "ids.json"
_FILES = 6  # of one new run: journal, segment, what names rows, and keys of next observations, or fewer
_LISTED_AT_ONCE = 1 << 14
AT_ONCE = 32
"""So many new runs are written in one reading, or fewer: each has files open meanwhile, and a block in memory."""


def at_once(files: int) -> int:
    """Return how many new runs are written in one reading, each of which has so many files open: together no more than
    a quarter of what the process may have."""
    return max(1, min(AT_ONCE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4 // files))


class Every(NamedTuple):
    """All that is read.

    Attributes:
        sources: the runs.
        streams: their rows, of a buffer of ranks one for each.
        parts: what names rows, in the order in which those of one key come.
        nexts: columns of next observations, where rows go on sharing these.
        episodes: by stream, those of which rows are there.
        items: of pipelines, of which items these are; None: the rows are of buffers alone.
    """

    sources: list[Source]
    streams: list[RowsOnDisk]
    parts: list[MadeOf]
    nexts: list[Column]
    episodes: list[EpisodesThere]
    items: EveryItem | None = None

    @property
    def bytes(self) -> int:
        """Of payloads."""
        return sum(each.bytes for each in self.streams)

    @property
    def reads(self) -> list[Read]:
        """What names the rows of each source."""
        return [Read(each.source, each.parts) for each in self.streams]

    @property
    def left_out(self) -> dict[str, str]:
        """What is not taken over, and why."""
        return left_out_of(self.sources) | ({} if self.items is None else self.items.left_out)

    def places(self, taken: Sequence[Ints]) -> Ints:
        """Return the places among all of some episodes, given by stream."""
        begins = np.cumsum([0, *(len(each.number) for each in self.episodes)]).tolist()
        return np.concatenate([begin + own for begin, own in zip(begins, taken, strict=False)])


class Aim(NamedTuple):
    """What one new buffer is to hold.

    Attributes:
        taken: by stream, which of its episodes, rising.
        added: how many rows were ever added to it.
        limiter: its counts.
    """

    taken: list[Ints]
    added: int
    limiter: dict[str, int]


def every_row(
    sources: Sequence[Source], streams: Sequence[RowsOnDisk], names: Sequence[str] = (), met: object = None
) -> Every:
    """Read which episodes there are. See :meth:`RowsOnDisk.episodes`.

    Raises:
        ConfigError: two sources have a row in common, or columns differ.
        Damaged: something is missing or was changed.
    """
    parts, places = in_order([each.parts for each in streams])
    for each, ranks in zip(streams, places, strict=True):
        each.ranks = ranks
    common_schema(streams)
    nexts = common_nexts(streams)
    for each in streams:
        each.owning = not nexts
    if len(sources) > 1:
        for _ in mixed([each.ids() for each in streams], lambda part, key: _twice(streams, parts[int(part)], int(key))):
            pass  # what two have in common is found before anything is written
    episodes = [each.episodes(names, met) for each in streams]
    played = [each for each in streams if isinstance(each, PlayedRun)]
    items = EveryItem.read(played, episodes) if played else None
    return Every(list(sources), list(streams), parts, nexts, episodes, items)


class _Numbered(NamedTuple):
    """The episodes of one new buffer.

    Attributes:
        place: by stream, by episode of it: its place among those of the new one; -1: it is not there.
        there: [n] where each stands among all that are read.
        numbers: [n] what each is called there.
        next: what comes after all numbers.
        origin: [n, 2] part and number there.
        rows: how many rows all have.
    """

    place: list[Ints]
    there: Ints
    numbers: Ints
    next: int
    origin: Ints
    rows: int


def _numbered(every: Every, aim: Aim) -> _Numbered:
    part = np.concatenate([each.part[taken] for each, taken in zip(every.episodes, aim.taken, strict=True)])
    origin = np.concatenate([each.origin[taken] for each, taken in zip(every.episodes, aim.taken, strict=True)])
    order = np.lexsort((part, origin))
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    found, begin, rows = [], 0, 0
    for episodes, taken in zip(every.episodes, aim.taken, strict=True):
        count = len(taken)
        place = np.full(len(episodes.number), -1, np.int64)
        place[taken] = places[begin : begin + count]
        found.append(place)
        begin, rows = begin + count, rows + int(episodes.rows[taken].sum())
    named = np.stack([part[order], origin[order]], axis=1)
    numbers, end = called_now(origin[order], [each.state for each in every.streams])
    return _Numbered(found, every.places(aim.taken)[order], numbers, end, named, rows)


def called_now(origin: Ints, states: Sequence[BufferState]) -> tuple[Ints, int]:
    """Return what episodes are called now, in an order of their ids, and what comes after all numbers. It follows from
    what they were called in their parts, so that it does not matter in how many steps they came together.

    Args:
        origin: [n] what each was called in its part.
        states: of the buffers that they are in.
    """
    if len(np.unique(origin)) < len(origin):
        return np.arange(len(origin)), len(origin)
    return origin, max([*(state.next_episode for state in states), int(origin.max(initial=-1)) + 1])


class _Target:
    """One new buffer while it is written."""

    def __init__(self, output: Output, every: Every, aim: Aim, extras: Sequence[str], descent: Descent) -> None:
        self.output, self.aim, self._every, self._descent = output, aim, every, descent
        self.numbered = _numbered(every, aim)
        self.layout = Layout(output.folder)
        self.run = self.layout.create_folders(output.files)
        self.writer = RowsWriter(
            self.layout,
            self.run,
            output.files,
            common_schema(every.streams),
            every.nexts,
            added=aim.added,
            rows=self.numbered.rows,
            episodes=len(self.numbered.origin),
            extras=extras,
        )
        self._counts = np.zeros(len(every.parts), np.int64)

    def add(self, found: Mixed, of: Ints) -> int:
        """Add those of some rows that belong here, and return how many; ``of``: by row, the place of its episode in its
        stream."""
        place = np.empty(len(of), np.int64)
        for number, places in enumerate(self.numbered.place):
            own = np.flatnonzero(found.stream == number)
            place[own] = places[of[own]]
        here = np.flatnonzero(place >= 0)
        if len(here):
            chunk = found.chunk if len(here) == len(place) else found.chunk.at(here)
            self._counts += np.bincount(chunk.part, minlength=len(self._counts))
            self.writer.add(chunk, place[here], self.numbered.numbers)
        return len(here)

    def finish(self, tool: str, selected: Selected, notes: dict[str, str]) -> Made:
        """Make the run whole."""
        every, numbered = self._every, self.numbered
        going = dict(_going(every, numbered))
        environments = Environments(every.streams, list(going))
        state = self._state(selected, environments, going)
        count = len(numbered.origin)
        table = np.column_stack([numbered.numbers, numbered.origin]).astype(np.int64)
        self.writer.file(EPISODES_FILE, table.tobytes())
        self.writer.file(ENVIRONMENTS_FILE, environments.table.tobytes())
        parts = [
            msgspec.structs.replace(part, units=int(rows)) for part, rows in zip(every.parts, self._counts, strict=True)
        ]
        first, directory = every.sources[0].stored.manifest, self.output.directory
        manifest = Manifest(
            step=max(each.stored.manifest.step for each in every.sources),
            reason=tool,
            options={**first.options, **_lying(every), "capacity": state.capacity, "directory": directory},
            left_out=notes,
            made_of=parts,
        )
        ids: dict[str, Any] = {"parts": parts, "episodes": table, "environments": environments.told}
        units, others = count, int((table[:, 0] != table[:, 2]).sum())
        playing = None if every.items is None else Playing.of(every.items, numbered.there)
        if playing is not None:
            manifest, ids["items"] = self._played(playing, manifest), playing.told()
            units, others = len(playing.taken), others + playing.renumbered
        events = [] if playing is None else playing.events(self._rows_of(playing), manifest.step)
        kind = REPLAY if playing is None else PIPELINE
        whole = self.writer.finish(state, _unknown(every), manifest, time.time(), kind=kind, events=events)
        write_ids(self.output.files, self.layout, self._descent.of(self.run, parts), ids)
        return Made(
            directory=directory,
            kind=kind,
            of_rows=playing is not None,
            run_id=whole.run_id,
            step=whole.step,
            units=units,
            rows=numbered.rows,
            bytes=self.writer.written,
            renumbered=others,
            left_out=notes,
            made_of=parts,
        )

    def _played(self, playing: Playing, manifest: Manifest) -> Manifest:
        """Write what a pipeline has beside its rows, and return the manifest that says so."""
        for path, content in playing.files(self.numbered.numbers, self.numbered.there, manifest.step).items():
            self.writer.file(path, content)
        return playing.manifest(manifest)

    def _rows_of(self, playing: Playing) -> Ints:
        """Return how many rows each item has."""
        rows = np.concatenate([each.rows for each in self._every.episodes])[self.numbered.there]
        items = np.searchsorted(playing.taken, playing.every.of[self.numbered.there])
        return np.bincount(items, weights=rows, minlength=len(playing.taken)).astype(np.int64)

    def _state(self, selected: Selected, environments: Environments, going: dict[Going, int]) -> BufferState:
        every, aim, numbered = self._every, self.aim, self.numbered
        states = [each.state for each in every.streams]
        schema = common_schema(every.streams)
        return BufferState(
            columns=None if schema is None else list(schema.columns),
            capacity=max([numbered.rows, *(state.capacity for state in states)]),
            added=aim.added,
            size=numbered.rows,
            next_episode=numbered.next,
            open_episodes=sorted([environments.of(each), *self._tail(place)] for each, place in going.items()),
            cut_keys=self.writer.cuts,
            stale_updates=sum(state.stale_updates for state in states),
            limiter=aim.limiter,
            selection=selected.selection,
            selector=selected.state(aim.added, self.writer.most),
            awaiting_reset=environments.resting,
            next_obs_columns=every.nexts or None,
        )

    def _tail(self, place: int) -> list[int]:
        key, at = self.writer.tail(place)
        return [key, int(self.numbered.numbers[place]), at]


def _going(every: Every, numbered: _Numbered) -> Iterator[tuple[Going, int]]:
    """Yield the open episodes of which rows are there, and the place of each among those of the new buffer."""
    for stream, (rows, episodes) in enumerate(zip(every.streams, every.episodes, strict=True)):
        for env, _, number, _ in rows.state.open_episodes:
            at = int(np.searchsorted(episodes.number, number))
            if at < len(episodes.number) and episodes.number[at] == number and numbered.place[stream][at] >= 0:
                yield Going(int(episodes.part[at]), stream, env), int(numbered.place[stream][at])


def write_ids(files: FilesLike, layout: Layout, run: RunFile, ids: Mapping[str, Any]) -> None:
    """Say what everything in a new run had been called, and make it a run: what is written last.

    Args:
        files, layout, run: of the new run.
        ids: the parts of which it is made; of episodes [n, 3] what each is called, its part and number there; of
            environments what each is called, where it was, and as what; of items what each is called, and its part,
            uid there, and task. Arrays are listed piece by piece, as there may be as many episodes as rows.
    """
    fields = [msgspec.json.encode(name) + b":" + _listed(each) for name, each in ids.items()]
    write_file(files, f"{layout.directory}/{IDS_FILE}", b"{" + b",".join(fields) + b"}\n")
    layout.write_marker(files, run)


def _listed(values: Any) -> bytes:
    if not isinstance(values, np.ndarray):
        return msgspec.json.encode(values)
    pieces = [values[begin : begin + _LISTED_AT_ONCE] for begin in range(0, len(values), _LISTED_AT_ONCE)]
    return b"[" + b",".join(msgspec.json.encode(each.tolist())[1:-1] for each in pieces) + b"]"


def _lying(every: Every) -> dict[str, Any]:
    """Return what the options are to say of how rows lie."""
    having = telling(every.streams)
    if not having:
        return {}
    compress = {name: how for each in having for name, how in (each.options.get("compress") or {}).items()}
    found: dict[str, Any] = {"share_next_obs": bool(every.nexts), "compress": compress or None}
    remove = having[0].options.get("remove")
    found |= {"remove": remove} if remove is not None else {}  # another one may be of a buffer that has no rows
    return {**found, "fields": having[0].fields.to_dict()} if every.nexts else found


def _unknown(every: Every) -> dict[str, Any]:
    return {name: value for each in reversed(every.streams) for name, value in each.unknown.items()}


def route(every: Every, aims: Sequence[Aim], outputs: Outputs, tool: str, told: Told | None = None) -> list[Made]:
    """Write the buffers that ``aims`` say into outputs that have begun.

    Raises:
        ConfigError: an episode is in two of the sources, or priorities are not of one kind.
        Damaged, StoreError: something cannot be read.
        WriteFailed: something cannot be written.
    """
    selected, done = _selected(every), 0
    notes = every.left_out | selected.left_out
    descent, total = Descent(every.reads, len(aims)), sum(_rows(every, aim) for aim in aims)
    made: list[Made] = []

    def wrote(rows: int) -> None:
        nonlocal done
        done += rows
        if told is not None:
            told(every.bytes * done // max(1, total), every.bytes)

    most = at_once(_FILES + len(selected.extras) + 2 * len(every.nexts))
    for begin in range(0, len(aims), most):
        targets: list[_Target] = []
        try:
            for output, aim in zip(outputs.each[begin : begin + most], aims[begin : begin + most], strict=True):
                targets.append(_Target(output, every, aim, selected.extras, descent))
            _write(every, targets, selected.extras, wrote)
            made += [target.finish(tool, selected, notes) for target in targets]
        except BaseException:
            for target in targets:
                target.writer.close()
            raise
    return made


def _rows(every: Every, aim: Aim) -> int:
    return sum(int(each.rows[taken].sum()) for each, taken in zip(every.episodes, aim.taken, strict=True))


def _write(every: Every, targets: Sequence[_Target], extras: Sequence[str], wrote: Callable[[int], None]) -> None:
    streams = [
        each.chunks(extras, _wanted(episodes, [target.aim.taken[number] for target in targets]))
        for number, (each, episodes) in enumerate(zip(every.streams, every.episodes, strict=True))
    ]
    for found in mixed(streams, lambda part, key: _twice(every.streams, every.parts[int(part)], int(key))):
        of = np.empty(len(found.stream), np.int64)
        number = found.chunk.arrays[EPISODE]
        for stream, episodes in enumerate(every.episodes):
            own = np.flatnonzero(found.stream == stream)
            of[own] = np.searchsorted(episodes.number, number[own])
        wrote(sum(target.add(found, of) for target in targets))


def _wanted(episodes: EpisodesThere, taken: Sequence[Ints]) -> Ints:
    """Return where the rows of episodes begin and end, in runs [n, 2] that rise and lie apart."""
    own = np.concatenate(taken)
    own = own[np.argsort(episodes.first[own])]
    first, end = episodes.first[own], np.maximum.accumulate(episodes.last[own] + 1)
    begins = np.flatnonzero(np.append(True, first[1:] > end[:-1])[: len(own)])
    return np.column_stack([first[begins], end[np.append(begins[1:], len(own))[: len(begins)] - 1]])


def _twice(streams: Sequence[RowsOnDisk], which: MadeOf, key: int) -> str:
    name = f"run {which.run_id} ({which.directory})" + (f", shard {which.shard}" if which.shard >= 0 else "")
    having = [each.where for each in streams if identity(which) in map(identity, each.parts)]
    where = ", ".join(dict.fromkeys(having))
    return (
        f"runs: the row {key} of {name} is in several of {where}: they are copies or parts of one run that have it in "
        f"common. Leave one of them out{OTHERS}"
    )


def _selected(every: Every) -> Selected:
    return selection_of([each.state for each in every.streams], [each.extras for each in every.streams])


def dry(every: Every, aim: Aim, directory: str) -> Made:
    """Return what a new buffer would be."""
    taken = list(zip(every.streams, every.episodes, aim.taken, strict=True))
    selected, places = _selected(every), every.places(aim.taken)
    return Made(
        directory=directory,
        kind=REPLAY if every.items is None else PIPELINE,
        of_rows=every.items is not None,
        step=max(each.stored.manifest.step for each in every.sources),
        units=len(places if every.items is None else np.unique(every.items.of[places])),
        rows=int(sum(episodes.rows[own].sum() for _, episodes, own in taken)),
        bytes=sum(
            stream.bytes * int(episodes.rows[own].sum()) // max(1, stream.size) for stream, episodes, own in taken
        ),
        left_out=every.left_out | selected.left_out,
        made_of=every.parts,
    )


def shares_of(total: int, weights: Sequence[int]) -> list[int]:
    """Return whole numbers whose sum is ``total``, in proportion to weights; what is left over goes to the first."""
    whole = sum(weights)
    if not whole:
        return [total if number == 0 else 0 for number in range(len(weights))]
    found = [total * weight // whole for weight in weights]
    found[0] += total - sum(found)
    return found


def limiter_of(states: Sequence[BufferState]) -> dict[str, int]:
    """Return the counts of several buffers together."""
    if not any(state.limiter for state in states):
        return {}
    return {name: sum(state.limiter.get(name, 0) for state in states) for name in ("added", "sampled")}


def check_count(option: str, value: object, least: int) -> None:
    """Raises:
    ConfigError: it is no whole number from ``least`` on.
    """
    if value.__class__ is not int or value < least:
        raise ConfigError.of(option, value, f"a whole number from {least} on is needed")
