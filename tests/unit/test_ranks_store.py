"""How ranks speak through a store, which stays its owner's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from pipeline.conversation import Conversation
from pipeline.distributed import Ranks
from pipeline.errors import RankFailed, RankLost
from tests.support.ranks import fine, on_ranks

group: Any = torch.distributed
HOUR = timedelta(hours=1)


def of_process() -> Any:
    return group.HashStore()


def with_prefix() -> Any:
    return group.PrefixStore("a", group.PrefixStore("b", group.HashStore()))


def of_network() -> Any:
    return group.TCPStore("127.0.0.1", 0, 1, True)


def with_prefix_of_network() -> Any:
    return group.PrefixStore("a", of_network())


@pytest.mark.parametrize("make", [of_process, with_prefix, of_network, with_prefix_of_network])
def test_the_store_keeps_its_own_timeout(make: Callable[[], Any]) -> None:
    store = make()
    store.set_timeout(HOUR)
    ranks = Ranks(store, 0, 1, timeout_s=5)
    assert ranks.branch("a").together("b", lambda: 1) == [1]
    assert store.timeout == HOUR


def test_who_fails_before_an_inner_step_is_heard_in_it() -> None:
    """Others wait for what the first rank finds; it fails before it comes to say that."""

    def do(ranks: Ranks) -> str:
        speaking = Conversation(ranks, "test")

        def choose() -> Any:
            if ranks.first:
                raise LookupError("gone")
            return speaking.of_first("inner", lambda: 1)

        with pytest.raises(LookupError if ranks.first else RankFailed, match="gone") as caught:
            speaking.together("outer", choose)
        again = Conversation(ranks, "test")  # what is left of the one before does not disturb it
        assert again.of_first("inner", lambda: 2) == 2
        assert again.alike("both", lambda: 3) == 3
        return str(caught.value)

    _, *others = fine(on_ranks(3, do))
    assert all("rank 0 failed: LookupError: gone" in each for each in others)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_what_is_agreed_is_done_on_all_or_fails_on_all(victim: int) -> None:
    def do(ranks: Ranks) -> Any:
        speaking = Conversation(ranks, "test")
        assert speaking.agreed("first", lambda: ranks.rank) == ranks.rank
        assert speaking.together("all", lambda: ranks.rank) == [0, 1, 2]

        def fail() -> None:
            if ranks.rank == victim:
                raise LookupError("gone")

        with pytest.raises(LookupError if ranks.rank == victim else RankFailed, match="gone") as caught:
            speaking.agreed("second", fail, but=", but for this")
        return str(caught.value)

    for rank, said in enumerate(fine(on_ranks(3, do))):
        assert rank == victim or f"second: rank {victim} failed: LookupError: gone. Nothing was changed" in said
        assert rank == victim or said.endswith(f"rank {rank}, but for this")


def test_one_that_is_not_heard_from_is_lost_to_all() -> None:
    def do(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            return ""
        with pytest.raises(RankLost) as caught:
            Conversation(ranks, "test").agreed("what", lambda: None)
        return str(caught.value)

    first, second, _ = fine(on_ranks(3, do))
    assert "rank 2 was not heard from" in first
    assert "rank 2 was not heard from" in second


def test_ranks_that_are_at_different_steps_say_so() -> None:
    def do(ranks: Ranks) -> Any:
        with pytest.raises(RankFailed) as caught:
            Conversation(ranks, "test").together("one" if ranks.first else "other", lambda: None)
        return str(caught.value)

    assert any("All ranks call the same verbs in the same order" in each for each in fine(on_ranks(2, do)))
