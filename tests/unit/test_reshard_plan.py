"""What a plan promises (the statements of RESHARD by their numbers), and one plan written out in full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.checkpoint.listed import (
    AGAIN,
    HEADLESS,
    OPEN,
    PARKED,
    PARTIAL,
    WAITING,
    Episode,
    Listing,
    Place,
    Shard,
    Stamp,
)
from pipeline.checkpoint.planned import Plan, Target, relisted
from pipeline.checkpoint.reshard import plan
from tests.support.shards import (
    PAIRS,
    SHAPES,
    check_by_rule,
    check_prefixes,
    episodes_of,
    in_age_order,
    shards_of,
    shared_out,
    uids,
)

ROOT = Path(__file__).parents[2]
every_pair = pytest.mark.parametrize(("saved", "targets"), PAIRS)
every_shape = pytest.mark.parametrize("shape", SHAPES)


def shared(episodes: list[Episode], saved: int, targets: int, **options: Any) -> Plan:
    """The plan that the rule gives, as many targets as shards or not."""
    return plan(episodes, targets, shards=shards_of(episodes, saved), rebalance=True, **options)


# -- one plan in full ----------------------------------------------------------------------------------------------

# uid, step, rank, sequence, length, row: 2 shards of 2 rows of 5 episodes.
GOLDEN = [
    (200, 0, 0, 0, 4, 0),
    (210, 0, 0, 1, 3, 1),
    (211, 3, 0, 2, 5, 1),
    (201, 4, 0, 3, 7, 0),
    (212, 8, 0, 4, 3, 1),
    (202, 11, 0, 5, 9, 0),
    (213, 11, 0, 6, 6, 1),
    (214, 17, 0, 7, 9, 1),
    (203, 20, 0, 8, 9, 0),
    (204, 29, 0, 9, 9, 0),
    (100, 0, 1, 0, 6, 0),
    (110, 0, 1, 1, 4, 1),
    (111, 4, 1, 2, 3, 1),
    (101, 6, 1, 3, 6, 0),
    (112, 7, 1, 4, 6, 1),
    (102, 12, 1, 5, 8, 0),
    (113, 13, 1, 6, 3, 1),
    (114, 16, 1, 7, 9, 1),
    (103, 20, 1, 8, 6, 0),
    (104, 26, 1, 9, 9, 0),
]


def golden() -> list[Episode]:
    return [
        Episode(uid, Stamp(step, rank, sequence), length, length, rank, row, bytes=10 * length)
        for uid, step, rank, sequence, length, row in GOLDEN
    ]


def golden_target(
    rank: int, rows: Sequence[tuple[int, ...]], all_of: tuple[int, ...], opens: Any, steps: int
) -> Target:
    return Target(
        rank=rank, uids=all_of, rows=tuple(rows), again=(), opens=opens, steps=steps, items=0, bytes=10 * steps
    )


def test_the_golden_plan_of_two_shards_for_three_targets() -> None:
    planned = plan(golden(), 3, rows=2, shards=shards_of(golden(), 2))
    assert planned == Plan(
        targets=(
            golden_target(
                0, [(200, 101, 114), (211, 202, 103)], (200, 211, 101, 202, 114, 103), opens=(0, 1), steps=39
            ),
            golden_target(
                1,
                [(210, 111, 102, 104), (110, 112, 214)],
                (210, 110, 111, 112, 102, 214, 104),
                opens=(0, 1),
                steps=42,
            ),
            golden_target(
                2,
                [(100, 212, 113, 203), (201, 213, 204)],
                (100, 201, 212, 213, 113, 203, 204),
                opens=(0, 1),
                steps=43,
            ),
        ),
        identity=False,
    )
    assert planned.digest() == "bd3bf8a40bd3ee4fcfab09aefef62b70"


def test_the_golden_plan_for_one_target() -> None:
    planned = plan(golden(), 1, rows=2, shards=shards_of(golden(), 2))
    rows = [
        (200, 110, 211, 111, 112, 202, 102, 214, 103, 204),
        (210, 100, 201, 101, 212, 213, 113, 114, 203, 104),
    ]
    everything = (200, 210, 100, 110, 211, 201, 111, 101, 112, 212, 202, 213, 102, 113, 114, 214, 203, 103, 104, 204)
    assert planned.targets == (golden_target(0, rows, everything, opens=(0, 1), steps=124),)


def test_the_golden_plan_for_two_targets_is_what_was_saved_or_the_rule() -> None:
    shards = shards_of(golden(), 2)
    assert plan(golden(), 2, rows=2, shards=shards) == Plan(
        targets=(
            golden_target(
                0,
                [(200, 201, 202, 203, 204), (210, 211, 212, 213, 214)],
                (200, 210, 211, 201, 212, 202, 213, 214, 203, 204),
                opens=(0,),
                steps=64,
            ),
            golden_target(
                1,
                [(100, 101, 102, 103, 104), (110, 111, 112, 113, 114)],
                (100, 110, 111, 101, 112, 102, 113, 114, 103, 104),
                opens=(1,),
                steps=60,
            ),
        ),
        identity=True,
    )
    assert plan(golden(), 2, rows=2, shards=shards, rebalance=True) == Plan(
        targets=(
            golden_target(
                0,
                [(200, 211, 202, 214, 204), (110, 111, 112, 102, 103)],
                (200, 110, 211, 111, 112, 202, 102, 214, 103, 204),
                opens=(0, 1),
                steps=63,
            ),
            golden_target(
                1,
                [(210, 201, 212, 113, 114, 104), (100, 101, 213, 203)],
                (210, 100, 201, 101, 212, 213, 113, 114, 203, 104),
                opens=(0, 1),
                steps=61,
            ),
        ),
        identity=False,
    )


def test_the_golden_plan_where_the_oldest_go() -> None:
    planned = plan(golden(), 3, rows=2, shards=shards_of(golden(), 2), capacity=35, evict_oldest=True)
    assert planned.evicted == (200, 210, 100, 110, 211, 201)
    assert planned.evicted_steps == 29
    assert [target.rows for target in planned.targets] == [
        ((111, 102, 103), (212, 114)),
        ((101, 214), (202, 104)),
        ((112, 113, 204), (213, 203)),
    ]


def of_lengths(*lengths: int) -> list[Episode]:
    """One shard of one row, its episodes 0, 1, ... in their order in time."""
    return [Episode(uid, Stamp(uid, 0, uid), length, length, 0) for uid, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5, 3, 1, 1], [(0,), (1, 2, 3)]),  # the least steps, whatever the number of episodes
        ([1, 3, 2, 4], [(0, 2), (1, 3)]),  # as many steps: fewer episodes
        ([3, 1, 2, 4], [(0, 3), (1, 2)]),
        ([2, 2, 1, 1], [(0, 2), (1, 3)]),  # as many steps and episodes: the lower number
    ],
)
def test_ties_go_by_steps_then_episodes_then_number(lengths: list[int], expected: list[tuple[int, ...]]) -> None:
    episodes = of_lengths(*lengths)
    planned = plan(episodes, 2, shards=shards_of(episodes, 1, rows=1))
    assert [target.uids for target in planned.targets] == expected
    in_rows = plan(episodes, 1, rows=2, shards=shards_of(episodes, 1, rows=1), rebalance=True)
    assert list(in_rows.targets[0].rows) == expected


# -- the statements ------------------------------------------------------------------------------------------------


@every_pair
@every_shape
def test_r1_nothing_is_lost(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    for rebalance in (False, True):
        planned = plan(episodes, targets, shards=shards_of(episodes, saved), rebalance=rebalance)
        assert {uid for target in planned.targets for uid in target.uids} == set(uids(episodes))
        assert sum(target.steps for target in planned.targets) == sum(each.steps for each in episodes)
        assert (planned.evicted, planned.evicted_steps) == ((), 0)


@every_pair
@every_shape
def test_r2_nothing_is_doubled(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    for rebalance in (False, True):
        planned = plan(episodes, targets, shards=shards_of(episodes, saved), rebalance=rebalance)
        everywhere = [uid for target in planned.targets for uid in target.uids]
        assert len(everywhere) == len(set(everywhere))
        assert [target.rank for target in planned.targets] == list(range(targets))


@every_pair
@every_shape
def test_r4_an_episode_is_in_one_row_of_one_target(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    for rebalance in (False, True):
        planned = plan(episodes, targets, shards=shards_of(episodes, saved), rebalance=rebalance)
        for target in planned.targets:
            assert sorted(uid for row in target.rows for uid in row) == sorted(target.uids)
            assert len(target.rows) == planned.rows == 2


@every_pair
@every_shape
def test_r5_each_target_and_each_row_is_in_age_order(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    order = {each.uid: at for at, each in enumerate(in_age_order(episodes))}
    for rebalance in (False, True):
        planned = plan(episodes, targets, shards=shards_of(episodes, saved), rebalance=rebalance)
        for target in planned.targets:
            for listed in (target.uids, *target.rows):
                assert list(listed) == sorted(listed, key=order.__getitem__)


def test_r5_age_is_step_then_rank_then_sequence_then_uid() -> None:
    # uid, stamp, shard: where an episode lies has no part in it.
    aged = [
        (95, (1, 9, 9), 1),
        (94, (2, 0, 9), 2),
        (93, (2, 1, 0), 0),
        (3, (2, 1, 1), 2),
        (4, (2, 1, 1), 0),
        (5, (2, 1, 1), 1),
        (0, (10, 0, 0), 0),
    ]
    episodes = [Episode(uid, Stamp(*stamp), 2, 2, shard) for uid, stamp, shard in aged]
    planned = plan(episodes[::-1], 1, shards=shards_of(episodes, 3, rows=1))
    assert planned.targets[0].uids == tuple(uid for uid, *_ in aged)
    assert Stamp(2, 1, 0) < Stamp(2, 1, 1) < Stamp(10, 0, 0)


@every_pair
@every_shape
def test_r6_loads_differ_by_no_more_than_the_longest_episode(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    planned, steps = shared(episodes, saved, targets), {each.uid: each.steps for each in episodes}
    loads = [sum(steps[uid] for uid in target.uids) for target in planned.targets]
    assert loads == [target.steps for target in planned.targets] == [target.load for target in planned.targets]
    assert max(loads) - min(loads) <= max(steps.values())
    for target in planned.targets:
        rows = [sum(steps[uid] for uid in row) for row in target.rows]
        assert max(rows) - min(rows) <= max((steps[uid] for uid in target.uids), default=0)
    check_by_rule(planned, episodes, 2)


def test_r6_ranks_are_planned_before_rows() -> None:
    episodes = of_lengths(9, 9, 1, 1)
    planned = plan(episodes, 2, rows=2, shards=shards_of(episodes, 1, rows=1))
    assert [target.steps for target in planned.targets] == [10, 10]
    assert [target.rows for target in planned.targets] == [((0,), (2,)), ((1,), (3,))]
    # Over all four rows at once the first two would have been one target's: 18 steps to 2.
    at_once = shared_out(episodes, 4)
    assert [sum(each.steps for row in rows for each in row) for rows in (at_once[:2], at_once[2:])] == [18, 2]


def test_r6_an_episode_weighs_what_is_kept_of_it() -> None:
    whole = of_lengths(4, 3, 3, 3)
    headless = [msgspec.structs.replace(whole[0], length=9, flags=HEADLESS), *whole[1:]]
    for episodes in (whole, headless):
        for planned in (
            plan(episodes, 2, rows=1, shards=shards_of(episodes, 1)),
            plan(episodes, 2, rows=1, shards=shards_of(episodes, 1), capacity=7),
        ):
            assert [target.uids for target in planned.targets] == [(0, 3), (1, 2)]
        in_rows = plan(episodes, 1, rows=2, shards=shards_of(episodes, 1), rebalance=True)
        assert in_rows.targets[0].rows == ((0, 3), (1, 2))


@every_pair
@every_shape
def test_r7_the_bound_holds_for_every_prefix(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    planned, by_uid = shared(episodes, saved, targets), {each.uid: each for each in episodes}
    check_prefixes(episodes, [target.uids for target in planned.targets])
    for target in planned.targets:
        check_prefixes([by_uid[uid] for uid in target.uids], target.rows)


def test_r7_a_contiguous_split_would_be_seen() -> None:
    episodes = of_lengths(*[4] * 8)
    check_prefixes(episodes, [(0, 2, 4, 6), (1, 3, 5, 7)])
    with pytest.raises(AssertionError):
        check_prefixes(episodes, [(0, 1, 2, 3), (4, 5, 6, 7)])


def test_r9_ids_follow_from_where_an_episode_lies_and_the_origin_stays() -> None:
    episodes = golden()
    planned = plan(episodes, 3, shards=shards_of(episodes, 2))
    assert planned.place(2, 1) == Place(rank=2, row=1, env=5)
    assert planned.places()[204] == Place(2, 1, 5)
    assert planned.places().keys() == set(uids(episodes))
    moved = {each.uid: each for each in relisted(planned, episodes, shards_of(episodes, 2))}
    assert (moved[204].shard, moved[204].row, moved[204].origin) == (2, 1, Place(0, 0, 0))
    assert (moved[114].shard, moved[114].row, moved[114].origin) == (0, 0, Place(1, 1, 3))
    # On again: the origin is where it was made, and not where it was loaded last.
    again = list(moved.values())
    further = {each.uid: each for each in relisted(shared(again, 3, 7), again, shards_of(again, 3))}
    assert {uid: each.origin for uid, each in further.items()} == {uid: each.origin for uid, each in moved.items()}
    assert {uid: each.stamp for uid, each in further.items()} == {each.uid: each.stamp for each in episodes}
    envs = {place.env for place in planned.places().values()}
    assert envs == set(range(6))
    # Onto more rows than there were: where it was made is told in the numbers of then.
    wider = plan(episodes, 3, rows=4, shards=shards_of(episodes, 2))
    assert {each.uid: each.origin for each in relisted(wider, episodes, shards_of(episodes, 2))}[114] == Place(1, 1, 3)
    assert max(place.env for place in wider.places().values()) == 11


@every_pair
@every_shape
def test_r10_the_same_manifest_gives_the_same_plan(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    planned = shared(episodes, saved, targets)
    assert shared(list(episodes), saved, targets) == planned
    assert shared(list(episodes), saved, targets).digest() == planned.digest()


CHILD = """
import sys, msgspec
from pipeline.checkpoint.listed import Episode, Shard
from pipeline.checkpoint.reshard import plan
episodes, shards = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=tuple[list[Episode], list[Shard]])
for targets in (3, 4, 7):
    planned = plan(episodes, targets, shards=shards)
    print(targets, planned.digest(), sum(uid * (at + 1) for t in planned.targets for at, uid in enumerate(t.uids)))
"""


def test_r10_processes_of_any_hash_seed_locale_and_time_zone_agree(tmp_path: Path) -> None:
    episodes = episodes_of(4, "heavy-tailed")
    file = tmp_path / "listed.json"
    file.write_bytes(msgspec.json.encode((episodes, shards_of(episodes, 4, name="Größe_{}"))))
    surroundings = [
        {"PYTHONHASHSEED": "0", "LC_ALL": "C", "TZ": "UTC"},
        {"PYTHONHASHSEED": "4294967295", "LC_ALL": "C.UTF-8", "TZ": "Asia/Kathmandu"},
        {"PYTHONHASHSEED": "random", "LC_ALL": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"},
    ]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **each},
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in surroundings
    ]
    said = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    expected = []
    for targets in (3, 4, 7):
        planned = plan(episodes, targets, shards=shards_of(episodes, 4))
        weighed = sum(uid * (at + 1) for target in planned.targets for at, uid in enumerate(target.uids))
        expected.append(f"{targets} {planned.digest()} {weighed}")
    assert said == [expected] * len(children)


class ShardFile(msgspec.Struct):
    """A shard's part of a manifest."""

    shard: Shard
    episodes: list[Episode]


def test_r11_the_order_of_a_folder_and_its_times_and_names_do_not_count(tmp_path: Path) -> None:
    episodes = episodes_of(11, "ragged")
    shards = shards_of(episodes, 11)
    planned = plan(episodes, 5, shards=shards)
    assert all(list(target.opens) == sorted(target.opens) and 10 in target.opens for target in planned.targets)
    for number, order in enumerate(([*range(11)], [*range(10, -1, -1)], [3, 10, 2, 7, 1, 0, 9, 5, 8, 6, 4])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for age, rank in enumerate(order):
            path = folder / shards[rank].name
            own = [each for each in episodes if each.shard == rank]
            path.write_bytes(msgspec.json.encode(ShardFile(shards[rank], own)))
            os.utime(path, (1e9 + age, 1e9 - age))
        by_text = sorted(os.listdir(folder))
        assert by_text.index("rank_10") < by_text.index("rank_2")
        for names in (by_text, by_text[::-1], os.listdir(folder), [shards[rank].name for rank in order]):
            files = [msgspec.json.decode((folder / name).read_bytes(), type=ShardFile) for name in names]
            found = plan([each for file in files for each in file.episodes], 5, shards=[file.shard for file in files])
            assert found == planned
            assert found.digest() == planned.digest()
            kept = plan([each for file in files for each in file.episodes], 11, shards=[file.shard for file in files])
            assert [target.opens for target in kept.targets] == [(rank,) for rank in range(11)]
            assert set(kept.targets[10].uids) == {each.uid for each in episodes if each.shard == 10}


def test_r12_a_digest_tells_any_difference() -> None:
    planned = plan(golden(), 3, shards=shards_of(golden(), 2))
    first, second, third = planned.targets
    replace = msgspec.structs.replace
    swapped_rows = replace(first, rows=first.rows[::-1])
    moved_row = replace(first, rows=((200, 101, 114, 211), (202, 103)))
    others = [
        replace(planned, identity=True),
        replace(planned, evicted=(1,)),
        replace(planned, evicted_steps=1),
        replace(planned, targets=(second, first, third)),
        replace(planned, targets=(first, second)),
        replace(planned, targets=(swapped_rows, second, third)),
        replace(planned, targets=(moved_row, second, third)),
        replace(planned, targets=(replace(first, uids=first.uids[::-1]), second, third)),
        replace(planned, targets=(replace(first, again=(200,)), second, third)),
        replace(planned, targets=(replace(first, opens=(0,)), second, third)),
        replace(planned, targets=(replace(first, opens=(), again=(0, 1)), second, third)),
        replace(planned, targets=(replace(first, steps=1), second, third)),
        replace(planned, targets=(replace(first, items=1), second, third)),
        replace(planned, targets=(replace(first, bytes=1), second, third)),
        replace(planned, targets=(replace(first, rank=1), second, third)),
    ]
    digests = [each.digest() for each in [planned, *others]]
    assert len(set(digests)) == len(digests)
    assert all(len(each) == 32 and set(each) <= set("0123456789abcdef") for each in digests)
    assert plan(golden()[::-1], 3, shards=shards_of(golden(), 2)[::-1]).digest() == digests[0]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@every_shape
def test_r13_as_many_targets_as_shards_are_the_identity(count: int, shape: str) -> None:
    episodes = episodes_of(count, shape)
    planned = plan(episodes, count, shards=shards_of(episodes, count))
    assert planned.identity
    for rank, target in enumerate(planned.targets):
        own = in_age_order([each for each in episodes if each.shard == rank])
        assert target.uids == uids(own)
        assert target.opens == (rank,)
        assert target.rows == tuple(uids(each for each in own if each.row == row) for row in range(2))
        assert target.bytes == sum(each.bytes for each in own)
    rebalanced = plan(episodes, count, shards=shards_of(episodes, count), rebalance=True)
    assert not rebalanced.identity
    check_by_rule(rebalanced, episodes, 2)
    if count > 1:
        assert [target.uids for target in rebalanced.targets] != [target.uids for target in planned.targets]


def test_r13_an_identity_opens_a_shard_that_has_no_episode() -> None:
    episodes = of_lengths(3, 4)
    planned = plan(episodes, 2, rows=3, shards=shards_of(episodes, 2, rows=1))
    assert planned.identity
    assert [target.opens for target in planned.targets] == [(0,), (1,)]
    assert [target.rows for target in planned.targets] == [((0, 1), (), ()), ((), (), ())]


@every_shape
@pytest.mark.parametrize("chain", [(4, 3, 4), (1, 8, 5, 1, 7), (8, 2, 8), (3, 4, 3)])
def test_r14_a_plan_has_no_history(chain: tuple[int, ...], shape: str) -> None:
    begun = episodes_of(chain[0], shape)
    episodes, planned = begun, None
    for saved, targets in pairwise(chain):
        planned = shared(episodes, saved, targets)
        episodes = relisted(planned, episodes, shards_of(episodes, saved))
    assert planned is not None
    at_once = shared(begun, chain[0], chain[-1])
    assert [(each.uids, each.rows) for each in planned.targets] == [(each.uids, each.rows) for each in at_once.targets]
    assert episodes == relisted(at_once, begun, shards_of(begun, chain[0]))


@every_pair
@every_shape
def test_r15_a_target_opens_the_shards_of_its_episodes_and_no_others(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape, of_row=3)
    shard_of = {each.uid: each.shard for each in episodes}
    for rebalance in (False, True):
        planned = plan(episodes, targets, shards=shards_of(episodes, saved), rebalance=rebalance)
        for target in planned.targets:
            assert target.opens == tuple(sorted({shard_of[uid] for uid in target.uids}))
        assert sum(target.bytes for target in planned.targets) == sum(each.bytes for each in episodes)


def test_r15_a_target_without_episodes_opens_nothing_and_one_of_few_opens_few() -> None:
    episodes = [Episode(uid, Stamp(uid, 0, uid), 5, 5, shard) for uid, shard in enumerate([0, 1, 0, 2])]
    planned = plan(episodes, 5, shards=shards_of(episodes, 4, rows=1))
    assert [target.opens for target in planned.targets] == [(0,), (1,), (0,), (2,), ()]


# -- R16: room -----------------------------------------------------------------------------------------------------


def test_r16_too_much_is_an_error_with_numbers() -> None:
    episodes = of_lengths(9, 9, 9, 8)
    with pytest.raises(ValueError, match="capacity") as caught:
        plan(episodes, 2, capacity=16, shards=shards_of(episodes, 1))
    assert str(caught.value) == (
        "capacity=16: the shards hold 35 steps in 4 episodes, and 2 targets hold 32: 3 too many. Load with more room, "
        "on more ranks, or with evict_oldest=True"
    )
    assert getattr(caught.value, "option", None) == "capacity"


def test_r16_what_fits_together_and_not_apart_is_an_error_with_numbers() -> None:
    episodes = of_lengths(7, 7, 6)
    with pytest.raises(ValueError, match="capacity") as caught:
        plan(episodes, 2, capacity=10, shards=shards_of(episodes, 1))
    assert str(caught.value) == (
        "capacity=10: the shards hold 20 steps in 3 episodes, and 2 targets hold 20; but one would get 13, 3 too many, "
        "as no episode is split. Load with more room, on more ranks, or with evict_oldest=True"
    )
    planned = plan(episodes, 2, capacity=10, shards=shards_of(episodes, 1), evict_oldest=True)
    assert (planned.evicted, planned.evicted_steps) == ((0,), 7)
    assert [target.uids for target in planned.targets] == [(1,), (2,)]


def test_r16_an_episode_longer_than_a_target_is_an_error_whatever_may_go() -> None:
    episodes = of_lengths(3, 12, 2)
    for evict in (False, True):
        for targets in (1, 4):
            with pytest.raises(ValueError, match="capacity") as caught:
                plan(episodes, targets, capacity=10, shards=shards_of(episodes, 1), evict_oldest=evict)
            assert str(caught.value) == (
                "capacity=10: episode 1 of shard 0 has 12 steps, more than a target holds, and no episode is split. "
                "Load with a capacity of at least 12"
            )


def test_r16_what_fits_exactly_fits() -> None:
    episodes = of_lengths(5, 5, 5, 5)
    planned = plan(episodes, 2, capacity=10, shards=shards_of(episodes, 1), evict_oldest=True)
    assert planned == plan(episodes, 2, shards=shards_of(episodes, 1))
    planned = plan(episodes, 2, capacity=2, counted="episodes", shards=shards_of(episodes, 1))
    assert planned.evicted == ()


@every_pair
@every_shape
def test_r16_the_globally_oldest_go_and_are_counted(saved: int, targets: int, shape: str) -> None:
    episodes = episodes_of(saved, shape)
    longest, total = max(each.steps for each in episodes), sum(each.steps for each in episodes)
    capacity = max(longest, total * 2 // (3 * targets))
    planned = shared(episodes, saved, targets, capacity=capacity, evict_oldest=True)
    aged = in_age_order(episodes)
    gone = len(planned.evicted)
    assert planned.evicted == uids(aged[:gone])
    assert planned.evicted_steps == sum(each.steps for each in aged[:gone])
    assert max(target.steps for target in planned.targets) <= capacity
    check_by_rule(planned, episodes, 2)
    # As few as will do; how many that are at most follows from R6.
    if gone:
        assert total - planned.evicted_steps > targets * (capacity - longest)
        fewer = aged[gone - 1 :]
        with pytest.raises(ValueError, match="too many"):
            plan(fewer, targets, shards=shards_of(fewer, saved), rebalance=True, capacity=capacity)
    # The plan of what is left is that of a manifest which never had the rest.
    rest = aged[gone:]
    assert planned.targets == plan(rest, targets, shards=shards_of(rest, saved), rebalance=True).targets


def test_r16_in_an_identity_the_oldest_of_the_full_shard_go() -> None:
    episodes = [Episode(uid, Stamp(uid, 0, uid), 4, 4, shard) for uid, shard in enumerate([0, 0, 1, 1, 1, 0])]
    episodes += [Episode(9, Stamp(9, 0, 9), 4, 4, 1)]
    with pytest.raises(ValueError, match="capacity") as caught:
        plan(episodes, 2, capacity=14, shards=shards_of(episodes, 2, rows=1))
    assert str(caught.value) == (
        "capacity=14: shard 1 holds 16 steps, 2 too many. Load with more room, on more ranks, with rebalance=True if "
        "other ranks have room, or with evict_oldest=True"
    )
    planned = plan(episodes, 2, capacity=14, shards=shards_of(episodes, 2, rows=1), evict_oldest=True)
    assert planned.identity
    assert (planned.evicted, planned.evicted_steps) == ((2,), 4)
    assert [target.uids for target in planned.targets] == [(0, 1, 5), (3, 4, 9)]
    assert plan(episodes, 2, capacity=16, shards=shards_of(episodes, 2, rows=1), rebalance=True).evicted == ()


def test_r16_capacity_can_count_episodes() -> None:
    episodes = of_lengths(8, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="capacity") as caught:
        plan(episodes, 2, capacity=3, counted="episodes", shards=shards_of(episodes, 1))
    assert str(caught.value).startswith(
        "capacity=3: the shards hold 6 episodes in 6 episodes, and 2 targets hold 6; but one would get 5, 2 too many"
    )
    planned = plan(episodes, 2, capacity=3, counted="episodes", evict_oldest=True, shards=shards_of(episodes, 1))
    assert planned.evicted == (0,)
    assert [target.uids for target in planned.targets] == [(1, 3, 5), (2, 4)]


def item(uid: int, flags: int, shard: int = 0) -> Episode:
    return Episode(uid, Stamp(uid, 0, uid), 1, 1, shard, flags=flags)


def test_r16_what_is_not_in_the_buffer_takes_no_room_and_is_never_evicted() -> None:
    episodes = [item(0, WAITING), item(1, PARKED), item(2, WAITING | PARTIAL), *of_lengths(0, 0, 0, 5, 5, 5)[3:]]
    planned = plan(episodes, 2, capacity=11, shards=shards_of(episodes, 1, rows=1))
    assert [target.uids for target in planned.targets] == [(0, 2, 4), (1, 3, 5)]
    assert plan(episodes, 1, rows=1, capacity=16, shards=shards_of(episodes, 1, rows=1)).evicted == ()
    assert plan(episodes, 1, capacity=16, shards=shards_of(episodes, 1, rows=1), rebalance=True).evicted == ()
    planned = plan(episodes, 1, capacity=10, shards=shards_of(episodes, 1, rows=1), evict_oldest=True, rebalance=True)
    assert planned.evicted == (3, 4)
    assert planned.targets[0].uids == (0, 1, 2, 5)
    for rebalance in (False, True):
        with pytest.raises(ValueError, match="capacity") as caught:
            plan(
                [item(uid, PARKED) for uid in range(3)],
                1,
                capacity=2,
                counted="episodes",
                evict_oldest=True,
                rebalance=rebalance,
                shards=shards_of([item(uid, PARKED) for uid in range(3)], 1),
            )
        assert str(caught.value) == (
            "capacity=2: 3 items are parked, which are never evicted, and they are too many. Load with more room, or "
            "on more ranks"
        )


# -- R17, R19, F10 -------------------------------------------------------------------------------------------------


def test_r17_fewer_episodes_than_targets_load_and_all_ranks_know_who_has_none() -> None:
    episodes = of_lengths(3, 2)
    planned = plan(episodes, 4, rows=2, shards=shards_of(episodes, 1, rows=1))
    assert [target.uids for target in planned.targets] == [(0,), (1,), (), ()]
    assert [target.masked for target in planned.targets] == [(1,), (1,), (0, 1), (0, 1)]
    assert not planned.ready()
    assert planned.why_not_ready() == (
        "2 of 4 targets have fewer than 1 steps: 2 (0), 3 (0); 2 episodes were shared out. All ranks wait until each "
        "has enough: add rows, ask for less, or load on fewer ranks"
    )
    planned = plan(episodes, 2, rows=1, shards=shards_of(episodes, 1, rows=1))
    assert planned.ready()
    assert planned.why_not_ready() == ""
    assert planned.ready(2)
    assert not planned.ready(3)
    assert planned.why_not_ready(3).startswith("1 of 2 targets have fewer than 3 steps: 1 (2); 2 episodes")


def test_r17_a_long_list_is_cut_and_nothing_at_all_loads() -> None:
    planned = plan([], 12, shards=[Shard(0), Shard(1)])
    assert [target.uids for target in planned.targets] == [()] * 12
    assert "12 of 12 targets have fewer than 1 steps: 0 (0), 1 (0)" in planned.why_not_ready()
    assert "7 (0), ...; 0 episodes" in planned.why_not_ready()
    assert plan([], 2, shards=[Shard(0), Shard(1)], capacity=1).identity


def test_r17_items_are_nothing_to_sample_from() -> None:
    episodes = [item(0, WAITING), item(1, PARKED)]
    planned = plan(episodes, 2, shards=shards_of(episodes, 1, rows=1))
    assert [(target.steps, target.items, target.load) for target in planned.targets] == [(0, 1, 1), (0, 1, 1)]
    assert not planned.ready()
    assert "0 episodes were shared out" in planned.why_not_ready()


def test_r19_items_are_planned_as_episodes_of_one_step() -> None:
    flags = [0, WAITING, PARKED, WAITING | PARTIAL, 0, OPEN, HEADLESS]
    lengths = [3, 1, 1, 1, 2, 1, 2]
    items = [
        Episode(uid, Stamp(uid, 0, uid), length, length, 0, flags=flag)
        for uid, (length, flag) in enumerate(zip(lengths, flags, strict=True))
    ]
    planned = plan(items, 2, shards=shards_of(items, 1))
    assert [target.uids for target in planned.targets] == [(0, 4), (1, 2, 3, 5, 6)]
    assert [(target.steps, target.items) for target in planned.targets] == [(5, 0), (3, 3)]
    plain = of_lengths(*lengths)
    assert [target.uids for target in plan(plain, 2, shards=shards_of(plain, 1)).targets] == [
        target.uids for target in planned.targets
    ]


def test_what_was_to_be_handed_out_again_goes_first_unless_its_batches_survive() -> None:
    flags = [0, AGAIN, AGAIN, 0, AGAIN]
    episodes = [Episode(uid, Stamp(uid, 0, uid), 2, 2, 0, flags=flag) for uid, flag in enumerate(flags)]
    planned = plan(episodes, 2, shards=shards_of(episodes, 1))
    assert [target.uids for target in planned.targets] == [(0, 2, 4), (1, 3)]
    assert [target.again for target in planned.targets] == [(2, 4), (1,)]
    assert plan(episodes, 1, shards=shards_of(episodes, 1)).targets[0].again == ()
    assert plan(episodes, 1, shards=shards_of(episodes, 1), rebalance=True).targets[0].again == (1, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": 0}, "targets=0: a whole number from 1 to 1048575 is needed"),
        ({"targets": -1}, "targets=-1: a whole number from 1 to 1048575 is needed"),
        ({"targets": True}, "targets=True: a whole number from 1 to 1048575 is needed"),
        ({"targets": 2.0}, "targets=2.0: a whole number from 1 to 1048575 is needed"),
        ({"targets": 1 << 20}, "targets=1048576: a whole number from 1 to 1048575 is needed"),
        ({"targets": 2, "rows": 0}, "rows=0: a whole number from 1 to 1048575 is needed"),
        ({"targets": 2, "rows": "2"}, "rows='2': a whole number from 1 to 1048575 is needed"),
        ({"targets": 2, "capacity": 0}, "capacity=0: a whole number from 1 on is needed, or None"),
        ({"targets": 2, "capacity": 1e6}, "capacity=1000000.0: a whole number from 1 on is needed, or None"),
        ({"targets": 2, "counted": "rows"}, "counted='rows': 'steps', 'episodes' are allowed"),
        (
            {"targets": 2, "rows": 1},
            "rows=1: the manifest lists shards of 2, which are taken over as they are; or give rebalance=True",
        ),
    ],
)
def test_f10_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="=") as caught:
        plan(golden(), **arguments, shards=shards_of(golden(), 2))
    assert str(caught.value) == message
    assert getattr(caught.value, "option", None) == message.partition("=")[0]


@pytest.mark.parametrize("rank", [3, -1, True, None])
def test_f10_a_rank_that_the_plan_is_not_for_is_refused(rank: Any) -> None:
    planned = plan(golden(), 3, shards=shards_of(golden(), 2))
    assert planned.target(2) is planned.targets[2]
    for ask in (planned.target, lambda rank: planned.place(rank, 0)):
        with pytest.raises(ValueError, match="rank=") as caught:
            ask(rank)
        assert str(caught.value) == f"rank={rank!r}: the plan is for 3 targets: 0 to 2 are allowed"
    with pytest.raises(ValueError, match="row=2: each target has 2 rows: 0 to 1 are allowed"):
        planned.place(0, 2)


# -- manifests that do not fit together ----------------------------------------------------------------------------

HELP = ". Restore the file from a copy, or resume() an older generation."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uid": -1}, "episode -1 of shard 0 has a uid below 0"),
        ({"stamp": Stamp(-1, 0, 0)}, "episode 201 of shard 0 has the stamp [-1, 0, 0]"),
        ({"stamp": Stamp(1, 0, -2)}, "episode 201 of shard 0 has the stamp [1, 0, -2]"),
        ({"shard": 2}, "episode 201 of shard 2 lies in none: shards 0 to 1 are listed"),
        ({"shard": -1}, "episode 201 of shard -1 lies in none: shards 0 to 1 are listed"),
        ({"row": 2}, "episode 201 of shard 0 lies in row 2; the shard has 2"),
        ({"row": -1}, "episode 201 of shard 0 lies in row -1; the shard has 2"),
        ({"steps": 0}, "episode 201 of shard 0 has 0 steps of 7"),
        ({"steps": 8}, "episode 201 of shard 0 has 8 steps of 7"),
        ({"flags": WAITING}, "episode 201 of shard 0 is an item, and has 7 steps and not 1"),
        ({"bytes": -1}, "episode 201 of shard 0 has -1 bytes"),
        ({"uid": 104}, "episode 104 is listed twice, in shard 0 and in shard 1"),
        ({"uid": 2**64}, "an episode has a number of more than 64 bits"),
        (
            {"steps": 6},
            "shard 0 'rank_0' is said to have 10 episodes with 64 steps, and 10 with 63 are listed",
        ),
        (
            {"shard": 1},
            "shard 0 'rank_0' is said to have 10 episodes with 64 steps, and 9 with 57 are listed",
        ),
        ({"steps": 2**62, "length": 2**62}, "the episodes have more steps than there can be"),
    ],
)
def test_an_episode_that_cannot_be_is_damage(changes: dict[str, Any], message: str) -> None:
    episodes = golden()
    shards = shards_of(episodes, 2)
    episodes[3] = msgspec.structs.replace(episodes[3], **changes)
    if "length" in changes:
        episodes[4] = msgspec.structs.replace(episodes[4], **changes)
    with pytest.raises(OSError, match="is") as caught:
        plan(episodes, 3, shards=shards, where="runs/a/generations/00000007/manifest.json")
    assert type(caught.value).__name__ == "Damaged"
    assert str(caught.value) == f"runs/a/generations/00000007/manifest.json: {message}{HELP}"


def test_flags_of_a_newer_version_are_refused() -> None:
    episodes = golden()
    episodes[0] = msgspec.structs.replace(episodes[0], flags=0x41)
    with pytest.raises(OSError, match="flags") as caught:
        plan(episodes, 3, shards=shards_of(episodes, 2))
    assert type(caught.value).__name__ == "NewerFormat"
    assert str(caught.value) == (
        "the manifest: episode 200 has flags 0x41; this version knows 0x3f. Install a newer forebay."
    )


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "lists the shards none; each from 0 on is needed, once"),
        ([0, 2], "lists the shards 0, 2; each from 0 on is needed, once"),
        ([0, 1, 1], "lists the shards 0, 1, 1; each from 0 on is needed, once"),
        ([1, 2], "lists the shards 1, 2; each from 0 on is needed, once"),
    ],
)
def test_a_shard_that_is_not_listed_or_twice_is_damage(shards: list[int], message: str) -> None:
    with pytest.raises(OSError, match="shards") as caught:
        plan([], 2, shards=[Shard(rank) for rank in shards])
    assert str(caught.value) == f"the manifest: {message}{HELP}"


@pytest.mark.parametrize("rows", [0, -1, 1 << 20])
def test_a_shard_with_impossible_rows_is_damage(rows: int) -> None:
    with pytest.raises(OSError, match=f"shard 1 'b' is said to have {rows} rows"):
        plan([], 2, shards=[Shard(0), Shard(1, "b", rows=rows)])


def test_each_shard_has_the_rows_that_it_is_said_to_have_in_whatever_order_they_are_listed() -> None:
    names = [
        "rank_0",
        "rank_1",
        "rank_2",
        "rank_3",
        "rank_4",
        "rank_5",
        "rank_6",
        "rank_7",
        "rank_8",
        "rank_9",
        "rank_10",
    ]
    episode = Episode(1, Stamp(0, 2, 0), 5, 5, 2, row=6)
    shards = [Shard(rank, name, rows=7 if rank == 2 else 1) for rank, name in enumerate(names)]
    shards[2] = msgspec.structs.replace(shards[2], steps=5, episodes=1)
    for order in (shards, shards[::-1], sorted(shards, key=lambda shard: shard.name)):
        planned = plan([episode], 11, shards=order)
        assert planned.targets[2].rows == ((), (), (), (), (), (), (1,))
        moved = msgspec.structs.replace(episode, row=7)
        with pytest.raises(OSError, match="lies in row 7; the shard has 7"):
            plan([moved], 11, shards=order)


# -- the listing by column -----------------------------------------------------------------------------------------


def test_episodes_can_be_given_by_column() -> None:
    episodes = episodes_of(4, "ragged")
    columns = Listing.of(episodes, "here")
    assert columns.number == len(episodes)
    assert columns.uid.tolist() == list(uids(episodes))
    assert Listing.of(columns, "here") is columns
    assert plan(columns, 3, shards=shards_of(episodes, 4)) == plan(episodes, 3, shards=shards_of(episodes, 4))
    for wrong in (
        columns._replace(row=columns.row[1:]),
        columns._replace(steps=columns.steps.astype(np.int32)),
        columns._replace(steps=columns.steps.astype(np.float64)),
        Listing(*(each.reshape(-1, 2) for each in columns)),
    ):
        with pytest.raises(OSError, match="the columns of the episodes are not int64 of one length"):
            plan(wrong, 3, shards=shards_of(episodes, 4))


def test_planning_changes_nothing_that_was_given() -> None:
    episodes = episodes_of(4, "ragged")[::-1]
    columns = Listing.of(episodes, "here")
    before = [each.copy() for each in columns]
    shards = shards_of(episodes, 4)[::-1]
    for targets in (3, 4):
        plan(columns, targets, shards=shards)
        plan(columns, targets, shards=shards, rebalance=True, capacity=400, evict_oldest=True)
    assert all((old == new).all() for old, new in zip(before, columns, strict=True))
    assert [shard.rank for shard in shards] == [3, 2, 1, 0]


def test_an_episode_is_listed_in_few_bytes_and_comes_back() -> None:
    episode = Episode(2**62, Stamp(3, 1, 4), 9, 7, 1, 1, OPEN | HEADLESS, 700, Place(0, 1, 1))
    raw = msgspec.msgpack.encode(episode)
    assert msgspec.msgpack.decode(raw, type=Episode) == episode
    assert len(raw) < 30
    # One of before a field was added.
    assert msgspec.json.decode(b"[5, [1, 0, 2], 3, 3, 1]", type=Episode) == Episode(5, Stamp(1, 0, 2), 3, 3, 1)
