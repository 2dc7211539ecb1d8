"""Killed for real at random moments of saves and writes: one whole state, and all that was acknowledged."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from tests.support import saved
from tests.support.children import ChildProcess, Ended, child
from tests.support.opening import find

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
KILLS = 40


class Promised:
    """What the processes said, one after the other."""

    def __init__(self) -> None:
        self.committed = self.deaths = 0
        self.put, self.rewarded = set[int](), set[tuple[int, int]]()

    def hear(self, said: tuple[str, Any]) -> None:
        """Note one thing that was acknowledged."""
        kind, what = said
        assert kind != "raised", what
        if kind == "committed":
            self.committed = max(self.committed, what)
        elif kind == "put":
            self.put.add(what)
        elif kind == "rewarded":
            self.rewarded.add(what)
        elif kind == "resumed":
            assert what >= self.committed

    def rest(self, process: ChildProcess) -> None:
        """Note all that was acknowledged before the end."""
        try:
            while True:
                self.hear(process.hear())
        except Ended:
            return

    def check(self, directory: str) -> int:
        """Look at what the kill left, as a resume would. Returns the step."""
        found = find(directory, saved.make(directory)._tasks, saved.NAMES)
        ledger, step = found.recovered.ledger, found.stored.manifest.step
        assert step >= self.committed, "committed, and gone"
        for name in saved.NAMES:  # of one step, all of it
            state = found.states[name]
            assert state["step"] == step
            assert set(state["weight"].tolist()) == {step}
            assert len(state["uids"]) == len(set(state["uids"])) == 2 * step
            assert all(ledger.state(uid) == "trained" for uid in state["uids"])
        assert ledger.step == step == found.recovered.progress.next_consumer_step - 1
        assert sum(totals.trained for totals in ledger.totals.values()) == 2 * step
        ledger.check()
        for uid in self.put:
            assert ledger.state(uid) in ("buffered", "leased", "trained"), f"{uid} was put, and is gone"
        for uid, member in self.rewarded:
            entry = ledger.entries.get(uid)
            assert entry is None or dict(entry.given).get(member) == 2.0, f"{uid} had its reward, and waits for it"
        return step


def one_life(directory: str, chance: random.Random, promised: Promised) -> None:
    """Kill it while it begins, or at a random moment after it has resumed."""
    with child(saved.train, directory) as process:
        if chance.random() < 0.3:
            process.process.join(chance.uniform(0, 0.15))
        else:
            promised.hear(process.hear())
            for _ in range(chance.randrange(4)):  # so many steps on a slow machine, too
                while (said := process.hear())[0] != "put":
                    promised.hear(said)
                promised.hear(said)
            process.process.join(chance.uniform(0, 0.08))
        assert process.process.exitcode is None, process.rest()
        process.kill()
        promised.rest(process)


@pytest.mark.slow
def test_killed_at_the_kth_change_of_the_folder_the_step_before_or_the_new_one_is_there(tmp_path: Path) -> None:
    """Every k under ``make soak``; what a layer inside one process can do for every k, for each of some for real."""
    first = str(tmp_path / "first")
    with child(saved.one_step, first, 10**6) as process:
        assert process.rest() == [("committed", 1)]
    seen = set()
    for after in range(0, 200, 1 if SOAK > 1 else 3):
        directory, promised = str(tmp_path / str(after)), Promised()
        shutil.copytree(first, directory)
        with child(saved.one_step, directory, after) as process:
            promised.rest(process)
            process.process.join()
            assert process.process.exitcode in (0, -9)
        seen.add((process.process.exitcode, promised.check(directory)))
        if process.process.exitcode == 0:
            break
    assert seen == {(-9, 1), (-9, 2), (0, 2)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SOAK))
def test_what_is_there_after_a_kill_is_one_state_and_all_that_was_promised(tmp_path: Path, seed: int) -> None:
    chance, promised = random.Random(seed), Promised()
    directory = str(tmp_path / "run")
    steps = list[int]()
    for kill in range(KILLS):
        one_life(directory, chance, promised)
        if not steps and not list(Path(directory, "generations").glob("*/manifest.json")):
            continue  # killed before there was anything
        steps.append(promised.check(directory))
        if kill % 5 == 4:
            found = verify(directory)
            assert found.whole, found.damages
    assert steps == sorted(steps), "a kill takes no step back behind what was there"
    assert len(set(steps)) > 10
    assert promised.committed > 10
    assert promised.put
    assert promised.rewarded
