"""Export and import: what comes back is what went out, bit for bit, and `resume()` loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Pipeline, Prioritized, ReplayBuffer, Task, TrajectoryBuffer
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.rollouts_out import rollouts_of
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.trajectories_out import trajectories_of
from tests.support.disk import tree
from tests.support.kept_runs import gathered, pipeline_run, play, replay_run, trajectory_run
from tests.support.runs import numbers

FORMATS = ["jsonl", "safetensors", "parquet", "datasets"]
NEEDS = {"parquet": "pyarrow", "datasets": "datasets"}


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """Skip a format whose package is not there."""
    callspec = getattr(request.node, "callspec", None)
    package = NEEDS.get(callspec.params.get("to", "") if callspec is not None else "")
    if package is not None:
        pytest.importorskip(package)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "options", [{}, {"share_next_obs": True}, {"compress": {"image": "zlib"}}], ids=["plain", "shared", "compressed"]
)
def test_transitions_of_every_dtype_come_back_bit_for_bit(tmp_path: Path, to: str, options: dict[str, Any]) -> None:
    run = replay_run(tmp_path / "run", **options)
    before = tree(tmp_path / "run")
    exported = export(run, tmp_path / "out", to=to, part_bytes=100_000)
    assert tree(tmp_path / "run") == before
    assert exported.count == 60
    assert len(exported.files) > 1
    imported = import_data(tmp_path / "out", tmp_path / "new")
    assert (imported.content, imported.count, imported.step) == ("transitions", 60, 7)
    first, second = (transitions_of(open_run(str(each))) for each in (run, tmp_path / "new"))
    assert gathered(second) == gathered(first)
    assert second.about.open_episodes == first.about.open_episodes != []

    select = Prioritized(alpha=0.7, beta=0.4)
    old = ReplayBuffer(60, select=select, directory=run, seed=1, **options)
    if "share_next_obs" in options:  # next observations lie with their rows by now
        with pytest.raises(Exception, match="was saved with share_next_obs=False"):
            ReplayBuffer(60, select=select, directory=str(tmp_path / "new"), **options).resume()
    new = ReplayBuffer(60, select=select, directory=str(tmp_path / "new"), seed=1)
    with old, new:
        assert old.resume(continue_episodes=True).step == new.resume(continue_episodes=True).step == 7
        assert old.statistics().open_episodes == new.statistics().open_episodes > 0
        for buffer in (old, new):
            buffer._sampler._rng.bit_generator.state = np.random.PCG64(3).state
        one, other = old.sample(40, n_step=3, gamma=0.9), new.sample(40, n_step=3, gamma=0.9)
        assert np.array_equal(one.keys, other.keys)
        assert _raw(one.to("cpu")) == _raw(other.to("cpu"))


def _raw(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _raw(each) for name, each in value.items()}
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if len(flat) else []


@pytest.mark.parametrize("to", FORMATS)
def test_trajectories_come_back_bit_for_bit(tmp_path: Path, to: str) -> None:
    run = trajectory_run(tmp_path / "run")
    assert export(run, tmp_path / "out", to=to, part_bytes=2000).count == 5
    import_data(tmp_path / "out", tmp_path / "new")
    first, second = (trajectories_of(open_run(str(each))) for each in (run, tmp_path / "new"))
    assert gathered(second) == gathered(first)
    with TrajectoryBuffer(capacity=5, cache_size=2, directory=str(tmp_path / "new")) as buffer:
        assert buffer.resume().step == 3
        assert [info.trajectory_id for info in buffer.infos()] == [2, 3, 4, 5, 6]
        assert buffer.sample(num_chunks=16)["rewards"].shape == (16,)


@pytest.mark.parametrize("to", FORMATS)
async def test_rollouts_come_back_bit_for_bit(tmp_path: Path, to: str) -> None:
    run = await pipeline_run(tmp_path / "run")
    exported = export(run, tmp_path / "out", to=to, part_bytes=10_000)
    assert exported.count is not None
    assert exported.count > 30
    import_data(tmp_path / "out", tmp_path / "new")
    first, second = (gathered(rollouts_of(open_run(str(each)))) for each in (run, tmp_path / "new"))
    for fields, _ in first:
        fields["status"] = "buffered"  # nothing has been trained in the new run
    assert second == first

    tasks = [Task(name, source=numbers(1), run=play, epochs=1) for name in ("numbers", "other")]
    async with Pipeline(tasks, directory=str(tmp_path / "new")) as pipe:
        assert (await pipe.resume()).step == 2
        async with pipe.weight_update(version=2):
            pass
        await pipe.start()
        batch = await pipe.get_batch(groups=4)
        assert batch.step == 3
        assert [group.uid for group in batch] == sorted({fields["uid"] for fields, _ in first})[:4]


async def test_rollouts_are_chosen_by_task_status_and_fields(tmp_path: Path) -> None:
    run = await pipeline_run(tmp_path / "run")

    def count(where: tuple[str, ...] = (), **how: Any) -> Any:
        return export(run, tmp_path / f"out{len(where)}", to="jsonl", where=where, dry_run=not where, **how).count

    everything = count()
    parts = [count(statuses=["trained"]), count(statuses=["buffered"])]
    assert sum(parts) == everything
    assert min(parts) > 0
    assert count(tasks=["numbers"]) + count(tasks=["other"]) == everything
    assert not (tmp_path / "out").exists()
    assert count(statuses=["parked"]) > 0
    assert 0 < count(("reward>=2", "task==other")) < count(tasks=["other"])
