"""Seconds for TorchRL's ``ReplayBuffer.dumps`` and an ``fsync`` of its files: a script for an interpreter that has it.

``python torchrl_dumps.py FOLDER BYTES ROW_BYTES REPEATS`` prints a JSON list. It imports nothing of this project:
the published wheels of TorchRL are bound to one torch each, which need not be ours.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(folder: str, size: int, row: int, repeats: int) -> list[float]:
    """Fill a buffer once and dump it to a new folder ``repeats`` times."""
    import torch
    from tensordict import TensorDict  # it is where this runs, and not here
    from torchrl.data import LazyTensorStorage, ReplayBuffer  # type: ignore[import-not-found]

    rows = max(1, size // row)
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows))
    buffer.extend(TensorDict({"data": torch.randint(0, 256, (rows, row), dtype=torch.uint8)}, [rows]))
    spent = []
    for number in range(repeats):
        where = os.path.join(folder, f"torchrl-{number}")
        begun = time.perf_counter()
        buffer.dumps(where)
        for parent, _, names in os.walk(where):
            for path in [parent, *(os.path.join(parent, name) for name in names)]:
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
        spent.append(time.perf_counter() - begun)
    return spent


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
