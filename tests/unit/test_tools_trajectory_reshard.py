"""Resharding buffers of trajectories: what N ranks then resume is what they would have resumed of the M shards."""

from __future__ import annotations

import itertools
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import Ranks, TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.checkpoint.manifest import MANIFEST_FILE, TRAJECTORY_SHARDS, encode_manifest
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.trajectory_shards import read_trajectory_shards
from pipeline.store.files import OsFiles
from pipeline.tools import inspect, merge, reshard, salvage_run, split
from tests.support.keeping import digest
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter
from tests.support.trajectories import draws, trajectory
from tests.unit.test_trajectory_ranks import add, damage, held, made, newest, number_of, save_some, segment_of, shared

SIZES = [(2, 3), (3, 2), (4, 1), (1, 4), (3, 3)]


def train(directory: Path, size: int, lives: int = 2) -> None:
    """Save on ``size`` ranks in several lives; in the last one, nothing is saved."""

    def live(ranks: Ranks, life: int) -> None:
        with made(directory, ranks, capacity=12, auto_save=True) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.attach_own(own=(own := Counter()))
            buffer.resume()
            add(buffer, 10 * life + ranks.rank, range(6 + 3 * ranks.rank))
            draws(buffer, 1 + ranks.rank)
            counter.step, own.step = 10 + life, 20 + ranks.rank
            if life < lives:
                buffer.save(life, wait=True)

    for life in range(1, lives + 1):
        fine(on_ranks(size, partial(live, life=life)))


def resumed(directory: Path, size: int, *, own: bool = False, **how: Any) -> list[dict[str, Any]]:
    """Everything that so many ranks have, in a copy of the run; and what they have when they have gone on."""
    copy = directory.parent / f"{directory.name} of {size}"
    shutil.copytree(directory, copy)

    def live(ranks: Ranks) -> dict[str, Any]:
        with made(copy, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.attach_own(**({"own": Counter()} if own else {}))
            found = buffer.resume(**how)
            state = buffer.state_dict()["state"]
            had = {
                "held": held(buffer),
                "numbers": [info.trajectory_id for info in buffer.infos()],
                "state": {name: state[name] for name in ("size", "total_samples", "trajectory_counter", "generator")},
                "step": (found.step, counter.step),
                "draws": draws(buffer, 5) if len(buffer) else [],
            }
            add(buffer, 90 + ranks.rank, range(2))
            buffer.save(99, wait=True)
            return had

    found = fine(on_ranks(size, live))
    assert verify(str(copy)).whole
    for each, shard in zip(found, read_trajectory_shards(newest(copy)), strict=True):
        each["names"] = [shard.table.uid.tolist(), shard.table.age.tolist()]
    shutil.rmtree(copy)
    names = [uid for each in found for uid in each["names"][0]]
    assert len(set(names)) == len(names)
    return found


@pytest.mark.parametrize(("before", "after"), SIZES, ids=str)
def test_as_if_the_ranks_had_done_it_themselves(tmp_path: Path, before: int, after: int) -> None:
    """Down to the next draws, and what is added next is called."""
    train(tmp_path / "a", before, lives=3)
    was = digest(tmp_path / "a")
    how: dict[str, Any] = {"rebalance": True} if before == after else {}
    dry = reshard(tmp_path / "a", tmp_path / "b", after, dry_run=True, **how)
    assert not (tmp_path / "b").exists()
    told: list[tuple[int, int]] = []
    found = reshard(tmp_path / "a", tmp_path / "b", after, told=lambda *each: told.append(each), **how)
    assert digest(tmp_path / "a") == was
    assert verify(str(tmp_path / "b")).whole
    assert (dry.units, dry.rows, dry.shards, dry.bytes) == (found.units, found.rows, found.shards, found.bytes)
    assert (found.kind, found.step, len(found.shards)) == (TRAJECTORY_SHARDS, 2, after)
    assert told[-1][0] == told[-1][1] > 0
    assert list(found.left_out) == ["own/own.safetensors"]
    mine, theirs = resumed(tmp_path / "b", after), resumed(tmp_path / "a", after, own=before == after, **how)
    assert mine == theirs
    assert [each["state"]["total_samples"] for each in mine] == found.shards
    assert found.linked == found.bytes
    assert {path.stat().st_nlink for path in (tmp_path / "b" / "segments").iterdir()} == {2}


def test_as_many_ranks_keep_every_bit(tmp_path: Path) -> None:
    train(tmp_path / "a", 3)
    found = reshard(tmp_path / "a", tmp_path / "b", 3)
    assert (found.left_out, found.linked) == ({}, found.bytes)
    assert (found.units, found.rows) == (6 + 9 + 12, sum(found.shards))
    assert verify(str(tmp_path / "b")).whole

    def live(ranks: Ranks, directory: Path) -> Any:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.attach_own(own=(own := Counter()))
            buffer.resume()
            return buffer.state_dict()["state"], held(buffer), draws(buffer, 10), own.step

    one, other = (fine(on_ranks(3, partial(live, directory=tmp_path / name))) for name in "ab")
    assert one == other
    assert [own for *_, own in one] == [20, 21, 22]


def test_in_any_number_of_steps(tmp_path: Path) -> None:
    """R14: 4 -> 3 -> 4 is 4 -> 4 shared out anew."""
    train(tmp_path / "a", 4)
    reshard(tmp_path / "a", tmp_path / "three", 3)
    reshard(tmp_path / "three", tmp_path / "four", 4)
    reshard(tmp_path / "a", tmp_path / "anew", 4, rebalance=True)
    through, at_once = (resumed(tmp_path / name, 4) for name in ("four", "anew"))
    assert [each["held"] for each in through] == [each["held"] for each in at_once]
    assert [each["numbers"] for each in through] == [each["numbers"] for each in at_once]
    came = [[names[:-2] for names in each["names"]] for each in through]  # but for what was added since
    assert came == [[names[:-2] for names in each["names"]] for each in at_once]


@pytest.mark.parametrize("to", [1, 2, 5])
def test_of_one_process_for_ranks_and_back(tmp_path: Path, to: int) -> None:
    with TrajectoryBuffer(directory=tmp_path / "a", seed=5, capacity=9) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume()
        for number in range(14):
            buffer.add_trajectories([trajectory(number, 1 + number % 5, 1 + number % 3)])
        buffer.save(1, wait=True)
    found = reshard(tmp_path / "a", tmp_path / "b", to)
    assert found.units == 9
    each = resumed(tmp_path / "b", to)
    assert [one["held"] for one in each] == shared([list(range(5, 14))], to)
    assert sum(one["state"]["trajectory_counter"] for one in each) == 14
    added = [one["names"][1][-2:] for one in each]
    assert min(age for ages in added for age in ages) == 14, "what comes is newer than all that was there"
    merge([tmp_path / "b"], tmp_path / "c")
    with TrajectoryBuffer(directory=tmp_path / "c", cache_size=3) as buffer:
        buffer.resume()
        assert sorted(held(buffer)) == list(range(5, 14))


def test_a_merge_and_parts_of_a_split_come_to_ranks(tmp_path: Path) -> None:
    saved = save_some(tmp_path / "a", 2)
    every = sorted(number for each in saved for number in each)
    merge([tmp_path / "a"], tmp_path / "m")
    one, other = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=6)
    for name in ("m", "x", "y"):
        reshard(tmp_path / name, tmp_path / f"{name}3", 3)
        assert verify(str(tmp_path / f"{name}3")).whole
    found = {name: [each["held"] for each in resumed_of(tmp_path / f"{name}3")] for name in ("m", "x", "y")}
    assert sorted(itertools.chain(*found["m"])) == every
    assert sorted([*itertools.chain(*found["x"]), *itertools.chain(*found["y"])]) == every
    assert (one.units, other.units) == (6, len(every) - 6)


def resumed_of(directory: Path, size: int = 3) -> list[dict[str, Any]]:
    """What so many ranks have, nothing being attached."""

    def live(ranks: Ranks) -> dict[str, Any]:
        with made(directory, ranks) as buffer:
            buffer.resume()
            return {"held": held(buffer), "ready": buffer.ready()}

    return fine(on_ranks(size, live))


def test_fewer_trajectories_than_ranks_and_none(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 1, 2)
    assert len(reshard(tmp_path / "a", tmp_path / "b", 3).shards) == 3
    assert [len(each["held"]) for each in resumed(tmp_path / "b", 3)] == [1, 1, 0]
    with TrajectoryBuffer(directory=tmp_path / "none") as buffer:
        buffer.resume()
        buffer.save(1, wait=True)
    assert reshard(tmp_path / "none", tmp_path / "none2", 2).shards == [0, 0]
    assert verify(str(tmp_path / "none2")).whole
    assert resumed_of(tmp_path / "none2", 2) == [{"held": [], "ready": False}] * 2


def test_room(tmp_path: Path) -> None:
    saved = save_some(tmp_path / "a", 3)  # 7, 8 and 9
    with pytest.raises(ConfigError, match=r"capacity=10: the shards hold 24 episodes"):
        reshard(tmp_path / "a", tmp_path / "b", 2, capacity=10)
    hows: list[dict[str, Any]] = [{}, {"evict_oldest": True}]
    for how in hows:  # as many ranks keep what they have
        with pytest.raises(ConfigError, match=r"capacity=8: .*a: rank 2 has 9 trajectories, .*--rebalance"):
            reshard(tmp_path / "a", tmp_path / "b", 3, capacity=8, **how)
    assert (
        reshard(tmp_path / "a", tmp_path / "same", 3, capacity=9).shards
        == reshard(tmp_path / "a", tmp_path / "plain", 3).shards
    )
    found = reshard(tmp_path / "a", tmp_path / "b", 2, capacity=10, evict_oldest=True)
    gone = 24 - found.units
    assert 4 <= gone <= 9
    assert found.left_out["trajectories"].startswith(f"no room for the {gone} oldest, ")
    aged = [number for _, number in sorted((at, each) for of in saved for at, each in enumerate(of))]
    each = resumed(tmp_path / "b", 2)
    assert sorted(itertools.chain(*(one["held"] for one in each))) == sorted(aged[gone:])
    assert each == resumed_with_room(tmp_path / "a")


def resumed_with_room(directory: Path) -> list[dict[str, Any]]:
    copy = directory.parent / "a with room"
    reshard(directory, copy, 2, capacity=10, evict_oldest=True)
    return resumed(copy, 2)


def test_what_nobody_needs_any_more_does_not_come(tmp_path: Path) -> None:
    """Where the oldest go, so do the files in which only they lay; and what is removed here stays there."""
    train(tmp_path / "a", 2, lives=3)
    found = reshard(tmp_path / "a", tmp_path / "b", 2, capacity=3, evict_oldest=True, rebalance=True)
    assert 4 <= found.units <= 6
    before, after = ({info.name for info in newest(tmp_path / name).manifest.segments} for name in "ab")
    assert after < before
    assert verify(str(tmp_path / "b")).whole
    there = {path.name for path in (tmp_path / "a" / "segments").iterdir()}
    was = digest(tmp_path / "a")

    def live(ranks: Ranks) -> None:
        with made(tmp_path / "b", ranks, keep=1, capacity=4) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            for step in range(3, 6):
                add(buffer, 50 + 10 * step + ranks.rank, range(4))
                buffer.save(step, wait=True)

    fine(on_ranks(2, live))
    assert not there & {path.name for path in (tmp_path / "b" / "segments").iterdir()}
    assert digest(tmp_path / "a") == was


class NoLinks(OsFiles):
    def link(self, old: str, new: str) -> None:
        raise OSError(18, "Invalid cross-device link")


def test_where_no_link_can_be_it_is_copied(tmp_path: Path) -> None:
    train(tmp_path / "a", 2)
    found = reshard(tmp_path / "a", tmp_path / "b", 3, files=NoLinks())
    assert found.linked == 0
    assert resumed(tmp_path / "b", 3) == resumed(tmp_path / "a", 3)


def test_a_segment_that_somebody_may_write_in_is_copied(tmp_path: Path) -> None:
    with TrajectoryBuffer(directory=tmp_path / "a") as buffer:
        buffer.resume()
        buffer.add_trajectories([trajectory(number, 1 + number % 5, 1 + number % 3) for number in (1, 2)])
        buffer.save(1, wait=True)
        assert reshard(tmp_path / "a", tmp_path / "b", 2).linked == 0
        buffer.add_trajectories([trajectory(3)])
        buffer.save(2, wait=True)
    assert [each["held"] for each in resumed_of(tmp_path / "b", 2)] == [[1], [2]]


@pytest.mark.parametrize("to", [2, 3])
@pytest.mark.parametrize(
    "what",
    ["a segment is gone", "a segment is cut", "a header", "a shard is gone", "a byte of the names", "the trainer"],
)
def test_damage_is_told_with_the_file_and_nothing_is_made(tmp_path: Path, what: str, to: int) -> None:
    save_some(tmp_path / "a", 2)
    if what == "a segment is cut":
        path = segment_of(tmp_path / "a")
        os.truncate(path, path.stat().st_size // 2)
    elif what == "a header":
        path = segment_of(tmp_path / "a")
        (block, *_) = read_trajectory_shards(newest(tmp_path / "a"))[0].blocks
        raw = bytearray(path.read_bytes())
        raw[block.offset + 4] ^= 1
        path.write_bytes(raw)
    elif what == "the trainer":
        path = Path(newest(tmp_path / "a").folder) / "trainer" / "counter.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path = damage(what, tmp_path / "a")
    with pytest.raises(Damaged, match=str(path)):
        reshard(tmp_path / "a", tmp_path / "b", to)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_payload_is_not_read_and_its_damage_found_where_it_comes(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 2)
    damage("a byte of a payload", tmp_path / "a")
    reshard(tmp_path / "a", tmp_path / "b", 3)
    assert not verify(str(tmp_path / "b")).whole

    def partly(ranks: Ranks, directory: Path) -> Any:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=Counter())
            lost = buffer.resume(allow_partial=True).lost
            return lost.rows, lost.episodes, held(buffer)

    found = [fine(on_ranks(3, partial(partly, directory=tmp_path / name))) for name in "ab"]
    assert found[0] == found[1]
    assert found[0][0][1] == 1


def test_runs_of_which_one_was_made_of_the_other_are_not_merged(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 2)
    for name, to in (("b", 3), ("c", 2), ("d", 1)):
        reshard(tmp_path / "a", tmp_path / name, to)
    reshard(tmp_path / "b", tmp_path / "e", 4)
    save_some(tmp_path / "other", 2, 3)
    for one, other in itertools.combinations("abcde", 2):
        with pytest.raises(ConfigError, match=r"would be there twice\. Leave one of them out"):
            merge([tmp_path / one, tmp_path / other], tmp_path / "m")
    (part,) = newest(tmp_path / "b").manifest.made_of
    assert (part.directory, part.generation, part.kind) == (str(tmp_path / "a"), 0, TRAJECTORY_SHARDS)
    for name in "abcde":
        assert merge([tmp_path / name, tmp_path / "other"], tmp_path / "m").units == 15 + 7
        shutil.rmtree(tmp_path / "m")
    split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=5)
    reshard(tmp_path / "x", tmp_path / "x2", 2)
    with pytest.raises(ConfigError, match="would be there twice"):
        merge([tmp_path / "x2", tmp_path / "a"], tmp_path / "m")
    assert merge([tmp_path / "x2", tmp_path / "y"], tmp_path / "m").units == 15
    salvage_run(tmp_path / "y", tmp_path / "s")
    with pytest.raises(ConfigError, match="would be there twice"):
        merge([tmp_path / "b", tmp_path / "s"], tmp_path / "n")


def test_what_is_refused(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 2)
    for to, match in ((0, "to=0"), (4097, "to=4097: 4096 ranks at the most")):
        with pytest.raises(ConfigError, match=match):
            reshard(tmp_path / "a", tmp_path / "b", to)
    reshard(tmp_path / "a", tmp_path / "b", 2)
    with pytest.raises(ConfigError, match="must be absent or an empty folder"):
        reshard(tmp_path / "a", tmp_path / "b", 3)
    stored = newest(tmp_path / "a")
    odd = msgspec.structs.replace(stored.manifest, kind="odd things")
    Path(stored.folder, MANIFEST_FILE).write_bytes(encode_manifest(odd))
    with pytest.raises(ConfigError, match="a: holds 'odd things', which this version does not know"):
        reshard(tmp_path / "a", tmp_path / "c", 3)
    assert not (tmp_path / "c").exists()


def test_by_command_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save_some(tmp_path / "a", 2)
    out = str(tmp_path / "b")
    assert main(["reshard", str(tmp_path / "a"), "--to", "3", "--out", out]) == 0
    shown = capsys.readouterr().out
    rows = [each.rows for each in inspect(out).buffers]
    assert f"{out}: trajectory shards, step 1\n  holds     15 trajectories, {sum(rows)} rows, " in shown
    assert f"  ranks     3; rows of each: {', '.join(map(str, rows))}\n" in shown
    assert [each.episodes for each in inspect(out).buffers] == list(map(len, shared(saved, 3)))
    assert main(["status", out]) == 3
    assert "holds     15 trajectories" in capsys.readouterr().out
    assert number_of(1, 0) in shared(saved, 3)[1]
