"""Trajectories of one or more buffers to one or more new ones: what merging and splitting of them have in common.

In a new buffer trajectories come in the order of the numbers in their ids (:mod:`pipeline.tools.shelved`), of one
number in the order of the parts. If the numbers follow each other they stay; then whole segments of which everything is
wanted need not be copied.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import blob_head
from pipeline.buffer.transitions.bodies import stored_name
from pipeline.buffer.transitions.columns import Schema
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import TRAJECTORIES, MadeOf, Manifest
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_state import TrajectoryState
from pipeline.store.codec import ITEM_KEY
from pipeline.store.layout import Layout, SegmentKey, segment_key, segment_name, write_file
from pipeline.store.segments import Block, SegmentInfo
from pipeline.tools.kept_rows import KEY_FILE, PART_FILE
from pipeline.tools.linking import related_run, take_segments
from pipeline.tools.made import Made
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.related import Descent, Read
from pipeline.tools.shelf_files import add_shelf
from pipeline.tools.shelved import Shelved, shelves_of
from pipeline.tools.sources import Source, check_columns, counted, left_out_of, named
from pipeline.tools.writing import SegmentWriter, committed

Ints = np.ndarray
IDS_FILE = "ids.json"
_LINKED, _OWN = 1, 2  # incarnations: of segments that are taken over, and of those that are written


class EveryTrajectory(NamedTuple):
    """All that is read, in its order.

    Attributes:
        sources: the runs.
        shelves: their buffers, of each of several ranks its own.
        parts: what names trajectories, in the order in which those of one number come.
        shelf, at: [n] which of the shelves each trajectory is of, and where it stands there.
        part, number: [n] what names it.
    """

    sources: Sequence[Source]
    shelves: list[Shelved]
    parts: list[MadeOf]
    shelf: Ints
    at: Ints
    part: Ints
    number: Ints

    @property
    def reads(self) -> list[Read]:
        """What names the trajectories of each buffer."""
        return [Read(each.source, each.parts) for each in self.shelves]

    @property
    def schema(self) -> Schema | None:
        """The fields."""
        return next((each.state.schema for each in self.shelves if each.state.schema is not None), None)


def every_trajectory(sources: Sequence[Source]) -> EveryTrajectory:
    """Read what there is.

    Raises:
        ConfigError: fields differ, or two runs have a trajectory in common.
        Damaged: something is missing or was changed.
    """
    shelves = [each for run, source in enumerate(sources) for each in shelves_of(source, run)]
    check_columns("field", [(each.where, each.state.columns) for each in shelves if each.state.columns is not None])
    return EveryTrajectory(sources, shelves, *named("trajectory", shelves))


class _Part(NamedTuple):
    """Some trajectories of all, by where they stand there, and the numbers that they get."""

    every: EveryTrajectory
    places: Ints
    numbers: Ints

    @classmethod
    def of(cls, every: EveryTrajectory, taken: Ints) -> _Part:
        places = np.flatnonzero(taken)
        numbers = every.number[places]
        if len(numbers) and not np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers))):
            numbers = np.arange(len(numbers))
        return cls(every, places, numbers)

    def each(self) -> list[tuple[Shelved, TrajectoryInfo, Block, int]]:
        """Return of each trajectory where it lies, what is known of it, and its number now."""
        every, found = self.every, []
        for place, number in zip(self.places.tolist(), self.numbers.tolist(), strict=True):
            shelf = every.shelves[int(every.shelf[place])]
            at = int(every.at[place])
            found.append((shelf, shelf.infos[at], shelf.blocks[at], number))
        return found

    def whole_segments(self) -> dict[int, list[SegmentInfo]]:
        """Return by run the segments of which every trajectory is here, under the number that it was written by."""
        every = self.every
        kept, there = Counter[tuple[int, SegmentKey]](), Counter[tuple[int, SegmentKey]]()
        for place, number in zip(self.places.tolist(), self.numbers.tolist(), strict=True):
            shelf = every.shelves[int(every.shelf[place])]
            block = shelf.blocks[int(every.at[place])]
            if block.first == number:
                kept[shelf.run, block.segment_key] += 1
        for shelf in every.shelves:
            there.update((shelf.run, block.segment_key) for block in shelf.blocks)
        found: dict[int, list[SegmentInfo]] = {}
        for run, source in enumerate(every.sources):
            infos = [(run, segment_key(info.name), info) for info in source.stored.manifest.segments]
            found[run] = [info for run, key, info in infos if 0 < there[run, key] == kept[run, key]]
        return found


def told_of(every: EveryTrajectory, taken: Ints, directory: str) -> Made:
    """Return what a new buffer would be."""
    each = _Part.of(every, taken).each()
    return Made(
        directory=directory,
        kind=TRAJECTORIES,
        step=max(shelf.source.stored.manifest.step for shelf in every.shelves),
        units=len(each),
        rows=sum(info.num_samples for _, info, _, _ in each),
        bytes=sum(block.length for _, _, block, _ in each),
        renumbered=sum(info.trajectory_id != number for _, info, _, number in each),
        left_out=left_out_of(every.sources),
        made_of=every.parts,
    )


def shelve(every: EveryTrajectory, parts: Sequence[Ints], outputs: Outputs, tool: str, told: Told | None) -> list[Made]:
    """Write new buffers into outputs that have begun; ``parts``: of each, [n] bool, which of all trajectories it has.

    Raises:
        Damaged, StoreError: something cannot be read.
        WriteFailed: something cannot be written.
    """
    done, total = 0, sum(block.length for each in every.shelves for block in each.blocks)

    def wrote(size: int) -> None:
        nonlocal done
        done += size
        if told is not None:
            told(done, total)

    made, descent = [], Descent(every.reads, len(parts))
    for output, taken in zip(outputs.each, parts, strict=True):
        writer = _Writer(output, _Part.of(every, taken), tool, wrote, descent)
        try:
            made.append(writer.write(told_of(every, taken, output.directory)))
        finally:
            writer.close()
    return made


class _Writer:
    """Writes one new buffer."""

    def __init__(self, output: Output, part: _Part, tool: str, wrote: Callable[[int], None], descent: Descent) -> None:
        self._output, self._part, self._tool, self._wrote, self._descent = output, part, tool, wrote, descent
        self._layout = Layout(output.folder)
        sources, whole = part.every.sources, part.whole_segments()
        by_tag = Counter[int]()
        for at, infos in whole.items():
            by_tag[sources[at].tag] += sum(info.bytes for info in infos)
        tag = max(by_tag, key=lambda tag: by_tag[tag], default=0)
        like = next((each.run_id for each in sources if each.tag == tag), "")
        run = related_run(like) if by_tag[tag] else None
        self._run = self._layout.create_folders(output.files, run)
        self._whole = {at: infos for at, infos in whole.items() if run is not None and sources[at].tag == tag}
        self._segments = SegmentWriter(self._layout, output.files, self._run.tag, incarnation=_OWN)
        self._linked: dict[tuple[int, SegmentKey], SegmentKey] = {}
        self._infos: list[SegmentInfo] = []

    def write(self, made: Made) -> Made:
        """Write all of it."""
        linked = self._link()
        blocks = self._payloads()
        wrote = self._segments.finish(time.time(), self._tool)
        wrote = wrote._replace(segments=[*self._with_live(blocks), *wrote.segments])
        generation = GenerationWriter(self._layout, self._output.files, 0)
        generation.begin()
        self._files(generation, blocks)
        part, every = self._part, self._part.every
        parts = counted(every.parts, every.part[part.places])
        first = every.shelves[0].source.stored.manifest
        manifest = Manifest(
            step=made.step,
            reason=self._tool,
            options={**first.options, "directory": self._output.directory},
            left_out=made.left_out,
            made_of=parts,
        )
        whole = committed(generation, [wrote], manifest, self._run, kind=TRAJECTORIES)
        origins = zip(
            part.numbers.tolist(), every.part[part.places].tolist(), every.number[part.places].tolist(), strict=True
        )
        ids = {"parts": parts, "trajectories": [list(each) for each in origins]}
        files = self._output.files
        write_file(files, os.path.join(self._layout.directory, IDS_FILE), msgspec.json.encode(ids) + b"\n")
        self._layout.write_marker(files, self._descent.of(self._run, parts))
        return msgspec.structs.replace(made, run_id=whole.run_id, linked=min(linked, made.bytes), made_of=parts)

    def _link(self) -> int:
        """Take whole segments over; return the bytes of payloads in those that are linked."""
        linked = number = 0
        for at, infos in self._whole.items():
            source, names = self._part.every.sources[at], {}
            for info in infos:
                number += 1
                key = (_LINKED, 0, number)
                self._linked[at, segment_key(info.name)] = key
                names[info.name] = segment_name(key)
                self._infos.append(SegmentInfo(name=segment_name(key), bytes=info.bytes, sealed=True))
            linked += take_segments(source, infos, self._layout, self._output.files, names)
        return linked

    def _with_live(self, blocks: Sequence[Block]) -> list[SegmentInfo]:
        live: dict[SegmentKey, int] = {}
        for block in blocks:
            live[block.segment_key] = live.get(block.segment_key, 0) + block.length
        return [msgspec.structs.replace(info, live=live[segment_key(info.name)]) for info in self._infos]

    def _payloads(self) -> list[Block]:
        """Write what is not taken over, and return where everything lies."""
        blocks, schema = [], self._part.every.schema
        blobs = None if schema is None else BlobLayout(schema)
        for shelf, info, block, number in self._part.each():
            key = self._linked.get((shelf.run, block.segment_key))
            if key is not None:
                blocks.append(Block(number, 1, *key, block.offset, block.length))
            else:
                assert blobs is not None
                payload: bytes | memoryview = shelf.payload(blobs, info, block)
                if block.first != number:
                    payload = renumbered(blobs, payload, msgspec.structs.replace(info, trajectory_id=number))
                blocks.append(self._segments.payload(payload, number, 1))
            self._wrote(block.length)
        return blocks

    def _files(self, generation: GenerationWriter, blocks: Sequence[Block]) -> None:
        part, every = self._part, self._part.every
        schema = every.schema
        state = TrajectoryState(
            columns=None if schema is None else list(schema.columns),
            trajectory_counter=int(part.numbers[-1]) + 1 if len(part.numbers) else 0,
            sample_window_size=every.shelves[0].state.sample_window_size,
        )
        unknown: dict[str, Any] = {}
        for each in reversed(every.shelves):
            unknown |= each.unknown
        add_shelf(generation, "", state, unknown, [info for _, info, _, _ in part.each()], blocks)
        generation.add(PART_FILE, every.part[part.places].astype(np.int32).tobytes())
        generation.add(KEY_FILE, every.number[part.places].astype(np.int64).tobytes())

    def close(self) -> None:
        """Give files back, after an error."""
        self._segments.close()


def renumbered(blobs: BlobLayout, payload: bytes | memoryview, info: TrajectoryInfo) -> bytes:
    """Return the payload of a trajectory as that of one with another number."""
    item = msgspec.msgpack.encode(info)
    parts = [(each.name, stored_name(each), (*info.shape, *each.shape)) for each in blobs.columns]
    head, offsets = blob_head([*parts, (ITEM_KEY, "U8", (len(item),))])
    begin = 8 + int.from_bytes(payload[:8], "little")
    return b"".join([head, payload[begin : begin + offsets[-2]], item])
