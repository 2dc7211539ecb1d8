"""Where the columns of transitions go in a dataset of LeRobot, and what its features are called here.

``obs.NAME`` is ``observation.NAME``, ``obs`` is ``observation.state``, or ``observation.image`` if it is one;
``reward``, ``terminated``, ``truncated``, ``done`` and ``success`` have ``next.`` before them; ``action`` and all
others keep their names. An image is uint8 [height, width, 3] or [3, height, width].
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.buffer.transitions.columns import Column, Schema

NUMBERS, IMAGE, IMAGE_FIRST, NEXT, BESIDE = "numbers", "image", "image, channels first", "next", "beside"

FRAMES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The features that every dataset has, one number each."""
DONE = "next.done"
_OBS, _NEXT_OBS, _OBSERVATION = "obs", "next_obs", "observation"
_AFTER = ("reward", "terminated", "truncated", "done", "success")
_OWN = ("timestamp", "task_index")  # a column of this name is the feature, if it has its dtype
_TAKEN = (*FRAMES, "task", "subtask", "subtask_index")
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "float64"),
)
_MOST_DIMENSIONS = 5


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a column is."""

    column: str
    how: str
    """One of the words above: in the dataset as numbers or as an image, as the observation of the row that follows, or
    in the files beside it."""
    feature: str = ""
    """Its name in the dataset; empty: it is not in that."""


def places_of(schema: Schema) -> list[Place]:
    """Return the place of every column, in their order."""
    twins = {column.name: _twin(schema, column) for column in schema.columns}
    mapped = {name: feature_of(schema.column(name)) for name, twin in twins.items() if twin is None}
    # Those that get another name come first: who is called `next.reward` must not have the place of the reward.
    taken: dict[str, str] = {}
    for name, feature in sorted(mapped.items(), key=lambda pair: (pair[0] == pair[1], pair[0])):
        if _fits(schema.column(name), feature):
            taken.setdefault(feature, name)
    found = []
    for column in schema.columns:
        feature = mapped.get(column.name, "")
        if twins[column.name] is not None:
            found.append(Place(column=column.name, how=NEXT))
        elif taken.get(feature) == column.name:
            found.append(Place(column=column.name, how=_how(column), feature=feature))
        else:
            found.append(Place(column=column.name, how=BESIDE))
    return found


def twin_of(name: str) -> str:
    """Return the observation whose next one a column is."""
    return _OBS + name[len(_NEXT_OBS) :]


def _twin(schema: Schema, column: Column) -> Column | None:
    if column.name != _NEXT_OBS and not column.name.startswith(f"{_NEXT_OBS}."):
        return None
    found = next((each for each in schema.columns if each.name == twin_of(column.name)), None)
    same = found is not None and (found.dtype, found.shape) == (column.dtype, column.shape)
    return found if same else None


def feature_of(column: Column) -> str:
    """Return what a column is called in the dataset."""
    if column.name == _OBS:
        return f"{_OBSERVATION}.{'image' if _how(column) != NUMBERS else 'state'}"
    if column.name.startswith(f"{_OBS}."):
        return _OBSERVATION + column.name[len(_OBS) :]
    return f"next.{column.name}" if column.name in _AFTER else column.name


def column_of(feature: str) -> str:
    """Return what a feature of anybody's dataset is called here."""
    if feature == _OBSERVATION or feature.startswith(f"{_OBSERVATION}."):
        return _OBS + feature[len(_OBSERVATION) :]
    plain = feature.removeprefix("next.")
    return plain if feature != plain and plain in _AFTER else feature


def is_single(feature: str) -> bool:
    """Whether a feature of shape [1] is one number, [n] and not [n, 1]."""
    return feature in FRAMES or feature.removeprefix("next.") in _AFTER


def _how(column: Column) -> str:
    if column.dtype != "uint8" or len(column.shape) != 3 or 0 in column.shape:
        return NUMBERS
    return IMAGE if column.shape[2] == 3 else IMAGE_FIRST if column.shape[0] == 3 else NUMBERS


def _fits(column: Column, feature: str) -> bool:
    """Whether LeRobot can hold a column: torch, in which it gives numbers, must know them all; uint64 it does not."""
    if feature in _OWN:
        return column.dtype == FRAMES[feature] and column.shape == ()
    allowed = column.dtype in _DTYPES and 0 not in column.shape and len(column.shape) <= _MOST_DIMENSIONS
    return allowed and feature not in _TAKEN and "/" not in feature


def features_of(schema: Schema, places: list[Place]) -> dict[str, dict[str, Any]]:
    """Return the features of the dataset, as ``meta/info.json`` has them."""
    found: dict[str, dict[str, Any]] = {}
    for place in places:
        if not place.feature:
            continue
        column = schema.column(place.column)
        shape, names = list(column.shape) or [1], None
        if place.how != NUMBERS:
            names = ["height", "width", "channels"] if place.how == IMAGE else ["channels", "height", "width"]
        dtype = "image" if names is not None else {"bfloat16": "float32"}.get(column.dtype, column.dtype)
        found[place.feature] = {"dtype": dtype, "shape": shape, "names": names}
    found.setdefault(DONE, {"dtype": "bool", "shape": [1], "names": None})
    for name, dtype in FRAMES.items():
        found[name] = {"dtype": dtype, "shape": [1], "names": None}
    return found
