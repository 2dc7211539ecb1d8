"""Buffers that are saved, and resumed lazily or fully, at any moment, against the plain lists that others are compared
with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Remove, ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.buffer.transitions import checked
from pipeline.replay import unread
from tests.properties import test_replay_model as ring_model
from tests.properties import test_replay_removers as pool_model
from tests.properties.conftest import SOAK
from tests.support.disk import ScriptedFiles

AGAIN = st.tuples(st.just("again"), st.sampled_from(["lazy", "lazy", "full"]), st.booleans())
VERBS = st.one_of(ring_model.VERBS, AGAIN, st.just(("check",)))
POOL_VERBS = st.one_of(
    pool_model.VERBS.filter(lambda verb: verb[0] != "again"),
    st.tuples(st.just("again"), st.sampled_from(["lazy", "full"])),
    st.just(("check",)),
)


class Saved:
    """A folder of which one buffer after the other goes on."""

    def __init__(self, folder: Path, storage: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.options: dict[str, Any] = {"directory": folder, "storage": storage, "files": ScriptedFiles()}
        self.step = 0

    def over(self, buffer: ReplayBuffer) -> None:
        self.step += 1
        with buffer:
            buffer.save(self.step, wait=True)


class Ring(ring_model.Both):
    """A ring; it is compared when that is asked for, as comparing brings rows in."""

    def __init__(self, capacity: int, saved: Saved) -> None:
        self.saved = saved
        super().__init__(capacity, **saved.options)
        self.buffer.resume()

    def do_again(self, verify: Any, go_on: bool) -> None:
        self.saved.over(self.buffer)
        self.buffer = ReplayBuffer(self.model.capacity, select="fifo", returns="numpy", **self.saved.options)
        self.buffer.resume(verify=verify, continue_episodes=go_on)
        if not go_on:
            self.model.cut(None)

    def do_check(self) -> None:
        self.check(3, 2, 0.5)


class Pool(pool_model.Both):
    """Rows of which others than the oldest go."""

    def __init__(self, capacity: int, remove: Remove, saved: Saved) -> None:
        self.saved = saved
        super().__init__(capacity, remove, saved.options)
        self.buffer.resume()

    def do_again(self, verify: Any = "lazy") -> None:
        self.saved.over(self.buffer)
        self.buffer = self.make()
        self.buffer.resume(verify=verify)

    def do_check(self) -> None:
        self.check()


@pytest.fixture(params=[(1, 16 << 10), (300, 16), (4 << 20, 32)], ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a block, and of what is checked by itself."""
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", request.param[0])
    for module in (block_sizes, checked, unread):
        monkeypatch.setattr(module, "CHUNK", request.param[1])


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("storage", ["memory", "mapped"])
def test_a_buffer_that_is_resumed_is_a_list_of_the_newest_rows(
    tmp_path_factory: pytest.TempPathFactory, storage: str
) -> None:
    @settings(max_examples=50 * SOAK)
    @given(st.integers(1, 12), st.lists(VERBS, max_size=9), st.booleans(), st.lists(VERBS, max_size=4))
    def run(capacity: int, verbs: list[tuple[Any, ...]], go_on: bool, more: list[tuple[Any, ...]]) -> None:
        both = Ring(capacity, Saved(tmp_path_factory.getbasetemp() / "lazy", storage))
        for verb in [*verbs, ("again", "lazy", go_on), *more, ("check",)]:
            both.do(*verb)
        both.buffer.close()

    run()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("storage", ["memory", "mapped"])
@pytest.mark.parametrize("remove", pool_model.REMOVERS, ids=lambda remove: remove.by)
def test_the_rows_that_stay_over_resumes_are_those_of_a_list(
    tmp_path_factory: pytest.TempPathFactory, remove: Remove, storage: str
) -> None:
    @settings(max_examples=20 * SOAK)
    @given(st.integers(1, 9), st.lists(POOL_VERBS, max_size=9), st.lists(POOL_VERBS, max_size=4))
    def run(capacity: int, verbs: list[tuple[Any, ...]], more: list[tuple[Any, ...]]) -> None:
        both = Pool(capacity, remove, Saved(tmp_path_factory.getbasetemp() / "lazy", storage))
        for verb, *arguments in [*verbs, ("again", "lazy"), *more, ("check",)]:
            getattr(both, f"do_{verb}")(*arguments)
        both.buffer.close()

    run()
