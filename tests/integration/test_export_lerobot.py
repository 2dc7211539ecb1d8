"""LeRobot's datasets: what was written comes back bit for bit and is opened by LeRobot (``FOREBAY_LEROBOT_PYTHON``: an
interpreter that has it), what LeRobot wrote (``tests/golden/peers``) is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.errors import ConfigError, Damaged
from pipeline.store import rearranged
from pipeline.tools.exporting import export
from pipeline.tools.formats import lerobot, lerobot_meta, lerobot_out
from pipeline.tools.formats.arrow_rows import BATCH_BYTES
from pipeline.tools.importing import import_data
from pipeline.tools.interchange import by_episode
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.streams import Transitions, joined
from tests.support import peers
from tests.support.kept_runs import bits, gathered, replay_run
from tests.support.pooled import wander

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL")
PEERS = Path(__file__).parents[1] / "golden" / "peers"
PYTHON = os.environ.get("FOREBAY_LEROBOT_PYTHON", "")


def camera_run(directory: Path, steps: int = 30, size: int = 20) -> str:
    """A buffer that has wrapped, of one environment with cameras: two episodes ended here, one goes on."""
    rng = np.random.default_rng(5)
    with ReplayBuffer(size, directory=str(directory), seed=1, share_next_obs=True) as buffer:
        buffer.resume()

        def observed() -> dict[str, np.ndarray]:
            return {
                "state": rng.standard_normal((1, 3)).astype(np.float32),
                "front": rng.integers(0, 256, (1, 8, 10, 3), np.uint8),
                "wrist": rng.integers(0, 256, (1, 3, 8, 6), np.uint8),
                "depth": rng.integers(0, 256, (1, 4, 5), np.uint8),
            }

        obs = observed()
        for step in range(steps):
            after, ended = observed(), step % 9 == 8
            buffer.extend(
                {
                    "obs": obs,
                    "next_obs": after,
                    "action": rng.standard_normal((1, 2)).astype(np.float32),
                    "reward": rng.standard_normal(1),
                    "terminated": np.array([ended and step % 2 == 0]),
                    "truncated": np.array([ended and step % 2 == 1]),
                    "half": bits("bfloat16", (1, 2), step),
                    "counts": rng.integers(2**60, 2**61, (1, 2)).astype(np.uint64),
                    "success": np.array([ended]),
                },
                envs=1,
                version=step // 10,
            )
            obs = observed() if ended else after
        buffer.save(3, wait=True)
    return str(directory)


def rows_in(run: Any) -> Any:
    """Return all rows of a run."""
    return joined(list(transitions_of(open_run(str(run))).batches()))


@pytest.mark.parametrize(
    "options", [{}, {"share_next_obs": True}, {"compress": {"image": "zlib"}}], ids=["plain", "shared", "compressed"]
)
def test_transitions_of_every_dtype_and_of_mixed_environments_come_back_bit_for_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run = replay_run(tmp_path / "run", **options)
    exported = export(run, tmp_path / "out", to="lerobot", part_bytes=60_000)
    assert exported.count == 60
    assert len([info for info in exported.files if info.path.startswith("data/")]) > 1
    imported = import_data(tmp_path / "out", tmp_path / "new")
    assert (imported.from_, imported.count, imported.step) == ("lerobot", 60, 7)
    first, second = (transitions_of(open_run(str(each))) for each in (run, tmp_path / "new"))
    assert gathered(second) == gathered(first)
    assert second.about.open_episodes == first.about.open_episodes != []
    assert second.about.priority_alpha == first.about.priority_alpha


def test_images_and_next_observations_come_back_bit_for_bit(tmp_path: Path) -> None:
    run = camera_run(tmp_path / "run")
    export(run, tmp_path / "out", to="lerobot", fps=5)
    import_data(tmp_path / "out", tmp_path / "new")
    first, second = (transitions_of(open_run(str(each))) for each in (run, tmp_path / "new"))
    assert gathered(second) == gathered(first)
    assert second.about.open_episodes == first.about.open_episodes != []
    nexts = pq.read_table(tmp_path / "out" / "meta" / "forebay" / "next-000000.parquet")
    assert len(nexts) == 3  # one for each episode: all others are those of the frame that follows


def test_next_observations_that_do_not_follow_are_kept_and_a_choice_of_rows_comes_back(tmp_path: Path) -> None:
    with ReplayBuffer(40, directory=str(tmp_path / "run"), seed=1) as buffer:
        buffer.resume()
        for step in range(20):
            obs = np.arange(2.0) + step
            after = obs + (1 if step % 3 else 7)
            buffer.extend({"obs": obs, "next_obs": after, "action": np.ones(2), "reward": obs}, envs=2)
        buffer.save(1, wait=True)
    for number, where in enumerate([[], ["reward>3"], ["reward!=8"]]):
        for to in ("lerobot", "jsonl"):
            export(str(tmp_path / "run"), tmp_path / f"{to}{number}", to=to, where=where)
            import_data(tmp_path / f"{to}{number}", tmp_path / f"{to}{number}-new")
        one, other = (transitions_of(open_run(str(tmp_path / f"{to}{number}-new"))) for to in ("lerobot", "jsonl"))
        assert gathered(one) == gathered(other)


def each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is told of each episode be written into a file of its own."""
    monkeypatch.setattr(lerobot_out, "_WAITING_BYTES", 1)
    monkeypatch.setattr(lerobot_meta, "_MOST_TIMES", 1)


def told_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder / "meta/episodes")) for path in folder.glob("meta/episodes/*/*"))


def test_what_is_told_of_episodes_goes_into_one_file_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each_by_itself(monkeypatch)
    monkeypatch.setattr(lerobot_meta, "CHUNK", 2)
    run = camera_run(tmp_path / "run")
    export(run, tmp_path / "out", to="lerobot")
    names = ["chunk-000/file-000.parquet", "chunk-000/file-001.parquet", "chunk-001/file-000.parquet"]
    assert told_in(tmp_path / "out") == names
    for number, name in enumerate(names):
        table = pq.read_table(tmp_path / "out/meta/episodes" / name)
        told = [table.column(column).to_pylist() for column in ("episode_index", "meta/episodes/chunk_index")]
        assert told == [[number], [number // 2]]
        assert table.column("meta/episodes/file_index").to_pylist() == [number % 2]
    import_data(tmp_path / "out", tmp_path / "new")
    assert gathered(transitions_of(open_run(str(tmp_path / "new")))) == gathered(transitions_of(open_run(run)))


def opened_by_lerobot(folder: Path, out: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Return what LeRobot gives of a dataset, and what it tells of it."""
    script = PEERS / "read_lerobot.py"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent / "home"), "PYTHONPATH": ""}
    command = [PYTHON, str(script), str(folder), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as found:
        arrays = {name: found[name] for name in found.files}
    return arrays, json.loads(str(arrays.pop("told")))


@pytest.mark.skipif(not PYTHON, reason="FOREBAY_LEROBOT_PYTHON names no interpreter that has LeRobot")
@pytest.mark.parametrize("files", [1, 3])
def test_lerobot_opens_what_was_written(tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is told of the episodes in one file, or in one for each."""
    if files > 1:
        each_by_itself(monkeypatch)
    run = camera_run(tmp_path / "run")
    export(run, tmp_path / "out", to="lerobot", fps=5, part_bytes=8000)
    assert len(told_in(tmp_path / "out")) == files
    found, told = opened_by_lerobot(tmp_path / "out", tmp_path / "found.npz")
    rows = rows_in(run)
    place, end = rows.marks["#place"], rows.marks["#end"]
    begins = np.flatnonzero(np.r_[True, np.diff(place) != 1])
    assert told["fps"] == 5
    assert told["episodes"] == [list(each) for each in zip(begins, [*begins[1:], 20], strict=True)]
    frame = np.arange(20) - np.repeat(begins, np.diff([*begins, 20]))
    assert np.array_equal(found["item/frame_index"], frame)
    assert np.allclose(found["item/timestamp"], frame / 5)
    assert np.array_equal(found["item/next.done"], (end == 1) | (end == 2))
    for name, column in [
        ("observation.state", "obs.state"),
        ("observation.depth", "obs.depth"),
        ("action", "action"),
        ("next.reward", "reward"),
        ("next.terminated", "terminated"),
        ("next.truncated", "truncated"),
        ("next.success", "success"),
    ]:
        assert found[f"held/{name}"].dtype == rows.columns[column].dtype, name
        assert np.array_equal(found[f"held/{name}"], rows.columns[column]), name
        assert np.allclose(found[f"item/{name}"], rows.columns[column]), name
    half = (rows.columns["half"].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found["held/half"], half, equal_nan=True)
    front, wrist = rows.columns["obs.front"].transpose(0, 3, 1, 2), rows.columns["obs.wrist"]
    for name, images in (("front", front), ("wrist", wrist)):  # LeRobot gives channels first, from 0 to 1
        assert np.array_equal(found[f"item/observation.{name}"], images.astype(np.float32) / 255)
        assert np.allclose(np.ravel(told["stats"][f"observation.{name}"]["mean"]), images.mean(axis=(0, 2, 3)) / 255)
    assert np.allclose(told["stats"]["action"]["std"], rows.columns["action"].std(axis=0))
    assert told["stats"]["action"]["count"] == [20]
    depth = rows.columns["obs.depth"].reshape(-1, 5)
    assert np.allclose(told["stats"]["observation.depth"]["mean"], depth.mean(axis=0))
    assert told["after one more"] == [22, len(begins) + 1, len(begins)]
    assert "counts" not in told["features"]
    actions, last = rows.columns["action"], np.r_[begins[1:], 20] - 1
    after = np.where(np.isin(np.arange(20), last), np.arange(20), np.arange(20) + 1)
    assert np.array_equal(found["pairs/action"], np.stack([actions, actions[after]], 1))
    assert np.array_equal(found["pairs/pad"][:, 1], np.isin(np.arange(20), last))


@pytest.mark.parametrize("name", ["lerobot_0_4_4", "lerobot_0_3_3"])
def test_a_dataset_that_lerobot_wrote(tmp_path: Path, name: str) -> None:
    imported = import_data(PEERS / name, tmp_path / "new")
    assert (imported.from_, imported.count) == ("lerobot", 7)
    assert any("0 'lift the cube', 1 'put it down'" in note for note in imported.notes)
    assert any("fps was 10" in note for note in imported.notes)
    rows = rows_in(tmp_path / "new")
    begin = 0
    columns = {
        "observation.state": "obs.state",
        "observation.images.front": "obs.images.front",
        "observation.grid": "obs.grid",
        "action": "action",
        "next.reward": "reward",
        "next.done": "done",
        "next.truncated": "truncated",
        "force": "force",
        "task_index": "task_index",
    }
    assert set(rows.columns) == {*columns.values(), "timestamp"}
    for number, length in enumerate(peers.LEROBOT_LENGTHS):
        expected, part = peers.lerobot_episode(number), rows.part(slice(begin, begin + length))
        for feature, column in columns.items():
            found, given = part.columns[column], expected[feature]
            single = column in ("reward", "done", "truncated")
            assert found.dtype == given.dtype, feature
            assert np.array_equal(found, given[:, 0] if single else given), feature
        assert np.array_equal(part.columns["timestamp"], (np.arange(length) / 10).astype(np.float32))
        assert part.marks["#end"].tolist() == [0] * (length - 1) + [(1, 2, 3)[number]]
        assert part.marks["#place"].tolist() == list(range(length))
        assert set(part.marks["#episode"].tolist()) == {number}
        begin += length


def test_an_export_without_its_description_is_read_as_anybodys(tmp_path: Path) -> None:
    run = camera_run(tmp_path / "run")
    export(run, tmp_path / "out", to="lerobot", part_bytes=8000)
    (tmp_path / "out" / "forebay.json").unlink()
    assert import_data(tmp_path / "out", tmp_path / "new").count == 20
    before, after = rows_in(run), rows_in(tmp_path / "new")
    same = (
        "obs.state",
        "obs.front",
        "obs.wrist",
        "obs.depth",
        "action",
        "reward",
        "terminated",
        "truncated",
        "success",
    )
    for name in same:
        assert after.columns[name].dtype == before.columns[name].dtype, name
        assert np.array_equal(after.columns[name], before.columns[name]), name
    assert after.marks["#end"].tolist() == [*before.marks["#end"][:-1].tolist(), 3]


def test_a_dataset_goes_through_a_run_and_is_what_it_was(tmp_path: Path) -> None:
    import_data(PEERS / "lerobot_0_4_4", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", to="lerobot", fps=10)
    one, other = (
        pq.read_table(next((each / "data").glob("*/*.parquet"))) for each in (PEERS / "lerobot_0_4_4", tmp_path / "out")
    )
    assert set(other.column_names) == set(one.column_names)
    for name in one.column_names:
        found, expected = other.column(name).to_pylist(), one.column(name).to_pylist()
        if name != "observation.images.front":
            assert found == expected, name
    infos = [
        json.loads((each / "meta" / "info.json").read_text()) for each in (PEERS / "lerobot_0_4_4", tmp_path / "out")
    ]
    for name, feature in infos[0]["features"].items():
        assert infos[1]["features"][name] == feature, name
    assert pq.read_table(tmp_path / "out" / "meta" / "tasks.parquet").to_pylist() == [
        {"task_index": number, "__index_level_0__": f"task {number}"} for number in range(2)
    ]


def changed(folder: Path, **fields: Any) -> Path:
    """Return a copy of a dataset whose info says something else."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PEERS / "lerobot_0_4_4", folder)
    info = json.loads((folder / "meta" / "info.json").read_text())
    (folder / "meta" / "info.json").write_text(json.dumps({**info, **fields}))
    return folder


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    features = json.loads((PEERS / "lerobot_0_4_4" / "meta" / "info.json").read_text())["features"]
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"codebase_version": "v1.6"}, ConfigError, "version v1.6"),
        ({"total_frames": 8}, Damaged, "data has 7 frames in 1 files, and .* says 8"),
        ({"features": {**features, "gone": features["action"]}}, Damaged, "no column gone"),
        ({"features": {**features, "action": {"dtype": "float32", "shape": [3]}}}, Damaged, "column action has no"),
        (
            {"features": {**features, "observation.images.front": {"dtype": "image", "shape": [4, 4, 3]}}},
            Damaged,
            r"an image is \[6, 4, 3\], where \[4, 4, 3\] is said",
        ),
        ({"features": 7}, Damaged, "cannot be"),
    ]
    for fields, error, match in refused:
        with pytest.raises(error, match=match):
            import_data(changed(tmp_path / "data", **fields), tmp_path / "new")
        assert not (tmp_path / "new").exists()
    table = pq.read_table(next((changed(tmp_path / "data") / "data").glob("*/*.parquet")))
    images: list[tuple[Any, str]] = [
        (pa.array([{"bytes": b"\x89PNG", "path": None}] * 7), "an image cannot be read"),
        (pa.array([{"bytes": None, "path": "there.png"}] * 7), "an image is missing"),
        (pa.array([[1.0]] * 7), "an image is missing"),
    ]
    at = table.column_names.index("observation.images.front")
    for broken, match in images:
        file = tmp_path / "data" / "data" / "chunk-000" / "file-000.parquet"
        pq.write_table(table.set_column(at, "observation.images.front", broken), file)
        with pytest.raises(Damaged, match=match):
            import_data(tmp_path / "data", tmp_path / "new")


def test_videos_without_the_package_that_decodes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for name in ("lerobot_0_4_4_av1", "lerobot_0_3_3_av1"):
        with pytest.raises(ConfigError, match=r"lerobot: needs the package av, .*pip install 'forebay\[tools,video\]'"):
            import_data(PEERS / name, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_images_are_decoded_some_megabytes_at_a_time(tmp_path: Path) -> None:
    count, shape = 11, (700, 1000, 3)
    pictures = np.zeros((count, *shape), np.uint8)
    pictures[...] = np.arange(count)[:, None, None, None] * 20  # of one colour, a file of a few KB
    with ReplayBuffer(count, directory=str(tmp_path / "run"), seed=1) as buffer:
        buffer.resume()
        buffer.extend({"obs": pictures, "action": np.arange(count)}, envs=1)
        buffer.save(1, wait=True)
    export(str(tmp_path / "run"), tmp_path / "out", to="lerobot")
    (tmp_path / "out" / "forebay.json").unlink()
    stream = lerobot.read(str(tmp_path / "out"))
    assert isinstance(stream, Transitions)
    batches = list(stream.batches())
    assert max(batch.columns["obs.image"].nbytes for batch in batches) <= BATCH_BYTES
    rows = joined(batches)
    assert np.array_equal(rows.columns["obs.image"], pictures)
    assert np.array_equal(rows.columns["action"][:, 0], np.arange(count))


def test_files_that_are_whole_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes a file is let go with it, however many there are."""
    run = camera_run(tmp_path / "run", steps=300, size=300)
    writers: list[weakref.ref[Any]] = []
    alive: list[int] = []
    make = pq.ParquetWriter

    def made(*args: Any, **more: Any) -> Any:
        alive.append(sum(each() is not None for each in writers))
        writer = make(*args, **more)
        writers.append(weakref.ref(writer))
        return writer

    monkeypatch.setattr(pq, "ParquetWriter", made)
    export(run, tmp_path / "out", to="lerobot", part_bytes=1000)
    assert len(writers) > 20
    assert max(alive) <= 3


def test_episodes_without_an_end_wait_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what goes out is the same."""
    run = wander(tmp_path / "run", 3, 90, remove="stalest")
    assert len(run["id"]) > 30
    export(str(tmp_path / "run"), tmp_path / "one", to="lerobot")
    monkeypatch.setattr(by_episode, "_MOST_HELD", 0)
    monkeypatch.setattr(rearranged, "_WINDOW", 7)
    export(str(tmp_path / "run"), tmp_path / "other", to="lerobot", where=["score>=0"])
    names = sorted(each.relative_to(tmp_path / "one") for each in (tmp_path / "one").rglob("*.parquet"))
    for name in names:
        assert pq.read_table(tmp_path / "one" / name).equals(pq.read_table(tmp_path / "other" / name)), name
    assert len(names) == 4


def test_what_lerobot_cannot_hold_is_told_before_anything_is_written(tmp_path: Path) -> None:
    run = camera_run(tmp_path / "run")
    dry = export(run, tmp_path / "out", to="lerobot", dry_run=True)
    assert dry.notes == ["LeRobot cannot hold counts: uint64[2]: in meta/forebay, for an import alone"]
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="fps=5: 1 or more is needed, and that for --to lerobot alone"):
        export(run, tmp_path / "out", to="jsonl", fps=5)
    with ReplayBuffer(4, directory=str(tmp_path / "tasks"), seed=1) as buffer:
        buffer.resume()
        buffer.extend({"task_index": np.array([0, 1, 2**40, 3])})
        buffer.save(1, wait=True)
    with pytest.raises(ConfigError, match="task_index has 0 to 1099511627776"):
        export(str(tmp_path / "tasks"), tmp_path / "out", to="lerobot")
    assert not (tmp_path / "out").exists()


def test_a_changed_export_is_refused(tmp_path: Path) -> None:
    run = camera_run(tmp_path / "run")
    export(run, tmp_path / "out", to="lerobot")
    file = tmp_path / "out" / "meta" / "forebay" / "rows-000000.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, match="was changed"):
        import_data(tmp_path / "out", tmp_path / "new")
    file.unlink()
    with pytest.raises(Damaged, match="is missing"):
        import_data(tmp_path / "out", tmp_path / "new")


def test_a_choice_of_no_rows(tmp_path: Path) -> None:
    run = camera_run(tmp_path / "run")
    assert export(run, tmp_path / "out", to="lerobot", where=["reward>100"]).count == 0
    assert import_data(tmp_path / "out", tmp_path / "new").count == 0
