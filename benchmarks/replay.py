"""What a replay buffer of transitions costs, beside other libraries and a bare gather, by turns in one run.

M: rows of 17 + 6 + 1 + 17 float32 and a bool, 1,000,000 of them. A: two images of 4 x 84 x 84 bytes in each row, beside
the action, the reward and the bool, 20,000 of them. Every buffer is full, and one row in a thousand ends its episode.
In each round every side takes its turn with the same number of calls, after a tenth as many that do not count; medians
of the rounds are shown. A sampled batch counts with every column read, as tensors and as arrays.

Peers are measured by the interpreters that ``FOREBAY_PEERS_PYTHON`` (several: like ``PATH``) and
``FOREBAY_TORCHRL_PYTHON`` name, if they do: see ``replay_peers.py``. A peer that none of them has is left out.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row
from benchmarks.replay_peers import BATCH, in_order, rows_of, timed, timed_after
from benchmarks.replay_sides import Peers, Sides, blocks_of, full, reader
from pipeline.config import Prioritized, Slices
from pipeline.replay import ReplayBuffer

SELECT = Prioritized(alpha=0.6, beta=0.4)
BARE_M, BARE_A, BARE_ADD = "one packed take + indices", "two takes + indices", "a write per column"
BARE_A_2 = "two index_select by two threads"


class Bench:
    """One run; ``scale`` is of the rows and of the calls."""

    def __init__(self, peers: Peers, scale: float) -> None:
        self.peers, self.scale = peers, scale
        self.rounds = 7 if scale >= 1 else 1
        self.rows: list[Row] = []

    def calls(self, most: int) -> int:
        """How many calls are timed in a turn."""
        return max(2, int(most * self.scale))

    def line(
        self,
        name: str,
        ours: Sides,
        line: str,
        number: int,
        *,
        bare: Mapping[str, Callable[[], object]] | None = None,
        most: float | None = 1.0,
        of_bare: float | None = None,
        before: Callable[[], object] | None = None,
        between: str | None = None,
    ) -> list[float]:
        """Measure by turns; ours may be ``most`` times the best peer's and ``of_bare`` times the bare operation's."""
        number = self.calls(number)
        sides = {**ours, **(bare or {})}
        figures: dict[str, list[float]] = {}
        for _ in range(self.rounds + 1):
            for side, call in sides.items():
                spent = timed(call, number) if before is None else timed_after(call, before, number)
                figures.setdefault(side, []).append(spent * 1e6)
            for peer in self.peers.having(line):
                figures.setdefault(peer, []).append(self.peers.timed(peer, line, number, between) * 1e6)
        medians = {side: median(each[1:]) for side, each in figures.items()}  # the first round is not counted
        return [self._row(f"{name}{side}", medians, side, set(ours), set(bare or {}), most, of_bare) for side in ours]

    def _row(
        self,
        name: str,
        medians: Mapping[str, float],
        side: str,
        ours: set[str],
        bare: set[str],
        most: float | None,
        of_bare: float | None,
    ) -> float:
        theirs = {peer: each for peer, each in medians.items() if peer not in ours | bare}
        limits, asked = [], []
        if theirs and most is not None:
            best = min(theirs, key=lambda peer: theirs[peer])
            limits.append(most * theirs[best])
            asked.append(f"within {most:.3g}x of {best} ({medians[side] / theirs[best]:.2f}x)")
        for each in bare - {BARE_A_2} if of_bare is not None or not theirs else ():
            limits.append((of_bare or 3.0) * medians[each])
            asked.append(f"within {of_bare or 3.0:g}x of {each} ({medians[side] / medians[each]:.2f}x)")
        beside = {peer: each for peer, each in medians.items() if peer not in ours}
        limit = min(limits, default=medians[side])
        self.rows.append(
            Row(
                name=name,
                ours=medians[side],
                unit="us",
                limit=limit,
                asked=", ".join(asked) or "nobody to compare with",
                peers=beside,
            )
        )
        return medians[side]

    # -- M -----------------------------------------------------------------------------------------------------

    def small(self, rows: int) -> None:
        """Workload M."""
        peers, data = self.peers, rows_of("M", 16_384)
        buffer = full("M", rows, data)
        peers.open("uniform", "M", rows)
        packed = np.ones((rows, 168), np.uint8).view("V168")[:, 0]  # zeros would be one page that the kernel shares
        out, rng = np.empty(BATCH, "V168"), np.random.default_rng(0)
        bare = {BARE_M: lambda: packed.take(rng.integers(0, rows, BATCH), out=out, mode="clip")}
        self.line("M uniform sample 256, ", reader(buffer), "sample", 2_000, bare=bare, most=0.4, of_bare=2)
        for count, calls in ((1, 3_000), (64, 2_000), (1_024, 500)):
            self._add("M", buffer, data, count, calls, 1.0 if count == 1 else 1 / 1.5)
        peers.close()
        peers.open("n-step", "M", rows)
        self.line("M 3-step sample 256, ", reader(buffer, n_step=3, gamma=0.99), "sample", 1_000, bare=bare)
        peers.close()
        peers.open("sequences", "M", rows)
        sliced, name = reader(buffer, count=16, slices=Slices(length=16)), "M sequences 16 x 16, "
        self.line(name, sliced, "sample", 1_000, bare=bare, most=0.25)
        step = in_order(partial(buffer.extend, envs=64), blocks_of(data, 64))
        self.line(
            f"{name}64 rows added between, ",
            sliced,
            "sample",
            300,
            bare=bare,
            most=0.25,
            before=step,
            between="add 64",
        )
        peers.close()
        del buffer
        peers.open("prioritized", "M", rows)
        prioritized = full("M", rows, data, SELECT)
        fast = find_spec("numba") is not None
        name = f"M prioritized sample + update 256, {'compiled' if fast else 'not compiled'}, "
        self.line(name, reader(prioritized), "sample", 500, most=0.5 if fast else 1.5, bare=bare)
        self._add("M", prioritized, data, 64, 1_000, 1.0, kind="prioritized ")
        peers.close()

    def _add(
        self, work: str, buffer: ReplayBuffer, data: Any, count: int, calls: int, most: float, *, kind: str = ""
    ) -> None:
        """Steps of 64 environments; of one row, `append`."""
        sides: Sides
        if count == 1:
            found = blocks_of(data, 1)[:4_096]
            rows = [
                {
                    name: float(each[0]) if name == "reward" else bool(each[0]) if name == "done" else each[0]
                    for name, each in row.items()
                }
                for row in found
            ]
            sides = {"append": in_order(buffer.append, rows)}
        else:
            sides = {"64 environments": in_order(partial(buffer.extend, envs=64), blocks_of(data, count))}
        bare = {BARE_ADD: _writes(buffer, blocks_of(data, count))}
        self.line(f"{work} {kind}add {count:,}, ", sides, f"add {count}", calls, bare=bare, most=most)

    # -- A -----------------------------------------------------------------------------------------------------

    def large(self, rows: int) -> None:
        """Workload A."""
        peers, data = self.peers, rows_of("A", 1_024)
        buffer = full("A", rows, data)
        peers.open("uniform", "A", rows)
        bare = {BARE_A: _takes(buffer, rows), BARE_A_2: _selects(buffer, rows)}
        uniform = self.line("A uniform sample 256, ", reader(buffer), "sample", 20, bare=bare, most=None, of_bare=1.3)
        self._add("A", buffer, data, 64, 50, 1.0)
        peers.close()
        del buffer, bare
        peers.open("prioritized", "A", rows)
        prioritized = full("A", rows, data, SELECT)
        found = reader(prioritized)
        first = len(self.rows)
        self.line("A prioritized sample + update 256, ", found, "sample", 20)
        for at, plain in enumerate(uniform, first):
            row = self.rows[at]
            asked = f"{row.asked}, within 1.4x of our uniform ({row.ours / plain:.2f}x)"
            peer = {**row.peers, "our uniform": plain}
            limit = min(row.limit, 1.4 * plain) if len(row.peers) else 1.4 * plain
            self.rows[at] = Row(name=row.name, ours=row.ours, unit="us", limit=limit, asked=asked, peers=peer)
        peers.close()

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self, rows: int) -> None:
        """Everything that Python and numpy took for a full buffer of M, by row."""
        data = rows_of("M", 16_384)
        payload = sum(each.nbytes for each in data.values()) / 16_384
        for name, select, more in (("uniform", "uniform", 32), ("prioritized", SELECT, 56)):
            tracemalloc.start()
            buffer = full("M", rows, data, select)
            held = tracemalloc.get_traced_memory()[0] / rows
            tracemalloc.stop()
            assert len(buffer) == rows
            self.rows.append(
                Row(
                    name=f"M memory per stored row, {name}",
                    ours=held,
                    unit="bytes",
                    limit=payload + more,
                    asked=f"payload + {more} bytes",
                    peers={"payload": payload},
                )
            )


def _writes(buffer: ReplayBuffer, blocks: list[dict[str, np.ndarray]]) -> Callable[[], object]:
    """Return a call that does nothing but write a block's columns where the buffer would."""
    storage, at = buffer.ring.storage, [0]
    views = {name: storage.view(name) for name in blocks[0]}
    count = len(blocks[0]["reward"])

    def write(block: dict[str, np.ndarray]) -> None:
        begin = at[0]
        at[0] = (begin + count) % (storage.capacity - count)
        slots = slice(begin, begin + count)
        for name, each in block.items():
            views[name][slots] = each

    return in_order(write, blocks)


def _takes(buffer: ReplayBuffer, rows: int) -> Callable[[], object]:
    sources = [buffer.ring.storage.view(name) for name in ("obs", "next_obs")]
    outs = [np.empty((BATCH, *source.shape[1:]), np.uint8) for source in sources]
    rng = np.random.default_rng(0)

    def take() -> None:
        where = rng.integers(0, rows, BATCH)
        for source, out in zip(sources, outs, strict=True):
            source.take(where, axis=0, out=out, mode="clip")

    return take


def _selects(buffer: ReplayBuffer, rows: int) -> Callable[[], object]:
    sources = [torch.from_numpy(buffer.ring.storage.view(name).reshape(rows, -1)) for name in ("obs", "next_obs")]
    outs = [torch.empty((BATCH, source.shape[1]), dtype=torch.uint8) for source in sources]
    rng = np.random.default_rng(0)

    def select() -> None:
        where = torch.from_numpy(rng.integers(0, rows, BATCH))
        for source, out in zip(sources, outs, strict=True):
            torch.index_select(source, 0, where, out=out)

    return select


def run(scale: float = 1.0) -> list[Row]:
    """Every row; ``scale`` below 1 for a quick look at smaller buffers."""
    with Peers() as peers:
        bench = Bench(peers, scale)
        bench.small(max(2_048, int(1_000_000 * scale)))
        bench.large(max(256, int(20_000 * scale)))
        bench.memory(max(2_048, int(1_000_000 * scale)))
    return bench.rows
