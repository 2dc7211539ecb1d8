"""Merging, splitting and resharding pools, of which others than the oldest rows go first: each row goes by itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Ranks, ReplayBuffer
from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged, UsageError
from pipeline.tools import merge, reshard, routing, split
from tests.support.disk import Killed, ScriptedFiles
from tests.support.keeping import compressed, digest
from tests.support.pooled import CAPACITY, CHOICES, REMOVERS, content, fill, held, load, made, play, rows
from tests.support.ranks import fine, on_ranks

PRIORITIZED = CHOICES["lowest_priority-prioritized"]
USED = CHOICES["min-epoch_uses"]


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_what_was_split_and_merged_is_what_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    """Rows, their order, versions, episodes, ends, priorities and uses, to the last bit; open episodes, and counts."""
    before = play(tmp_path / "a", 1, 60, **options)
    was = digest(tmp_path / "a")
    for at, how in enumerate([{"count": 5}, {"count": 0}, {"fraction": 0.5}, {"where": "score > 40"}]):
        parts = [tmp_path / f"first{at}", tmp_path / f"rest{at}"]
        found = split(tmp_path / "a", parts, **how)  # type: ignore[arg-type]
        assert sum(each.rows for each in found) == sum(each.units for each in found) == CAPACITY
        back = merge(parts, tmp_path / f"back{at}")
        assert back.renumbered == 0
        assert load(tmp_path / f"back{at}", **options) == before
    assert digest(tmp_path / "a") == was


@pytest.mark.parametrize("options", [PRIORITIZED, USED], ids=["prioritized", "uses"])
def test_the_grouping_and_the_order_of_arguments_do_not_matter(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = [tmp_path / name for name in ("rank_1", "rank_2", "rank_10")]
    for number, run in enumerate(runs):
        play(run, number + 1, 40 + 9 * number, **options)
    a, b, c = runs
    merge([a, b, c], tmp_path / "at once")
    merge([b, a], tmp_path / "ab")
    merge([tmp_path / "ab", c], tmp_path / "left")
    merge([c, b], tmp_path / "cb")
    made_ = merge([tmp_path / "cb", a], tmp_path / "right")
    assert [part.directory for part in made_.made_of] == [str(run) for run in runs]
    assert [part.units for part in made_.made_of] == [CAPACITY] * 3
    found = [load(tmp_path / name, 3 * CAPACITY, **options) for name in ("at once", "left", "right")]
    assert found[0] == found[1] == found[2]
    split(tmp_path / "right", tmp_path / "parts", by="version")
    merge(sorted((tmp_path / "parts").iterdir()), tmp_path / "back")
    assert load(tmp_path / "back", 3 * CAPACITY, **options) == found[0]


def test_nothing_is_lost_or_doubled_and_totals_are_sums(tmp_path: Path) -> None:
    played = [play(tmp_path / str(run), run, steps, **USED) for run, steps in ((1, 12), (2, 70), (3, 0), (4, 31))]
    made_ = merge([tmp_path / str(run) for run in (1, 2, 3, 4)], tmp_path / "all")
    found = load(tmp_path / "all", 12 + 2 * CAPACITY, **USED)
    assert content(found) == {which: row for each in played for which, row in content(each).items()}
    assert found["counts"] == tuple(sum(each["counts"][at] for each in played) for at in range(3))
    # Which episode a row is of: no two have become one, and none two.
    before = {(number, which) for number, each in enumerate(played) for which in set(each.get("#episode", ()))}
    assert len(set(found["#episode"])) == len(before)
    named = json.loads((tmp_path / "all" / "ids.json").read_text())["episodes"]
    assert [row[0] for row in named] == list(range(len(before)))
    assert made_.renumbered == sum(now != then for now, _, then in named) > 0
    assert max(int.from_bytes(each, "little") for each in found["#episode"]) < found["next"]


@pytest.mark.parametrize("at_once", [2, 1 << 14])
def test_of_a_part_the_episodes_are_told_of_which_it_has_rows(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_LISTED_AT_ONCE", at_once)
    play(tmp_path / "run", 1, 70)
    split(tmp_path / "run", [tmp_path / "old", tmp_path / "new"], count=9)
    told = []
    for part in ("old", "new"):
        found = load(tmp_path / part)
        named = json.loads((tmp_path / part / "ids.json").read_text())["episodes"]
        assert [row[0] for row in named] == sorted({int.from_bytes(each, "little") for each in found["#episode"]})
        told.append({(part, then) for _, part, then in named})
    assert told[0] - told[1]
    assert told[1] - told[0]


def test_rows_are_in_the_order_of_their_numbers_and_of_one_number_by_runs(tmp_path: Path) -> None:
    for run in (2, 10):
        play(tmp_path / f"rank_{run}", run, 20)
    merge([tmp_path / "rank_10", tmp_path / "rank_2"], tmp_path / "all")
    assert load(tmp_path / "all", 40)["id"] == [(run, t) for t in range(20) for run in (2, 10)]


def test_an_open_episode_goes_on_where_its_newest_row_is(tmp_path: Path) -> None:
    """And environments that clash are others then."""
    with made(tmp_path / "a", remove="stalest") as buffer:
        buffer.resume()
        for t in range(9):
            buffer.extend({**rows(1, t, 1), "terminated": np.zeros(1, bool)}, version=t // 3, env=t % 3)
        buffer.save(1, wait=True)
    split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=8)
    found = [load(tmp_path / name, remove="stalest") for name in "axy"]
    opened = [[(env, each["id"][at][1]) for env, at, *_ in each["open"]] for each in found]
    assert opened == [[(0, 6), (1, 7), (2, 8)], [(0, 6), (1, 7)], [(2, 8)]]
    with made(tmp_path / "b", remove="stalest") as buffer:
        buffer.resume()
        buffer.extend({**rows(2, 0, 4), "terminated": np.zeros(4, bool)}, env=2)
        buffer.save(1, wait=True)
    merge([tmp_path / "y", tmp_path / "b"], tmp_path / "m")
    named = json.loads((tmp_path / "m" / "ids.json").read_text())["environments"]
    assert [(now, Path(run).name, env) for now, run, env in named] == [(0, "y", 2), (1, "b", 2)]
    with made(tmp_path / "m", remove="stalest") as buffer:
        buffer.resume(continue_episodes=True)
        buffer.extend(rows(3, 0, 1), version=9, env=0)
        column = buffer.ring.storage.view
        slots = buffer.ring.slots(buffer.ring.keys())
        of = dict(zip(zip(column("run")[slots].tolist(), column("t")[slots].tolist(), strict=True), slots, strict=True))
        assert column("#episode")[of[3, 0]] == column("#episode")[of[1, 8]]
        assert column("#place")[of[3, 0]] == 3


@pytest.mark.parametrize("remove", REMOVERS)
def test_training_goes_on_with_what_was_merged(tmp_path: Path, remove: str) -> None:
    """Which row goes when a new one comes is what it would be of one pool that had had all of the rows."""
    options = {"remove": REMOVERS[remove], "select": PRIORITIZED["select"]}
    for run in (1, 2):
        play(tmp_path / str(run), run, 60, **options)
    merge([tmp_path / "1", tmp_path / "2"], tmp_path / "m")
    with made(tmp_path / "m", 2 * CAPACITY, **options) as buffer:
        buffer.resume()
        before = held(buffer)
        ring = buffer.ring
        keys = ring.keys()
        version = ring.storage.view("#version")[ring.slots(keys)].tolist()
        score = ring.storage.view("score")[ring.slots(keys)].tolist()
        buffer.extend(rows(9, 0, 5), version=9)
        gone = set(before["id"]) - set(held(buffer)["id"])
        buffer.save(9, wait=True)
        after = held(buffer)
    value = {"lifo": None, "stalest": version, "lowest_priority": before["mass"], "min": score}.get(remove)
    value = [-each for each in score] if remove == "max" else value
    if value is None:
        assert not gone
    else:
        lowest = [before["id"][at] for at in sorted(range(len(value)), key=lambda at: (value[at], at))]
        assert gone == set(lowest[: len(gone)])
        assert gone
    assert load(tmp_path / "m", 2 * CAPACITY, **options) == after
    again = merge([tmp_path / "m"], tmp_path / "n")  # it is a run of its own now
    assert [part.directory for part in again.made_of] == [str(tmp_path / "m")]
    assert load(tmp_path / "n", 2 * CAPACITY, **options) == after


def test_a_part_for_each_version_though_few_can_be_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "AT_ONCE", 2)
    before = play(tmp_path / "a", 1, 60)
    told: list[tuple[int, int]] = []
    parts = split(tmp_path / "a", tmp_path / "parts", by="version", told=lambda *done: told.append(done))
    assert [Path(each.directory).name for each in parts] == [f"version-{version}" for version in range(5)]
    for version, each in enumerate(parts):
        assert {int.from_bytes(own, "little") for own in load(Path(each.directory))["#version"]} == {version}
    merge([each.directory for each in parts], tmp_path / "back")
    assert load(tmp_path / "back") == before
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_without_a_second_folder_the_rest_is_left_out(tmp_path: Path) -> None:
    before = play(tmp_path / "a", 1, 60)
    (found,) = split(tmp_path / "a", [tmp_path / "some"], where="value >= 0 and t < 30")
    assert load(tmp_path / "some")["id"] == [(run, t) for run, t in before["id"] if t < 30]
    assert found.rows < CAPACITY


def test_a_condition_is_of_what_was_written_back(tmp_path: Path) -> None:
    with made(tmp_path / "a") as buffer:
        buffer.resume()
        fill(buffer, 1, 0, 20)
        buffer.save(1, wait=True)
        buffer.write_back(buffer.ring.keys()[[3, 5]], {"value": np.array([1e6, 1e6])})
        buffer.save(2, wait=True)
    split(tmp_path / "a", [tmp_path / "x"], where="value > 1e5")
    assert load(tmp_path / "x")["id"] == [(1, 3), (1, 5)]


def test_columns_stay_compressed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compress": {"image": "zlib"}}
    before = play(tmp_path / "a", 1, 60, **options)
    split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], where={"score": (">", 40)})
    merge([tmp_path / "x", tmp_path / "y"], tmp_path / "back")
    was = compressed(tmp_path / "a", "image")
    kept = compressed(tmp_path / "back", "image")
    assert kept == {which: was[which] for which in before["id"]}
    assert None not in kept.values()
    assert load(tmp_path / "back", **options) == before
    split(tmp_path / "a", [tmp_path / "z"], where=(lambda image: image[:, 0, 0] < 20, ["image"]))
    assert load(tmp_path / "z", **options)["id"] == [which for which in before["id"] if (1000 + which[1]) % 251 < 20]


def test_orders_that_differ_are_said(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 30)
    play(tmp_path / "b", 2, 30, remove="lifo")
    found = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    assert found.left_out["remove"].startswith("rows went in different orders: lifo; min of score")
    assert len(load(tmp_path / "m", 2 * CAPACITY, remove="lifo")["id"]) == 2 * CAPACITY


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 60)
    said = merge([tmp_path / "a"], tmp_path / "m", dry_run=True)
    parts = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=3, dry_run=True)
    ranked = reshard(tmp_path / "a", tmp_path / "r", 3, dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    found = merge([tmp_path / "a"], tmp_path / "m")
    assert (said.units, said.rows, said.run_id) == (found.units, found.rows, "")
    done = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=3)
    assert (
        [(each.units, each.rows) for each in parts] == [(each.units, each.rows) for each in done] == [(3, 3), (20, 20)]
    )
    assert ranked.shards == reshard(tmp_path / "a", tmp_path / "r", 3).shards == [8, 8, 7]


def test_what_a_buffer_has_to_be_built_with_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in "ab":
        play(tmp_path / run, ord(run), 60)
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "m")]) == 0
    shown = capsys.readouterr().out
    assert "holds     46 rows, " in shown
    assert "with capacity=46" in shown
    with made(tmp_path / "m") as buffer, pytest.raises(UsageError, match="was saved with capacity=46"):
        buffer.resume()
    assert len(load(tmp_path / "m", 46)["id"]) == 46
    assert split(tmp_path / "m", [tmp_path / "x"], count=3)[0].capacity == 46
    reshard(tmp_path / "m", tmp_path / "r", 2)
    for to, capacity in ((1, 46), (2, 46), (3, 46)):
        assert reshard(tmp_path / "r", tmp_path / f"r{to}", to).capacity == capacity
        assert (
            main(["reshard", str(tmp_path / "r"), "--to", str(to), "--out", str(tmp_path / "said"), "--dry-run"]) == 0
        )
        assert "holds     46 rows, " in capsys.readouterr().out


def test_pools_without_rows_are_no_trouble(tmp_path: Path) -> None:
    play(tmp_path / "none", 1, 0)
    before = play(tmp_path / "a", 1, 30)
    assert merge([tmp_path / "none"], tmp_path / "still none").rows == 0
    assert load(tmp_path / "still none")["id"] == []
    merge([tmp_path / "none", tmp_path / "a"], tmp_path / "m")
    assert load(tmp_path / "m")["id"] == before["id"]
    with ReplayBuffer(10, directory=tmp_path / "ring", seed=1) as buffer:
        buffer.resume()
        buffer.save(0, wait=True)
    merge([tmp_path / "ring", tmp_path / "a"], tmp_path / "n")
    assert load(tmp_path / "n")["id"] == before["id"]
    assert [each.rows for each in split(tmp_path / "still none", [tmp_path / "x", tmp_path / "y"], count=0)] == [0, 0]
    assert reshard(tmp_path / "still none", tmp_path / "r", 2).shards == [0, 0]


def test_an_empty_pool_does_not_say_how_rows_of_rings_lie(tmp_path: Path) -> None:
    play(tmp_path / "none", 1, 0)
    with ReplayBuffer(40, directory=tmp_path / "ring", seed=1) as buffer:
        buffer.resume()
        buffer.extend(rows(1, 0, 30))
        buffer.save(0, wait=True)
    merge([tmp_path / "none", tmp_path / "ring"], tmp_path / "m")
    with ReplayBuffer(40, directory=tmp_path / "m", seed=1) as buffer:
        assert buffer.resume().rows == 30
    assert main(["sample", str(tmp_path / "m"), "-n", "4"]) == 0


@pytest.mark.parametrize("what", ["merged", "resharded"])
def test_killed_at_any_call_it_leaves_no_run(tmp_path: Path, what: str) -> None:
    play(tmp_path / "a", 1, 60)
    play(tmp_path / "b", 2, 30)
    was = digest(tmp_path / "a"), digest(tmp_path / "b")
    make = merge_both if what == "merged" else reshard_one
    whole = ScriptedFiles()
    make(tmp_path, "whole", whole)
    assert verify(str(tmp_path / "whole")).whole
    for call in (*range(1, len(whole.calls) - 4, 7), len(whole.calls) - 4):
        files = ScriptedFiles(call, Killed, stays=True)
        with pytest.raises(Killed):
            make(tmp_path, f"out{call}", files)
        files.end()
        assert not (tmp_path / f"out{call}").exists()
    assert (digest(tmp_path / "a"), digest(tmp_path / "b")) == was


def merge_both(where: Path, out: str, files: Any) -> None:
    merge([where / "a", where / "b"], where / out, files=files)


def reshard_one(where: Path, out: str, files: Any) -> None:
    reshard(where / "a", where / out, 2, files=files)


class TestRefused:
    """With a message that says what to do, and before anything is written."""

    @pytest.fixture
    def two(self, tmp_path: Path) -> Path:
        play(tmp_path / "a", 1, 30)
        play(tmp_path / "b", 2, 30)
        return tmp_path

    def refused(self, where: Path, match: str, runs: list[str], kind: type[Exception] = ConfigError) -> None:
        before = sorted(path.name for path in where.iterdir())
        with pytest.raises(kind, match=match):
            merge([where / run for run in runs], where / "m")
        assert sorted(path.name for path in where.iterdir()) == before

    def test_a_pool_and_a_buffer_whose_oldest_rows_go_first(self, two: Path) -> None:
        with ReplayBuffer(40, directory=two / "ring") as buffer:
            buffer.resume()
            buffer.extend(rows(3, 0, 10))
            buffer.save(1, wait=True)
        for order in (["a", "ring"], ["ring", "a"]):
            self.refused(two, r"remove: .*/a was saved with remove='min', and .*/ring with remove='fifo'", order)

    def test_rows_that_two_runs_have_in_common(self, two: Path) -> None:
        split(two / "a", [two / "x", two / "y"], count=9)
        self.refused(two, "are copies or parts of one run", ["a", "x"])
        merge([two / "a", two / "b"], two / "ab")
        self.refused(two, r"row 0 of run \w+ \(.*/b\)", ["ab", "b"])

    def test_other_columns(self, two: Path) -> None:
        with made(two / "c", remove="lifo") as buffer:
            buffer.resume()
            buffer.extend({"run": np.zeros(3, np.int64), "other": np.zeros(3)})
            buffer.save(1, wait=True)
        self.refused(two, r"schema: column other: float64\[\] is in .*/c, and not in .*/a", ["a", "c"])

    def test_different_alphas(self, two: Path) -> None:
        play(two / "p", 1, 30, **PRIORITIZED)
        play(two / "q", 2, 30, remove="lowest_priority", select={"select": "prioritized", "alpha": 0.1, "beta": 0.4})
        self.refused(two, "different alphas", ["p", "q"], UsageError)

    def test_tasks_and_conditions_on_columns_that_are_not_there(self, two: Path) -> None:
        with pytest.raises(ConfigError, match="transitions are of no task"):
            split(two / "a", two / "parts", by="task")
        with pytest.raises(ConfigError, match="nothing"):
            split(two / "a", [two / "x"], where="nothing > 0")
        assert sorted(path.name for path in two.iterdir()) == ["a", "b"]

    def test_a_block_that_is_damaged(self, two: Path) -> None:
        segment = max((two / "a" / "segments").iterdir(), key=lambda path: path.stat().st_size)
        raw = bytearray(segment.read_bytes())
        raw[len(raw) // 2] ^= 1
        segment.write_bytes(raw)
        self.refused(two, segment.name, ["a", "b"], Damaged)
        with pytest.raises(Damaged, match=segment.name):
            reshard(two / "a", two / "r", 2)
        assert sorted(path.name for path in two.iterdir()) == ["a", "b"]


# -- ranks -------------------------------------------------------------------------------------------------------


def save_ranks(directory: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    """Have ranks save pools of which rows have gone, in two lives; return what each holds."""

    def train(ranks: Ranks, life: int) -> dict[str, Any]:
        with made(directory, ranks=ranks, **options) as buffer:
            buffer.resume()
            fill(buffer, 10 * life + ranks.rank, 0, 24 + 9 * ranks.rank)
            changed = buffer.ring.keys()[::3]
            buffer.write_back(changed, {"value": changed + 0.5})
            buffer.sample(8)
            buffer.save(life, wait=True)
            return held(buffer)

    for life in (1, 2):
        found = fine(on_ranks(size, partial(train, life=life)))
    return found


def resumed(
    directory: Path, size: int, capacity: int, *, rebalance: bool = False, **options: Any
) -> list[dict[str, Any]]:
    def live(ranks: Ranks) -> dict[str, Any]:
        with made(directory, capacity, ranks=ranks, **options) as buffer:
            step = buffer.resume(rebalance=rebalance).step
            there = held(buffer)
            draws = [buffer.sample(4).keys.tolist() for _ in range(3)] if len(buffer) else []
            return {**there, "step": step, "draws": draws}

    return fine(on_ranks(size, live))


def whole(of: list[dict[str, Any]]) -> dict[Any, Any]:
    """All rows, each of which is there once; how they end aside, as environments begin anew."""
    found = [content({**each, "#end": None}) for each in of]
    assert len({which for each in found for which in each}) == sum(map(len, found))
    return {which: row for each in found for which, row in each.items()}


@pytest.mark.parametrize("name", ["min-uniform", "lowest_priority-prioritized", "lifo-epoch_uses", "stalest-uses"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 1), (1, 4), (2, 2)], ids=str)
def test_as_if_the_ranks_had_done_it_themselves(tmp_path: Path, before: int, after: int, name: str) -> None:
    """Down to the next draws."""
    options = CHOICES[name]
    saved = save_ranks(tmp_path / "a", before, **options)
    was = digest(tmp_path / "a")
    found = reshard(tmp_path / "a", tmp_path / "b", after, rebalance=True)
    assert digest(tmp_path / "a") == was
    assert verify(str(tmp_path / "b")).whole
    capacity = max(CAPACITY, *found.shards)
    got = resumed(tmp_path / "b", after, capacity, **options)
    assert [len(each["id"]) for each in got] == found.shards
    assert max(found.shards) - min(found.shards) <= 1
    assert got == resumed(tmp_path / "a", after, capacity, rebalance=True, **options)
    assert whole(got) == whole(saved)


@pytest.mark.parametrize("name", ["max-prioritized", "lifo-uses"])
def test_there_and_back_nothing_is_lost(tmp_path: Path, name: str) -> None:
    options = CHOICES[name]
    saved = save_ranks(tmp_path / "0", 3, **options)
    for at, size in enumerate((1, 4, 2, 3)):
        found = reshard(tmp_path / str(at), tmp_path / str(at + 1), size)
    assert whole(resumed(tmp_path / "4", 3, max(3 * CAPACITY, *found.shards), **options)) == whole(saved)
    merge([tmp_path / "4"], tmp_path / "one")
    assert whole([load(tmp_path / "one", 3 * CAPACITY, **options)]) == whole(saved)


def test_shards_are_merged_and_split_and_one_process_is_resharded(tmp_path: Path) -> None:
    options = CHOICES["min-prioritized"]
    saved = save_ranks(tmp_path / "r", 3, **options)
    found = merge(tmp_path / "r", tmp_path / "one")
    assert [(part.shard, part.units) for part in found.made_of] == [(rank, CAPACITY) for rank in range(3)]
    one = load(tmp_path / "one", 3 * CAPACITY, **options)
    assert content(one) == {which: row for each in saved for which, row in content(each).items()}
    split(tmp_path / "r", [tmp_path / "x", tmp_path / "y"], fraction=0.4)
    merge([tmp_path / "y", tmp_path / "x"], tmp_path / "again")
    assert load(tmp_path / "again", 3 * CAPACITY, **options) == one
    made_ = reshard(tmp_path / "one", tmp_path / "two", 2)
    assert made_.shards == [35, 34]
    assert whole(resumed(tmp_path / "two", 2, 3 * CAPACITY, **options)) == whole(saved)


def test_ranks_go_on_and_what_comes_later_is_younger(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 60, remove="lifo")
    reshard(tmp_path / "a", tmp_path / "b", 2, capacity=40)

    def more(ranks: Ranks) -> None:
        with made(tmp_path / "b", 40, ranks=ranks, remove="lifo") as buffer:
            buffer.resume()
            fill(buffer, 50 + ranks.rank, 0, 9)
            buffer.save(9, wait=True)

    fine(on_ranks(2, more))
    for found in resumed(tmp_path / "b", 3, 40, remove="lifo"):
        later = [run >= 50 for run, _ in found["id"]]
        assert later == sorted(later)
        assert any(later)


def test_room(tmp_path: Path) -> None:
    saved = whole(save_ranks(tmp_path / "a", 3, remove="lifo"))
    with pytest.raises(ConfigError, match="capacity=20"):
        reshard(tmp_path / "a", tmp_path / "b", 2, capacity=20)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    hows: list[dict[str, Any]] = [{}, {"evict_oldest": True}]
    for how in hows:  # as many ranks keep what they have
        with pytest.raises(ConfigError, match=rf"capacity=20: .* was saved with capacity={CAPACITY}, .*--rebalance"):
            reshard(tmp_path / "a", tmp_path / "b", 3, capacity=20, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    found = reshard(tmp_path / "a", tmp_path / "b", 2, capacity=20, evict_oldest=True)
    assert found.shards == [20, 20]
    assert "oldest" in found.left_out["rows"]
    assert whole(resumed(tmp_path / "b", 2, 20, remove="lifo")).items() <= saved.items()
