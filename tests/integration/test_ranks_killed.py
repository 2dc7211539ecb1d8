"""SIGKILL of one of several ranks, or of all, in every phase of a save.

Who is left is told which rank is missing, within the time limit. Whoever starts again finds on all ranks one
generation, the one before or the new one, with all rows of each rank; and the next commit removes what was left over.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from tests.support.children import ChildProcess
from tests.support.gone import names
from tests.support.ranked import (
    ROWS,
    ROWS_ALONE,
    SHELVED,
    TOLD,
    TRAJECTORIES,
    manifests,
    processes,
    save_and_die,
    serve,
)
from tests.support.ranks import at_once, fine

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))


@pytest.fixture(scope="module")
def server() -> Any:
    return serve()


class Lives:
    """Lives of the ranks of one run, one after the other, each of which ends by a kill."""

    def __init__(self, server: Any, directory: Path, size: int, striker: int, of_all: bool, kind: str) -> None:
        self.server, self.directory, self.size, self.kind = server, directory, size, kind
        self.striker, self.of_all = striker, of_all
        self.before = (-1, 0)  # generation and step of which all have heard
        self.dying = 0  # the step of the save in which the last life ended
        self.seen: set[str] = set()

    def live(self, after: int | None) -> list[str]:
        """Run one; return which changes of the folder the striker has made in the second save, if it was not killed."""
        with processes(self.server, save_and_die, self.directory, self.size) as ranks:
            ranks.start(None, self.of_all, self.kind, of_rank={self.striker: (after, self.of_all, self.kind)})
            resumed = [self._resumed(each) for each in ranks.ranks]
            assert len(set(resumed)) == 1, resumed
            self._went_on(*resumed[0])
            ranks.gone(self.striker)
            said = [each.rest() for each in ranks.ranks]
            codes = ranks.ends()
        where = (self.kind, self.size, self.striker, self.of_all, after)
        died = self.of_all and after is not None
        assert codes == [-9 if died or (rank == self.striker and after is not None) else 0 for rank in range(self.size)]
        for rank, each in enumerate(said):
            kinds = [kind for kind, *_ in each]
            if codes[rank]:
                assert kinds in ([], ["saved"], ["saved", "saved"]), (where, rank, each)
            elif after is None:
                assert kinds == ["saved"] * 3, (where, rank, each)
            else:
                self._is_told(where, rank, each)
        assert not said[0] or said[0][0][4] == [], (where, "left over after a commit", said[0][0][4])
        self.dying = resumed[0][1] + 2
        self.before = max((kind[1], kind[2]) for each in said for kind in each if kind[0] == "saved")
        return [] if after is not None else list(said[self.striker][1][3])

    def _resumed(self, process: ChildProcess) -> tuple[int, int]:
        """Return the generation and the step from which a rank goes on; all that was added up to it is there."""
        kind, generation, step, counter, held = process.hear()
        assert kind == "resumed"
        assert counter == step
        rank = held[0][0] if held else 0
        assert held == [(rank, t) for t in range(ROWS * step)], (rank, step, len(held))
        return -1 if generation is None else generation, step

    def _went_on(self, generation: int, step: int) -> None:
        known, least = self.before
        assert least <= step <= least + 1, (step, least)
        assert generation >= known
        if self.dying:
            self.seen.add("new" if step >= self.dying else "before")

    def _is_told(self, where: Any, rank: int, said: list[Any]) -> None:
        """A rank that was not killed failed in the save in which another one was, or in the next one."""
        *saved, (kind, why) = said
        assert kind == "failed", (where, rank, said)
        assert 1 <= len(saved) <= 2, (where, rank, said)
        assert names(self.striker, why), (where, rank, why)

    def end(self) -> None:
        """Look at what is left at the end."""
        self.live(None)
        assert verify(str(self.directory)).whole
        assert [shard.rank for shard in manifests(self.directory)[-1].shards] == list(range(self.size))


def phases(changes: list[str]) -> list[int]:
    """All changes of a save under ``make soak``; else before and after the rows, the shard's files, the manifest."""
    if SOAK > 1:
        return [*range(len(changes)), TOLD]
    shard = changes.index("makedirs")
    some = {0, shard, shard + 2, len(changes) - 1}
    if "rename" in changes:  # of the folder, and then of the manifest
        manifest = len(changes) - changes[::-1].index("rename")
        some |= {changes.index("rename"), manifest - 1, manifest}
    return [*sorted(some), TOLD]


@pytest.mark.slow
@pytest.mark.timeout(0 if SOAK > 1 else 120)
@pytest.mark.parametrize(
    ("kind", "size", "strikers"),
    [
        (ROWS_ALONE, 2, [(0, False), (1, False), (0, True)]),
        (ROWS_ALONE, 4, [(0, False), (2, False), (2, True)]),
        (TRAJECTORIES, 2, [(0, False), (1, False), (1, True)]),
        (SHELVED, 3, [(0, False), (2, False)]),
    ],
)
def test_killed_in_a_save(tmp_path: Path, server: Any, kind: str, size: int, strikers: list[tuple[int, bool]]) -> None:
    def lives(striker: int, of_all: bool, half: int) -> set[str]:
        here = Lives(server, tmp_path / f"{striker} {of_all} {half}", size, striker, of_all, kind)
        for after in phases(here.live(None))[half::2]:
            here.live(after)
        here.end()
        return here.seen

    # They mostly wait: for each other, and for the limit. Of four ranks, half of the phases will do.
    each = [(*how, half) for how in strikers for half in range(2 if size == 2 or SOAK > 1 else 1)]
    seen = fine(at_once([lambda how=how: lives(*how) for how in each]))  # type: ignore[misc]
    assert set().union(*seen) == {"before", "new"}
    assert all("before" in found for found in seen)
