"""What a buffer of trajectories holds, and the verbs that take it as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.config import TrajectoryOptions
from pipeline.distributed import Ranks
from pipeline.errors import ClosedError, ConfigError, ForebayError, NewerFormat, UsageError
from pipeline.replay.folder_verbs import FolderVerbs
from pipeline.replay.saving import Loading, ReplayResumed
from pipeline.replay.segment_rows import SegmentRows
from pipeline.replay.shelf import Shelf
from pipeline.replay.shelving import Shelving
from pipeline.replay.state import check_version, set_generator
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_loading import ReadTrajectories, Verify, shelf_of
from pipeline.replay.trajectory_saving import TrajectoryParts, TrajectorySaver
from pipeline.replay.trajectory_state import STATE_VERSION, TrajectoryState, checked, to_values


class TrajectoryVerbs(FolderVerbs):
    """The part of :class:`~pipeline.TrajectoryBuffer` that is saved, and how."""

    options: TrajectoryOptions
    ranks: Ranks | None
    _saver: TrajectorySaver
    _own: TrajectoryParts
    _shelving: Shelving
    _rows: SegmentRows | None
    _first: int
    _closed: bool

    def _parts(self) -> TrajectoryParts:
        """Return parts without trajectories, of the window that there is."""
        parts = TrajectoryParts(self.options, None if self.ranks is None else self.ranks.rank)
        parts.window, parts.widest = self._own.window, self._own.widest
        return parts

    def resume(
        self,
        step: int | None = None,
        *,
        verify: Verify = "full",
        rebalance: bool = False,
        evict_oldest: bool = False,
        allow_partial: bool = False,
    ) -> ReplayResumed:
        """Go on from the newest generation, or from the newest one of ``step``; in an empty directory, begin.

        Everything is checked before anything is changed. What is attached is loaded in place. Trajectories that were
        added after the generation are not there; of a smaller capacity than before, the newest are. Today's options
        count, the window among them.

        Args:
            step: the trainer's step.
            verify: ``full`` reads all trajectories and compares their checksums; ``lazy`` does so for those that come
                into memory, and for each of the others when it is first sampled: then it is :class:`Damaged`.
            rebalance: with ``ranks``, whether trajectories are shared out anew though there are as many ranks as saved
                them; by default each has its own again. Of another number of ranks they always are: whole, the oldest
                first, so that each rank has about as many transitions. Numbers are then those that they have there.
            evict_oldest: whether the oldest trajectories go where other ranks have no room for all of them.
            allow_partial: with ``ranks``, whether to go on with what is whole where trajectories, or shards of ranks,
                are damaged or missing: it is shared out anew, and ``ReplayResumed.lost`` and the log say what is gone.
                What is attached must be whole.

        Raises:
            ConfigError: ``verify`` is none of the two; or trajectories are shared out anew, and there is no room; or
                ``allow_partial`` without ranks, or with ``verify="lazy"``.
            RankFailed, RankLost: another rank failed, or was not heard from: no rank was changed.
            UsageError: there is no directory, or trajectories were added before, or other things are attached; or the
                options name signals, and this is not the main thread.
            Damaged: the generation cannot be read. The message says which one can.
            Locked: another process writes there.
        """

        def how() -> Loading:
            self._usable()
            loading = self._loading(verify, allow_partial)
            self.listen()
            return loading._replace(rebalance=rebalance, evict_oldest=evict_oldest)

        return self._resume(step, how)

    def _resume(self, step: int | None, how: Callable[[], Loading]) -> ReplayResumed:
        with self._hearing(), self._saver.lock:
            before = self._own
            with self.gate.lock:
                found = self._saver.find(step, before, how, self._taken)
                read = None if found is None else found[0]
                if found is not None:
                    self._saver.load_attached(found[0])
                    # On several ranks nothing fails from here on, but for what the saver makes of an older generation.
                    self._use(found[1])
            try:
                resumed = self._saver.ready(read, self._own)
            except BaseException:
                with self.gate.lock:
                    self._use(before)
                raise
            if self._due is not None:
                self._due.saved(resumed.step)
            return resumed

    def _taken(self, found: ReadTrajectories) -> TrajectoryParts:
        """Return the parts of what was read of a generation."""
        parts = self._parts()
        self._saver.take_over(found, parts)
        return parts

    def _loading(self, verify: str, partial: bool) -> Loading:
        if verify not in ("full", "lazy"):
            raise ConfigError.of("verify", verify, "'full' and 'lazy' are allowed")
        if partial and (self.ranks is None or verify == "lazy"):
            raise ConfigError(
                "allow_partial: with ranks= and verify='full', as what is damaged must be known at once. Without "
                "ranks, pipeline.tools.salvage_run writes the trajectories that are whole into a new run",
                option="allow_partial",
            )
        return Loading(lazily=verify == "lazy", allow_partial=partial)

    # -- in memory ---------------------------------------------------------------------------------------------

    def arrays(self) -> Arrays:
        """Return copies of the fields of all rows [total_samples, ...], oldest trajectory first, as they are held."""
        with self.gate.lock:
            self._usable()
            shelf = self._own.shelf
            if shelf.schema is None:
                return {}
            memory = shelf.gather(np.arange(max(shelf.begin, shelf.start(shelf.low)), shelf.end)).arrays
            parts = [self._whole(shelf, number) for number in range(shelf.low, max(shelf.low, shelf.cached))]
            return {name: np.concatenate([*(part[name] for part in parts), memory[name]]) for name in memory}

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values and arrays, copies all of them. Costs as much memory as the rows, those on
        the disk among them; :meth:`save` does not."""
        with self.gate.lock:
            self._usable()
            state, shelf = self._own.state(), self._own.shelf
            return {"state": msgspec.to_builtins(state), "values": to_values(shelf), "rows": self.arrays()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; what the buffer holds goes. The window, the capacity and the size of
        the cache stay as they are: of more trajectories than are held, the newest come back.

        Args:
            state: of this buffer or of another one.

        Raises:
            ConfigError: it is no such state, or its rows do not fit into memory. Nothing was changed.
            NewerFormat: it is that of a newer version.
            UsageError: a save with a directory has begun, or trajectories were added to one.
        """
        with self.gate.lock:
            self._usable()
            self._saver.check_replaceable()
            parts = self._parts()
            room, memory = self._own.room(self.options), self._saver.store is None
            try:
                check_version(state["state"], STATE_VERSION, "state")
                given = checked(msgspec.convert(state["state"], TrajectoryState))
                if given.generator:  # of a run that a tool made there is none: its stream begins with the seed
                    set_generator(parts.rng, given.generator)
                parts.shelf = shelf_of(given, dict(state["values"]), dict(state["rows"]), room, memory)
            except (ConfigError, NewerFormat):
                raise
            except (ForebayError, msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"state: no state of a buffer of trajectories ({error!r})", option="state") from None
            self._use(parts)

    # -- what it holds -----------------------------------------------------------------------------------------

    def _use(self, parts: TrajectoryParts) -> None:
        self._own, self._shelving.shelf = parts, parts.shelf
        self._set_first()

    def _forget(self) -> None:
        self._own.shelf = self._shelving.shelf = Shelf(self._own.shelf.next)
        self._set_first()

    def _kept(self, end: int) -> tuple[int, int]:
        """Return from which trajectory on they are there, and are in memory, if ``end`` is the next one."""
        shelf, room = self._own.shelf, self._own.room(self.options)
        low = shelf.low if room.capacity is None else max(shelf.low, end - room.capacity)
        cached = low if room.cache is None else max(low, end - room.cache)
        if self._saver.store is None:
            return cached, cached
        return low, max(shelf.cached, min(cached, shelf.may_let_go(low)))

    def _let_go(self) -> None:
        """Let go in memory what may go; the lock is held."""
        shelf = self._own.shelf
        shelf.let_go(*self._kept(shelf.next))

    def _set_first(self) -> None:
        """Find where the window begins."""
        own, shelf = self._own, self._own.shelf
        inside = 0 < own.window < len(shelf)
        self._first = shelf.start(shelf.next - own.window if inside else shelf.low)

    @staticmethod
    def _widen(own: TrajectoryParts) -> None:
        if own.widest is not None:
            own.widest = max(own.widest, own.window) if own.window > 0 else None

    def _whole(self, shelf: Shelf, number: int) -> Arrays:
        """Return all rows of a trajectory."""
        if number >= shelf.cached:
            return shelf.gather(np.arange(shelf.start(number), shelf.start(number + 1))).arrays
        assert self._rows is not None
        assert shelf.schema is not None
        block, info = shelf.payload(number)
        file = self._rows.open([block.segment_key])[block.segment_key]
        return self._rows.whole(file, block, info, BlobLayout(shelf.schema))

    def _usable(self) -> None:
        if self._forked:
            raise UsageError(
                "this buffer was made before a fork, and is used in the child: what is added here the parent never "
                "sees. Make it in the process that uses it"
            )
        if self._closed:
            raise ClosedError("this buffer is closed")
