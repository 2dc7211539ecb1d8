"""A run of several ranks opens in every version after it, on as many ranks or on others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline import Pipeline, Ranks
from pipeline.checkpoint import status_of, verify
from pipeline.checkpoint.status import CONTINUES, FINISHED
from pipeline.records import Reserved
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName
from pipeline.tools import exporting, sample_run, show_item
from tests.golden.make_v1 import RUN_ID
from tests.golden.make_v1f import COUNTS, EVERY_EVENT, GROUPS, OPTIONS, Trained, tasks
from tests.support.disk import says_no_machine
from tests.support.ranks import fine, on_ranks

HERE = Path(__file__).parent / "v1f"
TAG = int(RUN_ID[:16], 16)
ITEMS = sum(COUNTS.values())


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=80_000)


def test_the_new_events_come_back_with_every_field() -> None:
    name = JournalName(9, 0, str(HERE / "every_event.fbj"))
    logged = list(read_journal(name, run_tag=TAG, promised=os.path.getsize(name.path)))
    assert [each.event for each in logged] == EVERY_EVENT


def test_the_journals_hold_turns_of_every_rank() -> None:
    for life, rank in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2)):
        name = JournalName(life, rank, str(HERE / f"journals/{life:06d}-{rank:04d}.fbj"))
        assert any(isinstance(each.event, Reserved) for each in read_journal(name, run_tag=TAG)), (life, rank)


def test_it_is_whole(directory: str) -> None:
    found = verify(directory)
    assert (found.damages, found.generations) == ([], 2)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("step", [None, 3])
def test_the_run_goes_on_to_its_end(directory: str, size: int, step: int | None) -> None:
    def run(ranks: Ranks) -> tuple[int, dict[int, list[int]]]:
        trained = Trained()
        with Pipeline(tasks(), OPTIONS, directory=directory, ranks=ranks).sync() as pipe:
            pipe.attach(trained=trained)
            begun = pipe.resume(step)
            assert trained.steps == begun.step
            pipe.start(weights_current=True)
            return begun.step, {each.step: [group.uid for group in each] for each in pipe.batches(GROUPS)}

    found = fine(on_ranks(size, run, timeout_s=30.0))
    begun = found[0][0]
    assert begun == (step or 4)
    trained = sorted(uid for _, steps in found for uids in steps.values() for uid in uids)
    # In draw order each step is the next so many draws.
    assert trained == list(range(begun * GROUPS, ITEMS))


def test_its_status_is_that_of_all_ranks(directory: str) -> None:
    found = status_of(directory)
    assert (found.state, status_of(directory, until=4).state, found.damages) == (CONTINUES, FINISHED, [])
    assert found.work is not None
    assert found.work.left == sum(task.drawn for task in found.work.tasks.values()) - 4 * GROUPS > 0


def test_tools_read_what_all_ranks_have(directory: str, tmp_path: Path) -> None:
    work = status_of(directory).work
    assert work is not None
    assert sample_run(directory, 1000).drawn == work.buffered
    exporting.export(directory, tmp_path / "out", to="jsonl", statuses=["buffered"])
    lines = [line for path in (tmp_path / "out").glob("*.jsonl") for line in path.read_text().splitlines()]
    uids = {each["uid"] for each in map(json.loads, lines) if "uid" in each}
    assert len(uids) == work.buffered
    for uid in uids:
        shown = show_item(directory, uid)
        assert shown.facts["state"] == "buffered"
        assert shown.members
