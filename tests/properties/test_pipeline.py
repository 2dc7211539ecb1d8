"""The whole pipeline against plain lists: rollouts that end as they are told, a trainer, and crashes, in any order."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline import Batch, EndOfSource
from tests.properties.conftest import SOAK
from tests.support.pipeline_life import GROUPS, MEMBERS, PLANS, Attempt, PipelineLives, key_of
from tests.support.pipeline_model import Generation

pytestmark = pytest.mark.timeout(600 * SOAK)  # the plain limit would cut off the shrinking of what was found

ENDINGS = st.sampled_from(["finish", "finish", "park", "fail"])
SIZES = st.sampled_from([GROUPS, GROUPS, 1, 3])


class PipelineMachine(PipelineLives, RuleBasedStateMachine):
    """Rules of rollouts, of what comes from outside, of the trainer, and of lives; each is a step or a few."""

    @initialize(
        concurrency=st.sampled_from([3, 1, 9]),
        bound=st.sampled_from([1, 0, 2, None]),
        policy=st.sampled_from(["drop", "reroll", "wait"]),
        order=st.sampled_from(["finished", "strict"]),
        selector=st.sampled_from(["stalest", "fifo"]),
        keep=st.sampled_from([None, 2]),
        after_crash=st.sampled_from(["reuse", "reuse", "discard"]),
        max_rerolls=st.sampled_from([3, 1]),
        capacity=st.sampled_from([None, 9]),
    )
    def first_life(self, bound: int | None, policy: str, **options: Any) -> None:
        self.bound = bound
        waits = bound is not None and (options["selector"] == "stalest" or options["order"] == "strict")
        policy = "drop" if bound is None or (policy == "wait" and not waits) else policy
        self.options: dict[str, Any] = {"max_staleness": bound, "staleness_policy": policy, **options}
        self.model, self.more_hints, self.may_be_older = self.fresh(), [], False
        self.adopted, self.unsure = set[int](), set[int]()
        self.begin()

    # -- rollouts ------------------------------------------------------------------------------------------------------

    async def tell(self, attempt: Attempt, how: str) -> None:
        attempt.how = how
        attempt.told.set()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=ENDINGS, count=st.sampled_from([1, 1, 3]))
    def end_attempts(self, data: st.DataObject, how: str, count: int) -> None:
        for _ in range(min(count, len(self.flying))):
            self.do(self.tell(self.flying[data.draw(st.sampled_from(sorted(self.flying)))], how))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(seconds=seconds)

    @precondition(lambda self: self.model.members("unrewarded"))
    @rule(data=st.data(), value=st.sampled_from([0.0, 1.0]))
    def reward(self, data: st.DataObject, value: float) -> None:
        uid, member = data.draw(st.sampled_from(self.model.members("unrewarded")))
        self.do(self.give_reward(uid, member, value))

    async def give_reward(self, uid: int, member: int, value: float) -> None:
        await self.pipe.reward(uid, value, member)
        self.model.rewarded(uid, member)

    @precondition(lambda self: self.model.uids("parked"))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.model.uids("parked")))
        self.model.items[uid].dropped = "discarded"
        self.do(self.pipe.discard(uid))

    @rule(task=st.sampled_from(sorted(PLANS)))
    def submit(self, task: str) -> None:
        async def give() -> None:
            uid = await self.pipe.submit(task, {"n": 100})
            self.model.claimed(uid, key_of(task, -1, -1, uid), *PLANS[task][1:])

        self.do(give())

    @rule(task=st.sampled_from(sorted(PLANS)), share=st.sampled_from([1.0, 5.0]))
    def set_share(self, task: str, share: float) -> None:
        self.model.shares[task] = share
        self.do(self.pipe.set_share(task, share))

    # -- the trainer ---------------------------------------------------------------------------------------------------

    @property
    def untrained(self) -> list[Batch]:
        return [batch for batch in self.held if batch.step > len(self.trainer.batches)]

    @precondition(lambda self: self.asking is None)
    @rule(groups=SIZES)
    def ask(self, groups: int) -> None:
        self.groups, self.answer = groups, None
        self.repeats = self.model.asked(groups)

        async def ask() -> None:
            self.asking = self.loop.create_task(self.wait_for_batch(groups))

        self.do(ask())

    @precondition(lambda self: self.asking is not None)
    @rule()
    def stop_asking(self) -> None:
        assert self.asking is not None
        self.asking.cancel()
        self.do()

    @precondition(lambda self: bool(self.untrained))
    @rule()
    def train(self) -> None:
        self.trainer.step(self.untrained[0])

    @precondition(lambda self: bool(self.untrained))
    @rule()
    def release(self) -> None:
        async def give_back() -> None:
            batch = self.held.pop()
            self.pipe.release(batch)
            self.model.released(batch.step)

        self.do(give_back())

    @precondition(lambda self: len(self.held) > len(self.untrained))
    @rule(data=st.data())
    def ack_some(self, data: st.DataObject) -> None:
        self.ack(data.draw(st.sampled_from([batch.step for batch in self.held if batch not in self.untrained])))

    def ack(self, step: int) -> None:
        self.model.acked(step)
        self.held = [batch for batch in self.held if batch.step > step]
        self.do(self.pipe.ack(step))

    @rule(whole=st.sampled_from([True, True, False]))
    def save(self, whole: bool) -> None:
        async def save() -> None:
            step = len(self.trainer.batches)
            saving = await self.pipe.save(step, replay_buffer=whole)
            self.model.acked(step)
            await saving.committed()

        self.held = self.untrained
        self.do(save())  # what the ack made room for was claimed in it, and so belongs to the generation
        self.committed(Generation(self.model, whole=whole, batches=self.trainer.batches))
        self.marks[-1] = (len(self.files.changes), self.model.copy())

    @precondition(lambda self: self.updating is None)
    @rule(running=st.sampled_from(["keep", "finish", "abort"]), fails=st.sampled_from([False, False, True]))
    def begin_update(self, running: str, fails: bool) -> None:
        async def begin() -> None:
            self.pushed, self.push_fails = anyio.Event(), fails
            self.updating = self.loop.create_task(self.push(len(self.trainer.batches), running))

        self.aborting = running == "abort"
        self.do(begin())
        self.aborting = False

    @precondition(lambda self: self.updating is not None)
    @rule()
    def end_update(self) -> None:
        async def end() -> None:
            self.pushed.set()

        self.do(end())

    @rule(
        groups=SIZES,
        newest=st.booleans(),
        first=ENDINGS,
        saves=st.sampled_from([None, None, True, False]),
        releases=st.booleans(),
    )
    def a_step_as_usual(self, groups: int, newest: bool, first: str, saves: bool | None, releases: bool) -> None:
        """Train the next batch, publish, ack or save: the way to states that single moves rarely reach.

        Attempts end one by one, the oldest first or the newest, until there is a batch; it may be given back once.
        """
        if self.updating is not None:
            self.end_update()
        if self.updating is None and (self.paused or self.model.version < len(self.trainer.batches)):
            self.update_at_once()
        if self.asking is None and not self.untrained:
            self.ask(groups)
        while self.asking is not None and self.flying:
            self.do(self.tell(self.flying[(max if newest else min)(self.flying)], first))
            first = "finish"
        if releases and self.untrained and self.asking is None:
            self.release()
            self.ask(groups)
        if self.untrained:
            self.train()
            if self.updating is None:
                self.update_at_once()
        if saves is not None:
            self.save(saves)
        elif self.held:
            self.ack(len(self.trainer.batches))

    def update_at_once(self) -> None:
        self.begin_update("keep", False)
        self.end_update()

    # -- lives ---------------------------------------------------------------------------------------------------------

    def choose_step(self, data: st.DataObject) -> int | None:
        """The newest generation, or an older one of the same line."""
        model = self.model
        newest = max(model.generations, default=None)
        if newest is None or not data.draw(st.sampled_from([False, False, True])):
            return None
        steps = {each.half.step for each in model.generations.values()}
        chosen = {step: max(n for n, g in model.generations.items() if g.half.step == step) for step in steps}
        allowed = [s for s, n in chosen.items() if model.discard or model.generations[n].line == model.line >= 0]
        return data.draw(st.sampled_from([None, *sorted(allowed)]))

    @rule(data=st.data())
    def close_and_go_on(self, data: st.DataObject) -> None:
        self.do(self.stop_waiting())
        for uid, member in self.flying:
            self.model.interrupted(uid, member)
        self.leave()
        self.more_hints = self.model.hints
        self.begin(self.choose_step(data))

    @rule(data=st.data(), lost=st.one_of(st.just(0), st.integers(0, 12), st.integers(0, 200)), torn=st.booleans())
    def crash(self, data: st.DataObject, lost: int, torn: bool) -> None:
        changes = list(self.files.changes)
        self.do(self.stop_waiting())
        self.leave()
        kept = max(0, len(changes) - lost)
        torn = self.fall_back(changes, kept, torn=torn)
        fuzzy = self.what_is_left(kept, torn)
        self.begin(self.choose_step(data), fuzzy)

    # -- what holds after each -----------------------------------------------------------------------------------------

    @invariant()
    def everything_is_where_the_model_has_it(self) -> None:
        ledger, model = self.pipe.ledger, self.model
        ledger.check()
        for uid in model.items:
            found, expected = ledger.state(uid), model.state(uid)
            assert ("open" if found in ("waiting", "running") else found) == expected, (
                f"uid {uid}: {found}, not {expected}"
            )
        for uid, entry in ledger.entries.items():
            item = model.items[uid]
            assert [MEMBERS[each] for each in entry.members] == item.members
            assert (entry.life, entry.rerolls, entry.interruptions) == (item.life, item.rerolls, item.interruptions)
            assert list(entry.failures) == item.failures
            assert not item.results or entry.effective == item.effective
        assert ledger.claimed == len(model.items)
        assert (ledger.step, ledger.next_step) == (model.half.step, model.half.next_step)
        assert {step: lease.uids for step, lease in ledger.leases.items()} == dict(
            zip(model.half.leases, self.uids_of(model.half.leases), strict=True)
        )
        dropped = {task: totals.dropped for task, totals in ledger.totals.items() if totals.dropped}
        assert dropped == model.dropped()

    @invariant()
    def nothing_else_is_held_or_waits(self) -> None:
        state, now = self.pipe._run.state, self.pipe.statistics()
        assert (now.rollouts.in_flight, now.rollouts.scoring) == (len(self.flying), 0)
        assert [lease.uids for lease in state.pending] == self.uids_of(self.model.pending)
        pushing = self.updating is not None and not self.paused
        assert (self.asking is not None) <= now.buffer.waiters <= (self.asking is not None) + pushing
        held = {uid for uid in self.pipe.ledger.entries if self.model.items[uid].results}
        assert {uid for uid, _, _ in state.buffer.storage.locations()} == held
        assert {uid for uid in self.model.items if uid in state.buffer} == set(self.model.selectable)
        assert state.sampler.mixture.shares == self.model.shares
        if self.asking is not None and not self.paused:
            assert self.flying or self.model.uids("parked"), "a trainer waits for nothing"

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        trained = Counter(self.trainer.groups)
        assert not [key for key, count in trained.items() if count > 1]
        uids = self.model.half.trained | {uid for b in self.held if b not in self.untrained for uid in b.uids}
        assert trained.keys() == {self.model.items[uid].key for uid in uids}

    # -- the end -------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if hasattr(self, "pipe"):
                if sys.exc_info()[0] is None:
                    self.train_to_the_end()
                self.loop.run_until_complete(self.stop_waiting())
                self.leave()
        finally:
            self.loop.close()
            self.memory.cleanup()

    def train_to_the_end(self) -> None:
        for _ in range(200):
            while unrewarded := self.model.members("unrewarded"):
                self.do(self.give_reward(*unrewarded[0], 1.0))
            self.a_step_as_usual(GROUPS, newest=False, first="finish", saves=None, releases=False)
            self.everything_is_where_the_model_has_it()
            if isinstance(self.answer, EndOfSource) and not self.held:
                break
        else:
            raise AssertionError(f"no end comes: {self.answer!r}, {self.pipe.statistics()}")
        self.nothing_else_is_held_or_waits()
        self.nothing_is_trained_twice()
        self.check_drained()
        assert not self.pipe.ledger.entries


TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = settings(max_examples=150 * SOAK, stateful_step_count=30)
