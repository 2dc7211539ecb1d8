"""Plans of random manifests: against the rule as plainly as it can be written, and what they promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.checkpoint.listed import AGAIN, HEADLESS, ITEM, OPEN, PARKED, PARTIAL, WAITING, Episode, Shard, Stamp
from pipeline.checkpoint.planned import Plan, relisted
from pipeline.checkpoint.reshard import plan
from pipeline.errors import ConfigError, Damaged, NewerFormat
from tests.properties.conftest import SOAK
from tests.support.shards import SHAPES, check_by_rule, check_prefixes, in_age_order, lengths, shards_of, uids

MANIFESTS = 300 if SOAK == 1 else max(10_000, 500 * SOAK)
CHUNK = 2_500  # a test has its time
FLAGS = [
    0,
    0,
    0,
    0,
    OPEN,
    HEADLESS,
    OPEN | HEADLESS,
    AGAIN,
    WAITING,
    PARKED,
    PARTIAL,
    WAITING | PARTIAL,
    WAITING | AGAIN,
]


class Case:
    """A random manifest, and what is asked of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng([7, seed])
        self.saved, self.targets = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        self.saved_rows, self.rows = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        count = int(rng.choice([0, 1, 2, 5, 20, 80]))
        kept = lengths(SHAPES[int(rng.integers(3))], count, rng)
        # Few different numbers, so that there are ties; uids say nothing of age.
        names = rng.permutation(count) << int(rng.integers(0, 40))
        stamps = rng.integers(0, int(rng.choice([1, 3, 1000])), (count, 3))
        flags = rng.choice(FLAGS, count) if rng.random() < 0.5 else np.zeros(count, np.int64)
        self.episodes = []
        for uid, stamp, steps, flag in zip(names.tolist(), stamps.tolist(), kept, flags.tolist(), strict=True):
            steps = 1 if flag & ITEM else steps
            gone = int(rng.integers(1, 9)) if flag & HEADLESS else 0
            shard, row = int(rng.integers(self.saved)), int(rng.integers(self.saved_rows))
            at = Stamp(*stamp)
            self.episodes.append(Episode(uid, at, steps + gone, steps, shard, row, flag, int(rng.integers(0, 10**6))))
        self.shards = shards_of(self.episodes, self.saved, rows=self.saved_rows)

    def plan(self, **options: Any) -> Plan:
        """Ask for the plan, with everything in a new order."""
        episodes = [self.episodes[at] for at in self.rng.permutation(len(self.episodes))]
        shards = [self.shards[at] for at in self.rng.permutation(self.saved)]
        return plan(episodes, self.targets, self.rows, shards=shards, **options)


def cases(chunk: int) -> Iterator[tuple[int, Case]]:
    for seed in range(chunk * CHUNK, min(MANIFESTS, (chunk + 1) * CHUNK)):
        yield seed, Case(seed)


@contextmanager
def noted(seed: int) -> Iterator[None]:
    """Have a failure say which manifest it is of."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def plan_or_refusal(make: Callable[..., Plan], *given: Any, **how: Any) -> Plan | ConfigError | Damaged | NewerFormat:
    try:
        return make(*given, **how)
    except (ConfigError, Damaged, NewerFormat) as error:
        return error


chunks = pytest.mark.parametrize("chunk", range(-(-MANIFESTS // CHUNK)))


def check(planned: Plan, case: Case, kept: list[Episode]) -> None:
    """Everything that holds for every plan that shares out."""
    assert sorted(uid for target in planned.targets for uid in target.uids) == sorted(uids(kept))
    check_by_rule(planned, case.episodes, case.rows)
    check_prefixes(kept, [target.uids for target in planned.targets])
    by_uid = {each.uid: each for each in kept}
    for target in planned.targets:
        held = [by_uid[uid] for uid in target.uids]
        check_prefixes(held, target.rows)
        assert target.opens == tuple(sorted({each.shard for each in held}))
        assert target.again == uids(each for each in held if each.flags & AGAIN)
        assert target.items == sum(bool(each.flags & ITEM) for each in held)
        assert target.load == sum(each.steps for each in held)
        assert target.bytes == sum(each.bytes for each in held)


@pytest.mark.slow
@chunks
def test_a_plan_is_the_rule_whatever_the_order_of_the_manifest(chunk: int) -> None:
    for seed, case in cases(chunk):
        with noted(seed):
            planned = case.plan(rebalance=True)
            check(planned, case, case.episodes)
            again = case.plan(rebalance=True)
            assert (again, again.digest()) == (planned, planned.digest())
            # Moved, and planned from there: the same, as if it had not been moved.
            moved = relisted(planned, case.episodes, case.shards)
            there = shards_of(moved, case.targets, rows=case.rows)
            back = plan(moved, case.targets, case.rows, shards=there)
            assert back.identity
            assert [(each.uids, each.rows) for each in back.targets] == [(t.uids, t.rows) for t in planned.targets]
            other = plan(moved, 3, 2, shards=there, rebalance=True)
            begun = plan(case.episodes, 3, 2, shards=case.shards, rebalance=True)
            assert [(each.uids, each.rows) for each in other.targets] == [(t.uids, t.rows) for t in begun.targets]


@pytest.mark.slow
@chunks
def test_as_many_targets_as_shards_are_the_identity_and_others_are_not(chunk: int) -> None:
    for seed, case in cases(chunk):
        with noted(seed):
            if case.saved != case.targets:
                assert not case.plan().identity
                continue
            if case.rows < case.saved_rows:
                with pytest.raises(ConfigError, match="taken over as they are"):
                    case.plan()
                continue
            planned = case.plan()
            assert planned.identity
            for rank, target in enumerate(planned.targets):
                own = in_age_order(each for each in case.episodes if each.shard == rank)
                assert (target.uids, target.opens, target.again) == (uids(own), (rank,), ())
                assert target.rows == tuple(uids(each for each in own if each.row == row) for row in range(case.rows))


class Tight:
    """A case with a capacity, which may be too small."""

    def __init__(self, case: Case) -> None:
        rng, self.case = case.rng, case
        self.by_steps = bool(rng.random() < 0.7)
        self.pinned = sum(self.taken(each) for each in case.episodes if each.flags & ITEM)
        self.identity = bool(rng.random() < 0.3) and case.targets == case.saved and case.rows >= case.saved_rows
        self.by_uid = {each.uid: each for each in case.episodes}
        self.longest = max(map(self.taken, case.episodes), default=0)
        each = sum(map(self.taken, case.episodes)) // case.targets
        least = self.longest if rng.random() < 0.8 else 1
        self.capacity = max(1, least + int(rng.integers(-1, 1 + each)))
        self.how: dict[str, Any] = {
            "capacity": self.capacity,
            "counted": "steps" if self.by_steps else "episodes",
            "rebalance": not self.identity,
        }

    def taken(self, episode: Episode) -> int:
        """What an episode takes of the capacity."""
        if episode.flags & ITEM:
            return int(bool(episode.flags & PARKED))
        return episode.steps if self.by_steps else 1

    def loads(self, planned: Plan) -> list[int]:
        """What is taken of each target's."""
        return [sum(self.taken(self.by_uid[uid]) for uid in target.uids) for target in planned.targets]

    def check(self, planned: Plan) -> None:
        """Check that the oldest that may go went, and no more than had to."""
        case, gone = self.case, set(planned.evicted)
        may_go = in_age_order(each for each in case.episodes if not each.flags & ITEM)
        assert planned.evicted_steps == sum(self.by_uid[uid].steps for uid in gone)
        loads = self.loads(planned)
        assert max(loads) <= self.capacity
        if self.identity:
            for rank in range(case.saved):
                own = [each for each in may_go if each.shard == rank]
                left = sum(each.uid in gone for each in own)
                assert {each.uid for each in own[:left]} == gone & set(uids(own))
                assert not left or loads[rank] + self.taken(own[left - 1]) > self.capacity  # one less was too few
            return
        assert planned.evicted == uids(may_go[: len(gone)])
        check(planned, case, [each for each in case.episodes if each.uid not in gone])
        exact = self.by_steps and len(may_go) == len(case.episodes)
        fewest = 0 if exact and len(may_go) <= 20 else len(gone) - 1  # else it is asked of one less alone
        for fewer in range(max(0, fewest), len(gone)):
            rest = [each for each in case.episodes if each.uid not in planned.evicted[:fewer]]
            how: dict[str, Any] = {"shards": shards_of(rest, case.saved, rows=case.saved_rows), "rebalance": True}
            assert max(self.loads(plan(rest, case.targets, case.rows, **how))) > self.capacity
        if gone and exact:
            assert sum(loads) > case.targets * (self.capacity - self.longest)


@pytest.mark.slow
@chunks
def test_where_there_is_no_room_the_oldest_that_may_go_do(chunk: int) -> None:
    refused = evicted = 0
    for seed, case in cases(chunk):
        with noted(seed):
            tight = Tight(case)
            free = case.plan(rebalance=not tight.identity)
            fits = max(tight.loads(free)) <= tight.capacity
            planned = plan_or_refusal(case.plan, **tight.how, evict_oldest=True)
            if isinstance(planned, Plan):
                tight.check(planned)
                assert fits == (planned == free)
                evicted += not fits
            else:
                refused += 1
                assert isinstance(planned, ConfigError)
                assert planned.option == "capacity"
                assert tight.longest > tight.capacity or tight.pinned > tight.capacity
            if not fits:
                with pytest.raises(ConfigError, match=f"^capacity={tight.capacity}: "):
                    case.plan(**tight.how)
    assert refused > 10
    assert evicted > 50


def damaged(case: Case) -> tuple[list[Episode], list[Shard]]:
    """A manifest with one number changed, or something left out or there twice."""
    rng, episodes, shards = case.rng, list(case.episodes), list(case.shards)
    odd = [-(2**63), -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1, 2**63, 2**64]
    value = odd[int(rng.integers(len(odd)))]
    what = int(rng.integers(5)) if episodes else 4
    at = int(rng.integers(max(1, len(episodes))))
    if what == 0:
        field = str(rng.choice(["uid", "length", "steps", "shard", "row", "flags", "bytes"]))
        episodes[at] = msgspec.structs.replace(episodes[at], **{field: value})
    elif what == 1:
        field = str(rng.choice(["step", "rank", "sequence"]))
        stamp = msgspec.structs.replace(episodes[at].stamp, **{field: value})
        episodes[at] = msgspec.structs.replace(episodes[at], stamp=stamp)
    elif what == 2:
        del episodes[at]
    elif what == 3:
        episodes.append(episodes[at])
    else:
        which = int(rng.integers(len(shards)))
        field = str(rng.choice(["rank", "steps", "episodes", "rows"]))
        shards[which] = msgspec.structs.replace(shards[which], **{field: value})
    return episodes, shards


@pytest.mark.slow
@chunks
def test_a_changed_manifest_is_refused_or_is_one_that_can_be(chunk: int) -> None:
    refused = 0
    for seed, case in cases(chunk):
        with noted(seed):
            episodes, shards = damaged(case)
            how: dict[str, Any] = {"shards": shards, "rebalance": True, "where": "m.json"}
            planned = plan_or_refusal(plan, episodes, case.targets, case.rows, **how)
            if isinstance(planned, Plan):
                assert sorted(uid for target in planned.targets for uid in target.uids) == sorted(uids(episodes))
                check_by_rule(planned, episodes, case.rows)
            else:
                refused += 1
                assert isinstance(planned, (Damaged, NewerFormat))
                assert str(planned).startswith("m.json: ")
    assert refused > 100
