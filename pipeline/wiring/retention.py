"""What goes after a commit: generations that are not kept, and segments that none of the others needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pipeline.checkpoint.collect import Needs, collect
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.retire import Kept, needs_of, retire
from pipeline.clock import Clock
from pipeline.observe import events
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, SegmentKey


class Keeping(Protocol):
    """What says how much stays: options of retention, a clock and a log."""

    @property
    def options(self) -> Any: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> Any: ...


class Retention:
    """Knows the generations of a run: they are read once, as nobody else makes any. All methods block."""

    def __init__(self, state: Keeping, files: FilesLike, layout: Layout, *, reuses: bool = True) -> None:
        """Args:
        state: options of retention, a clock and a log.
        files: the file layer.
        layout: the run's paths.
        reuses: whether a resume may use what came after its generation. If not, what a life left that was killed, or
            whose disk was full, goes with the next commit.
        """
        self._state, self._files, self._layout, self._reuses = state, files, layout, reuses
        self.held: Callable[[], frozenset[int]] = frozenset
        """Numbers of generations that are being read, and are not to be removed."""
        self._complete: list[Stored] | None = None
        self._needs: Needs | None = None
        self._reusable: set[int] = set()
        self._unread: frozenset[int] = frozenset()

    def reusable(self, manifest: Manifest) -> list[int]:
        """Return the generations whose resume may use what came after them, once ``manifest`` is committed.

        They are the newest, as many as ``keep`` says. One that is older needs what was live in it and no more; and once
        that is so it stays so, whatever ``keep`` says later.
        """
        if self._complete is None:
            found = find_generations(self._layout, manifest.run_id)
            self._complete, self._unread = found.complete, found.unread
        if not self._reuses:
            return []
        there = {each.manifest.generation for each in self._complete}
        said = self._complete[-1].manifest.reusable if self._complete else None
        before = there if said is None else there & set(said)
        recent = self._kept().recent([*self._complete, Stored("", manifest)])
        return sorted((before | {manifest.generation}) & recent)

    def committed(
        self,
        stored: Stored,
        live: Mapping[SegmentKey, int],
        opens: Mapping[int, tuple[int, int]],
        keep: Callable[[], None],
    ) -> None:
        """Remove what is not kept any more. What cannot be removed is tried again after the next commit.

        Args:
            stored: the generation that was committed.
            live: bytes that were live at its capture, by segment.
            opens: by rank, the incarnation and the number of the segment that it was writing then: later ones are its
                own to write.
            keep: raises unless the folder is still this process's: what another one has made is unknown here, and
                would be taken for what nobody needs.
        """
        assert self._complete is not None
        self._complete.append(stored)
        try:
            keep()
            self._retire(stored)
            if not self._unread:
                self._collect(live, opens)
                return
            which = ", ".join(map(str, sorted(self._unread)))
            error = f"no segment is removed in this life: the disk did not give the manifests of generations {which}"
            self._state.log.warning(events.GENERATION_REMOVED, generation=None, error=error)
        except OSError as failed:
            self._state.log.warning(events.GENERATION_REMOVED, generation=None, error=str(failed))

    def _kept(self) -> Kept:
        options = self._state.options
        return Kept(options.keep, options.keep_every, options.keep_within_s, self._state.clock.wall(), self.held())

    def _retire(self, stored: Stored) -> None:
        assert self._complete is not None
        gone = set(retire(self._layout, self._files, self._complete, self._kept()))
        for number in sorted(gone):
            self._state.log.debug(events.GENERATION_REMOVED, generation=number)
        self._complete = [each for each in self._complete if each.manifest.generation not in gone]
        reusable = set(stored.manifest.reusable or ())
        if self._needs is None or gone or not self._reusable <= reusable:
            self._needs = needs_of(self._complete, reusable)
        else:
            self._needs.add(stored.manifest, reusable=stored.manifest.generation in reusable)
        self._reusable = reusable

    def _collect(self, live: Mapping[SegmentKey, int], opens: Mapping[int, tuple[int, int]]) -> None:
        def used(key: SegmentKey) -> bool:
            incarnation, rank, number = key
            return key in live or (rank in opens and (incarnation, number) >= opens[rank])

        assert self._needs is not None
        gone = collect(self._layout, self._files, self._needs, used, self._state.options.archived_share)
        if gone.segments:
            self._state.log.info(events.SEGMENTS_REMOVED, count=gone.segments, bytes=gone.bytes)
