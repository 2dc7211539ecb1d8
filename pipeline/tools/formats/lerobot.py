"""LeRobot's datasets, by ``pyarrow`` (extra ``tools``): ``OUT`` is one of version 3.0, which
``LeRobotDataset("any/name", root="OUT")`` opens; what LeRobot wrote is read, of version 2 too.

What each column is called there, see :mod:`~pipeline.tools.formats.lerobot_places`; what files there are, see
:mod:`~pipeline.tools.formats.lerobot_out`. A frame has one observation, and the last one of an episode has none after
it: next observations that are not those of the frame that follows lie beside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from pipeline.errors import Damaged
from pipeline.tools.formats.arrow_rows import arrow_module, held, rows_of
from pipeline.tools.formats.extras import needed
from pipeline.tools.formats.folder import OutFolder, bytes_of_parts, checked_parts, is_described, read_described
from pipeline.tools.formats.images import image_module
from pipeline.tools.formats.lerobot_in import INFO, foreign_dataset, images_of
from pipeline.tools.formats.lerobot_out import OWN, Writing
from pipeline.tools.formats.lerobot_places import BESIDE, IMAGE_FIRST, NEXT, NUMBERS, Place, places_of, twin_of
from pipeline.tools.formats.parquet import tables_of
from pipeline.tools.interchange.by_episode import episodes
from pipeline.tools.interchange.by_row import ROW, in_order, numbered
from pipeline.tools.interchange.columns import stored_of
from pipeline.tools.interchange.streams import MARK_DTYPES, Rows, Stream, Transitions, joined

NAME = "lerobot"
CONTENTS = ("transitions",)
_PLACES = "places"


def recognises(path: str) -> bool:
    """Whether a dataset of LeRobot lies there."""
    return os.path.isfile(os.path.join(path, INFO))


def told(stream: Stream) -> list[str]:
    """Return what LeRobot cannot hold of a stream, for people."""
    assert isinstance(stream, Transitions)
    places = places_of(stream.schema)
    beside = [str(stream.schema.column(place.column)) for place in places if place.how == BESIDE]
    if not beside:
        return []
    return [f"LeRobot cannot hold {', '.join(beside)}: in meta/forebay, for an import alone"]


def write(stream: Stream, out: OutFolder) -> None:
    """Write transitions.

    Raises:
        ConfigError: ``pyarrow`` or ``pillow`` is not installed, or a task has no number that LeRobot knows.
    """
    assert isinstance(stream, Transitions)
    places = places_of(stream.schema)
    pa, pq = arrow_module(NAME), needed("pyarrow.parquet", NAME, "tools")
    writing = Writing(pa, pq, _pillow(places), stream, places, out)
    out.described.details[_PLACES] = msgspec.to_builtins(places)
    for rows in episodes(numbered(stream), out.directory):
        writing.add(rows)
    writing.finish()


def _pillow(places: list[Place]) -> Any:
    images = any(place.how not in (NUMBERS, NEXT, BESIDE) for place in places)
    return image_module(NAME) if images else None


def read(path: str) -> Stream:
    """Return the transitions in an export, or in anybody's dataset.

    Raises:
        ConfigError: ``pyarrow`` is not installed, or ``pillow`` where there are images; it has videos, or is of a
            version that is not read.
        Damaged: it is no such dataset.
    """
    pa, pq = arrow_module(NAME), needed("pyarrow.parquet", NAME, "tools")
    if not is_described(path):
        return foreign_dataset(pa, pq, path)
    described = read_described(path, NAME)
    try:
        places = msgspec.convert(described.details[_PLACES], list[Place])
    except (msgspec.MsgspecError, LookupError) as error:
        raise Damaged(f"{path}: what is said of its columns cannot be ({error})") from None
    if [place.column for place in places] != [column.name for column in described.schema.columns]:
        raise Damaged(f"{path}: the places of its columns are those of others")
    stream = Transitions(described.schema, tuple(described.marks), described.about, lambda: iter(()))
    pillow = _pillow(places)

    def batches() -> Iterator[Rows]:
        parts: dict[str, list[str]] = {"data": [], "rows": [], "next": []}
        for file, info in checked_parts(path, described):
            kind = "data" if info.path.startswith("data/") else os.path.basename(info.path).partition("-")[0]
            if kind in parts:
                parts[kind].append(file)
        feeds = {kind: _Feed(pa, pq, files) for kind, files in parts.items()}
        reading = _Reading(pa, pillow, stream, places, path)
        return in_order(_followed(reading.rows(feeds), places, path), described.count, path)

    return stream._replace(batches=batches, nbytes=bytes_of_parts(described), total=described.count)


class _Feed:
    """Gives the rows of some files, as many as are asked for."""

    def __init__(self, pa: Any, pq: Any, files: list[str]) -> None:
        self._pa, self.tables = pa, (table for file in files for table, _ in tables_of(pa, pq, file))
        self._held: Any = None

    def take(self, count: int) -> Any:
        """Return so many rows; None: there are not so many."""
        held = [] if self._held is None else [self._held]
        have = sum(len(table) for table in held)
        while have < count or not held:
            table = next(self.tables, None)
            if table is None:
                return None
            held.append(table)
            have += len(table)
        whole = self._pa.concat_tables(held)
        self._held = whole.slice(count)
        return whole.slice(0, count)


class _Reading:
    """Reads frames and what lies beside them."""

    def __init__(self, pa: Any, pillow: Any, stream: Transitions, places: list[Place], path: str) -> None:
        self._pa, self._pillow, self._stream, self._places, self._path = pa, pillow, stream, places, path
        self._nexts = [place.column for place in places if place.how == NEXT]

    def rows(self, feeds: dict[str, _Feed]) -> Iterator[Rows]:
        """Yield the rows with their marks, and those of ``ROW`` and ``OWN``; next observations are there where they
        are the row's own."""
        for data in feeds["data"].tables:
            beside = feeds["rows"].take(len(data))
            if beside is None:
                raise Damaged(f"{self._path}: meta/forebay has fewer rows than data has frames")
            try:
                yield self._batch(data, beside, feeds["next"])
            except (KeyError, ValueError, TypeError, self._pa.ArrowException) as error:
                raise Damaged(f"{self._path}: no frames of these columns ({error})") from None

    def _batch(self, data: Any, beside: Any, nexts: _Feed) -> Rows:
        count, schema = len(data), self._stream.schema
        marks = {name: _numbers(beside.column(name)) for name in (*self._stream.marks, ROW)}
        marks = {name: array.astype(MARK_DTYPES.get(name, np.int64), copy=False) for name, array in marks.items()}
        columns: dict[str, np.ndarray] = {}
        for place in self._places:
            if place.how == BESIDE:
                columns |= self._plain(beside, [place.column])
            elif place.how != NEXT:
                columns[place.column] = self._feature(data, place)
        if self._nexts:
            own = marks[OWN] = _numbers(beside.column(OWN)).astype(bool)
            table = nexts.take(int(own.sum())) if own.any() else None
            if own.any() and table is None:
                raise ValueError("next observations are missing")
            found = {} if table is None else self._plain(table, self._nexts)
            for name in self._nexts:
                column = schema.column(name)
                columns[name] = np.zeros((count, *column.shape), column.bits)
                if name in found:
                    columns[name][own] = found[name]
        return Rows({column.name: columns[column.name] for column in schema.columns}, marks)

    def _plain(self, table: Any, names: list[str]) -> dict[str, np.ndarray]:
        chosen = type(self._stream.schema)(tuple(self._stream.schema.column(name) for name in names))
        return rows_of(self._pa, table, self._stream._replace(schema=chosen, marks=()), self._path).columns

    def _feature(self, data: Any, place: Place) -> np.ndarray:
        column, array = self._stream.schema.column(place.column), data.column(place.feature).combine_chunks()
        if place.how != NUMBERS:
            first, *size = column.shape
            shape = (*size, first) if place.how == IMAGE_FIRST else column.shape
            images = images_of(self._pillow, array, shape, f"{self._path}, {place.feature}")
            if images.dtype != column.bits:
                raise ValueError(f"{column} is {images.dtype}")
            return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if place.how == IMAGE_FIRST else images
        for _ in range(len(column.shape)):
            array = array.flatten() if hasattr(array, "flatten") and hasattr(array.type, "value_type") else array
        numbers = held(stored_of(column.dtype), _numbers(array), column.bits)
        return numbers.reshape(len(data), *column.shape)


def _followed(batches: Iterator[Rows], places: list[Place], path: str) -> Iterator[Rows]:
    """Yield rows with their next observations: where a row has none of its own, that of the row after it."""
    nexts = [place.column for place in places if place.how == NEXT]
    if not nexts:
        yield from batches
        return
    tail: Rows | None = None
    for batch in batches:
        rows = batch if tail is None else joined([tail, batch])
        shared = np.flatnonzero(~rows.marks[OWN])
        waits = len(rows) > 0 and not rows.marks[OWN][-1]
        for name in nexts:
            led = shared[: len(shared) - waits]
            rows.columns[name][led] = rows.columns[twin_of(name)][led + 1]
        tail = rows.part(slice(len(rows) - 1, None)) if waits else None
        ready = rows.part(slice(0, len(rows) - waits))
        yield Rows(ready.columns, {name: array for name, array in ready.marks.items() if name != OWN})
    if tail is not None:
        raise Damaged(f"{path}: the last frame has no next observation")


def _numbers(array: Any) -> np.ndarray:
    array = array.combine_chunks() if hasattr(array, "combine_chunks") else array
    if array.null_count:
        raise ValueError("values are missing")
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found
