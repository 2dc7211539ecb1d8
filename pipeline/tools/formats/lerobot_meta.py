"""The folder ``meta`` of a LeRobot dataset, version 3.0: what it consists of, its tasks, episodes and statistics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pipeline.tools.formats.folder import OutFolder
from pipeline.tools.formats.lerobot_arrow import lists
from pipeline.tools.formats.lerobot_stats import QUANTILES, Stats, Totals

CHUNK = 1000
"""Files in a folder."""
_MOST_TIMES = 8  # that episodes are written into one file
_KINDS = ("min", "max", "mean", "std")


class Episode(NamedTuple):
    """An episode."""

    length: int
    file: int
    """The number of the file that has it."""
    tasks: np.ndarray
    """The numbers of the tasks of its frames."""
    stats: dict[str, Stats]
    """By feature."""


def path_in(folder: str, name: str) -> str:
    """Return the path of a file of the dataset, whose folder is there then."""
    path = os.path.join(folder, *name.split("/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def write_meta(
    pa: Any,
    pq: Any,
    out: OutFolder,
    *,
    features: dict[str, dict[str, Any]],
    totals: dict[str, Totals],
    tasks: list[str],
    episodes: EpisodesFiles,
) -> None:
    """Write the files, and take in ``episodes``, which is closed; a task's number is the place of its text."""

    def write_table(name: str, table: Any) -> None:
        path = path_in(out.directory, name)
        pq.write_table(table, path)
        out.ended(path, 0)

    def write_json(name: str, content: Any) -> None:
        path = path_in(out.directory, name)
        with open(path, "x", encoding="utf-8") as file:
            json.dump(content, file, indent=4)  # with NaN and Infinity, as LeRobot writes and reads them
        out.ended(path, 0)

    write_table("meta/tasks.parquet", _tasks(pa, tasks))
    for path in episodes.paths:
        out.ended(path, 0)
    stats = {name: total.told(stats_shape(features[name])) for name, total in totals.items()}
    write_json("meta/stats.json", {name: told for name, told in stats.items() if told})
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": episodes.count,
        "total_frames": episodes.frames,
        "total_tasks": len(tasks),
        "chunks_size": CHUNK,
        "data_files_size_in_mb": max(1, out.part_bytes >> 20),
        "video_files_size_in_mb": 200,
        "fps": out.fps,
        "splits": {"train": f"0:{episodes.count}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }
    write_json("meta/info.json", info)


def _tasks(pa: Any, tasks: list[str]) -> Any:
    index = pa.array(tasks, pa.string())
    table = pa.table({"task_index": np.arange(len(tasks)), "__index_level_0__": index})
    # What pandas writes for a table that is indexed by text, which is how LeRobot reads this one.
    column = {"numpy_type": "int64", "metadata": None, "name": "task_index", "field_name": "task_index"}
    named = {"numpy_type": "object", "metadata": None, "name": None, "field_name": "__index_level_0__"}
    said = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [],
        "columns": [{**column, "pandas_type": "int64"}, {**named, "pandas_type": "unicode"}],
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(said)})


class EpisodesFiles:
    """Writes ``meta/episodes``, some episodes at a time, into one file after the other: whoever writes one holds what
    there is of each time."""

    def __init__(self, pa: Any, pq: Any, directory: str, features: dict[str, dict[str, Any]]) -> None:
        self._pa, self._pq, self._directory, self._features = pa, pq, directory, features
        self._writer: Any = None
        self._times = 0  # that some were written into the newest file
        self.paths: list[str] = []
        """The files."""
        self.count = self.frames = 0

    def write(self, episodes: list[Episode], text: Callable[[int], str]) -> None:
        """Write the next ones; ``text`` gives that of a task."""
        pa = self._pa
        lengths = np.array([each.length for each in episodes], np.int64)
        file_of = np.array([each.file for each in episodes], np.int64)
        stop = self.frames + np.cumsum(lengths)
        columns: dict[str, Any] = {
            "episode_index": np.arange(self.count, self.count + len(episodes)),
            "tasks": pa.array([[text(at) for at in each.tasks.tolist()] for each in episodes], pa.list_(pa.string())),
            "length": lengths,
            "data/chunk_index": file_of // CHUNK,
            "data/file_index": file_of % CHUNK,
            "dataset_from_index": stop - lengths,
            "dataset_to_index": stop,
        }
        for name, feature in self._features.items():
            shape = stats_shape(feature)
            for kind in (*_KINDS, *QUANTILES):
                values = [each.stats[name][kind].reshape(-1) for each in episodes]
                flat = pa.array(np.concatenate(values) if values else np.empty(0))
                columns[f"stats/{name}/{kind}"] = lists(pa, flat.cast(self._type(kind, feature)), len(values), shape)
            columns[f"stats/{name}/count"] = pa.array([[length] for length in lengths.tolist()], pa.list_(pa.int64()))
        chunk, file = divmod(len(self.paths) - (self._writer is not None), CHUNK)
        for name, number in (("chunk", chunk), ("file", file)):
            columns[f"meta/episodes/{name}_index"] = np.full(len(episodes), number)
        table = pa.table(columns)
        if self._writer is None:
            name = f"meta/episodes/chunk-{chunk:03d}/file-{file:03d}.parquet"
            self.paths.append(path_in(self._directory, name))
            self._writer = self._pq.ParquetWriter(self.paths[-1], table.schema)
        self._writer.write_table(table)
        self._times += 1
        if self._times == _MOST_TIMES:
            self._writer.close()
            self._writer, self._times = None, 0
        self.count, self.frames = self.count + len(episodes), self.frames + int(lengths.sum())

    def _type(self, kind: str, feature: dict[str, Any]) -> Any:
        """Return the type that LeRobot gives the numbers of a statistic: it reads these files together with those that
        it adds."""
        pa, dtype = self._pa, feature["dtype"]
        whole = pa.bool_() if dtype == "bool" else pa.int64() if "int" in dtype else pa.float64()
        return whole if kind in ("min", "max") else pa.float64()

    def close(self) -> None:
        """Close the file; one of no episodes is written if there were none."""
        if not self.count:
            self.write([], str)
        if self._writer is not None:
            self._writer.close()


def stats_shape(feature: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape in which LeRobot has the statistics of a feature."""
    return (3, 1, 1) if feature["dtype"] == "image" else (feature["shape"][-1],)
