"""Running again what has become too old: which members of a group, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.ledger import Entry
from pipeline.records import Reopened
from pipeline.store.codec import read_header

if TYPE_CHECKING:
    from pipeline.wiring.state import RunState


def too_old_members(uid: int, reason: str, held: Mapping[int, tuple[bytes | None, Any]], least: int) -> Reopened | None:
    """Return the event that runs again only those members of a finished group whose version lies below ``least``.

    None if they all are, or if some were made before a crash: then what they are made of is not at hand, and the group
    is run again as a whole.
    """
    headers = [read_header(blob) for blob, _ in held.values() if blob is not None]
    kept = [header for header in headers if header.oldest >= least]
    if len(headers) < len(held) or not kept:
        return None
    return Reopened(
        uid,
        reason,
        sorted(header.member for header in headers if header.oldest < least),
        min(header.oldest for header in kept),
        max(header.newest for header in kept),
        sum(header.reward for header in kept),
        sum(header.tokens for header in kept),
    )


class Tail:
    """Groups to be run again that wait until ``size`` of them have gathered.

    They do not count as outstanding meanwhile, so new items take their places; and nobody waits for them: when the
    sources are at their end they are run as they are. A resume runs all that waits, and so them.
    """

    def __init__(self, state: RunState, requeue: Callable[[Entry], None], size: int) -> None:
        self._state, self._requeue, self._size = state, requeue, size
        self._groups: list[tuple[int, int]] = []  # (uid, life)

    def gather(self, entry: Entry) -> None:
        """Take in a group that was reopened; with the last one all are run."""
        self._groups.append((entry.uid, entry.life))
        self._state.gathered += 1
        if len(self._groups) >= self._size:
            self.release()

    def release(self) -> None:
        """Let all that have gathered be run."""
        entries = self._state.ledger.entries
        groups, self._groups = self._groups, []
        self._state.gathered -= len(groups)
        for uid, life in groups:
            entry = entries.get(uid)
            if entry is not None and entry.life == life:
                self._requeue(entry)

    def clear(self) -> None:
        """Forget them: after a recovery they are queued like all that waits."""
        self._groups.clear()

    def __len__(self) -> int:
        return len(self._groups)
