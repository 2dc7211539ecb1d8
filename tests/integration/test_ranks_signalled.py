"""SIGTERM to one of several ranks: all of them save at one step, and leave by the code that launchers know."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from tests.support.children import insist
from tests.support.gone import names
from tests.support.ranked import ROWS, Group, manifests, processes, serve, serve_and_train, train

SIZE = 3


@pytest.fixture(scope="module")
def server() -> Any:
    return serve()


def all_left_by_the_code(ranks: Group, directory: Path) -> None:
    assert ranks.ends() == [143] * SIZE
    newest = manifests(directory)[-1]
    assert newest.world_size == SIZE
    assert [shard.rank for shard in newest.shards] == list(range(SIZE))
    assert [shard.rows for shard in newest.shards] == [ROWS * newest.step] * SIZE
    assert verify(str(directory)).whole


def hear(ranks: Group, rank: int, what: Any) -> None:
    while (said := ranks.ranks[rank].hear()) != what:
        assert not isinstance(said, tuple), said[1]


@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_in_the_middle_of_a_step(tmp_path: Path, server: Any, rank: int) -> None:
    with processes(server, train, tmp_path, SIZE) as ranks:
        ranks.start({})
        hear(ranks, rank, 3)
        ranks.ranks[rank].send(signal.SIGTERM)
        all_left_by_the_code(ranks, tmp_path)
    assert len(manifests(tmp_path)) == 1


def test_two_that_get_one_at_the_same_time_make_one_save(tmp_path: Path, server: Any) -> None:
    with processes(server, train, tmp_path, SIZE) as ranks:
        ranks.start({})
        hear(ranks, 1, 3)
        for each in ranks.ranks:
            each.send(signal.SIGTERM)
        all_left_by_the_code(ranks, tmp_path)
    assert len(manifests(tmp_path)) == 1


@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_in_the_middle_of_a_save(tmp_path: Path, server: Any, rank: int) -> None:
    with processes(server, train, tmp_path, SIZE) as ranks:
        ranks.start({"quiet": True, "every": 20}, of_rank={rank: ({"quiet": True, "every": 20, "gate": 0},)})
        hear(ranks, rank, "writes")
        ranks.ranks[rank].send(signal.SIGTERM)
        ranks.ranks[rank].pipe.send("go on")
        all_left_by_the_code(ranks, tmp_path)
    first, second = manifests(tmp_path)[:2]
    assert first.step == 20
    assert second.step > 20


@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_in_the_middle_of_resume(tmp_path: Path, server: Any, rank: int) -> None:
    """It waits there for another rank, and hears of the signal all the same."""
    with processes(server, train, tmp_path, SIZE) as ranks:
        ranks.start({"known": True}, of_rank={1: ({"known": True, "hold": True},)})
        waits_in_resume(ranks, rank)
        ranks.ranks[rank].send(signal.SIGTERM)
        ranks.ranks[1].pipe.send("go on")
        all_left_by_the_code(ranks, tmp_path)
    assert len(manifests(tmp_path)) == 1


def waits_in_resume(ranks: Group, rank: int) -> None:
    """Return when a rank has told what it has found, and waits for the others to do so."""
    ranks.told(f"forebay/1/buffer/1/resume/0/0/{rank}")


def test_a_second_one_in_the_middle_of_resume_leaves_at_once(tmp_path: Path, server: Any) -> None:
    with processes(server, train, tmp_path, 2) as ranks:
        ranks.start({"known": True}, of_rank={1: ({"known": True, "hold": True},)})
        waits_in_resume(ranks, 0)
        insist(ranks.ranks[0].process, signal.SIGTERM)
        ranks.gone(0)
        assert ranks.ranks[0].process.exitcode == -signal.SIGTERM
        ranks.ranks[1].pipe.send("go on")
        assert ranks.ends()[1] == 1
    assert not manifests(tmp_path)


def test_a_second_one_leaves_at_once_and_the_last_generation_stands(tmp_path: Path, server: Any) -> None:
    with processes(server, train, tmp_path, SIZE) as ranks:
        how = {"quiet": True, "every": 20}
        ranks.start(how, of_rank={1: (how | {"gate": 1},)})
        hear(ranks, 1, "writes")
        insist(ranks.ranks[1].process, signal.SIGTERM)
        ranks.gone(1)
        assert ranks.ends() == [1, -signal.SIGTERM, 1]
        said = [str(ranks.ranks[rank].rest()) for rank in (0, 2)]
    assert all(names(1, each) or "Connection closed by peer" in each for each in said)
    assert [saved.step for saved in manifests(tmp_path)] == [20]
    assert verify(str(tmp_path)).whole


def test_the_rank_that_serves_the_store_leaves_last(tmp_path: Path) -> None:
    with processes(_Nowhere, serve_and_train, tmp_path, SIZE) as ranks:
        ranks.start({})
        port = ranks.ranks[0].hear()
        for each in ranks.ranks[1:]:
            each.pipe.send(port)
        hear(ranks, 1, 3)
        ranks.ranks[1].send(signal.SIGTERM)
        all_left_by_the_code(ranks, tmp_path)


class _Nowhere:
    port = 0
