"""Writing groups as the first generation of a new run: one journal that begins with what it inherits, and segments."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import PIPELINE, Manifest
from pipeline.errors import Damaged
from pipeline.ledger import FINISHED, Entry
from pipeline.ledger.entry import TaskTotals
from pipeline.records import EXTERNAL, HeldItem, Inherited, Opened
from pipeline.sampler import Progress
from pipeline.store.codec import ITEM_KEY
from pipeline.store.layout import Layout, write_file
from pipeline.tools.groups import (
    ORDER_FILE,
    UID_FILE,
    EveryGroup,
    told_of,
    uids_of,
)
from pipeline.tools.interchange.rollouts_in import generation_files
from pipeline.tools.kept_rows import KEY_FILE, PART_FILE
from pipeline.tools.made import Made
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.related import Descent
from pipeline.tools.sources import counted
from pipeline.tools.writing import SegmentWriter, committed

Ints = np.ndarray
IDS_FILE = "ids.json"


def group(every: EveryGroup, parts: Sequence[Ints], outputs: Outputs, tool: str, told: Told | None) -> list[Made]:
    """Write new runs into outputs that have begun; ``parts``: of each, [n] bool, which of all groups it has.

    Raises:
        Damaged, StoreError: something cannot be read.
        WriteFailed: something cannot be written.
    """
    wholes = [told_of(every, taken, output.directory) for output, taken in zip(outputs.each, parts, strict=True)]
    done, total, made = 0, sum(whole.bytes for whole in wholes), []
    descent = Descent(every.reads, len(parts))
    for output, taken, whole in zip(outputs.each, parts, wholes, strict=True):
        writer = _Writer(output, every, np.flatnonzero(taken), uids_of(every, taken), tool, descent)
        try:
            for size in writer.payloads():
                done += size
                if told is not None:
                    told(done, total)
            made.append(writer.finish(whole))
        finally:
            writer.close()
    return made


class _Writer:
    """Writes one new run."""

    def __init__(
        self, output: Output, every: EveryGroup, places: Ints, uids: Ints, tool: str, descent: Descent
    ) -> None:
        self._output, self._every, self._tool, self._descent = output, every, tool, descent
        self._places, self._uids = places, uids
        self._layout = Layout(output.folder)
        self._run = self._layout.create_folders(output.files)
        self._segments = SegmentWriter(self._layout, output.files, self._run.tag)
        self._items: list[HeldItem] = []
        # Who finished first is handed out first; of one number one part after the other.
        stood = np.lexsort((every.part[places], every.order[places]))
        self._order = np.empty(len(places), np.int64)
        self._order[stood] = np.arange(1, len(places) + 1)

    def payloads(self) -> Iterator[int]:
        """Write the payloads, group by group; yield how many bytes each had."""
        for place, uid, order in zip(self._places.tolist(), self._uids.tolist(), self._order.tolist(), strict=True):
            run, entry = self._every.entry(place)
            lie = []
            for (_, member), blob in sorted(run.reader.read_many(run.payloads(entry)).items()):
                if uid != entry.uid:
                    blob = renamed(blob, uid, run.source.directory)
                at = self._segments.payload(blob, uid, 1, member=member, life=entry.life)
                lie.append((member, at.incarnation, at.rank, at.segment, at.offset, at.length))
                yield len(blob)
            self._items.append(_held(entry, uid, order, tuple(lie)))

    def finish(self, made: Made) -> Made:
        """Write the rest."""
        every, places, first = self._every, self._places, self._every.runs[0]
        inherited = self._inherited()
        seed = first.seed
        host, process, wall = socket.gethostname(), os.getpid(), time.time()
        opened = Opened(1, 0, -1, made.step, made.step, seed, host, process, wall)
        wrote = self._segments.finish(wall, self._tool, [opened, inherited])
        generation = GenerationWriter(self._layout, self._output.files, 0)
        generation.begin()
        for path, content in generation_files(Progress(), made.step).items():
            generation.add(path, content)
        origin = {PART_FILE: every.part, KEY_FILE: every.uid, ORDER_FILE: every.order}
        for path, values in origin.items():
            generation.add(path, values[places].astype(path.rpartition(".")[2]).tobytes())
        generation.add(UID_FILE, self._uids.astype(np.int64).tobytes())
        parts = counted(every.parts, every.part[places])
        before = first.source.stored.manifest
        tasks = {name: task for run in reversed(every.runs) for name, task in run.source.stored.manifest.tasks.items()}
        manifest = Manifest(
            base=1,
            step=made.step,
            reason=self._tool,
            options={**before.options, "directory": self._output.directory},
            tasks=tasks,
            left_out=made.left_out,
            made_of=parts,
        )
        whole = committed(generation, [wrote], manifest, self._run, kind=PIPELINE)
        self._write_ids(parts)
        self._layout.write_marker(self._output.files, self._descent.of(self._run, parts))
        return msgspec.structs.replace(made, run_id=whole.run_id, made_of=parts)

    def _write_ids(self, parts: Sequence[Any]) -> None:
        rows = []
        for place, uid in zip(self._places.tolist(), self._uids.tolist(), strict=True):
            _, entry = self._every.entry(place)
            origin = int(self._every.part[place]), int(self._every.uid[place])
            rows.append([uid, *origin, entry.task, entry.epoch, entry.index])
        content = msgspec.json.encode({"parts": parts, "groups": rows}) + b"\n"
        write_file(self._output.files, os.path.join(self._layout.directory, IDS_FILE), content)

    def _inherited(self) -> Inherited:
        totals: dict[str, TaskTotals] = {}
        for item in self._items:
            task = totals.setdefault(item.task, TaskTotals(dropped={}))
            finished = item.members.count(FINISHED)
            task.claimed += 1
            task.produced += 1
            task.finished += finished
            task.failed += item.size - finished
            task.tokens += item.tokens
            task.reward_sum += item.rewards
            task.reward_count += finished
        shares = {name: share for run in reversed(self._every.runs) for name, share in run.shares.items()}
        return Inherited(
            self._items,
            {},
            shares,
            dict.fromkeys(shares, 0),
            msgspec.to_builtins(totals),
            [],
            int(self._uids.max(initial=-1)) + 1,
        )

    def close(self) -> None:
        """Give files back, after an error."""
        self._segments.close()


def _held(entry: Entry, uid: int, order: int, places: tuple[tuple[int, int, int, int, int, int], ...]) -> HeldItem:
    """Return a group as one that was made elsewhere."""
    return msgspec.structs.replace(
        entry.hold(), uid=uid, epoch=-1, index=-1, position=-1, kind=EXTERNAL, order=order, places=places
    )


def renamed(blob: bytes, uid: int, where: str) -> bytes:
    """Return a payload as that of another group: its tensors bit for bit, and its header but for the uid."""
    begin = 8 + int.from_bytes(blob[:8], "little")
    layout, data = json.loads(blob[8:begin]), memoryview(blob)[begin:]
    first, last = layout[ITEM_KEY]["data_offsets"]
    if last != len(data):
        raise Damaged(f"{where}: the header of a payload does not stand at its end")
    item = msgspec.msgpack.encode({**msgspec.msgpack.decode(data[first:last]), "uid": uid})
    layout[ITEM_KEY] = {"dtype": "U8", "shape": [len(item)], "data_offsets": [first, first + len(item)]}
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return b"".join([len(text).to_bytes(8, "little"), text, data[:first], item])
