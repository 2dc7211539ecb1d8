"""What a save makes of episodes that have no end yet, and of those whose first rows have gone."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from pipeline.buffer.transitions.layout import CUT, END, OPEN, TERMINATED, TRUNCATED
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.config import Prioritized
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError
from pipeline.replay import ReplayBuffer
from pipeline.store.layout import Layout
from tests.support.ranks import fine, on_ranks

PRIORITIZED = Prioritized(alpha=1.0, beta=0.4)
POLICIES = ["keep", "truncate", "drop"]
ENVS, CAPACITY = 3, 60


def steps(count: int, begin: int = 0, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Steps of some environments with ragged episodes, of which the third begins one of 200 rows; ``n`` tells all of
    them apart."""
    rng = np.random.default_rng(seed)
    left, found = [int(rng.integers(2, 9)), int(rng.integers(2, 9)), 200], []
    for step in range(begin + count):
        left = [each - 1 for each in left]
        over = np.array([not each for each in left])
        cut = over & (np.arange(ENVS) == 1)
        n = 1_000_000 * seed + step * ENVS + np.arange(ENVS)
        rows = {"n": n, "obs": n[:, None] / 2, "reward": n % 5, "terminated": over & ~cut, "truncated": cut}
        left = [each or int(rng.integers(2, 9)) for each in left]
        found.append(rows)
    return found[begin:]


def build(directory: Path, policy: str = "keep", ranks: Ranks | None = None, **more: Any) -> ReplayBuffer:
    more = dict[str, Any](select=PRIORITIZED, seed=2) | more
    return ReplayBuffer(
        int(more.pop("capacity", CAPACITY)), directory=directory, incomplete=policy, ranks=ranks, **more
    )


def fill(buffer: ReplayBuffer, count: int = 40, seed: int = 0, begin: int = 0) -> None:
    for step, rows in enumerate(steps(count, begin, seed), begin):
        keys = np.array(buffer.extend(rows, envs=ENVS, version=step))
        buffer.update_priorities(keys, 1 + rows["n"] % 11)


def content(buffer: ReplayBuffer) -> dict[int, tuple[Any, ...]]:
    """What is there of each row, by its number."""
    ring = buffer.ring
    keys = ring.keys()
    if not len(keys):
        return {}
    slots = ring.slots(keys)
    names = sorted({*ring.storage.schema.names} - {"n"})  # type: ignore[union-attr]
    found = {name: ring.storage.view(name)[slots].tolist() for name in (*names, END)}
    mass = buffer.drawer.mass(keys).tolist()
    return {
        int(n): (*(found[name][at] for name in names), found[END][at], mass[at])
        for at, n in enumerate(ring.storage.view("n")[slots].tolist())
    }


def digest(buffer: ReplayBuffer) -> str:
    state = buffer.state_dict()
    hashed = hashlib.sha256(repr((state["state"], sorted(state["rows"]))).encode())
    for part in ("rows", "values"):
        for name in sorted(state[part]):
            hashed.update(state[part][name].tobytes())
    return hashed.hexdigest()


def manifests(directory: Path) -> list[Manifest]:
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    return [each.manifest for each in find_generations(layout, run.run_id).complete]


def expected(before: dict[int, tuple[Any, ...]], policy: str, count: int, seed: int) -> dict[int, tuple[Any, ...]]:
    """What is to come back of a buffer of which the first ``count`` steps were added."""
    names = ["obs", "reward", "terminated", "truncated", END, "mass"]
    begun: list[list[int]] = [[], [], []]
    episodes: list[list[int]] = []
    for rows in steps(count, 0, seed):
        for env in range(ENVS):
            begun[env].append(int(rows["n"][env]))
            if rows["terminated"][env] or rows["truncated"][env]:
                episodes.append(begun[env])
                begun[env] = []
    going = [each for each in begun if each and each[-1] in before]
    found = dict(before)
    if policy == "truncate":
        for each in going:
            row = list(found[each[-1]])
            row[names.index("truncated")], row[names.index(END)] = True, TRUNCATED
            found[each[-1]] = tuple(row)
    elif policy == "drop":
        for each in [*episodes, *going]:
            if each in going or each[0] not in before:
                for n in each:
                    found.pop(n, None)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 7, 20, 41])
def test_one_process(tmp_path: Path, policy: str, count: int) -> None:
    with build(tmp_path, policy) as buffer:
        buffer.resume()
        fill(buffer, count)
        before = content(buffer)
        buffer.save(1, wait=True)
        said = buffer.statistics().save
    with build(tmp_path, policy) as buffer:
        assert buffer.resume(continue_episodes=True).step == 1
        assert content(buffer) == expected(before, policy, count, 0)
        assert len(buffer.ring.episodes.open()) == len(going(policy, count))
        for batch in [buffer.sample(16, slices={"length": 3, "pad": True}) for _ in range(5)] if len(buffer) else []:
            assert batch.weights.isfinite().all()
        fill(buffer, 3, seed=3)
        buffer.save(2, wait=True)
        after = content(buffer)
    (shard,) = manifests(tmp_path)[0].shards
    assert shard.rows == len(before) == shard.saved + sum(shard.dropped.values())  # type: ignore[operator]
    assert said == {
        "rows": len(before),
        "saved": len(expected(before, policy, count, 0)),
        "dropped_open": shard.dropped.get("open", 0),
        "dropped_headless": shard.dropped.get("headless", 0),
        "truncated": shard.truncated,
    }
    if count == 41 and policy == "drop":
        assert shard.dropped["open"] > 0 < shard.dropped["headless"]
    with build(tmp_path, policy) as buffer:
        buffer.resume()
        # What was left out stays so; what was dropped is not there to be dropped again.
        assert set(content(buffer)) <= set(after)
        assert {n for n in after if n < 1_000_000} == {n for n in content(buffer) if n < 1_000_000} or policy == "drop"
    assert verify(str(tmp_path)).whole


def going(policy: str, count: int) -> list[int]:
    """The environments whose episodes are open in what is saved."""
    if policy != "keep":
        return []
    last = steps(count)[-1]
    return [env for env in range(ENVS) if not (last["terminated"][env] or last["truncated"][env])]


def test_an_open_episode_of_one_row_is_truncated_at_that_row(tmp_path: Path) -> None:
    with build(tmp_path, "truncate") as buffer:
        buffer.resume()
        buffer.extend({name: each[:1] for name, each in steps(1)[0].items()})
        buffer.save(1, wait=True)
    with build(tmp_path, "truncate") as buffer:
        assert buffer.resume().rows == 1
        ((*_, truncated, end, _),) = content(buffer).values()
        assert (truncated, end) == (True, TRUNCATED)
        batch = buffer.sample(1, n_step=3, gamma=0.9)
        assert batch["truncated"].tolist() == [True]
        assert batch["terminated"].tolist() == [False]
        assert batch.discount.tolist() == pytest.approx([0.9])  # it may be bootstrapped


def test_truncating_touches_no_first_row_and_no_other_mark(tmp_path: Path) -> None:
    """The long episode has lost its beginning: what is its first row now is as it was."""
    with build(tmp_path, "truncate") as buffer:
        buffer.resume()
        fill(buffer, 41)
        before = content(buffer)
        buffer.save(1, wait=True)
    with build(tmp_path, "truncate") as buffer:
        buffer.resume()
        after = content(buffer)
        changed = [n for n in before if before[n] != after[n]]
        assert changed
        assert all(n >= 40 * ENVS for n in changed)  # of the last step


def test_without_a_column_for_it_the_mark_alone_tells(tmp_path: Path) -> None:
    with build(tmp_path, "truncate") as buffer:
        buffer.resume()
        buffer.extend({"n": np.arange(4), "done": np.array([False, True, False, False])})
        buffer.save(1, wait=True)
    with build(tmp_path) as buffer:
        buffer.resume()
        assert buffer.ring.mark(END, buffer.ring.keys()).tolist() == [OPEN, TERMINATED, OPEN, TRUNCATED]
        assert buffer.sample(4)["done"].dtype.itemsize == 1


def test_a_truncated_row_stays_so_over_several_lives_and_where_it_was_written_back(tmp_path: Path) -> None:
    for life in range(3):
        with build(tmp_path, "truncate") as buffer:
            buffer.resume(verify="lazy" if life == 1 else "full")
            rows = steps(2, 2 * life, seed=1)
            for each in rows:
                buffer.extend(each, envs=ENVS)
            newest = buffer.ring.keys()[-1:]
            buffer.write_back(newest, {"reward": [100 + life]})
            buffer.save(2 * life, wait=True)
            buffer.write_back(newest, {"reward": [200 + life]})
            buffer.save(2 * life + 1, wait=True)
    with build(tmp_path, "truncate") as buffer:
        buffer.resume()
        found = [(n - 1_000_000, row) for n, row in sorted(content(buffer).items())]
        last = [(n, row) for n, row in found if n // ENVS % 2 == 1]  # of each life
        assert [row[1] for n, row in last if n % ENVS == 2] == [200, 201, 202]
        assert all(row[3] or row[2] for _, row in last)
        assert all((row[4] == TRUNCATED) == bool(row[3]) for _, row in found)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_saving_leaves_the_buffer_as_it_was(tmp_path: Path, policy: str, size: int) -> None:
    """S6: by its content, and by what it draws next."""

    def train(ranks: Ranks | None) -> list[Any]:
        seen = []
        for save in (False, True):
            folder = tmp_path / ("saved" if save or ranks is None else f"not-{ranks.rank}") / str(save and not ranks)
            with build(folder, policy, ranks if save else None) as buffer:
                if ranks is not None and not save:  # ranks draw from streams of their own
                    buffer._rng.bit_generator.state = np.random.PCG64([2, 0, ranks.rank]).state
                buffer.resume()
                fill(buffer, 30, seed=0 if ranks is None else ranks.rank)
                buffer.sample(5)
                before = digest(buffer)
                if save:
                    buffer.save(1, wait=True)
                    assert digest(buffer) == before
                fill(buffer, 3, begin=30)
                draws = [buffer.sample(8, n_step=2, gamma=0.9).keys.tolist() for _ in range(20)]
                seen.append((before, draws, digest(buffer)))
        return seen

    for one, other in [train(None)] if not size else fine(on_ranks(size, train)):
        assert one[1] == other[1]
        assert one == other


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loaded", [1, 2, 3])
def test_ranks(tmp_path: Path, policy: str, loaded: int) -> None:
    """S4, over as many ranks and over others."""

    def save(ranks: Ranks) -> Any:
        with build(tmp_path, policy, ranks) as buffer:
            buffer.resume()
            fill(buffer, 12 + 15 * ranks.rank, seed=ranks.rank)
            before = content(buffer)
            buffer.save(1, wait=True)
            return before, buffer.statistics().save

    saved = fine(on_ranks(3, save))
    told = manifests(tmp_path)[-1].shards
    for rank, ((before, said), shard) in enumerate(zip(saved, told, strict=True)):
        left = expected(before, policy, 12 + 15 * rank, rank)
        assert (shard.rows, shard.saved) == (len(before), len(left)) == (said["rows"], said["saved"])
        assert shard.rows == len(left) + sum(shard.dropped.values())
        assert sum(shard.dropped.values()) == said["dropped_open"] + said["dropped_headless"]
        assert bool(shard.truncated) == (policy == "truncate")

    def load(ranks: Ranks) -> Any:
        with build(tmp_path, policy, ranks, capacity=200) as buffer:
            buffer.resume()
            buffer.save(2, wait=True)
            if len(buffer):
                buffer.sample(20, slices={"length": 2, "pad": True})
            return content(buffer)

    found = fine(on_ranks(loaded, load))
    wanted: dict[int, Any] = {}
    for rank, (before, _) in enumerate(saved):
        wanted |= {n: ended(row) for n, row in expected(before, policy, 12 + 15 * rank, rank).items()}
    together = Counter(n for each in found for n in each)
    assert set(together.values()) == {1}
    assert {n: ended(row) for each in found for n, row in each.items()} == wanted
    again = fine(on_ranks(loaded, load))
    assert [set(each) for each in again] == [set(each) for each in found]
    assert verify(str(tmp_path)).whole


def ended(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row, of which it does not count whether an open episode was ended by the resume."""
    return (*row[:4], OPEN if row[4] == CUT else row[4], *row[5:])


def test_a_save_that_drops_much_says_so(tmp_path: Path) -> None:
    with build(tmp_path, "drop") as buffer, structlog.testing.capture_logs() as logs:
        buffer.resume()
        fill(buffer, 41)
        buffer.save(1, wait=True)
        said = buffer.statistics().save
    (line,) = [each for each in logs if each["event"] == "rows.dropped"]
    dropped = said["dropped_open"] + said["dropped_headless"]
    assert line["share"] == round(dropped / said["rows"], 3) > 0.1
    assert line["log_level"] == "warning"
    (line,) = [each for each in logs if each["event"] == "generation.committed"]
    assert {name: line[name] for name in said} == said


def test_one_that_drops_little_does_not(tmp_path: Path) -> None:
    with build(tmp_path, "drop", capacity=1000) as buffer, structlog.testing.capture_logs() as logs:
        buffer.resume()
        buffer.extend({"n": np.arange(400), "done": np.arange(400) % 10 == 9})
        buffer.extend({"n": np.arange(400, 405), "done": np.zeros(5, bool)})
        buffer.save(1, wait=True)
        assert buffer.statistics().save["dropped_open"] == 5
    assert "rows.dropped" not in {each["event"] for each in logs}


def test_draws_after_a_drop_follow_the_priorities_that_are_left(tmp_path: Path) -> None:
    with build(tmp_path, "drop") as buffer:
        buffer.resume()
        fill(buffer, 41)
        buffer.save(1, wait=True)
    with build(tmp_path, "drop") as buffer:
        buffer.resume()
        numbers = buffer.ring.storage.view("n")[buffer.ring.slots(buffer.ring.keys())]
        share = (1 + numbers % 11) / (1 + numbers % 11).sum()
        drawn = Counter(np.concatenate([buffer.sample(500)["n"].numpy() for _ in range(40)]).tolist())
        for n, each in zip(numbers.tolist(), share.tolist(), strict=True):
            assert drawn[n] == pytest.approx(20_000 * each, abs=5 * (20_000 * each) ** 0.5)


def test_a_drop_into_less_room_keeps_the_newest_episodes(tmp_path: Path) -> None:
    with build(tmp_path, "drop") as buffer:
        buffer.resume()
        fill(buffer, 41)
        before = content(buffer)
        buffer.save(1, wait=True)
    with build(tmp_path, "drop", capacity=12) as buffer:
        buffer.resume()
        left = expected(before, "drop", 41, 0)
        assert 0 < len(buffer) <= 12
        assert set(content(buffer)) < set(left)


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{"remove": "lifo"}, {"storage": "shared"}]
    for more in others:
        with pytest.raises(ConfigError) as refused:
            build(tmp_path, "drop", select="uniform", **more)
        assert refused.value.option == "incomplete"
    with pytest.raises(ConfigError, match="incomplete"):
        build(tmp_path, "cut")
    fed = ReplayBuffer(10, incomplete="truncate")
    with pytest.raises(ConfigError, match="a pipeline's rows are kept"):
        fed.feed()
