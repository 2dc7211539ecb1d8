"""Minari's datasets: what was written is opened by Minari, what Minari wrote (``tests/golden/peers``) is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Prioritized, ReplayBuffer
from pipeline.errors import ConfigError, Damaged
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from tests.support import peers
from tests.support.kept_runs import bits, gathered

minari: Any = pytest.importorskip("minari")
pytest.importorskip("h5py")
PEERS = Path(__file__).parents[1] / "golden" / "peers"


def run_of(directory: Path, envs: int, steps: int = 20) -> str:
    """A buffer of episodes with next observations, and other columns."""
    rng = np.random.default_rng(envs)
    buffer = ReplayBuffer(envs * steps, select=Prioritized(), directory=str(directory), seed=1, share_next_obs=True)
    with buffer:
        buffer.resume()

        def observed() -> tuple[np.ndarray, np.ndarray]:
            images = rng.integers(0, 256, (envs, 40, 40, 3), np.uint8)
            return rng.standard_normal((envs, 3)).astype(np.float32), images

        state, image = observed()
        for step in range(steps):
            ends = np.arange(step, step + envs) % 7 == 6
            after = observed()
            buffer.extend(
                {
                    "obs": {"state": state, "image": image},
                    "next_obs": {"state": after[0], "image": after[1]},
                    "action": rng.integers(0, 4, envs),
                    "reward": rng.standard_normal(envs),
                    "terminated": ends & (step % 2 == 0),
                    "truncated": ends & (step % 2 == 1),
                    "old.log/prob": bits("bfloat16", (envs,), step),
                    "flag": rng.random((envs, 2)) < 0.5,
                },
                envs=envs,
                version=step,
            )
            state = np.where(ends[:, None], after[0] + 1, after[0])
            image = np.where(ends[:, None, None, None], after[1] // 2, after[1])
        buffer.save(3, wait=True)
    return str(directory)


def test_episodes_of_one_environment_come_back_bit_for_bit(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 1)
    assert export(run, tmp_path / "out", to="minari").count == 20
    assert import_data(tmp_path / "out", tmp_path / "new").step == 3
    first, second = (transitions_of(open_run(str(each))) for each in (run, tmp_path / "new"))
    assert gathered(second) == gathered(first)


def test_minari_opens_what_was_written_and_rows_of_environments_that_were_mixed_come_back(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 3)
    export(run, tmp_path / "out", to="minari")
    dataset = minari.MinariDataset(str(tmp_path / "out" / "data"))
    assert dataset.total_steps == 60
    rows = list(transitions_of(open_run(run)).batches())
    number = np.concatenate([part.marks["#episode"] for part in rows])
    rewards = np.concatenate([part.columns["reward"] for part in rows])
    states = np.concatenate([part.columns["obs.state"] for part in rows])
    lengths = []
    for episode in dataset.iterate_episodes():
        own = number == episode.infos["forebay"]["1"][0]  # by name: #end, #episode, ...
        assert np.array_equal(episode.rewards, rewards[own])
        assert np.array_equal(episode.observations["state"][:-1], states[own])
        assert episode.observations["image"].shape == (own.sum() + 1, 40, 40, 3)
        lengths.append(len(episode.rewards))
    assert sum(lengths) == 60
    import_data(tmp_path / "out", tmp_path / "new")
    parts = list(transitions_of(open_run(str(tmp_path / "new"))).batches())
    found = np.concatenate([part.columns["reward"] for part in parts])
    assert sorted(found.tolist()) == sorted(rewards.tolist())
    with ReplayBuffer(60, directory=str(tmp_path / "new"), seed=1) as buffer:
        buffer.resume()
        assert buffer.statistics().episodes == len(lengths)


def test_a_dataset_that_minari_wrote(tmp_path: Path) -> None:
    imported = import_data(PEERS / "minari_0_5_4", tmp_path / "new")
    assert (imported.from_, imported.count) == ("minari", 5)
    (rows,) = transitions_of(open_run(str(tmp_path / "new"))).batches()
    begin = 0
    for number, length in enumerate((3, 2)):
        expected, part = peers.episode(number, length), rows.part(slice(begin, begin + length))
        for name in ("state", "image"):
            whole = expected["observations"][name]
            assert part.columns[f"obs.{name}"].dtype == whole.dtype
            assert np.array_equal(part.columns[f"obs.{name}"], whole[:-1])
            assert np.array_equal(part.columns[f"next_obs.{name}"], whole[1:])
        for name, place in (("action", "actions"), ("reward", "rewards"), ("terminated", "terminations")):
            assert np.array_equal(part.columns[name], expected[place])
        assert part.marks["#end"].tolist() == [0] * (length - 1) + [1 if number % 2 == 0 else 2]
        assert set(part.marks["#episode"].tolist()) == {number}
        begin += length


def test_what_minari_cannot_hold_is_refused(tmp_path: Path) -> None:
    with ReplayBuffer(10, directory=str(tmp_path / "run"), seed=1) as buffer:
        buffer.resume()
        columns = {"obs": np.arange(4.0), "next_obs": np.arange(4.0) + 1, "reward": np.zeros(4)}
        buffer.extend({**columns, "action": np.zeros(4)})
        buffer.save(1, wait=True)
        columns["next_obs"][1] = 7.0
        buffer.extend({**columns, "action": np.zeros(4)})
        buffer.save(2, wait=True)
        buffer.clear()
        buffer.extend({"obs": np.arange(4.0), "reward": np.zeros(4)})
        buffer.save(3, wait=True)
    with pytest.raises(ConfigError, match="needs a next one"):
        export(str(tmp_path / "run"), tmp_path / "out", to="minari")
    with pytest.raises(ConfigError, match="with key 3 is not the observation of"):
        export(str(tmp_path / "run"), tmp_path / "out", to="minari", step=2)
    assert export(str(tmp_path / "run"), tmp_path / "out", to="minari", step=1).count == 4
    (tmp_path / "out" / "data" / "main_data.hdf5").write_bytes(b"x")
    with pytest.raises(Damaged, match="was changed"):
        import_data(tmp_path / "out", tmp_path / "new")
