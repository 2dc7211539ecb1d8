"""How another process comes by a shared buffer."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from pipeline.buffer.transitions.shared.files import Files
from pipeline.config import ReplayOptions
from pipeline.errors import ConfigError
from pipeline.replay.rooms import Room, SharedRoom, of_members

if TYPE_CHECKING:
    from pipeline.replay.buffer import ReplayBuffer

# A process has a buffer once: record locks tell processes apart, and would let two of its own in together.
_here: weakref.WeakValueDictionary[tuple[int, tuple[int, int]], ReplayBuffer] = weakref.WeakValueDictionary()


class ReplayHandle:
    """What a process joins a shared buffer with: an argument for it, while it is started. See
    :meth:`~pipeline.ReplayBuffer.share`."""

    def __init__(self, options: ReplayOptions, files: Files) -> None:
        self._options, self._files = options, files

    @classmethod
    def of(cls, buffer: ReplayBuffer, room: Room) -> ReplayHandle:
        """Return the handle of a buffer.

        Raises:
            ConfigError: it is not shared.
        """
        if not isinstance(room, SharedRoom):
            raise ConfigError(
                "this buffer lies in the memory of its process; build it with storage='shared' to share it",
                option="storage",
            )
        _here[os.getpid(), room.files.identity] = buffer
        return cls(of_members(buffer.options), room.files)

    def join(self) -> ReplayBuffer:
        """See :meth:`~pipeline.ReplayBuffer.join`."""
        from pipeline.replay.joined import JoinedReplayBuffer

        here = (os.getpid(), self._files.identity)
        buffer = _here.get(here)
        if buffer is None:
            buffer = _here[here] = JoinedReplayBuffer(self._options, self._files)
        return buffer

    def __reduce__(self) -> Any:
        return ReplayHandle, (self._options, self._files)
