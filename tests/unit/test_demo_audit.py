"""The demo's audit, against journals written by hand: the zeros of its table mean something."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pipeline.checkpoint.manifest import FileInfo, Manifest, encode_manifest
from pipeline.errors import StoreError
from pipeline.records import (
    AnyEvent,
    BatchHint,
    Claimed,
    Closed,
    Dropped,
    Failed,
    Finished,
    Interrupted,
    Opened,
    Reopened,
    Started,
)
from pipeline.store.frames import EVENTS, PAYLOAD, crc32c, encode_frame
from pipeline.store.journal import JournalPosition, encode_events
from tasks.demo import plan
from tasks.demo.audit import Audit, audit
from tasks.demo.books import read_books
from tasks.demo.report import Measured, summarize, table

RUN_ID = "5eed" * 8
TAG = int(RUN_ID[:16], 16)


class Run:
    """A run's folder in which every file is written by hand, frame by frame."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("journals", "segments", "generations"):
            (folder / name).mkdir()
        (folder / "run.json").write_text(json.dumps({"kind": "forebay run", "format_version": 1, "run_id": RUN_ID}))

    def journal(self, incarnation: int, events: Sequence[AnyEvent], *, torn: bytes = b"") -> None:
        frame = encode_frame(
            EVENTS, encode_events(list(events)), incarnation=incarnation, rank=0, run_tag=TAG, sequence=1
        )
        (self.folder / "journals" / f"{incarnation:06d}-0000.fbj").write_bytes(b"".join(frame) + torn)
        payloads = b""
        for event in events:
            if type(event) is Finished and event.segment == 1:
                assert event.offset == len(payloads)
                frame = encode_frame(
                    PAYLOAD, b"x" * 10, incarnation=incarnation, rank=0, run_tag=TAG, sequence=event.uid
                )
                payloads += b"".join(frame)
        (self.folder / "segments" / f"{incarnation:06d}-0000-000001.fbs").write_bytes(payloads)

    def generation(
        self, number: int, *, parent: int, step: int, incarnation: int, trained: Sequence[tuple[int, int]]
    ) -> None:
        folder = self.folder / "generations" / f"{number:08d}"
        folder.mkdir()
        content = json.dumps({"format_version": 1, "step": step, "trained": trained}).encode()
        (folder / "consumer.json").write_bytes(content)
        manifest = Manifest(
            run_id=RUN_ID,
            generation=number,
            parent=parent,
            step=step,
            incarnation=incarnation,
            journals=[JournalPosition(incarnation=incarnation, sequence=1)],
            files=[FileInfo(path="consumer.json", bytes=len(content), crc32c=f"{crc32c(content):08x}")],
            options={"max_staleness": 2},
        )
        (folder / "manifest.json").write_bytes(encode_manifest(manifest))

    def audit(self) -> Audit:
        books = read_books(str(self.folder))
        assert books is not None
        return audit(books)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def claim(uid: int, position: int | None = None) -> list[AnyEvent]:
    place = uid if position is None else position
    return [Claimed(uid, "cartpole", 0, place, place), Started(uid)]


def finish(uid: int, version: int = 0, *, place: int = 0, reward: float = 1.0) -> Finished:
    """A rollout whose payload is number ``place`` of its incarnation's first segment."""
    return Finished(uid, 0, 1, reward, version, version, segment=1, offset=128 * place, length=10)


def make(*uids: int, version: int = 0, place: int = 0) -> list[AnyEvent]:
    """Claim and finish some items, one after the other."""
    made: list[AnyEvent] = []
    for number, uid in enumerate(uids):
        made += [*claim(uid), finish(uid, version, place=place + number, reward=float(uid))]
    return made


def batch(step: int, *uids: int, lives: Sequence[int] | None = None) -> BatchHint:
    return BatchHint(step, list(uids), list(lives or [0] * len(uids)))


def one_life(run: Run, events: Sequence[AnyEvent], *, step: int, trained: Sequence[tuple[int, int]]) -> Audit:
    """A run of one process, saved once at ``step`` and closed."""
    run.journal(1, [Opened(1), *events, Closed()])
    run.generation(0, parent=-1, step=0, incarnation=1, trained=[])
    run.generation(1, parent=0, step=step, incarnation=1, trained=trained)
    return run.audit()


def test_an_undisturbed_run_is_counted_and_nothing_is_found(run: Run) -> None:
    found = one_life(run, [*make(0, 1, 2), batch(1, 0, 1), *claim(3), Interrupted(3, 0, 1, "shutdown")], step=1,
                     trained=[(0, 1)])  # fmt: skip
    assert (found.claimed, found.produced, found.trained, found.buffered, found.unfinished) == (4, 3, 2, 1, 1)
    assert found.lost == []
    assert found.twice == []
    assert found.kills == []
    assert found.recovered == 0
    assert [step.returns for step in found.steps] == [[0.0, 1.0]]


def killed_and_resumed(run: Run) -> None:
    """Saved at step 1; steps 2 and 3 were handed out, 6 was finished and 7 in flight when the process was killed.

    The next one repeats step 2, trains another batch in step 3 and finishes 7.
    """
    run.journal(
        1,
        [
            Opened(1),
            *make(0, 1, 2, 3, 4, 5, 6),
            batch(1, 0, 1),
            *claim(7),
            batch(2, 2, 3),
            batch(3, 4, 5),
        ],
        torn=b"FBAY, and then the power of the process ended",
    )
    run.generation(0, parent=-1, step=0, incarnation=1, trained=[])
    run.generation(1, parent=0, step=1, incarnation=1, trained=[(0, 1)])
    again: list[AnyEvent] = [
        Opened(2, 0, 1, 1, 1),
        batch(2, 2, 3),
        Started(7, 0, 2, 1),
        finish(7, 1),
        batch(3, 6, 7),
        *make(8, version=3, place=1),
        Closed(),
    ]
    run.journal(2, again)
    run.generation(2, parent=1, step=1, incarnation=2, trained=[(0, 1)])
    run.generation(3, parent=2, step=3, incarnation=2, trained=[(0, 3), (6, 7)])


def test_a_batch_repeated_because_the_weights_went_back_counts_once(run: Run) -> None:
    killed_and_resumed(run)
    found = run.audit()
    assert found.twice == []
    assert found.trained == 6
    assert [(step.step, step.incarnation, step.repeated) for step in found.steps] == [
        (1, 1, False),
        (2, 2, True),
        (3, 2, False),
    ]


def test_what_a_kill_left_behind_is_counted_as_recovered_when_it_is_trained(run: Run) -> None:
    killed_and_resumed(run)
    found = run.audit()
    assert found.recovered == 3  # 2 and 3 in the repeated batch, 6 from the buffer; 7 was made afterwards
    assert found.cut == 1
    assert [(kill.step, kill.resumed_from) for kill in found.kills] == [(3, 1)]


def test_a_batch_of_an_abandoned_line_trains_nothing(run: Run) -> None:
    killed_and_resumed(run)
    found = run.audit()
    assert found.buffered == 3  # 4 and 5, which only the weights that are gone had seen, and 8
    assert found.lost == []


def test_staleness_counts_from_the_weights_that_came_back(run: Run) -> None:
    run.journal(1, [Opened(1), *make(0, version=0), batch(1, 0), *make(1, version=9, place=1)])
    run.generation(0, parent=-1, step=0, incarnation=1, trained=[])
    run.generation(1, parent=0, step=1, incarnation=1, trained=[(0, 0)])
    run.journal(2, [Opened(2, 0, 1, 1, 1), *make(2, version=1), batch(2, 2), batch(3, 1), Closed()])
    run.generation(2, parent=1, step=3, incarnation=2, trained=[(0, 2)])
    # Version 9 of the first process is none of the second's: its weights began again at 1.
    assert [group.staleness for step in run.audit().steps for group in step.groups] == [0, 0, 1]


def test_a_rollout_trained_in_two_steps_is_found(run: Run) -> None:
    found = one_life(run, [*make(0, 1, 2), batch(1, 0, 1), batch(2, 1, 2)], step=2, trained=[(0, 2)])
    assert [finding.uid for finding in found.twice] == [1]
    assert found.lost == []


def test_a_rollout_that_is_twice_in_one_batch_is_found(run: Run) -> None:
    assert [f.uid for f in one_life(run, [*make(0), batch(1, 0, 0)], step=1, trained=[(0, 0)]).twice] == [0]


def test_an_item_that_was_trained_under_two_uids_is_found(run: Run) -> None:
    events = [*make(0), *claim(1, position=0), finish(1, place=1), batch(1, 0, 1)]
    assert [finding.uid for finding in one_life(run, events, step=1, trained=[(0, 1)]).twice] == [1]


def test_a_trained_rollout_that_the_checkpoint_does_not_know_of_is_found(run: Run) -> None:
    found = one_life(run, [*make(0, 1), batch(1, 0, 1)], step=1, trained=[(0, 0)])
    assert [finding.uid for finding in found.twice] == [1]


def test_a_released_batch_is_not_what_was_trained(run: Run) -> None:
    found = one_life(run, [*make(0, 1, 2), batch(1, 0, 1), batch(1, 1, 2)], step=1, trained=[(1, 2)])
    assert found.twice == []
    assert [group.uid for group in found.steps[0].groups] == [1, 2]


def test_a_rollout_that_the_checkpoint_calls_trained_and_no_batch_held_is_lost(run: Run) -> None:
    found = one_life(run, [*make(0, 1), batch(1, 0)], step=1, trained=[(0, 1)])
    assert [finding.uid for finding in found.lost] == [1]
    assert found.claimed == found.trained + found.buffered + len(found.lost)


def test_an_item_in_flight_at_the_kill_that_nobody_started_again_is_lost(run: Run) -> None:
    run.journal(1, [Opened(1), *claim(0), *make(1), batch(1, 1)])
    run.generation(0, parent=-1, step=0, incarnation=1, trained=[])
    run.generation(1, parent=0, step=1, incarnation=1, trained=[(1, 1)])
    run.journal(2, [Opened(2, 0, 1, 1, 1), *make(2, version=1), batch(2, 2), Closed()])
    run.generation(2, parent=1, step=2, incarnation=2, trained=[(1, 2)])
    found = run.audit()
    assert [finding.uid for finding in found.lost] == [0]
    assert "forgotten" in found.lost[0].why


def test_an_item_that_is_to_be_run_again_and_waits_for_its_turn_is_not_lost(run: Run) -> None:
    run.journal(1, [Opened(1), *make(0), batch(1, 0), *claim(1), *claim(2)])
    run.generation(0, parent=-1, step=0, incarnation=1, trained=[])
    run.generation(1, parent=0, step=1, incarnation=1, trained=[(0, 0)])
    run.journal(2, [Opened(2, 0, 1, 1, 1), Started(1, 0, 2, 1), Interrupted(1, 0, 2, "shutdown"), Closed()])
    found = run.audit()
    assert found.lost == []
    assert found.unfinished == 2


def test_a_claim_that_is_missing_is_found_by_its_number_and_by_its_place(run: Run) -> None:
    found = one_life(run, [*make(0), *claim(2, position=3), finish(2, place=1), batch(1, 0, 2)], step=1,
                     trained=[(0, 0), (2, 2)])  # fmt: skip
    assert [finding.uid for finding in found.lost] == [1, -1, -1]
    assert "item 2 of epoch 0 of cartpole" in found.lost[2].text


def test_a_finished_rollout_whose_payload_is_gone_is_lost(run: Run) -> None:
    gone = Finished(1, 0, 1, 1.0, 0, 0, segment=2, offset=0, length=10)
    run.journal(1, [Opened(1), *make(0), batch(1, 0), *claim(1), gone, Closed()])
    run.generation(0, parent=-1, step=0, incarnation=1, trained=[])
    run.generation(1, parent=0, step=1, incarnation=1, trained=[(0, 0)])
    assert [(finding.uid, "payload" in finding.why) for finding in run.audit().lost] == [(1, True)]


def test_a_finished_rollout_that_was_left_until_it_was_too_old_is_lost(run: Run) -> None:
    events = make(0, 1) + [event for uid in (2, 3, 4, 5) for event in (*make(uid, version=uid - 2, place=uid),)]
    steps = [batch(step, uid) for step, uid in enumerate((0, 2, 3, 4, 5), start=1)]
    found = one_life(run, [*events, *steps], step=5, trained=[(0, 0), (2, 5)])
    assert [(finding.uid, "too old" in finding.why) for finding in found.lost] == [(1, True)]


def test_a_batch_of_what_had_not_finished_is_found(run: Run) -> None:
    found = one_life(run, [*make(0), *claim(1), batch(1, 0, 1)], step=1, trained=[(0, 1)])
    assert 1 in {finding.uid for finding in found.lost}


def test_a_step_without_a_batch_is_found(run: Run) -> None:
    found = one_life(run, [*make(0, 1), batch(1, 0), batch(3, 1)], step=3, trained=[(0, 1)])
    assert [finding.text for finding in found.lost] == ["the batch of step 2 is on no record"]


def test_what_is_dropped_with_a_reason_or_run_again_is_not_lost(run: Run) -> None:
    events: list[AnyEvent] = [
        *make(0, 1, 2),
        Reopened(1, "expired"),
        Dropped(2, "expired"),
        Started(1, 0, 2, 1),
        finish(1, 1, place=3),
        batch(1, 0, 1, lives=[0, 1]),
    ]
    found = one_life(run, events, step=1, trained=[(0, 1)])
    assert found.lost == []
    assert found.dropped == {"expired": 1}
    assert (found.produced, found.outdated, found.trained) == (4, 1, 2)


def test_a_line_of_checkpoints_with_a_hole_is_refused(run: Run) -> None:
    run.journal(1, [Opened(1), *make(0), batch(1, 0), Closed()])
    run.generation(2, parent=1, step=1, incarnation=1, trained=[(0, 0)])
    with pytest.raises(StoreError, match="parent of 2, is gone"):
        read_books(str(run.folder))


def test_a_run_that_was_killed_before_its_first_checkpoint_can_be_audited(run: Run) -> None:
    run.journal(1, [Opened(1), *claim(0)])
    found = run.audit()
    assert (found.claimed, found.unfinished, found.trained) == (1, 1, 0)
    assert found.lost == []


def test_an_empty_folder_holds_no_run(tmp_path: Path) -> None:
    assert read_books(str(tmp_path)) is None
    assert read_books(str(tmp_path / "absent")) is None


def test_the_table_shows_what_was_lost_and_trained_twice(run: Run) -> None:
    one_life(run, [*make(0, 1, 2), batch(1, 0, 1), batch(2, 1)], step=2, trained=[(0, 2)])
    books = read_books(str(run.folder))
    assert books is not None
    summary, _ = summarize(books, Measured(seconds=12.0))
    assert (summary.lost, summary.trained_twice, summary.sound) == (1, 1, False)
    shown = table(summary)
    assert "! lost: uid 2: the checkpoint calls it trained, but no batch holds it" in shown
    assert "! trained twice: uid 1: trained 2 times" in shown


@pytest.mark.parametrize("steps", [2, 3, 5, 8, 12, 24, 30, 80, 100, 1000])
def test_a_kill_comes_before_the_end_and_not_right_after_a_save(steps: int) -> None:
    due = [step for step in range(1, steps + 1) if plan.kill_due(step, steps)]
    if steps >= 3:
        assert due[0] < steps
        assert due[0] % plan.SAVE_EVERY in (2, 3)
        assert not any(plan.is_over(step, steps, 500.0) for step in range(1, due[0]) if step % plan.SAVE_EVERY == 0)
    assert plan.is_over(steps, steps, None)


def test_a_group_that_its_filter_rejected_is_dropped_and_not_lost(run: Run) -> None:
    rejected = msgspec.structs.replace(finish(1, place=1), rejected=True)
    failed = Failed(3, 1, 1, "error", "no", True, rejected=True)
    pair: list[AnyEvent] = [Claimed(3, "cartpole", 0, 3, 3, size=2, need=1), Started(3), Started(3, 1)]
    events = [*make(0), *claim(1), rejected, *pair, finish(3, place=2), failed, *claim(2), batch(1, 0)]
    found = one_life(run, events, step=1, trained=[(0, 0)])
    assert (found.dropped, found.lost, found.unfinished) == ({"filtered": 2}, [], 1)
