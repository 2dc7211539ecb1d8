"""Lines of a run: which events count for a generation, and what a line inherits.

Usually every event of every journal counts, up to where the next incarnation found its end: what the rollouts did is
never taken back. But a resume may set aside what came after its generation (``after_crash="discard"``, or a generation
without its buffer). Its journal begins by saying so (``Opened.discarded``), and from then on those events do not count.
Whoever later resumes a generation of the part that was set aside goes back to that line: then the journals which set it
aside do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from pipeline.checkpoint.manifest import REPLAY_BUFFER, Manifest
from pipeline.errors import Damaged, ForebayError
from pipeline.ledger import BUFFERED, FINISHED, LEASED, Ledger, TaskTotals
from pipeline.locations import Location
from pipeline.records import Inherited, Opened
from pipeline.sampler import Sampler
from pipeline.store.files import open_plain
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName, Layout

Key: TypeAlias = tuple[int, int]
"""Incarnation and rank: what names a journal."""
Discarded: TypeAlias = list[tuple[int, int, int]]

NOTHING = 0
PRODUCER_FILE = "producer.msgpack"
"""What a generation without its buffer lists itself: one :class:`Inherited`, as a journal would hold it."""

encode_inherited = msgspec.msgpack.Encoder().encode


def read_inherited(path: str) -> Inherited:
    """Return what a generation without its buffer lists. Blocks.

    Raises:
        Damaged: it is not that.
    """
    try:
        with open_plain(path) as file:
            return msgspec.msgpack.decode(file.read(), type=Inherited)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: the list of what is to be drawn again is damaged ({error})") from None


def last_counted(opened: Iterable[Opened], positions: Mapping[Key, int]) -> dict[Key, int]:
    """Return the number of the last event that counts, for each journal of which not all do.

    Args:
        opened: the first event of each journal.
        positions: what the generation to be resumed counts on: the last event that belongs to it, by journal.
    """
    caps: dict[Key, int] = {}
    for each in sorted(opened, key=lambda each: (each.incarnation, each.rank), reverse=True):
        own = (each.incarnation, each.rank)
        if caps.get(own, 1) == NOTHING:
            continue
        if any(last < positions.get((incarnation, rank), 0) for incarnation, rank, last in each.discarded):
            caps[own] = NOTHING  # it set aside what this generation is made of: it is of another line
            continue
        for incarnation, rank, last in each.discarded:
            key = (incarnation, rank)
            caps[key] = min(last, caps.get(key, last))
    return caps


class Line(NamedTuple):
    """What a generation's line leaves out of the journals."""

    discarded: Discarded
    """The last event that counts, of each journal of which not all do; the next incarnation's journal keeps it."""
    unneeded: frozenset[Key]
    """Journals from before the line inherited its state: they need not be read, or be there."""


def find_line(layout: Layout, run_tag: int, manifest: Manifest, *, discard: bool) -> Line:
    """Return the line of a generation. Blocks.

    Args:
        layout: the run's paths.
        run_tag: the run's tag.
        manifest: the generation's.
        discard: set aside what came after it.
    """
    positions = {(each.incarnation, each.rank): each.sequence for each in manifest.journals}
    keys = [(name.incarnation, name.rank) for name in layout.list_journals()]
    unneeded = frozenset(key for key in {*keys, *positions} if key[0] < manifest.base)
    if discard or REPLAY_BUFFER in manifest.left_out:
        return Line([(*key, positions.get(key, NOTHING)) for key in keys], unneeded)
    opened = [event for name in layout.list_journals() if (event := _first(name, run_tag)) is not None]
    return Line([(*key, last) for key, last in sorted(last_counted(opened, positions).items())], unneeded)


def line_as_saved(layout: Layout, run_tag: int, manifest: Manifest) -> Line:
    """Return the line of a generation that a resume with the options that were saved would find. Blocks."""
    return find_line(layout, run_tag, manifest, discard=discards(manifest))


def discards(manifest: Manifest) -> bool:
    """Return whether a resume with the options that were saved sets aside what came after the generation."""
    return manifest.options.get("after_crash") == "discard"


def _first(name: JournalName, run_tag: int) -> Opened | None:
    """Return a journal's first event; None if it has none."""
    try:
        first = next(read_journal(name, run_tag=run_tag), None)
    except ForebayError:  # if the journal is needed, the fold will say what is wrong with it
        return None
    return first.event if first is not None and isinstance(first.event, Opened) else None


def inherit(ledger: Ledger, sampler: Sampler, places: Mapping[int, Mapping[int, Location]] | None = None) -> Inherited:
    """Return the producer half for a line that cannot fold what came before.

    Args:
        ledger: what has been claimed.
        sampler: what has been drawn.
        places: where payloads lie that go along. Left out, none do: every item that has not been trained is to be run
            from the start.
    """
    return Inherited(
        [
            entry.hold(() if places is None else sorted(places.get(entry.uid, {}).items()), anew=places is None)
            for entry in ledger.entries.values()
        ],
        {
            name: (each.epoch, each.position, each.length, each.mark, each.base)
            for name, each in sampler.cursors.items()
        },
        dict(sampler.mixture.shares),
        dict(sampler.mixture.drawn),
        msgspec.to_builtins(totals_anew(ledger) if places is None else ledger.totals),
        ledger.dropped.ranges(),
        ledger.next_uid,
        sampler.inherited_shares,
    )


def totals_anew(ledger: Ledger) -> dict[str, TaskTotals]:
    """Return the counts for life less what will be produced a second time, so that they agree with what is trained."""
    totals = {name: msgspec.structs.replace(each) for name, each in ledger.totals.items()}
    for entry in ledger.entries.values():
        task, finished = totals[entry.task], entry.members.count(FINISHED)
        task.produced -= entry.state in (BUFFERED, LEASED)
        task.finished -= finished
        task.reward_count -= finished
        task.reward_sum -= entry.rewards
        task.tokens -= entry.tokens
        if entry.life:
            task.again -= finished
            task.again_tokens -= entry.tokens
    return totals
