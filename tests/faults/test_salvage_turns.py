"""Pipelines of ranks of which no event says any more how their one order went on after it was shared out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint import salvage
from pipeline.records import Reserved
from pipeline.store.frames import EVENTS, HEADER_BYTES
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName, Layout
from tests.support.rank_runs import EVERY, killed, trained_to_the_end
from tests.support.salvaging import flip, frames


def hide(directory: Path, name: JournalName) -> int:
    """Damage each record of a journal that reserves draws; return how many do."""
    run = Layout(str(directory)).read_run()
    assert run is not None
    hidden = [each.sequence for each in read_journal(name, run_tag=run.tag) if isinstance(each.event, Reserved)]
    path = Path(name.path)
    for frame in frames(str(directory), f"journals/{path.name}"):
        own = range(frame.header.sequence, frame.header.sequence + frame.header.number)
        if frame.header.kind == EVENTS and any(each in own for each in hidden):
            flip(path, frame.offset + HEADER_BYTES + 3)
    return len(hidden)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_the_order_goes_on_from_where_it_was_shared_out(tmp_path: Path, sizes: tuple[int, int]) -> None:
    size = sizes[-1]
    # So few are made ahead that the first life leaves draws to the second, which comes to the end.
    directory = killed(tmp_path, *sizes, steps=6, more=1, capacity=6, concurrency=4)
    newest = [each for each in Layout(str(directory)).list_journals() if each.incarnation == 2]
    assert len(newest) == size
    assert sum(hide(directory, name) for name in newest) >= 1
    found = salvage(directory, tmp_path / "salvaged")
    assert found.step > 6
    trained_to_the_end(tmp_path / "salvaged", size)
    assert trained_to_the_end(tmp_path / "salvaged", 1 if size > 1 else 2) == EVERY
