"""``TrajectoryBuffer`` with a folder: what is in memory, what lies on the disk, and what a resume goes on with."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter as Counts
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import (
    ClosedError,
    ConfigError,
    Damaged,
    Locked,
    ReplayBuffer,
    StoreError,
    TrajectoryBuffer,
    UsageError,
    WriteFailed,
)
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.checkpoint import verify
from pipeline.replay import segment_rows, shelving, trajectory_draws
from pipeline.replay import store as store_module
from pipeline.replay.shelf import Rows
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.store.files import OsFiles
from pipeline.store.frames import PAYLOAD, scan
from pipeline.store.layout import Layout
from pipeline.store.writer import StoreWriter
from tests.support.disk import ScriptedFiles
from tests.support.replaying import Counter
from tests.support.trajectories import check, contents, draws, numbers, trajectory


def made(directory: Path | None, files: OsFiles | None = None, **options: Any) -> TrajectoryBuffer:
    return TrajectoryBuffer(directory=directory, files=files, **{"cache_size": 3, "sample_window_size": 0, **options})


def add(buffer: TrajectoryBuffer, *which: int) -> None:
    """Add trajectories of different sizes, one after the other."""
    for number in which:
        buffer.add_trajectories([trajectory(number, 1 + number % 4, 1 + number % 3)])


def settled(buffer: TrajectoryBuffer) -> None:
    """Wait until nothing is being written."""
    buffer._shelving.join()


def copied(directory: Path, name: object) -> Path:
    """Return a copy of a folder that nobody has."""
    target = directory.parent / f"{directory.name}-{name}"
    shutil.copytree(directory, target)
    return target


def written(directory: Path) -> Counts[int]:
    """How often each trajectory lies in the segments."""
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    paths = [os.path.join(layout.segments, name) for name in layout.list_segments()]
    frames = (frame for path in paths for frame in scan(path, run_tag=run.tag))
    return Counts(frame.header.sequence for frame in frames if frame.header.kind == PAYLOAD)


# --- going on


@pytest.mark.parametrize("auto_save", [False, True])
@pytest.mark.parametrize("cache", [1, 4, None])
def test_after_a_resume_the_next_thousand_draws_are_those_of_a_buffer_that_was_not_saved(
    tmp_path: Path, cache: int | None, auto_save: bool
) -> None:
    options: dict[str, Any] = {"cache_size": cache, "sample_window_size": 6, "seed": 5, "capacity": 12}
    other = TrajectoryBuffer(sample_window_size=6, cache_size=12, seed=5)
    buffer = made(tmp_path, auto_save=auto_save, **options)
    with buffer:
        assert buffer.resume() == (0, None, 0)
        for number in range(20):
            for each in (buffer, other):
                add(each, number)
                each.sample(3)
            if number in (2, 9, 19):
                buffer.save(number, wait=True)
    with made(tmp_path, auto_save=auto_save, **options) as again:
        assert again.resume().step == 19
        assert [info.trajectory_id for info in again.infos()] == list(range(8, 20))
        assert draws(again, 1000) == draws(other, 1000)
        add(again, 20, 21)
        add(other, 20, 21)
        assert draws(again, 50) == draws(other, 50)
    assert verify(str(tmp_path)).whole


@pytest.mark.parametrize("begun", [False, True])
def test_a_buffer_that_holds_nothing_or_was_never_sampled_is_saved(tmp_path: Path, begun: bool) -> None:
    with made(tmp_path) as buffer:
        if begun:
            add(buffer, 0, 1)
        buffer.save(1, wait=True)
        expected = contents(buffer)
    with made(tmp_path) as again:
        assert again.resume().step == 1
        assert contents(again) == expected
        add(again, 2)
        check(again.sample(9))


def test_what_is_attached_goes_back_with_the_trajectories(tmp_path: Path) -> None:
    with made(tmp_path, keep=None) as buffer:
        counter = Counter()
        buffer.attach(counter=counter)
        buffer.resume()
        for step in (1, 2, 3):
            add(buffer, step)
            counter.step = step
            buffer.save(step, wait=True)
    which: int | None
    for which in (2, None):
        again, counter = made(tmp_path, keep=None), Counter()
        again.attach(counter=counter)
        with again:
            assert again.resume(which).step == counter.step == 2
            assert numbers(again.sample(50)) <= {1, 2}
            assert len(again) == 2
            assert again.trajectory_counter == 2


@pytest.mark.parametrize(
    ("options", "held", "cached", "drawn"),
    [
        ({"capacity": 4, "cache_size": 2, "sample_window_size": 3}, range(6, 10), 2, {7, 8, 9}),
        ({"cache_size": 20}, range(10), 10, set(range(10))),
        ({"cache_size": None, "sample_window_size": 2}, range(10), 2, {8, 9}),
        ({"capacity": 1}, range(9, 10), 1, {9}),
    ],
)
def test_another_capacity_window_and_cache_count_from_the_resume_on(
    tmp_path: Path, options: dict[str, Any], held: range, cached: int, drawn: set[int]
) -> None:
    with made(tmp_path) as buffer:
        add(buffer, *range(10))
        buffer.save(1, wait=True)
    with made(tmp_path, **options) as again:
        again.resume()
        assert [info.trajectory_id for info in again.infos()] == list(held)
        assert again.get_stats()["cache_size"] == cached
        found = [again.sample(30) for _ in range(40)]
        assert set().union(*map(numbers, found)) == drawn
        for batch in found:
            check(batch)
        again.save(2, wait=True)
    assert verify(str(tmp_path)).whole


def test_each_trajectory_is_written_once(tmp_path: Path) -> None:
    for life in range(3):
        with made(tmp_path, auto_save=life > 0, keep=None) as buffer:
            buffer.resume()
            for step in range(4 * life, 4 * life + 4):
                add(buffer, 2 * step, 2 * step + 1)
                buffer.save(step, wait=True)
    assert written(tmp_path) == dict.fromkeys(range(24), 1)


def test_the_weights_that_made_a_trajectory_and_its_length_come_back(tmp_path: Path) -> None:
    names = [f"weights-{number // 7}" for number in range(300)]
    with made(tmp_path, capacity=100) as buffer:
        for number, name in enumerate(names):
            buffer.add_trajectories([trajectory(number, 1, 1, model_weights_id=name, max_episode_length=number)])
        buffer.save(1, wait=True)
    with made(tmp_path, capacity=100) as again:
        again.resume()
        assert [info.model_weights_id for info in again.infos()] == names[200:]
        assert [info.max_episode_length for info in again.infos()] == list(range(200, 300))
        assert again.trajectory(210)["model_weights_id"] == "weights-30"


# --- memory and disk


def test_what_the_cache_has_no_room_for_is_sampled_from_the_disk(tmp_path: Path) -> None:
    with made(tmp_path) as buffer:
        add(buffer, *range(30))
        buffer.save(1, wait=True)
        assert buffer.get_stats()["cache_size"] == 3
        assert buffer.get_stats()["on_disk"] == 30
        found: set[int] = set()
        for _ in range(30):
            batch = buffer.sample(40)
            check(batch)
            found |= numbers(batch)
        assert found == set(range(30))
        for number in range(30):
            whole = buffer.trajectory(number)
            check(whole)
            assert whole["rewards"].shape == (1 + number % 4, 1 + number % 3)
        check({**buffer.arrays(), **_nested(buffer.arrays())})


def _nested(arrays: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inner = {name[9:]: tensor for name, tensor in tensors.items() if name.startswith("curr_obs.")}
    return {**tensors, "curr_obs": {**inner, "half": inner["half"].view(torch.bfloat16)}}


@pytest.mark.parametrize("together", [0, 1 << 30])
@pytest.mark.parametrize("files", [1, 64])
def test_rows_are_read_alike_singly_or_together_however_few_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int, files: int
) -> None:
    monkeypatch.setattr(segment_rows, "_WHOLE", together)
    monkeypatch.setattr(segment_rows, "MOST_OPEN", files)
    monkeypatch.setattr(trajectory_draws, "MOST_OPEN", files)
    for life in range(4):  # each has a segment of its own
        with made(tmp_path) as buffer:
            buffer.resume()
            add(buffer, *range(5 * life, 5 * life + 5))
            buffer.save(life, wait=True)
    memory = made(None, cache_size=None)
    add(memory, *range(20))
    with made(tmp_path, cache_size=1) as buffer:
        buffer.resume()
        memory.load_state_dict(buffer.state_dict())
        for size in (1, 7, 100):
            assert draws(buffer, 20, size) == draws(memory, 20, size)
        assert buffer._rows is not None
        assert len(buffer._rows._files) <= files
        handles = [os.readlink(f"/proc/self/fd/{each}") for each in _handles()]
        assert sum(str(tmp_path) in each and each.endswith(".fbs") for each in handles) <= files
    assert not [each for each in _handles() if str(tmp_path / "segments") in os.readlink(f"/proc/self/fd/{each}")]


def _handles() -> list[str]:
    return [each for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")]


def test_clearing_the_cache_leaves_on_the_disk_what_is_there_for_good(tmp_path: Path) -> None:
    with made(tmp_path, cache_size=10) as buffer:
        add(buffer, *range(6))
        buffer.save(1, wait=True)
        add(buffer, 6)
        buffer.clear_cache()
        assert buffer.get_stats()["cache_size"] == 1
        assert buffer.get_stats()["memory_bytes"] < 8 * 2200
        for batch in (buffer.sample(100) for _ in range(10)):
            check(batch)
        buffer.save(2, wait=True)
        buffer.clear_cache()
        assert buffer.get_stats()["memory_bytes"] == 0
        expected = contents(buffer)
        add(buffer, 7)
    with made(tmp_path) as again:
        again.resume()
        assert contents(again) == expected


def test_without_saving_what_the_cache_has_no_room_for_leaves_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelving, "_LEAST_SYNC", 1)
    with made(tmp_path) as buffer:
        for number in range(40):
            add(buffer, number)
            settled(buffer)
        assert buffer.get_stats()["cache_size"] < 20
        assert buffer.get_stats()["on_disk"] > 20
        for batch in (buffer.sample(30) for _ in range(20)):
            check(batch)
        assert max(written(tmp_path)) <= 37
        before = contents(buffer)
        buffer.save(1, wait=True)
        assert contents(buffer) == before
    with made(tmp_path) as again:
        again.resume()
        assert contents(again) == before


def test_without_auto_save_nothing_is_written_while_there_is_room(tmp_path: Path) -> None:
    for options in ({"cache_size": 20}, {"cache_size": None}):
        with made(tmp_path / str(len(os.listdir(tmp_path))), **options) as buffer:
            add(buffer, *range(9))
            settled(buffer)
            assert os.listdir(buffer._saver.begin().folder.layout.segments) == []


def test_with_auto_save_they_are_on_the_disk_before_a_save(tmp_path: Path) -> None:
    with made(tmp_path, auto_save=True, cache_size=50) as buffer:
        add(buffer, *range(9))
        settled(buffer)
        assert written(tmp_path) == dict.fromkeys(range(9), 1)
        assert buffer.get_stats()["queued_bytes"] == 0
        buffer.save(1, wait=True)
    assert written(tmp_path) == dict.fromkeys(range(9), 1)
    with made(tmp_path) as again:
        assert again.resume().rows == sum((1 + number % 4) * (1 + number % 3) for number in range(9))


def test_a_trajectory_that_was_added_after_the_save_is_not_there_after_a_resume(tmp_path: Path) -> None:
    buffer = made(tmp_path, auto_save=True)
    add(buffer, 0, 1)
    buffer.save(1, wait=True)
    expected = contents(buffer)
    add(buffer, 2, 3)
    buffer.close()
    with made(tmp_path) as again:
        again.resume()
        assert contents(again) == expected
        assert again.add_trajectories([trajectory(9)]) == range(2, 3)
        again.save(2, wait=True)
    with made(tmp_path) as again:
        again.resume()
        check(again.trajectory(2))
        assert again.trajectory(2)["max_episode_length"] == 9


class Held(OsFiles):
    """Writes no segment until it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def create(self, path: str) -> int:
        if path.endswith(".fbs"):
            self.begun.set()
            assert self.go_on.wait(30)
        return super().create(path)


def test_who_adds_waits_while_too_much_is_queued(tmp_path: Path) -> None:
    files = Held()
    buffer = made(tmp_path, files, auto_save=True)
    buffer._shelving.queue_bytes = 1
    add(buffer, 0)
    assert files.begun.wait(30)
    added = threading.Event()

    def more() -> None:
        add(buffer, 1)
        added.set()

    thread = threading.Thread(target=more)
    thread.start()
    while not buffer.gate.waiters:
        assert thread.is_alive()
        files.begun.wait(0)
    assert not added.is_set()
    assert len(buffer) == 1
    check(buffer.sample(3))  # who samples does not wait
    files.go_on.set()
    thread.join(30)
    assert added.is_set()
    buffer.close()


def test_who_waits_for_the_disk_is_told_when_the_buffer_is_closed(tmp_path: Path) -> None:
    files = Held()
    buffer = made(tmp_path, files, auto_save=True)
    buffer._shelving.queue_bytes = 1
    add(buffer, 0)
    assert files.begun.wait(30)
    told: list[BaseException] = []

    def more() -> None:
        try:
            add(buffer, 1)
        except ClosedError as error:
            told.append(error)

    thread = threading.Thread(target=more)
    thread.start()
    while not buffer.gate.waiters:
        files.begun.wait(0)
    closing = threading.Thread(target=buffer.close)
    closing.start()
    thread.join(30)
    files.go_on.set()
    closing.join(30)
    assert len(told) == 1


def test_what_leaves_the_buffer_before_its_turn_to_be_written_is_not(tmp_path: Path) -> None:
    files = Held()
    buffer = made(tmp_path, files, auto_save=True, capacity=3)
    buffer.add_trajectories([trajectory(number) for number in range(3)])
    assert files.begun.wait(30)  # the first is copied, and not the others
    add(buffer, *range(3, 200))  # the index has grown since, and forgotten the first of them
    files.go_on.set()
    settled(buffer)
    buffer.close()
    assert set(written(tmp_path)) == {0, 197, 198, 199}


def test_what_leaves_the_buffer_while_it_is_copied_to_be_written_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, whole = Held(), BlobLayout.encode
    buffer = made(tmp_path, files, auto_save=True, capacity=2, cache_size=1)
    rest = list(range(1, 9))

    def encode(layout: BlobLayout, rows: Rows, memory: Recycler) -> memoryview:
        if rows.info.trajectory_id == 0:
            add(buffer, *rest)
            rest.clear()
        return whole(layout, rows, memory)

    monkeypatch.setattr(BlobLayout, "encode", encode)
    add(buffer, 0)
    files.go_on.set()
    settled(buffer)
    buffer.close()
    assert not rest
    assert set(written(tmp_path)) == {7, 8}


# --- what goes wrong


def test_an_error_beside_the_training_is_raised_once_by_the_next_verb_and_then_tried_again(tmp_path: Path) -> None:
    verbs: list[Callable[[TrajectoryBuffer], object]] = [
        lambda buffer: add(buffer, 99),
        lambda buffer: buffer.save(1),
        lambda buffer: buffer.save_due(1),
        lambda buffer: buffer.close(),
    ]
    for place, verb in enumerate(verbs):
        directory, files = tmp_path / str(place), ScriptedFiles()
        buffer = made(directory, files, auto_save=True)
        add(buffer, 0)
        settled(buffer)
        files.fail_next()
        add(buffer, 1)
        settled(buffer)
        before = contents(buffer)
        with pytest.raises(WriteFailed, match="No space left"):
            verb(buffer)
        if place == 3:
            continue
        assert contents(buffer) == before
        add(buffer, 2)
        buffer.save(2, wait=True)
        expected = contents(buffer)
        buffer.close()
        assert verify(str(directory)).whole
        with made(directory) as again:
            again.resume()
            assert contents(again) == expected


def test_what_was_not_synced_when_a_sync_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ScriptedFiles()
    buffer = made(tmp_path, files, auto_save=True, cache_size=1)
    for number in range(5):
        add(buffer, number)
        settled(buffer)
    assert buffer.get_stats()["cache_size"] == 5  # written, but not there for good
    monkeypatch.setattr(shelving, "_LEAST_SYNC", 1)
    calls = len(files.calls)
    files._fail_at = calls + 2  # the write, then the sync
    add(buffer, 5)
    settled(buffer)
    assert files.calls[calls:][1] == "sync"
    with pytest.raises(WriteFailed):
        buffer.save_due()
    add(buffer, 6)
    buffer.save(1, wait=True)
    expected = contents(buffer)
    buffer.close()
    # What the first writer wrote counts for nothing, and is gone: all of it lies with the second one.
    assert written(tmp_path) == dict.fromkeys(range(7), 1)
    assert os.listdir(tmp_path / "segments") == ["000002-0000-000001.fbs"]
    with made(tmp_path) as again:
        again.resume()
        assert contents(again) == expected
        assert verify(str(tmp_path)).whole


def test_a_folder_in_use_is_not_collected_into_again_without_a_resume(tmp_path: Path) -> None:
    with made(tmp_path) as buffer:
        add(buffer, 0, 1)
        buffer.save(1, wait=True)
        expected = contents(buffer)
    for auto_save in (False, True):
        with made(tmp_path, auto_save=auto_save) as again:
            for verb in (lambda each=again: add(each, 5), lambda each=again: each.save(2)):
                with pytest.raises(UsageError, match=r"call resume\(\) before"):
                    verb()
            assert len(again) == 0
            again.resume()
            assert contents(again) == expected


def test_a_resume_comes_first_and_once(tmp_path: Path) -> None:
    with made(tmp_path) as buffer:
        add(buffer, 0)
        with pytest.raises(UsageError, match="comes first"):
            buffer.resume()
        buffer.save(1, wait=True)
    with made(tmp_path) as again:
        state = again.state_dict()
        again.resume()
        with pytest.raises(UsageError, match="comes first"):
            again.resume()
        with pytest.raises(UsageError, match=r"load_state_dict\(\) comes before"):
            again.load_state_dict(state)
        with pytest.raises(Locked):
            made(tmp_path).resume()
    with pytest.raises(ClosedError):
        again.save(2)
    with pytest.raises(UsageError, match="no directory"):
        made(None, cache_size=None).save(1)


def test_a_buffer_of_another_kind_is_not_taken_for_one_of_trajectories(tmp_path: Path) -> None:
    with made(tmp_path / "t") as buffer:
        add(buffer, 0)
        buffer.save(1, wait=True)
    with ReplayBuffer(9, directory=tmp_path / "r") as rows:
        rows.extend({"x": np.arange(3)})
        rows.save(1, wait=True)
    with made(tmp_path / "r") as buffer, pytest.raises(UsageError, match="of a replay buffer, not of a buffer of traj"):
        buffer.resume()
    with ReplayBuffer(9, directory=tmp_path / "t") as rows:
        refused = pytest.raises(UsageError, match="run of a buffer of trajectories, not of a replay buffer")
        with refused:
            rows.resume()


def test_other_fields_are_refused_after_a_resume_and_nothing_is_changed(tmp_path: Path) -> None:
    with made(tmp_path) as buffer:
        add(buffer, *range(6))
        buffer.save(1, wait=True)
    with made(tmp_path) as again:
        again.resume()
        before = contents(again)
        for wrong in ({"more": torch.zeros(2, 3)}, {"rewards": torch.zeros(4, 3, 2)}, {"zeros": None}):
            with pytest.raises(ConfigError):
                again.add_trajectories([trajectory(6), {**trajectory(7), **wrong}])
            assert contents(again) == before
        again.clear()
        assert again.add_trajectories([{"x": torch.zeros(2, 2)}]) == range(6, 7)
        again.save(2, wait=True)
    with made(tmp_path) as again:
        again.resume()
        assert list(again.sample(1)) == ["x"]


def segment(directory: Path) -> Path:
    return next((directory / "segments").iterdir())


@pytest.mark.parametrize("cached", [0, 5])
def test_a_damaged_trajectory_is_found_before_anything_is_changed(tmp_path: Path, cached: int) -> None:
    with made(tmp_path, keep=None) as buffer:
        counter = Counter()
        buffer.attach(counter=counter)
        add(buffer, 0)
        buffer.save(1, wait=True)
        counter.step = 7
        add(buffer, 1, 2, 3)
        buffer.save(2, wait=True)
    raw = bytearray(segment(tmp_path).read_bytes())
    raw[len(raw) // 2] ^= 1
    segment(tmp_path).write_bytes(raw)
    again, counter = made(tmp_path, cache_size=1 + cached), Counter()
    again.attach(counter=counter)
    with again:
        with pytest.raises(Damaged, match=r"resume\(step=1\) takes the one before"):
            again.resume()
        assert (len(again), counter.step) == (0, 0)
        assert again.resume(1).step == 1
        check(again.sample(3))
    assert not verify(str(tmp_path)).whole


def test_a_lazy_resume_finds_damage_when_a_trajectory_is_first_sampled(tmp_path: Path) -> None:
    with made(tmp_path, cache_size=2) as buffer:
        add(buffer, *range(12))
        buffer.save(1, wait=True)
        twin = made(None, cache_size=None, seed=3)
        twin.load_state_dict(buffer.state_dict())
        offset = buffer._own.shelf.payload(4)[0].offset
    with made(copied(tmp_path, "whole"), cache_size=2) as again:
        assert again.resume(verify="lazy").rows == twin.total_samples
        assert draws(again, 30) == draws(twin, 30)
        again.save(2, wait=True)
    path = segment(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[offset + 1100] ^= 1  # of its data
    path.write_bytes(raw)
    with made(tmp_path, cache_size=2) as again:
        with pytest.raises(ConfigError, match="verify='some'"):
            again.resume(verify="some")  # type: ignore[arg-type]
        again.resume(verify="lazy")
        before = contents_but_rows(again)
        with pytest.raises(Damaged, match="trajectory 4 is damaged"):
            again.sample(70)
        with pytest.raises(Damaged, match="trajectory 4 is damaged"):
            again.trajectory(4)
        assert contents_but_rows(again) == before
        again.sample_window_size = 5
        for batch in (again.sample(20) for _ in range(20)):
            check(batch)
    os.truncate(path, path.stat().st_size // 2)
    with made(tmp_path, cache_size=2) as again, pytest.raises(Damaged, match="bytes of it are needed"):
        again.resume(verify="lazy")
    path.unlink()
    with made(tmp_path, cache_size=12) as again, pytest.raises(Damaged, match="missing"):
        again.resume(verify="lazy")


def contents_but_rows(buffer: TrajectoryBuffer) -> Any:
    return buffer._own.state(), buffer.infos()


def test_a_trajectory_that_cannot_be_read_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(tmp_path, cache_size=1) as buffer:
        add(buffer, *range(6))
        buffer.save(1, wait=True)
        twin = made(None, cache_size=None)
        twin.load_state_dict(buffer.state_dict())
        read = os.preadv

        def refused(*given: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", refused)
        with pytest.raises(StoreError, match="cannot be read") as error:
            buffer.sample(20)
        assert not isinstance(error.value, Damaged)
        monkeypatch.setattr(os, "preadv", read)
        assert draws(buffer, 5) == draws(twin, 5)
        assert buffer._rows is not None
        buffer._rows.forget()
        hidden = segment(tmp_path).rename(tmp_path / "hidden")
        with pytest.raises(Damaged, match="missing"):
            buffer.sample(20)
        hidden.rename(tmp_path / "segments" / "000001-0000-000001.fbs")
        assert draws(buffer, 5) == draws(twin, 5)


@pytest.mark.parametrize("at", [4, 70, 300])
def test_another_payload_is_not_taken_for_a_trajectory(tmp_path: Path, at: int) -> None:
    with made(tmp_path, cache_size=1) as buffer:
        add(buffer, 0, 1, 2)
        buffer.save(1, wait=True)
        path = segment(tmp_path)
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1  # of the frame's header, or of the blob's
        path.write_bytes(raw)
        with pytest.raises(StoreError):
            buffer.trajectory(0)
        with pytest.raises(StoreError):
            buffer.sample(50)  # one of them is of it, all but surely: the seed is fixed


# --- what goes from the disk


def test_segments_whose_trajectories_have_gone_are_removed(tmp_path: Path) -> None:
    left: list[set[str]] = []
    for life in range(6):
        with made(tmp_path, capacity=4, keep=1) as buffer:
            buffer.resume()
            add(buffer, *range(4 * life, 4 * life + 4))
            buffer.save(life, wait=True)
            check(buffer.sample(20))
            left.append(set(os.listdir(tmp_path / "segments")))
    assert max(len(each) for each in left) <= 2
    assert left[0].isdisjoint(left[-1])
    assert verify(str(tmp_path)).whole


@pytest.mark.parametrize(("capacity", "more"), [(None, 4), (3, 150)])
def test_what_was_written_between_a_save_and_its_commit_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None, more: int
) -> None:
    monkeypatch.setattr(shelving, "_LEAST_SYNC", 1)
    monkeypatch.setattr(store_module, "StoreWriter", partial(StoreWriter, segment_bytes=1))  # a segment for each
    commit = store_module.ReplayStore.commit
    buffer = made(tmp_path, ScriptedFiles(), auto_save=True, cache_size=1, keep=1, capacity=capacity)
    captured: list[Any] = []

    def late(*given: Any) -> Any:
        first = buffer.trajectory_counter
        captured.append(contents(buffer))
        add(buffer, *range(first, first + more))
        settled(buffer)
        return commit(*given)

    monkeypatch.setattr(store_module.ReplayStore, "commit", late)
    with buffer:
        for step in range(1, 4):
            add(buffer, buffer.trajectory_counter)
            buffer.save(step, wait=True)
            buffer.clear_cache()
            for info in buffer.infos():
                check(buffer.trajectory(info.trajectory_id))
            with made(copied(tmp_path, step)) as again:
                again.resume()
                assert contents(again) == captured[-1]
        monkeypatch.setattr(store_module.ReplayStore, "commit", commit)
        buffer.save(9, wait=True)
        expected = contents(buffer)
    with made(tmp_path) as again:
        again.resume()
        assert contents(again) == expected


def test_what_has_gone_before_it_was_written_is_not_written(tmp_path: Path) -> None:
    with made(tmp_path, capacity=2, cache_size=2) as buffer:
        add(buffer, *range(10))
        buffer.save(1, wait=True)
    assert written(tmp_path) == {8: 1, 9: 1}


@pytest.mark.parametrize("then", ["clear", "evict", "cache", "other fields"])
def test_a_save_is_of_the_moment_at_which_it_was_asked_for(tmp_path: Path, then: str) -> None:
    files = Held()
    with made(tmp_path, files, capacity=4, cache_size=4, keep=None) as buffer:
        buffer.resume()
        add(buffer, 0, 1, 2, 3)
        before = contents(buffer)
        saving = buffer.save(1)
        assert files.begun.wait(30)
        if then in ("clear", "other fields"):
            buffer.clear()
        if then == "other fields":
            buffer.add_trajectories([{"x": torch.ones(100, 3)}])
        elif then == "cache":
            buffer.clear_cache()
        else:
            add(buffer, *range(4, 30))
        files.go_on.set()
        saving.wait()
        after = contents(buffer)
        buffer.save(2, wait=True)
    assert verify(str(tmp_path)).whole
    with made(tmp_path, capacity=4, keep=None) as again:
        again.resume(1)
        (state, *rest), (was, *others) = contents(again), before
        assert state.pop("numbered")  # it went back: numbers of what came after are given again
        assert (state, rest) == ({name: each for name, each in was.items() if name != "numbered"}, others)
    with made(tmp_path, capacity=4, keep=None) as again:
        again.resume(2)
        (state, *rest), (was, *others) = contents(again), after
        assert state.pop("numbered")
        assert (state, rest) == ({name: each for name, each in was.items() if name != "numbered"}, others)


# --- threads, tasks, forks


def test_no_row_mixes_two_trajectories_with_a_writer_savers_and_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelving, "_LEAST_SYNC", 1)
    buffer = made(tmp_path, auto_save=True, cache_size=3, capacity=12, keep=1)
    buffer.resume()
    add(buffer, 0)
    failed: list[BaseException] = []
    over = threading.Event()

    def until_over(act: Callable[[], object]) -> None:
        try:
            while not over.is_set():
                act()
        except BaseException as error:
            failed.append(error)

    acts: list[Callable[[], object]] = [
        lambda: check(buffer.sample(20)),
        lambda: check(buffer.sample(60)),
        buffer.clear_cache,
    ]
    readers = [threading.Thread(target=until_over, args=(act,)) for act in acts]
    for reader in readers:
        reader.start()
    for number in range(1, 250):
        add(buffer, number)
        if number % 20 == 0:
            buffer.save(number)
    over.set()
    for reader in readers:
        reader.join()
    assert not failed
    buffer.save(1000, wait=True)
    expected = contents(buffer)
    buffer.close()
    assert verify(str(tmp_path)).whole
    with made(tmp_path, capacity=12) as again:
        again.resume()
        assert contents(again) == expected


async def test_tasks_have_the_same_verbs(tmp_path: Path) -> None:
    async with made(tmp_path).aio as replay:
        assert (await replay.resume()).step == 0
        assert await replay.add_trajectories([trajectory(0), trajectory(1)]) == range(2)
        check(await replay.sample(5))
        await replay.save(1, wait=True)
    async with made(tmp_path).aio as replay:
        assert (await replay.resume(1)).rows == 24
        check(await replay.sample(5, strict=True))


def test_a_forked_child_has_neither_the_buffer_nor_its_files(tmp_path: Path) -> None:
    with made(tmp_path, auto_save=True) as buffer:
        add(buffer, 0)
        buffer.save(1, wait=True)
        child = os.fork()
        if not child:
            code = 1
            try:
                for verb in (lambda: buffer.sample(1), lambda: add(buffer, 1), lambda: buffer.save(2)):
                    with pytest.raises(UsageError, match="before a fork"):
                        verb()
                buffer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        add(buffer, 1)
        buffer.save(2, wait=True)
    assert verify(str(tmp_path)).whole


# --- against a plain list


@pytest.mark.parametrize("seed", range(4))
def test_a_random_history_is_that_of_a_plain_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(shelving, "_LEAST_SYNC", 1 << (10 + 4 * (seed % 2)))
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"auto_save": seed % 2 == 0, "cache_size": 4, "capacity": 15, "keep": 2}
    buffer = made(tmp_path, **options)
    buffer.resume()
    model: list[tuple[int, int, int]] = []
    saved, step, number = list(model), 0, 0
    for _ in range(80):
        added = [(number + at, int(rng.integers(1, 7)), int(rng.integers(1, 4))) for at in range(rng.integers(0, 5))]
        buffer.add_trajectories([trajectory(*each) for each in added])
        number += len(added)
        model = [*model, *added][-15:]
        chance = rng.random()
        if chance < 0.2:
            step += 1
            buffer.save(step, wait=bool(rng.integers(2)))
            saved = list(model)
        elif chance < 0.3:
            buffer.clear_cache()
        elif chance < 0.35:
            buffer.clear()
            model = []
        elif chance < 0.45:
            buffer.close()
            buffer = made(tmp_path, **options)
            assert buffer.resume().step == step
            model = list(saved)
            number = buffer.trajectory_counter
            if model:
                assert number == model[-1][0] + 1
        elif chance < 0.6:
            buffer.sample_window_size = int(rng.integers(0, 17))
        assert [(each.trajectory_id, *each.shape) for each in buffer.infos()] == model
        if model:
            batch = buffer.sample(64)
            check(batch)
            window = model[-buffer.sample_window_size :] if buffer.sample_window_size else model
            assert numbers(batch) <= {each[0] for each in window}
            assert buffer.get_stats()["window_samples"] == sum(steps * envs for _, steps, envs in window)
    buffer.close()
    assert verify(str(tmp_path)).whole
