"""One buffer, of which each rank has a shard, in one folder."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.config import Prioritized
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, RankFailed, RankLost, RanksError, UsageError, WriteFailed
from pipeline.replay import ReplayBuffer, TrajectoryBuffer
from pipeline.replay.episode_ids import MOST_RANKS, prefix_of
from pipeline.store.files import OsFiles
from pipeline.store.layout import Layout
from tests.support.ranks import at_once, fine, on_ranks, ranks_of

SELECTS: list[Any] = ["uniform", Prioritized(alpha=0.6, beta=0.4)]


def rows(rank: int, begin: int, count: int) -> dict[str, np.ndarray]:
    uid = np.arange(begin, begin + count) + 1_000_000 * rank
    return {"obs": np.stack([uid, uid * 2], 1).astype(np.float32), "uid": uid, "done": uid % 7 == 6}


def fill(buffer: ReplayBuffer, rank: int, begin: int, count: int) -> None:
    buffer.extend(rows(rank, begin, count))
    if buffer.drawer.takes_priorities:
        keys = buffer.ring.keys()[-count:]
        buffer.update_priorities(keys, np.abs(np.sin(keys)) + 0.1)


def draws(buffer: ReplayBuffer, count: int = 50) -> list[Any]:
    found = [buffer.sample(8) for _ in range(count)]
    return [(each["uid"].tolist(), each.weights.tolist()) for each in found]


class Full:
    """Files on a disk that is full."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def create(self, path: str) -> int:
        raise OSError(28, "no space left", path)


def steps_of(directory: Path) -> list[int]:
    layout = layout_of(directory)
    return [each.manifest.step for each in find_generations(layout, layout.read_run().run_id).complete]  # type: ignore[union-attr]


def layout_of(directory: Path) -> Layout:
    return Layout(str(directory))


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_goes_on_from_its_own_shard_to_the_last_bit(tmp_path: Path, size: int, select: Any) -> None:
    def train(ranks: Ranks) -> list[Any]:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, 3.0 if ranks.first else 5.0)
        with ReplayBuffer(100, directory=tmp_path, seed=3, select=select, ranks=ranks) as buffer:
            buffer.attach(model=model)
            assert buffer.resume().generation is None
            fill(buffer, ranks.rank, 0, 60 + 30 * ranks.rank)
            draws(buffer, 3)
            buffer.save(1, wait=True)
            fill(buffer, ranks.rank, 200, 10)
            buffer.save(2, wait=True)
            return draws(buffer)

    def go_on(ranks: Ranks) -> list[Any]:
        model = torch.nn.Linear(2, 2)
        with ReplayBuffer(100, directory=tmp_path, seed=3, select=select, ranks=ranks) as buffer:
            buffer.attach(model=model)
            resumed = buffer.resume()
            assert (resumed.step, resumed.rows) == (2, min(100, 70 + 30 * ranks.rank))
            assert torch.all(model.weight == 3.0)  # the first rank's, on all of them
            return draws(buffer)

    then = fine(on_ranks(size, train))
    assert fine(on_ranks(size, go_on)) == then
    assert size == 1 or then[0] != then[1]
    newest = find_generations(layout_of(tmp_path), layout_of(tmp_path).read_run().run_id).complete[-1].manifest  # type: ignore[union-attr]
    assert newest.world_size == size
    assert [shard.rank for shard in newest.shards] == list(range(size))
    assert [shard.rows for shard in newest.shards] == [min(100, 70 + 30 * rank) for rank in range(size)]


def test_rows_are_written_once_and_what_nobody_needs_goes(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        with ReplayBuffer(64, directory=tmp_path, keep=1, ranks=ranks) as buffer:
            buffer.resume()
            for step in range(1, 9):
                buffer.extend(rows(ranks.rank, 64 * step, 64))
                buffer.save(step, wait=True)

    fine(on_ranks(3, train))
    found = find_generations(layout_of(tmp_path), layout_of(tmp_path).read_run().run_id)  # type: ignore[union-attr]
    assert [each.manifest.step for each in found.complete] == [8]
    listed = {info.name for info in found.complete[0].manifest.segments}
    assert {int(name.split("-")[1]) for name in listed} == {0, 1, 2}
    assert listed == set(layout_of(tmp_path).list_segments())


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(tmp_path: Path) -> None:
    class Model:
        value, broken = 1, False

        def state_dict(self) -> dict[str, int]:
            if self.broken:
                raise OSError("this rank's own trouble")
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def train(ranks: Ranks, failing: int) -> tuple[str, int]:
        model = Model()
        with ReplayBuffer(64, directory=tmp_path / str(failing), ranks=ranks) as buffer:
            buffer.attach(model=model)
            buffer.resume()
            buffer.extend(rows(ranks.rank, 0, 10))
            buffer.save(1, wait=True)
            message = ""
            if failing == 0:
                model.broken = ranks.first
            elif ranks.rank == failing:  # its next segment cannot be made
                buffer._saver.store.files = Full(buffer._saver.store.files)  # type: ignore[union-attr]
            buffer.extend(rows(ranks.rank, 10, 10))
            try:
                buffer.save(2, wait=True)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
            model.broken = False
            if ranks.rank == failing and failing:
                buffer._saver.store.files = buffer._saver.store.files.files  # type: ignore[union-attr]
            buffer.save(3, wait=True)
            return message, len(buffer)

    for failing in (0, 2):
        found = fine(on_ranks(3, lambda ranks, failing=failing: train(ranks, failing)))  # type: ignore[misc]
        for rank, (message, _) in enumerate(found):
            own = "this rank's own trouble" if failing == 0 else "no space left"
            assert own in message, (rank, message)
            assert "No such file" not in message
            assert ("RankFailed" in message) == (rank != failing)
            assert rank == failing or f"rank {failing}" in message or "rank 0" in message
        assert steps_of(tmp_path / str(failing)) == [1, 3]
        folders = os.listdir(layout_of(tmp_path / str(failing)).generations)
        assert not [name for name in folders if name.endswith(".part")]


@pytest.mark.parametrize("full", [0, 1])
def test_a_failed_save_of_which_ranks_are_told_at_different_verbs_fails_no_later_one(tmp_path: Path, full: int) -> None:
    """The one is told by save_due, the other by its next save; if that saved nothing, it would fail the next one of
    the first, which would be told by its next save, and so on."""

    def train(ranks: Ranks) -> list[str]:
        said = []
        with ReplayBuffer(64, directory=tmp_path, keep=None, ranks=ranks) as buffer:
            buffer.resume()
            store = buffer._saver.store
            for step in range(1, 8):
                buffer.extend(rows(ranks.rank, 4 * step, 4))
                if ranks.rank == full and store is not None:
                    store.files = Full(store.files) if step == 2 else getattr(store.files, "files", store.files)
                try:
                    saving = buffer.save(step)
                    saving.wait_until_done()
                    if step == 2 and ranks.rank == 0:
                        buffer.save_due(step)
                except OSError as error:
                    said.append(f"{step}: {type(error).__name__}")
                except RankFailed as error:
                    said.append(f"{step}: {type(error).__name__}")
        return said

    first, second = fine(on_ranks(2, train))
    kinds = ["WriteFailed", "RankFailed"]
    assert (first, second) == ([f"2: {kinds[full]}"], [f"3: {kinds[1 - full]}"])
    assert steps_of(tmp_path) == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("verb", ["create", "sync_directory"])
def test_who_cannot_write_because_the_first_rank_has_given_up_tells_the_cause(tmp_path: Path, verb: str) -> None:
    gone = threading.Event()

    class Waits(OsFiles):
        def create(self, path: str) -> int:
            return self._wait("create", path) or super().create(path)

        def sync_directory(self, path: str) -> None:
            self._wait("sync_directory", path)
            super().sync_directory(path)

        def _wait(self, what: str, path: str) -> int:
            if what == verb and "shards" in path:
                gone.wait()
            return 0

    def train(ranks: Ranks) -> str:
        files = OsFiles() if ranks.first else Waits()
        with ReplayBuffer(64, directory=tmp_path, ranks=ranks, files=files) as buffer:
            buffer.resume()
            if ranks.first:
                buffer._saver.store.files = Full(files)  # type: ignore[union-attr]
            buffer.extend(rows(ranks.rank, 0, 4))
            saving = buffer.save(1)
            if ranks.first:
                saving.wait_until_done()
                gone.set()
            with pytest.raises((WriteFailed, RankFailed)) as failed:
                saving.wait()
            return str(failed.value)

    first, second = fine(on_ranks(2, train))
    assert "no space left" in first
    assert "save: rank 0 failed: WriteFailed" in second
    assert "no space left" in second


def test_a_second_buffer_of_the_same_ranks_does_not_hear_what_the_first_one_told(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> str:
        with ReplayBuffer(64, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()
            buffer.save(1, wait=True)
        try:
            with ReplayBuffer(64, directory=tmp_path, ranks=ranks) as buffer:
                assert buffer.resume().step == 1
                if not ranks.first:
                    raise LookupError("left the second one")
                buffer.save(1, wait=True)
        except (LookupError, RankFailed) as error:
            return str(error)
        return ""

    first, second = fine(on_ranks(2, train))
    assert first.startswith("save part: rank 1 failed: LookupError: left the second one")
    assert second == "left the second one"


def test_what_ranks_have_told_does_not_stay_in_the_store(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> list[int]:
        store: Any = ranks._given
        kept = []
        with ReplayBuffer(64, directory=tmp_path, save_every=1, ranks=ranks) as buffer:
            buffer.resume()
            for step in range(1, 13):
                buffer.extend(rows(ranks.rank, 4 * step, 4))
                assert buffer.save_due(step)
                buffer.save(step, wait=True)
                ranks.all("counted")
                kept.append(store.num_keys())
                ranks.all("counted")
        return kept

    kept = fine(on_ranks(3, train))[0]
    assert max(kept[3:]) - min(kept[3:]) <= 6, kept  # whether the others have said yet that they heard


def test_the_first_rank_waits_for_the_others_to_close(tmp_path: Path) -> None:
    """Its process may serve the store, which they still need."""
    order: list[int] = []
    begun = threading.Event()

    def train(ranks: Ranks) -> None:
        buffer = ReplayBuffer(64, directory=tmp_path, ranks=ranks)
        buffer.resume()
        if ranks.first:
            begun.set()
            buffer.close()
            order.append(ranks.rank)
        else:
            begun.wait()
            buffer.save_due(1)
            order.append(ranks.rank)
            buffer.close()

    fine(on_ranks(3, train))
    assert order[-1] == 0


def test_an_error_is_not_hidden_by_a_store_that_is_gone() -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            return amount

        def clone(self) -> Gone:
            return self

        def _fails(self, *given: Any) -> Any:
            raise RuntimeError("Broken pipe")

        set = get = check = wait = compare_set = delete_key = _fails

    ranks: Any = Ranks(Gone(), 1, 2)
    with pytest.raises(ValueError, match="mine"):
        ranks.together("load", lambda: int("mine"))
    with pytest.raises(RankLost, match=r"does not answer \(Broken pipe\)"):
        ranks.together("load", lambda: 1)


def test_what_comes_in_the_last_moment_has_come() -> None:
    given: Any = ranks_of(1)[0]._given

    class Late:
        def clone(self) -> Late:
            return self

        def wait(self, keys: list[str], limit: timedelta) -> None:
            given.set(keys[0], '["value"]')
            raise RuntimeError("Wait timeout")

        def __getattr__(self, name: str) -> Any:
            return getattr(given, name)

    late: Any = Late()
    assert Ranks(late, 0, 2, timeout_s=0.1).all("late", "own") == ["own", "value"]


def test_nobody_lingers_for_a_rank_that_was_lost() -> None:
    given: Any = ranks_of(1)[0]._given
    waited: list[list[str]] = []

    class Counted:
        def clone(self) -> Counted:
            return self

        def wait(self, keys: list[str], limit: timedelta) -> None:
            waited.append(keys)
            raise RuntimeError("Wait timeout")

        def __getattr__(self, name: str) -> Any:
            return getattr(given, name)

    counted: Any = Counted()
    ranks = Ranks(counted, 0, 3, timeout_s=0.1)
    with pytest.raises(RankLost):
        ranks.hear("save", ranks.tell("save"), [0, 1])
    assert len(waited) == 1
    ranks.linger("save", 0, [1, 2])
    assert [keys[0][-1] for keys in waited[1:]] == ["2"], "who was not waited for yet may be about to come"


def test_a_rank_that_does_not_save_is_named(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> str:
        with ReplayBuffer(64, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()
            if ranks.rank == 1:
                return ""
            buffer.extend(rows(ranks.rank, 0, 10))
            try:
                buffer.save(1, wait=True)
            except RanksError as error:
                return f"{type(error).__name__}: {error}"
            return "saved"

    first, second, third = fine(on_ranks(3, train))
    assert str(first).startswith("RankFailed: save part: rank 1 failed: ClosedError: the buffer was closed there")
    assert second == ""
    assert str(third).startswith("RankFailed: save: rank 0 failed: RankFailed: save part: rank 1 failed: ")
    assert not list((tmp_path / "generations").glob("*/manifest.json"))


def test_ranks_that_save_at_other_steps_are_told(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> str:
        with ReplayBuffer(64, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()
            try:
                buffer.save(5 + ranks.rank, wait=True)
            except RankFailed as error:
                return str(error)
            return "saved"

    found = fine(on_ranks(2, train))
    assert all("save(6) on rank 1 met save(5) on rank 0" in str(each) for each in found)


def test_another_folder_on_another_rank_is_refused(tmp_path: Path) -> None:
    def begin(ranks: Ranks) -> None:
        with ReplayBuffer(64, directory=tmp_path / str(ranks.rank), ranks=ranks) as buffer:
            buffer.resume()

    found = on_ranks(2, begin)
    assert "All ranks need the same folder" in str(found[0])
    assert "All ranks need the same folder" in str(found[1])


def test_what_the_first_rank_cannot_open_no_rank_does(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("something else")

    def begin(ranks: Ranks) -> None:
        with ReplayBuffer(64, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()

    first, second = on_ranks(2, begin)
    assert "no run of forebay" in str(first)
    assert isinstance(second, RankFailed)
    assert "rank 0 failed: NotARun" in str(second)


def test_options_that_are_in_the_way() -> None:
    ranks = ranks_of(1)[0]
    with pytest.raises(ConfigError, match="directory="):
        ReplayBuffer(5, ranks=ranks)
    with pytest.raises(ConfigError, match="storage"):
        ReplayBuffer(5, ranks=ranks, storage="shared", directory="unused")


@pytest.mark.parametrize("kind", [ReplayBuffer, TrajectoryBuffer])
def test_more_ranks_than_there_are_names_for_are_refused(tmp_path: Path, kind: Any) -> None:
    given = {"capacity": 5} if kind is ReplayBuffer else {"sample_window_size": 0}
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    assert len({prefix_of(1, rank) for rank in (0, MOST_RANKS - 1)} | {prefix_of(2, 0)}) == 3
    kind(**given, directory=tmp_path / "a", ranks=Ranks(store, MOST_RANKS - 1, MOST_RANKS))
    with pytest.raises(ConfigError, match="ranks=4097: 4096 ranks at the most"):
        kind(**given, directory=tmp_path / "b", ranks=Ranks(store, 0, MOST_RANKS + 1))


def test_a_run_of_a_buffer_without_ranks_is_not_taken_for_one_with(tmp_path: Path) -> None:
    with ReplayBuffer(5, directory=tmp_path) as plain:
        plain.extend(rows(0, 0, 3))
        plain.save(1, wait=True)
    first, second = on_ranks(2, lambda ranks: ReplayBuffer(5, directory=tmp_path, ranks=ranks).resume())
    assert isinstance(first, UsageError)
    assert isinstance(second, RankFailed)


def test_agreement() -> None:
    found = fine(on_ranks(3, lambda ranks: (ranks.all("a", ranks.rank), ranks.all("a", -ranks.rank))))
    assert found == [([0, 1, 2], [0, -1, -2])] * 3
    fine(on_ranks(3, lambda ranks: ranks.alike("b", lambda: 5)))
    for error in on_ranks(2, lambda ranks: ranks.alike("b", lambda: ranks.rank)):
        assert isinstance(error, RankFailed)
        assert "rank 1 has 1, and rank 0 has 0" in str(error)
    one, other = ranks_of(2)
    assert other.look("flag") is None
    one.post("flag", [4, "why"])
    assert other.look("flag") == [4, "why"]
    assert fine(on_ranks(4, lambda ranks: ranks.claim("place", ranks.rank) == ranks.claim("place", -1))) == [True] * 4
    assert one.branch("x").look("flag") is None
    lost = at_once([lambda: Ranks(one._given, 0, 3, timeout_s=0.2).all("alone", 1)])[0]
    assert isinstance(lost, RankLost)
    assert "ranks 1, 2 were not heard from within 0.2 s" in str(lost)


@pytest.mark.parametrize(
    ("rank", "size", "timeout_s"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0), (True, 2, 1), (0, 1, "5")]
)
def test_ranks_that_cannot_be(rank: int, size: int, timeout_s: Any) -> None:
    with pytest.raises(ConfigError):
        Ranks(ranks_of(1)[0]._given, rank, size, timeout_s=timeout_s)


def test_shards_are_verified_with_the_rest(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        with ReplayBuffer(64, directory=tmp_path, ranks=ranks) as buffer:
            buffer.resume()
            buffer.extend(rows(ranks.rank, 0, 40))
            buffer.save(1, wait=True)

    fine(on_ranks(3, train))
    found = verify(str(tmp_path))
    assert found.whole
    assert found.payloads == 3
    segment = next(path for path in (tmp_path / "segments").iterdir() if "-0002-" in path.name)
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.write_bytes(raw)
    (tmp_path / "generations" / "00000000" / "shards" / "0001" / "replay.json").unlink()
    damages = {damage.path for damage in verify(str(tmp_path)).damages}
    assert damages == {f"segments/{segment.name}", "generations/00000000/shards/0001/replay.json"}
