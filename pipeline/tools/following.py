"""What happens in a run, as it is written: events of its journals, and generations that are committed.

Whatever wrote the run: a pipeline's journals tell of rollouts and rows; those of buffers say little, and there
generations are what is to be seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio

from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import MANIFEST_FILE
from pipeline.errors import ConfigError
from pipeline.store.files import open_plain
from pipeline.store.frames import EVENTS, HEADER_BYTES, decode_header, frame_bytes, read_frame
from pipeline.store.journal import Logged, events_of
from pipeline.store.layout import JournalName
from pipeline.tools.event_lines import Happened
from pipeline.tools.target import RUN, find_target

INTERVAL = 0.5


class Follower:
    """Remembers how far each journal was read. Methods block."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Begin at the end: only what comes from now on is told.

        Raises:
            NotARun: there is no run.
            ConfigError: it is a part of one.
        """
        target = find_target(path)
        if target.what != RUN:
            raise ConfigError.of("--follow", target.path, f"a run's folder is needed, and this is a {target.what}")
        self._layout, self._run = target.layout, target.run
        self._ends = {name.path: _end_of(name.path) for name in self._layout.list_journals()}
        self._generations = set(self._committed())

    def look(self) -> list[Happened]:
        """Return what has happened since the last look, oldest first within each journal.

        Raises:
            NewerFormat: a newer version has begun to write.
            Damaged: a record is whole and makes no sense.
        """
        found = [each for name in self._layout.list_journals() for each in self._events(name)]
        new = [number for number in self._committed() if number not in self._generations]
        if new:
            self._generations.update(new)
            for stored in find_generations(self._layout, self._run.run_id).complete:
                manifest = stored.manifest
                if manifest.generation in new:
                    said = f"generation {manifest.generation}, step {manifest.step}, {manifest.reason}"
                    found.append(
                        Happened(
                            incarnation=manifest.incarnation,
                            rank=0,
                            sequence=manifest.generation,
                            event="committed",
                            said=said,
                        )
                    )
        return found

    def _events(self, name: JournalName) -> list[Happened]:
        found = []
        at = self._ends.get(name.path, 0)
        try:
            if os.path.getsize(name.path) <= at:
                return []
            with open_plain(name.path) as file:
                while (frame := read_frame(file, at, name.path)) is not None:
                    if frame.header.kind == EVENTS:
                        first = frame.header.sequence
                        for number, event in enumerate(events_of(frame, name, first), first):
                            found.append(Happened.of(Logged(name.incarnation, name.rank, number, event)))
                    at += frame_bytes(frame.header.length)
        except FileNotFoundError:  # removed meanwhile
            return found
        self._ends[name.path] = at
        return found

    def _committed(self) -> list[int]:
        folder = self._layout.generations
        try:
            names = sorted((name for name in os.listdir(folder) if name.isdecimal()), key=int)
        except FileNotFoundError:
            return []
        return [int(name) for name in names if os.path.lexists(os.path.join(folder, name, MANIFEST_FILE))]


def _end_of(path: str) -> int:
    """Return where the whole frames of a journal end now, by their headers."""
    at = 0
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            while at < size:
                file.seek(at)
                header = decode_header(file.read(HEADER_BYTES), path)
                if header is None or at + HEADER_BYTES + header.length > size:
                    break
                at += frame_bytes(header.length)
    except FileNotFoundError:
        return 0
    return at


async def follow(
    path: str | os.PathLike[str],
    tell: Callable[[list[Happened]], None],
    begun: Callable[[], None] = lambda: None,
    *,
    interval: float = INTERVAL,
) -> None:
    """Tell what happens in a run from now on, until it is cancelled. Nothing is locked or changed.

    Args:
        path: the run's folder.
        tell: called with what is new, in the event loop.
        begun: called once, when all that comes from then on will be told.
        interval: seconds between two looks.

    Raises:
        NotARun: there is no run.
    """
    follower = await anyio.to_thread.run_sync(Follower, path)
    begun()
    while True:
        happened = await anyio.to_thread.run_sync(follower.look)
        if happened:
            tell(happened)
        # Another process writes, often on another machine: no event source tells of that on every file system, and a
        # look is a stat of each journal and a listing.
        await anyio.sleep(interval)
