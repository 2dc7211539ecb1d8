"""Resuming: find a generation, and put it in use."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.generations import Stored, choose, find_generations, of_kind, with_offer
from pipeline.checkpoint.lines import Line
from pipeline.checkpoint.manifest import PIPELINE, REPLAY_BUFFER, Manifest
from pipeline.errors import Damaged, StoreError, UsageError
from pipeline.ledger import BUFFERED, PARKED, WAITING
from pipeline.observe import events
from pipeline.records import Dropped, EpochBegan, Opened
from pipeline.sampler import Sampler
from pipeline.sampler.progress import restore_in_place
from pipeline.sampler.sampler import check_marks
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader
from pipeline.store.service import RunBlocking, WriterService
from pipeline.wiring.forking import copy_payloads, forked, place_parts
from pipeline.wiring.recovering import Recovering
from pipeline.wiring.recovery import CONSUMER_FILE, PROGRESS_FILE, Recovered, read_generation
from pipeline.wiring.state import RunState

_MATTERS = ("batch_groups", "capacity", "max_staleness", "order", "partial", "selector", "strategy")
"""Options of the run whose change is worth a word: what batches are made of hangs on them."""


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resume`` found.

    ``version`` is the one to publish before ``start``: that of the restored weights. In an empty directory everything
    is 0 and ``generation`` is None.
    """

    step: int = 0
    version: int = 0
    generation: int | None = None
    buffered: int = 0
    """Finished groups that came back and have not been trained."""
    waiting: int = 0
    """Items that were in flight, and are run again first."""
    repeated: int = 0
    """Batches that were handed out after the generation, and are handed out again."""
    parked: int = 0
    """Groups that came back and wait for a reward."""
    changed: dict[str, str] = {}
    """What is not as it was saved: ``{"tasks.math.share": "1.0 -> 3.0"}``. It is honoured from the next draw."""
    external: str = ""
    """Path of the trainer's own checkpoint that the generation goes with: ``save(step, external=path)``."""
    set_aside: int = 0
    """Events of after the generation that do not count: by ``after_crash="discard"``, for want of the buffer, or as
    the power went before their payloads were on the disk."""


class Origin(NamedTuple):
    """The run that is resumed: the pipeline's own, or another that is forked."""

    layout: Layout
    run_id: str
    tag: int
    forked: bool

    @classmethod
    def other(cls, directory: str) -> Origin:
        """Return the run in ``directory``, to be forked. Blocks.

        Raises:
            StoreError: there is none.
        """
        layout = Layout(directory)
        run = layout.read_run() if os.path.isdir(directory) else None
        if run is None:
            raise StoreError(f"resume(from_={directory!r}): there is no run")
        return cls(layout, run.run_id, run.tag, True)


class Found(msgspec.Struct, frozen=True):
    """What a resume is about to take over: checked, and not yet in use."""

    stored: Stored
    states: dict[str, Any]
    """What was attached, by name."""
    recovered: Recovered
    opened: Opened
    origin: Origin


def check_fork(state: RunState, origin: str, *, free: bool) -> None:
    """Refuse to fork another run; ``free``: this one's directory holds none yet.

    Raises:
        UsageError: it does, or there is none; or the run has rows.
    """
    if state.experience is not None:
        raise UsageError(
            "resume(from_=): the rows of another run cannot be taken over; copy its folder, and resume() the copy"
        )
    if not free:
        raise UsageError(
            f"resume(from_={origin!r}) begins a new run: directory={state.options.directory!r} must name a "
            "folder that holds none yet. To go on with the run that it holds, call resume() without from_"
        )


def find_to_resume(
    state: RunState, origin: Origin, step: int | None, attached: Sequence[str], external: str | None = None
) -> Found:
    """Read and check the generation to resume and what came after it. Blocks, and changes nothing.

    Raises:
        Damaged: something that was promised to be there is missing or changed.
        StoreError: there is no generation of ``step``.
        UsageError: the seed, or what is attached, is not what the generation holds.
    """
    layout = origin.layout
    found = of_kind(find_generations(layout, origin.run_id), PIPELINE, layout.directory)
    if not found.complete and not found.damaged:
        raise Damaged(f"{layout.generations}: journals hold rollouts, but every generation is gone; restore them")
    stored = choose(found, step, layout.directory, external)
    check_external(stored.manifest)
    try:
        states = read_generation(stored, attached)
    except Damaged as error:
        raise with_offer(error, stored, found) from None
    recovered, opened = recovered_of(state, origin, stored, found.complete[-1].manifest.reusable)
    return Found(stored, states, recovered, opened, origin)


def recovered_of(
    state: RunState,
    origin: Origin,
    stored: Stored,
    reusable: Sequence[int] | None,
    *,
    sampler: Callable[[], Sampler] | None = None,
) -> tuple[Recovered, Opened]:
    """Fold what came of a generation; return that, and the event that begins this incarnation's journal. Blocks.

    ``reusable`` is what the newest generation says of that, and ``sampler`` makes what draws are folded into, where
    that is no plain one.

    Raises:
        Damaged: something that was promised to be there is missing or changed.
        UsageError: the seed is not the run's.
    """
    opened = opening(state, stored.manifest.generation, stored.manifest.step, stored.manifest.incarnation)
    if origin.forked:  # its base is this incarnation: what an earlier try left in the folder does not count
        name = f"{origin.run_id}/{stored.manifest.generation}"
        opened = msgspec.structs.replace(opened, generation=-1, parent=-1, origin=name)
    how = Recovering(
        list(state.plans.values()),
        state.options.seed,
        state.options.after_crash == "discard",
        None if state.experience is None else state.experience.feed,
        state.log.warning,
    )
    recovered, line = how.recover(origin.layout, origin.tag, stored, reusable, opened, sampler)
    return recovered, _with_ends(opened, recovered, line, origin)


def _with_ends(opened: Opened, recovered: Recovered, line: Line, origin: Origin) -> Opened:
    """Return ``opened``, which says for good where each journal ended: its writer may not know yet that it was
    overtaken, and go on."""
    if origin.forked:
        return opened
    ends = [each for each in recovered.positions if (each.incarnation, each.rank) not in line.unneeded]
    discarded = sorted((each.incarnation, each.rank, each.sequence) for each in ends)
    return msgspec.structs.replace(opened, discarded=discarded)


def check_external(manifest: Manifest) -> None:
    """Raise if the trainer's own checkpoint that a generation goes with is gone."""
    if manifest.external and not os.path.lexists(manifest.external):
        raise StoreError(
            f"generation {manifest.generation}, of step {manifest.step}, was saved with the trainer's checkpoint "
            f"{manifest.external}, which is not there (from {os.getcwd()}). Bring it back, or resume(step=) one before"
        )


def opening(state: RunState, generation: int, step: int, parent: int = -1) -> Opened:
    """Return the event that begins this incarnation's journal."""
    return Opened(
        state.incarnation,
        state.options.rank,
        generation,
        step,
        step,
        state.options.seed,
        socket.gethostname(),
        os.getpid(),
        state.clock.wall(),
        parent=parent,
    )


def _changes(state: RunState, manifest: Manifest) -> dict[str, str]:
    """Return what the run was saved with and now has otherwise, as far as it matters for what is made."""
    found: dict[str, str] = {}
    options = state.options.to_dict()
    for name in _MATTERS:
        before, now = manifest.options.get(name, options[name]), options[name]
        if before != now:
            found[name] = f"{before} -> {now}"
    for task in sorted(state.tasks.keys() | manifest.tasks.keys()):
        if task not in state.tasks or task not in manifest.tasks:
            found[f"tasks.{task}"] = "gone" if task not in state.tasks else "new"
            continue
        described, saved = state.tasks[task].describe(), manifest.tasks[task]
        for name, now in described.items():
            if name != "source" and name in saved and saved[name] != now:
                found[f"tasks.{task}.{name}"] = f"{saved[name]} -> {now}"
    return found


def _check_order(state: RunState, found: Found, restart: Sequence[str]) -> None:
    """Refuse another order in the midst of an epoch: items would be left out, and others come twice."""
    for name, task in state.tasks.items():
        saved, cursor = found.stored.manifest.tasks.get(name, {}), found.recovered.sampler.cursors[name]
        before = saved.get("shuffle", task.shuffle)
        if before != task.shuffle and name not in restart and cursor.length > 0 and not cursor.at_end:
            raise UsageError(
                f"task {name!r}: shuffle={task.shuffle}, and the run was begun with shuffle={before}: epoch "
                f"{cursor.epoch} is drawn up to item {cursor.position} of {cursor.length} in that order. Use "
                f"shuffle={before} until it has ended, or resume(restart=[{name!r}]) to begin the task anew."
            )


def check_sources(state: RunState, found: Found, restart: Sequence[str]) -> None:
    """Refuse another source than the run's, or another order of it, before anything is changed."""
    _check_order(state, found, restart)
    plans = {name: plan for name, plan in state.plans.items() if name not in restart}
    for task, before, now in check_marks(found.recovered.sampler, plans):
        state.log.warning(events.SOURCE_CHANGED, task=task, before=str(before), after=str(now))


def adopt(state: RunState, found: Found) -> None:
    """Put what was recovered in use, in memory."""
    recovered = found.recovered
    recovered.sampler.teach()
    if state.experience is not None and recovered.rows is not None:
        state.experience.feed.adopt(recovered.rows)
        state.experience.acked()
    for uid, members in recovered.places.items():
        for member, place in members.items():
            state.buffer.storage.put(uid, member, None, place)
    restore_in_place(state.progress, recovered.progress)
    state.unknown_progress, state.unknown_half = recovered.unknown, recovered.unknown_half
    for file, unknown in ((PROGRESS_FILE, recovered.unknown), (CONSUMER_FILE, recovered.unknown_half)):
        for field in unknown:
            state.log.warning(events.PROGRESS_UNKNOWN_FIELD, field=field, file=file)
    state.rebuild(recovered.ledger, recovered.sampler, recovered.pending)
    state.partials = recovered.partials  # with partial=False too: what a later recovery reads must be kept
    state.evaluations = recovered.evaluations
    state.version, state.limit = found.stored.manifest.step, None
    for name in recovered.ledger.totals:
        if name not in state.tasks:
            state.log.warning(events.TASK_MISSING, task=name)


def settle(state: RunState, restart: Sequence[str]) -> None:
    """Record what this life decides about what it found: sources begun anew, items given up."""
    for name in restart:
        for entry in [each for each in state.ledger.entries.values() if each.task == name]:
            state.record(Dropped(entry.uid, "discarded"))
        cursor, source = state.sampler.cursors[name], state.plans[name].source
        length = source.length()
        state.record(EpochBegan(name, cursor.epoch + 1, -1 if length is None else length, source.mark(), True))
    for entry in list(state.ledger.entries.values()):
        if entry.deaths > state.options.max_deaths and entry.unsettled:
            state.log.error(events.ROLLOUT_QUARANTINED, task=entry.task, uid=entry.uid, deaths=entry.deaths)
            state.record(Dropped(entry.uid, "quarantined"))
    state.count_absent()
    state.release_broken()


def describe(state: RunState, found: Found) -> Resumed:
    """Return what the user is told of a resume, and log what has changed."""
    manifest = found.stored.manifest
    for path, why in manifest.left_out.items():
        if path != REPLAY_BUFFER:
            state.log.warning(events.GENERATION_INCOMPLETE, generation=manifest.generation, file=path, reason=why)
    changed = _changes(state, manifest)
    for what, how in changed.items():
        before, _, now = how.rpartition(" -> ")
        state.log.warning(events.TASK_CHANGED, what=what, before=before, now=now)
    return Resumed(
        step=state.ledger.step,
        version=state.version,
        generation=found.stored.manifest.generation,
        buffered=state.ledger.count(BUFFERED),
        waiting=state.ledger.count(WAITING),
        repeated=len(state.pending),
        parked=state.ledger.count(PARKED),
        changed=changed,
        external=found.stored.manifest.external,
        set_aside=found.recovered.set_aside,
    )


async def load_for_filters(state: RunState, reader: PayloadReader, in_thread: RunBlocking[Any]) -> None:
    """Read what has finished of groups that a filter will look at when they are whole; it cannot wait then."""
    places = [
        (uid, member, place)
        for uid, entry in state.ledger.entries.items()
        if entry.unsettled or entry.state == PARKED
        if entry.task in state.tasks and state.tasks[entry.task].filter is not None
        if uid in state.buffer.storage
        for member, (_, place) in state.buffer.storage.get(uid).items()
        if place is not None
    ]
    blobs = await in_thread(lambda: reader.read_many(places))
    for uid, member, place in places:
        state.buffer.storage.put(uid, member, blobs[uid, member], place)


async def fork(state: RunState, found: Found, writer: WriterService, in_thread: RunBlocking[Any]) -> Found:
    """Copy what another run's state needs into this run's segments."""
    before, reader = found.recovered, PayloadReader(found.origin.layout, found.origin.tag)
    lives = {uid: entry.life for uid, entry in before.ledger.entries.items()}
    places = await copy_payloads(reader, writer, before.places, lives, in_thread)
    parts = place_parts(before.partials, writer, lives)
    await writer.flush()
    plans, seed = list(state.plans.values()), state.options.seed
    return msgspec.structs.replace(found, recovered=forked(before, found.opened, plans, seed, places, parts))
