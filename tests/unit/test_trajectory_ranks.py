"""One buffer of trajectories, of which each rank has a shard, in one folder."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pipeline import Ranks, TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.errors import ConfigError, Damaged, RankFailed, UsageError, WriteFailed
from pipeline.replay.trajectory_shards import read_trajectory_shards
from pipeline.store.layout import Layout
from pipeline.store.writer import StoreWriter
from tests.support.ranks import fine, on_ranks, ranks_of
from tests.support.replaying import Counter
from tests.support.trajectories import check, draws, trajectory

PAIRS = [(1, 2), (2, 1), (4, 3), (3, 4)]


def made(directory: Path, ranks: Ranks, **options: Any) -> TrajectoryBuffer:
    given = {"sample_window_size": 0, "cache_size": 3, "seed": 5, "directory": directory}
    return TrajectoryBuffer(ranks=ranks, **{**given, **options})


def number_of(rank: int, count: int) -> int:
    """What tells a trajectory from all others."""
    return 100 * rank + count


def add(buffer: TrajectoryBuffer, rank: int, counts: range) -> None:
    for count in counts:
        number = number_of(rank, count)
        buffer.add_trajectories([trajectory(number, 1 + number % 5, 1 + number % 3)])


def held(buffer: TrajectoryBuffer) -> list[int]:
    """Which trajectories there are, oldest first; each is read whole, and compared with what it was."""
    found = []
    for info in buffer.infos():
        whole = buffer.trajectory(info.trajectory_id)
        check(whole)
        number = whole["max_episode_length"]
        assert info.shape == (1 + number % 5, 1 + number % 3)
        assert (whole["actions"][..., 0] == number).all()
        assert info.model_weights_id == f"w{number % 3}"
        found.append(number)
    return found


def newest(directory: Path) -> Stored:
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    return find_generations(layout, run.run_id).complete[-1]


def save_some(directory: Path, size: int, count: int = 7, **options: Any) -> list[list[int]]:
    """Have ranks save some trajectories each, the higher ones more; return by rank which."""

    def train(ranks: Ranks) -> list[int]:
        with made(directory, ranks, **options) as buffer:
            buffer.attach(counter=(counter := Counter()))
            assert buffer.resume().generation is None
            counter.step = 10 + ranks.rank
            add(buffer, ranks.rank, range(count + ranks.rank))
            buffer.save(1, wait=True)
            return held(buffer)

    return fine(on_ranks(size, train))


def resumed(directory: Path, size: int, how: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    """Have ranks take the newest generation back; return by rank which trajectories each has."""

    def go_on(ranks: Ranks) -> list[int]:
        with made(directory, ranks, **options) as buffer:
            buffer.attach(counter=(counter := Counter()))
            found = buffer.resume(**(how or {}))
            assert found.step == 1
            assert counter.step == 10  # the first rank's
            assert found.rows == buffer.total_samples == sum(info.num_samples for info in buffer.infos())
            return held(buffer)

    return fine(on_ranks(size, go_on))


def shared(shards: list[list[int]], size: int) -> list[list[int]]:
    """The rule, as plainly as it can be written: oldest first, each to who has the fewest transitions, then the fewest
    trajectories. Ranks have added one each in turn; below 0: it is gone."""
    aged = [(at, rank, number) for rank, numbers in enumerate(shards) for at, number in enumerate(numbers)]
    found: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for _, _, number in sorted(aged):
        if number < 0:
            continue
        least = min(range(size), key=lambda target: (loads[target], len(found[target]), target))
        found[least].append(number)
        loads[least] += (1 + number % 5) * (1 + number % 3)
    return found


@pytest.mark.parametrize("auto_save", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_goes_on_from_its_own_shard_to_the_last_bit(tmp_path: Path, size: int, auto_save: bool) -> None:
    def train(ranks: Ranks) -> Any:
        net = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(net.weight, 3.0 if ranks.first else 5.0)
        with made(tmp_path, ranks, auto_save=auto_save) as buffer:
            buffer.attach(net=net)
            buffer.attach_own(counter=(counter := Counter()))
            assert buffer.resume().generation is None
            add(buffer, ranks.rank, range(6 + 3 * ranks.rank))
            draws(buffer, 3)
            buffer.save(1, wait=True)
            add(buffer, ranks.rank, range(20, 22))
            counter.step = 7 + ranks.rank
            buffer.save(2, wait=True)
            return held(buffer), [each.trajectory_id for each in buffer.infos()], draws(buffer, 20)

    def go_on(ranks: Ranks) -> Any:
        net = torch.nn.Linear(2, 2)
        with made(tmp_path, ranks, auto_save=auto_save) as buffer:
            buffer.attach(net=net)
            buffer.attach_own(counter=(counter := Counter()))
            assert buffer.resume().step == 2
            assert torch.all(net.weight == 3.0)  # the first rank's, on all of them
            assert counter.step == 7 + ranks.rank
            return held(buffer), [each.trajectory_id for each in buffer.infos()], draws(buffer, 20)

    then = fine(on_ranks(size, train))
    assert fine(on_ranks(size, go_on)) == then
    assert size == 1 or then[0][2] != then[1][2]
    manifest = newest(tmp_path).manifest
    assert (manifest.kind, manifest.world_size) == ("trajectory shards", size)
    assert [shard.episodes for shard in manifest.shards] == [8 + 3 * rank for rank in range(size)]
    assert [shard.saved for shard in manifest.shards] == [shard.rows for shard in manifest.shards]
    assert verify(str(tmp_path)).whole


@pytest.mark.parametrize("how", ["full", "lazy"])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_another_number_of_ranks_shares_whole_trajectories_out_oldest_first(
    tmp_path: Path, before: int, after: int, how: str
) -> None:
    saved = save_some(tmp_path, before)
    found = resumed(tmp_path, after, {"verify": how})
    assert found == shared(saved, after)


@pytest.mark.parametrize("size", [2, 3])
def test_as_many_ranks_share_out_anew_where_they_are_told_to(tmp_path: Path, size: int) -> None:
    saved = save_some(tmp_path, size)
    assert resumed(tmp_path, size) == saved
    assert resumed(tmp_path, size, {"rebalance": True}) == shared(saved, size)


def test_where_trajectories_were_before_has_no_part_in_the_plan(tmp_path: Path) -> None:
    """4 -> 3 -> 4 is 4 -> 4 shared out anew."""
    saved = save_some(tmp_path, 4)

    def through(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.resume()
            assert counter.step == 10
            buffer.save(1, wait=True)

    at_once = resumed(tmp_path, 4, {"rebalance": True})
    for size in (3, 1, 2):
        fine(on_ranks(size, through))
        assert newest(tmp_path).manifest.world_size == size
        assert verify(str(tmp_path)).whole
    assert resumed(tmp_path, 4) == at_once == shared(saved, 4)


def test_payloads_are_moved_by_reference_and_each_is_read_by_one_rank(tmp_path: Path) -> None:
    save_some(tmp_path, 2)
    layout = Layout(str(tmp_path))
    before = {name: os.path.getsize(os.path.join(layout.segments, name)) for name in layout.list_segments()}

    def go_on(ranks: Ranks) -> int:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            buffer.save(2, wait=True)
            return len(buffer)

    counts = fine(on_ranks(3, go_on))
    assert sum(counts) == 15
    after = {info.name: info for info in newest(tmp_path).manifest.segments if info.live}
    assert after.keys() == before.keys()  # nothing was written again
    assert sum(info.live for info in after.values()) == sum(shard.bytes for shard in newest(tmp_path).manifest.shards)
    assert len({info.name for info in newest(tmp_path).manifest.segments}) == len(newest(tmp_path).manifest.segments)


def test_ranks_go_on_with_what_moved_and_what_nobody_needs_goes(tmp_path: Path) -> None:
    save_some(tmp_path, 3, keep=1)

    def go_on(ranks: Ranks) -> list[int]:
        with made(tmp_path, ranks, keep=1, capacity=12, auto_save=True) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume(evict_oldest=True)
            for step in range(2, 9):
                add(buffer, 5 + ranks.rank, range(3 * step, 3 * step + 3))
                draws(buffer, 2)
                buffer.save(step, wait=True)
                draws(buffer, 2)
            return held(buffer)

    found = fine(on_ranks(2, go_on))
    assert found == [[number_of(5 + rank, count) for count in range(15, 27)] for rank in range(2)]
    manifest = newest(tmp_path).manifest
    layout = Layout(str(tmp_path))
    needed = {info.name for info in manifest.segments}
    assert set(layout.list_segments()) == needed
    assert not any(name.startswith("000001") for name in needed)  # of the first life nothing is left
    assert verify(str(tmp_path)).whole


def test_names_and_ages_travel_and_new_ones_cannot_collide(tmp_path: Path) -> None:
    save_some(tmp_path, 2)

    def names(directory: Path) -> dict[int, tuple[int, int]]:
        found = {}
        for shard in read_trajectory_shards(newest(directory)):
            for info, uid, age in zip(shard.infos, shard.table.uid.tolist(), shard.table.age.tolist(), strict=True):
                assert info.max_episode_length not in found
                found[info.max_episode_length] = (uid, age)
        assert len({uid for uid, _ in found.values()}) == len(found)
        return found

    def go_on(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            add(buffer, 5 + ranks.rank, range(4))
            buffer.save(2, wait=True)

    first = names(tmp_path)
    fine(on_ranks(3, go_on))
    then = names(tmp_path)
    assert first.items() <= then.items()
    newer = [age for number, (_, age) in then.items() if number not in first]
    assert min(newer) >= max(age for _, age in first.values())
    assert len(newer) == 12


def test_too_much_for_the_room_is_an_error_on_all_ranks_or_the_oldest_go(tmp_path: Path) -> None:
    saved = save_some(tmp_path, 3)  # 7, 8 and 9

    def refused(ranks: Ranks) -> str:
        with made(tmp_path, ranks, capacity=10) as buffer:
            buffer.attach(counter=Counter())
            with pytest.raises(ConfigError, match="capacity=10: the shards hold 24 episodes"):
                buffer.resume()
            return "refused"

    assert fine(on_ranks(2, refused)) == ["refused"] * 2
    found = resumed(tmp_path, 2, {"evict_oldest": True}, capacity=10)
    assert max(map(len, found)) <= 10
    aged = [number for _, number in sorted((at, each) for of in saved for at, each in enumerate(of))]
    kept = sum(map(len, found))
    assert sorted(number for each in found for number in each) == sorted(aged[-kept:])
    assert kept >= 15
    # As many ranks as before take their own, the newest of it, as one process does.
    assert resumed(tmp_path, 3, capacity=5) == [each[-5:] for each in saved]


def test_fewer_trajectories_than_ranks_load_and_all_ranks_know_that_one_has_none(tmp_path: Path) -> None:
    save_some(tmp_path, 1, 2)

    def go_on(ranks: Ranks) -> tuple[int, bool]:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            return len(buffer), buffer.ready()

    assert fine(on_ranks(3, go_on)) == [(1, False), (1, False), (0, False)]

    def more(ranks: Ranks) -> list[bool]:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            first = buffer.ready()
            add(buffer, 5 + ranks.rank, range(2))
            return [first, buffer.ready(), buffer.ready(1000)]

    assert fine(on_ranks(3, more)) == [[False, True, False]] * 3


def segment_of(directory: Path) -> Path:
    layout = Layout(str(directory))
    return Path(layout.segments) / layout.list_segments()[0]


def shard(directory: Path, rank: int) -> Path:
    return Path(newest(directory).folder) / "shards" / f"{rank:04d}"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "a segment is gone": lambda run: segment_of(run),
    "a byte of a payload": lambda run: segment_of(run),
    "a shard is gone": lambda run: shard(run, 1),
    "a shard is empty": lambda run: shard(run, 1),
    "a byte of the names": lambda run: shard(run, 1) / "values" / "uid.int64",
    "the list is cut": lambda run: shard(run, 0) / "blocks.msgpack",
    "the state is another one": lambda run: shard(run, 0) / "trajectories.json",
    "of another generation": lambda run: shard(run, 1) / "blocks.msgpack",
}


def damage(what: str, run: Path) -> Path:
    """Damage a run; return what a message is to name."""
    path = DAMAGES[what](run)
    if what == "a segment is gone":
        path.unlink()
    elif what == "a byte of a payload":
        flip(path, 3000)
    elif what == "a byte of the names":
        flip(path, 3)
    elif what == "a shard is gone":
        shutil.rmtree(path)
    elif what == "a shard is empty":
        for each in path.rglob("*"):
            if each.is_file():
                each.write_bytes(b"")
    elif what == "the list is cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif what == "the state is another one":
        path.write_bytes(path.read_bytes().replace(b'"size": 7', b'"size": 6'))
    else:
        path.write_bytes((path.parents[1] / "0000" / "blocks.msgpack").read_bytes())
    return path


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", list(DAMAGES))
def test_damage_is_an_error_on_all_ranks_that_names_the_file_and_changes_nothing(
    tmp_path: Path, what: str, size: int
) -> None:
    save_some(tmp_path, 2)
    path = damage(what, tmp_path)

    def refused(ranks: Ranks) -> str:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            counter.step = -1
            with pytest.raises((Damaged, RankFailed)) as found:
                buffer.resume()
            assert not len(buffer)
            assert counter.step == -1
            return str(found.value)

    said = fine(on_ranks(size, refused))
    assert all(path.name in each for each in said), said
    assert not verify(str(tmp_path)).whole


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("what", list(DAMAGES))
def test_what_is_whole_is_shared_out_where_that_is_asked_for(tmp_path: Path, what: str, size: int) -> None:
    saved = save_some(tmp_path, 2)
    rows = {number: (1 + number % 5) * (1 + number % 3) for each in saved for number in each}
    path = damage(what, tmp_path)

    def go_on(ranks: Ranks) -> Any:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            found = buffer.resume(allow_partial=True)
            assert counter.step == 10
            buffer.save(2, wait=True)
            return held(buffer), tuple(found.lost)

    found = fine(on_ranks(size, go_on))
    left = [numbers for numbers, _ in found]
    lost = {each for _, each in found}
    assert len(lost) == 1  # all say the same
    ((gone_rows, gone, files),) = lost
    kept = {number for each in left for number in each}
    missing = rows.keys() - kept
    assert (gone, gone_rows) == (len(missing), sum(rows[number] for number in missing))
    if "segment" in what or "shard" in what or "names" in what or "generation" in what:
        whose = 0 if "segment" in what else 1
        assert missing == set(saved[whose])
    elif "payload" in what:
        assert len(missing) == 1
    else:
        assert missing == set(saved[0])
    assert len(files) == 1
    assert Path(files[0]).name in (path.name, *path.parent.parts, *path.parts)
    assert left == shared([[number if number in kept else -1 for number in each] for each in saved], size)
    assert resumed_step_two(tmp_path, size) == left


def resumed_step_two(directory: Path, size: int) -> list[list[int]]:
    """What was saved after it is whole, and is what there was."""

    def go_on(ranks: Ranks) -> list[int]:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=Counter())
            assert buffer.resume().step == 2
            return held(buffer)

    return fine(on_ranks(size, go_on))


def test_nothing_is_shared_out_anew_where_nothing_is_damaged(tmp_path: Path) -> None:
    saved = save_some(tmp_path, 2)
    assert resumed(tmp_path, 2, {"allow_partial": True}) == saved
    with made(tmp_path, *ranks_of(1)) as buffer, pytest.raises(ConfigError, match="verify='full'"):
        buffer.resume(allow_partial=True, verify="lazy")
    with TrajectoryBuffer(directory=tmp_path) as alone, pytest.raises(ConfigError, match="salvage_run"):
        alone.resume(allow_partial=True)


def test_leftovers_of_more_ranks_that_no_manifest_lists_do_not_count(tmp_path: Path) -> None:
    saved = save_some(tmp_path, 2)
    shutil.copytree(shard(tmp_path, 1), shard(tmp_path, 2))
    assert resumed(tmp_path, 2) == saved
    assert resumed(tmp_path, 3) == shared(saved, 3)


def test_fields_that_differ_between_ranks_are_named_where_ranks_share_out(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            dtype = torch.float32 if ranks.first else torch.float64
            buffer.add_trajectories([{"rewards": torch.zeros(2, 2, dtype=dtype)}])
            buffer.save(1, wait=True)

    def refused(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            with pytest.raises((Damaged, RankFailed), match=r"shard 1 has the column .*rewards.*shard 0"):
                buffer.resume()

    fine(on_ranks(2, train))
    fine(on_ranks(3, refused))


def test_a_damaged_trajectory_that_was_left_unread_is_found_when_it_is_sampled(tmp_path: Path) -> None:
    save_some(tmp_path, 2)
    flip(segment_of(tmp_path), 3000)

    def go_on(ranks: Ranks) -> int:
        found = 0
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume(verify="lazy")
            for info in buffer.infos():
                try:
                    check(buffer.trajectory(info.trajectory_id))
                except Damaged:
                    found += 1
        return found

    assert sum(fine(on_ranks(3, go_on))) == 1


def test_what_ranks_attached_for_themselves_is_not_loaded_by_others(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer:
            buffer.attach_own(env=Counter())
            buffer.resume()
            add(buffer, ranks.rank, range(4))
            buffer.save(1, wait=True)

    def go_on(ranks: Ranks) -> tuple[str, ...]:
        with made(tmp_path, ranks) as buffer:
            buffer.attach_own(env=Counter())
            return buffer.resume().left

    fine(on_ranks(2, train))
    assert fine(on_ranks(2, go_on)) == [()] * 2
    assert fine(on_ranks(3, go_on)) == [("env",)] * 3


def test_an_older_step_is_gone_back_to_by_all(tmp_path: Path) -> None:
    save_some(tmp_path, 2)

    def train(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            add(buffer, 5 + ranks.rank, range(3))
            buffer.save(2, wait=True)

    def back(ranks: Ranks) -> list[int]:
        with made(tmp_path, ranks) as buffer:
            buffer.attach(counter=Counter())
            assert buffer.resume(step=1).step == 1
            return held(buffer)

    fine(on_ranks(2, train))
    found = fine(on_ranks(3, back))
    assert sorted(number for each in found for number in each) == [*range(7), *range(100, 108)]
    assert newest(tmp_path).manifest.step == 1
    assert newest(tmp_path).manifest.world_size == 3
    assert resumed(tmp_path, 3) == found


def test_nothing_is_added_before_all_ranks_have_resumed(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        with made(tmp_path, ranks) as buffer, pytest.raises(UsageError, match="comes after resume"):
            add(buffer, ranks.rank, range(1))

    fine(on_ranks(2, train))
    with pytest.raises(ConfigError, match="directory="):
        fine(on_ranks(1, lambda ranks: TrajectoryBuffer(ranks=ranks)))


def test_another_kind_of_buffer_is_refused(tmp_path: Path) -> None:
    save_some(tmp_path, 2)
    with TrajectoryBuffer(directory=tmp_path) as buffer, pytest.raises(UsageError, match="of trajectories of ranks"):
        buffer.resume()


def test_a_save_on_request_of_one_rank_is_made_by_all(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> int:
        asked = {"save_every_s": 1e-6} if ranks.rank == 1 else {}
        with made(tmp_path, ranks, **asked) as buffer:
            buffer.resume()
            for step in itertools.count(1):
                add(buffer, ranks.rank, range(step, step + 1))
                if buffer.save_due(step):
                    buffer.save(step, wait=True)
                    return step
        raise AssertionError

    steps = fine(on_ranks(3, train))
    assert len(set(steps)) == 1
    assert newest(tmp_path).manifest.step == steps[0]
    assert [each.episodes for each in newest(tmp_path).manifest.shards] == [steps[0]] * 3


class Full:
    """Files on a disk that is full."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def create(self, path: str) -> int:
        raise OSError(28, "no space left", path)


@pytest.mark.parametrize("before", [True, False], ids=["saved before", "the first save"])
@pytest.mark.parametrize("auto_save", [True, False])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(
    tmp_path: Path, failing: int, auto_save: bool, before: bool
) -> None:
    def train(ranks: Ranks) -> tuple[str, list[int]]:
        with made(tmp_path, ranks, auto_save=auto_save) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.resume()
            add(buffer, ranks.rank, range(4))
            if before:
                buffer.save(0, wait=True)
            store: Any = buffer._saver.store
            add(buffer, ranks.rank, range(4, 8))
            buffer._shelving.join()
            files = store.files
            if ranks.rank == failing:
                store.files = Full(files)
            with pytest.raises((WriteFailed, RankFailed)) as failed:
                buffer.save(1, wait=True)
            store.files = files
            counter.step = 10
            add(buffer, ranks.rank, range(8, 10))
            buffer.save(1, wait=True)
            return str(failed.value), held(buffer)

    found = fine(on_ranks(3, train))
    for rank, (said, _) in enumerate(found):
        assert "no space left" in said
        assert rank == failing or f"rank {failing}" in said or "rank 0" in said
    assert newest(tmp_path).manifest.step == 1
    assert verify(str(tmp_path)).whole
    assert resumed(tmp_path, 3) == [numbers for _, numbers in found]
    assert resumed(tmp_path, 2) == shared([numbers for _, numbers in found], 2)


def test_ranks_draw_from_streams_of_their_own(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> Any:
        with made(tmp_path, ranks) as buffer:
            buffer.resume()
            add(buffer, 0, range(5))
            first = draws(buffer, 5)
            buffer.save(1, wait=True)
            return first

    def go_on(ranks: Ranks) -> Any:
        with made(tmp_path, ranks) as buffer:
            buffer.resume(rebalance=True)
            return draws(buffer, 5)

    first, second = fine(on_ranks(2, train))
    assert first != second
    later, other = fine(on_ranks(2, go_on))
    assert later != other


def test_what_a_rank_has_beside_the_generation_is_not_removed_by_the_first_one(tmp_path: Path) -> None:
    """It was written after the moment that the save is of, and before all of that was."""

    def train(ranks: Ranks) -> list[int]:
        with made(tmp_path, ranks, auto_save=True, keep=1) as buffer:
            buffer.resume()
            add(buffer, ranks.rank, range(4))
            store: Any = buffer._saver.store
            with store.writing:
                saving = buffer.save(1)
                add(buffer, ranks.rank, range(4, 20))
                buffer._shelving._write(store, buffer._own.shelf)
                store.sync()
                buffer._shelving.synced(buffer._own.shelf)
            saving.wait()
            assert buffer.get_stats()["cache_size"] < 20
            return held(buffer)

    small = functools.partial(StoreWriter, segment_bytes=1 << 14)
    with mock.patch("pipeline.replay.store.StoreWriter", small):
        assert fine(on_ranks(2, train)) == [[number_of(rank, count) for count in range(20)] for rank in range(2)]


def test_what_is_added_during_a_save_is_wholly_in_it_or_wholly_out(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> list[int]:
        with made(tmp_path, ranks, auto_save=True) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.resume()
            counter.step = 10
            add(buffer, ranks.rank, range(30))
            saving = buffer.save(1)
            there = len(buffer)
            add(buffer, ranks.rank, range(30, 40))
            saving.wait()
            return held(buffer)[:there]

    found = fine(on_ranks(2, train))
    assert resumed(tmp_path, 2) == found
    assert resumed(tmp_path, 3) == shared(found, 3)
