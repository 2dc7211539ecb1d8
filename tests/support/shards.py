"""Manifests of several shards for tests, and the rule of the plan as plainly as it can be written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.checkpoint.listed import Episode, Shard, Stamp
from pipeline.checkpoint.planned import Plan

PAIRS = [(1, 2), (2, 1), (4, 3), (3, 4), (8, 8), (8, 1), (1, 8), (5, 7)]
SHAPES = ["equal", "ragged", "heavy-tailed"]


def lengths(shape: str, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths of episodes: all the same; anything up to 40; most of them short and a few very long."""
    if shape == "equal":
        return [7] * count
    if shape == "ragged":
        return [int(each) for each in rng.integers(1, 41, count)]
    return [int(min(5000, 1 + each)) for each in rng.pareto(0.8, count) * 3]


def episodes_of(count: int, shape: str, *, rows: int = 2, of_row: int = 12, seed: int = 0) -> list[Episode]:
    """Episodes of ``count`` shards, in the order in which the shards would list them. Ranks are not equally fast."""
    rng = np.random.default_rng([seed, count, SHAPES.index(shape)])
    listed = []
    for shard in range(count):
        begun = []
        for row in range(rows):
            step = 0
            for length in lengths(shape, of_row, rng):
                begun.append((step, row, length))
                step += length * int(rng.integers(1, 4))
        for sequence, (step, row, length) in enumerate(sorted(begun)):
            uid = (int(rng.integers(1, 1000)) << 32) + (shard << 16) + sequence
            listed.append(Episode(uid, Stamp(step, shard, sequence), length, length, shard, row, bytes=100 * length))
    return listed


def shards_of(episodes: Iterable[Episode], count: int, *, rows: int = 2, name: str = "rank_{}") -> list[Shard]:
    """What the manifest would list of the shards of some episodes."""
    steps, number, size = [0] * count, [0] * count, [0] * count
    for each in episodes:
        steps[each.shard] += each.steps
        number[each.shard] += 1
        size[each.shard] += each.bytes
    return [
        Shard(rank, name.format(rank), size[rank], "", steps[rank], number[rank], rows=rows) for rank in range(count)
    ]


def in_age_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Oldest first."""
    return sorted(episodes, key=lambda each: (each.stamp.step, each.stamp.rank, each.stamp.sequence, each.uid))


def shared_out(episodes: Sequence[Episode], targets: int) -> list[list[Episode]]:
    """The rule of RESHARD: oldest first, each to the least loaded; ties by steps, episodes, number."""
    held: list[list[Episode]] = [[] for _ in range(targets)]
    for episode in in_age_order(episodes):
        least = min(range(targets), key=lambda t: (sum(each.steps for each in held[t]), len(held[t]), t))
        held[least].append(episode)
    return held


def uids(episodes: Iterable[Episode]) -> tuple[int, ...]:
    """Their uids."""
    return tuple(each.uid for each in episodes)


def check_by_rule(planned: Plan, episodes: Sequence[Episode], rows: int) -> None:
    """Compare a plan that shares out with the rule."""
    gone = set(planned.evicted)
    kept = [each for each in episodes if each.uid not in gone]
    expected = shared_out(kept, len(planned.targets))
    assert [target.uids for target in planned.targets] == [uids(each) for each in expected]
    for target, held in zip(planned.targets, expected, strict=True):
        assert target.rows == tuple(uids(each) for each in shared_out(held, rows))


def check_prefixes(kept: Sequence[Episode], parts: Sequence[Sequence[int]]) -> None:
    """Check for every prefix of the age order that the loads of the parts, given as uids, differ by no more than the
    longest episode so far (R6 and R7)."""
    part_of = {uid: number for number, part in enumerate(parts) for uid in part}
    loads, longest = [0] * len(parts), 0
    for episode in in_age_order(kept):
        loads[part_of[episode.uid]] += episode.steps
        longest = max(longest, episode.steps)
        assert max(loads) - min(loads) <= longest, (episode, loads)
