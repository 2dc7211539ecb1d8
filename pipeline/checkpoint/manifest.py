"""The manifest: what a generation consists of. A generation without a whole one does not exist.

It is written last. Names in it are data: a path that leads out of the generation's folder is refused.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from pipeline.errors import Damaged, NewerFormat
from pipeline.store.frames import crc32c
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import segment_key
from pipeline.store.segments import SegmentInfo

MANIFEST_VERSION = 1
MANIFEST_FILE = "manifest.json"
BLOCKS_FILE = "blocks.msgpack"
CONSUMER_FILE = "consumer.json"
PROGRESS_FILE = "progress.json"
TRAINER_FOLDER = "trainer"
SHARDS_FOLDER = "shards"
OWN_FOLDER = "own"
"""Of what a rank had attached for itself, in its shard."""
PIPELINE, REPLAY, TRAJECTORIES, SHARDS = "pipeline", "replay", "trajectories", "replay shards"
"""Kinds of runs: of a pipeline, and, without one, of a buffer of transitions, of one of trajectories, and of one of
transitions of which each rank has a shard."""
TRAJECTORY_SHARDS = "trajectory shards"
"""Of a buffer of trajectories of which each rank has a shard."""
OF_SHARDS = frozenset({SHARDS, TRAJECTORY_SHARDS})
"""Kinds of buffers of which each rank has a shard."""
PIPELINE_RANKS = "pipeline ranks"
"""Of a pipeline of which each rank has a part."""
BUFFERS = frozenset({REPLAY, TRAJECTORIES})
"""Kinds whose generations list blocks of rows."""
REPLAY_BUFFER = "replay_buffer"
"""What ``left_out`` of a manifest calls the buffer."""


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the generation: its path inside the folder, its size, its crc32c in hexadecimal."""

    path: str
    bytes: int
    crc32c: str


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wrote of a buffer."""

    rank: int
    rows: int = 0
    """How many there were in the buffer; of a pipeline, groups that had finished and were not trained."""
    saved: int | None = None
    """How many of them the generation holds: those that were not dropped. Not said: all."""
    dropped: dict[str, int] = {}
    """How many it does not hold, by what their episodes are: ``open`` or ``headless``."""
    truncated: int = 0
    """How many episodes that were open it holds as truncated."""
    added: int = 0
    """How many had been added."""
    bytes: int = 0
    """Of payloads that are needed."""
    episodes: int = 0
    """Of which rows were there."""
    own: list[str] = []
    """What the rank had attached for itself."""
    age: int = 0
    """Of an episode that begins after it: about how many rows each rank had added since the run began."""

    @property
    def held(self) -> int:
        """How many rows the generation holds."""
        return self.rows if self.saved is None else self.saved


class MadeOf(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part of what a tool wrote into a run had lain: a run that was not made of others, or a shard of one."""

    run_id: str = ""
    directory: str = ""
    """As it was called then, for people, and for the order of what has one id."""
    generation: int = 0
    step: int = 0
    shard: int = -1
    """The rank whose shard it was; -1: there were none."""
    kind: str = ""
    units: int = 0
    """How many of its rows, trajectories or groups are there."""
    numbered: str = ""
    """How its rows were numbered then, if a resume had given them other keys than they had before."""

    @property
    def name(self) -> str:
        """What names a run and how what is in it is numbered: of two that have one name, ids can be compared."""
        return f"{self.run_id}/{self.numbered}" if self.numbered else self.run_id


def shard_prefix(rank: int) -> str:
    """Return what the paths of a rank's files in a generation begin with."""
    return f"{SHARDS_FOLDER}/{rank:04d}/"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``manifest.json``; every field has a default, so that old files load."""

    format_version: int = MANIFEST_VERSION
    run_id: str = ""
    generation: int = 0
    parent: int = -1
    """The generation that this one goes on from; -1: none."""
    step: int = 0
    incarnation: int = 0
    reason: str = "save"
    world_size: int = 1
    """How many ranks wrote shards."""
    shards: list[ShardInfo] = []
    """What each of them wrote, by rank."""
    written: str = ""
    """When, in UTC, for people."""
    journals: list[JournalPosition] = []
    segments: list[SegmentInfo] = []
    """Those that the generation needs: something in them was live, or they had not ended."""
    files: list[FileInfo] = []
    attached: list[str] = []
    options: dict[str, Any] = {}
    tasks: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    """What a generation of this kind usually holds and this one does not, and why."""
    base: int = 0
    """The incarnation in which this line inherited its state: journals of earlier ones are not needed. 0: all are."""
    origin: str = ""
    """Run id and generation that the run was forked from, in its first generation."""
    reclaimed: bool = False
    """Whether, in a salvage, items were claimed again under new uids: uids do not follow the draws any more."""
    reusable: list[int] | None = None
    """Generations, this one among them, whose resume may use what came after them. Not said: all that are there."""
    kind: str = PIPELINE
    """What wrote it."""
    external: str = ""
    """Path of the trainer's own checkpoint that the generation goes with, as it was given."""
    made_of: list[MadeOf] = []
    """What a merge, a split or a reshard made the run of, in its first generation."""
    checksum: str = ""
    """crc32c of this manifest's compact JSON with an empty checksum, unknown fields and their order included."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes, with its own checksum in it."""
    fields = msgspec.to_builtins(manifest)
    for name in ("options", "tasks"):
        fields[name] = _printable(fields[name])
    fields["checksum"] = _checksum(fields)
    return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"


def _printable(value: Any) -> Any:
    """Return what is there for people so that UTF-8 has it: the name of a folder may be bytes that are no text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


def _checksum(fields: dict[str, Any]) -> str:
    # Of the fields as they stand in the file: a version with more or fewer of them finds the same.
    return f"{crc32c(msgspec.json.encode({**fields, 'checksum': ''})):08x}"


def decode_manifest(raw: bytes, where: str) -> Manifest:
    """Return the manifest in ``raw``.

    Raises:
        NewerFormat: written by a newer version.
        Damaged: it is not whole, or names a file outside its folder.
    """
    try:
        fields = msgspec.json.decode(raw)
        version = fields.get("format_version", 0)
        if version > MANIFEST_VERSION:
            raise NewerFormat(
                f"{where}: the manifest has format {version}; this version reads up to {MANIFEST_VERSION}. "
                "Install a newer forebay."
            )
        manifest, checksum = msgspec.convert(fields, Manifest), _checksum(fields)
    except (msgspec.MsgspecError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{where}: the manifest is damaged ({error})") from None
    if checksum != manifest.checksum:
        raise Damaged(f"{where}: the manifest was changed; its checksum does not fit")
    for info in manifest.files:
        parts = info.path.split("/")
        if os.path.isabs(info.path) or {"", ".", ".."} & set(parts) or "\0" in info.path:
            raise Damaged(f"{where}: names the file {info.path!r}, which is not inside the generation's folder")
    for segment in manifest.segments:
        try:
            segment_key(segment.name)
        except ValueError as error:
            raise Damaged(f"{where}: {error}") from None
    return manifest
