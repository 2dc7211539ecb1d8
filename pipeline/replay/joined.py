"""A buffer that another process has built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from pipeline.buffer.transitions.shared.files import Files
from pipeline.config import ReplayOptions
from pipeline.errors import UsageError
from pipeline.replay.buffer import ReplayBuffer
from pipeline.replay.rooms import SharedRoom


class JoinedReplayBuffer(ReplayBuffer):
    """What :meth:`~pipeline.ReplayBuffer.join` returns: everything but saving."""

    def __init__(self, options: ReplayOptions, files: Files) -> None:
        """Args:
        options: of the buffer.
        files: where it lies.
        """
        self._begin(options, SharedRoom(options, files), None)

    def attach(self, **objects: Any) -> NoReturn:
        """It is the owner that saves.

        Raises:
            UsageError: always.
        """
        raise UsageError("a shared buffer is saved and resumed, with what is attached, by the process that built it")

    def load_state_dict(self, state: Mapping[str, Any], *, continue_episodes: bool = False) -> NoReturn:
        """See :meth:`attach`."""
        self.attach()

    def save(self, step: int, *, wait: bool = False) -> NoReturn:
        """See :meth:`attach`."""
        self.attach()

    def resume(
        self,
        step: int | None = None,
        *,
        continue_episodes: bool = False,
        verify: Literal["full", "lazy"] = "full",
        rebalance: bool = False,
        evict_oldest: bool = False,
        allow_partial: bool = False,
    ) -> NoReturn:
        """See :meth:`attach`."""
        self.attach()
