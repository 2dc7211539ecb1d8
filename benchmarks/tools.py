"""What ``verify`` and ``merge`` cost, beside the disk's own speed for the same bytes, by turns in one run.

Two buffers of transitions of 165 bytes, half of ``size`` bytes each, that become one: every row is read, checked, and
copied. And a buffer of trajectories that is merged by links, so that nothing of it is copied. "A plain copy" reads the
same files through one block of memory, writes them to one file, and syncs it; "reading" reads them alone. Page cache
warm: all was read just before; cold: it was asked to let go of it. Every round begins with a new folder, the first is
not counted, and medians are shown. All of it lies in ``folder``, which must not be in memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

import torch

from benchmarks import disk, peaks
from benchmarks.harness import Row, times
from benchmarks.transitions import GB, MB, ROW, content, filled
from pipeline import TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.store.memory import aligned_memory
from pipeline.tools import merge

COPY, READ = "a plain copy", "reading"
STEPS, ENVS, WIDTH = 100, 16, 256  # of a trajectory: 1.7 MB


class Bench:
    """One run of the benchmark in a folder of its own."""

    def __init__(self, folder: str, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds

    def rows(self, size: int) -> list[Row]:
        """Return every row, of runs with ``size`` bytes of content."""
        return [*self._copied(size), self._linked(size)]

    def place(self, name: str) -> str:
        """Return a path in the folder at which nothing lies."""
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def _copied(self, size: int) -> list[Row]:
        """Two buffers that become one."""
        runs = [self.place("a"), self.place("b")]
        rows = content(max(1000, size // 2 // ROW))
        for run in runs:
            with filled(run, "uniform", rows, len(rows["reward"])) as buffer:
                buffer.save(0, wait=True)
            del buffer
        del rows
        paths = [path for run in runs for path in disk.files_of(run)]
        found: list[Row] = []
        for cache in ("warm", "cold") if disk.evict(paths) else ("warm",):
            took = self._rounds(runs, paths, cache == "cold")
            name = f"{size / GB:g} GB, page cache {cache}"
            for what, peer, most in (("verify", READ, 1.5), ("merge of two buffers", COPY, 2.0)):
                row = times(f"{what}, {name}", took[what], peer, took[peer], unit="s", most=most)
                share = {f"share of the speed of {peer}": median(took[peer]) / median(took[what])}
                found.append(replace(row, peers={**row.peers, **share}))
        return [*found, *(self._memory(runs, size) if peaks.possible() else ())]

    def _memory(self, runs: Sequence[str], size: int) -> Iterator[Row]:
        """How much memory commands take, of which none may need more for more rows."""
        empty = _peak_of(["--help"])
        both = self.place("out")
        commands = {
            "merge": ["merge", *runs, "--out", both],
            "verify": ["verify", both],
            "inspect": ["inspect", both],
            "sample": ["sample", both, "-n", "16"],
            "split": ["split", both, "--fraction", "0.5", "--out", self.place("one"), self.place("other")],
            "reshard": ["reshard", both, "--to", "3", "--out", self.place("shards")],
            "salvage": ["salvage", both, self.place("salvaged")],
        }
        for to in ("safetensors", "parquet", "datasets"):  # JSON lines would take as long as all else
            if to == "safetensors" or find_spec("datasets") is not None:
                commands[f"export to {to}"] = ["export", both, self.place(f"rows-{to}"), "--to", to]
                commands[f"import of {to}"] = ["import", self.place(f"rows-{to}"), self.place(f"of-{to}")]
        for name, command in commands.items():
            yield Row(
                name=f"peak memory of {name}, {size / GB:g} GB",
                ours=_peak_of(command),
                unit="MB",
                limit=500.0,
                asked="500 MB",
                peers={"an empty command": empty},
            )

    def _rounds(self, runs: Sequence[str], paths: Sequence[str], cold: bool) -> dict[str, list[float]]:
        def verified() -> float:
            return _timed(lambda: _check(runs))

        def copied() -> float:
            folder = self.place("copy")
            os.mkdir(folder)
            return disk.write_synced(os.path.join(folder, "file"), _chunks(paths))

        def merged() -> float:
            out = self.place("out")
            return _timed(lambda: merge(runs, out))

        sides: dict[str, Callable[[], float]] = {
            READ: lambda: disk.read_through(paths),
            "verify": verified,
            COPY: copied,
            "merge of two buffers": merged,
        }
        took: dict[str, list[float]] = defaultdict(list)
        for number in range(self.rounds + 1):
            for name, side in sides.items():
                if cold:
                    disk.evict(paths)
                else:
                    disk.read_through(paths)
                seconds = side()
                if number:
                    took[name].append(seconds)
        return took

    def _linked(self, size: int) -> Row:
        """Trajectories whose segments are linked; the numbers stay, as there is one run."""
        run = self.place("trajectories")
        step = torch.rand(STEPS, ENVS, WIDTH)
        fields = {"actions": step, "rewards": step[..., 0], "dones": step[..., 0] < 0, "curr_obs": {"state": step}}
        count = max(2, size // (2 * step.nbytes))
        with TrajectoryBuffer(directory=run) as buffer:
            buffer.resume()
            for number in range(count):
                buffer.add_trajectories([{**fields, "model_weights_id": "w", "max_episode_length": number}])
            buffer.save(0, wait=True)
        seconds = []
        for _ in range(self.rounds + 1):
            out = self.place("out")
            begun = time.perf_counter()
            made = merge([run], out)
            seconds.append(time.perf_counter() - begun)
        return Row(
            name=f"merge by link, {size / GB:g} GB of trajectories",
            ours=median(seconds[1:]),
            unit="s",
            limit=1.0,
            asked="1 s at 2 GB",
            peers={"MB linked": made.linked / MB, "of MB": made.bytes / MB},
        )


def _peak_of(command: Sequence[str]) -> float:
    """Return how many MB a command of ``forebay`` had in memory at most."""
    script = "import sys; from pipeline.cli import main\n"
    script += "try: code = main(sys.argv[1:])\nexcept SystemExit as ended: code = ended.code\n"
    # Not what getrusage says: a process inherits that from the one that it was forked from.
    script += "said = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
    script += "print(said['VmHWM'].split()[0], file=sys.stderr); sys.exit(code)"
    ended = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=True)
    return int(ended.stderr.split()[-1]) * 1024 / MB


def _check(runs: Sequence[str]) -> None:
    for run in runs:
        assert verify(run).whole


def _timed(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def _chunks(paths: Sequence[str]) -> Iterator[memoryview]:
    """Yield what is in files, through one block of memory."""
    block = aligned_memory(disk.BLOCK)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while read := file.readinto(block):
                yield block[:read]


def run(scale: float = 1.0, *, folder: str | None = None) -> list[Row]:
    """Every row; 2 GB at a scale of 1. ``folder`` says on which disk.

    Raises:
        SystemExit: the folder is in memory, and the figures would count.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder or os.getcwd()) as place:
        if scale >= 1 and disk.in_memory(place):
            raise SystemExit(f"{place} lies in memory; name a folder on a disk: --folder")
        return Bench(place, rounds=3 if scale >= 1 else 1).rows(int(scale * 2 * GB))
