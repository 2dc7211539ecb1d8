"""What a killed process left unfinished is undone by whoever comes next."""

from __future__ import annotations

import numpy as np

from pipeline.buffer.transitions.drawing import Drawer
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, OPEN, PLACE, SERIAL
from pipeline.buffer.transitions.shared.header import Header
from pipeline.buffer.transitions.shared.ring import SharedRing


def repair(header: Header, ring: SharedRing, drawer: Drawer) -> None:
    """Make everything follow from the counters that are committed, which ``ring`` and ``drawer`` have taken over.

    Done twice it does the same, so whoever repairs may be killed as well. It costs as much as looking at the marks of
    every row.
    """
    floor = header.take_back()
    ring.size = max(0, min(ring.size, ring.added - floor))
    if ring.added == 0:  # a resume that failed has begun to fill them in
        ring.episodes.envs = 0
    ring.take_back()
    if ring.storage.layout is not None:
        _drop_torn(ring)
        if ring.size:
            _relink(ring)
    ring.cuts += 1  # what was concluded from the rows that there were is no longer so
    if ring.followers is not None:
        ring.followers.repair()
    drawer.rebuild()


def _drop_torn(ring: SharedRing) -> None:
    """Give up rows that are not what their marks say, and those before them: there are none but by a fault of ours."""
    keys = ring.keys()
    torn = np.flatnonzero(ring.mark(SERIAL, keys) != keys.astype(np.uint32))
    if len(torn):
        ring.size = ring.added - int(keys[torn[-1]]) - 1


def _relink(ring: SharedRing) -> None:
    """Compute what follows what from how far behind each row's predecessor lies; that never changes."""
    storage, first = ring.storage, ring.oldest
    ring.begin_links()
    begin = first % ring.capacity
    room = min(ring.capacity - begin, ring.size)
    for key, slots in ((first, slice(begin, begin + room)), (first + room, slice(0, ring.size - room))):
        if slots.stop > slots.start:
            ring.link_back(key, *(storage.view(name)[slots] for name in (BEHIND, EPISODE, PLACE)))
    # Whose episode goes on cannot have been cut: the process that did so did not come to its end.
    tails = np.array([tail[1] for tail in ring.episodes.state()], np.int64)
    tails = ring.slots(tails[ring.alive(tails)])
    ends = ring.storage.view(END)
    ends[tails[ends[tails] == CUT]] = OPEN
