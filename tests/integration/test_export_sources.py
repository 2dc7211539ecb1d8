"""What is exported of which run: shards, buffers that keep other rows than the newest, rollouts that fill a buffer, a
buffer without rows; and that no more is held than a block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from pipeline import Prioritized, Ranks, Remove, ReplayBuffer
from pipeline.errors import ConfigError, Damaged
from pipeline.store.blocks import crc32c_of_file
from pipeline.tools import inspect
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from tests.support import experience
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, train
from tests.support.kept import talk
from tests.support.kept_runs import pipeline_run, replay_run
from tests.support.ranks import fine, on_ranks
from tests.support.runs import task

ROOT = Path(__file__).parents[2]


def rows_of(run: Path) -> dict[str, np.ndarray]:
    """Return columns and marks of a run's rows."""
    parts = list(transitions_of(open_run(str(run))).batches())
    return {
        **{name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        **{name: np.concatenate([part.marks[name] for part in parts]) for name in parts[0].marks},
    }


@pytest.mark.parametrize("to", ["jsonl", "safetensors", "lerobot"])
def test_all_shards_become_one_buffer_with_their_priorities(tmp_path: Path, to: str) -> None:
    if to == "lerobot":
        pytest.importorskip("pyarrow")

    def train(ranks: Ranks) -> None:
        with ReplayBuffer(40, select=Prioritized(), directory=tmp_path / "run", seed=3, ranks=ranks) as buffer:
            buffer.resume()
            place = np.arange(50 + 10 * ranks.rank)
            terminated = place % 8 == 7
            buffer.extend({"of": np.stack([np.full(len(place), ranks.rank), place], 1), "terminated": terminated})
            keys = buffer.ring.keys()
            buffer.update_priorities(keys, 1.0 + keys + 100 * ranks.rank)
            buffer.save(5, wait=True)

    fine(on_ranks(3, train))
    assert export(tmp_path / "run", tmp_path / "out", to=to).count == 120
    assert import_data(tmp_path / "out", tmp_path / "new").step == 5
    before, after = rows_of(tmp_path / "run"), rows_of(tmp_path / "new")
    assert before["#rank"].tolist() == [0] * 40 + [1] * 40 + [2] * 40
    for name in ("of", "terminated", "#place", "#priority"):
        assert np.array_equal(before[name], after[name]), name
    assert after["#key"].tolist() == list(range(120))
    expected = (1.0 + before["#key"] + 100 * before["#rank"]) ** 0.6
    assert np.allclose(after["#priority"], expected)
    with ReplayBuffer(120, select=Prioritized(), directory=tmp_path / "new", seed=1) as buffer:
        buffer.resume()
        assert len(buffer.sample(64)) == 64
        number = len(np.unique(np.stack([before["#rank"], before["#episode"]], 1), axis=0))
        assert buffer.statistics().episodes == number


@pytest.mark.parametrize("to", ["safetensors", "lerobot"])
@pytest.mark.parametrize("remove", ["lifo", Remove(by="min", field="reward")], ids=["lifo", "min"])
def test_rows_that_lie_in_any_order_come_with_their_own_keys(tmp_path: Path, remove: Any, to: str) -> None:
    if to == "lerobot":
        pytest.importorskip("pyarrow")
    with ReplayBuffer(30, directory=tmp_path / "run", seed=1, remove=remove) as buffer:
        buffer.resume()
        rng = np.random.default_rng(0)
        for step in range(20):
            reward = rng.random(4)
            buffer.extend({"obs": np.arange(4 * step, 4 * step + 4), "reward": reward, "done": np.arange(4) == 3})
        buffer.save(1, wait=True)
        keys = np.sort(buffer.ring.keys())
        there = {int(key): int(buffer.ring.storage.view("obs")[buffer.ring.slots(key)]) for key in keys}
    found = rows_of(tmp_path / "run")
    assert dict(zip(found["#key"].tolist(), found["obs"].tolist(), strict=True)) == there
    export(tmp_path / "run", tmp_path / "out", to=to)
    import_data(tmp_path / "out", tmp_path / "new")
    after = rows_of(tmp_path / "new")
    assert np.array_equal(after["obs"], found["obs"])
    with ReplayBuffer(30, directory=tmp_path / "new", seed=1) as buffer:
        buffer.resume()
        batch = buffer.sample(64, n_step=4, gamma=1.0).numpy()
        for key, reward, step in zip(batch.keys, batch["reward"], range(64), strict=True):
            own = [at for at in range(int(key), len(found["obs"])) if found["obs"][at] - found["obs"][key] == at - key]
            run = [at for at in own if found["obs"][at] // 4 == found["obs"][key] // 4]
            assert np.isclose(reward, found["reward"][run].sum()), step


@pytest.mark.parametrize(
    "column",
    [np.zeros(4, np.complex64), np.array([0.0, 1.0, np.nan, 2.0])],
    ids=["no numbers of JSON", "one that is none"],
)
def test_lines_by_themselves_come_in_unless_some_of_them_are_bytes(tmp_path: Path, column: np.ndarray) -> None:
    for name, values in (("numbers", np.arange(4.0)), ("bytes", column)):
        with ReplayBuffer(4, directory=str(tmp_path / name)) as buffer:
            buffer.resume()
            buffer.extend({"obs": np.arange(4), "x": values})
            buffer.save(1, wait=True)
        export(tmp_path / name, tmp_path / f"{name} out", to="jsonl")
        (path,) = (tmp_path / f"{name} out").glob("*.jsonl")
        path.rename(tmp_path / f"{name}.jsonl")
    assert import_data(tmp_path / "numbers.jsonl", tmp_path / "new").count == 4
    with pytest.raises(Damaged, match=r"'x' are bytes there.*forebay\.json"):
        import_data(tmp_path / "bytes.jsonl", tmp_path / "no")
    assert not (tmp_path / "no").exists()


async def test_of_a_run_whose_rollouts_fill_a_buffer_either_is_exported(tmp_path: Path) -> None:
    buffer = ReplayBuffer(1000, seed=1)
    async with experience.fed(buffer, directory=str(tmp_path / "run")) as pipe:
        await experience.resumed(pipe)
        await pipe.start()
        await experience.filled(pipe)
        await (await pipe.save(1)).committed()
    with pytest.raises(ConfigError, match="which of them"):
        export(tmp_path / "run", tmp_path / "out", to="jsonl")
    assert export(tmp_path / "run", tmp_path / "out", to="jsonl", content="transitions").count == 72
    import_data(tmp_path / "out", tmp_path / "new")
    found = rows_of(tmp_path / "new")
    assert sorted(map(tuple, found["obs"].tolist())) == [(index, place) for index in range(12) for place in range(6)]


@pytest.mark.parametrize("archive", ["none", "all"])
async def test_what_was_trained_is_exported_as_far_as_it_is_there(tmp_path: Path, archive: Any) -> None:
    options: dict[str, Any] = {"segment_bytes": 600, "keep": 1, "archive": archive, "concurrency": 1, "capacity": 8}
    run = str(tmp_path / "run")
    async with inline_pipeline(task(20, talk), directory=run, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        for _ in range(8):
            batch = await pipe.get_batch(2)
            await train(pipe, trained, batch)
            await (await pipe.save(batch.step)).committed()
    assert export(run, tmp_path / "out", to="jsonl").count == len(list(there(tmp_path / "out")))
    uids = sorted(int(each["uid"]) for each in there(tmp_path / "out"))
    assert (uids[0] == 0) == (archive == "all"), uids
    assert uids == list(range(uids[0], uids[-1] + 1))
    assert uids[-1] >= 15


@pytest.mark.parametrize(("after_crash", "count"), [("reuse", 8), ("discard", 0)])
async def test_what_a_resume_would_set_aside_is_not_exported(tmp_path: Path, after_crash: Any, count: int) -> None:
    run = str(tmp_path / "run")
    given = task(8, talk)
    async with inline_pipeline(given, directory=run, concurrency=1, capacity=8, after_crash=after_crash) as pipe:
        await begin(pipe, trained=Trained())
        await pipe._run.state.changed.wait_for(lambda: pipe.ledger.totals["numbers"].produced == 8)
        crashed_copy(run, tmp_path / "dead")
    (said,) = inspect(tmp_path / "dead").tasks
    export(tmp_path / "dead", tmp_path / "out", to="jsonl")
    assert len(list(there(tmp_path / "out"))) == said.states["buffered"] == count


def there(out: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            if "uid" in found:
                yield found


def test_a_buffer_without_rows_is_refused_and_an_export_of_none_is_a_run(tmp_path: Path) -> None:
    with ReplayBuffer(10, directory=tmp_path / "run", seed=1) as buffer:
        buffer.resume()
        buffer.save(1, wait=True)
        buffer.extend({"obs": np.arange(3)})
        buffer.save(2, wait=True)
    with pytest.raises(ConfigError, match="nothing was ever added"):
        export(tmp_path / "run", tmp_path / "out", to="jsonl", step=1)
    for to in ("jsonl", "safetensors"):
        assert export(tmp_path / "run", tmp_path / to, to=to, where=["obs>5"]).count == 0
        assert import_data(tmp_path / to, tmp_path / f"{to}-run").count == 0
        with ReplayBuffer(10, directory=tmp_path / f"{to}-run", seed=1) as buffer:
            assert (buffer.resume().step, len(buffer)) == (2, 0)


async def test_what_was_written_is_opened_by_safetensors(tmp_path: Path) -> None:
    run = replay_run(tmp_path / "run")
    export(run, tmp_path / "out", to="safetensors")
    found = safetensors.torch.load_file(tmp_path / "out" / "transitions-00000.safetensors")
    assert found["more.bfloat16"].dtype == torch.bfloat16
    assert found["more.bfloat16"].shape == (60, 2, 3)
    assert found["#key"].tolist() == list(range(30, 90))
    export(await pipeline_run(tmp_path / "p"), tmp_path / "rollouts", to="safetensors")
    with safetensors.safe_open(tmp_path / "rollouts" / "rollouts-00000.safetensors", "pt") as file:
        records = json.loads(file.metadata()["records"])
        judges = [number for number, each in enumerate(records) if "judge" in each["agents"]]
        for number in judges[:5]:
            assert file.get_tensor(f"{number}.1.completion_ids").tolist() == list(range(records[number]["index"]))


def test_exports_that_say_what_cannot_be_are_refused(tmp_path: Path) -> None:
    """Who wrote the lines need not be this library; the checksums of the files are theirs then."""
    with ReplayBuffer(10, directory=tmp_path / "run", seed=1) as buffer:
        buffer.resume()
        buffer.extend({"obs": np.arange(4, dtype=np.uint8), "terminated": np.arange(4) == 1})
        buffer.save(1, wait=True)
    export(tmp_path / "run", tmp_path / "out", to="jsonl")
    part, described = tmp_path / "out" / "transitions-00000.jsonl", tmp_path / "out" / "forebay.json"
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    changes: list[dict[str, Any]] = [
        {"obs": 256},
        {"obs": 1.5},
        {"obs": "1"},
        {"obs": [1]},
        {"obs": {"base64": "AAA="}},
        {"obs": None},
        {"#key": 7},
        {"#place": 3},
        {"#end": 2},
        {"terminated": 1},
    ]
    for change in changes:
        part.write_text("\n".join(json.dumps({**line, **(change if at == 2 else {})}) for at, line in enumerate(lines)))
        size, checksum = crc32c_of_file(str(part))
        said = json.loads(described.read_text())
        said["files"][0].update(bytes=size, crc32c=checksum)
        described.write_text(json.dumps(said))
        if change == {"#end": 2}:  # an end in the midst of rows is none of the last one
            continue
        with pytest.raises(Damaged):
            import_data(tmp_path / "out", tmp_path / "new")
        assert not (tmp_path / "new").exists()


_MEMORY = """
import json, sys
import numpy as np
from pipeline import ReplayBuffer
from pipeline.tools import inspect
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from tests.support.memory import growth
run, out, new, to, rows = *sys.argv[1:5], int(sys.argv[5])
with ReplayBuffer(rows, directory=run, seed=1, storage="mapped") as buffer:
    buffer.resume()
    for first in range(0, rows, 256):
        count = min(256, rows - first)
        image = np.full((count, 64, 64, 3), first % 251, np.uint8)
        buffer.extend({"image": image, "obs": np.zeros((count, 32)), "terminated": np.arange(count) % 50 == 49})
    buffer.save(1, wait=True)
found = {}
with growth(found, "export"):
    export(run, out, to=to)
with growth(found, "import"):
    import_data(out, new)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_no_more_is_held_than_some_blocks(tmp_path: Path) -> None:
    """Of 125 MB of rows and more, in MiB of resident memory."""
    rows = 10_000 * int(os.environ.get("FOREBAY_SOAK", "1"))
    command = [sys.executable, "-c", _MEMORY, str(tmp_path / "run"), str(tmp_path / "out"), str(tmp_path / "new")]
    done = subprocess.run([*command, "safetensors", str(rows)], capture_output=True, text=True, cwd=ROOT, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found.values()) < 200, found
