"""Writes a dataset of LeRobot, version 3.0: ``data`` and ``meta`` as LeRobot has them, and ``meta/forebay``, which it
does not look at.

Files of one number belong together. ``data/chunk-000/file-000.parquet`` has the frames, an episode in one file;
``meta/forebay/rows-000000.parquet`` has of each frame its marks, the columns that LeRobot cannot hold, and whether its
next observation is another one than the frame after it shows; ``meta/forebay/next-000000.parquet`` has these.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.errors import ConfigError
from pipeline.tools.formats.arrow_rows import carried, schema_of, table_bytes, table_of
from pipeline.tools.formats.folder import OutFolder
from pipeline.tools.formats.images import png_of
from pipeline.tools.formats.lerobot_arrow import data_schema, nested_lists
from pipeline.tools.formats.lerobot_meta import CHUNK, Episode, EpisodesFiles, path_in, write_meta
from pipeline.tools.formats.lerobot_places import (
    BESIDE,
    DONE,
    IMAGE_FIRST,
    NEXT,
    NUMBERS,
    Place,
    features_of,
    twin_of,
)
from pipeline.tools.formats.lerobot_stats import Stats, Totals, image_stats_of, stats_of
from pipeline.tools.interchange.by_row import ROW
from pipeline.tools.interchange.columns import stored_of
from pipeline.tools.interchange.streams import END, Rows, Transitions, joined

FRAME, OF, INDEX, OWN = "#frame", "#of", "#index", "#own-next"
"""Of each row: its frame in its episode, its episode in the dataset, its frame in that, and whether its next
observation is its own."""
_HELD_BYTES = 2 << 20  # of rows: what is made of them, with the statistics of their episodes, is many times as much
_WAITING_BYTES = 16 << 20  # of statistics of episodes: each time that some are written takes memory to the end
_ARRAY = 128  # bytes that an array takes beside what is in it
_MOST_TASKS = 100_000
_ENDED = (1, 2)


class Writing:
    """Writes episodes, and then what is known of all."""

    def __init__(self, pa: Any, pq: Any, pillow: Any, stream: Transitions, places: list[Place], out: OutFolder) -> None:
        self._pa, self._pq, self._pillow, self._stream, self._places, self._out = pa, pq, pillow, stream, places, out
        self._features = features_of(stream.schema, places)
        self._of = {place.feature: place for place in places if place.feature}
        columns = stream.schema.columns
        how = {place.column: place.how for place in places}
        self._beside = stream._replace(schema=Schema(tuple(each for each in columns if how[each.name] == BESIDE)))
        nexts = Schema(tuple(each for each in columns if how[each.name] == NEXT))
        self._next = stream._replace(schema=nexts, marks=()) if nexts.columns else None
        self._most = min(_HELD_BYTES, out.part_bytes)
        self._held: list[Rows] = []
        self._held_bytes = self._frames = self._tasks = self._waiting_bytes = 0
        self._waiting: list[Episode] = []
        self._episodes = EpisodesFiles(pa, pq, out.directory, self._features)
        self._files: list[_File] = []
        self._closed = 0
        self._totals = {name: Totals() for name in self._features}

    def add(self, rows: Rows) -> None:
        """Take in an episode."""
        count = len(rows)
        number = self._episodes.count + len(self._waiting)
        marks = {FRAME: np.arange(count), OF: np.full(count, number), INDEX: np.arange(count) + self._frames}
        if self._next is not None:
            marks[OWN] = self._own(rows, self._next.schema.columns)
        rows = Rows(rows.columns, {**rows.marks, **marks})
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        self._frames += count
        tasks = self._task(rows)
        self._tasks = max(self._tasks, int(tasks[-1]) + 1)
        stats = self._stats(rows)
        self._waiting.append(Episode(count, self._closed, tasks, stats))
        self._waiting_bytes += sum(array.nbytes + _ARRAY for each in stats.values() for array in each.values())
        if self._waiting_bytes >= _WAITING_BYTES:
            self._write_episodes()
        if self._held_bytes >= self._most:
            self._flush()

    def finish(self) -> None:
        """Write what is held, and the metadata."""
        self._flush()
        self._close()
        self._write_episodes()
        self._episodes.close()
        write_meta(
            self._pa,
            self._pq,
            self._out,
            features=self._features,
            totals=self._totals,
            tasks=[self._text(number) for number in range(max(1, self._tasks))],
            episodes=self._episodes,
        )

    @staticmethod
    def _own(rows: Rows, columns: Sequence[Column]) -> np.ndarray:
        """Return of which rows of an episode the next observation is not that of the row after it."""
        own = np.zeros(len(rows), bool)
        for column in columns:
            if column.nbytes and len(rows) > 1:
                here = _bytes(rows.columns[column.name][:-1])
                own[:-1] |= (here != _bytes(rows.columns[twin_of(column.name)][1:])).any(axis=1)
        own[-1] = True
        return own

    def _task(self, rows: Rows) -> np.ndarray:
        if "task_index" not in self._of:
            return np.zeros(1, np.int64)
        tasks = np.unique(rows.columns["task_index"])
        if tasks[0] < 0 or tasks[-1] >= _MOST_TASKS:
            raise ConfigError(
                f"lerobot: the column task_index has {tasks[0]} to {tasks[-1]}, where a task is from 0 to "
                f"{_MOST_TASKS - 1}; it is the number of a text in LeRobot: leave the column out, or number tasks anew",
                option="to",
            )
        return tasks

    def _text(self, task: int) -> str:
        return f"task {task}" if "task_index" in self._of else "forebay"

    def _stats(self, rows: Rows) -> dict[str, Stats]:
        """Return the statistics of an episode, and add them to those of all."""
        found = {name: stats_of(values[:, None]) for name, values in self._frame(rows).items()}
        for name, place in self._of.items():
            array = rows.columns[place.column]
            if place.how != NUMBERS:
                found[name] = image_stats_of(_channels_last(place, array))
            else:
                column = self._stream.schema.column(place.column)
                values = carried(stored_of(column.dtype), array)
                found[name] = stats_of(values.reshape(-1, self._features[name]["shape"][-1]))
        for name, stats in found.items():
            self._totals[name].add(stats, len(rows))
        return found

    def _flush(self) -> None:
        if not self._held:
            return
        rows = joined(self._held)
        self._held, self._held_bytes = [], 0
        if self._closed == len(self._files):
            self._files.append(_File(self, self._closed))
        step = max(1, self._most * len(rows) // max(1, table_bytes(rows)))
        for begin in range(0, len(rows), step):
            part = rows.part(slice(begin, begin + step))
            self._files[-1].write(self._data(part), self._rows(part), self._nexts(part))
            self._out.progress(part.nbytes)
        if self._files[-1].size >= self._out.part_bytes:
            self._close()

    def _write_episodes(self) -> None:
        if self._waiting:
            self._episodes.write(self._waiting, self._text)
        self._waiting, self._waiting_bytes = [], 0

    def _close(self) -> None:
        if self._closed < len(self._files):
            self._files[-1].close()
            self._closed += 1

    def _data(self, rows: Rows) -> Any:
        arrays, pa = {}, self._pa
        for name, values in self._frame(rows).items():
            arrays[name] = pa.array(values)
        for name, place in self._of.items():
            column = self._stream.schema.column(place.column)
            arrays[name] = self._feature(name, place, column, rows.columns[place.column])
        schema = data_schema(pa, self._features)
        return pa.Table.from_arrays([arrays[field.name] for field in schema], schema=schema)

    def _frame(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the features that are no columns."""
        made = {
            "timestamp": (rows.marks[FRAME] / self._out.fps).astype(np.float32),
            "frame_index": rows.marks[FRAME],
            "episode_index": rows.marks[OF],
            "index": rows.marks[INDEX],
            "task_index": np.zeros(len(rows), np.int64),
            DONE: np.isin(rows.marks[END], _ENDED),
        }
        return {name: values for name, values in made.items() if name not in self._of}

    def _feature(self, name: str, place: Place, column: Column, array: np.ndarray) -> Any:
        if place.how != NUMBERS:
            images = [png_of(self._pillow, image) for image in _channels_last(place, array)]
            files, paths = self._pa.array(images, self._pa.binary()), self._pa.nulls(len(images), self._pa.string())
            return self._pa.StructArray.from_arrays([files, paths], names=["bytes", "path"])
        values = self._pa.array(carried(stored_of(column.dtype), array))
        return nested_lists(self._pa, values, len(array), tuple(self._features[name]["shape"]))

    def _rows(self, rows: Rows) -> Any:
        schema = schema_of(self._pa, self._beside)
        table = table_of(self._pa, schema, self._beside, rows)
        for name in (ROW, OWN):
            if name in rows.marks:
                table = table.append_column(name, self._pa.array(rows.marks[name]))
        return table

    def _nexts(self, rows: Rows) -> Any:
        if self._next is None:
            return None
        return table_of(self._pa, schema_of(self._pa, self._next), self._next, rows.part(rows.marks[OWN]))

    @property
    def folder(self) -> str:
        """Where all is written."""
        return self._out.directory

    def writer(self, path: str, schema: Any) -> Any:
        """Return what writes tables into a file."""
        texts = [field.name for field in schema if self._pa.types.is_string(field.type)]
        return self._pq.ParquetWriter(path, schema, use_dictionary=texts, compression="snappy")

    def ended(self, path: str, count: int) -> None:
        """Take in a file that is whole."""
        self._out.ended(path, count)


class _File:
    """The files of one number."""

    def __init__(self, writing: Writing, number: int) -> None:
        self._writing, self._count = writing, 0
        data = f"data/chunk-{number // CHUNK:03d}/file-{number % CHUNK:03d}.parquet"
        names = [data, *(f"meta/forebay/{name}-{number:06d}.parquet" for name in ("rows", "next"))]
        self._paths = [path_in(writing.folder, name) for name in names]
        self._writers: list[Any] = []

    @property
    def size(self) -> int:
        """Bytes of frames that were written."""
        return os.path.getsize(self._paths[0])

    def write(self, data: Any, *more: Any) -> None:
        """Write tables, one for each file that there is."""
        tables = [table for table in (data, *more) if table is not None]
        if not self._writers:
            self._writers = [
                self._writing.writer(path, table.schema) for path, table in zip(self._paths, tables, strict=False)
            ]
        for writer, table in zip(self._writers, tables, strict=True):
            writer.write_table(table)
        self._count += len(data)

    def close(self) -> None:
        """Close the files."""
        for number, (path, writer) in enumerate(zip(self._paths, self._writers, strict=False)):
            writer.close()
            self._writing.ended(path, 0 if number else self._count)
        self._writers.clear()  # which keep what they know of their files


def _channels_last(place: Place, images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 2, 3, 1) if place.how == IMAGE_FIRST else images


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of rows [n, ...] as [n, bytes]."""
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
