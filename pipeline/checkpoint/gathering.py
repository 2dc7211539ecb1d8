"""Everything that a salvage takes over but payloads and the trainer's files: read, and not yet written anywhere."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.draws import Filled
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import CONSUMER_FILE, PROGRESS_FILE, SHARDS_FOLDER, Manifest
from pipeline.checkpoint.payloads import locate
from pipeline.checkpoint.played import PLAYED, Played, claimed_as_episode
from pipeline.checkpoint.remains import Hole
from pipeline.checkpoint.rescue import Rescue, look_beyond, rescue
from pipeline.checkpoint.survey import Candidate
from pipeline.ledger import ConsumerHalf, Entry
from pipeline.records import Claimed, Dropped, Opened, Reserved
from pipeline.sampler import Progress, TurnSampler
from pipeline.store.journal import Logged
from pipeline.store.layout import Layout

_MOST = 20  # items that are listed one by one
_MAY_HAVE = "may have been trained already, or came from a stream, and are not run again"


class Gathered(NamedTuple):
    """What a damaged run amounts to at the chosen generation."""

    fold: Rescue
    manifest: Manifest
    half: ConsumerHalf
    opened: Opened
    """The event that begins the new run's journal; folded already."""
    again: list[Claimed]
    """Items of which nothing but their place in the source is known."""
    losses: list[Loss]
    reclaimed: bool = False
    """Whether items were claimed again, or given up, under uids that are new."""
    turns: TurnSampler | None = None
    """Of one of several ranks: its part of the order that they share."""
    reserved: Sequence[Reserved] = ()
    """And what its journal says next of that: the draws that it is still to claim."""
    anew: bool = False
    """Whether the rank has given items up that may have been trained."""

    @property
    def recount(self) -> bool:
        """Whether the events no longer say how much was claimed."""
        return self.anew or self.fold.torn


def gather(
    layout: Layout,
    run_tag: int,
    run_id: str,
    chosen: Candidate,
    candidates: Sequence[Candidate],
    *,
    discard: bool = False,
    played: Played | None = None,
) -> Gathered:
    """Return what the chosen generation and the journals give. Blocks, and changes nothing.

    With ``discard`` what came after the generation is set aside, as a resume with ``after_crash="discard"`` does.
    ``played`` is told of the events, where rollouts fill a buffer.

    Raises:
        NewerFormat: a journal was written by a newer version.
    """
    manifest, half = chosen.manifest, chosen.half
    assert manifest is not None
    assert half is not None
    again: list[Claimed] = []
    reclaimed = False
    losses: list[Loss] = []
    if chosen.inherited is not None:  # it lists itself what is to be drawn again, and needs no journal
        fold = Rescue(half, manifest, manifest.options.get("seed", 0), [])
        next_uid, told = look_beyond(layout, run_tag, manifest)
        listed = chosen.inherited
        fold.add(Logged(0, 0, 0, msgspec.structs.replace(listed, next_uid=max(listed.next_uid, next_uid))))
        fold.feedback += told
    else:
        others = [each.manifest for each in candidates if each.manifest is not None and each is not chosen]
        own = [each for each in others if each.run_id == manifest.run_id]
        fold = rescue(layout, run_tag, manifest, own, half, discard=discard, played=played)
        losses += [hole_loss(layout, *each) for each in fold.holes]
        if fold.torn:
            filled, more = _fill(layout, run_tag, fold, chosen)
            again, reclaimed = filled.again, bool(filled.again or filled.given_up)
            losses += more
        if played is not None and (given_up := played.settle(fold.ledger)):
            losses += _lost(layout, fold, "were begun before events that are missing", given_up, _MAY_HAVE)
    opened = opening(manifest, fold.sampler.seed, f"{run_id}/{manifest.generation}")
    fold.ledger.apply(opened)
    fold.partials.apply(opened.incarnation, opened.rank, opened)
    fold.ledger.restore(half)
    return Gathered(fold, manifest, half, opened, again, losses, reclaimed or manifest.reclaimed)


def opening(manifest: Manifest, seed: int, origin: str, rank: int = 0) -> Opened:
    """Return the event that begins a journal of the new run."""
    host, process = socket.gethostname(), os.getpid()
    return Opened(1, rank, -1, manifest.step, manifest.step, seed, host, process, time.time(), origin=origin)


def _fill(layout: Layout, run_tag: int, fold: Rescue, chosen: Candidate) -> tuple[Filled, list[Loss]]:
    """Claim what was claimed in the holes."""
    half, ended, played = chosen.half, fold.ended, fold.played
    assert half is not None
    if played is not None:
        ended = {**ended, **played.without_claim(fold.draws.seen)}
    wanted = {*fold.draws.unseen(half.trained), *ended}
    first = max(fold.ledger.next_uid, *(last + 1 for _, last in half.trained), *(uid + 1 for uid in ended), 0)
    located = {} if played is not None else locate(layout, run_tag, wanted)  # payloads of rows name no items
    filled = fold.draws.fill(fold.sampler, half, ended, located, first)
    if played is not None:
        filled = _of_episodes(fold, filled, ended)
    for event in filled.events:
        fold.add(Logged(0, 0, 0, event))
    if played is not None and filled.doubtful:
        filled = _given_up_too(fold, filled, chosen, len(ended.keys() - _claimed_in(filled)))
    losses = []
    for claims, fate in ((filled.again, "are run from the start"), (filled.given_up, _MAY_HAVE)):
        losses += _lost(layout, fold, "were claimed where events are missing", claims, fate)
    return filled, losses


def _lost(layout: Layout, fold: Rescue, how: str, items: Sequence[Claimed | Entry], fate: str) -> list[Loss]:
    """Say what becomes of items of which a hole leaves something open."""
    hole = next(hole for hole, _ in fold.holes if hole.events)
    losses = []
    for task in sorted({each.task for each in items}):
        mine = [each for each in items if each.task == task]
        shown = ", ".join(f"{each.index} (epoch {each.epoch}, now uid {each.uid})" for each in mine[:_MOST])
        more = f" and {len(mine) - _MOST} more" if len(mine) > _MOST else ""
        what = f"{hole.name.path}: {len(mine)} items {how}"
        losses.append(_loss(layout, hole, what, f"task {task}: items of index {shown}{more} {fate}"))
    return losses


def _of_episodes(fold: Rescue, filled: Filled, ended: Mapping[int, str]) -> Filled:
    """Return what is known of a hole, where rollouts fill a buffer: what has rows is not given up but played, and where
    nobody can tell what has, nothing is played again."""
    known = [event for event in filled.events if not (isinstance(event, Dropped) and event.reason == PLAYED)]
    events = [claimed_as_episode(event) for event in known]
    holes = [(hole, (hole.name.incarnation, hole.name.rank)) for hole, _ in fold.holes if hole.events]
    inside = any(hole.first <= fold.positions.get(key, 0) for hole, key in holes)
    if not inside and ended.keys() <= _claimed_in(filled):  # the generation's buffer has no rows of theirs
        return filled._replace(events=events)
    events += [Dropped(each.uid, "discarded") for each in filled.again]
    return Filled(events, [], [*filled.again, *filled.given_up], doubtful=True)


def _claimed_in(filled: Filled) -> set[int]:
    return {event.uid for event in filled.events if isinstance(event, Claimed)}


def _given_up_too(fold: Rescue, filled: Filled, chosen: Candidate, unknown: int) -> Filled:
    """Give up what may have been claimed without any trace but its rows: as many as the generation says have finished,
    and may have been in flight, or as there are items of which nobody knows what they are."""
    manifest = fold.draws.line
    finished = {} if chosen.progress is None else chosen.progress.raw_rewards_count
    given = manifest.options.get("concurrency")
    in_flight = given if isinstance(given, int) else 0
    least = {task: finished.get(task, 0) + in_flight for task in manifest.tasks if finished.get(task, 0)}
    more = [claimed_as_episode(each) for each in fold.draws.further(fold.sampler, least, unknown, fold.ledger.next_uid)]
    claims = [each for each in more if isinstance(each, Claimed)]
    for each in claims:
        fold.add(Logged(0, 0, 0, each))
        fold.add(Logged(0, 0, 0, Dropped(each.uid, "discarded")))
    return filled._replace(given_up=[*filled.given_up, *claims])


def hole_loss(layout: Layout, hole: Hole, left_out: int) -> Loss:
    """Say what is lost in a place of a journal that cannot be read, and how many later events are left out for it."""
    if not hole.events:
        return _loss(layout, hole, hole.what, "nothing: no event lay there")
    lost = f"events from number {hole.first} on, {hole.events} at the least"
    if left_out:
        lost += f"; {left_out} later ones, of items that were begun before or in it, say nothing without them"
    return _loss(layout, hole, hole.what, lost)


def _loss(layout: Layout, hole: Hole, what: str, lost: str) -> Loss:
    path = os.path.relpath(hole.name.path, layout.directory)
    return Loss(path=path, offset=hole.offset, bytes=hole.bytes, what=what, lost=lost)


def segment_losses(layout: Layout, candidates: Sequence[Candidate], named: Collection[str]) -> list[Loss]:
    """Say which segments are short or not there that a generation lists, of those that no loss has named yet."""
    listed: dict[str, int] = {}
    for each in candidates:
        for info in each.manifest.segments if each.manifest is not None else ():
            listed[info.name] = max(listed.get(info.name, 0), info.bytes)
    losses = []
    for name, promised in sorted(listed.items()):
        path = os.path.join(layout.segments, os.path.basename(name))
        there = os.path.getsize(path) if os.path.isfile(path) else 0
        where = os.path.relpath(path, layout.directory)
        if there < promised and where not in named:
            what = f"{path}: {there} plain bytes are there, and {promised} were promised"
            losses.append(Loss(path=where, offset=there, what=what, lost="nothing that the new run needs"))
    return losses


def generation_losses(layout: Layout, candidates: Sequence[Candidate], chosen: Candidate) -> list[Loss]:
    """Say what is wrong with the generations."""
    losses = []
    for each in candidates:
        for path, what in each.faults.items():
            where = os.path.relpath(os.path.join(each.folder, path), layout.directory)
            losses.append(Loss(path=where, what=what, lost=_fate(each, path, chosen)))
    return losses


def _fate(each: Candidate, path: str, chosen: Candidate) -> str:
    assert chosen.manifest is not None
    own = path.rpartition("/")[2] if path.startswith(f"{SHARDS_FOLDER}/") else path
    if each.half is None and not (each is chosen and each.partial):
        return f"{each.name}: it cannot be gone on from"
    if each is chosen and own == PROGRESS_FILE:
        return "the counts of what was asked for and produced, which begin anew"
    if each is chosen and own == CONSUMER_FILE:
        return "what the weights have seen of that rank"
    if each is chosen:
        return f"this file: it is left out, and the trainer must get it from elsewhere ({each.name})"
    return f"nothing that was needed: {chosen.name} was taken, and not {each.name}"


def progress_of(chosen: Candidate, half: ConsumerHalf) -> Progress:
    """Return the generation's progress; if it is damaged, what the consumer half says."""
    if chosen.progress is not None:
        return chosen.progress
    trained = {task: counts[0] for task, counts in half.trained_by_task.items()}
    return Progress(
        next_consumer_step=half.step + 1,
        producer_future_step=half.step + 1,
        target_upto_future_step=half.step,
        target_samples=dict(trained),
        consumed_samples=trained,
        model_step=half.step,
    )
