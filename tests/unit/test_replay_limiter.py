"""When rows may be added to a replay buffer and sampled: the arithmetic, what can never be, and no way to lock up."""

from __future__ import annotations

import threading
import time
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Anneal, ConfigError, Limiter, Prioritized, ReplayBuffer, Slices, TimedOut
from pipeline.buffer.transitions.limiter import Counts
from pipeline.config import Options, ReplayOptions
from pipeline.replay.gate import Gate
from tests.support.replay import everything, filled, rows


def limited(capacity: int = 100, **limiter: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, limiter=limiter, returns="numpy")


def test_adding_and_sampling_wait_for_each_other_at_the_borders() -> None:
    buffer = limited(min_size=3, ratio=2, error_buffer=4)
    for number in range(5):
        assert buffer.can_add()
        assert buffer.can_sample() == (number >= 3)
        buffer.append({"id": number})
    before = everything(buffer)
    for add in (lambda: buffer.append({"id": 5}), lambda: buffer.extend({"id": [5]}, timeout=0.001)):
        with pytest.raises(TimedOut, match="5 were added and 0 sampled"):
            add()
    assert everything(buffer) == before
    for _ in range(8):
        buffer.sample(1)
    before = everything(buffer)
    with pytest.raises(TimedOut, match="5 were added and 8 sampled"):
        buffer.sample(1)
    assert everything(buffer) == before
    buffer.append({"id": 5})
    assert buffer.can_sample(2)
    assert not buffer.can_sample(3)


def test_two_samples_let_the_sixth_row_in() -> None:
    buffer = limited(min_size=3, ratio=2, error_buffer=4)
    buffer.extend({"id": np.arange(5)})
    buffer.sample(1)
    assert not buffer.can_add()
    buffer.sample(1)
    assert buffer.can_add()
    assert not buffer.can_add(2)


@pytest.mark.parametrize(
    ("ratio", "least", "block", "batch"),
    [(1.0, 50, 8, 4), (0.25, 10, 7, 1), (3.7, 10, 3, 2), (1.0, 1, 1, 1), (0.1, 99, 20, 1)],
)
def test_whoever_may_go_on_does_and_the_debt_stays_within_its_bounds(
    ratio: float, least: int, block: int, batch: int
) -> None:
    """Blocks that did not meet ``min_size`` exactly once waited for samples that waited for rows."""
    buffer = limited(min_size=least, ratio=ratio)
    limiter = buffer.options.limiter
    if batch + block * ratio > 2 * limiter.buffer:
        block = 1
    for number in range(400):
        assert buffer.can_add(block) or buffer.can_sample(batch), f"neither, in round {number}"
        if buffer.can_add(block):
            buffer.extend(rows(block))
        else:
            buffer.sample(batch)
        statistics = buffer.statistics()
        debt = statistics.added * ratio - statistics.sampled - ratio * least
        assert debt <= limiter.buffer + block * ratio
        assert debt >= -limiter.buffer or statistics.sampled == 0


def test_after_clear_rows_may_be_added_again() -> None:
    buffer = limited(min_size=3, ratio=2, error_buffer=4)
    buffer.extend({"id": np.arange(5)})
    buffer.clear()
    assert not buffer.can_sample()
    for number in range(3):
        buffer.append({"id": number})
    assert buffer.can_sample()


@pytest.mark.parametrize("timeout", [0.0, None])
def test_what_the_limiter_never_lets_through_is_refused_at_once(timeout: float | None) -> None:
    buffer = limited(min_size=3, ratio=2, error_buffer=4)
    buffer.extend({"id": np.arange(5)}, timeout=timeout)
    for ask in (lambda: buffer.sample(9, timeout=timeout), lambda: buffer.wait_to_sample(9, timeout)):
        with pytest.raises(ConfigError, match=r"error_buffer=4\.0: a batch of 9"):
            ask()
    for add in (lambda: buffer.extend(rows(5), timeout=timeout), lambda: buffer.wait_to_add(5, timeout)):
        with pytest.raises(ConfigError):
            add()


def test_collecting_alone_needs_no_samples() -> None:
    buffer = limited(8, min_size=8)
    for number in range(100):
        buffer.append({"id": number})
    with pytest.raises(TimedOut, match="7 rows are there, and min_size=8"):
        filled(7, 8, limiter={"min_size": 8}).sample(1)
    with pytest.raises(TimedOut, match="0 rows are there, and min_size=1"):
        ReplayBuffer(8).sample(1)


@pytest.mark.parametrize("new", [Limiter(min_size=1), Limiter(min_size=1, ratio=4.0, error_buffer=50.0)])
def test_the_counters_of_an_older_run_come_with_no_settings(new: Limiter) -> None:
    old = Counts(Limiter(min_size=50, ratio=1.0))
    old.added = 60
    assert not old.may_add(1, 60)
    counts = Counts(new)
    counts.load(old.state())
    assert set(old.state()) == {"added", "sampled"}
    assert counts.limiter is new
    assert counts.may_add(1, 0)
    assert counts.may_sample(1, 60)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": -1}, "capacity=-1"),
        ({"capacity": 2.5}, r"capacity=2\.5"),
        ({"capacity": True}, "capacity=True"),
        ({"capacity": "8"}, "capacity='8'"),
        ({"limiter": {"min_size": 101}}, "min_size=101: capacity=100"),
        ({"limiter": {"min_size": 0}}, "min_size=0"),
        ({"limiter": {"ratio": 2, "error_buffer": 1}}, "error_buffer=1"),
        ({"limiter": {"ratio": float("nan")}}, "ratio=nan"),
        ({"limiter": {"ratio": 0}}, "ratio=0"),
        ({"limiter": {"error_buffer": 5}}, r"error_buffer=5\.0: it bounds a ratio"),
        ({"limiter": {"rate": 5}}, "Limiter has no option 'rate'"),
        ({"limiter": 5}, "Limiter: .* not 5"),
        ({"fields": "obs"}, "Fields: .* not 'obs'"),
        ({"fields": {"reward": 1}}, "reward=1"),
        ({"seed": -1}, "seed=-1"),
        ({"keep": 0}, "keep=0"),
        ({"keep": -2}, "keep=-2"),
        ({"keep_every": 0}, "keep_every=0"),
        ({"save_every": 0}, "save_every=0"),
        ({"capacity": float("nan")}, "capacity=nan"),
        ({"save_every_s": float("nan")}, "save_every_s=nan"),
        ({"keep_within_s": float("nan")}, "keep_within_s=nan"),
        ({"limiter": {"ratio": 1.0, "error_buffer": float("nan")}}, "error_buffer=nan"),
        ({"select": {"select": "prioritized", "beta": float("nan")}}, "beta=nan"),
        ({"select": {"select": "prioritized", "new": float("nan")}}, "new=nan"),
        ({"select": Prioritized(beta=Anneal(start=0.0, end=1.0, over=1))} | {"seed": float("nan")}, "seed=nan"),
        (
            {"select": {"select": "prioritized", "beta": {"schedule": "anneal", "start": 0.0, "end": 2.0, "over": 9}}},
            "beta=2",
        ),
        ({"select": {"select": "staleness", "half_life": float("nan")}}, "half_life=nan"),
        ({"fields": {"obs": "\ud83d"}}, "obs=.*surrogate"),
        ({"select": {"select": "ordered", "by": "min", "field": "\ud83d"}}, "field=.*surrogate"),
        ({"remove": {"by": "min", "field": "\ud83d"}}, "field=.*surrogate"),
        ({"seed": 0.5}, r"seed=0\.5"),
        ({"returns": "jax"}, "returns='jax': 'torch', 'numpy' are allowed"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"size": 5}, "no option 'size'"),
        ({"select": "random"}, "select='random'"),
        ({"select": 5}, "select=5"),
        ({"select": {"select": "prioritized", "alpha": -1}}, r"alpha=-1"),
        ({"select": {"select": "prioritized", "beta": 2}}, "beta=2"),
        ({"select": {"select": "prioritized", "alpha": float("nan")}}, "alpha=nan"),
        ({"select": {"select": "prioritized", "eps": float("inf")}}, "eps=inf"),
        ({"select": {"select": "prioritized", "new": "max"}}, "select="),
        ({"select": {"select": "uniform", "window": 0}}, "window=0"),
        ({"select": {"select": "ordered", "by": "min"}}, "field=''"),
        ({"keep": 5}, "keep=5: there is no directory="),
        ({"keep": -1}, "keep=None: there is no directory="),
        ({"keep_every": 5}, "keep_every=5: there is no directory="),
        ({"keep_within_s": 5.0}, r"keep_within_s=5\.0: there is no directory="),
        ({"save_every": 5}, "save_every=5: there is no directory="),
        ({"save_every_s": 5.0}, r"save_every_s=5\.0: there is no directory="),
        ({"signals": ["SIGUSR1"]}, r"signals=\['SIGUSR1'\]: there is no directory="),
        ({"signals": [], "storage": "shared"}, r"signals=\[\]: there is no directory="),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ReplayBuffer(**({"capacity": 100} | options))


@pytest.mark.parametrize(
    "options",
    [
        Limiter(min_size=5, ratio=2.0),
        Prioritized(alpha=0.5),
        Slices(length=3, pad=True),
        ReplayOptions(capacity=9, keep=3, directory="runs/a", save_every=5, signals=[]),
        ReplayOptions(capacity=9, select=Prioritized(beta=0.5), limiter=Limiter(min_size=9)),
    ],
)
def test_options_are_built_again_from_their_plain_values(options: Options) -> None:
    assert type(options).of(options.to_dict()) == options


def test_options_of_no_folder_come_back_from_what_a_buffer_resolved() -> None:
    plain = ReplayBuffer(9).options.to_dict()
    assert ReplayBuffer(**plain).options.to_dict() == plain


def test_who_is_let_in_as_the_waits_end_is_let_in() -> None:
    gate, may, got = Gate(), [False], []

    def wait() -> None:
        with gate.lock:
            gate.wait(lambda: may[0], 30, lambda: "")
            got.append("in")

    thread = threading.Thread(target=wait)
    thread.start()
    while not gate.waiters:
        time.sleep(0.001)
    with gate.lock:
        may[0] = True
        gate.end_waits()
    thread.join(30)
    assert got == ["in"]


async def test_a_task_whose_loop_sleeps_is_woken_by_a_thread() -> None:
    gate, may = Gate(), [False]

    def let_in() -> None:
        while not gate.waiters:
            time.sleep(0.001)
        time.sleep(0.1)  # by then the loop sleeps
        with gate.lock:
            may[0] = True
        gate.changed()

    thread = threading.Thread(target=let_in)
    thread.start()
    begun = time.monotonic()
    with anyio.move_on_after(20):  # whose end would wake it too
        await gate.wait_for(lambda: may[0])
    thread.join()
    assert time.monotonic() - begun < 10


def test_a_block_as_large_as_the_whole_range_can_be_added_some_time() -> None:
    buffer = limited(min_size=3, ratio=1, error_buffer=4)
    buffer.extend({"id": np.arange(7)})
    with pytest.raises(TimedOut):
        buffer.extend({"id": np.arange(8)}, timeout=0)
    with pytest.raises(ConfigError, match="error_buffer"):
        buffer.extend({"id": np.arange(9)}, timeout=0)
    for _ in range(8):
        buffer.sample(1)
    buffer.extend({"id": np.arange(8)}, timeout=0)
