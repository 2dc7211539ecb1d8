"""What tools say of a run that several ranks have together: what its ranks have, and had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import status_of
from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.tools import inspect, sample_run, show_item
from pipeline.tools.exporting import export
from tests.faults.test_pipeline_ranks import COUNTS, GROUPS, ITEMS, life
from tests.support.disk import tree

Groups = dict[int, Any]
MEMBERS = 2


@pytest.fixture(scope="module", params=[(2,), (3, 2), (2, 3)], ids=str)
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, dict[int, Groups]]]:
    """A run that so many ranks trained for three steps, and then so many; and what was trained, by step."""
    directory = tmp_path_factory.mktemp("ranks") / "run"
    steps: dict[int, Groups] = {}
    for size in request.param:
        steps |= life(directory, size, 3, archive="all")
    before = tree(str(directory))
    yield directory, size, steps
    assert tree(str(directory)) == before


def exported(directory: Path, out: Path, **how: Any) -> list[dict[str, Any]]:
    export(directory, out, to="jsonl", **how)
    lines = [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [each for each in lines if "uid" in each]


def test_finished_groups_of_all_ranks_are_exported(run: Any, tmp_path: Path) -> None:
    directory, _, steps = run
    work = status_of(str(directory)).work
    assert work is not None
    waiting = exported(directory, tmp_path / "waiting", statuses=["buffered"])
    assert len(waiting) == MEMBERS * work.buffered
    trained = {uid: groups[uid] for groups in steps.values() for uid in groups}
    every = exported(directory, tmp_path / "every")
    assert [(each["uid"], each["member"]) for each in every] == sorted((each["uid"], each["member"]) for each in every)
    seen = {each["uid"] for each in every if each["status"] == "trained"}
    assert not seen & {each["uid"] for each in waiting}
    assert seen <= set(trained)
    assert seen
    for each in every:
        if each["uid"] in trained:
            task, index, noise = trained[each["uid"]]
            assert (each["task"], each["index"]) == (task, index)
            assert each["tensors"]["0.noise"]["data"] == noise[each["member"]]


def test_the_tasks_are_counted_over_all_ranks(run: Any) -> None:
    directory, size, steps = run
    found = inspect(directory)
    assert (found.kind, found.world_size) == ("pipeline ranks", size)
    assert not found.notes
    work = status_of(str(directory)).work
    assert work is not None
    tasks = {each.task: each for each in found.tasks}
    assert tasks.keys() == COUNTS.keys()
    assert sum(each.states["trained"] for each in found.tasks) == GROUPS * len(steps)
    assert sum(each.states["buffered"] for each in found.tasks) == work.buffered
    for name, each in tasks.items():
        assert (each.drawn, each.length) == (work.tasks[name].drawn, COUNTS[name])
        assert each.claimed == each.states["trained"] + sum(
            each.states[state] for state in ("waiting", "running", "parked", "buffered", "leased")
        )
        assert each.finished >= MEMBERS * each.states["trained"]
        if len(steps) == 3:  # what a life has taken over from others, its journals do not tell
            assert each.rewards.count == each.finished == each.lengths.count


def test_an_older_generation_is_counted_without_what_other_ranks_made_of_it(tmp_path: Path) -> None:
    life(tmp_path, 2, 3, archive="all", keep=None)
    newest = max((tmp_path / "generations").iterdir())
    before = inspect(newest).tasks
    assert sum(each.states["trained"] for each in before) == 3 * GROUPS
    later = life(tmp_path, 3, 3, archive="all", keep=None)
    assert sum(each.states["trained"] for each in inspect(tmp_path).tasks) == 6 * GROUPS
    found = inspect(newest)
    assert not found.notes
    assert found.tasks == before
    for uid in sorted(uid for groups in later.values() for uid in groups)[:6]:
        with suppress(ConfigError):  # perhaps nobody had claimed it by then
            assert show_item(newest, uid).facts["state"] != "trained"


def test_every_item_is_shown_whichever_rank_has_it(run: Any) -> None:
    directory, _, steps = run
    trained = {uid: groups[uid] for groups in steps.values() for uid in groups}
    seen = 0
    for uid in range(ITEMS):
        try:
            shown = show_item(directory, uid)
        except ConfigError:  # nobody has claimed it yet
            assert uid not in trained
            continue
        assert not [note for note in shown.notes if "is gone" not in note]
        assert (shown.facts["state"] == "trained") == (uid in trained)
        if uid in trained and shown.members:
            task, index, _ = trained[uid]
            assert shown.facts.get("task", task) == task
            assert shown.facts.get("index", index) == index
            seen += 1
    assert seen
    with pytest.raises(ConfigError, match="it was never claimed; uids go up to"):
        show_item(directory, 10**6)


def test_groups_of_all_ranks_are_sampled(run: Any) -> None:
    directory, _, _ = run
    work = status_of(str(directory)).work
    assert work is not None
    found = sample_run(directory, 1000)
    assert found.drawn == work.buffered
    assert {key.key for key in found.keys} >= {"n", "noise", "(reward)"}


def test_the_commands_read_it(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, size, _ = run
    assert main(["inspect", str(directory), "--item", "0"]) == 0
    assert main(["sample", str(directory), "-n", "3"]) == 0
    assert main(["export", str(directory), str(tmp_path / "out"), "--to", "jsonl", "--dry-run"]) == 0
    capsys.readouterr()
    work = status_of(str(directory)).work
    assert work is not None
    for command, shown in (
        (["merge", str(directory), "--out", str(tmp_path / "m")], f"  holds     {work.buffered} groups"),
        (["split", str(directory), "--count", "1", "--out", str(tmp_path / "s")], "  holds     1 groups"),
        (
            ["reshard", str(directory), "--to", str(size), "--out", str(tmp_path / "r")],
            f"  ranks     {size}; groups",
        ),
        (["salvage", str(directory), str(tmp_path / "v")], "Nothing was lost."),
    ):
        assert main(command) == 0
        assert shown in capsys.readouterr().out
