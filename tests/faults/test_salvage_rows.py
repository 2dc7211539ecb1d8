"""A buffer of transitions of which blocks are gone: every other row comes along, and nothing reaches over a gap."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline import Damaged, ReplayBuffer
from pipeline.buffer.transitions.blocks import encode_block
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.cli import main
from pipeline.config import Slices
from pipeline.store.files import OsFiles
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, read_blocks
from pipeline.store.writer import StoreWriter
from pipeline.tools.salvaging import SalvagedRows, salvage_run
from tests.support import kept
from tests.support.disk import tree
from tests.support.opening import reseal
from tests.support.replay import ids, probabilities
from tests.support.salvaging import flip

ENVS = 3
COUNT, CAPACITY = 201, 150


def rows(first: int, count: int) -> dict[str, Any]:
    """Row ``id`` is of environment ``id % ENVS``; its episodes have 7, 11 and 50 rows."""
    numbers = np.arange(first, first + count)
    place = numbers // ENVS
    length = np.array([7, 11, 50])[numbers % ENVS]
    obs = numbers[:, None].repeat(4, 1).astype(np.float32)
    return {
        "id": numbers,
        "obs": obs,
        "next_obs": obs + ENVS,  # that of the row that follows, if one does
        "reward": np.ones(count, np.float32),
        "terminated": place % length == length - 1,
    }


def episode_of(number: int) -> tuple[int, int]:
    """The environment and the number of its episode."""
    return number % ENVS, number // ENVS // (7, 11, 50)[number % ENVS]


def saved(directory: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """A buffer whose rows lie in blocks of a few."""
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 1200)
    with ReplayBuffer(CAPACITY, directory=directory, seed=3, returns="numpy", **options) as buffer:
        learner = kept.Learner()
        buffer.attach(learner=learner)
        buffer.resume()
        for step, (begin, end) in enumerate(((0, 120), (120, COUNT)), 1):
            buffer.extend(rows(begin, end - begin), envs=ENVS)
            keys = buffer.ring.keys()
            if buffer.drawer.takes_priorities:
                buffer.update_priorities(keys, 1.0 + keys % 5)
            buffer.sample(8)
            learner.steps = step
            buffer.save(step, wait=True)
    return directory


def blocks_of(directory: str) -> list[Block]:
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return read_blocks(os.path.join(find_generations(layout, run.run_id).complete[-1].folder, "blocks.msgpack"))


def damage(directory: str, block: Block) -> set[int]:
    """Change a byte of a block; return the numbers of the rows that are lost by it."""
    flip(Path(Layout(directory).segment(*block.segment_key)), block.offset + HEADER_BYTES + block.length // 2)
    return set(range(max(block.first, COUNT - CAPACITY), min(block.first + block.count, COUNT)))


def salvaged(directory: str, target: Path, **more: Any) -> SalvagedRows:
    before = tree(directory)
    found = salvage_run(directory, target, **more)
    assert tree(directory) == before
    assert isinstance(found, SalvagedRows)
    return found


def resumed(directory: Path, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(CAPACITY, directory=str(directory), seed=3, returns="numpy", **options)
    buffer.attach(learner=kept.Learner())
    buffer.resume(continue_episodes=True)
    return buffer


PRIORITIZED = {"select": {"select": "prioritized", "alpha": 1.0, "beta": 1.0}}


def test_the_newest_episodes_are_those_that_there_are(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was known of episodes whose first rows are gone is of none of those that there are after the loss."""
    select: dict[str, Any] = {"select": "uniform", "window_trajectories": 6}
    saved(run_directory, monkeypatch, select=select)
    blocks = [block for block in blocks_of(run_directory) if block.first + block.count > COUNT - CAPACITY]
    for at in (1, 4):
        damage(run_directory, blocks[at])
    salvaged(run_directory, tmp_path / "out")
    for window in range(1, 30, 3):
        with resumed(tmp_path / "out", select=select | {"window_trajectories": window}) as buffer:
            keys = buffer.ring.keys()
            episodes = buffer.ring.storage.view("#episode")[buffer.ring.slots(keys)]
            firsts = {each: int(keys[episodes == each].min()) for each in np.unique(episodes).tolist()}
            least = sorted(firsts.values())[-window:][0]
            expected = [key for key, of in zip(keys.tolist(), episodes.tolist(), strict=True) if firsts[of] >= least]
            assert set(buffer.sample(6000).keys.tolist()) == set(expected), window


def test_of_a_whole_one_everything_comes_along(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every: list[dict[str, Any]] = [{}, PRIORITIZED, {"select": "without_replacement"}]
    for number, options in enumerate(every):
        source = saved(f"{run_directory}{number}", monkeypatch, **options)
        target = tmp_path / f"out{number}"
        found = salvaged(source, target)
        assert (found.whole, found.rows_kept, found.rows_lost, found.step) == (True, CAPACITY, 0, 2)
        assert verify(str(target)).whole
        with resumed(target, **options) as ours, resumed(Path(source), **options) as theirs:
            assert ids(ours) == ids(theirs)
            assert [ours.sample(16).keys.tolist() for _ in range(4)] == [
                theirs.sample(16).keys.tolist() for _ in range(4)
            ]


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("chosen", [[0], [1], [-1], [3, 4], [2, 5, 9], "all but one"])
def test_the_rows_of_whole_blocks_come_along_and_nothing_reaches_over_a_gap(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Any, share: bool
) -> None:
    options = PRIORITIZED | {"share_next_obs": share}
    saved(run_directory, monkeypatch, **options)
    blocks = [block for block in blocks_of(run_directory) if block.first + block.count > COUNT - CAPACITY]
    assert len(blocks) >= 10
    if chosen == "all but one":
        chosen = [at for at in range(len(blocks)) if at != 6]
    gone = set().union(*(damage(run_directory, blocks[at]) for at in chosen))
    damaged = set(gone)
    if share:  # what the last row before a gap led to is gone
        gone |= {
            number - ENVS
            for number in damaged
            if number - ENVS >= COUNT - CAPACITY and episode_of(number - ENVS) == episode_of(number)
        }
    found = salvaged(run_directory, tmp_path / "out")
    there = [number for number in range(COUNT - CAPACITY, COUNT) if number not in gone]
    assert (found.rows_kept, found.rows_lost) == (len(there), len(gone))
    offsets = [loss.offset for loss in found.losses if loss.offset is not None]
    assert sorted(offsets) == sorted(blocks[at].offset for at in chosen)
    before = [loss.lost for loss in found.losses if loss.offset is None]
    assert before == ([f"{len(gone - damaged)} rows before gaps"] if gone - damaged else [])
    assert all("rows " in loss.lost for loss in found.losses)
    assert verify(str(tmp_path / "out")).whole
    with resumed(tmp_path / "out", **options) as buffer:
        assert ids(buffer) == there
        batch = buffer.sample(200)
        assert (batch["next_obs"] == batch["id"][:, None] + ENVS).all()
        shares = np.array([1.0 + number % 5 for number in there])
        assert probabilities(buffer) == pytest.approx((shares / shares.sum()).tolist())
        assert buffer.ring.keys()[-1] == COUNT - 1, "keys go on where they were"
        successors = {}
        keys = buffer.ring.keys()
        chain, counts = buffer.ring.chain(keys, 60)
        of = dict(zip(keys.tolist(), there, strict=True))
        for row, (key, count) in enumerate(zip(keys.tolist(), counts.tolist(), strict=True)):
            successors[of[key]] = [of[each] for each in chain[row][:count].tolist()]
        for number in there:
            expected = [number]
            while (after := expected[-1] + ENVS) in successors and episode_of(after) == episode_of(number):
                expected.append(after)
            assert successors[number] == expected
        returns = buffer.sample(64, n_step=5, gamma=1.0)
        assert (returns.steps <= 5).all()
        assert [len(successors[of[key]][:5]) for key in returns.keys.tolist()] == returns.steps.tolist()
        places = buffer.ring.mark("#place", keys)
        parts = buffer.ring.mark("#episode", keys)
        begun: dict[int, int] = {}
        for part, place in zip(parts.tolist(), places.tolist(), strict=True):
            assert place == begun.get(part, 0)
            begun[part] = place + 1


def test_episodes_go_on_where_their_newest_row_is_there(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run_directory, monkeypatch)
    blocks = blocks_of(run_directory)
    damage(run_directory, blocks[-4])
    found = salvaged(run_directory, tmp_path / "out")
    assert found.episodes_split > 0
    with resumed(tmp_path / "out") as buffer:
        newest = {episode_of(number): number for number in range(COUNT)}
        last = [number for number in newest.values() if number >= COUNT - ENVS]
        going = [number for number in last if not rows(number, 1)["terminated"][0]]
        assert sorted(env for env, *_ in buffer.ring.episodes.state()) == sorted(number % ENVS for number in going)
        buffer.extend(rows(COUNT, 30 * ENVS), envs=ENVS)
        batch = buffer.sample(200, slices=Slices(length=4))
        for window, mask in zip(batch["id"], batch.mask, strict=True):
            own = window[mask].tolist()
            assert own == list(range(own[0], own[0] + ENVS * len(own), ENVS))
            assert len({episode_of(number) for number in own}) == 1


def test_what_was_written_back_counts_in_the_rows_that_are_kept(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run_directory, monkeypatch)
    with resumed(Path(run_directory)) as buffer:
        keys = np.arange(COUNT - CAPACITY, COUNT, 3)
        buffer.write_back(keys, {"reward": keys.astype(np.float32)})
        buffer.save(3, wait=True)
    gone = damage(run_directory, blocks_of(run_directory)[-3])
    salvaged(run_directory, tmp_path / "out")
    with resumed(tmp_path / "out") as buffer:
        keys = buffer.ring.keys()
        for number, reward in zip(ids(buffer), buffer.ring.mark("reward", keys).tolist(), strict=True):
            assert number not in gone
            assert reward == (number if (number - COUNT + CAPACITY) % 3 == 0 else 1)


def doubled(directory: str, first: int, count: int) -> Block:
    """Let the newest generation list another block of rows that lie in others already."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    with resumed(Path(directory)) as buffer:
        blob = bytes(encode_block(buffer.ring, first, count))
    writer = StoreWriter(layout, OsFiles(), run_tag=run.tag, incarnation=70)
    place = writer.place(blob, first, 0, 0)
    writer.write(writer.take())
    writer.close()
    more = Block.at(first, count, place)
    path = Path(find_generations(layout, run.run_id).complete[-1].folder, "blocks.msgpack")
    listed = sorted([*blocks_of(directory), more], key=lambda block: block.first)
    path.write_bytes(msgspec.msgpack.encode(listed))
    reseal(directory)
    return more


def test_rows_that_two_blocks_have_come_along_once_if_either_is_whole(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run_directory, monkeypatch)
    blocks = [block for block in blocks_of(run_directory) if block.first + block.count > COUNT - CAPACITY]
    first, count = blocks[3].first + 4, blocks[3].count + blocks[4].count - 4
    second = doubled(run_directory, first, count)
    for number, damaged in enumerate([[], [second], [blocks[3]], [blocks[3], blocks[4]], [second, blocks[4]]]):
        run, out = tmp_path / f"run{number}", tmp_path / f"out{number}"
        shutil.copytree(run_directory, run)
        for block in damaged:
            damage(str(run), block)
        gone = set[int]()
        if blocks[3] in damaged:
            gone |= set(range(blocks[3].first, first))
        if second in damaged and blocks[4] in damaged:
            gone |= set(range(blocks[4].first, blocks[4].first + blocks[4].count))
        found = salvaged(str(run), out)
        assert (found.rows_kept, found.rows_lost) == (CAPACITY - len(gone), len(gone))
        said = sum(int(loss.lost.split(", ")[1].split()[0]) for loss in found.losses)
        assert said == (2 * len(gone) if second in damaged and blocks[4] in damaged else len(gone)), "each says it"
        assert verify(str(out)).whole
        with resumed(out) as buffer:
            assert ids(buffer) == [each for each in range(COUNT - CAPACITY, COUNT) if each not in gone]


def test_an_order_without_replacement_begins_anew(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run_directory, monkeypatch, select="without_replacement")
    gone = damage(run_directory, blocks_of(run_directory)[-3])
    found = salvaged(run_directory, tmp_path / "out")
    assert any("begins anew" in loss.lost for loss in found.losses)
    with resumed(tmp_path / "out", select="without_replacement") as buffer:
        drawn = buffer.sample(CAPACITY - len(gone))["id"].tolist()
        assert sorted(drawn) == ids(buffer)


class TestGenerations:
    def test_one_with_a_damaged_trainer_gives_way_to_the_one_before(
        self, run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved(run_directory, monkeypatch)
        flip(Path(run_directory, "generations/00000001/trainer/learner.safetensors"), 100)
        found = salvaged(run_directory, tmp_path / "out")
        assert (found.step, found.rows_kept, found.left_out) == (1, 120, {})
        with ReplayBuffer(CAPACITY, directory=str(tmp_path / "out"), seed=3) as buffer:
            learner = kept.Learner()
            buffer.attach(learner=learner)
            assert (buffer.resume().step, learner.steps) == (1, 1)

    def test_without_any_whole_trainer_the_rows_come_along(
        self, run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved(run_directory, monkeypatch)
        for number in range(2):
            flip(Path(run_directory, f"generations/{number:08d}/trainer/learner.safetensors"), 100)
        found = salvaged(run_directory, tmp_path / "out")
        assert (found.step, found.rows_kept) == (2, CAPACITY)
        assert list(found.left_out) == ["trainer/learner.safetensors"]
        with ReplayBuffer(CAPACITY, directory=str(tmp_path / "out"), seed=3) as buffer:
            assert buffer.resume().rows == CAPACITY

    def test_without_any_state_the_error_says_what_is_damaged(
        self, run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved(run_directory, monkeypatch)
        for number in range(2):
            flip(Path(run_directory, f"generations/{number:08d}/replay.json"), 40)
        with pytest.raises(Damaged, match=r"(?s)no generation says how.*generation 0.*generation 1"):
            salvage_run(run_directory, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_by_the_command(run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    saved(run_directory, monkeypatch)
    damage(run_directory, blocks_of(run_directory)[-3])
    assert main(["salvage", run_directory, str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    assert main(["salvage", run_directory, str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert f"kept         {told['rows_kept']} rows, and {told['rows_lost']} are lost\n" in shown
    assert "in no other block" in shown
    manifest = json.loads((tmp_path / "out/generations/00000000/manifest.json").read_text())
    assert (manifest["reason"], manifest["options"]["directory"]) == ("salvage", str(tmp_path / "out"))
    assert manifest["origin"] == told["origin"]
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
