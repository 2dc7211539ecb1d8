"""Which results of evaluations may be used where: as far as the weights of two lives are the same."""

from __future__ import annotations

from pipeline.records import Evaluated, Opened
from pipeline.wiring.evaluations import Evaluation, Evaluations, Outcome


def result(version: int, index: int = 0, *, oldest: int | None = None, newest: int | None = None) -> Evaluated:
    oldest = version if oldest is None else oldest
    return Evaluated("exam", version, index, 0, 7, 1.0, oldest, oldest if newest is None else newest, "mark", 1, 0, 9)


def lives(*parents: tuple[int, int]) -> Evaluations:
    """Incarnations from 1; each goes on from (incarnation, version), the first from nothing."""
    made = Evaluations()
    for incarnation, (parent, version) in enumerate(((-1, 0), *parents), 1):
        made.apply(incarnation, 0, Opened(incarnation, version=version, parent=parent))
    return made


def usable(made: Evaluations, incarnation: int, versions: int = 12) -> list[int]:
    return [v for v in range(versions) if made.find("exam", v, "mark", incarnation)]


def test_a_life_uses_its_own_and_those_before_it_as_far_as_they_were_saved() -> None:
    made = lives((1, 5), (2, 7))
    for incarnation, versions in ((1, range(3, 10)), (2, range(6, 9)), (3, [8])):
        for version in versions:
            made.apply(incarnation, 0, result(version))
    assert usable(made, 1) == [3, 4, 5, 6, 7, 8, 9]
    assert usable(made, 2) == [3, 4, 5, 6, 7, 8], "6 to 8 are its own"
    assert usable(made, 3) == [3, 4, 5, 6, 7, 8], "8 is its own; that of its parent was of weights that went back"
    assert [made.find("exam", v, "mark", 3)[0, 0].location.incarnation for v in (5, 6, 7, 8)] == [1, 2, 2, 3]


def test_a_line_that_was_left_and_taken_up_again_does_not_see_the_other() -> None:
    """3 goes on from 1's generation at 8, though 2 had gone on from the one at 4."""
    made = lives((1, 4), (1, 8))
    for version in range(12):
        made.apply(1, 0, result(version))
        made.apply(2, 0, result(version))
    assert [made.find("exam", v, "mark", 3)[0, 0].location.incarnation for v in range(9)] == [1] * 9
    assert usable(made, 3) == list(range(9))


def test_a_bound_holds_for_all_that_lies_before_it() -> None:
    """2 went on from 1 at version 9, and 3 from 2 at version 2, before 2 had trained anything: what 1 made up to 2."""
    made = lives((1, 9), (2, 2))
    for version in range(12):
        made.apply(1, 0, result(version))
    assert usable(made, 2) == list(range(10))
    assert usable(made, 3) == [0, 1, 2]


def test_weights_that_came_meanwhile_must_be_the_same_as_well() -> None:
    made = lives((1, 5))
    made.apply(1, 0, result(5, 0, newest=6))
    made.apply(1, 0, result(5, 1, newest=5))
    made.apply(1, 0, result(5, 2, oldest=4, newest=5))
    assert sorted(made.find("exam", 5, "mark", 2)) == [(1, 0)], "newer ones went back, and older were not asked for"
    assert sorted(made.find("exam", 5, "mark", 1)) == [(0, 0), (1, 0)]


def test_what_was_not_written_or_is_of_another_source_or_task_is_not_found() -> None:
    made = lives()
    made.apply(1, 0, Evaluated("exam", 1, 0, 0, 7, 1.0, 1, 1, "mark"))
    made.apply(1, 0, result(2))
    assert made.find("exam", 1, "mark", 1) == {}
    assert made.find("exam", 2, "other", 1) == {}
    assert made.find("other", 2, "mark", 1) == {}
    assert made.find("exam", 2, "mark", 9) == {}


def test_journals_that_do_not_say_whose_generation_was_recovered_lead_nowhere() -> None:
    made = Evaluations()
    made.apply(1, 0, Opened(1))
    made.apply(1, 0, result(1))
    made.apply(2, 0, Opened(2, generation=4, version=9))
    assert made.find("exam", 1, "mark", 2) == {}


def test_an_evaluation_sums_up_what_it_holds() -> None:
    outcomes = [Outcome(index=0, reward=1.0, reused=True), Outcome(index=1, error="E"), Outcome(index=2, reward=2.0)]
    made = Evaluation(task="exam", version=3, outcomes=outcomes)
    assert (len(made), list(made), made.failed, made.reused, made.reward_mean) == (3, outcomes, 1, 1, 1.5)
    assert made.rollouts == []
