"""A folder of a replay buffer of format version 1 with bodies in its newer blocks opens in every version after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import verify
from tests.golden.make_replay_v1 import CAPACITY, OPTIONS, seen
from tests.support.disk import says_no_machine, tree
from tests.support.replaying import Counter

HERE = Path(__file__).parent / "replay_v1c"
EXPECTED = json.loads((HERE / "expected.json").read_text())


def test_it_is_whole_and_says_nothing_of_the_machine_that_made_it() -> None:
    assert verify(str(HERE / "run")).whole
    says_no_machine(HERE, most=300_000)
    segments = [raw for path, raw in tree(HERE).items() if path.endswith(".fbs")]
    assert {b'"#bodies"' in raw for raw in segments} == {False, True}


@pytest.mark.parametrize("storage", ["memory", "mapped"])
@pytest.mark.parametrize("how", ["full", "lazy"])
def test_it_opens_with_what_it_held_and_draws_what_it_would_have_drawn(tmp_path: Path, storage: Any, how: Any) -> None:
    shutil.copytree(HERE / "run", tmp_path / "run")
    options = OPTIONS["prioritized"]
    buffer, counter = ReplayBuffer(CAPACITY, directory=tmp_path / "run", storage=storage, **options), Counter()
    buffer.attach(counter=counter)
    with buffer:
        resumed = buffer.resume(verify=how, continue_episodes=True)
        assert (resumed.step, resumed.rows, counter.step) == (13, 40, 13)
        if (unread := buffer.ring.storage.unread) is not None:
            unread.all()
        assert seen(buffer) == EXPECTED
        buffer.save(14, wait=True)
    assert verify(str(tmp_path / "run")).whole
