"""Wrote ``tests/golden/v1f``: a run of format version 1 that several ranks have together.

    python -m tests.golden.make_v1f

Two ranks train two steps and save, train one more, and are killed with items reserved and in flight; three take over,
train two steps and are killed likewise. Beside it lies ``every_event.fbj``. As with ``v1``, these files are never
written again. Ranks are threads with clocks of their own, so a second run of this gives other times and other orders.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from pipeline import Pipeline, Ranks, Task
from pipeline.records import AnyEvent, EpochBegan, Inherited, Opened, Reserved, SourceMark
from tasks import SequenceSource
from tests.golden.make_v1 import fixed_machine, write_every_event
from tests.support.crashes import crashed_copy
from tests.support.ranks import fine, on_ranks
from tests.support.runs import solve

TARGET = Path(__file__).parent / "v1f"
COUNTS = {"a": 54, "b": 18}
GROUPS = 6
LIVES = ((2, 2), (3, 2))
"""Ranks, and steps that they save."""
OPTIONS: dict[str, Any] = {"seed": 4, "order": "strict", "watchdog": None, "keep": 2, "signals": ()}
EVERY_EVENT: list[AnyEvent] = [
    Opened(9, 3, 5, 40, 41, 3, "h", 9, 1.5, [(6, 3, 12)]),
    Inherited([], {"é": (3, 4, 9, SourceMark("k", 9, {0: "d"}), 1)}, {"é": 0.5}, {"é": 7}, {}, [(1, 2)], 2**40, {}, 9),
    Reserved(
        [(2**40, "é", 3, 4, 2), (2**40 + 3, "b", 0, 0, 7)],
        2**40 + 4,
        [EpochBegan("b", 0, -1, SourceMark("k", -1, {1: "e"}))],
        {"é": (3, 5), "b": (0, 1)},
        {"é": 8, "b": 1},
    ),
]


class Trained:
    """Stands for the weights: which uids each step saw, on this rank."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def tasks() -> list[Task]:
    """The tasks of the run."""
    return [
        Task(name, source=SequenceSource([{"n": n} for n in range(count)], name), run=solve, share=count / 18)
        for name, count in COUNTS.items()
    ]


def life(size: int, steps: int) -> None:
    """Train so many steps, saving each, and one more; then all die."""
    all_here = threading.Barrier(size)

    def run(ranks: Ranks) -> None:
        trained = Trained()
        with Pipeline(tasks(), OPTIONS, directory="run", ranks=ranks).sync() as pipe:
            pipe.attach(trained=trained)
            begun = pipe.resume()
            with pipe.weight_update(version=begun.version):
                pass
            pipe.start()
            for batch in pipe.batches(GROUPS, until=begun.step + steps + 1):
                trained.steps = batch.step
                if batch.step <= begun.step + steps:
                    pipe.save(batch.step).committed()
            all_here.wait()
            if ranks.first:
                crashed_copy("run", "crashed")
            all_here.wait()

    fine(on_ranks(size, run))
    shutil.rmtree("run")
    shutil.move("crashed", "run")


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        for size, steps in LIVES:
            life(size, steps)
        write_every_event(EVERY_EVENT, 9, in_a_frame=len(EVERY_EVENT))
        shutil.copytree("run", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)
