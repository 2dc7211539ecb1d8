"""Shards of M ranks on N others: nothing lost, nothing doubled, in order, and balanced."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.layout import CUT, END, EPISODE, PLACE, VERSION
from pipeline.checkpoint.generations import find_generations
from pipeline.config import Prioritized
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, Damaged, RankFailed, UsageError
from pipeline.replay import ReplayBuffer
from pipeline.store.layout import Layout
from tests.support.ranks import fine, on_ranks

PAIRS = [(1, 2), (2, 1), (4, 3), (3, 4), (8, 8), (8, 1), (1, 8), (5, 7)]
LENGTHS: dict[str, Callable[[np.random.Generator], int]] = {
    "equal": lambda rng: 10,
    "ragged": lambda rng: int(rng.integers(1, 20)),
    "heavy": lambda rng: int(min(200, 1 + rng.pareto(1.1) * 4)),
}
PRIORITIZED = Prioritized(alpha=0.6, beta=0.4, new="current_max")
ENVS = 4


def played(rank: int, seed: int, kind: str, steps: int) -> list[dict[str, np.ndarray]]:
    """Steps of some environments, whose episodes have lengths of a kind; each row says which episode it is of."""
    rng = np.random.default_rng([seed, rank])
    begun, left, at = 0, [0] * ENVS, [0] * ENVS
    names = [0] * ENVS
    blocks = []
    for _ in range(steps):
        for env in range(ENVS):
            if left[env] == 0:
                begun, left[env], at[env] = begun + 1, LENGTHS[kind](rng), 0
                names[env] = rank * 100_000 + begun
            left[env] -= 1
            at[env] += 1
        t = np.array(at) - 1
        obs = np.stack([np.array(names), t], 1).astype(np.float32)
        obs[t % 5 == 3, 1] = -0.0
        blocks.append(
            {
                "episode": np.array(names),
                "t": t,
                "obs": obs,
                "odd": np.where(t % 3 == 0, np.nan, t * 0.5),
                "empty": np.zeros((ENVS, 0), np.float32),
                "image": np.full((ENVS, 40, 40), np.array(t % 256)[:, None, None], np.uint8),
                "done": np.array(left) == 0,
            }
        )
    return blocks


def make(directory: Path, ranks: Ranks, select: Any = "uniform", capacity: int = 400, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, directory=directory, ranks=ranks, select=select, seed=1, **options)


def layout_of(directory: Path) -> Layout:
    return Layout(str(directory))


def train(directory: Path, ranks: Ranks, select: Any, kind: str, steps: int = 60, capacity: int = 400) -> Any:
    with make(directory, ranks, select, capacity) as buffer:
        buffer.resume()
        for number, block in enumerate(played(ranks.rank, 5, kind, steps + 13 * ranks.rank)):
            buffer.extend(block, envs=ENVS, version=number)
        if select is PRIORITIZED:
            keys = buffer.ring.keys()
            buffer.update_priorities(keys, np.random.default_rng(ranks.rank).random(len(keys)) * (1 + ranks.rank))
        buffer.save(7, wait=True)
        return contents(buffer)


def contents(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything that is there, oldest first, with what the selection makes of it."""
    ring = buffer.ring
    keys = ring.keys()
    slots = ring.slots(keys)
    names = ring.storage.schema.names if ring.storage.schema is not None else ()
    found = {name: ring.storage.view(name)[slots].copy() for name in names}
    marks = {name: ring.mark(name, keys).copy() for name in (EPISODE, PLACE, END, VERSION)} if names else {}
    mass = buffer.drawer.mass(keys).copy() if names else np.empty(0)
    following = ring.following(keys) if names else np.empty(0, np.int64)
    return {"rows": found, "marks": marks, "mass": mass, "following": following, "added": ring.added}


def by_name(every: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[bytes, ...]]:
    """The content of each row by (episode, t), bit for bit."""
    found: dict[tuple[int, int], tuple[bytes, ...]] = {}
    for each in every:
        rows = each["rows"]
        for at in range(len(each["mass"])):
            name = (int(rows["episode"][at]), int(rows["t"][at]))
            assert name not in found, f"{name} is there twice"
            values = tuple(rows[column][at].tobytes() for column in sorted(rows))
            end = each["marks"][END][at]
            marks = (int(each["marks"][VERSION][at]), int(0 if end == CUT else end), float(each["mass"][at]))
            found[name] = (*values, repr(marks).encode())
    return found


def check_order(each: dict[str, Any]) -> None:
    """Episodes lie one after the other, each whole and in its order."""
    names, t = each["rows"]["episode"], each["rows"]["t"]
    begins = np.flatnonzero(np.diff(names, prepend=-1))
    assert len(set(names[begins].tolist())) == len(begins), "an episode is in two parts"
    inside = np.setdiff1d(np.arange(len(names)), begins)
    assert np.array_equal(t[inside], t[inside - 1] + 1)
    ends = np.append(begins[1:], len(names))
    expected = np.repeat(ends, ends - begins) - np.arange(len(names))
    assert np.array_equal(each["following"], expected)


@pytest.mark.parametrize("select", ["uniform", PRIORITIZED], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=str)
def test_shards_are_shared_out(tmp_path: Path, saved: int, loaded: int, kind: str, select: Any) -> None:
    before = fine(on_ranks(saved, lambda ranks: train(tmp_path, ranks, select, kind)))

    def load(ranks: Ranks) -> Any:
        with make(tmp_path, ranks, select, 400 * saved) as buffer:
            resumed = buffer.resume(rebalance=True)
            assert resumed.step == 7
            found = contents(buffer)
            if buffer.can_sample():
                for _ in range(3):
                    batch = buffer.sample(32, slices={"length": 3, "pad": True})
                    t, own = batch["t"].numpy(), batch.mask.numpy()
                    assert np.all((np.diff(t, axis=1) == 1) | ~own[:, 1:])
                    assert torch_finite(batch.weights)
            buffer.save(8, wait=True)
            return found

    after = fine(on_ranks(loaded, load))
    assert by_name(after) == by_name(before)  # R1, R2, R3
    for each in after:
        check_order(each)  # R4
    rows = [len(each["mass"]) for each in after]
    longest = max(each["following"].max() for each in after if len(each["following"]))
    assert max(rows) - min(rows) <= longest  # R6
    assert sum(each["added"] for each in after) == sum(each["added"] for each in before)

    again = fine(on_ranks(saved, load_again(tmp_path, select, 400 * saved)))
    assert by_name(again) == by_name(before)


def load_again(directory: Path, select: Any, capacity: int) -> Any:
    def load(ranks: Ranks) -> Any:
        with make(directory, ranks, select, capacity) as buffer:
            assert buffer.resume().step == 8
            return contents(buffer)

    return load


def torch_finite(values: Any) -> bool:
    return bool(np.isfinite(np.asarray(values)).all() and (np.asarray(values) > 0).all())


def saved_by(directory: Path, size: int, select: Any = "uniform", kind: str = "ragged", **more: Any) -> list[Any]:
    return fine(on_ranks(size, lambda ranks: train(directory, ranks, select, kind, **more)))


def loaded_by(directory: Path, size: int, select: Any = "uniform", capacity: int = 2_000, **how: Any) -> list[Any]:
    def load(ranks: Ranks) -> Any:
        with make(directory, ranks, select, capacity) as buffer:
            buffer.resume(**how)
            return contents(buffer) | {"known": buffer._saver._known}  # type: ignore[attr-defined]

    return fine(on_ranks(size, load))


def same(one: list[Any], other: list[Any]) -> bool:
    return [by_name([each]) for each in one] == [by_name([each]) for each in other] and all(
        np.array_equal(a["rows"]["episode"], b["rows"]["episode"]) for a, b in zip(one, other, strict=True)
    )


def test_each_rank_has_its_episodes_in_the_order_of_their_age_over_several_lives(tmp_path: Path) -> None:
    saved_by(tmp_path, 3)

    def more(ranks: Ranks) -> None:
        with make(tmp_path, ranks, capacity=2_000) as buffer:
            buffer.resume()
            for block in played(ranks.rank + 10, 6, "ragged", 20):
                buffer.extend(block, envs=ENVS)
            buffer.save(8, wait=True)

    fine(on_ranks(2, more))
    found = loaded_by(tmp_path, 4)
    uids: list[int] = []
    for each in found:
        table = each["known"]
        assert np.all(np.diff(table.age) >= 0)
        uids += table.uid.tolist()
        later = each["rows"]["episode"] >= 1_000_000
        assert later.any()
        assert not later[: np.flatnonzero(later)[0]].any()
        assert later[np.flatnonzero(later)[0] :].all()  # what began in the second life is newer than all before
    assert len(set(uids)) == len(uids)


def test_there_and_back_is_as_if_they_had_been_shared_out_at_once(tmp_path: Path) -> None:
    saved_by(tmp_path, 4, kind="heavy")
    at_once_ = loaded_by(tmp_path, 4, rebalance=True)

    def through(ranks: Ranks) -> None:
        with make(tmp_path, ranks, capacity=2_000) as buffer:
            buffer.resume()
            buffer.save(8, wait=True)

    fine(on_ranks(3, through))
    assert same(loaded_by(tmp_path, 4), at_once_)


def test_every_block_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_by(tmp_path, 4)
    layout = layout_of(tmp_path)
    manifest = find_generations(layout, layout.read_run().run_id).complete[-1].manifest  # type: ignore[union-attr]
    payloads = sum(info.live for info in manifest.segments)
    with caplog.at_level("INFO"):
        loaded_by(tmp_path, 3)
    said = [record.getMessage() for record in caplog.records if "run.resharded" in record.getMessage()]
    assert len(said) == 3
    for each in said:
        read = int(each.partition("bytes_read=")[2].split()[0])
        assert read == payloads
        assert "shards=4 ranks=3" in each
    assert not layout.list_scratch()


def test_new_rows_are_worth_as_much_as_the_most_on_any_rank(tmp_path: Path) -> None:
    before = saved_by(tmp_path, 3, PRIORITIZED)
    most = max(each["mass"].max() for each in before)

    def load(ranks: Ranks) -> tuple[float, float, float]:
        with make(tmp_path, ranks, PRIORITIZED, 2_000) as buffer:
            buffer.resume()
            own = buffer.drawer.mass(buffer.ring.keys())
            keys = buffer.extend(played(50, 1, "equal", 1)[0], envs=ENVS)
            new = buffer.drawer.mass(np.array(keys))
            return float(own.sum()), float(own.max()), float(new.min())

    found = fine(on_ranks(2, load))
    assert sum(each[0] for each in found) == pytest.approx(sum(each["mass"].sum() for each in before), rel=1e-9)
    assert max(each[1] for each in found) == most
    assert [each[2] for each in found] == [most, most]
    assert min(each[1] for each in found) < most  # on one of them that is more than its own


def test_more_than_there_is_room_for_is_refused_or_the_oldest_go(tmp_path: Path) -> None:
    before = saved_by(tmp_path, 4, kind="equal", steps=40)
    total = sum(len(each["mass"]) for each in before)
    capacity = total // 4

    def load(ranks: Ranks, **how: Any) -> Any:
        with make(tmp_path, ranks, capacity=capacity) as buffer:
            buffer.resume(**how)
            return contents(buffer) | {"known": buffer._saver._known}  # type: ignore[attr-defined]

    for rank, error in enumerate(on_ranks(2, load)):
        assert isinstance(error, ConfigError), rank
        assert f"capacity={capacity}" in str(error)
    found = fine(on_ranks(2, lambda ranks: load(ranks, evict_oldest=True)))
    left, there = by_name(before), by_name(found)
    gone = set(left) - set(there)
    assert all(left[name] == content for name, content in there.items())
    assert gone
    assert sum(len(each["mass"]) for each in found) > capacity * 2 - 40
    episodes = {name for name, _ in gone}
    assert not episodes & {name for name, _ in there}, "an episode was split"


def test_fewer_episodes_than_ranks(tmp_path: Path) -> None:
    def one(ranks: Ranks) -> Any:
        with make(tmp_path, ranks) as buffer:
            buffer.resume()
            for block in played(0, 1, "equal", 3):
                buffer.extend({name: each[:1] for name, each in block.items()})
            buffer.save(7, wait=True)
            return contents(buffer)

    before = fine(on_ranks(1, one))

    def load(ranks: Ranks) -> Any:
        with make(tmp_path, ranks) as buffer:
            buffer.resume()
            assert buffer.can_sample() == ranks.first
            assert not buffer.ready()  # on every rank, though the first one could
            buffer.extend(played(ranks.rank + 20, 2, "equal", 1)[0], envs=ENVS)
            assert buffer.ready(ENVS)
            buffer.save(8, wait=True)
            return contents(buffer)

    after = fine(on_ranks(3, load))
    assert [len(each["mass"]) for each in after] == [3 + ENVS, ENVS, ENVS]
    assert set(by_name(before)) <= set(by_name([after[0]]))


def test_buffers_without_rows(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with make(tmp_path, ranks) as buffer:
            buffer.resume()
            buffer.save(7, wait=True)

    fine(on_ranks(3, save))
    found = loaded_by(tmp_path, 2)
    assert [len(each["mass"]) for each in found] == [0, 0]


def test_what_was_changed_of_rows_and_counted_travels(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> Any:
        with make(tmp_path, ranks, limiter={"min_size": 1, "ratio": 5.0, "error_buffer": 5_000.0}) as buffer:
            buffer.resume()
            for number, block in enumerate(played(ranks.rank, 5, "ragged", 50)):
                buffer.extend(block, envs=ENVS)
                if number == 20:
                    buffer.end_episode(1)
            buffer.save(6, wait=True)
            keys = buffer.ring.keys()[3::7]
            buffer.write_back(keys, {"odd": np.arange(len(keys)) - 0.25})
            buffer.sample(10 + ranks.rank)
            buffer.save(7, wait=True)
            return contents(buffer) | {"counts": (buffer._counts.added, buffer._counts.sampled)}

    before = fine(on_ranks(3, save))

    def load(ranks: Ranks) -> Any:
        with make(tmp_path, ranks, capacity=900, limiter={"min_size": 1, "ratio": 5.0, "error_buffer": 5e3}) as buffer:
            buffer.resume()
            return contents(buffer) | {"counts": (buffer._counts.added, buffer._counts.sampled)}

    after = fine(on_ranks(2, load))
    assert by_name(after) == by_name(before)
    for at in (0, 1):
        assert sum(each["counts"][at] for each in after) == sum(each["counts"][at] for each in before)
    cut = {
        (int(each["rows"]["episode"][at]), int(each["rows"]["t"][at]))
        for each in before
        for at in np.flatnonzero(each["marks"][END] == CUT)
    }
    cut_after = {
        (int(each["rows"]["episode"][at]), int(each["rows"]["t"][at]))
        for each in after
        for at in np.flatnonzero(each["marks"][END] == CUT)
    }
    assert cut
    assert cut <= cut_after  # and those which were open end where they were


def damage(directory: Path, how: str) -> str:
    """Damage the newest generation in some way; return what its errors name."""
    layout = layout_of(directory)
    folder = Path(find_generations(layout, layout.read_run().run_id).complete[-1].folder)  # type: ignore[union-attr]
    segment = next(path for path in sorted(Path(layout.segments).iterdir()) if "-0001-" in path.name)
    if how == "missing shard":
        shutil.rmtree(folder / "shards" / "0001")
        return "shards/0001"
    if how == "changed state":
        path = folder / "shards" / "0002" / "replay.json"
        path.write_bytes(path.read_bytes().replace(b'"size"', b'"sizf"'))
        return "shards/0002/replay.json"
    if how == "no segment":
        segment.unlink()
        return segment.name
    raw = bytearray(segment.read_bytes())
    if how == "flipped byte":
        raw[len(raw) // 2] ^= 1
    else:
        del raw[len(raw) // 2 :]
    segment.write_bytes(raw)
    return segment.name


@pytest.mark.parametrize("how", ["missing shard", "changed state", "no segment", "flipped byte", "cut"])
@pytest.mark.parametrize("loaded", [2, 3])
def test_damage_is_told_on_every_rank_and_changes_nothing(tmp_path: Path, how: str, loaded: int) -> None:
    before = saved_by(tmp_path, 3)
    named = damage(tmp_path, how)

    def load(ranks: Ranks) -> tuple[str, int]:
        with make(tmp_path, ranks, capacity=2_000) as buffer:
            try:
                buffer.resume()
            except (Damaged, RankFailed) as error:
                return str(error), len(buffer)
            return "", len(buffer)

    found = fine(on_ranks(loaded, load))
    assert all(named in message for message, _ in found), found
    assert all(size == 0 for _, size in found)
    assert not layout_of(tmp_path).list_scratch()
    assert before


def following(rank: int, kind: str, steps: int) -> list[dict[str, np.ndarray]]:
    """As :func:`played`, with next observations: mostly the observation of the row that comes next."""
    blocks = played(rank, 5, kind, steps)
    for number, block in enumerate(blocks):
        after = block["obs"] + np.array([0, 1], np.float32)
        if number + 1 < len(blocks):
            after = np.where(block["done"][:, None], after, blocks[number + 1]["obs"])
        after[(block["t"] % 7 == 2) & (block["episode"] % 3 == 0)] = np.nan  # not what comes next
        block["next_obs"] = after
    return blocks


def with_nexts(buffer: ReplayBuffer) -> dict[str, Any]:
    """As :func:`contents`, with next observations wherever they are."""
    found = contents(buffer)
    if buffer.next_obs is not None and len(buffer):
        found["rows"] |= buffer.next_obs.gather(buffer.ring.keys(), ["next_obs"])
    return found


SHARED, PACKED = {"share_next_obs": True}, {"compress": {"image": "zlib"}}


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(SHARED, SHARED), (PACKED, PACKED), (SHARED | PACKED, SHARED | PACKED), (PACKED, {}), ({}, PACKED)],
    ids=["shared", "packed", "both", "unpacked", "repacked"],
)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (3, 2), (2, 3), (2, 2)], ids=str)
def test_rows_that_share_observations_or_are_compressed(
    tmp_path: Path, saved: int, loaded: int, saving: dict[str, Any], loading: dict[str, Any]
) -> None:
    def train(ranks: Ranks) -> Any:
        with make(tmp_path, ranks, PRIORITIZED, 150, **saving) as buffer:
            buffer.resume()
            for number, block in enumerate(following(ranks.rank, "ragged", 45 + 7 * ranks.rank)):
                buffer.extend(block, envs=ENVS, version=number)
            buffer.save(6, wait=True)
            keys = buffer.ring.keys()[4::9]
            buffer.write_back(keys, {"image": np.full((len(keys), 40, 40), 7, np.uint8), "odd": keys / 2})
            buffer.save(7, wait=True)
            return with_nexts(buffer)

    def load(ranks: Ranks) -> Any:
        with make(tmp_path, ranks, PRIORITIZED, 600, **loading) as buffer:
            buffer.resume()
            found = with_nexts(buffer)
            assert buffer.sample(32, stack=2)["next_obs"].shape == (32, 2, 2)
            for block in following(ranks.rank + 50, "equal", 3):  # what comes after it is kept apart from it
                buffer.extend(block, envs=ENVS)
            buffer.save(8, wait=True)
            return found

    before = by_name(fine(on_ranks(saved, train)))
    after = fine(on_ranks(loaded, load))
    assert by_name(after) == before
    for each in after if saved != loaded else ():
        check_order(each)

    def again(ranks: Ranks) -> Any:
        with make(tmp_path, ranks, PRIORITIZED, 600, **loading) as buffer:
            buffer.resume(rebalance=True)
            return with_nexts(buffer)

    there = by_name(fine(on_ranks(saved, again)))
    assert {name: there[name] for name in before} == before


def test_next_observations_are_stored_as_they_were(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with make(tmp_path, ranks, **SHARED) as buffer:
            buffer.resume()
            for block in following(ranks.rank, "ragged", 10):
                buffer.extend(block, envs=ENVS)
            buffer.save(7, wait=True)

    fine(on_ranks(2, save))
    for error in on_ranks(3, lambda ranks: make(tmp_path, ranks).resume()):
        assert isinstance(error, UsageError | RankFailed)
        assert "share_next_obs=True" in str(error)


def test_other_columns_than_those_that_were_saved_are_refused_by_name(tmp_path: Path) -> None:
    saved_by(tmp_path, 2)
    rows = {"episode": np.zeros(1), "other": np.zeros((1, 3))}
    for error in on_ranks(3, lambda ranks: make(tmp_path, ranks, schema=Schema.of(rows)).resume()):
        assert isinstance(error, UsageError | RankFailed)
        assert "other" in str(error)


def test_environments_do_not_go_on_where_they_are_shared_out_anew(tmp_path: Path) -> None:
    saved_by(tmp_path, 2)
    for error in on_ranks(3, lambda ranks: make(tmp_path, ranks).resume(continue_episodes=True)):
        assert isinstance(error, ConfigError)
        assert "continue_episodes" in str(error)


def test_ranks_that_plan_differently_stop_before_anything_is_changed(tmp_path: Path) -> None:
    saved_by(tmp_path, 2)

    def load(ranks: Ranks) -> tuple[str, int]:
        with make(tmp_path, ranks, capacity=2_000 if ranks.first else 150) as buffer:
            try:
                buffer.resume(evict_oldest=True)
            except RankFailed as error:
                return str(error), len(buffer)
            return "", -1

    found = fine(on_ranks(3, load))
    assert [size for _, size in found] == [0, 0, 0]
    assert all(message.startswith("plan: rank 1 has") for message, _ in found)


def test_the_law_of_sampling_is_per_row_on_each_rank(tmp_path: Path) -> None:
    saved_by(tmp_path, 4, PRIORITIZED)

    def load(ranks: Ranks) -> None:
        with make(tmp_path, ranks, PRIORITIZED, 2_000) as buffer:
            buffer.resume()
            keys = buffer.ring.keys()
            expected = buffer.drawer.mass(keys) / buffer.drawer.mass(keys).sum()
            drawn = np.concatenate([buffer.sample(1_000).keys for _ in range(100)])
            share = np.bincount(drawn - keys[0], minlength=len(keys)) / len(drawn)
            deviation = np.sqrt(expected * (1 - expected) / len(drawn))
            assert np.all(np.abs(share - expected) < 5 * deviation + 1e-12)

    fine(on_ranks(3, load))
