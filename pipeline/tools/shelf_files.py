"""What a generation says of trajectories that a tool has put together: the run's, or those of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.state import VALUES_FOLDER, encode_state
from pipeline.replay.trajectory_state import STATE_FILE, TrajectoryState
from pipeline.store.segments import Block


def add_shelf(
    generation: GenerationWriter,
    prefix: str,
    state: TrajectoryState,
    unknown: dict[str, Any],
    infos: Sequence[TrajectoryInfo],
    blocks: Sequence[Block],
    also: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Add the files of a buffer to a generation that has begun.

    Args:
        generation: it.
        prefix: what the paths of the buffer's files begin with.
        state: how it stands; how many trajectories there are, and their weights, follow from ``infos``.
        unknown: fields of it that this version does not know.
        infos: what is known of each trajectory, oldest first.
        blocks: where they lie.
        also: other values, one of each, by the names of their files.
    """
    weights = list(dict.fromkeys(info.model_weights_id for info in infos))
    point = {name: number for number, name in enumerate(weights)}
    whole = msgspec.structs.replace(
        state, size=len(infos), total_samples=sum(info.num_samples for info in infos), weights=weights
    )
    generation.add(prefix + STATE_FILE, encode_state(whole, unknown))
    generation.add(prefix + BLOCKS_FILE, msgspec.msgpack.encode(list(blocks)))
    table = {
        "steps": [info.shape[0] for info in infos],
        "envs": [info.shape[1] for info in infos],
        "max_episode_length": [info.max_episode_length for info in infos],
        "model_weights_id": [point[info.model_weights_id] for info in infos],
    }
    values = {f"{name}.int64": np.array(each, np.int64) for name, each in table.items()}
    for name, each in {**values, **(also or {})}.items():
        generation.add(f"{prefix}{VALUES_FOLDER}/{name}", each.tobytes())
