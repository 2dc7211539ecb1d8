"""A folder of a replay buffer of format version 1 with a compressed column opens in every version after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import verify
from tests.golden.make_replay_v1 import seen
from tests.golden.make_replay_v1b import made
from tests.support.disk import tree

HERE = Path(__file__).parent / "replay_v1b"
EXPECTED = json.loads((HERE / "expected.json").read_text())


def test_it_is_whole_and_says_nothing_of_the_machine_that_made_it() -> None:
    assert verify(str(HERE / "run")).whole
    content = tree(HERE)
    assert any(b"#zlib.image" in raw for raw in content.values())
    for path, raw in content.items():
        assert not any(part in raw for part in (b"/tmp", b"/home", b"/root", b"/work")), path


@pytest.mark.parametrize("compress", [True, False])
def test_it_opens_with_what_it_held_and_draws_what_it_would_have_drawn(tmp_path: Path, compress: bool) -> None:
    shutil.copytree(HERE / "run", tmp_path / "run")
    with made(tmp_path / "run", compress=compress) as buffer:
        resumed = buffer.resume(continue_episodes=True)
        assert (resumed.step, resumed.rows) == (8, 40)
        assert seen(buffer) == EXPECTED
        buffer.save(12, wait=True)
    assert verify(str(tmp_path / "run")).whole
