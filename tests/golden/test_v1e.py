"""A run whose rollouts fill a replay buffer opens in every version after it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from pipeline.checkpoint import verify
from pipeline.records import Added
from pipeline.store.journal import read_journal, read_journals
from pipeline.store.layout import JournalName, Layout
from tests.golden.make_v1 import RUN_ID
from tests.golden.make_v1e import COUNT, EVERY_EVENT, OPTIONS, buffer, task
from tests.support.disk import says_no_machine, tree
from tests.support.experience import ROWS, Agent, contents
from tests.support.runs import pipeline

HERE = Path(__file__).parent / "v1e"
TAG = int(RUN_ID[:16], 16)

virtual = pytest.mark.virtual_time


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=80_000)


def test_the_new_event_comes_back_with_every_field() -> None:
    name = JournalName(9, 0, str(HERE / "every_event.fbj"))
    logged = list(read_journal(name, run_tag=TAG, promised=os.path.getsize(name.path)))
    assert [each.event for each in logged] == EVERY_EVENT


def test_the_journals_hold_rows_of_both_lives() -> None:
    added = [each for each in read_journals(Layout(str(HERE)), run_tag=TAG) if isinstance(each.event, Added)]
    assert Counter(each.incarnation for each in added) == {1: LIVES[0], 2: LIVES[1]}
    keys = [(each.event.first, each.event.count) for each in added if isinstance(each.event, Added)]
    assert keys == [(ROWS * number, ROWS) for number in range(len(added))]


def test_it_is_whole(directory: str) -> None:
    found = verify(directory)
    assert (found.damages, found.generations) == ([], 2)


@virtual
@pytest.mark.parametrize("step", [None, 4])
async def test_the_run_goes_on_to_its_end(directory: str, step: int | None) -> None:
    agent, rows = Agent(), buffer()
    before = tree(directory)
    async with pipeline(task(), directory=directory, buffer=rows, inline=True, **{**OPTIONS, "keep": None}) as pipe:
        pipe.attach(agent=agent)
        resumed = await pipe.resume(step=step)
        assert (resumed.step, len(agent.seen)) == (step or 5, step or 5)
        assert rows.ring.added == ROWS * sum(LIVES)
        assert rows.statistics().open_episodes == 0
        if step is None:
            assert rows.sample(16).keys.tolist() == DRAWN
        async with pipe.weight_update(version=pipe.version):
            pass
        await pipe.start()
        await pipe._run.state.changed.wait_for(lambda: not pipe.ledger.outstanding and pipe._run.producer.drained)
        totals = pipe.ledger.totals["walks"]
        assert totals.retired == COUNT
        newest = contents(rows)[-ROWS:]
        assert newest == [(COUNT - 1, place) for place in range(2 * ROWS, 3 * ROWS)]
    after = tree(directory)
    assert {path: after.get(path) for path in before} == before


LIVES = (24, 36)
DRAWN = [95, 172, 98, 112, 138, 151, 175, 131, 146, 128, 146, 152, 157, 170, 125, 163]
