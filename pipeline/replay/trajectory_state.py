"""What a generation says of a buffer of trajectories, beside their rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.given import wholes
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.shelf import ENVS, LENGTH, STEPS, WEIGHTS, Shelf
from pipeline.replay.state import decode_fields

STATE_VERSION = 1
STATE_FILE = "trajectories.json"
_TABLE = {"steps": STEPS, "envs": ENVS, "max_episode_length": LENGTH, "model_weights_id": WEIGHTS}


class TrajectoryState(msgspec.Struct, kw_only=True):
    """Content of ``trajectories.json``; every field has a default, so that old files load."""

    format_version: int = STATE_VERSION
    columns: list[Column] | None = None
    """None: nothing was ever added."""
    size: int = 0
    """How many trajectories are there; their numbers are those before ``trajectory_counter``."""
    total_samples: int = 0
    trajectory_counter: int = 0
    sample_window_size: int = 0
    """For people: today's option counts."""
    generator: dict[str, Any] = {}
    """The state of numpy's PCG64; its 128 bit words in hexadecimal."""
    weights: list[str] = []
    """Names of weights, to which the values ``model_weights_id`` point."""
    numbered: str = ""
    """What tells how trajectories are numbered from how they had been before: a resume that leaves some out, brings
    them to other ranks, or goes back behind others gives their numbers to others. Empty: none has."""

    @property
    def schema(self) -> Schema | None:
        """The columns."""
        return None if self.columns is None else Schema(tuple(self.columns))


def decode_state(raw: bytes, where: str) -> tuple[TrajectoryState, dict[str, Any]]:
    """Return the state in a file, and the fields of it that this version does not know.

    Raises:
        NewerFormat: it was written by a newer version.
        Damaged: it is no such state.
    """
    return decode_fields(raw, where, TrajectoryState, STATE_VERSION, checked)


def checked(state: TrajectoryState) -> TrajectoryState:
    """Return a state whose parts fit together.

    Raises:
        ValueError: they do not.
    """
    if not 0 <= state.size <= state.trajectory_counter < 2**62 or not state.size <= state.total_samples < 2**62:
        raise ValueError(f"{state.size} trajectories of {state.trajectory_counter} with {state.total_samples} rows")
    if state.size and state.columns is None:
        raise ValueError(f"{state.size} trajectories without fields")
    if state.columns is not None:
        for column in state.columns:
            if column.nbytes < 0 or min(column.shape, default=0) < 0:
                raise ValueError(f"a column is said to be {column}")
        try:
            Schema(tuple(state.columns))
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return state


def to_values(shelf: Shelf) -> dict[str, np.ndarray]:
    """Return what is known of the trajectories that are there, as arrays by name; copies."""
    table = shelf.table(shelf.low, shelf.next)
    return {f"{name}.int64": table[:, column].copy() for name, column in _TABLE.items()}


def from_values(state: TrajectoryState, values: dict[str, np.ndarray]) -> list[TrajectoryInfo]:
    """Return what is known of the trajectories of a state, oldest first.

    Raises:
        Damaged, LookupError, ValueError: they do not fit together.
    """
    columns = [values[f"{name}.int64"] for name in _TABLE]
    if any(len(each) != state.size for each in columns):
        raise Damaged(f"of {state.size} trajectories, {[len(each) for each in columns]} are known")
    for name, each in zip(_TABLE, columns, strict=True):
        wholes(name, each, -(2**63), 2**63 - 1)
    steps, envs, lengths, points = columns
    if state.size and (min(steps.min(), envs.min()) < 1 or points.min() < 0 or max(steps.max(), envs.max()) >= 2**31):
        raise Damaged("a trajectory is said to have no steps, or more than there can be, or unknown weights")
    rows = sum((steps * envs).tolist())  # of 64 bits the sum might be anything
    if rows != state.total_samples:
        raise Damaged(f"{state.total_samples} rows are said to be there, and trajectories have {rows}")
    first = state.trajectory_counter - state.size
    lists = zip(steps.tolist(), envs.tolist(), lengths.tolist(), points.tolist(), strict=True)
    return [
        TrajectoryInfo(first + at, step * env, (step, env), length, state.weights[point])
        for at, (step, env, length, point) in enumerate(lists)
    ]
