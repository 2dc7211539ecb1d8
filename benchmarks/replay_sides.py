"""The sides of the replay benchmark: our buffer, filled and read, and peers behind other interpreters."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import replay_peers
from benchmarks.replay_peers import BATCH, cut, fill
from pipeline.replay import ReplayBuffer

PYTHONS = ("FOREBAY_PEERS_PYTHON", "FOREBAY_TORCHRL_PYTHON")
Sides = dict[str, Callable[[], object]]
COLUMNS = ("obs", "action", "reward", "next_obs", "done")
blocks_of = cut


def full(work: str, rows: int, data: dict[str, np.ndarray], select: Any = "uniform") -> ReplayBuffer:
    """Return a buffer of ``rows`` rows, full, to which steps of 64 environments were added."""
    buffer = ReplayBuffer(rows, select=select, seed=1)
    fill(cut(data, 1_024), rows, 1_024, lambda block: buffer.extend(block, envs=64))
    return buffer


def reader(buffer: ReplayBuffer, count: int = BATCH, **options: Any) -> Sides:
    """Return calls that sample, read every column as tensors or as arrays, and update the priorities if there are
    such."""
    prioritized = buffer.options.select.__class__.__name__ == "Prioritized"
    new = np.random.default_rng(1).random(count)

    def read(kind: str) -> None:
        batch = buffer.sample(count, **options)
        batch = batch.numpy() if kind == "numpy" else batch
        found = {name: batch[name] for name in COLUMNS}
        assert len(found["obs"]) == count
        if prioritized:
            assert len(batch.weights) == count
            buffer.update_priorities(batch.keys, new)

    return {kind: partial(read, kind) for kind in ("torch", "numpy")}


class Peers:
    """Processes that hold the peers; each of these is in the first interpreter that has it."""

    def __init__(self) -> None:
        paths = [path for name in PYTHONS for path in os.environ.get(name, "").split(os.pathsep) if path]
        self._processes: list[subprocess.Popen[str]] = []
        self._where: dict[str, subprocess.Popen[str]] = {}
        self._lines: dict[str, list[str]] = {}
        for path in dict.fromkeys(paths):
            process = subprocess.Popen(
                [path, replay_peers.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._processes.append(process)
            for peer in self._ask(process, do="peers"):
                self._where.setdefault(peer, process)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.communicate()

    def _ask(self, process: subprocess.Popen[str], **wanted: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def open(self, kind: str, work: str, rows: int) -> None:
        """Fill a buffer of each peer that has such."""
        for peer, process in self._where.items():
            self._lines[peer] = self._ask(process, do="open", peer=peer, kind=kind, work=work, rows=rows)

    def having(self, line: str) -> list[str]:
        """Return the open peers that have a line."""
        return [peer for peer, lines in self._lines.items() if line in lines]

    def timed(self, peer: str, line: str, number: int, before: str | None) -> float:
        """Return a peer's seconds for each call."""
        wanted = {"peer": peer, "line": line, "number": number, "before": before}
        seconds: float = self._ask(self._where[peer], do="time", **wanted)
        return seconds

    def close(self) -> None:
        """Give the memory of all peers back."""
        self._lines.clear()
        for process in self._processes:
            self._ask(process, do="close")
