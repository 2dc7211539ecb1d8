"""The ledger as a page of plain lists: slow, obvious, and written from the words of the design, not from the code."""

from __future__ import annotations

from typing import Any

from pipeline.records import (
    Aged,
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


class ModelItem:
    """What the producers did about one item; never forgotten, whatever the weights have seen of it."""

    def __init__(self, event: Claimed) -> None:
        self.uid, self.task, self.size, self.need = event.uid, event.task, event.size, event.need
        self.members = ["pending"] * event.size
        self.attempts = [0] * event.size
        self.failures = [0] * event.size
        self.life = self.interruptions = self.deaths = self.rerolls = 0
        self.results: dict[int, Finished | Parked] = {}
        """What each member that finished came to."""
        self.ages: dict[int, dict[int, int]] = {}
        """For each member, how many tokens which version made."""
        self.effective = 0
        self.scores: dict[int, float] = {}
        """The reward of each member that has one, in the order in which they came."""
        self.given: dict[int, float] = {}
        self.order: int | None = None
        self.running = event.content is None  # what was given waits for its turn
        """Since it was claimed or an attempt started, until the last one in flight was cut or is to be tried again."""
        self.dropped: str | None = None

    @property
    def versions(self) -> list[int]:
        return [event.oldest for event in self.results.values()]

    @property
    def rewards(self) -> list[float]:
        return list(self.scores.values())

    @property
    def tokens(self) -> int:
        return sum(event.tokens for event in self.results.values())

    @property
    def buffered(self) -> bool:
        return self.order is not None

    @property
    def unsettled(self) -> bool:
        return "pending" in self.members or "in flight" in self.members

    @property
    def state(self) -> str:
        if self.dropped is not None:
            return "dropped"
        if self.buffered:
            return "buffered"
        if "unrewarded" in self.members and not self.unsettled:
            return "parked"
        return "running" if self.running else "waiting"


class Model:
    """Items by uid, and what the weights have seen."""

    def __init__(self) -> None:
        self.items: dict[int, ModelItem] = {}
        self.trained: set[int] = set()
        self.leases: dict[int, list[int]] = {}
        self.step = 0
        self.clean = True
        self.finished = 0
        self.counts: dict[str, dict[str, float]] = {}

    # -- questions -----------------------------------------------------------------------------------------------

    def state(self, uid: int) -> str:
        if uid in self.trained:
            return "trained"
        if any(uid in uids for uids in self.leases.values()):
            return "leased"
        item = self.items.get(uid)
        return "future" if item is None else item.state

    def uids(self, *states: str) -> list[int]:
        return [uid for uid in self.items if self.state(uid) in states]

    def in_order(self) -> list[int]:
        """Groups that wait or are leased, as they became buffered."""
        return sorted(self.uids("buffered", "leased"), key=lambda uid: self.items[uid].order or 0)

    def members(self, status: str) -> list[tuple[int, int]]:
        """(uid, member) of every member in ``status`` of an item that has not ended."""
        live = self.uids("waiting", "running", "parked")
        return [(uid, n) for uid in live for n, each in enumerate(self.items[uid].members) if each == status]

    @property
    def next_step(self) -> int:
        return max([self.step, *self.leases]) + 1

    def dropped_by_reason(self, task: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for item in self.items.values():
            if item.task == task and item.dropped is not None and item.uid not in self.trained:
                found[item.dropped] = found.get(item.dropped, 0) + 1
        return found

    # -- what the producers did ------------------------------------------------------------------------------------

    def apply(self, event: AnyEvent) -> None:
        """Take in an event of an item that has not ended, or of the run."""
        if isinstance(event, Opened):
            self._opened(event)
        elif isinstance(event, Closed):
            self.clean = True
        elif isinstance(event, Claimed):
            self.items[event.uid] = ModelItem(event)
            self._count(event.task, claimed=1)
        elif isinstance(event, (Started, Aged, Finished, Parked, Rewarded, Failed, Interrupted, Dropped, Reopened)):
            self._of_an_item(self.items[event.uid], event)

    def _of_an_item(self, item: ModelItem, event: AnyEvent) -> None:
        if isinstance(event, Started):
            item.running = True
            item.members[event.member] = "in flight"
            item.attempts[event.member] = event.attempt
        elif isinstance(event, Aged):
            item.ages[event.member] = dict(event.tokens)
        elif isinstance(event, (Finished, Parked)):
            item.effective = min([event.oldest, item.effective] if item.versions else [event.oldest])
            item.results[event.member] = event
            self._count(item.task, finished=1, tokens=event.tokens, seconds=event.seconds)
            if item.life:
                self._count(item.task, again=1, again_tokens=event.tokens)
            if isinstance(event, Parked):
                item.members[event.member] = "unrewarded"
            else:
                self._reward(item, event.member, event.reward)
            self._settle(item)
        elif isinstance(event, Rewarded):
            item.given[event.member] = event.reward
            self._reward(item, event.member, event.reward)
            self._settle(item)
        elif isinstance(event, Failed):
            item.failures[event.member] += 1
            item.members[event.member] = "given up" if event.final else "pending"
            item.running = event.final or "in flight" in item.members
            self._count(item.task, failed=1)
            self._settle(item)
        elif isinstance(event, Interrupted):
            item.members[event.member] = "pending"
            item.interruptions += 1
            item.deaths += event.unplanned
            item.running = "in flight" in item.members
            self._count(item.task, interrupted=1)
        elif isinstance(event, Dropped):
            item.dropped = event.reason
        elif isinstance(event, Reopened):
            self._reopen(item, event)

    def _reward(self, item: ModelItem, member: int, reward: float) -> None:
        item.members[member] = "finished"
        item.scores[member] = reward
        self._count(item.task, reward_sum=reward, reward_count=1)

    def _settle(self, item: ModelItem) -> None:
        if item.unsettled:
            return
        if item.members.count("finished") + item.members.count("unrewarded") < item.need:
            item.dropped = "failed"
            return
        if "unrewarded" in item.members:
            return
        self.finished += 1
        item.order = self.finished
        self._count(item.task, produced=1)

    def _reopen(self, item: ModelItem, event: Reopened) -> None:
        item.life += 1
        item.rerolls += event.reason == "expired"
        for member in event.members or range(item.size):
            item.members[member] = "pending"
            item.results.pop(member, None)
            item.ages.pop(member, None)
            item.scores.pop(member, None)
        item.given = {member: reward for member, reward in item.given.items() if member in item.scores}
        item.order, item.running, item.deaths = None, False, 0
        if item.results:
            item.effective = min(item.versions)
        self._count(item.task, reopened=1)

    def _opened(self, event: Opened) -> None:
        for item in self.items.values():
            if item.dropped is not None:
                continue
            lost = item.members.count("in flight")
            if lost:
                item.interruptions += 1
                item.deaths += not self.clean
                item.members = ["pending" if each == "in flight" else each for each in item.members]
                self._count(item.task, interrupted=lost)
            item.running = False
            item.effective = min(item.effective, event.version)
            for member, tokens in item.ages.items():
                clamped: dict[int, int] = {}
                for version, count in tokens.items():
                    clamped[min(version, event.version)] = clamped.get(min(version, event.version), 0) + count
                item.ages[member] = clamped
        self.clean = False

    def _count(self, task: str, **more: float) -> None:
        counts = self.counts.setdefault(task, {})
        for name, value in more.items():
            counts[name] = counts.get(name, 0) + value

    # -- what the weights have seen --------------------------------------------------------------------------------

    def ack(self, step: int) -> list[int]:
        done = [uid for leased in sorted(self.leases) if leased <= step for uid in self.leases.pop(leased)]
        self.trained |= set(done)
        self.step = step
        return done

    def consumer(self) -> dict[str, Any]:
        """What a generation keeps."""
        return {"trained": set(self.trained), "leases": {k: list(v) for k, v in self.leases.items()}, "step": self.step}

    def go_back(self, saved: dict[str, Any]) -> None:
        """The weights forget what they saw after a generation; leases of before a crash are nobody's."""
        self.trained, self.step, self.leases = set(saved["trained"]), saved["step"], {}
