"""A replay buffer as its pipeline sees it: rows come from rollouts, and are saved with the run."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.blocks import KEPT_MARKS, decode_block, encode_block, rows_of_block
from pipeline.buffer.transitions.bodies import BODIES, places_said
from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.layout import END, OPEN
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.generations import Stored
from pipeline.config import ReplayOptions
from pipeline.errors import ConfigError, Damaged, UsageError
from pipeline.locations import Location
from pipeline.records import Added
from pipeline.replay.heavy import heavy_sample
from pipeline.replay.job import Job, Piece, files_of, listed, merged_from
from pipeline.replay.loading import ReadRows, read_state
from pipeline.replay.parts import DRAWING, Parts, restore, state_of, values_of
from pipeline.replay.state import STATE_FILE
from pipeline.store.codec import bodies_of_head, read_bytes, tensor_of
from pipeline.store.layout import Layout, SegmentKey
from pipeline.store.segments import Block
from pipeline.wiring.feed import Reading

if TYPE_CHECKING:
    from pipeline.replay.buffer import ReplayBuffer


class Inside(NamedTuple):
    """What of a buffer its feed needs beside the verbs."""

    parts: Callable[[], Parts]
    parts_of: Callable[[Ring], Parts]
    """Parts of a buffer of the rows of a ring, as they are at the beginning."""
    use: Callable[[Parts, int], None]
    """Go on with other parts, and so many late updates of priorities."""
    extend: Callable[..., Sequence[int]]
    counts: Callable[[], tuple[Counts, int]]
    """The limiter's, and the late updates."""
    leave: Callable[[], None]
    """Let others fill it again."""


def check_feedable(options: ReplayOptions, ring: Ring) -> None:
    """Refuse a buffer that a pipeline cannot fill.

    Raises:
        ConfigError: an option of it is in the way.
        UsageError: it holds rows already, or is another pipeline's.
    """
    for option, value, why in (
        ("directory", options.directory, "the pipeline's directory= holds its rows as well"),
        ("storage", options.storage if options.storage != "memory" else None, "a pipeline's rows lie in this process"),
        ("share_next_obs", options.share_next_obs or None, "a pipeline's rows hold their own next observations"),
        ("compress", options.compress, "a pipeline's rows are added again from their blocks"),
        ("incomplete", options.incomplete if options.incomplete != "keep" else None, "a pipeline's rows are kept"),
        ("remove", options.remove if options.remove.by != "fifo" else None, "a pipeline's oldest rows go first"),
    ):
        if value is not None:
            raise ConfigError.of(option, value, f"of a buffer that a pipeline fills: {why}; leave it out")
    if ring.added:
        raise UsageError("the buffer holds rows that no rollout of this run made; give the pipeline an empty one")


class Captured:
    """What a generation holds of a buffer, as of one moment."""

    def __init__(self, job: Job, blocks: list[Block], unknown: dict[str, Any]) -> None:
        """Args:
        job: the rows that are to be written, and the state.
        blocks: where rows lie already.
        unknown: fields of the state that a newer version knows, and that are carried along.
        """
        self._job, self._blocks, self._unknown = job, blocks, unknown

    def kept(self) -> list[Block]:
        """Return those of the blocks on the disk that it needs."""
        return self._job.kept(self._blocks)

    def pieces(self) -> Iterator[Piece]:
        """Yield the rows that are to be written. Blocks, and belongs to one thread."""
        return self._job.pieces()

    def written(self, blocks: list[Block]) -> tuple[dict[str, bytes | memoryview], Mapping[SegmentKey, int]]:
        """Return its files by their paths, and the bytes that it needs by segment; ``blocks`` are where all its rows
        lie. Blocks."""
        listing = listed(blocks)
        return dict(files_of(self._job, listing, self._unknown)), listing.live

    def close(self) -> None:
        """Let rows be overwritten that were not copied."""
        self._job.close()


class Restored:
    """A buffer as a generation holds it, and as it became after that; nothing of it is in use."""

    def __init__(self, parts: Parts, found: ReadRows) -> None:
        self.parts, self.blocks, self.unknown = parts, found.blocks, found.unknown
        self.stale_updates = found.state.stale_updates

    def add(self, blob: bytes, event: Added, at: Location, version: int) -> None:
        """Add the rows of a block that came later; of weights no newer than ``version``.

        Raises:
            Damaged: they are not those that are to come next, or not of these columns.
        """
        ring, where = self.parts.ring, f"rows {event.first} to {event.first + event.count}"
        if ring.added != event.first:
            raise Damaged(f"{where}: the next are to be those from {ring.added} on; a journal is missing, or changed")
        if ring.storage.schema is None:
            ring.storage.shape(schema_of(blob, where))
        assert ring.storage.schema is not None
        arrays = decode_block(blob, ring.storage.schema, event.count, where)
        ends = arrays[END]
        columns = {name: array for name, array in arrays.items() if name not in KEPT_MARKS}
        codes = ends if (ends != OPEN).any() else None
        ring.extend(columns, event.count, np.array([event.env]), codes, min(event.version, version))
        self.parts.drawer.added(event.first, event.count)
        self.parts.counts.added += event.count
        self.parts.written.captured = ring.added
        self.blocks.append(Block.at(event.first, event.count, at))

    def cut(self, env: int | None) -> None:
        """End the open episode of an environment, or of all."""
        self.parts.ring.cut(env)


class ReplayFeed:
    """The buffer's side; see :class:`pipeline.wiring.feed.Feed`. Rows are added on the event loop alone."""

    def __init__(self, buffer: ReplayBuffer, inside: Inside) -> None:
        self._buffer, self._inside = buffer, inside
        self._blocks: list[Block] = []
        self._most_blocks = 64
        self._unknown: dict[str, Any] = {}

    def give_back(self) -> None:
        """Let the buffer be filled otherwise: no rollout did."""
        with self._buffer.gate.lock:
            self._inside.leave()

    def extend(self, rows: Any, env: int, version: int) -> tuple[int, int]:
        """Add rows, and return the key of the first, and how many they are."""
        buffer = self._buffer
        with buffer.gate.lock:
            first = buffer.ring.added
            self._inside.extend(rows, env, None, None, version, 0)
            count = buffer.ring.added - first
        buffer.gate.changed()
        return first, count

    def encode(self, first: int, count: int) -> memoryview:
        """Return a block of rows that are there, as bytes; what is changed of them later is part of generations."""
        with self._buffer.gate.lock:
            blob = encode_block(self._buffer.ring, first, count)
            self._inside.parts().written.captured = first + count
            return blob

    def may_add(self, rows: Any) -> Callable[[], object]:
        """Return what says whether the limiter lets the rows in now.

        Raises:
            ConfigError: it never does, or they are no rows.
        """
        buffer = self._buffer
        schema = buffer.schema or Schema.of(rows)
        _, count = schema.check(rows)
        if count > buffer.options.capacity:
            raise ConfigError(
                f"{count} rows at once, and the buffer holds capacity={buffer.options.capacity}: add fewer at once",
                option="rows",
            )
        self._inside.counts()[0].check_add(count, len(buffer))
        return lambda: buffer.can_add(count)

    def wait_for(self, may: Callable[[], object]) -> Awaitable[None]:
        """Wait until ``may`` holds."""
        return self._buffer.gate.wait_for(may)

    @property
    def added(self) -> int:
        """How many rows were ever added."""
        return self._buffer.ring.added

    @property
    def sampled(self) -> int:
        """How many rows were ever drawn, by whichever verb."""
        return self._inside.counts()[0].sampled

    def sample(self, count: int, how: Mapping[str, Any]) -> TransitionBatch:
        """Return a batch, at once; see :meth:`~pipeline.ReplayBuffer.sample`."""
        return self._buffer.sample(count, timeout=0, **how)

    def large(self, count: int, how: Mapping[str, Any]) -> bool:
        """Whether a batch is better drawn in a thread."""
        return heavy_sample(self._buffer, count, how)

    def cut(self, env: int | None) -> None:
        """End the open episode of an environment, or of all."""
        with self._buffer.gate.lock:
            self._buffer.ring.cut(env)

    def wrote(self, first: int, count: int, at: Location) -> None:
        """Take in where rows lie."""
        self._blocks.append(Block.at(first, count, at))
        if len(self._blocks) > self._most_blocks:  # nobody may save for long
            self._forget_gone()
            self._most_blocks = 2 * len(self._blocks) + 64

    def _forget_gone(self) -> None:
        oldest = self._buffer.ring.oldest
        self._blocks = [block for block in self._blocks if block.first + block.count > oldest]

    def lie_in(self, blocks: Sequence[Block]) -> None:
        """Take in where the rows lie that a generation holds; what was added since lies where it was said to."""
        known = sorted(blocks, key=lambda block: block.first)
        end = known[-1].first + known[-1].count if known else 0
        self._blocks = known + [block for block in self._blocks if block.first >= end]

    def capture(self) -> Captured:
        """Capture everything as of now."""
        buffer = self._buffer
        with buffer.gate.lock:
            parts, ring = self._inside.parts(), buffer.ring
            parts.written.captured = ring.added
            self._forget_gone()
            begin = merged_from(self._blocks, rows_of_block(ring))
            first = self._blocks[begin].first if begin < len(self._blocks) else self._end_of_blocks()
            state = state_of(parts, buffer.options, self._inside.counts()[1])
            given = buffer.options.to_dict()
            state = msgspec.structs.replace(state, options={name: given[name] for name in DRAWING})
            return Captured(Job(ring, buffer.gate, state, values_of(parts), first), list(self._blocks), self._unknown)

    def _end_of_blocks(self) -> int:
        return self._blocks[-1].first + self._blocks[-1].count if self._blocks else 0

    def read(self, layout: Layout, run_tag: int, stored: Stored) -> Restored:
        """Read what a generation holds. Blocks.

        Raises:
            Damaged: it cannot be read.
            UsageError: the generation is of a run without a buffer, or its rows are not those of this one.
        """
        if not os.path.exists(os.path.join(stored.folder, STATE_FILE)):
            raise UsageError(
                f"{stored.folder}: the run was begun without a buffer; build the Pipeline without buffer=, or choose "
                "another directory"
            )
        buffer = self._buffer
        found = read_state(layout, run_tag, stored, buffer.ring)
        parts = self._inside.parts_of(found.ring)
        try:
            restore(parts, buffer.options, found.state, found.values)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{stored.folder}: the buffer's state does not fit together ({error!r})") from None
        return Restored(parts, found)

    def adopt(self, reading: Reading) -> None:
        """Go on with what :meth:`read` gave."""
        assert isinstance(reading, Restored)
        with self._buffer.gate.lock:
            self._inside.use(reading.parts, reading.stale_updates)
        self._blocks, self._unknown = reading.blocks, reading.unknown
        self._buffer.gate.changed()

    def statistics(self) -> Any:
        """Return how the buffer stands."""
        return self._buffer.statistics()


def schema_of(blob: bytes, where: str) -> Schema:
    """Return the columns of a block.

    Raises:
        Damaged: it is none.
    """
    found = read_bytes(blob, where)
    try:
        tensors = {name: tensor_of(each.dtype, each.shape, each.array.copy()) for name, each in found.items()}
        bodies = found.get(BODIES)
        if bodies is not None:  # small columns lie together
            count, width = bodies.shape
            said = bodies_of_head(memoryview(blob)[: 8 + int.from_bytes(blob[:8], "little")])
            for place in places_said(said):
                values = np.frombuffer(bytearray(place.of(bodies.array.tobytes(), width)), np.uint8)
                tensors[place.name] = tensor_of(place.dtype, (count, *place.shape), values)
        return Schema.of({name: tensor for name, tensor in tensors.items() if not name.startswith("#")})
    except (ConfigError, LookupError, ValueError, RuntimeError) as error:
        raise Damaged(f"{where}: no block of rows ({error})") from None
