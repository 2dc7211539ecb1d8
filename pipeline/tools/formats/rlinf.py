"""Folders of RLinf's ``TrajectoryReplayBuffer``: two JSON files, and a file of tensors for each trajectory.

``trajectory_index.json``, or as it is misspelt at times ``trajector_index.json``, lists them, those that were removed
among them. Files are opened with ``weights_only``: tensors, and no code. Fields that have a row more for each epoch
lose that, as :class:`~pipeline.replay.TrajectoryBuffer` does with them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from pipeline.errors import ConfigError, Damaged
from pipeline.replay.flattening import aligned
from pipeline.store.codec import tensor_bytes
from pipeline.store.files import open_plain
from pipeline.tools.interchange.streams import TRAJECTORIES, About, Record, Records, Stream

NAME = "rlinf"
_INDEX = ("trajectory_index.json", "trajector_index.json")


class _Listed(NamedTuple):
    number: int
    path: str
    length: int
    weights: str


def recognises(path: str) -> bool:
    """Whether such a folder lies there."""
    return any(os.path.isfile(os.path.join(path, name)) for name in _INDEX)


def read(path: str) -> Stream:
    """Return the trajectories in a folder, in the order of its list.

    Raises:
        ConfigError: they are pickles, or none is there.
        Damaged: the JSON is not RLinf's.
    """
    name = next((name for name in _INDEX if os.path.isfile(os.path.join(path, name))), _INDEX[0])
    index, metadata = _json(os.path.join(path, name)), _json(os.path.join(path, "metadata.json"))
    kind = metadata.get("trajectory_format", "pt")
    if kind != "pt":
        raise ConfigError(
            f"{path}: its trajectories are {kind!r}, which runs code as it is read. Where they were made, load the "
            "buffer with RLinf, set storage_format='pt', and save it again",
            option="path",
        )
    try:
        ids = [int(number) for number in index["trajectory_id_list"]]
        entries = {int(number): entry for number, entry in index["trajectory_index"].items()}
        listed = [_find(path, number, entries[number]) for number in ids]
        counter = int(metadata.get("trajectory_counter", 0))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{os.path.join(path, name)}: not a list of RLinf's trajectories ({error!r})") from None
    there = [each for each in listed if each.path]
    if not there:
        raise ConfigError(f"{path}: none of {len(ids)} trajectories has a file", option="path")
    notes = [f"{len(ids) - len(there)} trajectories are listed, and have no file"] if len(there) < len(ids) else []
    numbers = [each.number for each in there]
    kept = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[-1] + 1 == counter
    if not kept:
        notes.append("trajectories are numbered from 0 on, in the order of the list")

    def records() -> Iterator[Record]:
        for each in there:
            yield _record(each)

    size = sum(os.path.getsize(each.path) for each in there)
    about = About(next_trajectory=counter if kept else len(there), notes=notes)
    return Records(TRAJECTORIES, about, records, size, len(there))


def _find(path: str, number: int, entry: dict[str, Any]) -> _Listed:
    """Return where a trajectory's file lies, which may be gone."""
    weights = str(entry.get("model_weights_id", ""))
    length = int(entry.get("max_episode_length") or 0)
    exact = os.path.join(path, f"trajectory_{number}_{os.path.basename(weights)}.pt")
    found = [exact] if os.path.isfile(exact) else []
    if not found:
        pattern = re.compile(rf"trajectory_{number}(_.*)?\.pt")
        found = sorted(os.path.join(path, name) for name in os.listdir(path) if pattern.fullmatch(name))
    return _Listed(number, found[0] if found else "", length, weights)


def _record(listed: _Listed) -> Record:
    try:
        with open_plain(listed.path) as file:
            given = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(given, dict):
            raise ValueError(f"a {type(given).__name__} is in it, where a dict of tensors should be")
        plain = {"max_episode_length": listed.length, "model_weights_id": listed.weights}
        whole = aligned({**given, **plain})
        tensors = {name: tensor_bytes(value) for name, value in sorted(whole.fields.items())}
    except FileNotFoundError:
        raise Damaged(f"{listed.path}: was there a moment ago, and is missing") from None
    except (ValueError, TypeError, RuntimeError, EOFError, LookupError) as error:
        raise Damaged(f"{listed.path}: no trajectory of tensors ({error})") from None
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # torch refuses what is more than tensors
            raise
        raise Damaged(f"{listed.path}: holds more than tensors, which would run code as it is read ({error})") from None
    fields = {
        "trajectory_id": listed.number,
        "steps": whole.steps,
        "envs": whole.envs,
        "max_episode_length": whole.max_episode_length,
        "model_weights_id": whole.model_weights_id,
    }
    return Record(fields, tensors)


def _json(path: str) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any])
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing, so this is no whole folder of RLinf") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: no JSON object ({error})") from None
