"""Salvaging a run whose rollouts fill a buffer of transitions: the items as of any pipeline, and the rows as of any
buffer, those that came after the generation among them.

The new run has one generation, which holds all of these rows. Its journal begins with the items that had not ended.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from pipeline.checkpoint.descent import ORIGIN, ways_after
from pipeline.checkpoint.gathering import generation_losses, progress_of, segment_losses
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.losses import Loss, Salvaged
from pipeline.checkpoint.manifest import CONSUMER_FILE, PIPELINE, PROGRESS_FILE, FileInfo, Manifest
from pipeline.checkpoint.new_run import INCARNATION, REASON, as_found, copy_payloads, encode_half, manifest_of
from pipeline.checkpoint.payloads import PayloadCopy
from pipeline.checkpoint.survey import Candidate, choose_whole, fills_buffer, of_buffer, survey
from pipeline.errors import ForebayError, WriteFailed
from pipeline.ledger import Ledger
from pipeline.records import EXTERNAL, Added, AnyEvent, Claimed, Failed, Interrupted
from pipeline.replay.salvage_choice import Chosen
from pipeline.replay.state import BufferState
from pipeline.sampler.progress import encode_progress
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.tools.found_rows import Found, find_rows
from pipeline.tools.salvaged_run import SalvagedRun
from pipeline.tools.salvaging_rows import RowsInOrder
from pipeline.tools.writing import committed


class SalvagedEpisodes(Salvaged, frozen=True, kw_only=True):
    """What :func:`~pipeline.tools.salvage_run` wrote of a run whose rollouts fill a buffer; it has no groups."""

    rows_kept: int
    rows_lost: int
    episodes_split: int
    """Episodes of which rows in the middle are gone: what comes after these is an episode of its own."""


def salvage_episodes(
    layout: Layout, target: str, *, step: int | None, called: str, files: FilesLike, rehearse: bool
) -> SalvagedEpisodes:
    """Write what is whole of a damaged run into a new one in ``target``, which is absent or empty and will be called
    ``called``. Blocks; the damaged run is only read, and a bounded part of its rows is in memory.

    Raises:
        NotARun, NewerFormat, UsageError, StoreError, Damaged: as :func:`~pipeline.checkpoint.salvage`.
        WriteFailed: it could not be written.
    """
    run, candidates, losses = survey(layout, rows=True)
    candidates = [each for each in candidates if each.manifest is None or fills_buffer(each.manifest)]
    chosen = choose_whole(candidates, step, layout.directory)
    found = find_rows(layout, run.tag, run.run_id, chosen, candidates)
    gathered, manifest = found.gathered, found.gathered.manifest
    of_rows = _as_chosen(chosen, candidates, run.tag)
    rows = RowsInOrder(layout, of_rows, found.state, found.unknown, found.later)
    looked = rows.look()
    run_id, again, more = "", 0, list[Loss]()
    if not rehearse:
        try:
            new = EpisodesRun(of_rows, chosen, found, layout, target, files, called=called)
            with contextlib.closing(new):
                run_id = rows.write(new)
                again, more = new.again, new.losses
        except ForebayError:
            raise
        except OSError as error:
            raise WriteFailed(f"{target}: could not be written: {error}. Remove it, and try again") from error
    losses = [*losses, *generation_losses(layout, candidates, chosen), *gathered.losses, *looked.losses, *more]
    losses += rows.gap_losses()
    losses += segment_losses(layout, candidates, {loss.path for loss in losses})
    return SalvagedEpisodes(
        directory=called,
        run_id=run_id,
        origin=gathered.opened.origin,
        step=manifest.step,
        losses=losses,
        groups_kept=0,
        members_kept=0,
        members_again=again + sum(claim.size for claim in gathered.again),
        items_again=len(gathered.again),
        generations_usable=of_rows.usable,
        generations_unusable=of_rows.unusable,
        left_out=chosen.left_out,
        rows_kept=looked.kept,
        rows_lost=looked.missing,
        episodes_split=looked.split,
    )


def _as_chosen(chosen: Candidate, candidates: Sequence[Candidate], run_tag: int) -> Chosen:
    assert chosen.manifest is not None
    usable = sum(each.half is not None for each in candidates)
    stored = Stored(chosen.folder, chosen.manifest)
    return Chosen(stored, run_tag, chosen.left_out, [], usable, len(candidates) - usable)


class EpisodesRun(SalvagedRun):
    """The new run while it is written."""

    def __init__(
        self,
        of_rows: Chosen,
        chosen: Candidate,
        found: Found,
        layout: Layout,
        directory: str,
        files: FilesLike,
        *,
        called: str,
    ) -> None:
        """Args:
        of_rows, chosen: the generation that it is made from.
        found: its items, and who made its rows.
        layout: of the damaged run.
        directory, files, called: as of :class:`SalvagedRun`.
        """
        gathered = found.gathered
        self._candidate, self._gathered, self._damaged, self._played = chosen, gathered, layout, found.played
        self.again, self.losses = 0, list[Loss]()
        super().__init__(of_rows, directory, files, origin=gathered.opened.origin, called=called)
        ways = ways_after(layout, gathered.manifest.run_id, gathered.manifest)
        self._run = msgspec.structs.replace(self._run, made_of=ways)

    def _taken_over(self) -> list[tuple[str, FileInfo]]:
        """Return the trainer's files, and those that the body of ``checkpoint`` wrote."""
        own = (CONSUMER_FILE, PROGRESS_FILE)
        infos = [info for info in self._source().files if info.path not in own and not info.path.startswith(ORIGIN)]
        folder = self._candidate.folder
        return [(os.path.join(folder, info.path), info) for info in infos if not of_buffer(info.path)]

    def _manifest(self, state: BufferState, nbytes: int) -> Manifest:
        options = {**self._gathered.manifest.options, "directory": self._called}
        made = manifest_of(self._candidate, self._gathered, self.generation, self._run.run_id, options)
        return msgspec.structs.replace(made, reclaimed=self._gathered.reclaimed)

    def _makers(self, ledger: Ledger) -> Iterator[AnyEvent]:
        """Yield events that say of which items the rows are, as far as anybody knows: they change nothing else, as what
        is inherited comes after them."""
        found: dict[int, list[tuple[int, int]]] = {}
        ends = [end for _, end, _ in self.kept]
        for made in self._played.made:
            if made.uid not in self._played.tasks:
                continue
            for at in range(bisect_right(ends, made.first), len(ends)):
                begin, end, now = self.kept[at]
                if begin >= made.end:
                    break
                first, last = max(begin, made.first), min(end, made.end)
                found.setdefault(made.uid, []).append((first - begin + now, last - first))
        for uid, rows in found.items():
            yield Claimed(uid, self._played.tasks[uid], -1, -1, -1, kind=EXTERNAL)
            for first, count in rows:
                yield Added(uid, 0, 1, 0, first, count, 0)
            if uid in ledger.entries:  # another attempt follows
                yield Failed(uid, 0, 1, REASON, "", final=False)
            else:
                yield Interrupted(uid, 0, 1, REASON)

    def _committed(self, manifest: Manifest) -> Manifest:
        gathered = self._gathered
        tag, store = self._chosen.run_tag, self.segments.store
        copied = copy_payloads(self._damaged, gathered, PayloadCopy(self._damaged, tag, store))
        self.again, self.losses = copied.again, copied.losses
        half, ledger = as_found(gathered, copied.inherited)
        ledger.check()
        self.generation.add(CONSUMER_FILE, encode_half(half))
        progress = encode_progress(progress_of(self._candidate, half), self._candidate.unknown)
        self.generation.add(PROGRESS_FILE, progress)
        events: list[AnyEvent] = [
            gathered.opened,
            *self._makers(ledger),
            copied.inherited,
            *gathered.fold.feedback,
            *copied.parts,
        ]
        wrote = self.segments.finish(gathered.opened.wall, REASON, events)
        assert wrote.position.incarnation == INCARNATION
        return committed(self.generation, [wrote], manifest, self._run, kind=PIPELINE)
