"""What tools read of rows is not in memory as a whole: neither what was written back into them, nor priorities."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.config import Prioritized
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import open_run
from pipeline.tools.interchange.streams import KEY, PRIORITY
from pipeline.tools.kept_rows import rows_of
from pipeline.tools.pools import pools_of
from pipeline.tools.sources import open_source

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
    pool.look(["wide"], lambda arrays, count: met(run, arrays, count))
    assert int(pool.met.sum()) == ROWS // 2
    return len(pool.met)


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
