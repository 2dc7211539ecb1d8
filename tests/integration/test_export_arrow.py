"""Parquet and `datasets`, as those who have these packages see what was written, and what they wrote themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.errors import ConfigError, Damaged
from pipeline.tools.exporting import export
from pipeline.tools.formats.arrow_rows import BATCH_BYTES
from pipeline.tools.importing import import_data
from tests.support.kept_runs import DTYPES, bits, pipeline_run, trajectory_run

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A buffer with a column of every dtype."""
    with ReplayBuffer(50, directory=str(tmp_path / "run"), seed=1) as buffer:
        buffer.resume()
        columns: dict[str, Any] = {name: bits(name, (50, 2), 1) for name in DTYPES}
        columns["image"] = np.arange(50 * 1200, dtype=np.uint8).reshape(50, 20, 20, 3)
        buffer.extend({**columns, "reward": np.arange(50), "terminated": np.arange(50) % 10 == 9}, version=3)
        buffer.save(4, wait=True)
    return str(tmp_path / "run")


def test_parquet_has_types_and_names_that_people_expect(run: str, tmp_path: Path) -> None:
    export(run, tmp_path / "out", to="parquet")
    table = pq.read_table(tmp_path / "out" / "transitions-00000.parquet")
    names = {field.name: str(field.type) for field in table.schema}
    assert names["reward"] == "int64"
    assert names["terminated"] == "bool"
    assert names["float16"] == "fixed_size_list<element: halffloat>[2]"
    assert names["bfloat16"] == "fixed_size_list<element: float>[2]"
    assert names["complex64"] == "fixed_size_list<element: float>[4]"
    assert names["image"] == "binary"
    assert names["#episode"] == "int64"
    assert table.column("reward").to_pylist() == list(range(50))
    assert table.column("#version").to_pylist() == [3] * 50
    brain = bits("bfloat16", (50, 2), 1).float().numpy()
    found = table.column("bfloat16").combine_chunks().flatten().to_numpy().reshape(50, 2)
    assert np.array_equal(found, brain, equal_nan=True)


async def test_parquet_has_a_row_for_each_trace_and_a_list_for_each_tensor(tmp_path: Path) -> None:
    run = await pipeline_run(tmp_path / "run", items=12)
    export(run, tmp_path / "out", to="parquet", tasks=["other"])
    rows = pq.read_table(tmp_path / "out" / "rollouts-00000.parquet").to_pylist()
    judges = [row for row in rows if row["agent"] == "judge"]
    assert judges
    assert all(row["completion_ids"] == list(range(row["index"])) for row in judges)
    assert {row["trace"] for row in rows} == {-1, 0, 1}
    assert '{"$bytes":"AP8="}' in judges[0]["info"]
    export(trajectory_run(tmp_path / "t"), tmp_path / "out2", to="parquet")
    first = pq.read_table(tmp_path / "out2" / "trajectories-00000.parquet").to_pylist()[0]
    assert first["curr_obs.states#shape"] == [first["steps"], 2, 4]


def test_a_changed_file_of_parquet_is_refused(run: str, tmp_path: Path) -> None:
    export(run, tmp_path / "out", to="parquet")
    file = tmp_path / "out" / "transitions-00000.parquet"
    raw = file.read_bytes()
    file.write_bytes(raw[:500] + bytes([raw[500] ^ 1]) + raw[501:])
    with pytest.raises(Damaged, match="was changed"):
        import_data(tmp_path / "out", tmp_path / "new")
    file.write_bytes(raw[:500])
    with pytest.raises(Damaged, match="Parquet"):
        import_data(file, tmp_path / "new")


def foreign(count: int = 20) -> dict[str, Any]:
    """Rows as somebody else may have them."""
    numbers = np.arange(count)
    return {
        "observation": [[float(at), at / 2] for at in range(count)],
        "reward": (numbers / 4).astype(np.float32),
        "is_terminal": numbers % 5 == 4,
        "episode_index": numbers // 5,
        "task": ["walk"] * count,
    }


def check_foreign(new: Path, notes: list[str]) -> None:
    assert notes == ["column task is string, no number, and did not come along"]
    with ReplayBuffer(20, directory=str(new), seed=1) as buffer:
        buffer.resume()
        batch = buffer.sample(64, n_step=5, gamma=1.0).numpy()
        assert batch["reward"].dtype == np.float32
        assert np.array_equal(batch["obs"][:, 0], batch.keys)
        assert buffer.statistics().episodes == 4


RENAME = {"observation": "obs", "is_terminal": "terminated"}


def test_rows_of_parquet_that_others_wrote(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    table = pa.table(foreign())
    for number in range(2):
        pq.write_table(table.slice(10 * number, 10), tmp_path / "rows" / f"part-{number}.parquet")
    imported = import_data(tmp_path / "rows", tmp_path / "new", rename=RENAME)
    assert (imported.from_, imported.count) == ("parquet", 20)
    check_foreign(tmp_path / "new", imported.notes)
    pq.write_table(pa.table({"x": [[1, 2], [3]]}), tmp_path / "ragged.parquet")
    with pytest.raises(ConfigError, match="column x: lists of several lengths"):
        import_data(tmp_path / "ragged.parquet", tmp_path / "other")
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "holes.parquet")
    with pytest.raises(ConfigError, match="column x: 1 of its values are missing"):
        import_data(tmp_path / "holes.parquet", tmp_path / "other")


def test_datasets_loads_what_was_written_and_is_read(run: str, tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    export(run, tmp_path / "out", to="datasets", part_bytes=20_000)
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(loaded) == 50
    assert loaded.features["reward"].dtype == "int64"
    assert loaded[7]["reward"] == 7
    assert loaded[7]["image"] == np.arange(7 * 1200, 8 * 1200).astype(np.uint8).tobytes()
    given = foreign()
    datasets.Dataset.from_dict(given, features=None).cast_column("reward", datasets.Value("float32")).save_to_disk(
        str(tmp_path / "theirs")
    )
    imported = import_data(tmp_path / "theirs", tmp_path / "new", rename=RENAME)
    assert (imported.from_, imported.count) == ("datasets", 20)
    check_foreign(tmp_path / "new", imported.notes)


@pytest.mark.parametrize(("dtype", "width"), [(np.uint8, 1000), (np.float32, 250), (np.float64, 125), (np.uint8, 1024)])
def test_few_numbers_are_written_at_once_however_narrow_they_are(tmp_path: Path, dtype: Any, width: int) -> None:
    """While Parquet is written each takes 4 bytes at the least; a column of a kilobyte is one value."""
    count = 20_000
    with ReplayBuffer(count, directory=str(tmp_path / "run")) as buffer:
        buffer.resume()
        buffer.extend({"x": np.zeros((count, width), dtype)})
        buffer.save(1, wait=True)
    export(str(tmp_path / "run"), tmp_path / "out", to="parquet")
    (path,) = (tmp_path / "out").glob("*.parquet")
    told = pq.ParquetFile(path).metadata
    most = max(told.row_group(number).num_rows for number in range(told.num_row_groups))
    bytes_of_row = width * max(4, np.dtype(dtype).itemsize) if width < 1024 else width
    assert 0.8 * BATCH_BYTES < most * bytes_of_row <= BATCH_BYTES
