"""What other systems wrote, imported and compared value by value. TorchRL's folders were written by it (see
``tests/golden/peers``), RLinf's and XTuner's files are written here, field by field as these systems have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Pipeline, Prioritized, ReplayBuffer, Task, TrajectoryBuffer
from pipeline.errors import ConfigError, Damaged
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from tests.support import peers
from tests.support.runs import numbers, solve

PEERS = Path(__file__).parents[1] / "golden" / "peers"
TORCHRL = PEERS / "torchrl_0_14_1"


def rows_of(run: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the columns and marks of a run, all rows."""
    stream = transitions_of(open_run(str(run)))
    parts = list(stream.batches())
    columns = {each.name: np.concatenate([part.columns[each.name] for part in parts]) for each in stream.schema.columns}
    return columns, {name: np.concatenate([part.marks[name] for part in parts]) for name in stream.marks}


def check_rows(columns: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, own in (
        ("obs", "observation"),
        ("action", "action"),
        ("pixels", "pixels"),
        ("next_obs", "next_observation"),
        ("reward", "reward"),
        ("terminated", "terminated"),
        ("truncated", "truncated"),
    ):
        assert columns[name].dtype == expected[own].dtype, name
        assert np.array_equal(columns[name], expected[own]), name
    half = torch.from_numpy(expected["half"]).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(columns["half"], half)
    assert np.array_equal(columns["done"], expected["terminated"] | expected["truncated"])
    assert not columns["root.done"].any()


def test_torchrl_a_buffer_that_has_wrapped_with_its_priorities(tmp_path: Path) -> None:
    imported = import_data(TORCHRL / "wrapped", tmp_path / "new")
    assert (imported.from_, imported.count) == ("torchrl", 12)
    columns, marks = rows_of(tmp_path / "new")
    check_rows(columns, peers.transitions(5, 12))
    number = np.arange(5, 17)
    assert np.allclose(marks["#priority"], peers.priority(number) ** 0.5, rtol=1e-7)
    assert np.array_equal(marks["#place"], number % 5)
    assert np.array_equal(marks["#end"], [0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 3])
    with ReplayBuffer(12, select=Prioritized(alpha=0.5), directory=str(tmp_path / "new"), seed=1) as buffer:
        assert buffer.resume().step == 0
        batch = buffer.sample(64, n_step=5, gamma=0.5)
        assert batch["half"].dtype == torch.bfloat16


def test_torchrl_several_environments_step_by_step(tmp_path: Path) -> None:
    assert import_data(TORCHRL / "envs", tmp_path / "new").count == 14
    columns, marks = rows_of(tmp_path / "new")
    one, other = peers.transitions(0, 7), peers.transitions(100, 7)
    check_rows(columns, {name: np.stack([one[name], other[name]], 1).reshape(14, *one[name].shape[1:]) for name in one})
    assert np.array_equal(marks["#episode"].reshape(7, 2), [[0, 1]] * 5 + [[2, 3]] * 2)
    assert np.array_equal(marks["#place"].reshape(7, 2)[:, 0], [0, 1, 2, 3, 4, 0, 1])


def test_torchrl_a_single_tensor(tmp_path: Path) -> None:
    assert import_data(TORCHRL / "single", tmp_path / "new").count == 5
    columns, _ = rows_of(tmp_path / "new")
    assert np.array_equal(columns["value"], peers.transitions(0, 5)["observation"])


def test_torchrl_a_cut_or_changed_folder_is_refused(tmp_path: Path) -> None:
    changes: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("storage/action.memmap", lambda raw: raw[:-1]),
        ("storage/meta.json", lambda raw: raw.replace(b"float32", b"float31")),
        ("storage/storage_metadata.json", lambda raw: raw.replace(b"12", b"13")),
        ("writer/metadata.json", lambda raw: raw.replace(b"5", b"55")),
        ("storage/next/meta.json", lambda raw: raw[:20]),
        ("sampler/sumtree.memmap", lambda raw: raw[8:]),
    ]
    for path, change in changes:
        shutil.copytree(TORCHRL / "wrapped", tmp_path / "dump")
        file = tmp_path / "dump" / path
        file.write_bytes(change(file.read_bytes()))
        with pytest.raises(Damaged):
            import_data(tmp_path / "dump", tmp_path / "new", from_="torchrl")
        assert not (tmp_path / "new").exists()
        shutil.rmtree(tmp_path / "dump")


def rlinf_folder(folder: Path, ids: list[int], *, index: str = "trajectory_index.json") -> dict[int, dict[str, Any]]:
    """Write a folder as RLinf does, field by field; return what each trajectory has, as it should come back."""
    folder.mkdir()
    expected = {}
    entries = {}
    for number in ids:
        steps, envs = 4 + number % 2 * 2, 3
        rng = np.random.default_rng(number)
        extra = torch.from_numpy(rng.random((steps + 2, envs, 1)) < 0.3)  # two epochs, each with a row before its first
        states = torch.from_numpy(rng.standard_normal((steps, envs, 5)).astype(np.float32))
        given = {
            "rewards": torch.from_numpy(rng.standard_normal((steps, envs, 1))),
            "actions": torch.from_numpy(rng.standard_normal((steps, envs, 7)).astype(np.float32)).bfloat16(),
            "dones": extra,
            "terminations": None,
            "curr_obs": {"states": states},
            "next_obs": {},
        }
        weights = f"w{number}"
        torch.save(given, folder / f"trajectory_{number}_{weights}.pt")
        entries[str(number)] = {
            "num_samples": steps * envs,
            "trajectory_id": number,
            "max_episode_length": 100 + number,
            "shape": [steps, envs],
            "model_weights_id": weights,
        }
        half = steps // 2 + 1
        expected[number] = {
            "rewards": given["rewards"],
            "actions": given["actions"],
            "dones": torch.cat([extra[1:half], extra[half + 1 :]]),
            "curr_obs.states": states,
        }
    (folder / index).write_text(json.dumps({"trajectory_index": entries, "trajectory_id_list": ids}))
    metadata = {"trajectory_format": "pt", "size": len(ids), "total_samples": 0, "seed": 1234}
    (folder / "metadata.json").write_text(json.dumps({**metadata, "trajectory_counter": ids[-1] + 1}))
    return expected


@pytest.mark.parametrize("index", ["trajectory_index.json", "trajector_index.json"])
def test_rlinf_trajectories_keep_their_numbers_and_lose_the_rows_before_epochs(tmp_path: Path, index: str) -> None:
    expected = rlinf_folder(tmp_path / "rlinf", [3, 4, 5], index=index)
    imported = import_data(tmp_path / "rlinf", tmp_path / "new")
    assert (imported.from_, imported.count, imported.notes) == ("rlinf", 3, [])
    with TrajectoryBuffer(directory=str(tmp_path / "new")) as buffer:
        buffer.resume()
        assert [info.trajectory_id for info in buffer.infos()] == [3, 4, 5]
        for info in buffer.infos():
            assert info.model_weights_id == f"w{info.trajectory_id}"
            assert info.max_episode_length == 100 + info.trajectory_id
            found = buffer.trajectory(info.trajectory_id)
            assert torch.equal(found["curr_obs"]["states"], expected[info.trajectory_id]["curr_obs.states"])
            for name in ("rewards", "actions", "dones"):
                assert found[name].dtype == expected[info.trajectory_id][name].dtype
                assert torch.equal(found[name], expected[info.trajectory_id][name]), name


def test_rlinf_files_that_are_gone_are_left_out_and_pickles_are_refused(tmp_path: Path) -> None:
    rlinf_folder(tmp_path / "rlinf", [3, 4, 5])
    (tmp_path / "rlinf" / "trajectory_4_w4.pt").unlink()
    imported = import_data(tmp_path / "rlinf", tmp_path / "new")
    assert imported.count == 2
    assert "1 trajectories are listed, and have no file" in imported.notes
    torch.save({"rewards": torch.zeros(2, 1), "odd": Task}, tmp_path / "rlinf" / "trajectory_3_w3.pt")
    with pytest.raises(Damaged, match="trajectory_3_w3"):
        import_data(tmp_path / "rlinf", tmp_path / "other")
    (tmp_path / "rlinf" / "metadata.json").write_text(json.dumps({"trajectory_format": "pkl"}))
    with pytest.raises(ConfigError, match="storage_format='pt'"):
        import_data(tmp_path / "rlinf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


async def test_xtuner_a_run_goes_on_after_the_last_consumed_step(tmp_path: Path) -> None:
    fields = {
        "status": "UPDATE_WEIGHT_AND_ABORT",
        "model_step": 7,
        "next_consumer_step": 8,
        "producer_future_step": 10,
        "consumed_samples": {"numbers": 21},
        "target_samples": {"numbers": 30},
        "target_upto_future_step": 10,
        "replay_buffer_saved": True,
    }
    (tmp_path / "agent_loop_manager_state.json").write_text(json.dumps(fields))
    imported = import_data(tmp_path / "agent_loop_manager_state.json", tmp_path / "new")
    assert (imported.from_, imported.count, imported.step) == ("xtuner", 0, 7)
    assert any("replay_buffer.pth" in note for note in imported.notes)
    task = Task("numbers", source=numbers(12), run=solve)
    async with Pipeline(task, directory=str(tmp_path / "new")) as pipe:
        assert (await pipe.resume()).step == 7
        assert pipe.progress.consumed_samples == pipe.progress.target_samples == {"numbers": 21}
        assert (pipe.progress.next_consumer_step, pipe.progress.producer_future_step) == (8, 8)
        async with pipe.weight_update(version=7):
            pass
        await pipe.start()
        assert (await pipe.get_batch(groups=3)).step == 8
