"""A replay buffer against a plain list of rows: contents, what follows what, slices, returns, frames, in any mixture of
environments and verbs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Prioritized, ReplayBuffer, Slices, Starved
from pipeline.buffer.transitions.layout import END, EPISODE, PLACE, VERSION
from tests.properties.conftest import SOAK
from tests.support.replay_model import Model, columns

FLAGS = st.sampled_from(["", "", "", "", "terminated", "truncated", "both"])
ENVS = st.integers(0, 2)
ROWS = st.lists(st.tuples(ENVS, FLAGS, st.booleans()), max_size=10)
VERBS = st.one_of(
    st.tuples(st.just("append"), ROWS),
    st.tuples(st.just("one"), ENVS, ROWS),
    st.tuples(st.just("wide"), st.integers(1, 3), ROWS),
    st.tuples(st.just("mixed"), ROWS),
    st.tuples(st.just("ends"), ROWS),
    st.tuples(st.just("cut"), st.one_of(st.none(), ENVS)),
    st.tuples(st.just("clear")),
)


class Both:
    """The buffer and the model of it, which are told the same."""

    def __init__(self, capacity: int, **options: Any) -> None:
        self.buffer = ReplayBuffer(capacity, select="fifo", returns="numpy", **options)
        self.model = Model(capacity)

    def do(self, verb: str, *arguments: Any) -> None:
        getattr(self, f"do_{verb}")(*arguments)

    def do_append(self, rows: list[tuple[int, str, bool]]) -> None:
        for env, flag, _ in rows:
            terminated, truncated = flag in ("terminated", "both"), flag in ("truncated", "both")
            key = len(self.model.rows)
            row = {name: each[0] for name, each in columns(key, [terminated], [truncated]).items()}
            assert self.buffer.append(row, env=env, version=key) == key
            self.model.add(env, terminated, truncated)

    def do_one(self, env: int, rows: list[tuple[int, str, bool]]) -> None:
        self._extend([(env, flag, end) for _, flag, end in rows], env=env)

    def do_wide(self, width: int, rows: list[tuple[int, str, bool]]) -> None:
        rows = rows[: len(rows) // width * width]
        self._extend([(at % width, flag, end) for at, (_, flag, end) in enumerate(rows)], envs=width)

    def do_mixed(self, rows: list[tuple[int, str, bool]]) -> None:
        self._extend(rows, env=np.array([env for env, _, _ in rows], np.int64))

    def do_ends(self, rows: list[tuple[int, str, bool]]) -> None:
        ends = [end or flag in ("terminated", "both") for _, flag, end in rows]
        self._extend(rows, ends, env=np.array([env for env, _, _ in rows], np.int64), ends=np.array(ends, bool))

    def do_cut(self, env: int | None) -> None:
        assert self.buffer.end_episode(env) == self.model.cut(env)

    def do_clear(self) -> None:
        self.buffer.clear()
        self.model.clear()

    def _extend(self, rows: list[tuple[int, str, bool]], ended: list[bool] | None = None, **options: Any) -> None:
        first = len(self.model.rows)
        terminated = [flag in ("terminated", "both") for _, flag, _ in rows]
        truncated = [flag in ("truncated", "both") for _, flag, _ in rows]
        keys = self.buffer.extend(columns(first, terminated, truncated), version=first, **options)
        assert keys == range(first, first + len(rows))
        for at, (env, _, _) in enumerate(rows):
            self.model.add(env, terminated[at], truncated[at], None if ended is None else ended[at])

    def check_rows(self) -> None:
        ring, there = self.buffer.ring, self.model.there
        assert len(self.buffer) == len(there)
        every = np.arange(-1, len(self.model.rows) + 1)
        assert ring.alive(every).tolist() == [self.model.oldest <= key < len(self.model.rows) for key in every]
        if not there:
            return
        keys = ring.keys()
        batch = self.buffer.sample(len(there))
        assert batch.keys.tolist() == keys.tolist() == batch["obs"].tolist() == [row.key for row in there]
        assert batch["reward"].tolist() == [row.reward for row in there]
        assert batch["terminated"].tolist() == [row.terminated for row in there]
        assert batch["truncated"].tolist() == [row.truncated for row in there]
        assert ring.mark(PLACE, keys).tolist() == [row.place for row in there]
        assert ring.mark(END, keys).tolist() == [row.end for row in there]
        assert (ring.mark(VERSION, keys) <= keys).all()
        pairs = set(zip(ring.mark(EPISODE, keys).tolist(), [row.episode for row in there], strict=True))
        assert len(pairs) == len({real for real, _ in pairs}) == len({model for _, model in pairs})
        assert ring.following(keys).tolist() == [len(self.model.onwards(row)) for row in there]
        assert self.buffer.statistics().open_episodes == len(self.model.open)
        assert self.buffer.statistics().episodes == self.model.episodes

    def check_chains(self, length: int) -> None:
        ring, there = self.buffer.ring, self.model.there
        if not there:
            return
        chain, counts = ring.chain(ring.keys(), length)
        back, before = ring.chain_back(ring.keys(), length)
        for at, row in enumerate(there):
            onwards = [each.key for each in self.model.onwards(row)][:length]
            assert counts[at] == len(onwards)
            assert chain[at].tolist() == (onwards + onwards[-1:] * length)[:length]
            upto = [each.key for each in self.model.upto(row)][:length]
            assert before[at] == len(upto)
            upto = (upto + upto[-1:] * length)[:length]
            dead = [key < self.model.oldest for key in upto]
            assert [key < self.model.oldest for key in back[at].tolist()] == dead
            assert [key for key, gone in zip(back[at].tolist(), dead, strict=True) if not gone] == [
                key for key in upto if key >= self.model.oldest
            ]

    def check_slices(self, slices: Slices) -> None:
        if slices.span > self.model.capacity and not slices.pad:
            return
        first = slices.start == "first"
        starts = self.model.starts(slices.span, pad=slices.pad, first=first, ended=slices.ended)
        if self.model.there:
            with pytest.raises(Starved):
                self.buffer.sample(len(starts) + 1, slices=slices)
        if not starts:
            return
        batch = self.buffer.sample(len(starts), slices=slices)
        assert batch.keys.tolist() == starts
        for at, key in enumerate(starts):
            window = [each.key for each in self.model.onwards(self.model.rows[key])][: slices.span : slices.dilation]
            assert batch.mask[at].tolist() == [place < len(window) for place in range(slices.window)]
            assert batch["obs"][at].tolist() == (window + window[-1:] * slices.window)[: slices.window]

    def check_returns(self, n: int, gamma: float, stack: int) -> None:
        model = self.model
        starts = [row for row in model.there if model.upto(row)[:stack][-1].key >= model.oldest]
        if n > model.capacity or stack > model.capacity or not starts:
            return
        batch = self.buffer.sample(len(starts), n_step=n, gamma=gamma, stack=stack)
        assert batch.keys.tolist() == [row.key for row in starts]
        expected = [model.returns(row, n, gamma) for row in starts]
        assert batch["reward"].tolist() == [total for total, _, _, _ in expected]
        assert batch.discount.tolist() == [discount for _, discount, _, _ in expected]
        assert batch.steps.tolist() == [steps for _, _, _, steps in expected]
        lasts = [last for _, _, last, _ in expected]
        assert batch["terminated"].tolist() == [last.terminated for last in lasts]
        assert batch["truncated"].tolist() == [last.truncated for last in lasts]
        if stack == 1:
            assert batch["next_obs"].tolist() == [last.key + 0.5 for last in lasts]
        else:
            assert batch["obs"].tolist() == [model.frames(row, stack) for row in starts]
            assert batch["next_obs"].tolist() == [model.next_frames(last, stack) for last in lasts]

    def check(self, length: int, n: int, gamma: float) -> None:
        self.check_rows()
        self.check_chains(length)
        self.check_returns(n, gamma, stack=1)
        self.check_returns(n, gamma, stack=min(length, 3))
        self.check_slices(Slices(length=length))
        self.check_slices(Slices(length=length, pad=True))
        self.check_slices(Slices(length=length, start="first"))
        self.check_slices(Slices(length=length, ended=True, pad=True))
        self.check_slices(Slices(length=2, burn_in=1, bootstrap=1, dilation=2, pad=length > 3))


@pytest.mark.parametrize("storage", ["memory", "mapped"])
@settings(max_examples=300 * SOAK)
@given(
    st.integers(1, 8),
    st.lists(VERBS, max_size=8),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_buffer_is_a_list_of_the_newest_rows(
    tmp_path_factory: pytest.TempPathFactory,
    storage: str,
    capacity: int,
    verbs: list[tuple[Any, ...]],
    length: int,
    n: int,
    gamma: float,
) -> None:
    both = Both(capacity, **in_file(storage, tmp_path_factory))
    for verb in verbs:
        both.do(*verb)
        both.check(length, n, gamma)


def in_file(storage: str, factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The options for a storage; a folder is used by one buffer after the other, which save nothing."""
    return {"storage": storage} | ({"directory": factory.getbasetemp()} if storage == "mapped" else {})


PRIORITIES = st.sampled_from([0.0, 1e-300, 1e-6, 0.5, 1.0, 3.0, 1e6])
CHANGES = st.one_of(
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 12), PRIORITIES), min_size=1, max_size=6),
    st.sampled_from(["append", "sample", "clear"]),
)


class Leaves:
    """Priorities as a plain list, one for each slot."""

    def __init__(self, capacity: int, new: Any) -> None:
        self.capacity, self.new = capacity, new
        self.added = self.oldest = 0
        self.ever = 0.0
        self.of = [0.0] * capacity

    def add(self, count: int) -> None:
        for _ in range(count):
            value = (max(self.of) or 1.0) if self.new == "current_max" else max(self.ever, 1.0)
            self.of[self.added % self.capacity] = value if isinstance(self.new, str) else self.new
            self.added += 1
        self.oldest = max(self.oldest, self.added - self.capacity)

    def update(self, keys: list[int], priorities: list[float]) -> list[bool]:
        alive = [key >= self.oldest for key in keys]
        for key, value, there in zip(keys, priorities, alive, strict=True):
            if there:
                self.of[key % self.capacity] = value
        self.ever = max([self.ever, *(value for value, each in zip(priorities, alive, strict=True) if each)])
        return alive

    def clear(self) -> None:
        self.oldest, self.of = self.added, [0.0] * self.capacity


@pytest.mark.parametrize("storage", ["memory", "mapped"])
@settings(max_examples=150 * SOAK)
@given(
    st.sampled_from([1, 2, 3, 8, 33, 70]),
    st.sampled_from(["current_max", "all_time_max", 0.25]),
    st.lists(CHANGES, max_size=12),
)
def test_priorities_are_a_list_by_slot(
    tmp_path_factory: pytest.TempPathFactory, storage: str, capacity: int, new: Any, changes: list[Any]
) -> None:
    select, options = Prioritized(alpha=1.0, beta=1.0, new=new), in_file(storage, tmp_path_factory)
    buffer = ReplayBuffer(capacity, select=select, returns="numpy", **options)
    leaves = Leaves(capacity, new)
    for change in changes:
        if isinstance(change, int):
            buffer.extend({"x": np.zeros(change)})
            leaves.add(change)
        elif change == "append":
            buffer.append({"x": 0.0})
            leaves.add(1)
        elif change == "clear":
            buffer.clear()
            leaves.clear()
        elif change != "sample":
            keys = [max(0, leaves.added - 1 - back) for back, _ in change] if leaves.added else []
            priorities = [value for _, value in change][: len(keys)]
            assert buffer.update_priorities(keys, priorities).applied.tolist() == leaves.update(keys, priorities)
        there = range(leaves.oldest, leaves.added)
        expected = [leaves.of[key % capacity] for key in there]
        assert [key for key, value in zip(there, expected, strict=True) if value] == sorted(drawn(buffer, expected))
        if there:
            assert buffer._drawer.mass(np.array(there)).tolist() == expected


def drawn(buffer: ReplayBuffer, expected: list[float]) -> set[int]:
    """Sample; return the keys that have a priority, and check the weights of those that were drawn."""
    oldest = buffer.ring.oldest
    if not any(expected):
        if expected:
            with pytest.raises(Starved):
                buffer.sample(4)
        return set()
    batch = buffer.sample(16)
    least = min(value for value in expected if value)
    for key, weight in zip(batch.keys, batch.weights, strict=True):
        assert expected[key - oldest] > 0
        assert weight == np.float32(least / expected[key - oldest])
    return {oldest + at for at, value in enumerate(expected) if value}
