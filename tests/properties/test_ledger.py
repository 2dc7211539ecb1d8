"""The ledger against plain lists: any events, leases, crashes and recoveries, with the counts right after each."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.ledger import BUFFERED, LEASED, STATES, ConsumerHalf, Ledger, recover
from pipeline.records import (
    Aged,
    AnyEvent,
    BatchHint,
    Claimed,
    Closed,
    Dropped,
    Evaluated,
    Failed,
    Feedback,
    Finished,
    Interrupted,
    Mixed,
    Opened,
    Parked,
    Reopened,
    Rewarded,
    Started,
)
from tests.properties.conftest import SOAK
from tests.support.ledger_model import Model

MEMBER_STATUS = ("pending", "in flight", "finished", "given up", "unrewarded")


class LedgerMachine(RuleBasedStateMachine):
    """Does to a ledger what a pipeline would, in any order, and to the model the same."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model = Model()
        self.events: list[AnyEvent] = []
        self.generations: list[tuple[bytes, dict[str, Any], int]] = []
        self.incarnation = 0

    def record(self, event: AnyEvent) -> None:
        self.events.append(event)
        became = self.ledger.apply(event)
        before = self.model.finished
        self.model.apply(event)
        if self.model.finished > before:
            assert became is not None
            assert isinstance(event, (Finished, Failed, Rewarded))
            assert became.uid == event.uid
        else:
            assert became is None

    @initialize()
    def begin(self) -> None:
        self.incarnation = 1
        self.record(Opened(1))
        self.save()

    # -- the producers ---------------------------------------------------------------------------------------------

    @rule(task=st.sampled_from("ab"), size=st.integers(1, 3), data=st.data(), content=st.sampled_from([None, b"c"]))
    def claim(self, task: str, size: int, data: st.DataObject, content: bytes | None) -> None:
        uid = self.ledger.next_uid
        self.record(Claimed(uid, task, 0, uid, uid, size, data.draw(st.integers(1, size)), content=content))

    @precondition(lambda self: self.model.members("pending"))
    @rule(data=st.data(), all_of_it=st.booleans())
    def start(self, data: st.DataObject, all_of_it: bool) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("pending")))
        pending = [m for u, m in self.model.members("pending") if u == uid] if all_of_it else [member]
        for each in pending:
            self.record(Started(uid, each, self.model.items[uid].attempts[each] + 1))

    @precondition(lambda self: self.model.members("in flight"))
    @rule(data=st.data(), reward=st.integers(-3, 3), oldest=st.integers(0, 9), all_of_it=st.booleans())
    def finish(self, data: st.DataObject, reward: int, oldest: int, all_of_it: bool) -> None:
        aged = data.draw(st.sampled_from(["", "aged", "aged, and a crash came between"]))
        uid, member = data.draw(st.sampled_from(self.model.members("in flight")))
        flying = [m for u, m in self.model.members("in flight") if u == uid] if all_of_it else [member]
        for each in flying:
            attempt = self.model.items[uid].attempts[each]
            if aged:
                self.record(Aged(uid, each, {oldest: each, oldest + 1: 1}))
            if aged and aged != "aged":
                continue
            self.record(Finished(uid, each, attempt, reward / 2, oldest, oldest + 1, tokens=each + 1, seconds=0.5))

    @precondition(lambda self: self.model.members("in flight"))
    @rule(data=st.data(), oldest=st.integers(0, 9), all_of_it=st.booleans())
    def park(self, data: st.DataObject, oldest: int, all_of_it: bool) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("in flight")))
        flying = [m for u, m in self.model.members("in flight") if u == uid] if all_of_it else [member]
        for each in flying:
            attempt = self.model.items[uid].attempts[each]
            self.record(Parked(uid, each, attempt, oldest, oldest + 1, tokens=each + 1, seconds=0.5))

    @precondition(lambda self: self.model.members("unrewarded"))
    @rule(data=st.data(), reward=st.integers(-3, 3), all_of_it=st.booleans())
    def reward(self, data: st.DataObject, reward: int, all_of_it: bool) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("unrewarded")))
        parked = [m for u, m in self.model.members("unrewarded") if u == uid] if all_of_it else [member]
        for each in parked:
            self.record(Rewarded(uid, each, self.model.items[uid].attempts[each], reward / 2))

    @precondition(lambda self: self.model.members("finished"))
    @rule(data=st.data())
    def a_reward_of_a_member_that_is_not_parked_changes_nothing(self, data: st.DataObject) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("finished")))
        before = copy.deepcopy(self.ledger.snapshot())
        assert self.ledger.apply(Rewarded(uid, member, 1, 9.0)) is None
        assert self.ledger.snapshot() == before

    @precondition(lambda self: self.model.members("in flight"))
    @rule(data=st.data(), final=st.booleans())
    def fail(self, data: st.DataObject, final: bool) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("in flight")))
        self.record(Failed(uid, member, self.model.items[uid].attempts[member], "error", "E", final))

    @precondition(lambda self: self.model.members("in flight"))
    @rule(data=st.data(), unplanned=st.booleans())
    def interrupt(self, data: st.DataObject, unplanned: bool) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("in flight")))
        self.record(Interrupted(uid, member, self.model.items[uid].attempts[member], "abort", unplanned))

    @precondition(lambda self: self.model.uids("waiting", "running", "parked", "buffered"))
    @rule(data=st.data(), reason=st.sampled_from(["expired", "quarantined", "discarded"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        live = self.model.uids("waiting", "running", "parked", "buffered")
        self.record(Dropped(data.draw(st.sampled_from(live)), reason))

    @precondition(lambda self: self.model.uids("buffered", "parked"))
    @rule(data=st.data(), reason=st.sampled_from(["expired", "outlived"]))
    def reopen(self, data: st.DataObject, reason: str) -> None:
        self.record(Reopened(data.draw(st.sampled_from(self.model.uids("buffered", "parked"))), reason))

    @precondition(lambda self: self.model.uids("buffered"))
    @rule(data=st.data(), reason=st.sampled_from(["expired", "outlived"]))
    def reopen_members(self, data: st.DataObject, reason: str) -> None:
        uid = data.draw(st.sampled_from(self.model.uids("buffered")))
        results = self.model.items[uid].results
        members = data.draw(st.lists(st.sampled_from(sorted(results)), unique=True))
        kept = [event for member, event in results.items() if member not in members]
        if members and kept:
            oldest, newest = min(event.oldest for event in kept), max(event.newest for event in kept)
            scores = [reward for member, reward in self.model.items[uid].scores.items() if member not in members]
            rewards, tokens = sum(scores), sum(event.tokens for event in kept)
            self.record(Reopened(uid, reason, sorted(members), oldest, newest, rewards, tokens))

    @precondition(lambda self: self.model.uids("dropped", "trained"))
    @rule(data=st.data())
    def a_late_event_of_an_ended_item_changes_nothing(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.model.uids("dropped", "trained")))
        before = copy.deepcopy(self.ledger.snapshot())
        for event in (Started(uid), Finished(uid, 0, 1, 1.0, 0, 0), Failed(uid, 0, 1, "", "", True), Reopened(uid, "")):
            assert self.ledger.apply(event) is None
        later = (Parked(uid, 0, 1, 0, 0), Rewarded(uid, 0, 1, 1.0), Feedback("a", uid, 0, 1.0))
        for more in (*later, Evaluated("a", 0, 0, 0, uid, 1.0, 0, 0)):
            assert self.ledger.apply(more) is None
        for other in (Interrupted(uid, 0, 1, ""), Dropped(uid, "expired"), BatchHint(1, [uid], [0]), Mixed({})):
            assert self.ledger.apply(other) is None
        assert self.ledger.snapshot() == before

    # -- the trainer -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.uids("buffered"))
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        uids = data.draw(st.lists(st.sampled_from(self.model.uids("buffered")), min_size=1, max_size=4, unique=True))
        step = self.ledger.next_step
        assert step == self.model.next_step
        lease = self.ledger.lease(step, uids)
        assert (lease.uids, lease.lives) == (uids, [self.model.items[uid].life for uid in uids])
        self.model.leases[step] = uids
        self.events.append(BatchHint(step, lease.uids, lease.lives))

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model.leases)))
        assert self.ledger.ack(step) == self.model.ack(step)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model.leases)))
        assert [entry.uid for entry in self.ledger.release(step)] == self.model.leases.pop(step)
        assert self.ledger.release(step) == []

    # -- lives -----------------------------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        half = msgspec.json.encode(self.ledger.consumer_half())
        self.generations.append((half, self.model.consumer(), len(self.events)))

    @rule(data=st.data())
    def whatever_a_crash_left_of_the_events_can_be_recovered(self, data: st.DataObject) -> None:
        half, _, position = data.draw(st.sampled_from(self.generations))
        cut = data.draw(st.integers(position, len(self.events)))
        ledger, pending = recover(msgspec.json.decode(half, type=ConsumerHalf), self.events[:cut])
        ledger.check()
        for lease in pending:
            if ledger.still_whole(lease):
                ledger.lease(lease.step, lease.uids)
        ledger.check()

    @rule(data=st.data(), version=st.integers(0, 9), planned=st.booleans())
    def end_and_recover(self, data: st.DataObject, version: int, planned: bool) -> None:
        if planned:
            self.record(Closed())
        raw, saved, _ = self.generations[data.draw(st.integers(-min(3, len(self.generations)), -1))]
        self.incarnation += 1
        opened = Opened(self.incarnation, version=version)
        self.events.append(opened)
        half = msgspec.json.decode(raw, type=ConsumerHalf)
        self.ledger, pending = recover(half, self.events)
        self.model.apply(opened)
        self.model.go_back(saved)
        assert [(lease.step, lease.uids) for lease in pending] == sorted(saved["leases"].items())
        for lease in pending:
            whole = all(self.model.state(uid) == "buffered" for uid in lease.uids)
            lives = [self.model.items[uid].life for uid in lease.uids]
            assert self.ledger.still_whole(lease) == (whole and lives == lease.lives)

    # -- what holds after each ---------------------------------------------------------------------------------------

    @invariant()
    def the_counts_add_up(self) -> None:
        self.ledger.check()

    @invariant()
    def every_item_is_where_the_model_has_it(self) -> None:
        ledger, model = self.ledger, self.model
        assert {uid: ledger.state(uid) for uid in model.items} == {uid: model.state(uid) for uid in model.items}
        assert ledger.state(ledger.next_uid) == "future"
        for number, state in enumerate(STATES):
            assert ledger.count(number) == len(model.uids(state))
        assert ledger.claimed == len(model.items)
        assert ledger.outstanding == len(model.uids("waiting", "running", "parked", "buffered", "leased"))
        assert sorted(ledger.parked) == sorted(model.uids("parked"))
        for version in range(11):
            older = [uid for uid in model.uids("parked") if model.items[uid].effective < version]
            assert sorted(ledger.parked.older_than(version)) == sorted(older)
        assert (ledger.step, ledger.next_step) == (model.step, model.next_step)
        assert {step: lease.uids for step, lease in ledger.leases.items()} == model.leases
        entries = sorted(ledger.entries.values(), key=lambda entry: entry.order)
        assert [entry.uid for entry in entries if entry.state in (BUFFERED, LEASED)] == model.in_order()

    @invariant()
    def every_entry_says_what_the_model_says(self) -> None:
        for uid, entry in self.ledger.entries.items():
            item = self.model.items[uid]
            assert [MEMBER_STATUS[each] for each in entry.members] == item.members
            assert (list(entry.attempts), list(entry.failures)) == (item.attempts, item.failures)
            assert (entry.life, entry.rerolls) == (item.life, item.rerolls)
            assert (entry.interruptions, entry.deaths) == (item.interruptions, item.deaths)
            assert entry.in_flight == item.members.count("in flight")
            assert (entry.rewards, entry.tokens) == (sum(item.rewards), item.tokens)
            assert (dict(entry.given), entry.parked) == (item.given, item.members.count("unrewarded"))
            assert entry.oldest == min(item.versions, default=None)
            if item.versions:
                assert entry.newest == max(item.versions) + 1
                assert entry.effective == item.effective
            ages = item.ages
            assert entry.freshest == max([v for each in ages.values() for v in each], default=entry.effective)
            for least in range(12):
                too_old = {m: sum(n for v, n in each.items() if v < least) for m, each in ages.items()}
                assert entry.too_old(least) == sum(too_old.values())
                assert entry.members_below(least) == {m for m, each in ages.items() if max(each) < least}

    @invariant()
    def the_totals_are_the_models(self) -> None:
        for task, totals in self.ledger.totals.items():
            counts = self.model.counts.get(task, {})
            names = ("claimed", "produced", "finished", "failed", "interrupted", "reopened", "tokens")
            for name in (*names, "again", "again_tokens"):
                assert getattr(totals, name) == counts.get(name, 0), name
            assert (totals.reward_sum, totals.seconds) == (counts.get("reward_sum", 0), counts.get("seconds", 0))
            assert totals.reward_count == counts.get("reward_count", 0)
            trained = [self.model.items[uid] for uid in self.model.trained if self.model.items[uid].task == task]
            assert totals.trained == len(trained)
            assert totals.dropped == self.model.dropped_by_reason(task)

    @invariant()
    def recovering_now_gives_this_very_state(self) -> None:
        """The fold of every event and the consumer half of now are the live state, once its leases have ended."""
        live = copy.deepcopy(self.ledger)
        half = live.consumer_half()
        for step in sorted(live.leases):
            live.release(step)
        once, pending = recover(half, self.events)
        twice, again = recover(once.consumer_half(), self.events)
        assert once.snapshot() == live.snapshot()
        assert twice.snapshot() == once.snapshot()
        assert pending == half.leases
        assert again == []
        once.check()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=120 * SOAK, stateful_step_count=50)
