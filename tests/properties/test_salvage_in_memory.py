"""A salvage of the buffer of one process, which has a bounded part of the rows in memory, against one that has all of
them there: whatever is damaged, what comes along is the same to the bit, and so is what is drawn of it later."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.checkpoint import verify
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.tools import SalvagedRows, salvage_run
from tests.properties.conftest import SOAK
from tests.support.keeping import stored
from tests.support.salvaged_in_memory import SavedRows, whole_rows
from tests.support.salvaging import flip

CAPACITY = 40
ENDS = st.sampled_from(["", "", "", "", "", "terminated", "truncated"])
STEPS = st.lists(st.tuples(st.integers(0, 3), ENDS, st.booleans()), max_size=30)
VERBS = st.one_of(
    st.tuples(st.just("add"), STEPS),
    st.tuples(st.just("write"), st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=5)),
    st.tuples(st.just("cut"), st.integers(0, 3)),
    st.tuples(st.just("save")),
    st.tuples(st.just("again"), st.booleans(), st.booleans()),
)
SELECTIONS: list[Any] = [
    "uniform",
    {"select": "prioritized", "alpha": 0.7, "beta": 0.5},
    "without_replacement",
]


class Case(NamedTuple):
    """A buffer's options, what is done with it, and which of its blocks are hurt, and how."""

    options: dict[str, Any]
    verbs: list[tuple[Any, ...]]
    hurt: int
    removed: bool


@st.composite
def cases(draw: st.DrawFn, remove: tuple[str, ...] = ("fifo",)) -> Case:
    by = draw(st.sampled_from(remove))
    options: dict[str, Any] = {"select": draw(st.sampled_from(SELECTIONS)), "remove": {"by": by}}
    if by == "lowest_priority":
        options["select"] = SELECTIONS[1]
    if by == "fifo":
        options["share_next_obs"] = draw(st.booleans())
        options["incomplete"] = draw(st.sampled_from(["keep", "keep", "truncate", "drop"]))
    if draw(st.booleans()):
        options["compress"] = {"obs.image": "zlib"}
    return Case(options, draw(st.lists(VERBS, max_size=12)), draw(st.integers(0, 2**12 - 1)), draw(st.booleans()))


def observed(number: int, odd: bool) -> dict[str, Any]:
    return {"at": np.float32(number + 0.5 * odd), "image": np.full(1100, (number + 3 * odd) % 251, np.uint8)}


def opened(folder: Path, options: dict[str, Any], *, going_on: bool = False) -> ReplayBuffer:
    buffer = ReplayBuffer(CAPACITY, directory=folder, seed=5, returns="numpy", **options)
    buffer.resume(continue_episodes=going_on)
    return buffer


class Played:
    """A buffer that is being filled; its folder may be opened again in the midst."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.number, self.step, self.steps = 0, 0, dict[int, int]()
        self.buffer = opened(folder, options)

    def do_add(self, steps: list[tuple[int, str, bool]]) -> None:
        for env, end, odd in steps:
            add(self.buffer, self.number, env, end, self.steps, odd=odd)
            self.number += 1
        keys = self.buffer.ring.keys()
        if self.buffer.drawer.takes_priorities and len(keys):
            self.buffer.update_priorities(keys, 0.1 + keys % 7)

    def do_write(self, places: list[int]) -> None:
        keys = self.buffer.ring.keys()
        keys = keys[[place for place in places if place < len(keys)]]
        if len(keys):
            self.buffer.write_back(keys, {"value": -keys.astype(np.float32), "reward": 2.0 * keys.astype(np.float32)})

    def do_cut(self, env: int) -> None:
        self.buffer.ring.cut(env)

    def do_save(self) -> None:
        self.step += 1
        if len(self.buffer) >= 4:
            self.buffer.sample(4)
        self.buffer.save(self.step, wait=True)

    def do_again(self, going_on: bool, compress: bool) -> None:
        self.do_save()
        self.buffer.close()
        options = self.options | ({"compress": {"obs.image": "zlib"}} if compress else {})
        self.buffer = opened(self.folder, options, going_on=going_on)


def add(buffer: ReplayBuffer, number: int, env: int, end: str, steps: dict[int, int], *, odd: bool) -> None:
    """Add row ``number``, whose next observation is that of its environment's next row, if it is not ``odd``.

    Args:
        steps: how many rows each environment has had.
    """
    at = 100 * env + steps.get(env, 0)
    steps[env] = steps.get(env, 0) + 1
    row: dict[str, Any] = {
        "id": np.int64(number),
        "obs": observed(at, odd=False),
        "next_obs": observed(at + 1, odd=odd),
        "reward": np.float32(number % 5),
        "value": np.float32(number),
        "terminated": np.bool_(end == "terminated"),
        "truncated": np.bool_(end == "truncated"),
    }
    buffer.append(row, env=env)


def damage(directory: Path, case: Case) -> None:
    """Hurt some blocks, or, if that is asked for, remove the files of which the first one is hurt."""
    for at, (path, block, _) in enumerate(list(stored(directory))):
        if case.hurt >> at & 1:
            flip(path, block.offset + HEADER_BYTES + block.length // 2)
            if case.removed:
                os.unlink(path)
                return


def in_memory(saved: SavedRows, case: Case) -> ReplayBuffer:
    """What is whole as a buffer that has been in memory all the time."""
    buffer = ReplayBuffer(CAPACITY, seed=5, returns="numpy", **case.options)
    buffer.load_state_dict(saved.state, continue_episodes=True)
    return buffer


def check_same(ours: ReplayBuffer, theirs: ReplayBuffer) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    for each in (mine, other):  # what was written back is in the rows, or beside them
        each["state"].pop("written_columns")
        for name in [name for name in each["values"] if name.startswith(("written.", "pool.at"))]:
            del each["values"][name]
        if each["state"]["remove"] != "fifo":
            each["state"]["pool"] = each["state"]["pool"][:3]  # but for where rows lie on the disk
    assert mine["state"] == other["state"]
    for part in ("values", "rows"):
        assert mine[part].keys() == other[part].keys()
        for name, each in mine[part].items():
            assert each.dtype == other[part][name].dtype
            assert each.tolist() == other[part][name].tolist(), name


def check(case: Case) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sizes, "BLOCK_BYTES", 8000)
        run, out = Path(name, "run"), Path(name, "out")
        played = Played(run, case.options)
        for verb, *arguments in [*case.verbs, ("save",)]:
            getattr(played, f"do_{verb}")(*arguments)
        played.buffer.close()
        damage(run, case)
        saved = whole_rows(Layout(str(run)))
        said, made = (salvage_run(run, out, rehearse=rehearse) for rehearse in (True, False))
        assert isinstance(made, SalvagedRows)
        assert isinstance(said, SalvagedRows)
        for each in (said, made):
            assert (each.rows_kept, each.rows_lost, each.episodes_split) == (saved.kept, saved.missing, saved.split)
            assert each.losses == saved.losses
        assert verify(str(out)).whole
        assert len({arrays["obs.image"].dtype for *_, arrays in stored(out)}) <= 1, "rows are compressed in one way"
        with in_memory(saved, case) as theirs, opened(out, case.options, going_on=True) as ours:
            check_same(ours, theirs)
            for buffer in (ours, theirs):
                steps = dict(played.steps)
                for number in range(1000, 1012):
                    add(buffer, number, number % 4, "terminated" if number % 7 == 0 else "", steps, odd=False)
            for _ in range(3):
                batches = [buffer.sample(8) for buffer in (ours, theirs)]
                assert batches[0].keys.tolist() == batches[1].keys.tolist()
                assert batches[0]["id"].tolist() == batches[1]["id"].tolist()
                assert batches[0]["next_obs.at"].tolist() == batches[1]["next_obs.at"].tolist()
            check_same(ours, theirs)


LONG = ("add", [(at % 3, "terminated" if at % 11 == 10 else "", at % 5 == 0) for at in range(60)])

SHORT = ("add", LONG[1][:20])
LAST = [("write", [3, 30]), ("save",)]
ODD = ("add", [(at % 3, "", at // 3 % 2 == 0) for at in range(60)])
"""Every other next observation is kept aside."""
MANY = ("add", [(at % 6, "", False) for at in range(60)])
"""Blocks have one row of most environments."""


@settings(max_examples=60 * SOAK)
@given(cases())
@example(Case({"share_next_obs": True}, [LONG], 0b1010, removed=False))
@example(Case({"share_next_obs": True}, [ODD], 0b110100, removed=False))
@example(Case({"share_next_obs": True}, [ODD], 0b1010, removed=False))
@example(Case({"share_next_obs": True}, [MANY], 0b10101010, removed=False))
@example(Case({"share_next_obs": True, "incomplete": "drop"}, [LONG], 0b100, removed=False))
@example(Case({"incomplete": "truncate"}, [LONG], 0b10, removed=False))
@example(Case({"incomplete": "drop"}, [LONG], 0, removed=False))
@example(Case({"select": SELECTIONS[1]}, [LONG, ("save",), ("write", [1, 5, 30])], 0b10, removed=False))
@example(Case({}, [LONG], 2**12 - 1, removed=False))
@example(Case({}, [LONG, ("again", True, True), SHORT, ("write", [3, 39])], 0, removed=False))
@example(Case({}, [LONG, ("again", True, True), SHORT, ("write", [3, 39])], 0b10, removed=False))
def test_rows_of_which_the_oldest_go_first(case: Case) -> None:
    check(case)


@settings(max_examples=40 * SOAK)
@example(Case({"remove": {"by": "lifo"}}, [LONG, ("again", True, True), SHORT, *LAST], 0, removed=False))
@example(Case({"remove": {"by": "lifo"}}, [LONG, ("again", True, True), SHORT, *LAST], 0b10, removed=False))
@given(cases(("lifo", "stalest", "lowest_priority")))
def test_rows_of_which_others_go_first(case: Case) -> None:
    check(case)
