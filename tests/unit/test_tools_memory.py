"""What tools read of rows is not in memory as a whole: neither what was written back into them, nor priorities."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.config import Prioritized
from pipeline.store import blocks as files_in_blocks
from pipeline.tools import (
    Made,
    merge,
    output,
    reshard,
    salvage_run,
    scattered,
    split,
)
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.streams import KEY, PRIORITY
from pipeline.tools.kept_rows import rows_of
from pipeline.tools.pools import Sorting, pools_of
from pipeline.tools.sources import open_source
from tests.support.pooled import in_pieces

ROWS, WIDTH = 60_000, 250
BYTES = ROWS * WIDTH * 4  # of what was written back: 60 MB


def filled(directory: Path, remove: str) -> str:
    """Save a buffer into all rows of which a wide column was written back later."""
    options: dict[str, Any] = {"select": Prioritized(alpha=0.5), "remove": remove}
    with ReplayBuffer(ROWS, directory=directory, seed=5, **options) as buffer:
        buffer.resume()
        for first in range(0, ROWS, 5000):
            numbers = np.arange(first, first + 5000)
            buffer.extend({"n": numbers, "wide": np.zeros((5000, WIDTH), np.float32), "terminated": numbers % 10 == 9})
        buffer.save(1, wait=True)
        keys = buffer.ring.keys()
        for part in np.split(keys, 12):
            buffer.write_back(part, {"wide": np.repeat(part[:, None], WIDTH, 1).astype(np.float32)})
        buffer.update_priorities(keys, 1.0 + keys % 7)
        buffer.save(2, wait=True)
    return str(directory)


def exported(run: str) -> int:
    count = 0
    for rows in transitions_of(open_run(run)).batches():
        keys = rows.marks[KEY]
        assert (rows.columns["wide"][:, 0] == keys).all()
        assert (rows.columns["wide"][:, -1] == keys).all()
        assert np.allclose(rows.marks[PRIORITY], (1.0 + keys % 7) ** 0.5)
        count += len(keys)
    return count


def chunks(run: str) -> int:
    (stream,) = rows_of(open_source(run))
    count = 0
    for chunk in stream.chunks(["selector.priorities.float64"]):
        assert (chunk.arrays["wide"][:, 0] == chunk.key).all()
        count += len(chunk.key)
    return count


def met(run: str, arrays: dict[str, np.ndarray], count: int) -> np.ndarray:
    found: np.ndarray = arrays["wide"][:, 0] % 2 == 0
    return found


def episodes(run: str) -> int:
    (stream,) = rows_of(open_source(run))
    found = stream.episodes(["wide"], lambda arrays, count: met(run, arrays, count))
    assert found.met.all()
    return int(found.rows.sum())


def looked(run: str) -> int:
    (pool,) = pools_of([open_source(run)])
    pool.look(Sorting(["wide"], lambda arrays, count: met(run, arrays, count)), os.path.dirname(run))
    assert pool.sorts == {0: ROWS // 2, 1: ROWS // 2}
    return len(pool)


@pytest.mark.parametrize(
    ("remove", "read"),
    [("fifo", exported), ("lifo", exported), ("fifo", chunks), ("fifo", episodes), ("lifo", looked)],
)
def test_rows_are_read_without_all_that_was_written_back(
    tmp_path: Path, remove: str, read: Callable[[str], int]
) -> None:
    run = filled(tmp_path / "run", remove)
    tracemalloc.start()
    try:
        assert read(run) == ROWS
        assert tracemalloc.get_traced_memory()[1] < BYTES * 0.6
    finally:
        tracemalloc.stop()


FEW, MANY = 150_000, 600_000


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Pools of few and of many rows, of which a third was written again into other slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sizes, "BLOCK_BYTES", 1 << 17)
        return {rows: pool_of(tmp_path_factory.mktemp("pools") / "pool", rows) for rows in (FEW, MANY)}


def pool_of(directory: Path, rows: int) -> Path:
    with ReplayBuffer(rows, directory=directory, select="prioritized", remove={"by": "min", "field": "n"}) as buffer:
        buffer.resume()
        for first in range(0, rows + rows // 3, rows // 6):
            numbers = np.arange(first, first + rows // 6)
            columns = {"n": numbers, "value": numbers / 2, "terminated": numbers % (rows // 100) == 0}
            keys = np.array(buffer.extend(columns, version=first % 3))
            buffer.update_priorities(keys, 1.0 + numbers % 7)
            if first > rows // 2:
                buffer.write_back(keys[::2], {"value": numbers[::2] / 4})
                buffer.save(first, wait=True)
    return directory


def of_ranks(pool: Path, out: Path) -> list[Made]:
    return [reshard(pool, out, 3)]


def salvaged(pool: Path, out: Path) -> list[Made]:
    made = reshard(pool, f"{out}-ranks", 2)
    tracemalloc.reset_peak()
    salvage_run(f"{out}-ranks", out)
    return [made]


TOOLS: dict[str, Callable[[Path, Path], list[Made]]] = {
    "split": lambda pool, out: split(pool, [f"{out}-1", f"{out}-2"], count=FEW // 3),
    "where": lambda pool, out: split(pool, [f"{out}-1", f"{out}-2"], where={"n": (">", FEW)}),
    "merge": lambda pool, out: [merge([pool], out)],
    "reshard": of_ranks,
    "salvage": salvaged,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_of_the_rows_of_a_pool_few_are_in_memory(
    pools: dict[int, Path], tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch, 1 << 12, 1 << 12)
    monkeypatch.setattr(scattered, "_READ", 1 << 17)
    monkeypatch.setattr(output, "_GATHERED", 1 << 17)
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(files_in_blocks, "LARGE_BLOCK", 1 << 17)
    peaks = {}
    for rows, pool in pools.items():
        tracemalloc.start()
        try:
            made = TOOLS[tool](pool, tmp_path / f"out{rows}")
            peaks[rows] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sum(each.rows for each in made) == rows
    assert peaks[MANY] - peaks[FEW] < 3 * (MANY - FEW), peaks
