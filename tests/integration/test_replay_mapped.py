"""Rows in a file, and rows that are read when they are wanted: killed for real, and on a disk that is really full."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import verify
from tests.support.children import Ended, child
from tests.support.replaying import fill, hold_rows, run_lazily

ROOT = Path(__file__).parents[2]
SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))


def test_killed_it_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    with child(hold_rows, str(tmp_path)) as process:
        assert process.hear() == ("there", 200)
        process.kill()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("storage", ["memory", "mapped"])
def test_killed_while_rows_are_brought_in_it_goes_on_with_what_was_committed(tmp_path: Path, storage: str) -> None:
    with ReplayBuffer(200, directory=tmp_path) as buffer:
        fill(buffer, 0, 220)
        buffer.save(10, wait=True)
    chance, committed = random.Random(2), 10
    for _ in range(6 * SOAK):
        with child(run_lazily, str(tmp_path), storage) as process:
            kind, step = process.hear()
            assert (kind, step >= committed) == ("resumed", True), step
            for _ in range(chance.randrange(3)):
                kind, committed = process.hear()
                assert kind == "committed", committed
            process.process.join(chance.uniform(0, 0.03))
            assert process.process.exitcode is None, process.rest()
            process.kill()
            try:
                while True:
                    committed = process.hear()[1]
            except Ended:
                pass
        assert verify(str(tmp_path)).whole
        hows: list[Literal["lazy", "full"]] = ["lazy", "full"]
        for how in hows:
            with ReplayBuffer(200, directory=tmp_path, storage=storage, select="fifo") as again:
                step = again.resume(verify=how).step
                assert step >= committed, "it may be killed before it says that it has committed"
                numbers = again.sample(200)["obs"]["n"].tolist()
                assert numbers == list(range(numbers[0], numbers[0] + 200))
                assert numbers[-1] == 20 * step + 19
        committed = step
    assert committed > 10


def test_on_a_disk_that_is_full_a_verb_is_told_and_later_it_goes_on(tmp_path: Path) -> None:
    """Touching memory that the disk has no room for would be the end of the process."""
    unshare = shutil.which("unshare")
    mount = ["sh", "-c", f'mount -t tmpfs -o size=24m tmpfs {tmp_path} && exec {sys.executable} "$@"', "sh"]
    if (
        unshare is None
        or subprocess.run([unshare, "-m", *mount, "-c", ""], check=False, capture_output=True).returncode
    ):
        pytest.skip("this user may not mount a file system")
    done = subprocess.run(
        [unshare, "-m", *mount, "-m", "tests.support.full_mapped", str(tmp_path)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "bytes of disk are needed" in told["refused"]
    assert "No space left on device" in told["full"]
    assert 10 <= told["rows"] < 200
    assert told["kept"]
    assert told["later"]
