"""Salvaging a buffer of trajectories, of one process or of several ranks: a new run out of those that are whole.

Each lies in one block, which is whole or not, and stays with the rank that had it. Those that are kept follow each
other there: the newest have the numbers that they had, and those before a gap higher ones, as numbers have no gaps. A
rank whose shard cannot be read begins without any.

Payloads are read twice, a few at a time: to look which are whole, and to copy these.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.generations import GenerationWriter, Stored, check_generation
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import TRAJECTORY_SHARDS, Manifest, ShardInfo, shard_prefix
from pipeline.errors import Damaged, ForebayError, WriteFailed
from pipeline.replay.ahead import ahead
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.salvage_choice import Chosen, choose_generation, payload_loss
from pipeline.replay.state import generator_state
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_shards import TrajectoriesOnDisk, read_trajectory_shards, schema_of
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, RunFile
from pipeline.store.segments import Block, PayloadReader
from pipeline.tools.linking import life_after
from pipeline.tools.salvaged_files import Attached
from pipeline.tools.shelf_files import add_shelf
from pipeline.tools.shelved import as_written, listed_alone
from pipeline.tools.shelves import renumbered
from pipeline.tools.writing import SegmentWriter, Wrote, committed

REASON = "salvage"


class SavedTrajectories(NamedTuple):
    """What is whole of a buffer of trajectories, and what is not.

    Attributes:
        chosen: the generation that it is of.
        origin: run id and generation of that.
        run_id: the new run's; empty after a rehearsal.
        shards: what each rank has, or the one process.
        lost: ranks whose shards cannot be read.
        kept, missing: trajectories.
        rows_missing: rows of those that are gone.
        losses: each place that is not whole.
    """

    chosen: Chosen
    origin: str
    run_id: str
    shards: list[ShardInfo]
    lost: list[int]
    kept: int
    missing: int
    rows_missing: int
    losses: list[Loss]


def salvage_trajectories(
    layout: Layout, target: str, *, kind: str, step: int | None, called: str, files: FilesLike, rehearse: bool
) -> SavedTrajectories:
    """Write what is whole of a damaged buffer into a new run in ``target``, which is absent or empty and will be called
    ``called``. Blocks; the damaged run is only read.

    Args:
        layout: the damaged run's.
        target, called: where the new run goes.
        kind: that of the run: of one process, or of ranks.
        step: begin with the newest generation of this step.
        files: the file layer.
        rehearse: whether nothing is written.

    Raises:
        UsageError: the run is of another kind.
        NotARun, Damaged, StoreError: as :func:`~pipeline.replay.salvage_choice.choose_generation`.
        WriteFailed: it could not be written.
    """
    chosen = choose_generation(layout, kind, step)
    manifest = chosen.stored.manifest
    job = _Job(layout, chosen)
    job.look()
    run_id, origin = "", f"{manifest.run_id}/{manifest.generation}"
    if not rehearse:
        try:
            run_id = job.write(target, files, origin=origin, called=called)
        except ForebayError:
            raise
        except OSError as error:
            raise WriteFailed(f"{target}: could not be written: {error}. Remove it, and try again") from error
    return SavedTrajectories(
        chosen=chosen,
        origin=origin,
        run_id=run_id,
        shards=[job.info(rank) for rank in range(len(job.whole))],
        lost=sorted(job.gone),
        kept=sum(len(each.infos) for each in job.whole),
        missing=job.missing,
        rows_missing=job.rows_missing,
        losses=[*chosen.losses, *job.losses],
    )


class _Job:
    """The trajectories of a damaged run."""

    def __init__(self, layout: Layout, chosen: Chosen) -> None:
        self._layout, self._chosen, self._stored = layout, chosen, chosen.stored
        self._of_ranks = self._stored.manifest.kind == TRAJECTORY_SHARDS
        gone: list[ShardInfo] = []
        self._shards = read_trajectory_shards(self._stored, gone) if self._of_ranks else [listed_alone(self._stored)]
        schema = schema_of(self._shards)
        self._blobs = None if schema is None else BlobLayout(schema)
        self._reader = PayloadReader(layout, chosen.run_tag, forgiving=True)
        self._attached = Attached(chosen)
        self.gone = {info.rank: info for info in gone}
        """What the manifest says of shards that cannot be read."""
        self.whole: list[TrajectoriesOnDisk] = []
        """What is left of each."""
        self.losses: list[Loss] = []
        self.missing = sum(info.episodes for info in gone)
        self.rows_missing = sum(info.held for info in gone)

    # -- looking -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read every payload, and note what is whole."""
        for shard in self._shards:
            hurt = {at: found for at, found in self._each(shard) if isinstance(found, Damaged)}
            for at, error in sorted(hurt.items()):
                what = _called(shard.infos[at], shard.rank if self._of_ranks else None)
                self.losses.append(payload_loss(self._layout, shard.blocks[at], error, what))
            self.missing += len(hurt)
            self.rows_missing += sum(shard.infos[at].num_samples for at in hurt)
            self.whole.append(shard.without(hurt))

    def _each(self, shard: TrajectoriesOnDisk) -> Iterator[tuple[int, bytes | Damaged]]:
        """Yield where each trajectory stands in the list, and its payload or what is wrong with it; file by file."""
        places = {block.place: at for at, block in enumerate(shard.blocks)}
        with contextlib.closing(ahead(self._reader.each(places))) as each:
            for place, found in each:
                at = places[place]
                yield at, found if isinstance(found, Damaged) else self._checked(shard, at, found)

    def _checked(self, shard: TrajectoriesOnDisk, at: int, payload: bytes) -> bytes | Damaged:
        assert self._blobs is not None
        block = shard.blocks[at]
        try:
            where = f"{self._layout.segment(*block.segment_key)} at byte {block.offset}"
            self._blobs.decode(payload, as_written(shard.infos[at], block), where)
        except Damaged as error:
            return error
        return payload

    def _added(self, shard: TrajectoriesOnDisk) -> int:
        info = self.gone.get(shard.rank) if self._of_ranks else None
        return shard.added if info is None else info.added

    def info(self, rank: int, nbytes: int = 0) -> ShardInfo:
        """Return what the manifest says of a rank; of one process, what it says of that."""
        shard = self.whole[rank]
        rows = sum(info.num_samples for info in shard.infos)
        new = ShardInfo(rank=rank, rows=rows, saved=rows, added=self._added(shard), bytes=nbytes)
        if not self._of_ranks:
            return new
        before = self._stored.manifest.shards[rank]
        own, age = self._attached.own(before), before.age
        return msgspec.structs.replace(new, episodes=len(shard.infos), own=own, age=age)

    # -- writing -----------------------------------------------------------------------------------------------

    def write(self, directory: str, files: FilesLike, *, origin: str, called: str) -> str:
        """Write what is whole, and return the id of the new run. What a failure leaves is the caller's to remove."""
        before, layout = self._stored.manifest, Layout(directory)
        came = ways_after(self._layout, before.run_id, before)
        run = layout.create_folders(files, made_of=came)
        # What ranks add is named by their life: it is to come after all that there were.
        life = life_after(self._layout, before.incarnation) if self._of_ranks else 1
        generation = GenerationWriter(layout, files, 0)
        wrote: list[Wrote] = []
        shards: list[ShardInfo] = []
        with contextlib.ExitStack() as stack:
            stack.callback(generation.abandon)  # does nothing once it was committed
            generation.begin_with((), self._attached.files())
            for rank in range(len(self.whole)):
                segments = SegmentWriter(layout, files, run.tag, incarnation=life, rank=rank)
                with contextlib.closing(segments):
                    blocks = self._copied(rank, segments)
                    self._list(rank, generation, blocks, life)
                    wrote.append(segments.finish(time.time(), REASON))
                shards.append(self.info(rank, segments.bytes))
            manifest = self._manifest(shards, origin, called)
            made = committed(generation, wrote, manifest, run, kind=before.kind)
        return self._finished(layout, run, files, Stored(generation.final, made))

    def _finished(self, layout: Layout, run: RunFile, files: FilesLike, stored: Stored) -> str:
        check_generation(stored)  # it was copied from a disk that may have faults
        layout.write_marker(files, run)
        return run.run_id

    def _copied(self, rank: int, segments: SegmentWriter) -> list[Block]:
        """Copy what a rank has, and return where it lies, oldest first.

        Raises:
            Damaged: something was whole a moment ago.
        """
        shard = self.whole[rank]
        first, found = self._added(shard) - len(shard.infos), dict[int, Block]()
        for at, payload in self._each(shard):
            if isinstance(payload, Damaged):
                raise payload
            number, blob = first + at, payload
            if shard.blocks[at].first != number:
                assert self._blobs is not None
                info = msgspec.structs.replace(shard.infos[at], trajectory_id=number)
                blob = renumbered(self._blobs, payload, info)
            found[at] = segments.payload(blob, number, 1)
        return [found[at] for at in range(len(shard.infos))]

    def _list(self, rank: int, generation: GenerationWriter, blocks: Sequence[Block], life: int) -> None:
        shard, added = self.whole[rank], self._added(self.whole[rank])
        state = msgspec.structs.replace(shard.state, trajectory_counter=added)
        if rank in self.gone:  # its stream of draws is gone: it begins one of its own
            seed = int(self._stored.manifest.options.get("seed", 0))
            state.generator = generator_state(np.random.Generator(np.random.PCG64([seed, life, rank])))
        names = {"uid.int64": shard.table.uid, "age.int64": shard.table.age} if self._of_ranks else {}
        prefix = shard_prefix(rank) if self._of_ranks else ""
        add_shelf(generation, prefix, state, shard.unknown, shard.infos, blocks, names)

    def _manifest(self, shards: list[ShardInfo], origin: str, called: str) -> Manifest:
        before = self._stored.manifest
        return Manifest(
            step=before.step,
            reason=REASON,
            world_size=len(shards),
            shards=shards,
            attached=self._attached.names(),
            options={**before.options, "directory": called},
            left_out=self._attached.left_out(),
            origin=origin,
            external=before.external,
        )


def _called(info: TrajectoryInfo, rank: int | None) -> str:
    steps, envs = info.shape
    of = "" if rank is None else f" of rank {rank}"
    return f"trajectory {info.trajectory_id}{of}, of {steps} steps in {envs} environments"
