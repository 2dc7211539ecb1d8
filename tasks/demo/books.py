"""Reading a run's files for the audit: records of its journals, and the line of checkpoints that its weights came by.

Nothing here writes, and nothing here interprets more than it must: decoders of frames, events and manifests are shared
with the library, what the events add up to is worked out in `audit.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.trainer_state import read_state
from pipeline.errors import Damaged, StoreError
from pipeline.records import Finished, Opened
from pipeline.store.frames import PAYLOAD, read_frame
from pipeline.store.journal import Logged, read_journals
from pipeline.store.layout import Layout


class Stretch(NamedTuple):
    """Steps that survive, ``after < step <= upto``: one incarnation trained them, and a checkpoint holds the result."""

    incarnation: int
    after: int
    upto: int


class Books(NamedTuple):
    """Everything that a run's folder says."""

    layout: Layout
    tag: int
    logged: list[Logged]
    """Every event that was written, by (incarnation, rank, sequence)."""
    newest: Stored | None
    line: list[Stretch]
    """How the newest checkpoint's weights came about, oldest first."""

    @property
    def seed(self) -> int | None:
        """The seed that the run was begun with."""
        return next((each.event.seed for each in self.logged if isinstance(each.event, Opened)), None)

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        return self.newest.manifest.step if self.newest else 0

    def trained_by_checkpoint(self) -> set[int]:
        """Return the uids that the newest checkpoint itself calls trained."""
        if self.newest is None:
            return set()
        with open(os.path.join(self.newest.folder, "consumer.json"), "rb") as file:
            ranges = msgspec.json.decode(file.read())["trained"]
        return {uid for first, last in ranges for uid in range(first, last + 1)}

    def attached(self, name: str) -> Any:
        """Return what the newest checkpoint holds of an attached object, or None."""
        path = f"trainer/{name}.safetensors"
        info = next((each for each in self.newest.manifest.files if each.path == path), None) if self.newest else None
        if self.newest is None or info is None:
            return None
        return read_state(os.path.join(self.newest.folder, path), size=info.bytes, checksum=info.crc32c)

    def holds_payload(self, incarnation: int, rank: int, event: Finished) -> bool:
        """Whether the payload that ``event`` names lies whole in its segment."""
        path = self.layout.segment(incarnation, rank, event.segment)
        try:
            with open(path, "rb") as file:
                frame = read_frame(file, event.offset, path)
        except FileNotFoundError:
            return False
        if frame is None or frame.header.kind != PAYLOAD or frame.header.run_tag != self.tag:
            return False
        return (frame.header.sequence, frame.header.number) == (event.uid, event.member)


def read_books(directory: str) -> Books | None:
    """Read a run's folder, or return None if there is no run in it.

    Raises:
        StoreError: the folder holds something else, or what it holds is damaged.
    """
    layout = Layout(directory)
    run = layout.read_run()
    if run is None:
        return None
    found = find_generations(layout, run.run_id)
    newest = found.complete[-1] if found.complete else None
    if found.damaged and (newest is None or found.damaged[-1][0] > newest.manifest.generation):
        raise found.damaged[-1][1]
    promised = {(each.incarnation, each.rank): each.bytes for each in newest.manifest.journals} if newest else {}
    logged = list(read_journals(layout, run_tag=run.tag, promised=promised))
    return Books(layout, run.tag, logged, newest, surviving_line([each.manifest for each in found.complete]))


def surviving_line(manifests: Sequence[Manifest]) -> list[Stretch]:
    """Follow the newest checkpoint's parents back to the first, and return the steps that lie between them.

    Raises:
        StoreError: a parent is gone, so nobody can tell; a run to be audited keeps every generation (``keep=None``).
        Damaged: the chain leads nowhere.
    """
    by_number = {each.generation: each for each in manifests}
    line: list[Stretch] = []
    child = max(manifests, key=lambda each: each.generation, default=None)
    while child is not None and child.parent >= 0:
        parent = by_number.get(child.parent)
        if parent is None:
            raise StoreError(f"generation {child.parent}, parent of {child.generation}, is gone: nothing to audit by")
        if parent.generation >= child.generation or parent.step > child.step:
            raise Damaged(f"generation {child.generation} names {parent.generation} as its parent, which cannot be")
        if parent.step < child.step:
            line.append(Stretch(child.incarnation, parent.step, child.step))
        child = parent
    return line[::-1]
