"""A batch of a saved run is what the run itself would have drawn next; nothing is taken, copied or written for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, Damaged, ReplayBuffer, Starved, TrajectoryBuffer
from pipeline.checkpoint.generations import find_generations
from pipeline.cli import main
from pipeline.replay.looking import look_at, look_at_trajectories
from pipeline.store.layout import Layout
from pipeline.tools import inspect, sample_run
from pipeline.tools.sampling import Sampled
from tests.support import kept
from tests.support.kept import fingerprint


def looked_at(directory: str, **more: Any) -> tuple[Any, Any]:
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return layout, (run.tag, find_generations(layout, run.run_id).complete[-1])


def sampled(directory: str, count: int, **more: Any) -> Sampled:
    before = fingerprint(directory)
    found = sample_run(directory, count, **more)
    assert fingerprint(directory) == before
    return found


SELECTIONS: list[dict[str, Any]] = [
    {},
    {"select": {"select": "prioritized", "alpha": 0.7, "beta": 0.5}},
    {"select": "without_replacement"},
    {"remove": {"by": "min", "field": "reward"}},
    {"remove": "lifo", "select": {"select": "prioritized"}},
]


class TestRows:
    @pytest.mark.parametrize("options", SELECTIONS)
    def test_they_are_those_that_come_next(self, run_directory: str, tmp_path: Path, options: dict[str, Any]) -> None:
        kept.transitions(run_directory, **options)
        layout, (tag, stored) = looked_at(run_directory)
        buffer = look_at(layout, tag, stored)
        batch = buffer.sample(32)
        copy = str(shutil.copytree(run_directory, tmp_path / "copy"))
        with ReplayBuffer(100, directory=copy, seed=5, **options) as real:
            real.attach(learner=kept.Learner())
            real.resume()
            expected = real.sample(32)
        assert batch.keys.tolist() == expected.keys.tolist()
        assert batch["reward"].tolist() == expected["reward"].tolist()
        assert batch.weights.tolist() == expected.weights.tolist()

    def test_keys_shapes_dtypes_and_rates(self, run_directory: str) -> None:
        found = sampled(kept.transitions(run_directory), 256)
        assert (found.of, found.there, found.asked, found.drawn, found.step) == ("rows", 100, 256, 256, 2)
        keys = {each.key: each for each in found.keys}
        assert (keys["obs"].dtype, keys["obs"].shape, keys["obs"].bytes) == ("float32", "[256, 2]", 2048)
        assert keys["reward"].least is not None
        assert 50 <= keys["reward"].least <= 149
        assert found.bytes == sum(each.bytes for each in found.keys)
        assert found.per_second > 0
        assert found.bytes_per_second > 0

    def test_only_what_is_drawn_is_read(self, run_directory: str) -> None:
        """Of a file whose other blocks are gone, a row that lies in a whole one can be drawn."""
        with ReplayBuffer(10_000, directory=run_directory) as buffer:
            buffer.resume()
            for step in range(3):
                buffer.extend({"big": np.zeros((400, 4096), np.uint8) + step})
                buffer.save(step, wait=True)
        layout, (tag, stored) = looked_at(run_directory)
        found = look_at(layout, tag, stored)
        unread = found.ring.storage.unread
        assert unread is not None
        before = len(unread.waiting())
        found.sample(1)
        assert before - len(unread.waiting()) <= 1

    def test_a_seed_draws_otherwise_and_the_same_again(self, run_directory: str) -> None:
        kept.transitions(run_directory)
        layout, (tag, stored) = looked_at(run_directory)
        drawn = [look_at(layout, tag, stored, seed=seed).sample(32).keys.tolist() for seed in (1, 1, 2, None)]
        assert drawn[0] == drawn[1]
        assert drawn[0] != drawn[2]
        assert drawn[0] != drawn[3]

    def test_no_more_than_there_are_without_replacement(self, run_directory: str) -> None:
        found = sampled(kept.transitions(run_directory, select="without_replacement"), 256)
        assert (found.drawn, found.there) == (100, 100)

    def test_of_a_folder_that_cannot_be_written(self, run_directory: str) -> None:
        kept.transitions(run_directory)
        for path in Path(run_directory).rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        assert sampled(run_directory, 8).drawn == 8

    def test_of_shards(self, run_directory: str) -> None:
        kept.shards(run_directory)
        for rank in (0, 1):
            found = sampled(run_directory, 16, rank=rank)
            (reward,) = [each for each in found.keys if each.key == "reward"]
            assert (found.rank, found.there) == (rank, 20)
            assert reward.least is not None
            assert 100 * rank <= reward.least < 100 * rank + 20
        assert sample_run(f"{run_directory}/generations/00000000/shards/0001", 4).rank == 1
        with pytest.raises(ConfigError, match="2 ranks wrote it"):
            sample_run(run_directory, 4, rank=2)


def test_floats_of_one_byte(run_directory: str) -> None:
    with ReplayBuffer(10, directory=run_directory) as buffer:
        buffer.resume()
        small = torch.tensor([-2.0, 0.5, float("nan")]).to(torch.float8_e4m3fn)
        buffer.extend({"small": small, "done": np.zeros(3, bool)})
        buffer.save(1, wait=True)
    (found,) = (each for each in sampled(run_directory, 64).keys if each.key == "small")
    assert (found.dtype, found.least, found.most, found.bytes) == ("float8_e4m3fn", -2.0, 0.5, 64)
    assert 0 < found.not_finite < 64


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "complex64"])
def test_numbers_that_torch_does_not_compare(run_directory: str, dtype: str) -> None:
    with ReplayBuffer(10, directory=run_directory) as buffer:
        buffer.resume()
        buffer.extend({"reward": np.array([7, 250], dtype), "done": np.zeros(2, bool)})
        buffer.save(1, wait=True)
    (found,) = (each for each in sampled(run_directory, 64).keys if each.key == "reward")
    real = dtype != "complex64"
    assert (found.dtype, found.least, found.most) == (dtype, 7 if real else None, 250 if real else None)
    (facts,) = inspect(run_directory).buffers
    rewards = facts.rewards
    assert (rewards.count, rewards.least, rewards.most) == ((2, 7, 250) if real else (0, None, None))
    assert facts.unread == 0


def test_trajectories(run_directory: str, tmp_path: Path) -> None:
    kept.trajectories(run_directory)
    layout, (tag, stored) = looked_at(run_directory)
    before = fingerprint(run_directory)
    batch = look_at_trajectories(layout, tag, stored).sample(16)
    assert fingerprint(run_directory) == before
    copy = str(shutil.copytree(run_directory, tmp_path / "copy"))
    with TrajectoryBuffer(directory=copy, sample_window_size=4) as real:
        real.resume()
        expected = real.sample(16)
    assert batch["rewards"].tolist() == expected["rewards"].tolist()
    found = sampled(run_directory, 1000)
    assert (found.of, found.there, found.drawn) == ("transitions", 72, 48), "the window is of four"


class TestGroups:
    pytestmark = pytest.mark.virtual_time

    async def test_finished_groups_are_drawn(self, run_directory: str) -> None:
        found = sampled(await kept.rollouts(run_directory), 256)
        assert (found.of, found.there, found.drawn, found.rollouts) == ("groups", 4, 4, 4)
        keys = {each.key: each for each in found.keys}
        assert (keys["prompt_ids"].shape, keys["completion_ids"].shape) == ("[3]", "[4..7]")
        assert (keys["(reward)"].least, keys["(reward)"].most) == (0.5, 7 / 8)
        assert sampled(run_directory, 1).drawn == 1

    async def test_where_there_are_none(self, run_directory: str, capsys: Any) -> None:
        await kept.rollouts(run_directory, steps=4)
        with pytest.raises(Starved, match="no finished group"):
            sample_run(run_directory, 4)
        assert main(["sample", run_directory]) == 1
        assert "no finished group" in capsys.readouterr().err


class TestRefusals:
    def test_a_count_that_is_none(self, run_directory: str, capsys: Any) -> None:
        assert main(["sample", kept.transitions(run_directory), "-n", "0"]) == 2
        assert "from 1 on" in capsys.readouterr().err

    def test_a_buffer_without_rows(self, run_directory: str) -> None:
        with ReplayBuffer(10, directory=run_directory) as buffer:
            buffer.resume()
            buffer.save(1, wait=True)
        with pytest.raises(Starved, match="empty"):
            sample_run(run_directory, 4)

    def test_rows_that_are_gone(self, run_directory: str, capsys: Any) -> None:
        kept.transitions(run_directory)
        for name in os.listdir(f"{run_directory}/segments"):
            os.unlink(f"{run_directory}/segments/{name}")
        with pytest.raises(Damaged, match="segment is missing"):
            sample_run(run_directory, 4)
        assert main(["sample", run_directory]) == 1
