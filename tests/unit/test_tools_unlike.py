"""Merging, splitting and resharding what a save has truncated or dropped, what is compressed, and what is refused."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer, Schema
from pipeline.checkpoint import verify
from pipeline.distributed import Ranks
from pipeline.errors import UsageError
from pipeline.tools import merge, reshard, salvage_run, split
from tests.support.keeping import PRIORITIZED, compressed, digest, everything, load, odd_rows
from tests.support.ranks import fine, on_ranks

PACKED: dict[str, Any] = {"compress": {"image": "zlib"}}
SHARED: dict[str, Any] = {"share_next_obs": True}
GOLDEN = Path(__file__).parent.parent / "golden" / "v1f"


def save(directory: Path, ranks: Ranks | None = None, **options: Any) -> None:
    """Save episodes of which some are open, and, of the oldest, some have lost their start."""
    rank = 0 if ranks is None else ranks.rank
    with ReplayBuffer(60, directory=directory, ranks=ranks, seed=1, **options) as buffer:
        buffer.resume()
        for t in range(24):
            done = [(t + env) % (4 + 2 * rank) == 0 for env in range(3)]
            rows = {**odd_rows(rank, t, 3, done=done), "truncated": np.zeros(3, bool), **observed(rank, t, done)}
            buffer.extend(rows, envs=3, version=t)
            if t == 10:
                buffer.save(1, wait=True)
        keys = buffer.ring.keys()
        buffer.write_back(keys[1::4], {"reward": np.full(len(keys[1::4]), -1.0)})
        if options.get("select") is PRIORITIZED:
            buffer.update_priorities(keys, 1 + keys % 7)
        buffer.save(2, wait=True)


def observed(rank: int, t: int, done: list[bool]) -> dict[str, Any]:
    """Observations, and next ones: mostly the observation that comes next, but for single bits."""
    number = np.arange(3) + 1000 * rank + 10 * t
    obs = np.stack([number, np.where(number % 4 == 0, np.nan, -0.0)], 1).astype(np.float32)
    after = np.stack([number + 10, np.where((number + 10) % 4 == 0, np.nan, -0.0)], 1).astype(np.float32)
    after[done] += 0.5
    after[:, 1] = np.where(number % 11 == 3, 0.0, after[:, 1])
    return {"obs": obs, "next_obs": after}


def of_ranks(directory: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    def live(ranks: Ranks) -> dict[str, Any]:
        with ReplayBuffer(500, directory=directory, ranks=ranks, seed=1, **options) as buffer:
            buffer.resume()
            draws = [buffer.sample(8).keys.tolist() for _ in range(3)]
            return {**everything(buffer), "draws": draws}

    return fine(on_ranks(size, live))


def rows_of(*found: dict[str, Any]) -> list[Any]:
    """What there is of each row wherever it lies, but for its place: that of one without a start is counted anew."""
    columns = ("obs", "next_obs", "reward", "bits", "half", "image", "terminated", "truncated")
    names = ("id", *columns, "mass", "#version", "#end")
    return sorted(row for each in found for row in zip(*(each[name] for name in names), strict=True))


UNLIKE = pytest.mark.parametrize(
    "options",
    [
        {"incomplete": "truncate"},
        {"incomplete": "drop"},
        {"incomplete": "drop", "select": PRIORITIZED},
        PACKED,
        SHARED,
        SHARED | PACKED | {"incomplete": "drop"},
        SHARED | {"incomplete": "truncate", "select": PRIORITIZED},
    ],
    ids=["truncate", "drop", "drop by priority", "compress", "share", "share compress drop", "share truncate priority"],
)


def loading(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that a resume must have as well."""
    return {name: options[name] for name in ("select", "share_next_obs") if name in options}


@UNLIKE
def test_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path / "a", **options)
    was, same = digest(tmp_path / "a"), loading(options)
    made = merge([tmp_path / "a"], tmp_path / "m")
    parts = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], where="t < 16")
    back = merge([tmp_path / "x", tmp_path / "y"], tmp_path / "back")
    anew = reshard(tmp_path / "a", tmp_path / "r", 2)
    assert digest(tmp_path / "a") == was
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    wanted = load(tmp_path / "copy", **same)
    rows = len(wanted["keys"])
    assert (rows < 60) == (options.get("incomplete") == "drop")
    assert made.rows == back.rows == sum(each.rows for each in parts) == sum(anew.shards) == rows
    assert all(each.rows for each in parts)
    merged = load(tmp_path / "m", **same)
    assert load(tmp_path / "back", **same) == merged
    assert rows_of(merged) == rows_of(wanted)
    resharded = of_ranks(tmp_path / "r", 2, **same)
    if options.get("incomplete"):  # else the ranks' loads cut the episodes that are open
        assert merged["open"][0] == []
        assert rows_of(*resharded) == rows_of(wanted)
    assert sorted(which for each in resharded for which in each["id"]) == sorted(wanted["id"])


@UNLIKE
def test_of_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    fine(on_ranks(2, partial(_save_rank, directory=tmp_path / "a", options=options)))
    same = loading(options)
    was = digest(tmp_path / "a")
    for size in (1, 2, 3):
        made = reshard(tmp_path / "a", tmp_path / f"r{size}", size)
        found = verify(str(tmp_path / f"r{size}"))
        assert found.whole, found.damages
        shutil.copytree(tmp_path / "a", tmp_path / f"copy{size}")
        wanted = of_ranks(tmp_path / f"copy{size}", size, **same)
        assert of_ranks(tmp_path / f"r{size}", size, **same) == wanted
        assert made.shards == [len(each["keys"]) for each in wanted]
    assert digest(tmp_path / "a") == was
    merge([tmp_path / "a"], tmp_path / "m")
    merged = load(tmp_path / "m", **same)
    if options.get("incomplete"):  # else the ranks' loads cut the episodes that are open
        assert merged["open"][0] == []
        assert rows_of(merged) == rows_of(*wanted)
    assert len(merged["keys"]) == sum(made.shards)


def _save_rank(ranks: Ranks, directory: Path, options: dict[str, Any]) -> None:
    save(directory, ranks, **options)


@pytest.fixture
def another_level() -> Iterator[pytest.MonkeyPatch]:
    """Until it is undone, what is compressed has streams that are not those which a tool would make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.buffer.transitions.compressed._LEVEL", 9)
        yield patch


def image_of(run: int, t: int, level: int) -> set[bytes]:
    """What the stream of a row's image may be: that of any of the environments, or written back."""
    numbers = 1000 * run + 10 * t + np.arange(3)
    return {zlib.compress(np.full(1200, number % 256, np.uint8).tobytes(), level) for number in numbers}


def test_rows_that_are_compressed_stay_as_they_lie(tmp_path: Path, another_level: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", **PACKED)
    fine(on_ranks(2, partial(_save_rank, directory=tmp_path / "r", options=PACKED)))
    another_level.undo()
    wanted = load(tmp_path / "a")
    merge([tmp_path / "a"], tmp_path / "m")
    split(tmp_path / "m", [tmp_path / "x", tmp_path / "y"], count=4)
    reshard(tmp_path / "a", tmp_path / "b", 2)
    reshard(tmp_path / "r", tmp_path / "q", 3)
    merge([tmp_path / "r"], tmp_path / "rm")
    for name in ("m", "x", "y", "b", "q", "rm"):
        for (run, t), stream in compressed(tmp_path / name, "image").items():
            assert stream in image_of(run, t, 9)
    assert load(tmp_path / "m") == wanted
    with ReplayBuffer(60, directory=tmp_path / "m", seed=1, **PACKED) as buffer:
        buffer.resume()
        images = buffer.ring.storage.large["image"][buffer.ring.slots(buffer.ring.keys())]
        assert [each.tobytes() for each in images] == wanted["image"]
        buffer.save(3, wait=True)
    assert merge([tmp_path / "m"], tmp_path / "again").rows == 60
    assert load(tmp_path / "again")["image"] == wanted["image"]


def go_on(directory: Path, **options: Any) -> dict[str, Any]:
    """Add rows to a run that was saved, and save it; return all that it holds."""
    with ReplayBuffer(60, directory=directory, seed=1, **options) as buffer:
        buffer.resume(continue_episodes=True)
        for t in range(100, 104):
            rows = {**odd_rows(0, t, 3, done=[False] * 3), "truncated": np.zeros(3, bool)}
            buffer.extend({**rows, **observed(0, t, [False] * 3)}, envs=3)
        buffer.save(3, wait=True)
        return everything(buffer)


def test_rows_that_are_not_are_compressed_where_they_lie_beside_such(
    tmp_path: Path, another_level: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", **PACKED)
    save(tmp_path / "b")
    another_level.undo()
    wanted = rows_of(load(tmp_path / "a"), load(tmp_path / "b"))
    kept = go_on(tmp_path / "a")
    lie = compressed(tmp_path / "a", "image")
    assert {t >= 100 for (_, t), stream in lie.items() if stream is None} == {True}
    made = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    assert made.rows == 120
    for (run, t), stream in compressed(tmp_path / "m", "image").items():
        assert stream in image_of(run, t, 9) | image_of(run, t, 1)
        assert t < 100 or stream in image_of(run, t, 1)
    assert rows_of(load(tmp_path / "m")) == sorted([*rows_of(kept), *rows_of(load(tmp_path / "b"))])
    assert load(tmp_path / "m", **PACKED) == load(tmp_path / "m")
    reshard(tmp_path / "a", tmp_path / "r", 2)  # episodes have rows of both kinds
    merge([tmp_path / "r"], tmp_path / "rm")
    assert sorted(load(tmp_path / "rm")["image"]) == sorted(kept["image"])
    save(tmp_path / "c", **PACKED)
    merge([tmp_path / "b", tmp_path / "c"], tmp_path / "bc")
    assert rows_of(load(tmp_path / "bc")) == wanted
    later = go_on(tmp_path / "b", **PACKED)  # dense rows come first
    merge([tmp_path / "b"], tmp_path / "bm")
    assert None not in compressed(tmp_path / "bm", "image").values()
    assert load(tmp_path / "bm")["image"] == later["image"]
    assert None in compressed(tmp_path / "b", "image").values()
    salvage_run(tmp_path / "b", tmp_path / "bs")
    assert None not in compressed(tmp_path / "bs", "image").values()
    assert load(tmp_path / "bs")["image"] == later["image"]
    manifest = (tmp_path / "bc" / "generations" / "00000000" / "manifest.json").read_text()
    assert json.loads(manifest)["options"]["compress"] == {"image": "zlib"}


def test_conditions_see_what_was_written_back(tmp_path: Path) -> None:
    """Rewards, and the flag that a save has set where it truncated an episode."""
    save(tmp_path / "a", incomplete="truncate")
    for where, column, value in (("reward < 0", "reward", -1.0), ("truncated == true", "truncated", True)):
        found = split(tmp_path / "a", [tmp_path / f"{column} x", tmp_path / f"{column} y"], where=where)
        assert all(each.rows for each in found)
        first, rest = (load(tmp_path / f"{column} {name}") for name in "xy")
        raw = np.array(value).tobytes()
        assert raw in first[column]
        assert raw not in rest[column]
    assert len(load(tmp_path / "truncated x")["open"][0]) == 0


def test_what_only_some_of_the_runs_share_each_row_has_for_itself(tmp_path: Path) -> None:
    """And so where they share it in other ways; those that have no rows have no say."""
    save(tmp_path / "a", **SHARED, incomplete="drop")
    save(tmp_path / "b", **PACKED)
    with ReplayBuffer(9, directory=tmp_path / "none") as buffer:
        buffer.resume()
        buffer.save(1, wait=True)
    wanted = rows_of(load(tmp_path / "a", **SHARED), load(tmp_path / "b"))
    merge([tmp_path / name for name in ("a", "b", "none")], tmp_path / "m")
    assert rows_of(load(tmp_path / "m")) == wanted
    with pytest.raises(UsageError, match="was saved with share_next_obs=False"):
        load(tmp_path / "m", **SHARED)
    split(tmp_path / "m", [tmp_path / "x", tmp_path / "y"], count=4)
    merge([tmp_path / "y", tmp_path / "x"], tmp_path / "back")
    assert load(tmp_path / "back") == load(tmp_path / "m")
    merge([tmp_path / "none", tmp_path / "a"], tmp_path / "alone")
    assert rows_of(load(tmp_path / "alone", **SHARED)) == rows_of(load(tmp_path / "a", **SHARED))


def test_a_run_that_has_columns_and_no_rows_has_no_say(tmp_path: Path) -> None:
    save(tmp_path / "b", **SHARED)
    done = [False] * 3
    rows = {**odd_rows(0, 0, 3, done=done), "truncated": np.zeros(3, bool), **observed(0, 0, done)}
    with ReplayBuffer(9, directory=tmp_path / "a", schema=Schema.of(rows)) as buffer:
        buffer.save(1, wait=True)
    with ReplayBuffer(9, directory=tmp_path / "dropped", incomplete="drop") as buffer:
        buffer.extend(rows, envs=3)
        buffer.save(1, wait=True)
    wanted = rows_of(load(tmp_path / "b", **SHARED))
    for name in ("a", "dropped"):
        merge([tmp_path / name, tmp_path / "b"], tmp_path / f"m {name}")
        assert rows_of(load(tmp_path / f"m {name}", **SHARED)) == wanted


def test_a_run_of_which_every_row_was_dropped_is_merged_with_rows_of_their_own(tmp_path: Path) -> None:
    """Its rows lie in its blocks nevertheless, and share next observations."""
    done = [False] * 3
    rows = {**odd_rows(0, 0, 3, done=done), "truncated": np.zeros(3, bool), **observed(0, 0, done)}
    with ReplayBuffer(9, directory=tmp_path / "a", incomplete="drop", **SHARED) as buffer:
        buffer.extend(rows, envs=3)
        buffer.save(1, wait=True)
    save(tmp_path / "b")
    made = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert made.rows == 60
    assert load(tmp_path / "a", **SHARED)["keys"] == []
    assert rows_of(load(tmp_path / "m")) == rows_of(load(tmp_path / "b"))


def test_observations_that_have_other_names(tmp_path: Path) -> None:
    """Of two columns that either may be the observation, each run has another one."""
    for run, twin in (("a", "seen"), ("b", "told")):
        fields = {"obs": twin, "next_obs": "after"}
        with ReplayBuffer(50, directory=tmp_path / run, fields=fields, seed=1, **SHARED) as buffer:
            buffer.resume()
            t = np.arange(10.0)
            rows = {"seen": t, "told": -t, "after": (t if run == "a" else -t) + (1 if run == "a" else -1)}
            buffer.extend({**rows, "run": np.full(10, ord(run)), "t": np.arange(10), "terminated": t == 7})
            buffer.save(1, wait=True)
    merge([tmp_path / "a"], tmp_path / "alone")
    wanted = load(tmp_path / "a", **SHARED, fields={"obs": "seen", "next_obs": "after"})
    assert len(wanted["aside"]) == 2
    assert load(tmp_path / "alone", **SHARED, fields={"obs": "seen", "next_obs": "after"}) == wanted
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    after = [np.frombuffer(each)[0] for each in load(tmp_path / "m")["after"]]
    assert after == [each for t in range(1, 11) for each in (t, -t)]


@pytest.mark.parametrize("incomplete", ["keep", "drop"])
def test_a_block_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incomplete: str) -> None:
    """Next observations come from the block after the next one."""
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 2800)
    monkeypatch.setattr("pipeline.tools.scattered._READ", 4000)
    save(tmp_path / "a", **SHARED, incomplete=incomplete)
    merge([tmp_path / "a"], tmp_path / "m")
    save(tmp_path / "b")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "own")
    before = rows_of(load(tmp_path / "a", **SHARED))
    assert rows_of(load(tmp_path / "m", **SHARED)) == before
    assert rows_of(load(tmp_path / "own")) == sorted([*before, *rows_of(load(tmp_path / "b"))])
    reshard(tmp_path / "a", tmp_path / "r", 2)
    merge([tmp_path / "r"], tmp_path / "rm")
    if incomplete == "drop":  # else open episodes end where they are
        assert rows_of(*of_ranks(tmp_path / "r", 2, **SHARED)) == before
        assert rows_of(load(tmp_path / "rm", **SHARED)) == before


def test_next_observations_come_in_another_order_than_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes end in another order than they began in, and a rank has the rows of one after those of the other."""
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 2800)
    monkeypatch.setattr("pipeline.tools.scattered._READ", 4000)
    with ReplayBuffer(100, directory=tmp_path / "a", seed=1, **SHARED) as buffer:
        buffer.resume()
        for t in range(24):
            done = [t % 12 == 11, t % 3 == 2, t % 2 == 1]
            rows = {**odd_rows(0, t, 3, done=done), "truncated": np.zeros(3, bool)}
            buffer.extend({**rows, **observed(0, t, done)}, envs=3)
        buffer.save(1, wait=True)
    before = rows_of(load(tmp_path / "a", **SHARED))
    for size in (1, 2):
        reshard(tmp_path / "a", tmp_path / f"r{size}", size)
        merge([tmp_path / f"r{size}"], tmp_path / f"m{size}")
        assert rows_of(load(tmp_path / f"m{size}", **SHARED)) == before
        assert rows_of(*of_ranks(tmp_path / f"r{size}", size, **SHARED)) == before


def test_what_ranks_have_attached_for_themselves(tmp_path: Path) -> None:
    """As many ranks have it back; others do not, which is said."""
    from tests.support.replaying import Counter

    def live(ranks: Ranks, directory: Path, step: int) -> int:
        own = Counter()
        with ReplayBuffer(50, directory=directory, ranks=ranks, seed=1) as buffer:
            buffer.attach_own(env=own)
            buffer.resume()
            if step:
                own.step = step + ranks.rank
                buffer.extend(odd_rows(0, ranks.rank, 1, done=[True]))
                buffer.save(step, wait=True)
            return own.step

    fine(on_ranks(2, partial(live, directory=tmp_path / "a", step=5)))
    assert "own" not in str(reshard(tmp_path / "a", tmp_path / "same", 2).left_out)
    assert fine(on_ranks(2, partial(live, directory=tmp_path / "same", step=0))) == [5, 6]
    assert "own/env.safetensors" in reshard(tmp_path / "a", tmp_path / "anew", 3).left_out
    assert fine(on_ranks(3, partial(live, directory=tmp_path / "anew", step=0))) == [0, 0, 0]


def test_what_ranks_wrote_of_an_earlier_version_is_merged_split_and_resharded(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run", ignore=shutil.ignore_patterns("every_event.fbj"))
    was = digest(tmp_path / "run")
    whole = merge([tmp_path / "run"], tmp_path / "merged")
    parts = split(tmp_path / "run", [tmp_path / "x", tmp_path / "y"], count=1)
    assert [each.units for each in parts] == [1, whole.units - 1]
    assert reshard(tmp_path / "run", tmp_path / "out", 3).units == whole.units
    assert all(verify(str(tmp_path / name)).whole for name in ("merged", "x", "y", "out"))
    assert digest(tmp_path / "run") == was
