"""Batches where several ranks train together: each has its share, and all have as many groups, or none has any.

For each batch there is one *round*. A rank waits until it can give its share, or never will, and then tells the first
rank what it has; when all have told, the first says what comes of it, and tells all of them how far the run is. So
nobody trains a step that another one has no batch for, and a request to save is answered by all at one step.

Nothing of this uses a collective. A rank that waits for its own rollouts gives signs of life, so that others wait with
it however long that takes; one that gives none is named after the time limit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from pipeline.buffer import Batch
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, EndOfSource, ForebayError, RankFailed, Starved, UsageError
from pipeline.ledger import BUFFERED, Lease
from pipeline.sampler import Progress
from pipeline.sampler.progress import joined, restore_in_place
from pipeline.store.service import RunBlocking
from pipeline.wiring.consuming import Consumer
from pipeline.wiring.rank_triggers import AnswerFirst, RankTriggers, Wish

BATCH, END, SAVE, AGAIN, STARVED = "batch", "end", "save", "again", "starved"
LOOK_EVERY_S = 1.0
"""How often a rank that waits for rollouts gives a sign of life, and looks for wishes. A store has no event to wait for
beside those that somebody sets."""
_SLICE_S = 5.0
"""Seconds that a thread waits at most before it looks whether the others live; it cannot be cut before."""
_OFFERS, _ANSWER = "batch", "batch of all"


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank can give to a batch."""

    step: int
    groups: int
    """Of the whole batch."""
    have: int
    progress: Progress
    known: bool = False
    """Whether the rank may save now: what the weights hold is known."""
    called: bool = False
    """It has not got its share yet, and does not wait for it: somebody wishes to save."""
    wish: Wish | None = None
    starved: str = ""
    """Why it will never have its share, if it starves."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What comes of all offers."""

    kind: str
    progress: Progress
    count: int = 0
    """Groups of the batch on each rank."""
    wishes: list[Wish] = []
    why: str = ""


def answer(offers: Sequence[Offer]) -> Answer:
    """Return what comes of the offers of all ranks.

    Raises:
        RankFailed: they are not of one batch.
    """
    for rank, each in enumerate(offers):
        if (each.step, each.groups) != (offers[0].step, offers[0].groups):
            raise RankFailed(
                f"get_batch({each.groups}) for step {each.step} on rank {rank} met get_batch({offers[0].groups}) for "
                f"step {offers[0].step} on rank 0: all ranks ask for the same batches, in the same order. None was made"
            )
    progress = joined([each.progress for each in offers])
    wishes = [each.wish for each in offers if each.wish is not None]
    if wishes and all(each.known for each in offers):
        return Answer(SAVE, progress, wishes=wishes)
    if any(each.called for each in offers):
        return Answer(AGAIN, progress)
    starved = [f"rank {rank}: {each.starved}" for rank, each in enumerate(offers) if each.starved]
    if starved:
        return Answer(STARVED, progress, why=starved[0])
    have = [each.have for each in offers]
    if not min(have):
        return Answer(END, progress, why=", ".join(f"rank {rank} has {count}" for rank, count in enumerate(have)))
    return Answer(BATCH, progress, min(have))


class RankConsumer(Consumer):
    """Hands out this rank's share of batches. The verbs are called by all ranks, in the same order."""

    ranks: Ranks
    triggers: RankTriggers
    listen: RunBlocking[Any]
    """Does what blocks and may be left behind in a thread."""
    round = 0
    """The number of the batch that is met for next."""
    waits = False
    """Whether this rank waits for its share."""
    heard = False
    """Whether another rank wishes for something."""
    answered = 0
    """How many wishes of all ranks were answered."""
    over = False
    """Whether the first rank has given this round up, though this one has told nothing yet."""
    _told = -1  # the last round for which what this rank has is known
    _sent = -1  # the last one for which the others can have heard from it
    _offer: Offer | None = None
    _found: tuple[int, Answer] | None = None
    _deaf = False  # a wish could not be answered: the batch comes first

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._one = threading.Lock()
        self.of_all = Progress()
        """The progress of all ranks together, as of the last round or save."""

    @property
    def progress(self) -> Progress:
        """How far all ranks are together, as of the last round or save."""
        return self.of_all

    async def get_batch(self, groups: int) -> Batch:
        """Wait for this rank's share of a batch of ``groups`` groups, and lease it for the next step.

        Raises:
            ConfigError: ``groups`` cannot be shared out evenly.
            EndOfSource: a rank has nothing left to give.
            RankFailed, RankLost: another rank failed, or was not heard from.
            Starved, RolloutFailed: as :meth:`Consumer.get_batch`.
        """
        state = self._state
        if state.failure is not None and self._told != self.round:
            await self._tell_error(state.failure)
        share = self._share(groups)
        begun = state.clock.now()
        await anyio.lowlevel.checkpoint()
        self._check(share)
        state.asked = state.progress.batch_groups = share
        state.limit = None
        while (found := await self._meet(groups, share)).kind == AGAIN:
            self._deaf = True
        lease, repeated = self._took(found, share)
        self._deaf = False
        return await self._given(lease, repeated, begun)

    def _share(self, groups: int) -> int:
        """Return how many groups of a batch each rank gets."""
        size = self.ranks.size
        if groups.__class__ is int and groups > 0 and groups % size:
            raise ConfigError(
                f"groups={groups} is the size of the whole batch, which {size} ranks share evenly: ask for a multiple "
                f"of {size}",
                option="groups",
            )
        if self.waits:
            raise UsageError("get_batch is being waited for already; one trainer takes one batch at a time")
        share = groups // size if groups.__class__ is int else groups
        self._check(share)
        return share

    def _took(self, found: Answer, share: int) -> tuple[Lease, bool]:
        """Do what all ranks have agreed; return this rank's part of the batch, and whether it is one of before."""
        state, step = self._state, self._state.ledger.next_step
        if found.kind == SAVE:
            self.answered += 1
            self.heard = False
            for wish in found.wishes:
                self.triggers.agree(wish, own=wish.rank == self.ranks.rank)
            raise AnswerFirst
        if found.kind == STARVED:
            raise Starved(found.why)
        if found.kind == END:
            left = state.ledger.count(BUFFERED)
            kept = f". The {left} of this rank stay in the run, and are trained after another resume()" if left else ""
            raise EndOfSource(f"step {step}: every source is at its end; {found.why} groups left to train{kept}")
        repeated = self._repeat(step, found.count)
        return (self._lease(step, found.count), False) if repeated is None else (repeated, True)

    # -- a round -------------------------------------------------------------------------------------------------

    async def _meet(self, groups: int, share: int) -> Answer:
        """Tell what this rank has, and return what comes of what all have. If it is cut, the next call goes on.

        Raises:
            RankFailed: another rank failed.
            RankLost: one has given no sign of life for as long as the time limit.
        """
        ranks, number = self.ranks, self.round
        if self._told != number:
            try:
                self._offer = await self._offered(groups, share)
            except ForebayError as error:
                await self._tell_error(error)
                raise
            self._told = number
        waited, beats = dict.fromkeys(range(ranks.size), 0.0), dict[int, Any]()
        self.waits = True
        try:
            while not isinstance(found := await self.listen(partial(self._exchanged, number)), Answer):
                self.raise_failure()
                signs = await self._in_thread(partial(self._signs, found))
                for rank, sign in signs.items():
                    alive = sign is not None and sign[0] == number and sign != beats.get(rank)
                    waited[rank] = 0.0 if alive else waited[rank] + self._slice_s
                    beats[rank] = sign
                late = [rank for rank in found if waited[rank] >= ranks.timeout_s]
                if late:
                    lost = ranks.lost(_OFFERS, late)
                    if ranks.first:
                        await self._in_thread(partial(ranks.tell, _ANSWER, error=lost, number=number))
                        self._sent = number
                    raise lost
        finally:
            self.waits = False
        self.round = number + 1
        restore_in_place(self.of_all, found.progress)
        return found

    @property
    def _slice_s(self) -> float:
        return min(_SLICE_S, self.ranks.timeout_s / 4)

    def _exchanged(self, number: int) -> Answer | list[int]:
        """Return what comes of a round, or who has not been heard from after a while. Blocks; a thread that was left
        behind in here may still be at it."""
        with self._one:
            if self._found is None or self._found[0] != number:
                found = self._gathered(number) if self.ranks.first else self._heard(number)
                if not isinstance(found, Answer):
                    return found
                self._found = (number, found)
            return self._found[1]

    def _gathered(self, number: int) -> Answer | list[int]:
        """On the first rank: hear the others, and tell them what comes of it."""
        ranks, others = self.ranks, range(1, self.ranks.size)
        missing = ranks.within(_OFFERS, number, others, self._slice_s) if others else []
        try:
            told = ranks.hear(_OFFERS, number, [rank for rank in others if rank not in missing])
            if missing:
                return missing
            assert self._offer is not None
            found = answer([self._offer, *(msgspec.convert(each, Offer) for each in told)])
        except ForebayError as error:
            ranks.tell(_ANSWER, error=error, number=number)
            self._sent = number
            raise
        if others:
            ranks.tell(_ANSWER, msgspec.to_builtins(found), number=number)
            self._sent = number
            ranks.forget(_OFFERS, number, others)
            ranks.forget(_ANSWER, number - 1, [0])  # who offers has heard what came of the round before
        return found

    def _heard(self, number: int) -> Answer | list[int]:
        """On the others: tell the first, and hear what it says."""
        ranks = self.ranks
        if self._sent != number:
            ranks.tell(_OFFERS, msgspec.to_builtins(self._offer), number=number)
            self._sent = number
        missing = ranks.within(_ANSWER, number, [0], self._slice_s)
        return missing or msgspec.convert(ranks.hear(_ANSWER, number, [0])[0], Answer)

    def _signs(self, missing: Sequence[int]) -> dict[int, Any]:
        return {rank: self.ranks.look(f"beat/{rank}") for rank in missing}

    async def _tell_error(self, error: BaseException) -> None:
        """This rank has no part in the round: tell the others why."""
        number = self.round
        await self._in_thread(partial(self._tell_it, error, number))
        self._told, self.round = number, number + 1

    def _tell_it(self, error: BaseException, number: int) -> None:
        self.ranks.tell(_ANSWER if self.ranks.first else _OFFERS, error=error, number=number)

    def leave(self, error: BaseException) -> None:
        """This rank takes part in no round any more: tell the others. Blocks, but for the store alone."""
        number = self.round
        if self._sent != number:
            self._tell_it(error, number)
        if self._told == number:  # a thread that was left behind may still have it given a batch: to be its last
            self._tell_it(error, number + 1)

    # -- an offer --------------------------------------------------------------------------------------------------

    async def _offered(self, groups: int, share: int) -> Offer:
        """Wait until it is known what this rank can give, and return that."""
        state, step = self._state, self._state.ledger.next_step
        have = share
        if not self._repeats(step, share):
            state.wanted, self.waits = share, True
            try:
                state.expire_stale()
                self._pool().pump()
                await state.changed.wait_for(lambda: self._answer(share) or self._called or self.over)
            finally:
                state.wanted, self.waits = 0, False
            if self.over:
                await self._in_thread(lambda: self.ranks.hear(_ANSWER, self.round, [0]))
            have = next(count for count in range(share, -1, -1) if state.buffer.ready(count))
        self.raise_failure()
        called, starved = False, ""
        if have < share:
            called = self._called and not self._nothing_comes()
            if not called and (state.weights_failed or not self._producer.drained):
                starved = self._why_starved(step, share)
        progress = state.refresh_progress()
        return Offer(step, groups, have, progress, self.triggers.known, called, self.triggers.wished(), starved)

    @property
    def _called(self) -> bool:
        """Whether the others are to be met at once, as one of all ranks is asked for something and can answer now."""
        return (self.heard or self.triggers.wish is not None) and not self._deaf and self.triggers.known

    async def keep_looking(self) -> None:
        """While this rank waits: give signs of life, and look for what the others wish for; tell what this one does."""
        count = 0
        while True:
            if self.waits:
                count += 1
                try:
                    await self._look(count)
                except ForebayError as error:
                    self._state.fail(error)
                    return
            await anyio.sleep(min(LOOK_EVERY_S, self.ranks.timeout_s / 4))

    async def _look(self, count: int) -> None:
        ranks, wish, number, key = self.ranks, self.triggers.wished(), self.round, f"wish/{self.answered}"

        def look() -> tuple[Any, bool]:
            if wish is not None:
                ranks.claim(key, msgspec.to_builtins(wish))
            found = ranks.post_then_look(f"beat/{ranks.rank}", [number, count], key)
            return found, self._told != number and not ranks.first and ranks.told(_ANSWER, number, 0)

        found, over = await self._in_thread(look)
        self.heard = self.heard or (found is not None and key == f"wish/{self.answered}")
        self.over = over and number == self.round and self._told != number
        if self.heard or self.over:
            self._state.changed.notify()
