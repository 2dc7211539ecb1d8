"""The buffer of several ranks of which blocks or shards are gone: every other row comes along, with its rank."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Damaged
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import SHARDS
from pipeline.cli import main
from pipeline.distributed import Ranks
from pipeline.replay.loading import Lost
from pipeline.replay.shards import read_shards
from pipeline.store.layout import Layout
from pipeline.tools.salvaging import SalvagedShards, salvage_run
from tests.support.disk import tree
from tests.support.ranks import fine, on_ranks
from tests.support.salvaging import flip as flip_byte
from tests.unit.test_replay_incomplete import content, fill
from tests.unit.test_replay_partial import (
    STEPS,
    Content,
    build,
    check_sequences,
    damage,
    rows_of_blocks,
    save,
)

SIZE = 3


def saved(directory: Path, size: int = SIZE, **more: Any) -> list[Content]:
    return fine(on_ranks(size, lambda ranks: save(directory, ranks, **more)))


def salvaged(directory: Path, target: Path, **more: Any) -> SalvagedShards:
    before = tree(str(directory))
    found = salvage_run(directory, target, **more)
    assert tree(str(directory)) == before
    assert isinstance(found, SalvagedShards)
    return found


def uids(directory: Path) -> list[int]:
    """The names of all episodes of the newest generation."""
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    newest = find_generations(layout, run.run_id).complete[-1]
    return [uid for shard in read_shards(newest) for uid in shard.table.uid.tolist()]


def loaded(directory: Path, size: int) -> list[Content]:
    """What each of some ranks has of it; they go on, and save."""

    def load(ranks: Ranks) -> Content:
        with build(directory, ranks, capacity=400) as buffer:
            assert buffer.resume().lost == Lost()
            left: Content = content(buffer)
            if left:
                check_sequences(buffer)
            fill(buffer, 4, seed=10 + ranks.rank)
            buffer.save(9, wait=True)
            return left

    found = fine(on_ranks(size, load))
    assert max(Counter(uids(directory)).values()) == 1, "two episodes have one name"
    assert verify(str(directory)).whole
    return found


@pytest.mark.parametrize("other", [SIZE, 2])
@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "several", "no shard", "changed values"])
def test_what_is_whole_comes_along_with_its_rank(tmp_path: Path, how: str, other: int) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    before = saved(run, keep=1)
    path = damage(run, how, rank=1)
    rehearsed = salvaged(run, out, rehearse=True)
    assert not out.exists()
    found = salvaged(run, out)
    assert (rehearsed.shards, rehearsed.losses, rehearsed.rows_lost) == (found.shards, found.losses, found.rows_lost)
    assert verify(str(out)).whole
    assert found.shards_lost == ([1] if how in ("no shard", "changed values") else [])
    assert found.losses
    assert all(str(run / loss.path).startswith(path) for loss in found.losses)
    each = loaded(out, other)
    left = {n: row for one in each for n, row in one.items()}
    gone = set(before[1]) - set(left)
    if how in ("flipped", "several"):
        assert gone == set(before[1]) & rows_of_blocks(STEPS, [2] if how == "flipped" else [1, 3], 1)
        assert found.episodes_split > 0
    elif how != "cut":
        assert gone == set(before[1])
    assert found.rows_lost == len(gone) > 0
    assert found.rows_kept == len(left) == sum(map(len, before)) - len(gone)
    if other == SIZE:
        assert [set(one) for one in each] == [set(before[0]), set(before[1]) - gone, set(before[2])]
        assert found.shards == [len(one) for one in each]
    every = {n: row for one in before for n, row in one.items()}
    assert {n: row[:4] + row[5:] for n, row in left.items()} == {n: every[n][:4] + every[n][5:] for n in left}


@pytest.mark.parametrize("policy", ["keep", "truncate", "drop"])
def test_it_holds_what_a_partial_resume_holds(tmp_path: Path, policy: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved(run, keep=1, policy=policy)
    for rank, how in enumerate(("several", "cut", "flipped")):
        damage(run, how, rank)
    salvaged(run, out)

    def partial(ranks: Ranks) -> Any:
        with build(run, ranks, capacity=400) as buffer:
            buffer.resume(allow_partial=True)
            return content(buffer)

    theirs = fine(on_ranks(SIZE, partial))
    assert {n: row for one in loaded(out, SIZE) for n, row in one.items()} == {
        n: row for one in theirs for n, row in one.items()
    }


def test_parts_of_episodes_get_names_that_no_episode_has(tmp_path: Path) -> None:
    """Where all episodes of the run are still there, from the first one on."""
    run, out = tmp_path / "run", tmp_path / "out"
    saved(run, 2, capacity=400)
    damage(run, "several", rank=0)
    damage(run, "flipped", rank=1)
    assert salvaged(run, out).episodes_split > 2
    named = Counter(uids(out))
    assert max(named.values()) == 1, named
    loaded(out, 2)


def test_of_whole_shards_everything_comes_along(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    before = saved(run)
    found = salvaged(run, out)
    assert (found.whole, found.rows_lost, found.episodes_split) == (True, 0, 0)
    assert [set(one) for one in loaded(out, SIZE)] == [set(one) for one in before]


def test_an_older_generation_is_taken_where_it_has_all_shards(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved(run, keep=3)
    damage(run, "no shard", rank=1)
    found = salvaged(run, out)
    assert (found.step, found.shards_lost, found.rows_lost) == (3, [], 0)
    assert (found.generations_usable, found.generations_unusable) == (3, 0)
    newest = salvaged(run, tmp_path / "newest", step=4)
    assert (newest.step, newest.shards_lost, newest.shards[1]) == (4, [1], 0)


def test_without_any_shard_there_is_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "run", keep=1)
    for rank in range(SIZE):
        damage(tmp_path / "run", "no shard", rank)
    with pytest.raises(Damaged, match="no generation says how the buffer stood"):
        salvage_run(tmp_path / "run", tmp_path / "out")


class Own:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "array": np.full(100, self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = int(state["value"])


@pytest.mark.parametrize("hurt", ["nothing", "own", "model", "shard", "values"])
def test_what_was_attached_comes_along_where_it_is_whole(tmp_path: Path, hurt: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"

    def live(directory: Path, ranks: Ranks, *, first: bool) -> Any:
        own, model = Own(10 + ranks.rank if first else 0), Own(99 if first else 0)
        with build(directory, ranks, keep=1) as buffer:
            buffer.attach_own(own=own)
            buffer.attach(**({"model": model} if first or hurt != "model" else {}))
            buffer.resume()
            if first:
                fill(buffer, 9, seed=ranks.rank)
                buffer.save(1, wait=True)
            return own.value, model.value

    fine(on_ranks(2, lambda ranks: live(run, ranks, first=True)))
    (folder,) = (run / "generations").iterdir()
    if hurt == "own":
        flip_byte(folder / "shards" / "0001" / "own" / "own.safetensors", 200)
    elif hurt == "model":
        flip_byte(folder / "trainer" / "model.safetensors", 200)
    elif hurt == "shard":
        damage(run, "no shard", 1)
    elif hurt == "values":
        damage(run, "changed values", 1)
    found = salvaged(run, out)
    assert found.rows_lost == (27 if hurt in ("shard", "values") else 0)
    there = fine(on_ranks(2, lambda ranks: live(out, ranks, first=False)))
    owned = [(10, 11) if hurt in ("nothing", "model", "values") else (0, 0)]
    assert [tuple(own for own, _ in there)] == owned
    assert [model for _, model in there] == [0 if hurt == "model" else 99] * 2


def test_rows_whose_next_observation_is_gone_are_left_out(tmp_path: Path) -> None:
    """Episodes of 10 rows, in blocks of 6, which share them; and all rows of a rank are gone."""
    run, out = tmp_path / "run", tmp_path / "out"

    def fill_shared(ranks: Ranks) -> None:
        with build(run, ranks, share_next_obs=True, keep=1) as buffer:
            buffer.resume()
            for number in range(5):
                n = 100 * ranks.rank + np.arange(6 * number, 6 * number + 6)
                buffer.extend({"n": n, "obs": n / 2, "next_obs": (n + 1) / 2, "done": n % 10 == 9})
                buffer.save(number, wait=True)

    fine(on_ranks(SIZE, fill_shared))
    damage(run, "flipped", 0)  # rows 12 to 17
    damage(run, "several", 1)  # 6 to 11, and 18 to 23
    damage(run, "missing", 2)
    found = salvaged(run, out)
    gone = [{11, *range(12, 18)}, {5, *range(6, 12), 17, *range(18, 24)}, set(range(30))]
    assert found.rows_lost == sum(map(len, gone))
    assert found.losses[-1].lost == "3 rows before gaps"

    def load(ranks: Ranks) -> tuple[list[int], list[float]]:
        with build(out, ranks, share_next_obs=True, returns="numpy") as buffer:
            buffer.resume()
            keys = buffer.ring.keys()
            assert buffer.next_obs is not None
            if not len(keys):
                return [], []
            n = buffer.ring.storage.view("n")[buffer.ring.slots(keys)].tolist()
            return n, buffer.next_obs.gather(keys, ["next_obs"])["next_obs"].tolist()

    for rank, (n, nexts) in enumerate(fine(on_ranks(SIZE, load))):
        assert n == [100 * rank + at for at in range(30) if at not in gone[rank]]
        assert nexts == [(each + 1) / 2 for each in n]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved(run)
    damage(run, "flipped", rank=2)
    assert main(["salvage", str(run), str(out), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert main(["salvage", str(run), str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"kept         {told['rows_kept']} rows, and {told['rows_lost']} are lost\n" in shown
    assert f"ranks        0: {told['shards'][0]}, 1: {told['shards'][1]}, 2: {told['shards'][2]}\n" in shown
    assert "of rank 2" in shown
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == SHARDS
    assert main(["salvage", str(out), str(tmp_path / "again")]) == 0
    assert "Nothing was lost." in capsys.readouterr().out
