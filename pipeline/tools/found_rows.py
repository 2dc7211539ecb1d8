"""What there is of a run whose rollouts fill a buffer of transitions, at a generation and since: items and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.checkpoint.gathering import Gathered, gather
from pipeline.checkpoint.lines import discards
from pipeline.checkpoint.played import Played
from pipeline.checkpoint.survey import Candidate
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.store.layout import Layout
from pipeline.tools.later_rows import LaterRows


class Found(NamedTuple):
    """What there is of such a run at a generation.

    Attributes:
        gathered: its items.
        played: what the journals say of rows.
        state, unknown: of the buffer, as the generation has it, and fields of it that this version does not know.
        later: rows that came after it.
    """

    gathered: Gathered
    played: Played
    state: BufferState
    unknown: dict[str, object]
    later: LaterRows


def find_rows(layout: Layout, run_tag: int, run_id: str, chosen: Candidate, candidates: Sequence[Candidate]) -> Found:
    """Read what a generation and the journals give, as a resume with the options that were saved would use it. Blocks,
    and changes nothing.

    Raises:
        NewerFormat: a newer version wrote some of it.
        Damaged: the state of the buffer is not what it is to be.
    """
    manifest = chosen.manifest
    assert manifest is not None
    state, unknown = read_buffer_state(chosen.folder)
    positions = {(each.incarnation, each.rank): each.sequence for each in manifest.journals}

    def look(*, discard: bool) -> tuple[Gathered, Played]:
        played = Played(positions, state.capacity)
        return gather(layout, run_tag, run_id, chosen, candidates, discard=discard, played=played), played

    gathered, played = look(discard=discards(manifest))
    if played.unwritten:  # they never were: all that came after the generation is set aside
        gathered, played = look(discard=True)
    return Found(gathered, played, state, unknown, LaterRows.of(played, state, manifest.step))
