"""Trajectories of tensors [T, B, ...] as rows of one transition each, every field of a row from the same place.

A trajectory is a mapping, or any object with such attributes (a dataclass), of arrays or tensors, and of mappings of
these; what is None or an empty mapping is left out. Row ``t * B + b`` is step t of environment b.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from pipeline.buffer.transitions.columns import check_depth
from pipeline.config import TrajectoryOptions
from pipeline.errors import ConfigError

Fields = dict[str, Any]
_PLAIN = ("max_episode_length", "model_weights_id")
_NOT_GIVEN = TrajectoryOptions()


class TrajectoryInfo(msgspec.Struct, frozen=True):
    """What is known of a trajectory beside its tensors; the names are those of ``trajectory_index.json``."""

    trajectory_id: int
    num_samples: int
    """T * B."""
    shape: tuple[int, ...]
    """(T, B)."""
    max_episode_length: int = 0
    model_weights_id: str = ""


class Aligned(NamedTuple):
    """The fields of a trajectory, each [T, B, ...], by name; those in a mapping as ``curr_obs.states``."""

    fields: Fields
    steps: int
    envs: int
    max_episode_length: int
    model_weights_id: str

    def flat(self) -> Fields:
        """Return the fields as rows [T * B, ...]."""
        rows = self.steps * self.envs
        return {name: value.reshape(rows, *value.shape[2:]) for name, value in self.fields.items()}

    def info(self, number: int) -> TrajectoryInfo:
        """Return what is known beside the tensors."""
        size = self.steps * self.envs
        shape = (self.steps, self.envs)
        return TrajectoryInfo(number, size, shape, self.max_episode_length, self.model_weights_id)


def aligned(trajectory: Any, options: TrajectoryOptions = _NOT_GIVEN) -> Aligned:
    """Return the fields of a trajectory, without the rows that some of them have more.

    Raises:
        ConfigError: a field is no tensor [T, B, ...], or of another T or B than ``rewards``.
    """
    fields, plain = _given(trajectory)
    if not fields:
        raise ConfigError("trajectory: no field with a tensor", option="trajectories")
    for name, value in fields.items():
        if value.ndim < 2:
            raise ConfigError(f"field {name}: shape {list(value.shape)}, where [T, B, ...] is needed", option=name)
    extra = {*options.first_extra, *options.last_extra}
    leading = next((name for name in fields if name.partition(".")[0] not in extra), next(iter(fields)))
    steps, envs = fields["rewards" if "rewards" in fields else leading].shape[:2]
    if steps * envs == 0:
        raise ConfigError(f"trajectory: [T, B] is [{steps}, {envs}]: no transition in it", option="trajectories")
    found: Fields = {}
    for name, value in fields.items():
        group = name.partition(".")[0]
        first, last = group in options.first_extra, group in options.last_extra
        found[name] = _without_extra(name, value, steps, envs, first=first, last=last)
    return Aligned(found, steps, envs, *plain)


def _given(trajectory: Any) -> tuple[Fields, tuple[int, str]]:
    if isinstance(trajectory, Mapping):
        values = dict(trajectory)
    elif dataclasses.is_dataclass(trajectory):
        values = {each.name: getattr(trajectory, each.name) for each in dataclasses.fields(trajectory)}
    else:
        values = dict(vars(trajectory)) if hasattr(trajectory, "__dict__") else {}
    length, weights = values.pop(_PLAIN[0], 0), values.pop(_PLAIN[1], "")
    if not isinstance(length, (int, np.integer)) or not isinstance(weights, str):
        raise ConfigError(
            f"{_PLAIN[0]}={length!r}, {_PLAIN[1]}={weights!r}: a whole number and a text are needed", option=_PLAIN[0]
        )
    fields: Fields = {}
    for name, value in sorted(values.items()):
        _put(fields, name, value)
    return fields, (int(length), weights)


def _put(fields: Fields, name: str, value: Any, depth: int = 0) -> None:
    if value is None:
        return
    if isinstance(value, Mapping):
        check_depth(name, depth + 1)
        for key, part in value.items():
            _put(fields, f"{name}.{key}", part, depth + 1)
        return
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        raise ConfigError(
            f"field {name}: a {type(value).__name__}, where a tensor [T, B, ...] is needed; leave it out", option=name
        )
    if name in fields:
        raise ConfigError(f"field {name}: two values would be called so; rename one of them", option=name)
    fields[name] = value


def _without_extra(name: str, value: Any, steps: int, envs: int, *, first: bool, last: bool) -> Any:
    length, width = value.shape[:2]
    epochs = length - steps
    if width == envs and epochs == 0:
        return value
    if width != envs or not (first or last) or epochs < 0 or steps % epochs:
        more = f", or [{steps} + E, {envs}, ...] where E divides {steps}" if first or last else ""
        raise ConfigError(
            f"field {name}: shape {list(value.shape)}, where [{steps}, {envs}, ...] is needed{more}", option=name
        )
    split = value.reshape(epochs, steps // epochs + 1, *value.shape[1:])
    return (split[:, 1:] if first else split[:, :-1]).reshape(steps, *value.shape[1:])


def intervention_pieces(
    trajectory: Any,
    mode: Literal["any", "all"] = "any",
    *,
    flags: str = "intervene_flags",
    options: TrajectoryOptions = _NOT_GIVEN,
) -> list[dict[str, Any]]:
    """Return the steps of a trajectory at which somebody else acted: one trajectory [n, 1, ...] for each environment
    that has such steps, in their order.

    Args:
        trajectory: as :meth:`~pipeline.replay.TrajectoryBuffer.add_trajectories` takes it.
        mode: whether ``any`` or ``all`` of an action's dimensions must be flagged.
        flags: the name of the field [T, B, ...] that tells; nothing is returned where there is none.
        options: which fields have rows more; here every field is [n, 1, ...], of the steps that were chosen.

    Raises:
        ConfigError: ``mode`` is none, or the trajectory is none.
    """
    if mode not in ("any", "all"):
        raise ConfigError.of("mode", mode, "'any' and 'all' are allowed")
    whole = aligned(trajectory, options)
    if flags not in whole.fields:
        return []
    flagged = torch.as_tensor(whole.fields[flags]) != 0
    dims = flagged.reshape(whole.steps, whole.envs, -1)
    chosen = (dims.any(dim=-1) if mode == "any" else dims.all(dim=-1)).cpu().numpy()
    pieces = []
    for env in np.flatnonzero(chosen.any(axis=0)).tolist():
        index = np.flatnonzero(chosen[:, env])
        fields = {name: _rows(value[:, env : env + 1], index) for name, value in whole.fields.items()}
        plain = dict(zip(_PLAIN, (whole.max_episode_length, whole.model_weights_id), strict=True))
        pieces.append({**nested(fields), **plain})
    return pieces


def _rows(value: Any, index: np.ndarray) -> Any:
    return value[torch.from_numpy(index).to(value.device)] if isinstance(value, torch.Tensor) else value[index]


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by their names, those with a dot in mappings."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        *outer, inner = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[inner] = value
    return found
