"""What saving and resuming cost, beside the disk's own speed, ``torch.save`` and TorchRL, by turns in one run.

A buffer of rollouts of 384 KB each and the state of an attached trainer; every round begins with a new folder, the
first is not counted, and medians are shown. The disk's side writes the same bytes from memory to one file, in order,
and syncs it. Reading goes through one block of memory, which is the least that it can cost; into memory of its own it
is shown beside that. All of it lies in ``folder``, which must not be in memory.

TorchRL is measured by the interpreter that ``FOREBAY_TORCHRL_PYTHON`` names, if it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

import torch

from benchmarks import disk, peaks, torchrl_dumps
from benchmarks.checkpoint_sides import MEMBER, Content, Trainer, idle, resume, save_rollouts, save_trainer
from benchmarks.harness import Row, times
from pipeline.checkpoint import verify

GB = 10**9
SEGMENT = 64 << 20
TORCHRL = "FOREBAY_TORCHRL_PYTHON"
DISK, TORCH, READ, WHOLE = "the disk", "torch.save + fsync", "reading", "reading into memory of its own"
Durability = Literal["none", "kill"]


class Bench:
    """One run of the benchmark in a folder of its own."""

    def __init__(self, folder: str, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds

    def rows(self, sizes: Sequence[int], main: int) -> list[Row]:
        """Return every row; ``main`` is the size for which the trainer, the loop and memory are measured."""
        rows = []
        for size in sizes:
            rows += self.rollouts(size, loop=size == main)
        return rows + self.trainer(main) + (self.memory(main) if peaks.possible() else [])

    def place(self, name: str) -> str:
        """Return a path in the folder at which nothing lies."""
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    # -- rollouts ----------------------------------------------------------------------------------------------

    def rollouts(self, size: int, *, loop: bool) -> list[Row]:
        """A buffer of ``size`` bytes."""
        content, name = Content(size), _name(size)
        figures = self._save_rounds(content)
        peers = {TORCH: median(figures[TORCH]), **self._torchrl(size)}
        rows = []
        for durability in ("none", "kill"):
            row = times(
                f"first save, {name}, {durability}", figures[durability], DISK, figures[DISK], unit="s", most=1.3
            )
            rows.append(_with(row, peers))
        for durability in ("none", "kill"):
            row = times(
                f"save after 1% more, {name}, {durability}",
                figures[f"{durability}, more"],
                "the first save, durability=none",
                figures["none"],
                unit="s",
                most=0.05,
            )
            rows.append(row)
        if loop:
            rows += self._hold_rows(name, figures)
        run = os.path.join(self.folder, "none")
        rows.append(_size_row(name, run, size))
        rows += self._loads(f"load, {name}", run, lambda: asyncio.run(resume(run)), most=1.3)
        rows += self._loads(f"verify, {name}", run, lambda: _verified(run), most=1.5)
        self._clear()
        return rows

    def _save_rounds(self, content: Content) -> dict[str, list[float]]:
        figures: dict[str, list[float]] = defaultdict(list)
        for number in range(self.rounds + 1):
            self._clear()
            found = {}
            for side, save in self._plain_sides(content).items():
                disk.warm_memory(self.folder, content.size)
                content.touch()
                found[side] = save()
                self._clear()
            durability: Durability
            for durability in ("kill", "none"):  # the second one's run is loaded afterwards
                self._clear()
                first, more = asyncio.run(save_rollouts(self.place(durability), content, durability))
                found[durability], found[f"{durability}, more"] = first["committed"], more["committed"]
                found[f"{durability}, held"] = first["held"]
            if number:
                for key, value in found.items():
                    figures[key].append(value)
        return figures

    def _plain_sides(self, content: Content) -> dict[str, Callable[[], float]]:
        return {
            DISK: lambda: disk.write_synced(self.place("plain"), content.chunks()),
            TORCH: lambda: disk.torch_saved(self.place("torch"), content.state()),
        }

    def _torchrl(self, size: int) -> dict[str, float]:
        python = os.environ.get(TORCHRL)
        if not python:
            return {}
        folder = self.place("torchrl")
        os.mkdir(folder)
        row = min(MEMBER, size)
        command = [python, torchrl_dumps.__file__, folder, str(size), str(row), str(self.rounds + 1)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        spent = json.loads(printed.splitlines()[-1])  # it greets on stdout
        shutil.rmtree(folder)
        return {"TorchRL dumps + fsync": median(spent[1:])}

    def _hold_rows(self, name: str, figures: dict[str, list[float]]) -> list[Row]:
        quiet = asyncio.run(idle(median(figures["none"])))
        return [
            Row(
                name=f"loop held at worst, first save of {name}, {durability}",
                ours=median(figures[f"{durability}, held"]),
                unit="ms",
                limit=10,
                asked="10 ms",
                peers={"worst round": max(figures[f"{durability}, held"]), "an idle loop": quiet},
            )
            for durability in ("none", "kill")
        ]

    # -- reading -----------------------------------------------------------------------------------------------

    def _loads(self, name: str, run: str, ours: Callable[[], float], *, most: float, beside: str = READ) -> list[Row]:
        """With the page cache warm, and cold where it can be emptied; ``ours`` returns its seconds."""
        rows = []
        for cache in ("cold", "warm"):
            spent: dict[str, list[float]] = defaultdict(list)
            sides: dict[str, Callable[[Sequence[str]], float]] = {
                READ: disk.read_through,
                WHOLE: disk.read_whole,
                "ours": lambda _: ours(),
            }
            for _ in range(self.rounds + 1):
                for side, read in sides.items():
                    paths = disk.needed_by_resume(run)
                    if cache == "cold" and not disk.evict(paths):
                        break
                    disk.warm_array(sum(map(os.path.getsize, paths)))
                    spent[side].append(read(paths))
            if spent:
                row = times(f"{name}, {cache}", spent["ours"][1:], beside, spent[beside][1:], unit="s", most=most)
                rows.append(_with(row, {side: median(spent[side][1:]) for side in (READ, WHOLE)}))
        return rows

    # -- the trainer -------------------------------------------------------------------------------------------

    def trainer(self, size: int) -> list[Row]:
        """An attached state of ``size`` bytes: saved again and again in one run, then loaded."""
        content, name = Content(size), _name(size)
        figures: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.rounds + 1):
            for side, save in self._plain_sides(content).items():
                disk.warm_memory(self.folder, size)
                content.touch()
                figures[side].append(save())
                self._clear()
        run = self.place("trainer")
        saves = asyncio.run(save_trainer(run, content, self.rounds + 1))[1:]
        plain, torchs = figures[DISK][1:], figures[TORCH][1:]
        returned, committed = ([save[key] for save in saves] for key in ("returned", "committed"))
        peers = {TORCH: median(torchs)}
        rows = [
            times(f"save of a trainer of {name} returns", returned, TORCH, torchs, unit="s", most=1),
            times(f"save of a trainer of {name} is committed", committed, DISK, plain, unit="s", most=1.3),
        ]
        held = [save["held"] for save in saves]
        rows = [_with(row, peers) for row in rows]
        rows.append(
            Row(
                name=f"loop held at worst, save of a trainer of {name}",
                ours=median(held),
                unit="ms",
                limit=10,
                asked="10 ms",
                peers={"worst round": max(held)},
            )
        )
        state = Trainer({key: torch.zeros_like(tensor) for key, tensor in content.state().items()})

        def load() -> float:
            state.touch()
            return asyncio.run(resume(run, state))

        loads = self._loads(f"load of a trainer of {name}", run, load, most=1.3, beside=WHOLE)
        rows += [_with(row, {"torch.load, page cache warm": self._torch_loads(content, state)}) for row in loads]
        self._clear()
        return rows

    def _torch_loads(self, content: Content, state: Trainer) -> float:
        path, spent = self.place("torch"), []
        torch.save(content.state(), path)
        for _ in range(self.rounds + 1):
            state.touch()
            disk.warm_array(content.size)
            begun = time.perf_counter()
            state.load_state_dict(torch.load(path))
            spent.append(time.perf_counter() - begun)
        return median(spent[1:])

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self, size: int) -> list[Row]:
        """What a save and a load need beyond what is saved, and what is loaded."""
        rows = []
        for kind in peaks.KINDS:
            verb, what = kind.split()
            extra = peaks.measure(kind, os.path.join(self.folder, what), size)
            loaded = size if kind == "load trainer" else 0  # the state as it was read, whole before anything is changed
            rows.append(
                Row(
                    name=f"extra memory at worst, {verb} {what}, {_name(size)}",
                    ours=(extra - loaded) / 1e6,
                    unit="MB",
                    limit=SEGMENT / 1e6,
                    asked="one segment" + (" beyond the state that was read" if loaded else ""),
                )
            )
        self._clear()
        return rows

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _name(size: int) -> str:
    return f"{size / GB:g} GB"


def _with(row: Row, peers: dict[str, float]) -> Row:
    return replace(row, peers={**row.peers, **peers})


def _size_row(name: str, run: str, size: int) -> Row:
    stored = size + max(1, size // 100)  # one percent was added after the first save
    ratio = sum(map(os.path.getsize, disk.files_of(run))) / stored
    return Row(name=f"bytes on the disk, {name}", ours=ratio, unit="x content", limit=1.01, asked="content and 1%")


def _verified(run: str) -> float:
    begun = time.perf_counter()
    assert verify(run).whole
    return time.perf_counter() - begun


def run(scale: float = 1.0, *, folder: str | None = None, large: bool = False) -> list[Row]:
    """Every row. ``folder`` says on which disk, ``large`` adds a buffer of 4 GB.

    Raises:
        SystemExit: the folder is in memory, and the figures would count.
    """
    sizes = [int(scale * size) for size in (GB // 10, GB, *((4 * GB,) if large else ()))]
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder or os.getcwd()) as place:
        if scale >= 1 and disk.in_memory(place):
            raise SystemExit(f"{place} lies in memory; name a folder on a disk: --folder")
        return Bench(place, rounds=5 if scale >= 1 else 1).rows(sizes, sizes[1])
