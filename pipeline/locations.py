"""Where what is kept lies."""

from __future__ import annotations

import msgspec


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a payload's frame begins: segment ``incarnation``/``rank``/``segment``, byte ``offset``."""

    incarnation: int
    rank: int
    segment: int
    offset: int
    length: int

    @property
    def segment_key(self) -> tuple[int, int, int]:
        """What names the segment."""
        return self.incarnation, self.rank, self.segment
