"""A resume that reads rows when they are first wanted: in everything but that as one that reads them at once."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline import ConfigError, Damaged, Ordered, Prioritized, Remove, ReplayBuffer, StoreError, Uniform
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.buffer.transitions import checked
from pipeline.buffer.transitions.bodies import BODIES
from pipeline.checkpoint import verify
from pipeline.config import Hindsight, StalenessWeighted, WithoutReplacement
from pipeline.replay import unread as reading
from pipeline.replay.unread import UnreadRows
from pipeline.store import held
from pipeline.store.segments import Block, read_blocks
from pipeline.wiring import collecting
from tests.support.replaying import CAPACITY, Counter, contents, draws, fill, rows

STORAGES = ["memory", "mapped"]
SELECTIONS: dict[str, Any] = {
    "uniform": Uniform(),
    "prioritized": Prioritized(),
    "epochs": WithoutReplacement(),
    "window": Uniform(window=20),
    "trajectories": Uniform(window_trajectories=3),
    "uses": Uniform(uses=3000),
    "epoch uses": WithoutReplacement(uses=3000),
    "order": Ordered(by="max", field="reward", uses=3000),
    "staleness": StalenessWeighted(half_life=1.5),
}
REMOVERS = [Remove(by="lifo"), Remove(by="stalest"), Remove(by="min", field="reward"), Remove(by="lowest_priority")]


@pytest.fixture(params=[(1, 16 << 10), (9_000, 16 << 10), (4 << 20, 512)], ids=str, autouse=True)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in a block, four of them, or all of one save, of which each is a piece."""
    block, chunk = request.param
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", block)
    for module in (block_sizes, checked, reading):
        monkeypatch.setattr(module, "CHUNK", chunk)


def make(directory: Path, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, directory=directory, **options)


def saved(directory: Path, **options: Any) -> None:
    """Two saves, episodes that were cut between, rows that were written back, and rows that have gone."""
    with make(directory, **options) as buffer:
        buffer.resume()
        fill(buffer, 0, 30)
        buffer.save(1, wait=True)
        buffer.end_episode()
        fill(buffer, 30, 47)
        keys = [key for key in buffer.ring.keys().tolist() if key % 3 == 0]
        buffer.save(2, wait=True)
        buffer.write_back(keys, {"reward": np.array(keys) / 8})
        fill(buffer, 77, 13)
        buffer.save(3, wait=True)


def both(tmp_path: Path, storage: str, **options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    """The same run, resumed lazily and fully."""
    saved(tmp_path / "a", **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    lazy, full = (make(tmp_path / name, storage=storage, **options) for name in "ab")
    assert lazy.resume(verify="lazy") == full.resume()
    assert lazy.ring.storage.unread is not None
    assert full.ring.storage.unread is None
    return lazy, full


def whole(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything that is there, which is brought in."""
    if buffer.ring.storage.unread is not None:
        buffer.ring.storage.unread.all()
    assert buffer.ring.storage.unread is None
    return contents(buffer)


def unread(buffer: ReplayBuffer) -> UnreadRows:
    found = buffer.ring.storage.unread
    assert isinstance(found, UnreadRows)
    return found


def pieces_there(buffer: ReplayBuffer) -> int:
    return int(unread(buffer)._there[:-1].sum())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", SELECTIONS)
def test_the_next_draws_are_those_of_a_full_resume(tmp_path: Path, storage: str, name: str) -> None:
    lazy, full = both(tmp_path, storage, select=SELECTIONS[name], seed=3)
    with lazy, full:
        assert draws(lazy, 5) == draws(full, 5)
        for buffer in (lazy, full):
            fill(buffer, 90, 20)
            buffer.write_back(buffer.ring.keys()[::4], {"reward": np.full(15, 0.25)})
        count = 245 if name == "uniform" else 30
        assert draws(lazy, count) == draws(full, count)
        assert lazy.drawer.mass(lazy.ring.keys()).tolist() == full.drawer.mass(full.ring.keys()).tolist()
        assert whole(lazy) == contents(full)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"where": {"reward": (">", 0.5)}},
        {"where": {"#version": (">=", 2)}},
        {"where": lambda reward: reward > 0.4},
        {"hindsight": Hindsight(goal="goal", achieved="reward", reward=lambda own, goal: own - goal)},
        {"stack": 3, "n_step": 2, "gamma": 0.5},
        {"slices": {"length": 4, "burn_in": 1, "pad": True}},
        {"columns": ["image"]},
    ],
    ids=lambda more: next(iter(more), "plain"),
)
def test_whatever_is_asked_for_first_is_as_after_a_full_resume(
    tmp_path: Path, storage: str, more: dict[str, Any]
) -> None:
    for name in "ab":
        with make(tmp_path / name) as buffer:
            for begin in range(0, 90, 9):
                given = rows(begin, 9)
                buffer.extend({**given, "goal": given["reward"]}, version=begin // 20)
            buffer.save(1, wait=True)
    found = []
    hows: dict[str, Literal["lazy", "full"]] = {"a": "lazy", "b": "full"}
    for name, how in hows.items():
        with make(tmp_path / name, storage=storage, seed=2, returns="numpy") as buffer:
            buffer.resume(verify=how)
            for _ in range(20):
                batch = buffer.sample(6, **more)
                columns = {each: batch[each] for each in batch.columns if each not in ("obs", "next_obs")}
                columns |= {each: batch[each]["n"] for each in ("obs", "next_obs") if each in batch}
                values = [each.tolist() for each in columns.values()]
                found.append((name, batch.keys.tolist(), values, batch.versions.tolist(), batch.episodes.tolist()))
    assert [each[1:] for each in found[:20]] == [each[1:] for each in found[20:]]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("how", ["share_next_obs", "continue_episodes"])
def test_next_observations_that_are_shared_and_episodes_that_go_on(tmp_path: Path, storage: str, how: str) -> None:
    options = {"share_next_obs": how == "share_next_obs"}
    saved(tmp_path / "a", **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    lazy, full = (make(tmp_path / name, storage=storage, **options) for name in "ab")
    with lazy, full:
        lazy.resume(continue_episodes=how == "continue_episodes", verify="lazy")
        full.resume(continue_episodes=how == "continue_episodes")
        for buffer in (lazy, full):
            for number in range(90, 95):
                buffer.append({name: each[0] for name, each in _flat(rows(number, 1)).items()})
            fill(buffer, 95, 9)
        assert draws(lazy, 30) == draws(full, 30)
        found = [buffer.sample(40)["next_obs"]["n"].tolist() for buffer in (lazy, full)]
        assert found[0] == found[1]
        assert whole(lazy) == contents(full)


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    inner = {f"{group}.{name}": each for group in ("obs", "next_obs") for name, each in given[group].items()}
    return inner | {name: each for name, each in given.items() if name not in ("obs", "next_obs")}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("remove", REMOVERS, ids=lambda remove: remove.by)
def test_where_others_than_the_oldest_go_the_same_rows_stay(tmp_path: Path, storage: str, remove: Remove) -> None:
    lazy, full = both(tmp_path, storage, remove=remove, select=Prioritized(), seed=3)
    with lazy, full:
        for _ in range(20):
            assert lazy.sample(5).keys.tolist() == full.sample(5).keys.tolist()
        for number in range(6):
            keys = [list(each.extend(rows(90 + 5 * number, 5), version=number)) for each in (lazy, full)]
            assert keys[0] == keys[1]
            for buffer in (lazy, full):
                buffer.update_priorities(buffer.ring.keys()[:7], np.arange(7.0))
            assert lazy.sample(9)["reward"].tolist() == full.sample(9)["reward"].tolist()
        for buffer in (lazy, full):
            buffer.save(4, wait=True)
        assert whole(lazy) == contents(full)
    assert verify(str(tmp_path / "a")).whole
    with make(tmp_path / "a", storage=storage, remove=remove, select=Prioritized(), seed=3) as again:
        again.resume(verify="lazy")
        assert whole(again)["obs.n"] == contents(full)["obs.n"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("capacity", [1, 7, 59, 61, 500])
def test_another_capacity_takes_the_newest_rows(tmp_path: Path, storage: str, capacity: int) -> None:
    saved(tmp_path)
    with make(tmp_path, capacity, storage=storage, select="lifo") as again:
        kept = min(capacity, CAPACITY)
        assert again.resume(verify="lazy").rows == kept
        fill(again, 90, 3)
        there = min(capacity, kept + 3)
        assert again.sample(there)["obs"]["n"].tolist() == list(range(92, 92 - there, -1))
        again.save(4, wait=True)
        assert whole(again)["obs.n"] == list(range(93 - there, 93))
    assert verify(str(tmp_path)).whole


def test_rows_that_are_overwritten_first_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    with make(tmp_path) as buffer:
        buffer.resume(verify="lazy")
        with monkeypatch.context() as patch:
            _no_reading(patch)
            fill(buffer, 90, CAPACITY)
            assert min(buffer.sample(400)["obs"]["n"].tolist()) >= 90
            draws(buffer, 5)
        assert buffer.ring.storage.unread is None


def _no_reading(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("rows were read")

    patch.setattr(held, "_read", refuse)
    patch.setattr(held, "_read_into", refuse)
    patch.setattr(collecting, "whole_bytes", refuse)


@pytest.mark.parametrize("remove", ["fifo", "lifo"])
def test_a_save_reads_no_rows_and_writes_none_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: str
) -> None:
    saved(tmp_path, remove=remove)
    before = _blocks(tmp_path)
    with make(tmp_path, remove=remove) as buffer:
        buffer.resume(verify="lazy")
        with monkeypatch.context() as patch:
            _no_reading(patch)
            buffer.save(4, wait=True)
            assert _blocks(tmp_path) == before
            if remove == "lifo":  # no other would be let in
                return
            buffer.extend(rows(90, 1), version=9)
            buffer.save(5, wait=True)
        after = _blocks(tmp_path)
        assert set(before) - set(after) <= set(before[:1])
        assert sum(block.count for block in set(after) - set(before)) == 1
    assert verify(str(tmp_path)).whole
    with make(tmp_path, remove=remove) as again:
        again.resume()
        assert 90 in contents(again)["obs.n"]


def test_many_small_blocks_that_were_not_read_do_not_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as buffer:
        for number in range(15):
            buffer.extend(rows(number, 1))
            buffer.save(number, wait=True)
    with make(tmp_path) as buffer:
        buffer.resume(verify="lazy")
        with monkeypatch.context() as patch:
            _no_reading(patch)
            for number in range(15, 20):
                buffer.extend(rows(number, 1))
                buffer.save(number, wait=True)
        assert len(_blocks(tmp_path)) == 20
        whole(buffer)
        buffer.extend(rows(20, 1))
        buffer.save(20, wait=True)
    with make(tmp_path) as again:
        again.resume()
        assert contents(again)["obs.n"] == list(range(21))


def _blocks(directory: Path) -> list[Block]:
    return read_blocks(str(max((directory / "generations").iterdir()) / "blocks.msgpack"))


@pytest.mark.parametrize("storage", STORAGES)
def test_what_needs_marks_alone_brings_no_rows_in(tmp_path: Path, storage: str) -> None:
    saved(tmp_path, select=Prioritized())
    with make(tmp_path, storage=storage, select=Prioritized()) as buffer:
        buffer.resume(verify="lazy")
        buffer.statistics()
        buffer.check_sample(4, slices={"length": 3})
        buffer.update_priorities(buffer.ring.keys(), np.ones(CAPACITY))
        assert not unread(buffer).marks_known
        ring = buffer.ring
        assert ring.following(ring.keys()).sum() > CAPACITY
        ring.chain(ring.keys(), 3)
        ring.chain_back(ring.keys(), 3)
        assert unread(buffer).marks_known
        assert pieces_there(buffer) == 0
        buffer.sample(1)
        assert pieces_there(buffer) >= 1


def test_segments_may_be_removed_once_they_are_held(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    with make(tmp_path / "c") as full:
        full.resume()
    buffer = make(tmp_path / "a")
    buffer.resume(verify="lazy")
    buffer.close()  # another process may go on from there, and let go what this one reads
    shutil.rmtree(tmp_path / "a")
    assert whole(buffer)["obs.n"] == contents(full)["obs.n"]


def test_beyond_so_many_files_they_are_opened_for_each_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(held, "LEAST_HELD", 0)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4, 4))
    with make(tmp_path) as buffer:
        buffer.resume(verify="lazy")
        assert len(unread(buffer)._held._handles) == 1
        assert whole(buffer)["obs.n"] == list(range(30, 90))


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def _everything_of(buffer: ReplayBuffer) -> Any:
    ring, drawer = buffer.ring, buffer.drawer
    arrays = {name: each.tolist() for name, each in drawer.arrays().items()}
    random_ = buffer._rng.bit_generator.state
    state = drawer.state(), buffer._counts.state(), buffer.statistics()
    return ring.added, ring.size, ring.cuts, random_, arrays, state


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["uniform", "prioritized", "epochs", "uses", "epoch uses", "order"])
def test_a_byte_flipped_in_any_block_is_told_by_the_verb_that_meets_it(tmp_path: Path, storage: str, name: str) -> None:
    """And nothing was drawn; it is told again; the rows of other blocks can be had."""
    saved(tmp_path, select=SELECTIONS[name])
    places = random.Random(4)
    for number, block in enumerate(_blocks(tmp_path)[:12]):
        path = tmp_path / "segments" / f"{block.incarnation:06d}-{block.rank:04d}-{block.segment:06d}.fbs"
        at = block.offset + 64 + places.randrange(block.length)
        _flip(path, at)
        buffer = make(tmp_path, storage=storage, select=SELECTIONS[name], returns="numpy")
        with buffer:
            buffer.resume(verify="lazy")
            before = _everything_of(buffer)
            for _ in range(2):
                with pytest.raises(Damaged, match=rf"{path.name} at byte \d+: damaged"):
                    _read_all(buffer)
                assert _everything_of(buffer) == before, number
            held_keys = range(max(30, block.first), min(90, block.first + block.count))
            for key in range(30, 90):
                if key not in held_keys:
                    assert buffer.ring.mark("obs.n", np.array([key])).tolist() == [key]
        _flip(path, at)


def _read_all(buffer: ReplayBuffer) -> None:
    """Draw every row, and ask what follows."""
    buffer.ring.know_marks()
    if isinstance(buffer.options.select, Uniform | Prioritized):
        buffer.ring.mark("image", buffer.ring.keys())
        buffer.sample(4000)
    buffer.sample(CAPACITY)


def test_a_damaged_piece_leaves_the_others_of_its_block(tmp_path: Path, sizes: None) -> None:
    saved(tmp_path)
    for block in _blocks(tmp_path):
        if block.count > 40:  # each row is a piece of its own
            _flip(_segment(tmp_path, block), block.offset + 64 + _place_of(tmp_path, block, "image") + 5 * 2048 + 999)
            with make(tmp_path) as buffer:
                buffer.resume(verify="lazy")
                there = [key for key in range(block.first, block.first + block.count) if key != block.first + 5]
                for key in there:
                    buffer.ring.mark("image", np.array([key]))
                with pytest.raises(Damaged):
                    buffer.ring.mark("image", np.array([block.first + 5]))
                buffer.ring.know_marks()
            return


def _segment(directory: Path, block: Block) -> Path:
    return directory / "segments" / f"{block.incarnation:06d}-{block.rank:04d}-{block.segment:06d}.fbs"


def _place_of(directory: Path, block: Block, name: str) -> int:
    with _segment(directory, block).open("rb") as file:
        file.seek(block.offset + 64)
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
    places = {each[0]: head[BODIES]["data_offsets"][0] + each[3] for each in json.loads(head["__metadata__"]["bodies"])}
    found: int = places[name] if name in places else head[name]["data_offsets"][0]
    return 8 + length + found


@pytest.mark.parametrize("remove", ["min", "stalest"])
def test_damage_that_a_removal_meets_lets_no_row_in(tmp_path: Path, remove: str) -> None:
    by = Remove(by="min", field="reward") if remove == "min" else Remove(by="stalest")
    saved(tmp_path, remove=by)
    block = _blocks(tmp_path)[0]
    name = "reward" if remove == "min" else "#version"
    _flip(_segment(tmp_path, block), block.offset + 64 + _place_of(tmp_path, block, name))
    with make(tmp_path, remove=by) as buffer:
        buffer.resume(verify="lazy")
        before = _everything_of(buffer)
        for _ in range(2):
            with pytest.raises(Damaged):
                buffer.extend(rows(90, 4))
            with pytest.raises(Damaged):
                buffer.append({name: each[0] for name, each in _flat(rows(90, 1)).items()})
            assert _everything_of(buffer) == before


def test_damage_that_a_write_back_meets_changes_no_row(tmp_path: Path) -> None:
    saved(tmp_path)
    blocks = _blocks(tmp_path)
    _flip(_segment(tmp_path, blocks[-1]), blocks[-1].offset + 64 + _place_of(tmp_path, blocks[-1], "image"))
    with make(tmp_path) as buffer:
        buffer.resume(verify="lazy")
        keys = [blocks[0].first, blocks[-1].first]
        with pytest.raises(Damaged):
            buffer.write_back(keys, {"reward": np.array([7.0, 7.0])})
        assert buffer.ring.mark("reward", np.array(keys[:1])).tolist() != [7.0]


@pytest.mark.parametrize("what", ["gone", "short", "header", "other"])
def test_what_is_not_there_is_told_at_once(tmp_path: Path, what: str) -> None:
    saved(tmp_path)
    block = _blocks(tmp_path)[-1]
    path = _segment(tmp_path, block)
    if what == "gone":
        path.unlink()
    elif what == "short":
        os.truncate(path, block.offset + 64 + block.length - 1)
    else:
        _flip(path, block.offset + (60 if what == "header" else 16))
    with make(tmp_path) as buffer, pytest.raises(Damaged, match=f"{path.name}.*(missing|bytes|at byte)"):
        buffer.resume(verify="lazy")


def test_what_cannot_be_read_now_is_no_damage_and_can_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    with make(tmp_path) as buffer:
        buffer.resume(verify="lazy")
        before = _everything_of(buffer)

        def broken(*_: Any) -> Any:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", broken)
            patch.setattr(os, "preadv", broken)
            with pytest.raises(StoreError, match="Input/output error") as caught:
                buffer.sample(4)
        assert not isinstance(caught.value, Damaged)
        assert _everything_of(buffer) == before
        assert len(buffer.sample(4)) == 4


def test_threads_read_each_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    read: list[int] = []
    came = UnreadRows._came

    def noted(self: UnreadRows, number: int, pieces: Any) -> None:
        read.extend(np.atleast_1d(pieces).tolist())
        came(self, number, pieces)

    monkeypatch.setattr(UnreadRows, "_came", noted)
    with make(tmp_path, select="fifo") as buffer:
        buffer.resume(verify="lazy")
        start, found = threading.Barrier(4), []

        def draw() -> None:
            start.wait()
            drawn = [buffer.sample(count)["obs"]["n"].tolist() for count in (5, 20, CAPACITY)]
            found.append(drawn == [list(range(30, 30 + count)) for count in (5, 20, CAPACITY)])

        threads = [threading.Thread(target=draw) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4
    assert sorted(read) == list(range(len(read)))


@pytest.mark.parametrize("storage", STORAGES)
def test_saved_again_and_resumed_again_it_is_the_same(tmp_path: Path, storage: str) -> None:
    lazy, full = both(tmp_path, storage, select=Prioritized(), seed=3)
    for life in range(4):
        for buffer in (lazy, full):
            buffer.sample(3)
            fill(buffer, 90 + 7 * life, 7)
            buffer.write_back(buffer.ring.keys()[life::9], {"obs.half": np.full(60, life)[life::9].astype(np.float32)})
            buffer.save(10 + life, wait=True)
            buffer.sample(3)
            buffer.close()
        lazy, full = (make(tmp_path / name, storage=storage, select=Prioritized(), seed=3) for name in "ab")
        lazy.resume(verify="lazy")
        full.resume()
        assert verify(str(tmp_path / "a")).whole
    with lazy, full:
        assert draws(lazy, 20) == draws(full, 20)
        assert whole(lazy) == contents(full)


def test_an_older_step_is_gone_back_to_without_reading_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    with make(tmp_path) as buffer:
        resumed = buffer.resume(2, verify="lazy")
        assert (resumed.step, resumed.rows) == (2, CAPACITY)
        assert pieces_there(buffer) == 0
    with make(tmp_path) as again:
        assert again.resume(verify="lazy").step == 2
        assert whole(again)["obs.n"] == list(range(17, 77))
    assert verify(str(tmp_path)).whole


def test_what_is_attached_is_loaded_and_a_refusal_changes_nothing(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        counter = Counter()
        counter.step = 5
        buffer.attach(counter=counter)
        fill(buffer, 0, 20)
        buffer.save(1, wait=True)
    with make(tmp_path) as again:
        counter = Counter()
        again.attach(counter=counter)
        again.resume(verify="lazy")
        assert counter.step == 5


def test_what_was_cleared_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    with make(tmp_path) as buffer:
        buffer.resume(verify="lazy")
        buffer.clear()
        buffer.extend({"x": np.arange(4)})
        assert buffer.ring.storage.unread is None
        buffer.save(4, wait=True)
    with make(tmp_path, select="fifo") as again:
        again.resume(verify="lazy")
        assert again.sample(4)["x"].tolist() == [0, 1, 2, 3]


def test_a_state_dict_is_all_of_it(tmp_path: Path) -> None:
    lazy, full = both(tmp_path, "memory")
    with lazy, full:
        found = [buffer.state_dict()["rows"] for buffer in (lazy, full)]
        assert all(np.array_equal(found[0][name], found[1][name]) for name in found[1])


def test_what_it_cannot_be_is_refused(tmp_path: Path) -> None:
    with make(tmp_path / "a") as buffer, pytest.raises(ConfigError, match="'full' or 'lazy'"):
        buffer.resume(verify="quick")  # type: ignore[arg-type]
    with make(tmp_path / "b", storage="shared") as buffer, pytest.raises(ConfigError, match="storage='shared'"):
        buffer.resume(verify="lazy")


async def test_tasks_resume_lazily_too(tmp_path: Path) -> None:
    saved(tmp_path)
    with make(tmp_path) as buffer:
        assert (await buffer.aio.resume(verify="lazy")).rows == CAPACITY
        assert buffer.ring.storage.unread is not None


@pytest.mark.parametrize("kind", ["prioritized", "shared"])
def test_blocks_of_a_version_without_checksums_of_parts_are_read_whole(tmp_path: Path, kind: str) -> None:
    source = Path(__file__).parents[1] / "golden" / "replay_v1" / kind
    found: list[Any] = []
    hows: list[Literal["lazy", "full"]] = ["lazy", "full"]
    for how in hows:
        shutil.copytree(source, tmp_path / how)
        options = {"share_next_obs": kind == "shared", "select": "prioritized" if kind == "prioritized" else "uniform"}
        state = json.loads((max((source / "generations").iterdir()) / "replay.json").read_bytes())
        with make(tmp_path / how, state["capacity"], **options) as buffer:
            attached = max((tmp_path / how / "generations").iterdir()) / "trainer"
            buffer.attach(**{path.stem: _Anything() for path in attached.glob("*")})
            buffer.resume(verify=how)
            found.append([buffer.sample(8).keys.tolist() for _ in range(50)])
            found.append(whole(buffer))
    assert found[:2] == found[2:]


class _Anything:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Whatever it is."""
