"""Which events count for a generation, after parts of a run have been set aside."""

from __future__ import annotations

from pipeline.checkpoint.lines import last_counted
from pipeline.records import Opened


def test_without_anything_set_aside_everything_counts() -> None:
    assert last_counted([Opened(1), Opened(2), Opened(3)], {(1, 0): 50}) == {}


def test_what_was_set_aside_does_not_count_from_then_on() -> None:
    opened = [Opened(1), Opened(2, discarded=[(1, 0, 50)]), Opened(3)]
    assert last_counted(opened, {(1, 0): 50, (2, 0): 9}) == {(1, 0): 50}
    assert last_counted(opened, {(1, 0): 20}) == {(1, 0): 50}  # an older generation of the same line


def test_the_least_of_what_was_said_counts() -> None:
    opened = [Opened(1), Opened(2, discarded=[(1, 0, 50)]), Opened(3, discarded=[(1, 0, 30), (2, 0, 0)])]
    assert last_counted(opened, {(1, 0): 30}) == {(1, 0): 30, (2, 0): 0}


def test_a_generation_of_the_part_that_was_set_aside_wins_against_the_journal_that_did_it() -> None:
    opened = [Opened(1), Opened(2, discarded=[(1, 0, 50)]), Opened(3)]
    assert last_counted(opened, {(1, 0): 80}) == {(2, 0): 0}


def test_what_does_not_count_itself_sets_nothing_aside() -> None:
    # The third set the second aside as a whole, and with it what the second had said of the first.
    opened = [Opened(1), Opened(2, discarded=[(1, 0, 50)]), Opened(3, discarded=[(1, 0, 80), (2, 0, 0)])]
    assert last_counted(opened, {(1, 0): 80}) == {(1, 0): 80, (2, 0): 0}
    assert last_counted(opened, {(1, 0): 40}) == {(1, 0): 80, (2, 0): 0}


def test_ranks_are_told_apart() -> None:
    opened = [Opened(1), Opened(1, rank=1), Opened(2, discarded=[(1, 1, 7)])]
    assert last_counted(opened, {(1, 0): 90, (1, 1): 7}) == {(1, 1): 7}
