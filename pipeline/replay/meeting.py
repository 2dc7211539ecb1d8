"""The step at which all ranks save, though only one of them was asked.

Nobody waits: a rank that waited between two steps might be the one that another's all-reduce needs. Each calls
:meth:`Meeting.arrive` with a step that rises, all of them with the same steps, however far they are from each other.

1. A rank may pass the steps up to its *bound*. It writes the bound into the store, and then looks whether anybody has
   asked; only if nobody has, it goes on. It looks again at the first step beyond the bound, or earlier.
2. Who wants a save claims the key ``asked`` of this round, unless somebody has; two who ask are one.
3. Whoever finds it claimed reads all bounds and claims the key ``after`` with the highest; the first such claim counts.
   Everybody saves at its first step beyond ``after``. That ends the round, and the next one begins with a look.

Why no rank is beyond that step when it hears of it: let a rank have passed step s in this round without knowing of the
request. It wrote a bound of at least s, looked, and found nothing; so ``asked`` was claimed after that bound was
written. ``after`` is the highest of bounds that were read once ``asked`` was there: of this rank that bound, or one
that it wrote later, at a step t >= s, and then it is at least t. In either case ``after`` >= s. A rank that knows of
the request passes steps up to ``after`` alone. So nobody has passed a step beyond ``after``, and as the steps are the
same on all ranks, so is the first one beyond it.

Why nothing is lost and nobody hangs: each step of this is one call of the store. A rank that dies after it has claimed
``asked`` is not needed for the rest; the others save, and miss it there within the time limit of a save. One that dies
before has told nobody, and is missed likewise.

A look costs a message and a round trip to the store: 75 us over loopback, 25 of them the round trip; more between
machines. It is needed whatever triggers this rank has: another one may have been sent a signal. So that fast loops do
not feel it, nor the one process that serves the store for many ranks, the bound lies as many steps ahead as take 20 ms,
64 at the most; a loop whose steps take longer looks at each of them. A call without a look costs what it does without
ranks.
"""

from __future__ import annotations

import math
import threading
import time

import msgspec

from pipeline.distributed import Ranks

_LOOK_EVERY_S = 0.02
_MOST_AHEAD = 64


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is asked for."""

    rank: int
    reason: str
    stop: bool = False
    code: int = 0
    """Exit code, if it is to stop."""


class Meeting:
    """One rank's side of it. Its methods may be called from any thread."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._round = 0
        self._asked: Wish | None = None
        self._after = -1
        self._here: Wish | None = None
        self._bound = self._looked_at = -1
        self._looked = -math.inf
        self.last = -1
        """The step of the last call of :meth:`arrive`."""

    def arrive(self, step: int, wish: Wish | None) -> Wish | None:
        """Come to a step that is not below the one before. Return what was asked for if all ranks save here: again and
        again, until :meth:`end`.

        Raises:
            RankLost: the store cannot be reached.
        """
        with self._lock:
            self.last = step
            if self._here is None and (self._asked is not None or self._find(step, wish)) and step > self._after:
                self._here = self._asked
            return self._here

    def end(self) -> Wish | None:
        """Begin the next round if this is the step at which all ranks save; return what was asked for."""
        with self._lock:
            here = self._here
            if here is not None:
                self._round += 1
                self._asked = self._here = None
                self._bound, self._looked = -1, -math.inf
            return here

    def _find(self, step: int, wish: Wish | None) -> bool:
        """Whether anybody asks for a save; then :attr:`_asked` and :attr:`_after` say what, and after which step."""
        ranks = self._ranks
        asked, after = f"asked/{self._round}", f"after/{self._round}"
        if wish is None:
            now = time.monotonic()
            if step <= self._bound and now - self._looked < _LOOK_EVERY_S:
                return False
            bound = step + self._ahead(step, now)
            found = ranks.post_then_look(f"bound/{ranks.rank}", bound, asked)
            self._bound, self._looked_at, self._looked = bound, step, now
        else:  # the bound that stands covers what was passed: the step may be this one
            found = ranks.claim(asked, msgspec.to_builtins(wish))
        if found is None:
            return False
        decided = ranks.look(after)
        if decided is None:
            bounds = [ranks.look(f"bound/{rank}") for rank in range(ranks.size)]
            decided = ranks.claim(after, max((each for each in bounds if each is not None), default=-1))
        self._asked, self._after = msgspec.convert(found, Wish), decided
        return True

    def _ahead(self, step: int, now: float) -> int:
        """Return how many steps take as long as nobody needs to look."""
        rate = (step - self._looked_at) / max(now - self._looked, 1e-9)
        return min(_MOST_AHEAD, int(rate * _LOOK_EVERY_S))
