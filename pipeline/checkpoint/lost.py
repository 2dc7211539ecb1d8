"""What is lost with a file or a record, in words: for lists of what is damaged."""

from __future__ import annotations

import os

from pipeline.checkpoint.manifest import (
    BLOCKS_FILE,
    CONSUMER_FILE,
    MANIFEST_FILE,
    OWN_FOLDER,
    PROGRESS_FILE,
    SHARDS_FOLDER,
    TRAINER_FOLDER,
    TRAJECTORIES,
    TRAJECTORY_SHARDS,
    Manifest,
)
from pipeline.records import Added, AnyEvent, Evaluated, Parked, PartSaved
from pipeline.store.segments import Block

_ELSE = "the others are not concerned"
_OWN = {
    MANIFEST_FILE: "what it consists of",
    CONSUMER_FILE: "what the weights had seen",
    PROGRESS_FILE: "how far the run was",
    "producer.msgpack": "what was to be drawn again",
    "replay.json": "how the buffer stood",
    "trajectories.json": "how the buffer stood",
    BLOCKS_FILE: "where the rows lie",
}


def with_manifest(number: int) -> str:
    """Return what is lost with a generation's manifest."""
    return f"generation {number}, which cannot be resumed; {_ELSE}"


def with_file(manifest: Manifest, path: str) -> str:
    """Return what is lost with a file that a generation lists."""
    parts = path.split("/")
    rank = f" of rank {int(parts[1])}" if parts[0] == SHARDS_FOLDER and len(parts) > 2 and parts[1].isdigit() else ""
    name = parts[-1]
    if parts[0] == TRAINER_FOLDER or (rank and parts[2] == OWN_FOLDER):
        what = f"the state of {os.path.splitext(name)[0]!r}"
    elif len(parts) > 1 and parts[-2] == "values":
        what = f"the values of {name.rpartition('.')[0]!r}"
    elif name in _OWN:
        what = _OWN[name]
    else:
        what = f"the file {path!r}, which the trainer wrote itself"
    return f"{what}{rank} in generation {manifest.generation} (step {manifest.step}), which cannot be resumed; {_ELSE}"


def with_events(first: int) -> str:
    """Return what is lost with the records of a journal from one on."""
    return f"events from number {first} on" if first > 1 else "all of its events"


def with_payload(event: AnyEvent) -> str:
    """Return what is lost with the payload that an event names."""
    if isinstance(event, Added):
        return f"rows {event.first} to {event.first + event.count - 1}, which uid {event.uid} played"
    uid, member = getattr(event, "uid", -1), getattr(event, "member", 0)
    if isinstance(event, PartSaved):
        return f"what member {member} of uid {uid} had kept: its next attempt begins from the start"
    if isinstance(event, Evaluated):
        return f"an evaluation of task {event.task!r} at version {event.version}: it is to be made again"
    parked = ", which waits for its reward" if isinstance(event, Parked) else ""
    return f"the rollout of member {member} of uid {uid}{parked}"


def with_block(manifest: Manifest, block: Block) -> str:
    """Return what is lost with a block that a generation lists."""
    if manifest.kind == TRAJECTORIES:
        return f"trajectory {block.first}"
    if manifest.kind == TRAJECTORY_SHARDS:
        return f"the trajectory that was number {block.first} of rank {block.rank} when it was written"
    return f"rows {block.first} to {block.first + block.count - 1}"
