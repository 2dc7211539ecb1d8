"""Checks of what a file says of a rollout or a trajectory, before anything is made of it."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.errors import Damaged
from pipeline.tools.interchange.columns import is_stored
from pipeline.tools.interchange.streams import ROLLOUTS, Record


class RolloutFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a rollout."""

    uid: int
    member: int = 0
    task: str = "imported"
    status: str = "buffered"
    epoch: int = -1
    index: int = -1
    attempt: int = 1
    reward: float = 0.0
    oldest: int = 0
    newest: int = 0
    tokens: int = 0
    agents: list[str] = []
    """Of each trace."""
    policies: list[str] = []
    info: dict[str, Any] = {}


class TrajectoryFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a trajectory."""

    trajectory_id: int = 0
    steps: int
    envs: int
    max_episode_length: int = 0
    model_weights_id: str = ""


def checked_record(record: Record, content: str, where: str) -> Record:
    """Return a record with all its fields.

    Raises:
        Damaged: one is missing or of another type, or a tensor belongs to no trace.
    """
    kind: type[msgspec.Struct] = RolloutFields if content == ROLLOUTS else TrajectoryFields
    try:
        found: Any = msgspec.convert(record.fields, kind)
        if content == ROLLOUTS:
            _check_traces(found, record)
        for name, tensor in record.tensors.items():
            if not is_stored(tensor.dtype):
                raise ValueError(f"{name!r} is of the dtype {tensor.dtype!r}")
    except (msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"{where}: no record ({error})") from None
    fields = {name: getattr(found, name) for name in kind.__struct_fields__}
    return Record(fields, record.tensors)


def _check_traces(found: RolloutFields, record: Record) -> None:
    if len(found.agents) != len(found.policies):
        raise ValueError(f"{len(found.agents)} agents and {len(found.policies)} policies")
    if min(found.uid, found.member) < 0 or found.attempt < 1:
        raise ValueError(f"uid {found.uid}, member {found.member}, attempt {found.attempt}")
    for name in record.tensors:
        number, dot, plain = name.partition(".")
        if not number.isdecimal() or not dot or not plain or int(number) >= len(found.agents):
            raise ValueError(f"{name!r} belongs to none of {len(found.agents)} traces")
