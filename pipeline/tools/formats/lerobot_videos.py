"""The videos of a LeRobot dataset: which file has the frames of an episode, and from when on.

Version 3.0 has several episodes in a file, and ``meta/episodes`` says when each begins; the versions before have a file
of each episode and camera. A row's frame is the one that is shown at its ``timestamp``.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline.errors import Damaged
from pipeline.tools.formats.folder import is_inside
from pipeline.tools.formats.videos import TOLERANCE, Video

ONE_EACH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
"""Where a video is, by versions 2."""
SEVERAL = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""The same of version 3.0."""
CHANNELS = 3
_TOLD = ("chunk_index", "file_index", "from_timestamp")
_FIELDS = "video_key|episode_chunk|episode_index|chunk_index|file_index"
_TEMPLATE = re.compile(rf"(?:[^{{}}]|\{{(?:{_FIELDS})(?::0[1-9]d)?\}})+")

_Number = TypeVar("_Number", int, float)


class Part(NamedTuple):
    """The frames of an episode."""

    path: str
    """Of the file that has them."""
    begin: float
    """When the first of them is shown, in seconds of the file."""
    stop: float
    """When the next episode begins in it."""


PartOf = Callable[[int], Part]
"""Returns the part of an episode."""


def parts_of_each(path: str, template: str, key: str, *, episodes: int, chunk: int) -> PartOf:
    """Return where the episodes are of which each has a file of its own.

    Raises:
        Damaged: a file is missing, or would be elsewhere.
    """

    def part_of(episode: int) -> Part:
        if not 0 <= episode < episodes:
            raise Damaged(f"{path}: data has episode {episode}, and meta/info.json says that there are {episodes}")
        return Part(_file(path, template, key, episode_chunk=episode // chunk, episode_index=episode), 0.0, np.inf)

    for episode in range(episodes):
        _check(part_of(episode).path, key, episode)
    return part_of


def parts_of_several(path: str, template: str, key: str, told: Mapping[str, np.ndarray]) -> PartOf:
    """Return where the episodes are that share files, by what is told of them.

    Raises:
        Damaged: a file is missing, or would be elsewhere.
    """
    chunks, files, begins = (told[f"videos/{key}/{name}"] for name in _TOLD)
    stops = np.full(len(begins), np.inf)
    order = np.lexsort((begins, files, chunks))
    same = (np.diff(chunks[order]) == 0) & (np.diff(files[order]) == 0)
    stops[order[:-1][same]] = begins[order[1:][same]]
    rows = {int(episode): row for row, episode in enumerate(told["episode_index"].tolist())}

    def file_of(row: int) -> str:
        return _file(path, template, key, chunk_index=int(chunks[row]), file_index=int(files[row]))

    def part_of(episode: int) -> Part:
        row = rows.get(episode)
        if row is None:
            raise Damaged(f"{path}: data has episode {episode}, which is not in meta/episodes")
        return Part(file_of(row), float(begins[row]), float(stops[row]))

    firsts = order[np.flatnonzero(np.r_[True, ~same])] if len(order) else order
    for row in firsts.tolist():
        _check(file_of(row), key, int(told["episode_index"][row]))
    return part_of


def told_of_episodes(pa: Any, pq: Any, path: str, keys: list[str]) -> dict[str, np.ndarray]:
    """Return what ``meta/episodes`` tells of videos, a number of each episode.

    Raises:
        Damaged: it is missing, or tells no such thing.
    """
    names = sorted(glob.glob(os.path.join(glob.escape(path), "meta", "episodes", "*", "*.parquet")))
    columns = ["episode_index", *(f"videos/{key}/{name}" for key in keys for name in _TOLD)]
    where = os.path.join(path, "meta", "episodes")
    if not names:
        raise Damaged(f"{where}: is missing or empty, and says which video has which episode; fetch it too")
    try:
        tables = [_columns(pq, name, columns) for name in names]
        missing = [name for name in columns if any(_lacks(table, name) for table in tables)]
        whole = pa.concat_tables(tables, promote_options="default").combine_chunks()
        found = {
            name: whole.column(name).to_numpy().astype(np.float64 if name.endswith(_TOLD[2]) else np.int64)
            for name in columns
            if not missing
        }
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise Damaged(f"{where}: cannot be read as Parquet ({error})") from error
    if missing:
        raise Damaged(
            f"{where}: {missing[0]} is not told of every episode: its videos may not be written yet. Finish the "
            "recording with LeRobot, and import then"
        )
    return found


def _columns(pq: Any, path: str, names: list[str]) -> Any:
    with pq.ParquetFile(path) as file:
        return file.read(columns=[name for name in names if name in file.schema_arrow.names])


def _lacks(table: Any, name: str) -> bool:
    return name not in table.column_names or table.column(name).null_count > 0


def _file(path: str, template: str, key: str, **fields: int) -> str:
    """Return the path of a file, which is inside the dataset."""
    where = os.path.join(path, "meta", "info.json")
    if not _TEMPLATE.fullmatch(template):
        raise Damaged(f"{where}: video_path is {template!r}, and only {_FIELDS.replace('|', ', ')} stand in braces")
    try:
        name = template.format(video_key=key, **fields)
    except LookupError as error:
        raise Damaged(f"{where}: video_path is {template!r}, and has {error} that this version does not") from None
    if not is_inside(name):
        raise Damaged(f"{where}: video_path gives {name!r}, which is not inside the folder")
    return os.path.join(path, *name.split("/"))


def _check(path: str, key: str, episode: int) -> None:
    if not os.path.isfile(path):
        raise Damaged(f"{path}: is missing, and has {key} of episode {episode}; fetch the folder of videos too")


class Cameras:
    """Reads the frames of some rows after others; one file of each camera is open at a time. Close it."""

    def __init__(self, av: Any, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, PartOf]) -> None:
        self._av, self._shapes, self._parts = av, shapes, parts
        self._open: dict[str, Video] = {}

    def frames(self, key: str, table: Any, where: str) -> np.ndarray:
        """Return the frames of a camera at the rows of a table, [n, *shape]; where its shape begins with the channels,
        they come first.

        Raises:
            Damaged: some are not there, or cannot be decoded.
        """
        shape = self._shapes[key]
        size, first = sizes_of(shape)
        found = np.empty((table.num_rows, *size, CHANNELS), np.uint8)
        episodes, numbers = (_numbers(table, name, int, where) for name in ("episode_index", "frame_index"))
        times = _numbers(table, "timestamp", float, where)
        part, of = Part("", 0.0, 0.0), None
        for at, (episode, number, seconds) in enumerate(zip(episodes, numbers, times, strict=True)):
            if of != episode:
                part, of = self._parts[key](episode), episode
            what = f"frame {number} of episode {episode}, {key},"
            shown = part.begin + seconds
            if shown >= part.stop - TOLERANCE:
                raise Damaged(
                    f"{part.path}: {what} would be at {shown:.4f} s, where the next episode has begun, at "
                    f"{part.stop:.4f} s; meta/episodes and data do not fit together"
                )
            found[at] = self._video(key, part.path).frame_at(shown, size, what)
        return np.ascontiguousarray(found.transpose(0, 3, 1, 2)) if first else found

    def _video(self, key: str, path: str) -> Video:
        video = self._open.get(key)
        if video is None or video.path != path:
            if video is not None:
                video.close()
            video = self._open[key] = Video(self._av, path)
        return video

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


def sizes_of(shape: tuple[int, ...]) -> tuple[tuple[int, int], bool]:
    """Return height and width of a shape, and whether the channels are its first dimension.

    Raises:
        ValueError: it is not that of pictures in colour.
    """
    if len(shape) == CHANNELS and shape[2] == CHANNELS:
        return (shape[0], shape[1]), False
    if len(shape) == CHANNELS and shape[0] == CHANNELS:
        return (shape[1], shape[2]), True
    raise ValueError(f"a video is {list(shape)}, where [height, width, 3] is needed")


def _numbers(table: Any, name: str, kind: type[_Number], where: str) -> list[_Number]:
    if name not in table.column_names or table.column(name).null_count:
        raise Damaged(f"{where}: there is no column {name}, or values are missing, so no frame is found in a video")
    try:
        return [kind(value) for value in table.column(name).to_pylist()]
    except (TypeError, ValueError, OverflowError) as error:
        raise Damaged(f"{where}: column {name} has no number in each row ({error})") from None
