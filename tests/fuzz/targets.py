"""What is fuzzed: each target reads some bytes as a part of a run, and lets no error through but those of ours.

A target that is behind a checksum seals the bytes first: what is looked for lies behind it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from pipeline import ForebayError, Rollout
from pipeline.checkpoint.lines import read_inherited
from pipeline.checkpoint.manifest import FileInfo, Manifest, decode_manifest, encode_manifest
from pipeline.checkpoint.trainer_state import CapturedState, read_state
from pipeline.records import Added, Claimed, Finished, HeldItem, Inherited, Item, Opened, SourceMark
from pipeline.sampler.progress import Progress, decode_progress, encode_progress
from pipeline.store.codec import pack, read_blob, read_header, unpack
from pipeline.store.files import OsFiles
from pipeline.store.frames import EVENTS, PAYLOAD, SYNCED, crc32c, crc32c_of_file, encode_frame, scan
from pipeline.store.journal import encode_events, read_journal
from pipeline.store.layout import JournalName

TAG = 7
HERE = "the place"
Target = Callable[[bytes], None]


def _ours(where: str, read: Callable[[], object]) -> None:
    try:
        read()
    except ForebayError as error:
        if where not in str(error):
            raise AssertionError(f"{error!r} does not name {where}") from error


def _all(given: Iterator[object]) -> list[object]:
    return list(given)


def frame(kind: int, payload: bytes, **more: int) -> bytes:
    """A whole frame of incarnation 1."""
    return b"".join(encode_frame(kind, payload, incarnation=1, rank=0, run_tag=TAG, **more))


def blob(content: bytes, name: str) -> bytes:
    """A safetensors file of one tensor."""
    entry = {name: {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    head = msgspec.json.encode(entry)
    return struct.pack("<Q", len(head)) + head + content


class Targets:
    """The targets by name, and what each begins from. Files are written into ``folder``."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "file")
        self.all: Mapping[str, Target] = {
            "frames": self.frames,
            "sealed frames": self.sealed_frames,
            "events": self.events,
            "payload": self.payload,
            "item": lambda data: self.payload(blob(data, "__item__")),
            "manifest": lambda data: _ours(HERE, lambda: decode_manifest(data, HERE)),
            "sealed manifest": self.sealed_manifest,
            "progress": lambda data: _ours(HERE, lambda: decode_progress(data, HERE)),
            "inherited": self.inherited,
            "trainer": self.trainer,
            "tree": lambda data: self.trainer(blob(data, "__tree__")),
        }

    def frames(self, data: bytes) -> None:
        """A journal or a segment."""
        Path(self.path).write_bytes(data)
        for promised in (0, 64):
            _ours(self.path, partial(_all, scan(self.path, run_tag=TAG, promised=promised)))

    def sealed_frames(self, data: bytes) -> None:
        """The same, of which every header has a checksum that fits."""
        raw = bytearray(data)
        for place in range(0, len(raw) - 63, 64):
            if raw[place : place + 4] == b"FBAY":
                struct.pack_into("<I", raw, place + 60, crc32c(bytes(raw[place : place + 60])))
        self.frames(bytes(raw))

    def events(self, data: bytes) -> None:
        """What a frame of events holds."""
        Path(self.path).write_bytes(frame(EVENTS, data, sequence=1))
        _ours(self.path, lambda: list(read_journal(JournalName(1, 0, self.path), run_tag=TAG)))

    def payload(self, data: bytes) -> None:
        """What a frame of a rollout holds."""
        for read in (unpack, read_header, read_blob):
            _ours(HERE, partial(read, data, HERE))

    def sealed_manifest(self, data: bytes) -> None:
        """A manifest with a checksum that fits."""
        try:
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        sealed = msgspec.json.encode({**fields, "checksum": ""})
        try:
            sealed = msgspec.json.encode(msgspec.json.decode(sealed))  # as the check will see it
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        raw = sealed.replace(b'"checksum":""', b'"checksum":"%08x"' % crc32c(sealed), 1)
        _ours(HERE, lambda: decode_manifest(raw, HERE))

    def inherited(self, data: bytes) -> None:
        """What a generation without its buffer lists."""
        Path(self.path).write_bytes(data)
        _ours(self.path, lambda: read_inherited(self.path))

    def trainer(self, data: bytes) -> None:
        """A trainer file that a manifest lists as it is."""
        Path(self.path).write_bytes(data)
        size, checksum = crc32c_of_file(self.path)
        _ours(self.path, lambda: read_state(self.path, size=size, checksum=checksum))

    def seeds(self) -> dict[str, list[bytes]]:
        """What the library itself writes, for each target to begin from."""
        held = HeldItem(
            3, "a", 0, 1, 2, 2, 1, "train", b"c", b"\x02\x00", (1, 0), (2, 1), places=((0, 1, 0, 2, 64, 9),)
        )
        totals = {"a": {"claimed": 4, "dropped": {"failed": 1}}}
        inherited = Inherited(
            [held], {"a": (0, 3, -1, SourceMark("kind", -1, {0: "d"}), 0)}, {"a": 0.5}, {}, totals, []
        )
        events = [
            Opened(1, discarded=[(1, 0, 3)]),
            Claimed(1, "a", 0, 4, 2, 3, 2, "train", b"c"),
            Finished(1, 0, 2, -0.0, 5, 7),
            Added(1, 0, 2, 5, 2**40, 100, 7, 3, 2**40, 4096),
        ]
        info = {"text": "ok \ud83d", "pair": (5, 2**70), 7: [None, b"\x00", {"deep": [1.5, True]}]}
        rollout = Rollout({"ids": torch.arange(5), "half": torch.ones(2, 2, dtype=torch.bfloat16)}, info={"more": info})
        packed = pack(rollout, Item("a", 0, 1, 2), member=0, attempt=1, life=0, versions=(0, 0))
        weight = torch.ones(3)
        captured = CapturedState(
            "a", {"weight": weight, "tied": weight, "dtype": torch.int8, "size": weight.shape, **info}
        )
        path = self.path + ".seed"
        captured.write(OsFiles(), path)
        trainer = Path(path).read_bytes()
        os.unlink(path)
        manifest = encode_manifest(Manifest(run_id="00", files=[FileInfo(path="files/a", bytes=3, crc32c="00000000")]))
        item = packed[-len(msgspec.msgpack.encode(read_header(packed))) :]
        journal = frame(EVENTS, encode_events(events), sequence=1, number=3) + frame(SYNCED, b"", sequence=3)
        return {
            "frames": [journal, frame(PAYLOAD, packed, sequence=3), b""],
            "sealed frames": [journal, frame(PAYLOAD, packed, sequence=3) + journal],
            "events": [encode_events(events), encode_events([inherited])],
            "payload": [packed],
            "item": [item],
            "manifest": [manifest],
            "sealed manifest": [manifest],
            "progress": [encode_progress(Progress(), {"unknown": [1]})],
            "inherited": [msgspec.msgpack.encode(inherited)],
            "trainer": [trainer],
            "tree": [captured._tree],
        }
