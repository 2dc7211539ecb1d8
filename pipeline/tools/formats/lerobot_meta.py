"""The folder ``meta`` of a LeRobot dataset, version 3.0: what it consists of, its tasks, episodes and statistics."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import numpy as np

from pipeline.tools.formats.folder import OutFolder

CHUNK = 1000
"""Files in a folder."""


class Episodes(NamedTuple):
    """The episodes in their order."""

    lengths: list[int]
    file_of: list[int]
    """The number of the file that has it."""
    tasks: list[np.ndarray]
    """The numbers of the tasks of its frames."""


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
    stats: dict[str, Any],
    tasks: list[str],
    episodes: Episodes,
) -> None:
    """Write the files; ``tasks`` are texts, and a task's number is its place among them."""

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
    write_table("meta/episodes/chunk-000/file-000.parquet", _episodes(pa, episodes, tasks))
    write_json("meta/stats.json", stats)
    count = len(episodes.lengths)
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": count,
        "total_frames": sum(episodes.lengths),
        "total_tasks": len(tasks),
        "chunks_size": CHUNK,
        "data_files_size_in_mb": max(1, out.part_bytes >> 20),
        "video_files_size_in_mb": 200,
        "fps": out.fps,
        "splits": {"train": f"0:{count}"},
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


def _episodes(pa: Any, episodes: Episodes, tasks: list[str]) -> Any:
    lengths, file_of = np.array(episodes.lengths, np.int64), np.array(episodes.file_of, np.int64)
    stop, zeros = np.cumsum(lengths), np.zeros(len(lengths), np.int64)
    texts = [[tasks[number] for number in each.tolist()] for each in episodes.tasks]
    columns = {
        "episode_index": np.arange(len(lengths)),
        "tasks": pa.array(texts, pa.list_(pa.string())),
        "length": lengths,
        "data/chunk_index": file_of // CHUNK,
        "data/file_index": file_of % CHUNK,
        "dataset_from_index": stop - lengths,
        "dataset_to_index": stop,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    return pa.table(columns)
