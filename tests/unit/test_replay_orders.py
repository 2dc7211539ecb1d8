"""The first rows of an order, and the newest of a pool: the same as if all rows were looked at, which they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import Ordered, ReplayBuffer, Starved
from pipeline.buffer.transitions import pool, recent, ring
from pipeline.buffer.transitions.best import _LEAST, Best
from pipeline.buffer.transitions.pool import Pool

ORDERS: dict[str, dict[str, Any]] = {
    "max": {"by": "max", "field": "reward"},
    "min": {"by": "min", "field": "reward"},
    "whole": {"by": "max", "field": "whole"},
    "stalest": {"by": "stalest"},
    "freshest": {"by": "freshest"},
    "uses": {"by": "max", "field": "reward", "uses": 2},
}


def rows(rng: np.random.Generator, count: int, nans: float) -> dict[str, Any]:
    reward = rng.integers(0, 40, count).astype(np.float64)  # many are equal
    reward[rng.random(count) < nans] = np.nan
    return {"reward": reward, "whole": rng.integers(-9, 9, count).astype(np.int8)}


def expected(buffer: ReplayBuffer, order: dict[str, Any], count: int) -> list[int] | None:
    """The first of all rows, as a plain list gives them; None: there are too few."""
    by, field = order["by"], order.get("field", "#version")
    rows_of = buffer.ring
    keys = rows_of.keys()
    if "uses" in order:
        keys = keys[buffer._drawer._uses.left(keys) > 0]  # type: ignore[attr-defined]
    values = rows_of.mark(field, keys).astype(np.float64) * (-1 if by in ("max", "freshest") else 1)
    listed = sorted(range(len(keys)), key=lambda at: (np.isnan(values[at]), np.nan_to_num(values[at]), at))
    return keys[listed[:count]].tolist() if count <= len(keys) else None


@pytest.mark.parametrize("remove", ["fifo", "lifo", {"by": "min", "field": "whole"}])
@pytest.mark.parametrize("nans", [0, 0.3, 0.95])
@pytest.mark.parametrize("name", ORDERS)
def test_the_first_rows_are_those_of_all(name: str, nans: float, remove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Best, "_room", lambda self, count: count + 3)  # what is held soon comes to its end
    for module in (ring, pool):
        monkeypatch.setattr(module, "AT_ONCE", 16)
    rng = np.random.default_rng(len(name))
    buffer = ReplayBuffer(300, select=Ordered(**ORDERS[name]), remove=remove, returns="numpy")
    for number in range(150):
        kind = rng.integers(0, 20)
        if kind < 12 or not len(buffer):
            version = int(rng.integers(0, 2 * number + 1))
            buffer.extend(rows(rng, int(rng.choice([1, 3, 40])), nans), version=version)
        elif kind == 12:
            keys = rng.choice(buffer.ring.keys(), 5)
            buffer.write_back(keys, {"reward": rng.integers(0, 60, 5)})
        elif kind == 13 and number % 5 == 0:
            buffer.clear()
            continue
        count = int(rng.choice([1, 2, 5, 30]))
        wanted = expected(buffer, ORDERS[name], count)
        if wanted is None:
            with pytest.raises(Starved):
                buffer.sample(count)
        else:
            assert buffer.sample(count).keys.tolist() == wanted, number


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("remove", ["fifo", {"by": "min", "field": "reward"}])
def test_taking_a_few_of_many_looks_at_few(name: str, remove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    buffer = ReplayBuffer(50_000, select=Ordered(**ORDERS[name]), remove=remove)
    buffer.extend(rows(rng, 50_000, nans=0))
    buffer.sample(8)
    looked_at = 0
    mark = buffer.ring.mark

    def counted(column: str, keys: Any) -> Any:
        nonlocal looked_at
        looked_at += len(keys)
        return mark(column, keys)

    monkeypatch.setattr(buffer.ring, "mark", counted)
    for number in range(50):
        buffer.extend(rows(rng, 4, nans=0), version=number)
        buffer.sample(8)
    assert looked_at < 50 * 20 * _LEAST // 4 < 50 * 50_000


@pytest.mark.parametrize("most", [30, 1 << 14])
def test_rows_that_just_came_into_a_pool_and_the_ends_of_its_episodes_are_found_at_once(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "_MOST", most)
    rng = np.random.default_rng(2)
    buffer = ReplayBuffer(500, select="prioritized", remove={"by": "min", "field": "reward"})
    ring = buffer.ring
    assert isinstance(ring, Pool)
    for number in range(400):
        first = ring.added
        for _ in range(int(rng.integers(1, 4))):
            buffer.extend(rows(rng, int(rng.choice([1, 2, 200, 9000])) if number % 50 == 0 else 2, nans=0), env=3)
        serials = ring._serials[: ring.size]
        assert sorted(ring.newest(first, ring.added - first).tolist()) == sorted(
            ring._keys[: ring.size][serials >= first].tolist()
        )
        there = ring._keys[: ring.size][serials == ring.added - 1].tolist()
        open_ = buffer.statistics().open_episodes
        assert ring._of_serials(np.array([ring.added - 1])).tolist() == there
        old = ring._keys[: ring.size][serials == serials[0]].tolist()
        assert ring._of_serials(serials[:1]).tolist() == old
        if number % 7 == 0:
            assert buffer.end_episode(3) == open_ == 1
            assert [key for key in there if ring.mark("#end", np.array([key]))[0] != 3] == []
