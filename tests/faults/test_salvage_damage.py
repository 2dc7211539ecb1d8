"""A run that is damaged in one place after the other: ``verify`` and ``salvage`` name it, and nothing else is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from pipeline import Damaged
from pipeline.checkpoint import salvage, verify
from pipeline.store.frames import EVENTS, HEADER_BYTES, PAYLOAD, SYNCED
from tests.support.crashes import Trained, begin, train
from tests.support.salvaging import EVERY, GROUPS, flip, frames, goes_on, make, salvaged, two_lives

pytestmark = pytest.mark.virtual_time

FIRST, SECOND = "journals/000001-0000.fbj", "journals/000002-0000.fbj"
NEWEST = "generations/00000004"


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return Path(await two_lives(tmp_path))


def in_event(run: Path, journal: str, place: int) -> str:
    """Change a byte of one of the events' records."""
    there = [frame for frame in frames(str(run), journal) if frame.header.kind == EVENTS]
    flip(run / journal, there[place].offset + HEADER_BYTES + 3)
    return journal


def before_a_mark(run: Path) -> str:
    return in_event(run, FIRST, 2)


def after_the_last_mark(run: Path) -> str:
    there = frames(str(run), SECOND)
    last = max(frame.offset for frame in there if frame.header.kind == SYNCED)
    behind = [frame for frame in there if frame.offset > last]
    assert len(behind) > 2
    flip(run / SECOND, behind[0].offset + HEADER_BYTES + 1)
    return SECOND


def in_a_mark(run: Path) -> str:
    mark = next(frame for frame in frames(str(run), FIRST) if frame.header.kind == SYNCED)
    flip(run / FIRST, mark.offset + 20)
    return FIRST


def in_a_header(run: Path) -> str:
    """The length of a record is no longer to be believed."""
    flip(run / FIRST, frames(str(run), FIRST)[5].offset + 30)
    return FIRST


def in_the_first_record(run: Path) -> str:
    """It says when the epoch began, and how long it is."""
    flip(run / FIRST, HEADER_BYTES)
    return FIRST


def needed_payload(run: Path) -> str:
    """The last payload of the last segment: what was finished and not yet trained."""
    name = max(path.name for path in (run / "segments").iterdir())
    there = [frame for frame in frames(str(run), f"segments/{name}") if frame.header.kind == PAYLOAD]
    flip(run / "segments" / name, there[-1].offset + HEADER_BYTES + 70)
    return f"segments/{name}"


def last_segment(run: Path) -> Path:
    return max((run / "segments").iterdir(), key=lambda path: path.name)


def segment_gone(run: Path) -> str:
    path = last_segment(run)
    path.unlink()
    return f"segments/{path.name}"


def segment_cut(run: Path) -> str:
    path = last_segment(run)
    os.truncate(path, path.stat().st_size // 3)
    return f"segments/{path.name}"


def segment_fifo(run: Path) -> str:
    path = last_segment(run)
    path.unlink()
    os.mkfifo(path)
    return f"segments/{path.name}"


def old_segment_gone(run: Path) -> str:
    (run / "segments/000001-0000-000001.fbs").unlink()
    return "segments/000001-0000-000001.fbs"


def journal_gone(run: Path) -> str:
    (run / FIRST).unlink()
    return FIRST


def last_journal_gone(run: Path) -> str:
    (run / SECOND).unlink()
    return SECOND


def journal_cut(run: Path) -> str:
    os.truncate(run / FIRST, frames(str(run), FIRST)[4].offset)
    return FIRST


def journal_fifo(run: Path) -> str:
    (run / FIRST).unlink()
    os.mkfifo(run / FIRST)
    return FIRST


def journal_folder(run: Path) -> str:
    (run / FIRST).unlink()
    (run / FIRST).mkdir()
    return FIRST


def manifest(run: Path) -> str:
    flip(run / NEWEST / "manifest.json", 40)
    return f"{NEWEST}/manifest.json"


def consumer(run: Path) -> str:
    flip(run / NEWEST / "consumer.json", 40)
    return f"{NEWEST}/consumer.json"


def progress(run: Path) -> str:
    flip(run / NEWEST / "progress.json", 40)
    return f"{NEWEST}/progress.json"


def trainer(run: Path) -> str:
    flip(run / NEWEST / "trainer/trained.safetensors", 100)
    return f"{NEWEST}/trainer/trained.safetensors"


def trainer_link(run: Path) -> str:
    path = run / NEWEST / "trainer/trained.safetensors"
    shutil.move(path, run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    return f"{NEWEST}/trainer/trained.safetensors"


def generation_emptied(run: Path) -> str:
    shutil.rmtree(run / NEWEST)
    (run / NEWEST).mkdir()
    return NEWEST


def marker(run: Path) -> str:
    (run / "run.json").write_text("{")
    return "run.json"


def other_marker(run: Path) -> str:
    """A flipped digit is JSON still, and names a run that nothing in the folder is of."""
    content = (run / "run.json").read_text()
    at = content.index('"run_id": "') + 11
    digit = "0" if content[at] != "0" else "1"
    (run / "run.json").write_text(content[:at] + digit + content[at + 1 :])
    return "run.json"


JOURNALS = [
    before_a_mark,
    after_the_last_mark,
    in_a_mark,
    in_a_header,
    in_the_first_record,
    journal_gone,
    last_journal_gone,
    journal_cut,
    journal_fifo,
    journal_folder,
]
SEGMENTS = [needed_payload, segment_gone, segment_cut, segment_fifo, old_segment_gone]
GENERATIONS = [manifest, consumer, progress, trainer, trainer_link, generation_emptied]
MARKERS = [marker, other_marker]


def named_by_verify(run: Path) -> list[str]:
    found = verify(str(run))
    return [*(each.path for each in found.damages), *found.unpromised]


@pytest.mark.parametrize("damage", [*JOURNALS, *SEGMENTS, *GENERATIONS, *MARKERS])
async def test_what_is_damaged_is_named_and_all_that_is_left_is_trained_once(
    run: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    named = damage(run)
    target = str(tmp_path / "salvaged")
    found = salvaged(str(run), target)
    assert any(named in line for line in named_by_verify(run))
    assert any(loss.path.startswith(named) for loss in found.losses), found.losses
    assert not found.whole
    assert all(loss.what and loss.lost for loss in found.losses)
    assert verify(target).whole
    assert await goes_on(target) == EVERY


async def test_a_run_that_is_whole_is_copied(run: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "salvaged")
    found = salvaged(str(run), target)
    assert found.whole
    assert (found.step, found.generations_usable, found.generations_unusable) == (4, 5, 0)
    assert (found.members_again, found.items_again, found.left_out) == (0, 0, {})
    assert found.groups_kept > 1
    assert found.members_kept >= 2 * found.groups_kept
    shutil.rmtree(run)  # nothing in it is needed any more
    assert await goes_on(target) == EVERY


async def test_a_lost_payload_costs_one_member(run: Path, tmp_path: Path) -> None:
    whole = salvaged(str(run), str(tmp_path / "whole"))
    path = needed_payload(run)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    (loss,) = found.losses
    frame = [each for each in frames(str(run), path) if each.header.kind == PAYLOAD][-1:]
    assert not frame or frame[0].offset < (loss.offset or 0)  # the last that is whole lies before it
    assert (loss.path, found.members_again) == (path, 1)
    assert "the member is run again" in loss.lost
    assert "task numbers, index" in loss.lost
    assert found.members_kept == whole.members_kept - 1
    assert found.groups_kept >= whole.groups_kept - 1


async def test_events_behind_a_damaged_one_are_used(run: Path, tmp_path: Path) -> None:
    """Early in the first journal: were all that comes after it given up, hardly anything would be left."""
    whole = salvaged(str(run), str(tmp_path / "whole"))
    before_a_mark(run)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    loss = found.losses[0]
    assert (loss.path, loss.offset is not None, loss.bytes % 64) == (FIRST, True, 0)
    assert loss.bytes >= 128
    assert found.groups_kept >= whole.groups_kept - 1


async def test_a_changed_mark_costs_nothing(run: Path, tmp_path: Path) -> None:
    whole = salvaged(str(run), str(tmp_path / "whole"))
    in_a_mark(run)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    (loss,) = found.losses
    assert "nothing" in loss.lost
    assert (found.groups_kept, found.members_kept) == (whole.groups_kept, whole.members_kept)


async def test_what_was_trained_of_a_journal_that_is_gone_is_known_by_its_payloads(run: Path, tmp_path: Path) -> None:
    journal_gone(run)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    assert found.items_again > 0
    assert not any("not run again" in loss.lost for loss in found.losses)
    assert await goes_on(str(tmp_path / "salvaged")) == EVERY


@pytest.mark.parametrize("damage", [*JOURNALS, *SEGMENTS])
async def test_any_two_kinds_of_damage_at_once(run: Path, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """With the old payloads gone as well, the order of the draws says what was trained."""
    old_segment_gone(run)
    if damage is not old_segment_gone:
        damage(run)
    salvaged(str(run), str(tmp_path / "salvaged"))
    assert await goes_on(str(tmp_path / "salvaged")) == EVERY


async def test_without_any_journal_and_any_payload_the_trained_stay_trained(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "journals")
    shutil.rmtree(run / "segments")
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    assert (found.groups_kept, found.members_kept) == (0, 0)
    assert await goes_on(str(tmp_path / "salvaged")) == EVERY


def in_the_second_lifes_first_record(run: Path) -> str:
    """It says what of the first life does not count."""
    flip(run / SECOND, HEADER_BYTES)
    return SECOND


def in_the_second_life(run: Path) -> str:
    return in_event(run, SECOND, 2)


@pytest.mark.parametrize("damage", [in_the_second_lifes_first_record, in_the_second_life, before_a_mark, journal_gone])
@pytest.mark.parametrize("option", [("after_crash", "discard"), ("order", "strict"), ("strategy", "synchronous")])
async def test_however_the_run_was_made(tmp_path: Path, option: tuple[str, str], damage: Callable[[Path], str]) -> None:
    options = dict([option])
    run = Path(await two_lives(tmp_path, **options))
    named = damage(run)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    assert any(loss.path == named for loss in found.losses)
    assert await goes_on(str(tmp_path / "salvaged"), **options) == EVERY


@pytest.mark.parametrize("damage", [in_the_first_record, in_the_second_life, journal_gone, needed_payload])
async def test_a_salvaged_run_is_salvaged_as_any_other(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    run = Path(await two_lives(tmp_path))
    first = tmp_path / "first"
    salvaged(str(run), str(first))
    async with make(5, str(first)) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(GROUPS, until=6):
            await train(pipe, trained, batch)
        await (await pipe.save(6)).committed()
        await anyio.sleep(4.0)
    named = damage(first)
    found = salvaged(str(first), str(tmp_path / "second"))
    assert found.step == 6
    assert any(loss.path == named for loss in found.losses)
    assert await goes_on(str(tmp_path / "second")) == EVERY


async def test_without_any_generation_the_error_says_what_is_damaged_in_each(run: Path, tmp_path: Path) -> None:
    names = ["manifest.json", "consumer.json", "manifest.json", "consumer.json", "consumer.json"]
    for number, name in enumerate(names):
        flip(run / f"generations/{number:08d}" / name, 45)
    with pytest.raises(Damaged) as caught:
        salvage(str(run), str(tmp_path / "salvaged"))
    text = str(caught.value)
    assert all(f"generation {number}" in text for number in range(5))
    assert (text.count("consumer.json"), text.count("manifest.json")) == (3, 2)
    assert not (tmp_path / "salvaged").exists()


async def test_what_is_no_plain_file_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    named = segment_fifo(run)
    assert {each.path for each in verify(str(run)).damages} == {named}
    async with make(1, str(run)) as pipe:
        pipe.attach(trained=Trained())
        assert (await pipe.resume()).step == 4  # nothing in it had been promised yet


async def test_a_damaged_progress_is_made_anew_from_what_was_trained(run: Path, tmp_path: Path) -> None:
    progress(run)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    assert found.step == 4
    async with make(1, str(tmp_path / "salvaged")) as pipe:
        pipe.attach(trained=Trained())
        await pipe.resume()
        now = pipe.progress
    assert (now.next_consumer_step, now.target_upto_future_step) == (5, 4)
    assert now.consumed_samples == now.target_samples == {"numbers": 4 * GROUPS}
