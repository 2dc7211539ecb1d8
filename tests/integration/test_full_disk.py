"""A disk that is full, read only, or taken away, for real: the caller is told, and what was committed stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import ReplayBuffer, StoreError, WriteFailed
from tests.support import full
from tests.support.children import child
from tests.support.full import COUNT, GROUPS, Weights, make
from tests.support.replaying import Counter

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
ALL = list(range(COUNT))


def check(found: dict[str, Any], step: int, items: list[int]) -> bool:
    """What came of a save, and of a new life. Returns whether the save, or another in its life, went well."""
    attempt, again = found["attempt"], found["again"]
    assert items == ALL, "in a new life the rest is trained"
    if not attempt["error"]:
        assert step == 2
        return True
    assert attempt["name"] == "WriteFailed"
    assert attempt["family"]
    assert "a retry may work" in attempt["error"] or "mend the disk, then resume" in attempt["error"]
    assert found["left"] == [], "no entry under a final name, and nothing aside"
    assert found["kept"]
    assert found["state"], "the training loop's state is as it was"
    if again["error"]:  # what the rollouts did could not be written either: that ends a life
        assert "mend the disk, then resume" in again["error"]
    assert step == (1 if again["error"] else 2), "the one before it loads"
    return not again["error"]


def test_past_a_limit_on_the_size_of_files_a_save_fails_whole(tmp_path: Path) -> None:
    """A state of 4 MiB; the limit is that of the kernel, from nothing to just enough."""
    limits = [0, 1, 64, 511, 512, 4096, 65536, MIB, 4 * MIB - 1, 4 * MIB, 5 * MIB]
    outcomes = {}
    with child(full.limited, str(tmp_path), limits, 4 * MIB) as process:
        for limit in limits:
            heard = process.hear()
            assert heard[0] == limit, heard
            _, found, resumed = heard
            outcomes[limit] = (bool(found["attempt"]["error"]), check(found, *resumed))
    assert outcomes[MIB] == (True, True), "after space was freed, a retry in the same life works"
    assert outcomes[4 * MIB] == (True, True)
    assert outcomes[5 * MIB] == (False, True)
    assert outcomes[0][
        0
    ]  # whether the journal had to be written meanwhile, which ends that life, is a matter of moments


def test_whatever_is_written_last_before_the_limit_the_run_goes_on_in_a_new_life(tmp_path: Path) -> None:
    limits = [1, 40, 64, 65, 100, *range(128, 16_000, 1200), 40_000, MIB]
    seen = set()
    with child(full.limited_producing, str(tmp_path), limits) as process:
        for limit in limits:
            heard = process.hear()
            assert heard[0] == limit, heard
            _, attempt, (_, items) = heard
            assert items == ALL, limit
            seen.add(attempt["name"])
            assert not attempt["error"] or attempt["family"], attempt
    assert seen == {"", "WriteFailed", "StoreError"}


def test_past_a_limit_a_replay_buffer_is_not_saved_and_what_was_tried_takes_no_room(tmp_path: Path) -> None:
    """4 MiB of new rows; files may have 1 MiB."""
    run = tmp_path / "run"
    with child(full.limited_buffer, str(run), MIB) as process:
        attempts = process.hear()
        assert len(attempts) == 5, attempts
        for attempt, left, size, same in attempts:
            assert (attempt["name"], attempt["family"]) == ("WriteFailed", True)
            assert left == [], "no entry under a final name, and nothing aside"
            assert size < 4.2 * MIB, "what was written before it failed has gone"
            assert same, "the training loop's state is as it was"
        shutil.copytree(run, tmp_path / "copy")
        process.pipe.send("go on")
        assert process.hear() == "saved"
    for folder, rows in (("copy", 8), ("run", 16)):
        with ReplayBuffer(16, directory=tmp_path / folder) as buffer:
            counter = Counter()
            buffer.attach(counter=counter)
            assert tuple(buffer.resume())[::2] == (rows // 8, rows)
            assert counter.step == rows // 8
            assert buffer.ring.storage.view("x")[:rows, -1].tolist() == [1] * 8 + [2] * (rows - 8)


def test_a_replay_buffers_folder_below_a_file_is_told_at_its_resume(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    buffer = ReplayBuffer(8, directory=tmp_path / "file" / "run")
    buffer.extend({"x": [1]})
    for verb in (buffer.resume, lambda: buffer.save(1)):
        with pytest.raises(StoreError, match="cannot be used as a run's directory"):
            verb()
    assert len(buffer) == 1


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of runs on a file system of 2 MiB, in a mount namespace of their own."""
    unshare, folder = shutil.which("unshare"), str(tmp_path_factory.mktemp("mounted"))
    mount = ["sh", "-c", f"mount -t tmpfs -o size=2m tmpfs {folder}"]
    if unshare is None or subprocess.run([unshare, "-m", *mount], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    sizes = ",".join(map(str, range(0, 180_000, 8192)))
    done = subprocess.run(
        [unshare, "-m", sys.executable, "-m", "tests.support.full", folder, sizes, "65536"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout)


def test_on_a_full_file_system_a_save_fails_whole_and_works_once_there_is_room(mounted: Any) -> None:
    """From no page free to enough for everything that a generation holds."""
    results = []
    for _, found, resumed in mounted[0]:
        results.append((bool(found["attempt"]["error"]), check(found, *resumed)))
    assert results[0][0]
    assert not results[-1][0]
    assert (True, True) in results, "in the same life"


def test_a_file_system_that_is_read_only_is_told_at_opening(mounted: Any) -> None:
    for told in mounted[1]:
        assert told["name"] == "StoreError"
        assert "cannot be used as a run's directory" in told["error"]
        assert "Read-only" in told["error"]


@pytest.mark.parametrize("part", ["", "journals", "segments"])
def test_a_folder_that_is_removed_while_it_is_written_is_told_and_no_save_counts(run_directory: str, part: str) -> None:
    """The files that are open can be written and synced all the same, and would be gone with the process."""
    with make(run_directory).sync() as pipe:
        weights = Weights(64)
        pipe.attach(weights=weights)
        pipe.start()
        weights.train(pipe.get_batch(GROUPS))
        pipe.save(1).committed()
        weights.train(pipe.get_batch(GROUPS))
        shutil.rmtree(os.path.join(run_directory, part))
        with pytest.raises(WriteFailed, match="removed, or replaced"):
            pipe.save(2).committed()
        assert weights.whole()
        assert not Path(run_directory, "generations", "00000002").exists()


def test_generations_that_are_removed_are_made_anew(run_directory: str) -> None:
    with make(run_directory).sync() as pipe:
        weights = Weights(64)
        pipe.attach(weights=weights)
        pipe.start()
        weights.train(pipe.get_batch(GROUPS))
        shutil.rmtree(os.path.join(run_directory, "generations"))
        pipe.save(1).committed()
    assert full.finish(run_directory, 64) == (1, ALL)
