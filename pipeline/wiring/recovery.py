"""Recovery: ``recover(g)`` = consumer half of generation g + fold of every producer event.

Everything here reads. It blocks, so it runs in a thread, and it is pure: twice is the same as once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from pipeline.buffer.partials import Partials
from pipeline.checkpoint.fold import ProducerFold, pending_batches
from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.halves import read_half
from pipeline.checkpoint.lines import PRODUCER_FILE, Line, read_inherited
from pipeline.checkpoint.manifest import BLOCKS_FILE, REPLAY_BUFFER
from pipeline.checkpoint.manifest import CONSUMER_FILE as CONSUMER_FILE
from pipeline.checkpoint.manifest import PROGRESS_FILE as PROGRESS_FILE
from pipeline.checkpoint.manifest import TRAINER_FOLDER as TRAINER_FOLDER
from pipeline.checkpoint.trainer_state import read_state
from pipeline.errors import Damaged, ForebayError, UsageError
from pipeline.ledger import ConsumerHalf, Lease, Ledger
from pipeline.locations import Location
from pipeline.records import Claimed, Feedback, Inherited, Opened, PartSaved
from pipeline.sampler import DrawPlan, Progress, Sampler
from pipeline.sampler.progress import decode_progress
from pipeline.store.files import open_plain
from pipeline.store.journal import JournalPosition, Logged, read_journal, read_journals
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader
from pipeline.wiring.evaluations import Evaluations
from pipeline.wiring.experience import RowsFold
from pipeline.wiring.feed import Feed, Reading

_UNFIT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What an event that no pipeline wrote may raise when it is applied."""
_MOST_MEMBERS = 1 << 20
"""Of a group: a number in a journal must not ask for a terabyte."""


class Recovered(NamedTuple):
    """What a generation and the journals give; nothing of it is in use yet."""

    ledger: Ledger
    sampler: Sampler
    progress: Progress
    unknown: dict[str, Any]
    pending: list[Lease]
    places: Mapping[int, Mapping[int, Location]]
    events: int
    positions: list[JournalPosition]
    """Where the journals ended that were folded: what the next generation counts on."""
    evaluations: Evaluations
    partials: Partials
    """What attempts in flight had kept."""
    set_aside: int = 0
    """Events that came after the generation and do not count."""
    inherited: Inherited | None = None
    """What the new incarnation's journal holds next, where no journal was folded."""
    feedback: Sequence[Feedback] = ()
    """And after that: what sources that learn had been told."""
    parts: Sequence[PartSaved] = ()
    """And what attempts of a run that was forked had kept."""
    rows: Reading | None = None
    """The buffer of transitions, where rollouts fill one."""
    unknown_half: Mapping[str, Any] = MappingProxyType({})
    """Fields of the consumer half that this version does not know."""


def read_generation(stored: Stored, attached: Sequence[str]) -> dict[str, Any]:
    """Compare a generation's files with its manifest, and return what the trainer had attached. Blocks.

    The trainer's files are large: they are compared as they are read.

    Raises:
        Damaged: one is missing, or was changed.
        UsageError: what is attached is not what the generation holds.
    """
    trainer = stored.trainer_files()
    check_generation(stored, later=[info.path for _, info in trainer])
    _check_attached(stored, attached)
    return {
        info.path.removeprefix(TRAINER_FOLDER + "/").removesuffix(".safetensors"): read_state(
            path, size=info.bytes, checksum=info.crc32c
        )
        for path, info in trainer
    }


def recover_run(
    layout: Layout,
    stored: Stored,
    plans: Sequence[DrawPlan],
    *,
    run_tag: int,
    seed: int,
    opened: Opened,
    line: Line,
    torn: Callable[[str, int, int], None] | None = None,
    feed: Feed | None = None,
    sampler: Sampler | None = None,
) -> Recovered:
    """Read what a generation says of the run, and fold the journals, changing nothing. Blocks.

    ``opened`` is the event that will begin the new incarnation: it is the last that is folded. ``line`` says which
    events count. ``torn`` is told of each journal that ends in a torn record, as a crash leaves it. ``sampler`` is what
    draws are folded into, where that is no plain one.

    Raises:
        Damaged: something that was promised to be there is missing or changed.
        UsageError: the seed is not the run's; or it has a buffer of transitions (``feed``) and had none, or the
            reverse.
    """
    _check_buffer(stored, feed)
    half, unknown_half = read_half(stored.folder)
    path = os.path.join(stored.folder, PROGRESS_FILE)
    with open_plain(path) as file:
        progress, unknown = decode_progress(file.read(), path)
    saved = Saved(layout, stored, plans, run_tag, seed, opened, line, half, progress, unknown, sampler)
    if REPLAY_BUFFER in stored.manifest.left_out:
        recovered = _recover_without_buffer(saved)
    else:
        recovered = _recover_from_journals(saved, torn, feed)
    return recovered._replace(unknown_half=unknown_half)


class Saved(NamedTuple):
    """A generation that was read, and what it is to be continued with."""

    layout: Layout
    stored: Stored
    plans: Sequence[DrawPlan]
    run_tag: int
    seed: int
    opened: Opened
    line: Line
    half: ConsumerHalf
    progress: Progress
    unknown: dict[str, Any]
    sampler: Sampler | None = None


def _check_buffer(stored: Stored, feed: Feed | None) -> None:
    if feed is None and any(info.path == BLOCKS_FILE for info in stored.manifest.files):
        raise UsageError(
            f"{stored.folder}: the rollouts of this run fill a buffer of transitions; build the Pipeline with buffer="
        )


def _recover_from_journals(saved: Saved, torn: Callable[[str, int, int], None] | None, feed: Feed | None) -> Recovered:
    layout, run_tag, opened, half = saved.layout, saved.run_tag, saved.opened, saved.half
    manifest = saved.stored.manifest
    # Read first: it says clearly if this buffer is not that of the run.
    rows = None if feed is None else feed.read(layout, run_tag, saved.stored)
    discarded = saved.line.discarded
    folded = Fold(half, saved.plans, seed=saved.seed, line=manifest, discarded=discarded, sampler=saved.sampler)
    positions = _fold_journals(layout, saved.stored, folded, run_tag, saved.line.unneeded, torn)
    ledger, partials = folded.ledger, folded.partials
    ledger.apply(opened)
    partials.apply(opened.incarnation, opened.rank, opened)
    pending = pending_batches(ledger, ledger.restore(half), folded.hints, half.step)
    kept = {uid: members for uid, members in folded.places.places.items() if uid in ledger.entries}
    _check_payloads(layout, run_tag, ledger, kept)
    _read_partials(layout, run_tag, ledger, partials)
    folded.evaluations.apply(opened.incarnation, opened.rank, opened)
    if rows is not None:
        folded.rows.redo(rows, PayloadReader(layout, run_tag), opened.version)
    return Recovered(
        ledger,
        folded.sampler,
        saved.progress,
        saved.unknown,
        pending,
        kept,
        folded.events,
        positions,
        folded.evaluations,
        partials,
        folded.set_aside,
        rows=rows,
    )


def _recover_without_buffer(saved: Saved) -> Recovered:
    """Resume what the generation lists itself: no journal is folded, and none needs to be there."""
    stored, half, line = saved.stored, saved.half, saved.line
    _check_seed(saved.seed, stored.manifest.options.get("seed", saved.seed))
    listed = read_inherited(os.path.join(stored.folder, PRODUCER_FILE))
    set_aside, next_uid, feedback = _look_beyond(saved.layout, saved.run_tag, line)
    # The journals, where they are, have used more uids; none is ever used twice.
    inherited = msgspec.structs.replace(listed, next_uid=max(listed.next_uid, next_uid))
    ledger, sampler = Ledger(half), Sampler(saved.plans, saved.seed)
    ledger.apply(saved.opened)
    try:
        ledger.apply(inherited)
        sampler.apply(inherited)
    except _UNFIT as error:
        raise Damaged(f"{os.path.join(stored.folder, PRODUCER_FILE)}: what it lists {_how(error)}") from None
    for told in feedback:
        sampler.apply(told)
    ledger.restore(half)
    return Recovered(
        ledger,
        sampler,
        saved.progress,
        saved.unknown,
        [],
        {},
        0,
        [JournalPosition(incarnation=each[0], rank=each[1], sequence=each[2]) for each in line.discarded],
        Evaluations(),
        Partials(),
        set_aside,
        inherited,
        sampler.untold(),
    )


def _look_beyond(layout: Layout, run_tag: int, line: Line) -> tuple[int, int, list[Feedback]]:
    """Count the events that are set aside; return also a uid above all that the journals name, and the feedback.

    Nothing hangs on the journals here, so one that is damaged is read as far as it goes.
    """
    told: list[Feedback] = []
    caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
    count = next_uid = 0
    for name in layout.list_journals():
        try:
            for logged in read_journal(name, run_tag=run_tag):
                count += logged.sequence > caps.get((name.incarnation, name.rank), 0)
                if type(logged.event) is Claimed:
                    next_uid = max(next_uid, logged.event.uid + 1)
                elif type(logged.event) is Feedback and logged.sequence <= caps.get(logged[:2], 0):
                    told.append(logged.event)
        except ForebayError:
            continue
    return count, next_uid, told


def _fold_journals(
    layout: Layout,
    stored: Stored,
    folded: Fold,
    run_tag: int,
    unneeded: Collection[tuple[int, int]],
    torn: Callable[[str, int, int], None] | None,
) -> list[JournalPosition]:
    """Fold every journal, and return where each ended, or where it ends for this line."""
    promised = {(each.incarnation, each.rank): each.bytes for each in stored.manifest.journals}
    positions = [each for each in stored.manifest.journals if (each.incarnation, each.rank) in unneeded]

    def ended(position: JournalPosition, path: str, left: int) -> None:
        last = min(position.sequence, folded.last(position.incarnation, position.rank))
        positions.append(msgspec.structs.replace(position, sequence=last))
        if left and torn is not None:
            torn(path, position.bytes, left)

    for logged in read_journals(layout, run_tag=run_tag, promised=promised, skip=unneeded, ended=ended):
        try:
            folded.apply(logged)
        except ForebayError:
            raise
        except _UNFIT as error:
            path = layout.journal(logged.incarnation, logged.rank)
            raise Damaged(f"{path}: event {logged.sequence} {_how(error)}") from None
    return positions


class Fold(ProducerFold):
    """Applies events, in the order of the journals, to everything that is recovered from them."""

    def __init__(self, half: ConsumerHalf, plans: Sequence[DrawPlan], *, seed: int, **more: Any) -> None:
        """As :class:`ProducerFold`; ``seed`` is the run's as it is given now."""
        super().__init__(half, plans, seed=seed, **more)
        self.evaluations = Evaluations()
        self.rows = RowsFold(self.positions)
        self._seed = seed

    def apply(self, logged: Logged) -> bool:
        """Take in the next event, and return whether it counts.

        Raises:
            UsageError: the run was begun with another seed.
        """
        if type(logged.event) is Opened:
            _check_seed(self._seed, logged.event.seed)
        elif type(logged.event) is Claimed and logged.event.size > _MOST_MEMBERS:
            raise ValueError(f"a group of {logged.event.size}")
        counts = super().apply(logged)
        if counts:
            self.evaluations.apply(logged.incarnation, logged.rank, logged.event)
            self.rows.apply(logged)
        return counts


def _how(error: Exception) -> str:
    return f"does not fit what came before it ({type(error).__name__}: {error}); no pipeline wrote it"


def _check_seed(given: int, before: int) -> None:
    if given != before:
        raise UsageError(
            f"seed={given}: the run was begun with seed={before}, and the order of its items hangs on it. "
            f"Use seed={before}, or another directory"
        )


def _check_attached(stored: Stored, attached: Sequence[str]) -> None:
    saved = set(stored.manifest.attached)
    if saved == set(attached):
        return
    absent, extra = sorted(set(attached) - saved), sorted(saved - set(attached))
    facts = []
    if absent:
        facts.append(f"attached, but not in the generation: {', '.join(absent)}")
    if extra:
        facts.append(f"in the generation, but not attached: {', '.join(extra)}")
    paths = {name: f"{TRAINER_FOLDER}/{name}.safetensors" for name in absent}
    damaged = {name: stored.manifest.left_out[path] for name, path in paths.items() if path in stored.manifest.left_out}
    if damaged:
        reasons = "; ".join(f"{name} is {why}" for name, why in damaged.items())
        raise UsageError(
            f"generation {stored.manifest.generation}: {'; '.join(facts)}. {reasons}. Call resume() without "
            f"{', '.join(damaged)} attached, load it from elsewhere, and attach() it between resume() and start()"
        )
    raise UsageError(
        f"generation {stored.manifest.generation}: {'; '.join(facts)}. Before resume(), attach() what was attached then"
    )


def _read_partials(layout: Layout, run_tag: int, ledger: Ledger, partials: Partials) -> None:
    """Read what attempts had kept: few, and needed as soon as their members start."""
    wanted = []
    for uid, member, part in partials.items():
        if uid not in ledger.entries or part.location is None:
            partials.discard(uid, member)
        else:
            wanted.append((uid, member, part.location))
    blobs = PayloadReader(layout, run_tag).read_many(wanted)
    for uid, member, part in partials.items():
        part.blob = blobs[uid, member]


def _check_payloads(layout: Layout, run_tag: int, ledger: Ledger, places: Mapping[int, Mapping[int, Location]]) -> None:
    """Read every payload that is kept once: damage is found now, not when its batch is due.

    Also those of groups of which other members are still to run: when the power went, their events may be there without
    them, and the journal ends before such an event.
    """
    PayloadReader(layout, run_tag).verify(
        (uid, member, location) for uid in ledger.entries for member, location in places.get(uid, {}).items()
    )
