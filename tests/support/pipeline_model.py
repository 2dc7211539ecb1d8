"""A whole run as a page of plain lists: what runners and the trainer saw happen, and what a crash leaves of it."""

from __future__ import annotations

import copy
from typing import Any

Key = tuple[str, int, int]
"""Task, epoch and index; what was submitted has its uid for an index."""


class ModelItem:
    """An item that was claimed, and how far its members are."""

    def __init__(self, key: Key, size: int, need: int) -> None:
        self.key, self.size, self.need = key, size, need
        self.members = ["pending"] * size
        self.failures = [0] * size
        self.results: dict[int, tuple[int, int]] = {}
        """Of each member that has run: the version that made it, and in which life of the process."""
        self.given: set[int] = set()
        self.effective = 0
        self.life = self.rerolls = self.interruptions = 0
        self.dropped: str | None = None

    @property
    def state(self) -> str:
        if self.dropped is not None:
            return "dropped"
        if {"pending", "in flight"} & set(self.members):
            return "open"
        return "parked" if "unrewarded" in self.members else "buffered"

    def copy(self) -> ModelItem:
        other = copy.copy(self)
        other.members, other.failures = list(self.members), list(self.failures)
        other.results, other.given = dict(self.results), set(self.given)
        return other

    def begin_anew(self, members: list[int]) -> None:
        """Run ``members`` again; the others keep what they are."""
        self.life += 1
        for member in members:
            self.members[member] = "pending"
            self.results.pop(member, None)
            self.given.discard(member)
        self.effective = min((version for version, _ in self.results.values()), default=0)

    def at_rest(self) -> dict[str, Any]:
        """Everything of it that outlives the process."""
        kept = dict(vars(self))
        kept["members"] = ["pending" if each == "in flight" else each for each in self.members]
        kept["interruptions"] += "in flight" in self.members
        return kept


class Half:
    """What the weights have seen: what a generation holds."""

    def __init__(self) -> None:
        self.step = 0
        self.trained: set[int] = set()
        self.leases: dict[int, list[tuple[int, int]]] = {}
        """(uid, life) of each group that is leased, by step."""

    @property
    def next_step(self) -> int:
        return max([self.step, *self.leases]) + 1

    def copy(self) -> Half:
        other = copy.copy(self)
        other.trained, other.leases = set(self.trained), dict(self.leases)
        return other


class Generation:
    """A generation as it was saved."""

    def __init__(self, model: Model, *, whole: bool, batches: list[list[Any]]) -> None:
        self.half, self.whole, self.batches = model.half.copy(), whole, copy.deepcopy(batches)
        self.half.leases.update(model.pending)
        self.items = {uid: item.copy() for uid, item in model.items.items()}
        self.shares = dict(model.shares)
        self.incarnation, self.hints, self.line = model.incarnation, len(model.hints), model.line


class Model:
    """Where everything is. Nothing here looks into the pipeline."""

    def __init__(self, bound: int | None, max_rerolls: int, reroll: bool, discard: bool, attempts: int) -> None:
        self.bound, self.max_rerolls, self.reroll, self.discard = bound, max_rerolls, reroll, discard
        self.attempts = attempts
        self.items: dict[int, ModelItem] = {}
        self.half = Half()
        self.pending: dict[int, list[tuple[int, int]]] = {}
        """Batches of before a crash that are to be handed out again."""
        self.hints: list[tuple[int, int, list[tuple[int, int]]]] = []
        """Incarnation, step and groups of every batch that was handed out."""
        self.shares: dict[str, float] = {}
        self.generations: dict[int, Generation] = {}
        self.incarnation = 0
        self.version = 0
        self.line = 0
        """Generations of one line have one journal; what was set aside is of another."""
        self.parking = False
        """Whether anything has been parked in this life, or came so from another."""

    def copy(self) -> Model:
        other = copy.copy(self)
        other.items = {uid: item.copy() for uid, item in self.items.items()}
        other.half, other.pending, other.hints = self.half.copy(), dict(self.pending), list(self.hints)
        other.shares, other.generations = dict(self.shares), dict(self.generations)
        return other

    # -- questions -----------------------------------------------------------------------------------------------

    def state(self, uid: int) -> str:
        if uid in self.half.trained:
            return "trained"
        if any(uid == leased for lease in self.half.leases.values() for leased, _ in lease):
            return "leased"
        return self.items[uid].state if uid in self.items else "future"

    def uids(self, *states: str) -> list[int]:
        return [uid for uid in sorted(self.items) if self.state(uid) in states]

    def members(self, status: str) -> list[tuple[int, int]]:
        return [
            (uid, n)
            for uid in self.uids("open", "parked")
            for n, s in enumerate(self.items[uid].members)
            if s == status
        ]

    @property
    def selectable(self) -> list[int]:
        """Buffered groups that are not kept for a batch to be handed out again."""
        kept = {uid for lease in self.pending.values() for uid, _ in lease}
        return [uid for uid in self.uids("buffered") if uid not in kept]

    def dropped(self) -> dict[str, dict[str, int]]:
        """How many were dropped, by task and reason."""
        found: dict[str, dict[str, int]] = {}
        for uid in self.uids("dropped"):
            item = self.items[uid]
            reasons = found.setdefault(item.key[0], {})
            reasons[item.dropped or ""] = reasons.get(item.dropped or "", 0) + 1
        return found

    # -- the producers -------------------------------------------------------------------------------------------

    def claimed(self, uid: int, key: Key, size: int, need: int) -> None:
        assert uid not in self.items, f"uid {uid} twice"
        assert all(key != item.key for item in self.items.values()), f"{key} was drawn twice"
        self.items[uid] = ModelItem(key, size, need)

    def started(self, uid: int, member: int, version: int) -> None:
        item = self.items[uid]
        assert self.state(uid) == "open", f"uid {uid} was started, and is {self.state(uid)}"
        assert item.members[member] == "pending", f"uid {uid}, member {member} was started: {item.members}"
        assert version == self.version, f"uid {uid} was started with version {version}, not {self.version}"
        item.members[member] = "in flight"

    def finished(self, uid: int, member: int, version: int, *, park: bool) -> None:
        item = self.items[uid]
        assert item.members[member] == "in flight"
        item.effective = min(item.effective, version) if item.results else version
        item.results[member] = (version, self.incarnation)
        item.members[member] = "unrewarded" if park else "finished"
        self.parking = self.parking or park
        self._settle(item)
        if item.state == "buffered" or (self.parking and item.dropped is None):
            self.expire()

    def failed(self, uid: int, member: int) -> None:
        item = self.items[uid]
        assert item.members[member] == "in flight"
        item.failures[member] += 1
        final = item.failures[member] >= self.attempts
        item.members[member] = "given up" if final else "pending"
        self._settle(item)
        if final:
            self.expire()

    def interrupted(self, uid: int, member: int) -> None:
        self.items[uid].members[member] = "pending"
        self.items[uid].interruptions += 1

    def rewarded(self, uid: int, member: int) -> None:
        item = self.items[uid]
        item.members[member] = "finished"
        item.given.add(member)
        if item.state == "buffered":
            self.expire()

    def _settle(self, item: ModelItem) -> None:
        if item.state != "open" and item.members.count("given up") > item.size - item.need:
            item.dropped = "failed"

    def expire(self) -> None:
        """What is too old for the next batch is run again, or dropped when it was often enough."""
        if self.bound is None:
            return
        least = self.half.next_step - 1 - self.bound
        for uid in [*self.selectable, *self.uids("parked")]:
            item = self.items[uid]
            if item.effective < least:
                self._expire(item, least)

    def _expire(self, item: ModelItem, least: int) -> None:
        ours = max(made for _, made in item.results.values()) == self.incarnation
        if ours and item.rerolls >= self.max_rerolls:
            item.dropped = "expired"
            return
        item.rerolls += ours
        old = [member for member, (version, _) in item.results.items() if version < least]
        at_hand = all(made == self.incarnation for _, made in item.results.values())
        later = item.given or "unrewarded" in item.members  # then it is run again whole
        if self.reroll and at_hand and not later and len(old) < len(item.results):
            item.begin_anew(old)
        else:
            item.begin_anew(list(range(item.size)))

    # -- the trainer -----------------------------------------------------------------------------------------------

    def asked(self, groups: int) -> bool:
        """A batch is waited for. Returns whether it is the one of before a crash; if not, none comes again."""
        step = self.half.next_step
        least = -1 if self.bound is None else step - 1 - self.bound
        lease = self.pending.get(step, []) if step == min(self.pending, default=0) else []
        if len(lease) == groups and all(self.items[uid].effective >= least for uid, _ in lease):
            return True
        self.pending = {}
        self.expire()
        return False

    def taken(self, step: int, uids: list[int], *, repeated: bool) -> None:
        assert step == self.half.next_step, f"a batch of step {step}, and {self.half.next_step} is the next"
        lease = [(uid, self.items[uid].life) for uid in uids]
        if repeated:
            assert lease == self.pending.pop(step), f"{lease} is not the batch that was handed out before"
        assert len(set(uids)) == len(uids)
        assert set(uids) <= set(self.selectable), f"{uids} of {self.selectable}"
        self.half.leases[step] = lease
        self.hints.append((self.incarnation, step, lease))

    def released(self, step: int) -> None:
        del self.half.leases[step]

    def acked(self, step: int) -> None:
        for leased in sorted(self.half.leases):
            if leased <= step:
                self.half.trained |= {uid for uid, _ in self.half.leases.pop(leased)}
        self.half.step = step

    # -- lives -------------------------------------------------------------------------------------------------------

    def resume(self, found: Generation) -> None:
        """Go back to a generation: the weights forget what they saw after it; what rollouts did counts on."""
        if not found.whole or self.discard:
            self.items, self.shares = {uid: item.copy() for uid, item in found.items.items()}, dict(found.shares)
            self.line = self.incarnation
        self.half, self.version, self.pending = found.half.copy(), found.half.step, {}
        self.half.leases = {}
        for uid, item in self.items.items():
            rest = item.at_rest()
            item.members, item.interruptions = (
                rest["members"],
                rest["interruptions"] if found.whole else item.interruptions,
            )
            item.effective = min(item.effective, found.half.step)
            if not found.whole and self.state(uid) in ("open", "parked", "buffered"):
                item.begin_anew([n for n, status in enumerate(item.members) if status != "given up"])
        self.parking = any("unrewarded" in self.items[uid].members for uid in self.uids("open", "parked"))

    def find_pending(self, found: Generation, hints: list[tuple[int, int, list[tuple[int, int]]]]) -> None:
        """Which batches come again: those of the generation and of what its life did next, while they are whole."""
        leases = dict(found.half.leases)
        if not self.discard:
            leases.update({step: lease for life, step, lease in hints[found.hints :] if life == found.incarnation})
        self.pending = {}
        used: set[int] = set()
        while found.whole and (lease := leases.get(step := self.half.step + len(self.pending) + 1)) is not None:
            whole = all(self.state(uid) == "buffered" and self.items[uid].life == life for uid, life in lease)
            if not whole or used & {uid for uid, _ in lease}:
                break
            used |= {uid for uid, _ in lease}
            self.pending[step] = lease
