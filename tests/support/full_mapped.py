"""Buffers whose rows lie in a file, on a disk that is really full: run in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from pipeline import ReplayBuffer, WriteFailed
from pipeline.buffer.transitions import mapped
from pipeline.errors import ConfigError

ROW = 64 << 10


def rows(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {"n": numbers, "image": np.repeat(numbers % 251, ROW).astype(np.uint8).reshape(count, ROW)}


def seen(buffer: ReplayBuffer) -> list[int]:
    """The numbers of the rows, each of which must be whole."""
    found: list[int] = []
    for key in buffer.ring.keys().tolist():
        image = buffer.ring.mark("image", np.array([key]))
        assert (image == image[0, 0]).all()
        found.append(int(image[0, 0]))
    return found


def run(folder: str) -> dict[str, Any]:
    """The disk has room for 24 MiB, and others fill it while rows come."""
    mapped.STEP_BYTES = 1 << 20
    told: dict[str, Any] = {}
    buffer = ReplayBuffer(1000, directory=os.path.join(folder, "run"), storage="mapped", returns="numpy")
    try:
        buffer.extend(rows(0, 1))
    except ConfigError as error:
        told["refused"] = str(error)
    buffer = ReplayBuffer(200, directory=os.path.join(folder, "run"), storage="mapped", returns="numpy")
    buffer.extend(rows(0, 10))
    with open(os.path.join(folder, "filler"), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 16 << 20)
    try:
        while True:
            buffer.extend(rows(len(buffer), 7))
    except WriteFailed as error:
        told["full"] = str(error)
    told["kept"] = seen(buffer) == [number % 251 for number in range(len(buffer))]
    told["rows"] = len(buffer)
    os.unlink(os.path.join(folder, "filler"))
    while len(buffer) < 200:
        buffer.extend(rows(len(buffer), 1))
    told["later"] = seen(buffer) == [number % 251 for number in range(200)]
    return told


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))  # noqa: T201  what the test reads
