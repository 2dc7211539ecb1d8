"""Killed, or failing, at any call of a commit: the old generation or the new one, in full, and nothing is left over."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from pipeline.checkpoint.generations import GenerationWriter, Stored, check_generation, choose, find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.errors import StoreError, WriteFailed
from pipeline.store.layout import Layout, RunFile
from tests.support.disk import Killed, ScriptedFiles, new_run, tree
from tests.support.generations import commit, says, whole


def newest(layout: Layout, run: RunFile) -> Stored:
    found = find_generations(layout, run.run_id)
    assert found.damaged == []
    stored = choose(found, None, layout.directory)
    check_generation(stored)
    return stored


def names(layout: Layout) -> list[str]:
    return sorted(os.listdir(layout.generations))


def calls_of_a_commit(tmp_path: Path, keep: int | None) -> int:
    layout, run = new_run(tmp_path / "counted")
    commit(layout, run, 0, 10)
    commit(layout, run, 1, 20)
    files = ScriptedFiles()
    commit(layout, run, 2, 30, files=files, keep=keep)
    assert {"makedirs", "create", "write", "sync", "close", "rename", "sync_directory"} <= set(files.calls)
    return len(files.calls)


@pytest.mark.parametrize(
    "how",
    [{}, {"torn": True}, {"after": True}, {"power": True}, {"power": True, "after": True}],
    ids=["before", "half written", "after", "power lost before", "power lost after"],
)
def test_killed_at_every_call_the_old_or_the_new_one_is_there_in_full(tmp_path: Path, how: dict[str, bool]) -> None:
    """CASES 39 and 40, with the removal of an old generation in the same go."""
    total = calls_of_a_commit(tmp_path, keep=2)
    seen = set()
    for call in range(1, total + 1):
        layout, run = new_run(tmp_path / f"{call}")
        commit(layout, run, 0, 10)
        commit(layout, run, 1, 20)
        with pytest.raises(Killed):
            commit(layout, run, 2, 30, files=ScriptedFiles(call, Killed, **how), keep=2)
        stored = newest(layout, run)
        assert says(stored) in (whole(20), whole(30)), call
        seen.add(stored.manifest.step)
        for other in find_generations(layout, run.run_id).complete:
            assert says(other) == whole(other.manifest.step), "no generation is ever a mix"
        # The next life takes the next number, and cleans.
        commit(layout, run, 3, 40, keep=1)
        assert says(newest(layout, run)) == whole(40)
        assert names(layout) == ["00000003"], call
    assert seen == {20, 30}


def test_the_same_number_is_used_again_after_a_kill(tmp_path: Path) -> None:
    """A life that died before its generation existed left leftovers under the very name that the next one takes."""
    total = calls_of_a_commit(tmp_path, keep=None)
    for call in range(1, total + 1):
        layout, run = new_run(tmp_path / f"{call}")
        commit(layout, run, 0, 10)
        with pytest.raises(Killed):
            commit(layout, run, 1, 20, files=ScriptedFiles(call, Killed))
        if len(find_generations(layout, run.run_id).complete) == 2:
            with pytest.raises(StoreError, match="never written over"):
                commit(layout, run, 1, 21)
            assert says(newest(layout, run)) == whole(20)
        else:
            commit(layout, run, 1, 21)
            assert says(newest(layout, run)) == whole(21)
            assert set(tree(layout.generations)) == {
                f"0000000{n}/{path}"
                for n in range(2)
                for path in ("manifest.json", "consumer.json", "files/deep/er.txt", "trainer/model.safetensors")
            }


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
def test_a_failing_call_is_raised_and_abandoning_leaves_nothing(tmp_path: Path, after: bool) -> None:
    """CASES 133: no new entry under a final name, nothing aside, and the generation before loads."""
    for call in range(1, calls_of_a_commit(tmp_path, keep=None) + 1):
        layout, run = new_run(tmp_path / f"{call}")
        commit(layout, run, 0, 10)
        before = tree(layout.directory)
        files = ScriptedFiles(call, after=after)
        writer = GenerationWriter(layout, files, 1)
        try:
            writer.begin()
            writer.add("consumer.json", b"new")
            writer.add("trainer/model", b"new")
            writer.commit(Manifest(run_id=run.run_id, generation=1, step=20, files=writer.infos))
        except OSError:
            assert len(files.calls) >= call
            writer.abandon()
            assert tree(layout.directory) == before
            assert names(layout) == ["00000000"]
        else:
            assert len(files.calls) < call
            return
    raise AssertionError("the loop never came to a commit without a failure")


def test_a_commit_that_fails_is_a_failed_write_with_its_cause(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path / "run")
    writer = GenerationWriter(layout, ScriptedFiles(2, stays=True), 0)
    writer.begin()
    with pytest.raises(WriteFailed, match=r"00000000: could not be committed: .*No space left") as caught:
        writer.commit(Manifest(run_id=run.run_id))
    assert isinstance(caught.value.__cause__, OSError)


def test_an_abandoned_retry_never_removes_a_generation_that_exists(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path / "run")
    commit(layout, run, 0, 10)
    writer = GenerationWriter(layout, ScriptedFiles(), 0)
    with pytest.raises(StoreError, match="never written over"):
        writer.begin()
    writer.abandon()
    assert says(newest(layout, run)) == whole(10)


def test_files_are_taken_over_by_reference_and_outlive_the_generation_that_wrote_them(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path / "run")
    first = commit(layout, run, 0, 10)
    second = commit(layout, run, 1, 10, link=first, keep=1)
    assert names(layout) == ["00000001"]
    assert says(newest(layout, run)) == whole(10)
    path = os.path.join(second.folder, "trainer/model.safetensors")
    assert os.stat(path).st_nlink == 1
    third = commit(layout, run, 2, 20)
    linked = commit(layout, run, 3, 20, link=third)
    assert os.path.samefile(*(os.path.join(each.folder, "trainer/model.safetensors") for each in (third, linked)))


def test_where_links_are_impossible_the_file_is_copied(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path / "run")
    first = commit(layout, run, 0, 10)

    class NoLinks(ScriptedFiles):
        def link(self, old: str, new: str) -> None:
            raise OSError("no links here")

    second = commit(layout, run, 1, 10, link=first, files=NoLinks())
    assert says(second) == whole(10)
    assert not os.path.samefile(*(os.path.join(each.folder, "trainer/model.safetensors") for each in (first, second)))


def test_past_the_limit_on_file_size_the_old_generation_stands_and_nothing_is_left(tmp_path: Path) -> None:
    """CASES 133 with the kernel's own limit: RLIMIT_FSIZE of 1 MiB, and a state of 4 MiB."""
    script = """
        import os, resource, signal, sys
        import torch
        from pipeline.checkpoint.generations import GenerationWriter, find_generations
        from pipeline.errors import WriteFailed
        from pipeline.store.files import OsFiles
        from pipeline.wiring.saving import Capture, Saving
        from pipeline.checkpoint.manifest import Manifest
        from pipeline.checkpoint.trainer_state import CapturedState
        from tests.support.disk import new_run
        from tests.support.generations import commit, says

        layout, run = new_run(sys.argv[1])
        commit(layout, run, 0, 10)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        capture = Capture(GenerationWriter(layout, OsFiles(), 1), Saving(1, 20), Manifest(), 0)
        capture.states = [CapturedState("model", {"weight": torch.zeros(1 << 20)})]
        try:
            capture.write_trainer()
        except WriteFailed as error:
            print("failed:", error.__cause__)
        print(sorted(os.listdir(layout.generations)))
        (stored,) = find_generations(layout, run.run_id).complete
        print(says(stored))
        commit(layout, run, 1, 20)
        print(says(find_generations(layout, run.run_id).complete[-1]))
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert re.match(r"failed: \[Errno 27\] File too large", lines[0])
    assert lines[1:] == ["['00000000']", str(whole(10)), str(whole(20))]


@pytest.mark.parametrize("verb", ["sync_directory", "rename", "create", "write", "unlink"])
def test_given_up_while_another_thread_commits_it_is_whole_or_gone(tmp_path: Path, verb: str) -> None:
    """Its caller was cancelled (``asyncio.wait_for``) and the thread was not: whichever comes first decides."""
    layout, run = new_run(tmp_path / "run")
    commit(layout, run, 0, 10)
    reached, go = threading.Event(), threading.Event()

    class Slow(ScriptedFiles):
        def _enter(self, called: str) -> bool:
            if called == verb and started.is_set() and not reached.is_set():
                reached.set()
                assert go.wait(10)
            return super()._enter(called)

    started = threading.Event()
    writer = GenerationWriter(layout, Slow(), 1)
    writer.begin()
    for number in range(5):
        writer.add(f"files/{number}", b"content")
    manifest = Manifest(run_id=run.run_id, generation=1, step=20, files=writer.infos)
    started.set()
    with ThreadPoolExecutor(2) as threads:
        calls: list[Callable[[], object]] = [lambda: writer.commit(manifest), writer.abandon]
        one, other = reversed(calls) if verb == "unlink" else calls
        first = threads.submit(one)
        assert reached.wait(10)
        second = threads.submit(other)
        wait([second], timeout=0.1)  # were nothing to hold it up, it would be done by now
        go.set()
        first.result(10)
        if verb == "unlink":
            with pytest.raises(WriteFailed, match="given up"):
                second.result(10)
        else:
            second.result(10)
    stored = newest(layout, run)
    assert stored.manifest.step == (10 if verb == "unlink" else 20)
    assert names(layout) == (["00000000"] if verb == "unlink" else ["00000000", "00000001"])
