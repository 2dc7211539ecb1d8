"""Merging and splitting buffers of trajectories that ranks have: what comes of it is the run of one process."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Ranks, ReplayBuffer, TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.checkpoint.manifest import SHARDS, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.trajectory_shards import TrajectoriesOnDisk, read_trajectory_shards
from pipeline.store.layout import Layout
from pipeline.tools import inspect, merge, split
from tests.support.keeping import digest
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter
from tests.support.trajectories import check, trajectory
from tests.unit.test_trajectory_ranks import add, damage, held, made, newest, number_of, save_some

RUN = Path(__file__).parents[1] / "golden" / "trajectory_shards_v1" / "run"


def one_after_the_other(shards: list[list[int]]) -> list[int]:
    """The order of ids: by number, of one number one rank after the other; all begin at number 0."""
    return [
        each for _, _, each in sorted((at, rank, each) for rank, of in enumerate(shards) for at, each in enumerate(of))
    ]


def load(directory: Path) -> list[int]:
    """Which trajectories the run of one process has, each of them read and compared."""
    found = verify(str(directory))
    assert found.whole, found.damages
    with TrajectoryBuffer(directory=directory, sample_window_size=0, cache_size=3) as buffer:
        buffer.resume()
        if len(buffer):
            check(buffer.sample(40))
        return held(buffer)


def go_on(directory: Path, size: int, step: int, **how: Any) -> list[list[int]]:
    """Have so many ranks go on, add two trajectories each, and save; return by rank which they have."""

    def train(ranks: Ranks) -> list[int]:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume(**how)
            add(buffer, 10 * step + ranks.rank, range(2))
            buffer.save(step, wait=True)
            return held(buffer)

    return fine(on_ranks(size, train))


def on_disk(directory: Path) -> list[TrajectoriesOnDisk]:
    return read_trajectory_shards(newest(directory))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_of_them_in_the_order_of_their_numbers(tmp_path: Path, size: int) -> None:
    saved = save_some(tmp_path / "a", size)
    was = digest(tmp_path / "a")
    told: list[tuple[int, int]] = []
    dry = merge([tmp_path / "a"], tmp_path / "m", dry_run=True)
    assert not (tmp_path / "m").exists()
    found = merge([tmp_path / "a"], tmp_path / "m", told=lambda done, total: told.append((done, total)))
    assert digest(tmp_path / "a") == was
    want = one_after_the_other(saved)
    assert load(tmp_path / "m") == want
    assert (found.kind, found.units, found.step) == (TRAJECTORIES, len(want), 1)
    assert (dry.units, dry.rows, dry.renumbered) == (found.units, found.rows, found.renumbered)
    assert told[-1] == (found.bytes, found.bytes)
    assert found.linked == (found.bytes if size == 1 else 0)  # where numbers stay, files do
    assert found.left_out == {"trainer/counter.safetensors": "state of the trainer, which is neither merged nor split"}
    ids = json.loads((tmp_path / "m" / "ids.json").read_text())
    assert [number_of(rank, at) for _, rank, at in ids["trajectories"]] == want
    assert [number for number, _, _ in ids["trajectories"]] == list(range(len(want)))
    assert [(part.shard, part.units) for part in found.made_of] == [(at, len(of)) for at, of in enumerate(saved)]
    run, came = (Layout(str(tmp_path / name)).read_run() for name in "am")
    assert run is not None
    assert came is not None
    assert [(way.run_id, way.named) for way in came.made_of] == [(run.run_id, run.run_id)]


@pytest.mark.parametrize("how", [{"count": 5}, {"count": 0}, {"fraction": 0.4}, {"by": "version"}], ids=str)
def test_what_was_split_and_merged_is_what_a_merge_of_it_is(tmp_path: Path, how: dict[str, Any]) -> None:
    want = one_after_the_other(save_some(tmp_path / "a", 3))
    was = digest(tmp_path / "a")
    places = [tmp_path / "parts"] if "by" in how else [tmp_path / "x", tmp_path / "y"]
    found = split(tmp_path / "a", places, **how)
    assert digest(tmp_path / "a") == was
    parts = [load(Path(each.directory)) for each in found]
    if "by" in how:
        assert [Path(each.directory).name for each in found] == ["version-w0", "version-w1", "version-w2"]
        assert parts == [[each for each in want if each % 3 == weights] for weights in range(3)]
    else:
        first = how.get("count", int(0.4 * len(want)))
        assert parts == [want[:first], want[first:]]
    back = merge([each.directory for each in found], tmp_path / "back")
    assert load(tmp_path / "back") == want
    assert [part.shard for part in back.made_of] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"trajectory \d+ of run .* copies or parts"):
        merge([next(each.directory for each in found if each.units), tmp_path / "a"], tmp_path / "no")


def test_the_grouping_does_not_matter_nor_who_saved_them(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 2)
    shutil.copytree(RUN, tmp_path / "b")
    with TrajectoryBuffer(directory=tmp_path / "c") as buffer:
        buffer.resume()
        buffer.add_trajectories([trajectory(number, 1 + number % 5, 1 + number % 3) for number in range(900, 905)])
        buffer.save(2, wait=True)
    save_some(tmp_path / "d", 3, 4)
    a, b, c, d = (tmp_path / name for name in "abcd")
    with pytest.raises(
        ConfigError, match=r"schema: field curr_obs.image: uint8\[1100\] is in .*b, shard 0, and not in .*a, shard 0"
    ):
        merge([a, b], tmp_path / "no")
    merge([d, a, c], tmp_path / "at once")
    merge([merge([a, c], tmp_path / "ac").directory, d], tmp_path / "left")
    merge([merge([c, d], tmp_path / "cd").directory, a], tmp_path / "right")
    found = [load(tmp_path / name) for name in ("at once", "left", "right")]
    assert found[0] == found[1] == found[2]
    # Of the first number one of each rank of `a`, the first of `c`, and one of each rank of `d`.
    assert found[0][:6] == [number_of(0, 0), number_of(1, 0), 900, *(number_of(rank, 0) for rank in range(3))]
    assert sum(each.is_dir() for each in tmp_path.iterdir()) == 9


def test_what_was_saved_by_other_ranks_before(tmp_path: Path) -> None:
    """Payloads say other numbers than they have now, and two ranks need one segment."""
    save_some(tmp_path / "a", 3)
    go_on(tmp_path / "a", 2, 2)
    shards = go_on(tmp_path / "a", 4, 3)
    one, other = ({block.segment_key for block in shard.blocks} for shard in on_disk(tmp_path / "a")[:2])
    assert one & other
    merge([tmp_path / "a"], tmp_path / "m")
    found = load(tmp_path / "m")
    assert sorted(found) == sorted(each for shard in shards for each in shard)
    place = {each: at for at, each in enumerate(found)}
    for shard in shards:
        places = [place[each] for each in shard]
        assert places == sorted(places), "the order of a rank is kept"
    first, rest = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=9)
    assert load(Path(first.directory)) + load(Path(rest.directory)) == found


def test_a_segment_of_which_another_rank_needs_a_part_is_no_whole_one(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 1, 2)

    def share_out(ranks: Ranks) -> None:
        with made(tmp_path / "a", ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            buffer.save(2, wait=True)

    fine(on_ranks(2, share_out))
    parts = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=1)
    assert [each.linked for each in parts] == [0, 0]
    assert [load(Path(each.directory)) for each in parts] == [[number_of(0, 0)], [number_of(0, 1)]]


def test_bits_that_are_no_numbers_stay(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00123, -0x80000000, 0x7F800001, 5], dtype=torch.int64).to(torch.int32).view(torch.float32)

    def save(ranks: Ranks) -> None:
        with made(tmp_path / "a", ranks) as buffer:
            buffer.resume()
            buffer.add_trajectories([{"rewards": odd.reshape(2, 2), "half": odd.reshape(2, 2).bfloat16()}] * 2)
            buffer.save(1, wait=True)

    fine(on_ranks(2, save))
    merge([tmp_path / "a"], tmp_path / "m")
    with TrajectoryBuffer(directory=tmp_path / "m") as buffer:
        buffer.resume()
        rows = buffer.state_dict()["rows"]
    assert np.asarray(rows["rewards"]).tobytes() == 4 * odd.numpy().tobytes()
    assert np.asarray(rows["half"]).tobytes() == 4 * odd.bfloat16().view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("what", ["a segment is gone", "a byte of a payload", "a shard is gone", "a byte of the names"])
def test_damage_is_told_with_the_file_and_nothing_is_made(tmp_path: Path, what: str) -> None:
    save_some(tmp_path / "a", 2)
    path = damage(what, tmp_path / "a")
    for verb in (
        lambda: merge([tmp_path / "a"], tmp_path / "m"),
        lambda: split(tmp_path / "a", [tmp_path / "m"], count=15),
    ):
        with pytest.raises(Damaged, match=str(path)):
            verb()
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_what_is_refused(tmp_path: Path) -> None:
    save_some(tmp_path / "a", 2)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with ReplayBuffer(10, directory=tmp_path / "rows") as buffer:
        buffer.resume()
        buffer.extend({"obs": np.arange(3.0)})
        buffer.save(1, wait=True)
    before = sorted(tmp_path.iterdir())
    for runs, match in (
        (["a", "copy"], "trajectory 0 of run .* copies or parts"),
        (["rows", "a"], "a is the run of a buffer of trajectories, and .*rows that of a replay buffer"),
    ):
        with pytest.raises(ConfigError, match=match):
            merge([tmp_path / run for run in runs], tmp_path / "m")
    with pytest.raises(ConfigError, match="of no task"):
        split(tmp_path / "a", tmp_path / "m", by="task")
    assert sorted(tmp_path.iterdir()) == before


def save_with_own(ranks: Ranks, directory: Path, kind: str) -> None:
    of: dict[str, Any] = {"directory": directory, "ranks": ranks}
    with ReplayBuffer(20, **of) if kind == SHARDS else TrajectoryBuffer(**of) as buffer:
        buffer.attach_own(mine=Counter())
        buffer.resume()
        if isinstance(buffer, ReplayBuffer):
            buffer.extend({"obs": np.arange(3.0), "terminated": np.arange(3) == 2})
        else:
            buffer.add_trajectories([{"rewards": torch.zeros(2, 2)}])
        buffer.save(1, wait=True)


@pytest.mark.parametrize("kind", [SHARDS, TRAJECTORY_SHARDS])
def test_what_a_rank_had_for_itself_is_said_to_be_left_out(tmp_path: Path, kind: str) -> None:
    fine(on_ranks(2, partial(save_with_own, directory=tmp_path / "a", kind=kind)))
    found = merge([tmp_path / "a"], tmp_path / "m").left_out
    assert list(found) == ["own/mine.safetensors"]
    assert "as a rank had it for itself" in found["own/mine.safetensors"]


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_some(tmp_path / "a", 2)
    assert main(["merge", str(tmp_path / "a"), "--out", str(tmp_path / "m")]) == 0
    shown = capsys.readouterr().out
    assert "holds     15 trajectories, 81 rows" in shown
    assert f"made of   {tmp_path / 'a'}, rank 1, generation 0, step 1" in shown
    parts = [str(tmp_path / name) for name in "xy"]
    assert main(["split", str(tmp_path / "a"), "--fraction", "0.5", "--out", *parts]) == 0
    assert [len(load(Path(part))) for part in parts] == [7, 8]


@pytest.mark.parametrize("kind", [SHARDS, TRAJECTORY_SHARDS])
def test_inspect_shows_the_ranks_whose_shards_can_be_read_and_what_is_theirs(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fine(on_ranks(2, partial(save_with_own, directory=tmp_path / "a", kind=kind)))
    found = inspect(tmp_path / "a")
    assert ([each.rank for each in found.buffers], found.own, found.notes) == ([0, 1], ["mine"], [])
    state = "replay.json" if kind == SHARDS else "trajectories.json"
    path = Path(newest(tmp_path / "a").folder) / "shards" / "0000" / state
    path.write_bytes(path.read_bytes()[:-9])
    found = inspect(tmp_path / "a")
    assert [each.rank for each in found.buffers] == [1]
    assert any(str(path) in note for note in found.notes)
    assert main(["inspect", str(tmp_path / "a")]) in (0, 1)
    assert re.search(r"^  own +mine, of each rank$", capsys.readouterr().out, re.MULTILINE)


def related(one: Path, other: Path, out: Path) -> None:
    """Refused by what is known of where they came from, and merged where that is said."""
    for order in ((one, other), (other, one)):
        with pytest.raises(ConfigError, match=r"would be there twice\. Leave one of them out; or, .*--allow-related"):
            merge(order, out)
    units = sum(merge([each], out, dry_run=True).units for each in (one, other))
    assert merge([one, other], out, allow_related=True).units == units
    shutil.rmtree(out)


@pytest.mark.parametrize("what", ["a byte of a payload", "a shard is gone"])
def test_what_was_split_off_before_trajectories_were_lost(tmp_path: Path, what: str) -> None:
    """Those that are left have other numbers then, under which others had been."""
    run, out = tmp_path / "run", tmp_path / "out"
    save_some(run, 2)
    shutil.copytree(run, tmp_path / "copy")
    split(run, [tmp_path / "old", tmp_path / "rest"], count=5)
    damage(what, run)
    go_on(run, 2, 2, allow_partial=True)
    for name in ("old", "rest", "copy"):
        related(tmp_path / name, run, out)
    split(run, [tmp_path / "new", tmp_path / "more"], count=5)
    assert merge([tmp_path / "new", tmp_path / "more"], out).units == sum(len(each.infos) for each in on_disk(run))
    with pytest.raises(ConfigError, match="copies or parts of one run"):
        merge([tmp_path / "new", run], tmp_path / "no")


def test_what_was_split_off_before_other_ranks_had_the_trajectories(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_some(run, 2)
    split(run, [tmp_path / "old", tmp_path / "rest"], count=5)
    go_on(run, 2, 2)
    with pytest.raises(ConfigError, match="copies or parts of one run"):  # as many ranks: every one has its number
        merge([tmp_path / "old", run], tmp_path / "no")
    go_on(run, 3, 3)
    related(tmp_path / "old", run, tmp_path / "out")
    related(tmp_path / "rest", run, tmp_path / "out")


@pytest.mark.parametrize("size", [0, 2])
def test_what_was_split_off_before_the_run_went_back(tmp_path: Path, size: int) -> None:
    """``size``: how many ranks; 0: one process without."""
    run = tmp_path / "run"

    def live(step: int, back: int | None = None) -> None:
        def train(ranks: Ranks | None) -> None:
            with TrajectoryBuffer(directory=run, ranks=ranks, keep=None) as buffer:
                buffer.resume(step=back)
                first = 10 * step + (100 * ranks.rank if ranks else 0)
                buffer.add_trajectories([trajectory(n, 1 + n % 5, 1 + n % 3) for n in range(first, first + 3)])
                buffer.save(step, wait=True)

        if size:
            fine(on_ranks(size, train))
        else:
            train(None)

    live(1)
    live(2)
    split(run, [tmp_path / "old", tmp_path / "rest"], count=3)
    live(3, back=1)
    related(tmp_path / "old", run, tmp_path / "out")
    related(tmp_path / "rest", run, tmp_path / "out")
    merge([tmp_path / "rest", run], tmp_path / "both", allow_related=True)
    assert {*range(20, 23), *range(30, 33)} <= set(load(tmp_path / "both"))
