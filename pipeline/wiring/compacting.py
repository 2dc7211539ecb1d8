"""Compaction: what little is live in a segment moves into a new one, so that the old one can go.

One group that waits for long would else keep a whole segment. A payload is copied first and written; then, if it has
not been let go meanwhile, an event says that it lies there now. Generations from before still find it where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio.lowlevel

from pipeline.checkpoint.collect import archived
from pipeline.checkpoint.manifest import Manifest
from pipeline.errors import Damaged, StoreError
from pipeline.locations import Location
from pipeline.observe import events
from pipeline.records import Moved
from pipeline.store.frames import PAYLOAD, scan
from pipeline.store.layout import Layout, SegmentKey, segment_key, segment_name
from pipeline.store.segments import PayloadReader, Place
from pipeline.store.service import RunBlocking
from pipeline.wiring.state import RunState

SPARSE = 0.25
"""A segment of which less than this is live is worth copying from."""
_TURN = 200  # payloads that are looked at in one turn of the loop


class Compactor:
    """Empties one sparse segment at a time."""

    def __init__(self, state: RunState, layout: Layout, run_tag: int, in_thread: RunBlocking[Any]) -> None:
        self._state, self._layout, self._run_tag, self._in_thread = state, layout, run_tag, in_thread
        self._left_alone: set[SegmentKey] = set()
        self.busy = False

    def sparsest(self, manifest: Manifest) -> SegmentKey | None:
        """Return the segment that is to be emptied, if dead bytes are several times the live ones."""
        options, own = self._state.options, manifest.incarnation
        begun = max((each.segment for each in manifest.journals if each.incarnation == own), default=0)
        live = self._state.buffer.storage.live  # partial rollouts and evaluations go by themselves, and soon
        held = [(key, info) for info in manifest.segments if (key := segment_key(info.name)) in live]
        held = [(key, info) for key, info in held if not archived(key[2], options.archived_share)]  # they stay anyway
        dead = sum(info.bytes - info.live for _, info in held)
        if dead <= 2 * options.segment_bytes + sum(info.live for _, info in held) / SPARSE:
            return None
        sparse = [
            (info.live / info.bytes, key)
            for key, info in held
            if info.live < SPARSE * info.bytes and key not in self._left_alone and (key[0] != own or key[2] < begun)
        ]
        return min(sparse)[1] if sparse else None

    async def empty(self, key: SegmentKey) -> None:
        """Copy what is live in a segment, and say so in the journal."""
        state, self.busy = self._state, True
        assert state.writer is not None
        try:
            live = await self._live(key)
            reader = PayloadReader(self._layout, self._run_tag)
            blobs = await self._in_thread(lambda: reader.read_many(live))
            moved: list[tuple[Place, Location]] = []
            for uid, member, at in live:
                await state.writer.room()
                entry = state.ledger.entries.get(uid)
                if entry is not None:
                    place = state.writer.writer.place(blobs[uid, member], uid, member, entry.life)
                    state.writer.notify()  # or a queue that these fill would never be written
                    moved.append(((uid, member, at), place))
                    state.moving.add(place.segment_key)
            await state.writer.flush()  # from here on it can be read there
            for (uid, member, at), to in moved:
                if state.buffer.storage.move(uid, member, at, to):
                    state.record(Moved(uid, member, to.segment, to.offset, to.length))
            left = state.buffer.storage.live.get(key, 0)
            if left:
                raise Damaged(
                    f"{self._layout.segment(*key)}: {left} bytes of payloads that are needed were not found in it"
                )
            size = sum(to.length for _, to in moved)
            state.log.info(events.SEGMENT_COMPACTED, file=segment_name(key), payloads=len(moved), bytes=size)
        except StoreError as error:
            # A damaged payload is found again, and raised, when its batch is due; a failed write, by the next verb.
            self._left_alone.add(key)
            state.log.warning(events.SEGMENT_COMPACTED, file=segment_name(key), payloads=0, error=str(error))
        finally:
            self.busy = False
            state.moving.clear()

    async def _live(self, key: SegmentKey) -> list[Place]:
        """Return the places in a segment that are held now."""
        places, live = await self._in_thread(lambda: list(self._listed(key))), list[Place]()
        for turn in range(0, len(places), _TURN):
            await anyio.lowlevel.checkpoint()
            live += [place for place in places[turn : turn + _TURN] if self._state.buffer.storage.holds(*place)]
        return live

    def _listed(self, key: SegmentKey) -> Iterator[Place]:
        for offset, header, payload in scan(self._layout.segment(*key), run_tag=self._run_tag):
            if header.kind == PAYLOAD:
                yield header.sequence, header.number, Location(*key, offset, len(payload))
