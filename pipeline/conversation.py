"""What ranks do together step by step, where each may fail at any moment.

In :class:`~pipeline.distributed.Ranks` a word has a name, and who waits for one name does not hear that a rank has
failed before it came to tell that. Here the words of a rank follow each other, whatever they are about: its n-th is the
n-th that the others hear of it. So what it fails with is heard by whoever waits for it, whichever step that is at.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from pipeline.distributed import Ranks
from pipeline.errors import RankFailed, RankLost

T = TypeVar("T")
HOLDS = ", but for what is attached: it holds the checkpoint's state. resume() may be called again"
"""What is so where a resume failed on another rank after the states were loaded."""


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells."""

    what: str
    value: Any = None
    error: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    """How something went that was done on every rank."""

    failed: int | None = None
    """A rank that failed, and with what."""
    why: str = ""
    missing: list[int] = []
    """Ranks that were not heard from."""


class Conversation(Ranks):
    """The same ranks for one task, such as a resume. All ranks make theirs, and call its verbs in the same order; one
    that fails tells so once, by whichever verb it fails in. It belongs to one thread."""

    def __init__(self, ranks: Ranks, about: str) -> None:
        """Args:
        ranks: these ranks.
        about: what it is about; the n-th conversation about that is with the n-th of the others.
        """
        vars(self).update(vars(ranks))
        self._name = f"{ranks._name}/{about}/{ranks._next(about)}"
        self._told = 0
        self._over = False  # it has told what it failed with
        self._heard = [0] * self.size
        self._but = ""

    def agreed(self, what: str, do: Callable[[], T], *, but: str = "") -> T:
        """Do something on every rank, and return what it gave on this one, once it is done on all. The first rank
        hears the others and tells how it went: two words for each rank, where :meth:`together` has all hear all.

        Args:
            what: what it is, for messages.
            do: what to do.
            but: what an error on another rank has to add to "nothing was changed on this one".

        Raises:
            RankFailed: it failed on another rank, which the message names.
            RankLost: a rank was not heard from in time.
            Exception: it failed on this rank, with this.
        """
        self._but = but
        try:
            value = do()
            if not self.first:
                self.tell(what)
            found = self._of_others(what) if self.first else self._of_first(what)
        except BaseException as error:
            self.tell(what, error=error)
            raise
        if self.first:
            self.tell(what, msgspec.to_builtins(found))
        if found.missing:
            raise self._not_heard(what, found.missing)
        if found.failed is not None:
            raise self._failed(what, found.failed, found.why)
        return value

    def _of_others(self, what: str) -> Verdict:
        others, until = range(1, self.size), time.monotonic() + self.timeout_s
        for rank in others:
            left = range(rank, self.size)
            try:
                word = self._word(what, left, rank, until)
            except RankLost:
                missing = [each for each in left if not self.told(what, 0, each)]
                return Verdict(missing=missing or [rank])
            if word.error is not None:
                return Verdict(failed=rank, why=word.error)
        return Verdict()

    def _of_first(self, what: str) -> Verdict:
        found = msgspec.convert(self.hear(what, 0, [0], patience=2)[0], Verdict)
        self._heard[1:] = [count + 1 for count in self._heard[1:]]  # their words were for the first rank
        return found

    def tell(
        self, what: str, value: Any = None, *, error: BaseException | None = None, number: int | None = None
    ) -> int:
        if error is not None and self._over:
            return 0
        self._over = self._over or error is not None
        word = Word(what, value, None if error is None else f"{type(error).__name__}: {error}")
        key, raw = f"{self._name}/{self._told}/{self.rank}", msgspec.json.encode(word).decode()
        self._told += 1
        with contextlib.suppress(RankLost) if error is not None else contextlib.nullcontext():
            self._reach(lambda store: store.set(key, raw))
        return 0

    def hear(self, what: str, number: int, ranks: Sequence[int] | None = None, *, patience: int = 1) -> list[Any]:
        ranks = range(self.size) if ranks is None else ranks
        until, values = time.monotonic() + patience * self.timeout_s, []
        try:
            for at, rank in enumerate(ranks):
                word = self._word(what, ranks[at:], rank, until)
                if word.error is not None and rank != self.rank:
                    raise self._failed(what, rank, word.error)
                values.append(word.value)
        except BaseException as error:  # others may have heard all, and wait for what is next: this one may be stopped
            self.tell(what, error=error)
            raise
        return values

    def _word(self, what: str, ranks: Sequence[int], rank: int, until: float) -> Word:
        """Return the next word of a rank."""
        self._wait(what, 0, ranks, rank, until)
        key = self._key(what, 0, rank)
        word = msgspec.json.decode(self._reach(lambda store: store.get(key)), type=Word)
        self._heard[rank] += 1
        if word.what != what and word.error is None:
            raise RankFailed(
                f"{what}: rank {rank} is at {word.what!r} there. All ranks call the same verbs in the same order; look "
                f"for what differs between their scripts or versions. {self._unchanged()}"
            )
        return word

    def _failed(self, what: str, rank: int, why: str) -> RankFailed:
        return RankFailed(f"{what}: rank {rank} failed: {why}. {self._unchanged()}")

    def _unchanged(self) -> str:
        return f"{super()._unchanged()}{self._but}"

    def forget(self, what: str, number: int, ranks: Sequence[int]) -> None:
        """What is left of one conversation takes a few bytes."""

    def _key(self, what: str, number: int, rank: int) -> str:
        at = self._told - 1 if rank == self.rank else self._heard[rank]  # nobody hears all of its own
        return f"{self._name}/{at}/{rank}"
