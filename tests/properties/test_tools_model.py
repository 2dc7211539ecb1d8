"""Merging, splitting and resharding against a plain list: rows of several runs, in any grouping, and any episodes taken
out; whatever a row's next observation is, and wherever it lies."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.buffer.transitions import compressed as compressing
from pipeline.distributed import Ranks
from pipeline.store.frames import HEADER_BYTES
from pipeline.tools import SalvagedRows, merge, reshard, salvage_run, split
from pipeline.tools.salvaging import SalvagedShards
from tests.properties.conftest import SOAK
from tests.support.keeping import compressed, everything, load, stored
from tests.support.ranks import fine, on_ranks
from tests.support.salvaging import flip

STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["", "", "", "terminated", "truncated", "cut"]), st.booleans()),
    max_size=14,
)
"""The environment of each row, how its episode ends with it, and whether its next observation is not what comes."""
IMAGE = 1200


class Row(NamedTuple):
    """A row of the model."""

    run: int
    key: int
    episode: int
    next: bytes


def observed(run: int, key: int, odd: int = 0) -> tuple[Any, np.ndarray]:
    """What is observed at a row: a number whose bits are its own, and an image."""
    bits = np.array([0x7FF8 << 48 | run << 24 | key << 8 | odd], np.uint64)
    return bits.view(np.float64)[0], np.full(IMAGE, (31 * run + 7 * key + odd) % 251, np.uint8)


def as_bytes(of: tuple[Any, np.ndarray]) -> bytes:
    return np.float64(of[0]).tobytes() + of[1].tobytes()


def following(run: int, steps: list[tuple[int, str, bool]], at: int) -> tuple[Any, np.ndarray]:
    """The next observation of a row."""
    env, end, odd = steps[at]
    after = next((key for key in range(at + 1, len(steps)) if steps[key][0] == env), None)
    return observed(run, at, 1) if odd or end or after is None else observed(run, after)


class Run(NamedTuple):
    """How a run is saved, and its steps."""

    steps: list[tuple[int, str, bool]]
    share: bool
    compress: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"share_next_obs": self.share, "compress": {"obs": "zlib"} if self.compress else None}

    def save(self, directory: Path, run: int, capacity: int) -> list[Row]:
        """Save it; return the rows that are there."""
        begun, episodes, rows = 0, {}, []
        with ReplayBuffer(capacity, directory=directory, seed=run, **self.options) as buffer:
            buffer.resume()
            for key, (env, end, _) in enumerate(self.steps):
                (n, image), (then, shown) = observed(run, key), following(run, self.steps, key)
                row = {
                    "obs": {"n": n, "image": image},
                    "next_obs": {"n": then, "image": shown},
                    "run": run,
                    "t": key,
                    "terminated": end == "terminated",
                    "truncated": end == "truncated",
                }
                buffer.append(row, env=env, version=key)
                if end == "cut":
                    buffer.end_episode(env)
                if env not in episodes:
                    episodes[env], begun = begun, begun + 1
                rows.append(Row(run, key, episodes[env], as_bytes((then, shown))))
                if end:
                    del episodes[env]
                if key % 6 == 5:
                    buffer.save(key, wait=True)
            buffer.save(99, wait=True)
        return rows[-capacity:]


RUNS = st.builds(Run, STEPS, st.booleans(), st.booleans())


def next_bytes(found: dict[str, Any]) -> list[bytes]:
    if not found["keys"]:
        return []
    return [n + image for n, image in zip(found["next_obs.n"], found["next_obs.image"], strict=True)]


def check(found: dict[str, Any], model: list[Row]) -> None:
    """Compare what a buffer holds with the model, and its observations with what they must be."""
    assert found.get("id", []) == [(row.run, row.key) for row in model]
    assert next_bytes(found) == [row.next for row in model]
    for row, n, image in zip(model, found.get("obs.n", ()), found.get("obs.image", ()), strict=True):
        assert n + image == as_bytes(observed(row.run, row.key))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", 5 * IMAGE)


@contextmanager
def another_level() -> Iterator[None]:
    """What is compressed meanwhile has streams that are not those which a tool would make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressing, "_LEVEL", 9)
        yield


def lying(runs: list[Run], directory: Path) -> dict[Any, bytes | None]:
    """How observations lie that are compressed, or None; each is what it was made as."""
    found = compressed(directory, "obs.image")
    for (run, t), stream in found.items():
        if stream is not None:
            made = zlib.compress(observed(run, t)[1].tobytes(), 9 if runs[run].compress else 1)
            assert stream == made, "a row was compressed once more"
        else:
            assert not runs[run].compress, "a row was compressed, and is dense"
    return found


@settings(max_examples=10 * SOAK)
@given(st.lists(RUNS, min_size=1, max_size=3), st.integers(3, 12), st.data())
def test_a_merge_is_a_sort_and_a_split_takes_whole_episodes(
    runs: list[Run], capacity: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with another_level():
            rows = [run.save(folder / f"run{number}", number, capacity) for number, run in enumerate(runs)]
        paths = [folder / f"run{number}" for number in range(len(runs))]
        model = sorted((row for each in rows for row in each), key=lambda row: (row.key, row.run))
        made = merge(paths, folder / "all")
        share = {"share_next_obs": all(run.share for run in runs if run.steps)}
        check(load(folder / "all", **share), model)
        lie = lying(runs, folder / "all")
        if len({run.compress for run in runs if run.steps}) == 1:  # else some have come into a block with others
            assert all((stream is not None) == runs[run].compress for (run, _), stream in lie.items())
        episodes = sorted({(row.episode, row.run) for row in model})
        assert made.units == len(episodes)
        count = data.draw(st.integers(0, made.units))
        oldest = set(episodes[:count])
        split(folder / "all", [folder / "x", folder / "y"], count=count)
        check(load(folder / "x", **share), [row for row in model if (row.episode, row.run) in oldest])
        check(load(folder / "y", **share), [row for row in model if (row.episode, row.run) not in oldest])
        merge([folder / "y", folder / "x"], folder / "back")
        for part in ("x", "y", "back"):
            lying(runs, folder / part)
        assert load(folder / "back", **share) == load(folder / "all", **share)


@settings(max_examples=10 * SOAK)
@given(RUNS, st.integers(3, 12), st.integers(1, 3), st.integers(1, 3))
def test_a_reshard_has_every_row_in_its_episode(run: Run, capacity: int, first: int, then: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with another_level():
            model = run.save(folder / "run", 0, capacity)
        source = folder / "run"
        for number, size in enumerate((first, then)):
            target = folder / str(number)
            reshard(source, target, size, rebalance=True)
            merge([target], folder / f"m{number}")
            found = load(folder / f"m{number}", **run.options)
            order = np.argsort([t for _, t in found.get("id", ())])
            check({name: [each[at] for at in order] if _of_rows(each) else each for name, each in found.items()}, model)
            source = target
            assert all((stream is not None) == run.compress for stream in lying([run], target).values())

        def live(ranks: Ranks) -> dict[str, Any]:
            with ReplayBuffer(50, directory=source, ranks=ranks, seed=1, **run.options) as buffer:
                buffer.resume()
                return everything(buffer)

        ranks = fine(on_ranks(then, live))
        every = sorted(zip(_joined(ranks, "id"), [each for one in ranks for each in next_bytes(one)], strict=True))
        assert every == [((row.run, row.key), row.next) for row in model]


def _of_rows(each: Any) -> bool:
    return isinstance(each, list)


def _joined(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [each for one in found for each in one.get(name, ())]


class Left(NamedTuple):
    """What is left of a run of which blocks are gone."""

    rows: list[Row]
    following: dict[int, int]
    """By key, how many rows of an episode follow each other from it on."""


def damage(directory: Path, number: int) -> set[int]:
    """Change a byte in each block whose bit is set in a number; return the keys of the rows that are then in none."""
    blocks = [(path, block, arrays["t"].tolist()) for path, block, arrays in stored(directory)]
    whole = {key for at, (*_, keys) in enumerate(blocks) if not number >> at & 1 for key in keys}
    for at, (path, block, _) in enumerate(blocks):
        if number >> at & 1:
            flip(path, block.offset + HEADER_BYTES + block.length // 2)
    return {key for *_, keys in blocks for key in keys} - whole


def left_of(run: Run, rows: list[Row], gone: set[int]) -> Left:
    """What must be left, as plainly as it can be said."""
    after = {
        key: next((other for other in range(key + 1, len(run.steps)) if run.steps[other][0] == env), None)
        for key, (env, end, _) in enumerate(run.steps)
        if not end
    }
    left = {row.key: row for row in rows if row.key not in gone}
    if run.share:
        for key in list(left):
            if after.get(key) in gone and not run.steps[key][2]:
                del left[key]
    following: dict[int, int] = {}
    for key in sorted(left, reverse=True):
        following[key] = 1 + following.get(after.get(key) or -1, 0)
    return Left([left[key] for key in sorted(left)], following)


def check_left(every: list[dict[str, Any]], left: Left) -> None:
    for each in every:
        assert len(set(each.get("aside", ()))) == len(each.get("aside", ())), "a row has two next observations"
    found = sorted(
        row
        for each in every
        for row in zip(each.get("id", ()), next_bytes(each), each.get("following", ()), strict=True)
    )
    assert found == [((row.run, row.key), row.next, left.following[row.key]) for row in left.rows]


def resumed(directory: Path, size: int, options: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    """What each of some ranks has of a run; 0: one process."""

    def live(ranks: Ranks | None = None) -> dict[str, Any]:
        with ReplayBuffer(50, directory=directory, ranks=ranks, seed=1, **options) as buffer:
            lost = buffer.resume(**how).lost
            return {**everything(buffer), "lost": lost.rows}

    return fine(on_ranks(size, live)) if size else [live()]


def shared(*steps: tuple[int, str, bool]) -> Run:
    return Run(list(steps), share=True, compress=False)


ODD_BEFORE = shared(*((0, "", key == 2) for key in range(12)))
"""The row before the one that is left out has a next observation of its own already. Blocks have four rows, and what
is left of six."""
END_GONE = shared(*((0, "terminated" if key == 5 else "", False) for key in range(12)))
"""Another episode follows where the end of one is gone."""
BOTH_GONE = shared((0, "", False), (0, "", False), (0, "", False), (1, "", False), (0, "cut", False), (1, "cut", False))
"""And all but the first row of the other one."""


@settings(max_examples=15 * SOAK)
@given(RUNS, st.integers(3, 12), st.integers(0, 63))
@example(ODD_BEFORE, 12, 0b10)
@example(END_GONE, 12, 0b10)
@example(BOTH_GONE, 12, 0b10)
def test_a_salvage_has_every_row_that_is_whole(run: Run, capacity: int, hurt: int) -> None:
    """With its next observation: where that lay in a row that is gone, the row is left out; by every way there is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with another_level():
            rows = run.save(folder / "run", 0, capacity)
        gone = damage(folder / "run", hurt)
        left = left_of(run, rows, gone)
        made = salvage_run(folder / "run", folder / "out")
        assert isinstance(made, SalvagedRows)
        assert (made.rows_kept, made.rows_lost) == (len(left.rows), len(rows) - len(left.rows))
        check_left([load(folder / "out", **run.options)], left)
        assert all((stream is not None) == run.compress for stream in lying([run], folder / "out").values())
        partly = resumed(folder / "run", 0, run.options, allow_partial=True)
        check_left(partly, left)
        assert partly[0]["lost"] == len(rows) - len(left.rows)


@settings(max_examples=15 * SOAK)
@given(RUNS, st.integers(3, 12), st.integers(0, 63), st.integers(1, 3))
@example(ODD_BEFORE, 12, 0b10, 1)
@example(END_GONE, 12, 0b10, 1)
@example(BOTH_GONE, 12, 0b10, 1)
def test_a_salvage_of_shards_has_every_row_that_is_whole(run: Run, capacity: int, hurt: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with another_level():
            rows = run.save(folder / "one", 0, capacity)
        reshard(folder / "one", folder / "run", size)
        left = left_of(run, rows, damage(folder / "run", hurt))
        said = salvage_run(folder / "run", folder / "out", rehearse=True)
        made = salvage_run(folder / "run", folder / "out")
        assert isinstance(made, SalvagedShards)
        assert isinstance(said, SalvagedShards)
        assert (said.shards, said.rows_lost, said.losses) == (made.shards, made.rows_lost, made.losses)
        assert (made.rows_kept, made.rows_lost) == (len(left.rows), len(rows) - len(left.rows))
        check_left(resumed(folder / "out", size, run.options), left)
        assert all((stream is not None) == run.compress for stream in lying([run], folder / "out").values())
        for other in (size, 2):
            shutil.copytree(folder / "run", folder / f"copy{other}", dirs_exist_ok=True)
            partly = resumed(folder / f"copy{other}", other, run.options, allow_partial=True)
            check_left(partly, left)
            assert [each["lost"] for each in partly] == [len(rows) - len(left.rows)] * other
