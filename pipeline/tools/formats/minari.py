"""Minari's datasets, by ``minari`` (extra ``tools``): ``OUT/data`` is one, which ``MinariDataset("OUT/data")`` opens.

An episode has one observation more than it has steps: ``obs`` and ``next_obs`` of a row become that of the step and of
the next one, so that they must agree inside an episode. ``action``, ``reward``, ``terminated`` and ``truncated`` have
their places; every other column and the marks lie in ``infos``, types that numpy does not know as their bits. Images
are written as they are, not as JPEG.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.finals import leaves
from pipeline.replay.flattening import nested
from pipeline.tools.formats.extras import needed
from pipeline.tools.formats.folder import OutFolder, bytes_of_parts, checked_parts, is_described, read_described
from pipeline.tools.formats.table_rows import foreign_rows
from pipeline.tools.interchange.by_episode import episodes
from pipeline.tools.interchange.streams import (
    EPISODE,
    KEY,
    MARK_DTYPES,
    About,
    Rows,
    Stream,
    Transitions,
)

NAME = "minari"
CONTENTS = ("transitions",)
_DATA = "data"
_OBS, _NEXT, _ACTION = "obs", "next_obs", "action"
_PLACES = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}
_INFOS = "forebay"


def recognises(path: str) -> bool:
    """Whether a dataset of Minari lies there: a folder ``data`` with it, or that itself."""
    return any(os.path.isfile(os.path.join(path, *inner, "metadata.json")) for inner in ((_DATA,), ())) and (
        _storage_path(path) is not None
    )


def _storage_path(path: str) -> str | None:
    for folder in (os.path.join(path, _DATA), path):
        if os.path.isfile(os.path.join(folder, "main_data.hdf5")):
            return folder
    return None


def _storage_module() -> Any:
    """Return Minari's module of storages, with what its HDF5 needs."""
    for package in ("h5py", "PIL"):
        needed(package, NAME, "tools")
    return needed("minari.dataset.minari_storage", NAME, "tools")


def _of(group: str, names: list[str]) -> list[str]:
    return [name for name in names if name == group or name.startswith(f"{group}.")]


def write(stream: Stream, out: OutFolder) -> None:
    """Write transitions.

    Raises:
        ConfigError: Minari is not installed, or cannot hold the columns; or next observations are not those of the
            rows that follow.
    """
    storage_module = _storage_module()
    buffers = needed("minari.data_collector", NAME, "tools")
    version = needed("minari", NAME, "tools").__version__
    assert isinstance(stream, Transitions)
    names = [column.name for column in stream.schema.columns]
    _check(stream, names)
    folder = os.path.join(out.directory, _DATA)
    storage = storage_module.MinariStorage.new(
        folder,
        observation_space=_space(stream, _of(_OBS, names), _OBS),
        action_space=_space(stream, _of(_ACTION, names), _ACTION),
        data_format="hdf5",
        jpeg_encoding=False,
    )
    storage.update_metadata({"dataset_id": "forebay/export-v0", "minari_version": version})
    count, keys, straight = 0, -1, True
    for rows in episodes(stream, out.directory):
        key = rows.marks[KEY]
        straight &= bool((np.diff(key) == 1).all()) and keys in (-1, int(key[0]) - 1)
        keys = int(key[-1])
        storage.update_episodes([buffers.EpisodeBuffer(**_episode(rows, names))])
        count += len(rows)
        out.progress(rows.nbytes)
    if not straight:  # episodes lie one after the other, and did not
        out.described.about.contiguous = False
        out.described.about.open_episodes = []
    for name in sorted(os.listdir(folder)):
        out.ended(os.path.join(folder, name), count if name == "main_data.hdf5" else 0)


def _check(stream: Transitions, names: list[str]) -> None:
    own = _of(_OBS, names)
    if not own or [_NEXT + name[len(_OBS) :] for name in own] != _of(_NEXT, names):
        raise ConfigError(
            f"{NAME}: each observation needs a next one, as its episodes have one more than steps; the columns are "
            f"{', '.join(names)}",
            option="to",
        )
    missing = [name for name in ("reward",) if name not in names] + ([] if _of(_ACTION, names) else [_ACTION])
    if missing:
        raise ConfigError(f"{NAME}: the column {missing[0]} is needed; there are {', '.join(names)}", option="to")
    for name in (*own, *_of(_ACTION, names), "reward"):
        column = stream.schema.column(name)
        if column.torch_only is not None or column.bits.kind == "c" or (name == "reward" and column.shape):
            raise ConfigError(f"{NAME}: cannot hold the column {column} in its place", option="to")


def _space(stream: Transitions, names: list[str], group: str) -> Any:
    spaces = needed("gymnasium.spaces", NAME, "tools")
    found = {name[len(group) + 1 :]: _box(spaces, stream.schema.column(name)) for name in names}
    return found[""] if "" in found else _dict(spaces, nested(found))


def _dict(spaces: Any, tree: dict[str, Any]) -> Any:
    return spaces.Dict({key: _dict(spaces, each) if isinstance(each, dict) else each for key, each in tree.items()})


def _box(spaces: Any, column: Column) -> Any:
    dtype = column.bits
    if dtype.kind == "b":
        return spaces.Box(False, True, column.shape, dtype)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, column.shape, dtype)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, column.shape, dtype)


def _episode(rows: Rows, names: list[str]) -> dict[str, Any]:
    columns, count = rows.columns, len(rows)
    observations: Arrays = {}
    for name in _of(_OBS, names):
        own, after = columns[name], columns[_NEXT + name[len(_OBS) :]]
        if own[1:].tobytes() != after[:-1].tobytes():
            wrong = next(at for at in range(count - 1) if own[at + 1].tobytes() != after[at].tobytes())
            raise ConfigError(
                f"{NAME}: the next observation of the row with key {rows.marks[KEY][wrong]} is not the observation of "
                f"the row after it ({name}), and Minari keeps one for both",
                option="to",
            )
        observations[name[len(_OBS) + 1 :]] = np.concatenate([own, after[-1:]])
    actions = {name[len(_ACTION) + 1 :]: columns[name] for name in _of(_ACTION, names)}
    placed = {*_of(_OBS, names), *_of(_NEXT, names), *_of(_ACTION, names), *_PLACES}
    infos: dict[str, Any] = {name: array for name, array in columns.items() if name not in placed}
    infos.update(rows.marks)
    false = np.zeros(count, bool)
    found = {place: columns.get(name, false) for name, place in _PLACES.items()}
    return {
        **found,
        "observations": observations[""] if "" in observations else nested(observations),
        "actions": actions[""] if "" in actions else nested(actions),
        # A name may have dots and slashes, which are a path there: each has a number.
        "infos": {_INFOS: {str(number): infos[name] for number, name in enumerate(sorted(infos))}},
    }


def read(path: str) -> Stream:
    """Return the transitions in an export, or in anybody's dataset.

    Raises:
        ConfigError: Minari is not installed.
        Damaged: it is no such dataset.
    """
    storage_module = _storage_module()
    described = read_described(path, NAME) if is_described(path) else None
    folder = _storage_path(path)
    if folder is None:
        raise Damaged(f"{path}: there is no main_data.hdf5, so this is no dataset of Minari in HDF5")
    if described is not None:
        for _ in checked_parts(path, described):
            pass
    try:
        storage = storage_module.MinariStorage.read(folder)
        total = int(storage.total_episodes)
    except Exception as error:
        raise Damaged(f"{folder}: Minari cannot read it ({error!r})") from error

    def found() -> Iterator[dict[str, Any]]:
        for number in range(total):
            try:
                (episode,) = storage.get_episodes([number])
            except Exception as error:
                raise Damaged(f"{folder}: Minari cannot read episode {number} ({error!r})") from error
            if len(episode["rewards"]):
                yield episode

    if described is None:
        notes = ["infos, seeds and options did not come along"]
        size = os.path.getsize(os.path.join(folder, "main_data.hdf5"))
        return foreign_rows(lambda: map(_table, found()), path, nbytes=size, about=About(notes=notes))
    schema, marks = described.schema, tuple(described.marks)

    def batches() -> Iterator[Rows]:
        for episode in found():
            yield _rows(episode, stream, path)

    stream = Transitions(schema, marks, described.about, batches, bytes_of_parts(described), described.count)
    return stream


def _table(episode: dict[str, Any]) -> dict[str, Any]:
    """Return an episode as rows."""
    observations = leaves(_OBS, episode["observations"])
    count = len(episode["rewards"])
    table = {name: array[:-1] for name, array in observations.items()}
    table.update({_NEXT + name[len(_OBS) :]: array[1:] for name, array in observations.items()})
    table.update(leaves(_ACTION, episode["actions"]))
    table.update({name: episode[place] for name, place in _PLACES.items()})
    table[EPISODE] = np.full(count, episode["id"], np.int64)
    return table


def _rows(episode: dict[str, Any], stream: Transitions, path: str) -> Rows:
    """Return an episode of an export as the rows that it was."""
    found = _table(episode)
    names = [*(column.name for column in stream.schema.columns), *stream.marks]
    apart = {name for name in names if name in MARK_DTYPES or name not in found}
    try:
        infos = episode["infos"][_INFOS]
        found.update({name: infos[str(number)] for number, name in enumerate(sorted(apart))})
        columns = {
            each.name: _as_held(found[each.name], each, len(episode["rewards"])) for each in stream.schema.columns
        }
        marks = {
            name: np.ascontiguousarray(found[name]).astype(MARK_DTYPES[name], casting="equiv") for name in stream.marks
        }
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: episode {episode['id']} is none of these columns ({error})") from None
    return Rows(columns, marks)


def _as_held(array: Any, column: Column, count: int) -> np.ndarray:
    found: np.ndarray = np.ascontiguousarray(array).reshape(np.shape(array))
    if found.dtype != column.bits or found.shape != (count, *column.shape):
        raise ValueError(f"{column} is {found.dtype}{list(found.shape)}")
    return found
