"""Reads datasets that LeRobot wrote, version 3.0 and the versions 2 before it: ``meta/info.json`` says what features
there are, ``data/*/*.parquet`` has the frames, and pictures that are videos lie in :mod:`files of their own
<pipeline.tools.formats.lerobot_videos>`."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from math import prod
from typing import Any

import msgspec
import numpy as np

from pipeline.errors import ConfigError, Damaged
from pipeline.store.files import open_plain
from pipeline.tools.formats.arrow_rows import BATCH_BYTES, foreign_table
from pipeline.tools.formats.images import image_module, pixels_of
from pipeline.tools.formats.lerobot_places import column_of, is_single
from pipeline.tools.formats.lerobot_videos import (
    ONE_EACH,
    SEVERAL,
    Cameras,
    PartOf,
    parts_of_each,
    parts_of_several,
    sizes_of,
    told_of_episodes,
)
from pipeline.tools.formats.parquet import tables_of
from pipeline.tools.formats.table_rows import foreign_rows
from pipeline.tools.formats.videos import video_module
from pipeline.tools.interchange.streams import EPISODE, PLACE, About, Transitions

NAME = "lerobot"
INFO = os.path.join("meta", "info.json")
_VERSIONS = ("v2.", "v3.")
_SEVERAL = "v3."
_MARKS = {"episode_index": EPISODE, "frame_index": PLACE}
_NO_NEXT = "LeRobot keeps no observation after the last frame of an episode: there is no next_obs"
_SHOWN = 5


class _Info(msgspec.Struct, frozen=True):
    """What is needed of ``meta/info.json``."""

    codebase_version: str
    fps: float
    total_frames: int
    features: dict[str, dict[str, Any]]
    total_episodes: int = 0
    chunks_size: int = 1000
    """Episodes in a folder, of versions 2."""
    video_path: str | None = None

    def shapes(self, dtype: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the features of a dtype."""
        return {name: tuple(each["shape"]) for name, each in self.features.items() if each["dtype"] == dtype}


Pictures = Mapping[str, Callable[[Any, str], np.ndarray]]
"""By feature: what returns its pictures at the rows of a table that lies somewhere."""


def foreign_dataset(pa: Any, pq: Any, path: str) -> Transitions:
    """Return the frames of a dataset as transitions.

    Raises:
        ConfigError: it is of a version that is not read, or ``pillow`` is missing, or ``av`` where there are videos.
        Damaged: a file is missing or no such.
    """
    info = _info(path)
    names = sorted(glob.glob(os.path.join(glob.escape(path), "data", "*", "*.parquet")))
    frames = sum(_frames(pa, pq, name) for name in names)
    if frames != info.total_frames:
        raise Damaged(f"{path}: data has {frames} frames in {len(names)} files, and {INFO} says {info.total_frames}")
    notes = [f"fps was {info.fps:g}", _NO_NEXT, *_depths(info), *_tasks(pa, pq, path)]
    images, videos = info.shapes("image"), info.shapes("video")
    pillow, av = image_module(NAME) if images else None, video_module(NAME) if videos else None
    parts = _parts(pa, pq, path, info, list(videos)) if videos else {}
    # A video's rows take no room in the table, and its pictures very much.
    most = max(1, BATCH_BYTES // max(1, sum(map(prod, [*images.values(), *videos.values()]))))

    def tables() -> Iterator[dict[str, Any]]:
        with closing(Cameras(av, videos, parts)) as cameras:
            pictures = {key: _decoding(pillow, key, shape) for key, shape in images.items()}
            pictures |= {key: partial(cameras.frames, key) for key in videos}
            for name in names:
                for table, where in tables_of(pa, pq, name):
                    for at in range(0, table.num_rows, most):
                        yield _table(pa, info, pictures, table.slice(at, most), where, notes)

    nbytes = sum(map(os.path.getsize, names)) + frames * sum(map(prod, videos.values()))
    return foreign_rows(tables, path, nbytes=nbytes, about=About(notes=notes))


def _parts(pa: Any, pq: Any, path: str, info: _Info, keys: list[str]) -> dict[str, PartOf]:
    """Return where the videos are."""
    if info.codebase_version.startswith(_SEVERAL):
        told = told_of_episodes(pa, pq, path, keys)
        return {key: parts_of_several(path, info.video_path or SEVERAL, key, told) for key in keys}
    episodes, chunk, template = info.total_episodes, info.chunks_size, info.video_path or ONE_EACH
    return {key: parts_of_each(path, template, key, episodes=episodes, chunk=chunk) for key in keys}


def _depths(info: _Info) -> list[str]:
    """Return a note of videos of depth, which LeRobot reads as pictures, too."""
    said = {name: each.get("info") or each.get("video_info") for name, each in info.features.items()}
    names = [name for name, each in said.items() if isinstance(each, dict) and each.get("video.is_depth_map")]
    return [f"{', '.join(names)}: said to be of depth; its 8-bit picture came along, as LeRobot gives it"] * bool(names)


def _info(path: str) -> _Info:
    where = os.path.join(path, INFO)
    try:
        with open_plain(where) as file:
            info = msgspec.json.decode(file.read(), type=_Info)
        if any(size < 0 for feature in info.features.values() for size in feature["shape"]):
            raise ValueError("a shape is negative")
        if info.chunks_size < 1 or not all(isinstance(feature["dtype"], str) for feature in info.features.values()):
            raise ValueError("a dtype is no text, or chunks_size is less than 1")
        for shape in info.shapes("video").values():
            sizes_of(shape)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no {INFO} in it, so it is no dataset of LeRobot", option="path") from None
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{where}: what it says of the dataset cannot be ({error})") from None
    if not info.codebase_version.startswith(_VERSIONS):
        raise ConfigError(
            f"{where}: is of version {info.codebase_version}; v2.0, v2.1 and v3.0 are read. Convert it with LeRobot",
            option="path",
        )
    return info


def _frames(pa: Any, pq: Any, path: str) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path}: cannot be read as Parquet ({error})") from error


def _tasks(pa: Any, pq: Any, path: str) -> list[str]:
    """Return a note of the texts of tasks, which no column holds."""
    names = os.path.join(path, "meta", "tasks.parquet"), os.path.join(path, "meta", "tasks.jsonl")
    try:
        if os.path.isfile(names[0]):
            rows = pq.read_table(names[0]).to_pylist()
            texts = [next((str(text) for key, text in row.items() if key != "task_index"), "") for row in rows]
        elif os.path.isfile(names[1]):
            with open_plain(names[1]) as file:
                rows = msgspec.json.Decoder(dict[str, Any]).decode_lines(file.read())
            texts = [str(row["task"]) for row in rows]
        else:
            return []
        numbers = [int(row["task_index"]) for row in rows]
    except (pa.ArrowException, OSError, msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: the tasks in its meta cannot be read ({error})") from None
    shown = ", ".join(f"{number} {text!r}" for number, text in list(zip(numbers, texts, strict=True))[:_SHOWN])
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return [f"task_index is the number of a text, which did not come along: {shown}{more}"]


def _table(pa: Any, info: _Info, pictures: Pictures, table: Any, where: str, notes: list[str]) -> dict[str, Any]:
    """Return frames as columns and marks."""
    missing = sorted(info.features.keys() - info.shapes("video").keys() - set(table.column_names))
    if missing:
        raise Damaged(f"{where}: there is no column {missing[0]}, which {INFO} names")
    found = {name: pictures_at(table, where) for name, pictures_at in pictures.items()}
    plain = table.select([name for name in table.column_names if name not in pictures and name != "index"])
    rows: dict[str, Any] = {}
    for name, array in {**foreign_table(pa, plain, notes), **found}.items():
        if name in info.features and name not in pictures:
            array = _shaped(name, array, tuple(info.features[name]["shape"]), where)
        new = _MARKS.get(name, column_of(name))
        if new in rows:
            raise ConfigError(f"{where}: two features would be called {new}", option="path")
        rows[new] = array
    return rows


def _decoding(pillow: Any, key: str, shape: tuple[int, ...]) -> Callable[[Any, str], np.ndarray]:
    """Return what decodes the images of a column."""
    return lambda table, where: images_of(pillow, table.column(key).combine_chunks(), shape, where)


def _shaped(name: str, array: np.ndarray, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Return numbers in the shape that the dataset tells; one number that is named as such is no list of one."""
    if shape == (1,) and is_single(name):
        shape = ()
    try:
        return array.reshape(len(array), *shape)
    except (ValueError, AttributeError):
        raise Damaged(f"{where}: column {name} has no {list(shape)} in a row, as {INFO} says") from None


def images_of(pillow: Any, array: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Return images [n, *shape] out of their files; where ``shape`` begins with the channels, they come first.

    Raises:
        Damaged: a file is missing, or no image of this shape.
    """
    found = []
    plain = getattr(array, "storage", array)
    at = plain.type.get_field_index("bytes") if hasattr(plain.type, "get_field_index") else -1
    for content in [None] if at < 0 else plain.flatten()[at].to_pylist():
        if not isinstance(content, bytes):
            raise Damaged(f"{where}: an image is missing, or lies in no file of the dataset's data")
        pixels = pixels_of(pillow, content, where)
        if pixels.shape != shape and pixels.ndim == 3 and pixels.transpose(2, 0, 1).shape == shape:
            pixels = pixels.transpose(2, 0, 1)
        if pixels.shape != shape and pixels.shape != tuple(size for size in shape if size != 1):
            raise Damaged(f"{where}: an image is {list(pixels.shape)}, where {list(shape)} is said")
        found.append(pixels.reshape(shape))
    return np.stack(found) if found else np.empty((0, *shape), np.uint8)
