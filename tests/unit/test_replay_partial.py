"""What is left of a damaged generation is loaded, if that is allowed, and what is gone is told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from pipeline.buffer.transitions.layout import END, EPISODE, PLACE
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.distributed import Ranks, alone
from pipeline.errors import ConfigError, Damaged, RankFailed
from pipeline.replay import ReplayBuffer
from pipeline.replay.loading import Lost
from pipeline.store.frames import PAYLOAD, scan
from pipeline.store.layout import Layout
from tests.support.ranks import fine, on_ranks
from tests.unit.test_replay_incomplete import build as built
from tests.unit.test_replay_incomplete import content, expected, fill

Content = dict[int, tuple[Any, ...]]
ENVS, CAPACITY, STEPS = 3, 120, 50
BLOCKS = 5


def build(directory: Path, ranks: Ranks | None = None, **more: Any) -> ReplayBuffer:
    return built(directory, more.pop("policy", "keep"), ranks, **({"capacity": CAPACITY} | more))


def save(directory: Path, ranks: Ranks | None = None, **more: Any) -> Content:
    """Fill a buffer, and save it several times: each save writes a block."""
    with build(directory, ranks, **more) as buffer:
        buffer.resume()
        rank = 0 if ranks is None else ranks.rank
        for number in range(BLOCKS):
            fill(buffer, STEPS // BLOCKS, seed=rank, begin=number * STEPS // BLOCKS)
            buffer.save(number, wait=True)
        return content(buffer)


def segment_of(directory: Path, rank: int) -> Path:
    return next(path for path in sorted((directory / "segments").iterdir()) if f"-{rank:04d}-" in path.name)


def flip(path: Path, *blocks: int) -> None:
    """Flip a byte in blocks of a segment."""
    layout = Layout(str(path.parents[1]))
    run = layout.read_run()
    assert run is not None
    frames = [each for each in scan(str(path), run_tag=run.tag) if each.header.kind == PAYLOAD]
    raw = bytearray(path.read_bytes())
    for block in blocks:
        raw[frames[block].offset + 64 + frames[block].header.length // 2] ^= 1
    path.write_bytes(raw)


def damage(directory: Path, how: str, rank: int = 0) -> str:
    """Damage something of a rank; return the path that is told."""
    path = segment_of(directory, rank)
    if how == "missing":
        path.unlink()
    elif how == "cut":
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "flipped":
        flip(path, 2)
    elif how == "several":
        flip(path, 1, 3)
    else:
        layout = Layout(str(directory))
        run = layout.read_run()
        assert run is not None
        folder = Path(find_generations(layout, run.run_id).complete[-1].folder) / "shards" / f"{rank:04d}"
        if how == "no shard":
            shutil.rmtree(folder)
        else:
            next((folder / "values").glob("selector.priorities*")).write_bytes(b"12345678")
        return str(folder)
    return str(path)


def rows_of_blocks(count: int, numbers: list[int], rank: int = 0) -> set[int]:
    """The numbers of the rows of some blocks."""
    each = count // BLOCKS * ENVS
    return {1_000_000 * rank + n for number in numbers for n in range(number * each, (number + 1) * each)}


def check_sequences(buffer: ReplayBuffer) -> None:
    """What is drawn as a sequence is of one environment, without a gap."""
    for _ in range(20):
        batch = buffer.sample(16, slices={"length": 4, "pad": True})
        n, own = batch["n"].numpy(), batch.mask.numpy()
        assert np.all((np.diff(n, axis=1) == ENVS) | ~own[:, 1:])
        assert batch.weights.isfinite().all()
    keys = buffer.ring.keys()
    episodes, places = buffer.ring.mark(EPISODE, keys), buffer.ring.mark(PLACE, keys)
    for episode in np.unique(episodes):
        assert sorted(places[episodes == episode].tolist()) == list(range(int((episodes == episode).sum())))
    last = keys[np.unique(episodes[::-1], return_index=True)[1] * -1 - 1]
    ended = buffer.ring.mark(END, last) != 0
    assert set(last[~ended].tolist()) == {key for _, key, *_ in buffer.ring.episodes.state()}, "or it was left there"


@pytest.mark.parametrize("policy", ["keep", "truncate", "drop"])
@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "several"])
def test_one_process(tmp_path: Path, how: str, policy: str) -> None:
    before = save(tmp_path, policy=policy)
    held = expected(before, policy, STEPS, 0)
    path = damage(tmp_path, how)
    with build(tmp_path, policy=policy) as buffer:
        with pytest.raises(Damaged):
            buffer.resume()
        assert len(buffer) == 0
        with structlog.testing.capture_logs() as logs:
            resumed = buffer.resume(allow_partial=True)
        left = content(buffer)
        gone = set(held) - set(left)
        assert resumed.lost.rows == len(gone) == len(held) - len(left) > 0
        assert resumed.lost.files == (path,)
        assert (resumed.step, resumed.rows) == (BLOCKS - 1, len(left))
        if how in ("flipped", "several"):
            assert gone == set(held) & rows_of_blocks(STEPS, [2] if how == "flipped" else [1, 3])
            assert resumed.lost.episodes > 0
        elif how == "missing":
            assert not left
        assert {n: row[:4] + row[5:] for n, row in left.items()} == {n: held[n][:4] + held[n][5:] for n in left}
        (line,) = [each for each in logs if each["event"] == "rows.lost"]
        assert (line["rows"], line["files"]) == (len(gone), [path])
        if left:
            check_sequences(buffer)
        fill(buffer, 5, seed=7)
        buffer.save(9, wait=True)
        after = set(content(buffer))
    with build(tmp_path, policy="keep") as buffer:
        assert buffer.resume().lost == Lost()
        assert set(content(buffer)) <= after
        assert set(left) & after <= set(content(buffer)) or policy == "drop"


def test_what_is_whole_comes_back_as_it_was(tmp_path: Path) -> None:
    before = save(tmp_path)
    with build(tmp_path) as buffer:
        drawn = [buffer.resume(allow_partial=True), buffer.sample(9).keys.tolist()]
        assert content(buffer).keys() == before.keys()
        assert drawn[0].lost == Lost()
    with build(tmp_path) as buffer:
        buffer.resume()
        assert buffer.sample(9).keys.tolist() == drawn[1]


def test_what_is_not_of_the_rows_must_be_whole(tmp_path: Path) -> None:
    save(tmp_path)
    layout = Layout(str(tmp_path))
    folder = Path(find_generations(layout, layout.read_run().run_id).complete[-1].folder)  # type: ignore[union-attr]
    for name in ("replay.json", "blocks.msgpack", "values/selector.priorities.float64"):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-1])
        with build(tmp_path) as buffer, pytest.raises(Damaged, match=name):
            buffer.resume(allow_partial=True)
        (folder / name).write_bytes(raw)


def test_episodes_that_lost_rows_are_counted(tmp_path: Path) -> None:
    """Three episodes of 10 rows, one after the other, in blocks of 6 rows: the third block has rows of two."""
    with built(tmp_path, capacity=40, select="uniform") as buffer:
        buffer.resume()
        for number in range(5):
            n = np.arange(6 * number, 6 * number + 6)
            buffer.extend({"n": n, "done": n % 10 == 9})
            buffer.save(number, wait=True)
    flip(segment_of(tmp_path, 0), 1)
    with built(tmp_path, capacity=40, select="uniform") as buffer:
        assert buffer.resume(allow_partial=True).lost[:2] == (6, 2)
        keys = buffer.ring.keys()
        assert buffer.ring.storage.view("n")[buffer.ring.slots(keys)].tolist() == [*range(6), *range(12, 30)]
        assert buffer.ring.following(keys).tolist() == [*range(6, 0, -1), *range(8, 0, -1), *range(10, 0, -1)]


@pytest.mark.parametrize("loaded", [1, 2, 3])
@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "several", "no shard", "changed values"])
def test_ranks(tmp_path: Path, how: str, loaded: int) -> None:
    saved = fine(on_ranks(3, lambda ranks: save(tmp_path, ranks)))
    before = {n: row for each in saved for n, row in each.items()}
    path = damage(tmp_path, how, rank=1)

    def refused(ranks: Ranks) -> int:
        with build(tmp_path, ranks, capacity=400) as buffer:
            with pytest.raises((Damaged, RankFailed)):
                buffer.resume()
            return len(buffer)

    assert fine(on_ranks(loaded, refused)) == [0] * loaded

    def load(ranks: Ranks) -> Any:
        with build(tmp_path, ranks, capacity=400) as buffer:
            resumed = buffer.resume(allow_partial=True)
            left = content(buffer)
            assert resumed.rows == len(left)
            if left:
                check_sequences(buffer)
            fill(buffer, 4, seed=10 + ranks.rank)
            buffer.save(9, wait=True)
            return left, resumed.lost, set(content(buffer))

    found = fine(on_ranks(loaded, load))
    left: Content = {}
    for each, lost, _ in found:
        assert not left.keys() & each.keys()
        left |= each
        assert lost == found[0][1]
    gone = set(before) - set(left)
    lost = found[0][1]
    assert (lost.rows, lost.files) == (len(gone), (path,))
    assert lost.rows > 0 < lost.episodes
    assert gone <= set(saved[1])
    if how in ("flipped", "several"):
        assert gone == set(before) & rows_of_blocks(STEPS, [2] if how == "flipped" else [1, 3], 1)
    elif how != "cut":
        assert gone == set(saved[1])
    assert {n: row[:4] + row[5:] for n, row in left.items()} == {n: before[n][:4] + before[n][5:] for n in left}
    sizes = [len(each) for each, _, _ in found]
    assert max(sizes) - min(sizes) <= 100

    def again(ranks: Ranks) -> set[int]:
        with build(tmp_path, ranks, capacity=400) as buffer:
            assert buffer.resume().lost == Lost()
            return set(content(buffer))

    assert fine(on_ranks(loaded, again)) == [each for _, _, each in found]
    other = fine(on_ranks(2 if loaded == 3 else 3, again))
    assert sorted(n for each in other for n in each) == sorted(n for _, _, each in found for n in each)
    assert not list(tmp_path.glob("scratch-*"))


def test_ranks_of_which_none_is_damaged_have_what_they_had(tmp_path: Path) -> None:
    saved = fine(on_ranks(2, lambda ranks: save(tmp_path, ranks)))

    def load(ranks: Ranks) -> Any:
        with build(tmp_path, ranks) as buffer:
            assert buffer.resume(allow_partial=True).lost == Lost()
            return set(content(buffer))

    assert fine(on_ranks(2, load)) == [set(each) for each in saved]


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    every: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"storage": "shared"}, {}, "storage"),
        ({}, {"verify": "lazy"}, "verify"),
        ({}, {"continue_episodes": True}, "continue_episodes"),
    ]
    for options, how, option in every:
        with ReplayBuffer(5, directory=tmp_path, **options) as buffer:
            with pytest.raises(ConfigError, match="allow_partial") as refused:
                buffer.resume(allow_partial=True, **how)
            assert refused.value.option == option
    with (
        ReplayBuffer(5, directory=tmp_path, ranks=alone(), remove="lifo") as buffer,
        pytest.raises(ConfigError, match="allow_partial: with ranks= and remove="),
    ):
        buffer.resume(allow_partial=True)


def test_a_run_that_lost_rows_goes_on_and_is_whole_again(tmp_path: Path) -> None:
    save(tmp_path, keep=1)
    damage(tmp_path, "flipped")
    with build(tmp_path, keep=1) as buffer:
        buffer.resume(allow_partial=True)
        buffer.save(9, wait=True)
    assert verify(str(tmp_path)).whole
