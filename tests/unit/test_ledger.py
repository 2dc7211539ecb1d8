"""The ledger's refusals, each of which changes nothing, and lines of a run that were abandoned and taken up again."""

from __future__ import annotations

import copy

import pytest

from pipeline.errors import UsageError
from pipeline.ledger import BUFFERED, Entry, Ledger, recover
from pipeline.records import (
    AnyEvent,
    Claimed,
    Closed,
    Dropped,
    Failed,
    Finished,
    Interrupted,
    Opened,
    Parked,
    Reopened,
    Rewarded,
    Started,
)


def finished(uid: int, task: str = "a") -> list[AnyEvent]:
    return [Claimed(uid, task, 0, uid, uid), Started(uid), Finished(uid, 0, 1, 1.0, 0, 0)]


def ledger_of(*events: AnyEvent) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
    return ledger


@pytest.fixture
def ledger() -> Ledger:
    """Uids 0 to 4 are buffered, 5 runs."""
    events = [event for uid in range(5) for event in finished(uid)]
    return ledger_of(Opened(1), *events, Claimed(5, "a", 0, 5, 5), Started(5))


def test_a_lease_is_all_or_nothing(ledger: Ledger) -> None:
    before = copy.deepcopy(ledger.snapshot())
    with pytest.raises(UsageError, match="uid 5 is running, not buffered"):
        ledger.lease(1, [0, 1, 5])
    with pytest.raises(KeyError):
        ledger.lease(1, [0, 99])
    assert ledger.snapshot() == before
    assert ledger.count(BUFFERED) == 5
    ledger.lease(1, [0, 1])
    with pytest.raises(UsageError, match="uid 1 is leased"):
        ledger.lease(2, [2, 1])
    assert (ledger.state(2), sorted(ledger.leases)) == ("buffered", [1])


def test_an_ack_of_what_was_never_handed_out_is_refused_with_what_was(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="step 1 was never handed out: no batch is leased, and 0 is the last"):
        ledger.ack(1)
    ledger.lease(1, [0])
    ledger.lease(2, [1])
    with pytest.raises(UsageError, match=r"batches of steps \[1, 2\] are leased"):
        ledger.ack(3)
    assert ledger.ack(2) == [0, 1]
    with pytest.raises(UsageError, match="batches up to 2 are already trained"):
        ledger.ack(1)
    assert ledger.ack(2) == [], "once more is no fault"
    ledger.check()


def test_groups_come_back_from_a_released_batch_in_the_order_that_they_had(ledger: Ledger) -> None:
    ledger.lease(1, [3, 0])
    ledger.lease(2, [4])
    assert ledger.next_step == 3
    assert [entry.uid for entry in ledger.release(1)] == [3, 0]
    assert ledger.release(9) == []
    assert ledger.snapshot()["order"] == [0, 1, 2, 3, 4]


def test_the_sum_is_checked(ledger: Ledger) -> None:
    ledger.check()
    ledger.totals["a"].claimed += 1
    with pytest.raises(AssertionError, match="task 'a': claimed 7 != live 6"):
        ledger.check()
    ledger.totals["a"].claimed -= 1
    del ledger.entries[3]
    with pytest.raises(AssertionError):
        ledger.check()


def test_what_the_weights_have_seen_stays_trained_though_another_line_dropped_it() -> None:
    """The older of two generations was resumed once, and its line dropped what the newer one's weights had seen."""
    events: list[AnyEvent] = [Opened(1), *finished(0), *finished(1)]
    live = ledger_of(*events)
    older = live.consumer_half()
    live.lease(1, [0])
    live.ack(1)
    newer = live.consumer_half()
    events += [
        Opened(2, generation=0),
        Dropped(0, "expired"),
        Reopened(1, "expired"),
        Started(1),
        Interrupted(1, 0, 2, ""),
    ]
    abandoned, _ = recover(older, events)
    assert (abandoned.state(0), abandoned.totals["a"].dropped) == ("dropped", {"expired": 1})
    abandoned.check()
    for _ in range(2):
        resumed, _ = recover(newer, [*events, Opened(3, generation=1)])
        resumed.check()
        assert (resumed.state(0), resumed.state(1)) == ("trained", "waiting")
        assert (resumed.totals["a"].trained, resumed.totals["a"].dropped) == (1, {})


def test_only_an_unplanned_end_of_the_process_is_a_death() -> None:
    events: list[AnyEvent] = [Opened(1), Claimed(0, "a", 0, 0, 0, 2), Started(0, 0), Started(0, 1)]
    for closed, deaths in ((False, 1), (True, 0)):
        ledger = ledger_of(*events, *([Closed()] if closed else []), Opened(2))
        entry = ledger.entries[0]
        assert (entry.deaths, entry.interruptions, ledger.state(0)) == (deaths, 1, "waiting")
        assert ledger.totals["a"].interrupted == 2
    ledger.apply(Opened(3))
    assert ledger.entries[0].deaths == 0, "nothing was in flight"


def test_versions_of_a_dead_line_count_as_no_newer_than_what_was_restored() -> None:
    """An old 12 is no new 12: after the weights went back to 7, what 12 made is 7 old at the least."""
    events: list[AnyEvent] = [Opened(1), Claimed(0, "a", 0, 0, 0), Started(0), Finished(0, 0, 1, 0.0, 12, 13)]
    ledger = ledger_of(*events, Opened(2, version=7))
    assert (ledger.entries[0].oldest, ledger.entries[0].effective) == (12, 7)
    ledger.apply(Opened(3, version=20))
    assert ledger.entries[0].effective == 7


def test_a_group_that_is_run_again_has_none_of_the_rewards_that_it_was_given() -> None:
    made: list[AnyEvent] = [Parked(0, 0, 1, 3, 3), Started(0, 1), Parked(0, 1, 1, 4, 4), Rewarded(0, 0, 1, 2.0)]
    ledger = ledger_of(Opened(1), Claimed(0, "a", 0, 0, 0, 2, 2), Started(0), *made)
    entry = ledger.entries[0]
    assert (ledger.state(0), entry.given, entry.parked, entry.effective) == ("parked", ((0, 2.0),), 1, 3)
    assert (ledger.parked.older_than(3), ledger.parked.older_than(4)) == ([], [0])
    ledger.apply(Reopened(0, "expired"))
    assert (ledger.state(0), entry.given, entry.parked, entry.rewards) == ("waiting", (), 0, 0.0)
    assert not ledger.parked
    assert ledger.apply(Rewarded(0, 1, 1, 5.0)) is None
    assert (entry.given, entry.rewards) == ((), 0.0)
    ledger.check()


def test_a_parked_groups_age_follows_the_weights_that_went_back() -> None:
    events: list[AnyEvent] = [Opened(1), Claimed(0, "a", 0, 0, 0), Started(0), Parked(0, 0, 1, 12, 12)]
    ledger = ledger_of(*events, Opened(2, version=7))
    assert (ledger.state(0), ledger.parked.older_than(8), ledger.parked.older_than(7)) == ("parked", [0], [])
    ledger.apply(Rewarded(0, 0, 1, 1.0))
    assert (ledger.state(0), len(ledger.parked), ledger.totals["a"].reward_sum) == ("buffered", 0, 1.0)
    ledger.check()


def test_a_member_given_up_before_it_was_started_was_not_in_flight() -> None:
    ledger = Ledger()
    ledger.apply(Claimed(0, "a", 0, 0, 0, 3, 1))
    ledger.apply(Started(0, 0))
    ledger.apply(Started(0, 1))
    ledger.apply(Failed(0, 2, 0, "group timeout", "late", True))
    assert ledger.entries[0].in_flight == 2
    ledger.apply(Finished(0, 0, 1, 1.0, 0, 0))
    became = ledger.apply(Finished(0, 1, 1, 1.0, 0, 0))
    assert became is not None
    assert (became.in_flight, became.unsettled, ledger.state(0)) == (0, 0, "buffered")


def test_an_item_that_has_finished_since_is_no_suspect() -> None:
    ledger = ledger_of(Opened(1), Claimed(0, "a", 0, 0, 0), Started(0), Opened(2), Started(0, 0, 2), Opened(3))
    entry = ledger.entries[0]
    assert entry.deaths == Entry.held(entry.hold(anew=True)).deaths == 2
    ledger.apply(Started(0, 0, 3))
    ledger.apply(Finished(0, 0, 3, 1.0, 0, 0))
    assert (Entry.held(entry.hold()).deaths, Entry.held(entry.hold(anew=True)).deaths) == (2, 0)
    ledger.apply(Reopened(0, "outlived"))
    ledger.apply(Started(0, 0, 4))
    ledger.apply(Opened(4))
    assert entry.deaths == 1
