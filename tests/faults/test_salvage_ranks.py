"""Pipelines of several ranks that are damaged in one place after the other: ``verify`` and ``salvage`` name it, each
group stays with its rank, and every item is trained once, or was listed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import ConfigError, Damaged, Pipeline
from pipeline.checkpoint import Salvaged, salvage, status_of, verify
from pipeline.cli import main
from pipeline.locations import Location
from pipeline.store.frames import EVENTS, HEADER_BYTES
from pipeline.tools.groups import Groups
from pipeline.tools.salvaging import salvage_run
from pipeline.tools.sources import open_source
from tests.support.disk import Killed, ScriptedFiles
from tests.support.rank_runs import EVERY, ITEMS, Seen, found_by, killed, live, tasks, trained_to_the_end
from tests.support.salvaging import fingerprint, flip, frames

Where = Callable[[Path], str]


@pytest.fixture(scope="module", params=[(2,), (3, 3), (2, 3)], ids=str)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run of two lives of ranks, of which the last were killed; and how many these were."""
    return killed(tmp_path_factory.mktemp("kept"), *request.param), request.param[-1]


@pytest.fixture
def run(kept: tuple[Path, int], tmp_path: Path) -> tuple[Path, int]:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(kept[0], tmp_path / "run")), kept[1]


def salvaged(directory: Path, target: Path, step: int | None = None) -> Salvaged:
    """Salvage, and see that the damaged run stays as it is."""
    before = fingerprint(str(directory))
    found = salvage(directory, target, step=step)
    assert fingerprint(str(directory)) == before
    assert verify(str(target)).whole
    return found


def journals(run: Path, rank: int) -> list[str]:
    return sorted(f"journals/{path.name}" for path in (run / "journals").glob(f"*-{rank:04d}.fbj"))


def newest(run: Path) -> Path:
    return max((run / "generations").iterdir())


def in_event(run: Path, journal: str, place: int) -> str:
    there = [frame for frame in frames(str(run), journal) if frame.header.kind == EVENTS]
    flip(run / journal, there[place].offset + HEADER_BYTES + 3)
    return journal


def first_record(run: Path) -> str:
    """With what the life inherited, where others had shared it out, or with how it began."""
    return in_event(run, journals(run, 1)[-1], 0)


def first_record_of_the_first_rank(run: Path) -> str:
    return in_event(run, journals(run, 0)[-1], 0)


def early_record(run: Path) -> str:
    return in_event(run, journals(run, 1)[-1], 3)


def late_record(run: Path) -> str:
    return in_event(run, journals(run, 0)[-1], -4)


def header(run: Path) -> str:
    """The length of a record is no longer to be believed."""
    journal = journals(run, 1)[-1]
    flip(run / journal, frames(str(run), journal)[5].offset + 30)
    return journal


def journal_gone(run: Path) -> str:
    journal = journals(run, 1)[-1]
    (run / journal).unlink()
    return journal


def journal_of_the_first_rank_gone(run: Path) -> str:
    journal = journals(run, 0)[-1]
    (run / journal).unlink()
    return journal


def journal_of_the_life_before_gone(run: Path) -> str:
    journal = journals(run, 1)[0]
    (run / journal).unlink()
    return journal


def journal_cut(run: Path) -> str:
    journal = journals(run, 1)[-1]
    os.truncate(run / journal, frames(str(run), journal)[4].offset)
    return journal


def all_records_but_the_last(run: Path) -> str:
    """Of both ranks."""
    for rank in (0, 1):
        journal = journals(run, rank)[-1]
        for frame in [each for each in frames(str(run), journal) if each.header.kind == EVENTS][:-2]:
            flip(run / journal, frame.offset + HEADER_BYTES + 3)
    return journals(run, 0)[-1]


def journal_folder(run: Path) -> str:
    journal = journal_gone(run)
    (run / journal).mkdir()
    return journal


def all_journals_gone(run: Path) -> str:
    for path in (run / "journals").iterdir():
        path.unlink()
    return "journals/"


def needed(run: Path) -> Location:
    """Where a payload of rank 1 lies that was finished and not yet trained."""
    groups = Groups(open_source(run))
    places = [at for entry in groups.entries for _, _, at in groups.payloads(entry) if at.rank == 1]
    return max(places, key=lambda at: (at.segment_key, at.offset))


def named_segment(at: Location) -> str:
    return f"segments/{at.incarnation:06d}-{at.rank:04d}-{at.segment:06d}.fbs"


def payload(run: Path) -> str:
    at = needed(run)
    flip(run / named_segment(at), at.offset + HEADER_BYTES + 70)
    return named_segment(at)


def segment_gone(run: Path) -> str:
    path = named_segment(needed(run))
    (run / path).unlink()
    return path


def segment_cut(run: Path) -> str:
    at = needed(run)
    os.truncate(run / named_segment(at), at.offset + HEADER_BYTES)
    return named_segment(at)


def of_newest(name: str) -> Where:
    def damage(run: Path) -> str:
        flip(newest(run) / name, 40)
        return f"generations/{newest(run).name}/{name}"

    damage.__name__ = name
    return damage


def manifest_gone(run: Path) -> str:
    (newest(run) / "manifest.json").unlink()
    return f"generations/{newest(run).name}/manifest.json"


def marker(run: Path) -> str:
    (run / "run.json").write_text("{")
    return "run.json"


JOURNALS: list[Where] = [
    first_record,
    first_record_of_the_first_rank,
    early_record,
    late_record,
    header,
    journal_gone,
    journal_of_the_first_rank_gone,
    journal_cut,
    journal_folder,
    all_journals_gone,
]
OTHERS: list[Where] = [
    payload,
    segment_gone,
    segment_cut,
    manifest_gone,
    *(of_newest(name) for name in ("manifest.json", "progress.json", "trainer/seen.safetensors")),
    *(of_newest(f"shards/0001/{name}.json") for name in ("consumer", "progress")),
    marker,
]


def named_by_verify(run: Path) -> list[str]:
    found = verify(str(run))
    return [*(each.path for each in found.damages), *found.unpromised]


@pytest.mark.parametrize("damage", [*JOURNALS, *OTHERS])
def test_what_is_damaged_is_named_and_all_that_is_left_is_trained_once(
    run: tuple[Path, int], tmp_path: Path, damage: Where
) -> None:
    directory, size = run
    named, target = damage(directory), tmp_path / "salvaged"
    found = salvaged(directory, target)
    if damage is not manifest_gone:  # a generation without a manifest was never committed, as far as it can be told
        assert any(named in line for line in named_by_verify(directory))
    assert any(loss.path.startswith(named) for loss in found.losses), found.losses
    assert all(loss.what and loss.lost for loss in found.losses)
    assert len(found.ranks) == size
    assert found.ranks_lost == []
    assert sum(found.ranks) == found.groups_kept
    assert not any("nobody knows" in loss.lost for loss in found.losses)
    assert trained_to_the_end(target, size) == EVERY


@pytest.mark.parametrize("damage", [first_record, early_record, journal_gone, payload])
def test_other_ranks_go_on_from_it_too(run: tuple[Path, int], tmp_path: Path, damage: Where) -> None:
    directory, size = run
    damage(directory)
    salvaged(directory, tmp_path / "salvaged")
    assert trained_to_the_end(tmp_path / "salvaged", 5 - size) == EVERY


def test_of_a_run_that_is_whole_as_many_ranks_find_what_they_would_have_found(
    run: tuple[Path, int], tmp_path: Path
) -> None:
    directory, size = run
    found = salvaged(directory, tmp_path / "salvaged")
    assert found.whole
    work = status_of(str(directory)).work
    assert status_of(str(tmp_path / "salvaged")).work == work
    assert work is not None
    assert sum(found.ranks) == found.groups_kept == work.buffered + work.parked
    there, here = found_by(directory, size), found_by(tmp_path / "salvaged", size)
    for rank, (one, other) in enumerate(zip(there, here, strict=True)):
        for name in one:
            assert one[name] == other[name], (rank, name)
    assert any(each["payloads"] for each in there)
    assert trained_to_the_end(tmp_path / "salvaged", size) == EVERY


@pytest.mark.parametrize("damage", [early_record, journal_gone, payload])
def test_each_group_stays_with_its_rank(run: tuple[Path, int], tmp_path: Path, damage: Where) -> None:
    """What one rank has lost changes nothing of what the others have."""
    directory, size = run
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    salvaged(directory, whole)
    damage(directory)
    found = salvaged(directory, damaged)
    assert damage is not journal_gone or found.items_again > 0
    theirs, ours = found_by(whole, size), found_by(damaged, size)
    for rank in range(size):
        if rank != 1:
            assert ours[rank] == theirs[rank]
    assert ours[1]["payloads"].items() <= theirs[1]["payloads"].items()
    assert not ours[1]["entries"].keys() & {uid for rank in range(size) if rank != 1 for uid in ours[rank]["entries"]}


def test_draws_of_a_lost_journal_keep_their_numbers(run: tuple[Path, int], tmp_path: Path) -> None:
    """What an event had said of an item is what the order says of it."""
    directory, size = run
    said = {uid: entry for each in inspect_entries(directory, size, tmp_path) for uid, entry in each.items()}
    journal_gone(directory)
    salvaged(directory, tmp_path / "salvaged")
    for each in found_by(tmp_path / "salvaged", size):
        for uid, entry in each["entries"].items():
            if uid in said:
                assert [entry[name] for name in ("task", "epoch", "index", "position")] == said[uid]


@pytest.mark.parametrize("damage", [first_record, first_record_of_the_first_rank, journal_gone, payload])
def test_where_the_order_has_changed_nothing_is_made_up(tmp_path: Path, damage: Where) -> None:
    """The tasks had other shares before, so the order from the beginning on is not what the tasks say now."""
    before = killed(tmp_path, 2)
    directory = tmp_path / "run"
    live(before, 2, 2, more=1, copy=directory, share=0.5)
    said = {uid: entry for each in inspect_entries(directory, 2, tmp_path, 0.5) for uid, entry in each.items()}
    damage(directory)
    found = salvaged(directory, tmp_path / "salvaged")
    for each in found_by(Path(shutil.copytree(tmp_path / "salvaged", tmp_path / "looked")), 2, share=0.5):
        for uid, entry in each["entries"].items():
            if uid in said:
                assert [entry[name] for name in ("task", "epoch", "index", "position")] == said[uid]
    trained_to_the_end(tmp_path / "salvaged", 2, share=0.5)
    count = trained_to_the_end(tmp_path / "salvaged", 1, share=0.5)
    assert max(count.values()) == 1
    lost = [loss.lost for loss in found.losses if "nobody knows" in loss.lost]
    unknown = {int(uid) for text in lost for uid in re.findall(r"\d+", text)}
    assert {uid for uid in range(ITEMS) if uid not in count} == unknown


@pytest.mark.parametrize("damage", [all_journals_gone, all_records_but_the_last])
def test_where_nothing_says_how_far_a_changed_order_had_come_it_is_refused(tmp_path: Path, damage: Where) -> None:
    """Run from its beginning with the shares of now it would be another one, and items would be trained twice."""
    before = killed(tmp_path, 2)
    directory = tmp_path / "run"
    live(before, 2, 2, more=1, copy=directory, share=0.5)
    damage(directory)
    with pytest.raises(Damaged, match="nothing that is left of the journals says"):
        salvage(directory, tmp_path / "salvaged")
    assert not (tmp_path / "salvaged").exists()
    assert salvaged(directory, tmp_path / "older", step=2).step == 2  # as the message says: before they were changed
    trained_to_the_end(tmp_path / "older", 2)
    assert max(trained_to_the_end(tmp_path / "older", 1).values()) == 1


def inspect_entries(directory: Path, size: int, folder: Path, share: float = 6.0) -> list[dict[int, list[object]]]:
    copy = Path(shutil.copytree(directory, folder / "looked at"))
    names = ("task", "epoch", "index", "position")
    return [
        {uid: [entry[name] for name in names] for uid, entry in each["entries"].items()}
        for each in found_by(copy, size, share=share)
    ]


def listed(found: Salvaged) -> set[int]:
    """The uids that are not run again, as what is told of the losses says."""
    lost = [loss.lost for loss in found.losses if "not run again" in loss.lost]
    return {int(uid) for text in lost for uid in re.findall(r"uid (\d+)", text)}


def test_where_nothing_says_what_was_trained_of_a_rank_it_begins_empty(tmp_path: Path) -> None:
    directory = killed(tmp_path, 2, keep=1)
    of_newest("shards/0001/consumer.json")(directory)
    found = salvaged(directory, tmp_path / "salvaged")
    assert found.ranks_lost == [1]
    assert found.ranks[1] == 0
    assert found.ranks[0] > 0
    assert found.generations_usable == 0
    gone = listed(found)
    trained_to_the_end(tmp_path / "salvaged", 2)  # until one has nothing left
    count = trained_to_the_end(tmp_path / "salvaged", 1)
    assert max(count.values()) == 1
    assert gone
    assert {uid for uid in range(ITEMS) if uid not in count} <= gone


def test_an_older_generation_is_taken_where_it_says_that_of_all_ranks(tmp_path: Path) -> None:
    directory = killed(tmp_path, 2)
    saved = status_of(str(directory)).newest
    of_newest("shards/0001/consumer.json")(directory)
    found = salvaged(directory, tmp_path / "salvaged")
    assert saved is not None
    assert found.step < saved.step
    assert found.ranks_lost == []
    assert trained_to_the_end(tmp_path / "salvaged", 2) == EVERY
    for path in directory.glob("generations/*/shards/*/consumer.json"):
        path.write_text("{")
    with pytest.raises(Damaged, match="no generation says what the weights have seen"):
        salvage(directory, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("damage", [first_record, early_record, journal_gone, payload, all_journals_gone])
def test_a_salvaged_run_that_went_on_is_salvaged_as_any_other(tmp_path: Path, damage: Where) -> None:
    directory = killed(tmp_path, 2)
    early_record(directory)
    first = tmp_path / "first"
    salvaged(directory, first)
    again = Path(shutil.copytree(first, tmp_path / "again"))
    first_record(again)  # there is one alone
    salvaged(again, tmp_path / "second")
    assert trained_to_the_end(tmp_path / "second", 2) == EVERY
    went_on = tmp_path / "went on"
    live(first, 2, 2, more=1, copy=went_on)
    damage(went_on)
    salvaged(went_on, tmp_path / "third")
    assert trained_to_the_end(tmp_path / "third", 2) == EVERY


def test_a_life_that_had_shared_out_anew_does_not_count_though_a_rank_cannot_say_so(tmp_path: Path) -> None:
    """No generation tells of it; all that it had done is set aside, as a resume does."""
    directory = killed(tmp_path, 2)
    there = {path.name for path in (directory / "generations").iterdir()}
    before = salvaged(directory, tmp_path / "before")
    live(directory, 3, 2)
    for path in (directory / "generations").iterdir():
        if path.name not in there:
            shutil.rmtree(path)
    in_event(directory, journals(directory, 0)[-1], 0)
    found = salvaged(directory, tmp_path / "salvaged")
    assert (found.step, found.ranks, found.items_again) == (before.step, before.ranks, 0)
    assert trained_to_the_end(tmp_path / "salvaged", 2) == EVERY


@pytest.mark.parametrize(
    ("option", "damage"),
    [
        (option, damage)
        for option in (("after_crash", "discard"), ("order", "strict"), ("strategy", "synchronous"))
        for damage in (early_record, journal_gone, payload)
        if option[0] != "after_crash" or damage is not payload  # at the save perhaps nothing waited
    ],
)
def test_however_the_run_was_made(tmp_path: Path, option: tuple[str, str], damage: Where) -> None:
    options: dict[str, Any] = dict([option])
    directory = killed(tmp_path, 2, 2, **options)
    damage(directory)
    salvaged(directory, tmp_path / "salvaged")
    assert trained_to_the_end(tmp_path / "salvaged", 2, **options) == EVERY


def test_a_generation_of_before_there_were_ranks_is_gone_back_to_without_their_journals(tmp_path: Path) -> None:
    """It is of one process, and so is the run that is made of it."""
    one = tmp_path / "one"
    with Pipeline(tasks(), directory=str(one), watchdog=None, seed=3).sync() as pipe:
        seen = Seen()
        pipe.attach(seen=seen)
        pipe.resume()
        pipe.start(weights_current=True)
        for batch in pipe.batches(6, until=2):
            seen.steps.append([group.uid for group in batch])
            pipe.save(batch.step).committed()
    before = salvaged(one, tmp_path / "before", step=1)
    live(one, 2, 4)
    found = salvaged(one, tmp_path / "after", step=1)
    assert (found.ranks, found.step, found.whole) == ([], 1, True)
    assert (found.groups_kept, found.members_kept) == (before.groups_kept, before.members_kept)


def test_in_draw_order_a_salvaged_run_trains_what_the_run_would_have_trained(tmp_path: Path) -> None:
    """Also what was lost with a journal: the order is the same, and what comes of an item hangs on it alone."""
    directory = killed(tmp_path, 2, order="strict")
    damaged = Path(shutil.copytree(directory, tmp_path / "damaged"))
    journal_gone(damaged)
    salvaged(damaged, tmp_path / "salvaged")
    assert trained_to_the_end(directory, 2, order="strict") == EVERY
    assert trained_to_the_end(tmp_path / "salvaged", 2, order="strict") == EVERY


def test_killed_at_any_call_it_leaves_no_run(tmp_path: Path) -> None:
    source = killed(tmp_path, 2)
    before = fingerprint(str(source))
    whole = ScriptedFiles()
    salvage(source, tmp_path / "whole", files=whole)
    last = len(whole.calls)
    for call in (1, 5, *range(9, last - 4, 23), last - 3):
        target = tmp_path / f"target{call}"
        files = ScriptedFiles(call, Killed, stays=True)
        with pytest.raises(Killed):
            salvage(source, target, files=files)
        files.end()
        assert not (target / "run.json").exists()
        if target.exists() and any(path.is_file() for path in target.rglob("*")):
            with pytest.raises(ConfigError, match="must be absent or an empty folder; it holds"):
                salvage(source, target)
    assert fingerprint(str(source)) == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, out = killed(tmp_path, 2), tmp_path / "out"
    journal_gone(directory)
    assert main(["salvage", str(directory), str(out), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert main(["salvage", str(directory), str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"ranks        0: {told['ranks'][0]}, 1: {told['ranks'][1]}\n" in shown
    assert "are run from the start" in shown
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "pipeline ranks"
    found = salvage_run(out, tmp_path / "again")
    assert isinstance(found, Salvaged)
    assert found.whole
