"""How runs of real processes stand: running, killed, stopped, ended by themselves; looked at from outside."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import Status, status_of
from pipeline.cli import main
from pipeline.distributed import Ranks
from tests.support import locked, standing
from tests.support.children import ChildProcess, child
from tests.support.ranks import fine, on_ranks
from tests.support.runs import pipeline, task

Seen = list[tuple[str, int, int]]


def seen(directory: str) -> Seen:
    """Every file of a folder, with its size and the time of its last change."""
    paths = [Path(folder, name) for folder, _, names in os.walk(directory) for name in ["", *names]]
    return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths)


def status(directory: str, **more: Any) -> Status:
    """The status of a folder that nobody changes now: by that least of all."""
    before = seen(directory)
    found = status_of(directory, **more)
    assert seen(directory) == before
    return found


def code(directory: str, *more: str) -> int:
    return main(["status", directory, *more])


def end(process: ChildProcess) -> int | None:
    """Wait until a process has ended by itself."""
    process.rest()
    process.process.join()
    return process.process.exitcode


def resumed(directory: str) -> tuple[int, int, int]:
    with pipeline(task(40, standing.half_ends), directory=directory).sync() as run:
        found = run.resume()
        return found.step, found.buffered, found.waiting


class TestPipeline:
    def test_running_and_then_killed(self, run_directory: str, tmp_path: Path) -> None:
        with child(standing.train, run_directory) as process:
            assert process.hear() == "saved"
            found = status_of(run_directory)
            assert (found.state, found.kind, code(run_directory)) == ("running", "pipeline", 4)
            assert (found.hold.held, found.hold.process, found.hold.alive) == (True, process.process.pid, True)
            assert found.newest is not None
            assert found.newest.step == 2
            assert found.life is not None
            assert (found.life.incarnation, found.life.ended) == (1, "running")
            assert not found.damages
            process.kill()
        found = status(run_directory)
        assert (found.state, code(run_directory)) == ("to be continued", 3)
        assert (found.hold.held, found.hold.process, found.hold.alive) == (False, process.process.pid, False)
        assert found.life is not None
        assert found.work is not None
        assert found.life.ended == "killed"
        copy = shutil.copytree(run_directory, tmp_path / "copy")
        for path in copy.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        there = status(str(copy))
        assert there == msgspec.structs.replace(found, directory=str(copy))
        # It says what a resume finds; what was in flight is all that waits.
        assert resumed(run_directory) == (2, found.work.buffered, found.work.waiting)
        assert found.life.in_flight == found.work.waiting > 0

    def test_looked_at_by_the_process_that_has_it(self, run_directory: str) -> None:
        with pipeline(task(40), directory=run_directory).sync() as run:
            run.start()
            assert status_of(run_directory).state == "running"
            with child(locked.attempts, run_directory) as other:
                other.pipe.send("try")
                assert other.hear().startswith("Locked"), "looking has freed the lock"
        found = status(run_directory).life
        assert found is not None
        assert found.ended == "closed"

    def test_asked_to_stop(self, run_directory: str) -> None:
        with child(standing.train, run_directory) as process:
            assert process.hear() == "saved"
            process.pipe.send("wait")
            process.send(signal.SIGTERM)
            assert end(process) == 143
        found = status(run_directory)
        assert (found.state, code(run_directory)) == ("to be continued", 3)
        assert found.newest is not None
        assert found.newest.step in (2, 3, 4, 5)  # the source gives five steps
        assert found.life is not None
        assert (found.life.ended, found.life.reason, found.life.in_flight) == ("stopped", "SIGTERM", 0)
        assert found.life.over >= found.life.began > "2020"

    def test_ended_by_an_error(self, run_directory: str) -> None:
        with child(standing.train, run_directory, 2, 40, "raise") as process:
            assert process.hear() == "saved"
            assert process.hear()[0] == "raised"
            end(process)
        found = status(run_directory)
        assert found.life is not None
        assert (found.life.ended, found.life.reason) == ("failed", r"ValueError: the trainer's own \udcff")
        assert found.state == "to be continued"

    def test_finished_when_all_of_every_source_is_trained_and_saved(self, run_directory: str) -> None:
        with child(standing.train, run_directory, 4, 20, "leave") as process:
            assert end(process) == 0
        found = status(run_directory)
        assert (found.state, code(run_directory)) == ("to be continued", 3)
        assert "4 items" in found.why
        assert code(run_directory, "--until", "4") == 0
        assert code(run_directory, "--until", "5") == 3
        with child(standing.train, run_directory, 5, 20, "leave") as process:
            assert end(process) == 0
        found = status(run_directory)
        assert (found.state, code(run_directory)) == ("finished", 0)
        assert found.life is not None
        assert (found.life.incarnation, found.life.ended, found.life.reason) == (2, "closed", "")
        assert code(run_directory, "--until", "6") == 3
        assert "a resume finds no more" in status(run_directory, until=6).why

    def test_a_run_that_writes_nothing_as_it_comes_leaves_no_word(self, run_directory: str) -> None:
        with child(standing.train, run_directory, 2, 40, "", "none") as process:
            assert process.hear() == "saved"
            process.kill()
        found = status(run_directory).life
        assert found is not None
        assert found.ended == "unknown"


@pytest.mark.parametrize("kind", ["replay", "trajectories"])
class TestBuffers:
    def test_running_and_then_killed(self, run_directory: str, kind: str) -> None:
        with child(standing.fill, run_directory, kind) as process:
            assert process.hear() == "saved"
            found = status(run_directory)
            assert (found.state, found.kind, code(run_directory)) == ("running", kind, 4)
            assert found.hold.process == process.process.pid
            process.kill()
        found = status(run_directory)
        assert (found.state, code(run_directory)) == ("to be continued", 3)
        assert found.newest is not None
        assert (found.newest.step, found.newest.rows) == (2, 2 if kind == "trajectories" else 20)
        assert found.life is not None
        assert (found.life.ended, found.life.in_flight, found.work) == ("unclosed", None, None)
        assert (code(run_directory, "--until", "2"), code(run_directory, "--until", "3")) == (0, 3)

    def test_stopped_and_left_by_an_error_and_left_open(self, run_directory: str, kind: str) -> None:
        lives = []
        for word in ("stop", "raise", "leave"):
            with child(standing.fill, run_directory, kind) as process:
                assert process.hear() == "saved"
                if word == "stop":
                    process.send(signal.SIGTERM)
                process.pipe.send(word)
                if word == "stop":
                    assert process.hear() == "asked"
                if word == "raise":
                    assert process.hear()[0] == "raised"
                assert end(process) == {"stop": 143, "raise": 1, "leave": 0}[word]
            found = status(run_directory)
            assert found.state == "to be continued"
            assert found.life is not None
            assert found.newest is not None
            lives.append((found.newest.step, found.life.incarnation, found.life.ended, found.life.reason))
        assert lives == [
            (3, 1, "stopped", "SIGTERM"),
            (6, 2, "failed", "ValueError: the learner's own"),
            (8, 3, "unclosed", ""),
        ]


def test_a_buffer_that_saved_nothing_begins_anew(run_directory: str) -> None:
    with child(standing.begins, run_directory) as process:
        assert process.hear() == "resumed"
        assert status(run_directory).state == "running"
        process.kill()
    found = status(run_directory)
    assert (found.state, found.newest, code(run_directory)) == ("to be continued", None, 3)
    assert "begins anew" in found.why


def test_the_shards_of_ranks(run_directory: str) -> None:
    def train(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=run_directory, ranks=ranks) as buffer:
            buffer.resume()
            standing.add(buffer, ranks.rank)
            if ranks.first:
                standing.add(buffer, 5)
            buffer.save(7, wait=True)
            if ranks.first:  # which has the lock
                assert status_of(run_directory).state == "running"

    fine(on_ranks(2, train))
    found = status(run_directory)
    assert (found.state, found.kind) == ("to be continued", "replay shards")
    assert found.newest is not None
    assert (found.newest.step, found.newest.world_size, found.newest.rows) == (7, 2, 30)
    assert [(shard.rank, shard.rows) for shard in found.newest.shards] == [(0, 20), (1, 10)]
    assert found.life is not None
    assert found.life.ended == "closed"


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_one_rank_of_several_that_left_no_word_is_what_counts(run_directory: str, how: str) -> None:
    test_the_shards_of_ranks(run_directory)
    (journal,) = Path(run_directory, "journals").glob("*-0001.fbj")
    content = journal.read_bytes()
    at = content.rfind(b"FBAY")
    journal.write_bytes(content[: at if how == "gone" else at + 70])
    found = status(run_directory).life
    assert found is not None
    assert found.ended == "unclosed"
