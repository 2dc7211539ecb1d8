"""Where ranks share the order: reserves the draws that this rank claims next, beside the loop.

A turn of all ranks is run through in a thread, as a source may be slow to say how long it is, and ranks agree about
that through their store. What comes of it is recorded before anything of it is claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.distributed import Ranks
from pipeline.sampler import Block, TurnSampler
from pipeline.store.service import RunBlocking
from pipeline.wiring.state import RunState


class Reserver:
    """Asked when nothing is left to claim. One turn at a time."""

    def __init__(self, state: RunState, ranks: Ranks, in_thread: RunBlocking[Any]) -> None:
        self._state, self._ranks, self._in_thread = state, ranks, in_thread
        self._busy = False
        self.spawn: Callable[..., bool] = lambda function, name: False
        """Starts a task; returns False if the run has ended."""
        self.pump: Callable[[], None] = lambda: None
        """Lets attempts start."""

    @property
    def sampler(self) -> TurnSampler:
        """The run's; a resume puts another one in its place."""
        assert isinstance(self._state.sampler, TurnSampler)
        return self._state.sampler

    def ask(self) -> None:
        """Reserve more, unless that is being done, or the order is at its end."""
        if not self._busy and not self.sampler.ended:
            self._busy = True
            self._busy = self.spawn(self._reserve, "forebay reserving")

    async def _reserve(self) -> None:
        state, sampler = self._state, self.sampler
        try:
            while not sampler.ended and not sampler.reserved:
                block: Block = await self._in_thread(lambda: sampler.reserve(self._agreed))
                state.record(block.reserved)
                sampler.ended = block.ended
        except Exception as error:
            state.fail(error)
        finally:
            self._busy = False
        self.pump()
        state.changed.notify()  # a waiting trainer may now see that this was all

    def _agreed(self, task: str, epoch: int, found: int) -> int:
        """How long an epoch is: as the rank found it that came to it first."""
        length: int = self._ranks.claim(f"length/{task}/{epoch}", found)
        return length
