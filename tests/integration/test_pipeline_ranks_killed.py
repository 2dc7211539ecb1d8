"""Ranks that train on a pipeline of theirs are killed, all at once, and as many of them or others go on.

What counts is what the weights have seen in the end: every item, once.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import status_of, verify
from tests.support.gone import names
from tests.support.pipeline_ranks import COUNTS, GROUPS, SAVE_EVERY, train
from tests.support.ranked import manifests, processes, serve
from tests.support.ranks import at_once, fine

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
ITEMS = sum(COUNTS.values())


@pytest.fixture(scope="module")
def server() -> Any:
    return serve()


class Lives:
    """Lives of a run, one after the other."""

    def __init__(self, server: Any, directory: Path, **options: Any) -> None:
        self.server, self.directory, self.options = server, directory, options
        self.saved = 0
        """A step that is surely saved."""

    def live(self, size: int, kill_after: int) -> list[Any]:
        """Train with ``size`` ranks until so many steps were heard of, and kill all of them; or to the end. Return what
        each said last."""
        self.look()
        with processes(self.server, train, self.directory, size) as ranks:
            ranks.start(self.options)
            ((kind, _, begun, trained),) = {each.hear() for each in ranks.ranks}
            assert kind == "resumed"
            assert begun == trained >= self.saved, "the weights and the run went back to different steps"
            last, step = [], begun
            for step in range(begun + 1, begun + 1 + kill_after):
                last = [each.hear() for each in ranks.ranks]
                assert last[0][0] in ("step", "trained"), last
                assert all(each[:2] == last[0][:2] for each in last), "ranks trained different steps"
                if last[0][0] == "trained":
                    return last
                assert last[0][1] == step
            for each in ranks.ranks:
                each.process.kill()
            # A save goes on beside the trainer: only the next one waits until it has come to be.
            self.saved = max(self.saved, (step - 1) // SAVE_EVERY * SAVE_EVERY - SAVE_EVERY)
            return last

    def look(self) -> None:
        """What the journals of all ranks say is left is what was drawn, and not trained."""
        found = status_of(str(self.directory))
        if found.work is not None:
            assert found.newest is not None
            drawn = sum(task.drawn for task in found.work.tasks.values())
            assert found.work.left == drawn - GROUPS * found.newest.step, found
            assert (found.state == "finished") == (GROUPS * found.newest.step == ITEMS), found
        assert found.state in ("nothing", "finished", "to be continued"), found

    def lose(self, size: int, striker: int, after: int) -> None:
        """Let one rank be killed at a change of the folder: the others are told."""
        with processes(self.server, train, self.directory, size) as ranks:
            ranks.start(self.options, of_rank={striker: (self.options, after)})
            ranks.gone(striker)
            said = [each.rest() for each in ranks.ranks]
            codes = ranks.ends()
        assert codes[striker] == -9
        steps = [[each[1] for each in rank if each[0] == "step"] for rank in said]
        for rank, each in enumerate(said):
            if rank != striker:
                assert each[-1][0] == "failed", each
                assert each[-1][1] == "PeerGone" or names(striker, each[-1][2]), each[-1]
                assert abs(len(steps[rank]) - len(steps[striker])) <= 1

    def end(self, size: int) -> None:
        """Train to the end: then the weights have seen every item once."""
        said = self.live(size, ITEMS)
        assert {kind for kind, _, _ in said} == {"trained"}
        steps: list[list[int]] = said[0][1]
        assert sorted(uid for step in steps for uid in step) == list(range(ITEMS))
        assert all(len(step) == GROUPS for step in steps)
        counts = Counter[str]()
        for _, _, each in said:
            counts.update(each)
        assert counts == COUNTS, "what ranks have counted is not what was trained"
        found = verify(str(self.directory))
        assert found.whole, found.damages
        assert manifests(self.directory)[-1].world_size == size
        self.look()


SEQUENCES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 2), {}),
    ((1, 2, 1), {}),
    ((3, 2, 3), {"order": "strict"}),
]
if SOAK > 1:
    SEQUENCES += [((2, 2), {"order": "strict"}), ((1, 2, 1), {"order": "strict"}), ((3, 2, 3), {}), ((2, 3), {})]


@pytest.mark.slow
@pytest.mark.timeout(300 * SOAK)
@pytest.mark.parametrize(("sizes", "options"), SEQUENCES, ids=str)
def test_every_item_is_trained_once_whoever_goes_on(
    tmp_path: Path, server: Any, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    chance = random.Random(str((sizes, options)))
    for turn in range(SOAK):
        lives = Lives(server, tmp_path / str(turn), **options)
        for size in sizes:
            lives.live(size, chance.randrange(4, 8))
        lives.end(sizes[0])


@pytest.mark.slow
@pytest.mark.timeout(300 * SOAK)
def test_one_rank_is_killed_at_a_change_of_the_folder_and_the_others_are_told(tmp_path: Path, server: Any) -> None:
    """While it opens the run, takes it over from as many or others, trains, or saves."""
    chance = random.Random(SOAK)

    def run(number: int, size: int, striker: int, other: int) -> None:
        lives = Lives(server, tmp_path / f"{size} {striker} {number}")
        for ranks in (size, other):
            lives.lose(ranks, min(striker, ranks - 1), chance.randrange(3, 60 if striker == 0 else 30))
        lives.end(other)

    for number in range(SOAK):
        every = [(2, 0, 3), (2, 1, 1), (3, 2, 2)]
        fine(at_once([lambda each=each: run(number, *each) for each in every]))  # type: ignore[misc]  # noqa: B023


@pytest.mark.parametrize("rank", [0, 2])
def test_sigterm_to_any_rank_lets_all_save_at_one_step_and_leave_by_its_code(
    tmp_path: Path, server: Any, rank: int
) -> None:
    with processes(server, train, tmp_path, 3) as ranks:
        ranks.start({"save_every": 1000})
        while ranks.ranks[rank].hear()[:2] != ("step", 2):
            pass
        ranks.ranks[rank].send(signal.SIGTERM)
        assert ranks.ends() == [143] * 3
    newest = manifests(tmp_path)[-1]
    assert [shard.rank for shard in newest.shards] == [0, 1, 2]
    assert newest.reason.startswith("SIGTERM")
    assert [each.step for each in manifests(tmp_path)].count(newest.step) == 1
    assert verify(str(tmp_path)).whole
    Lives(server, tmp_path).end(2)
