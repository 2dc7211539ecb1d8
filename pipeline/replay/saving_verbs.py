"""The verbs of a replay buffer that have to do with its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from pipeline.buffer.transitions.blocks import KEPT_MARKS, take_back
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import ReplayOptions
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, ForebayError, UsageError
from pipeline.replay.arguments import not_shared
from pipeline.replay.folder_verbs import FolderVerbs
from pipeline.replay.loading import Read
from pipeline.replay.parts import Parts, check_kind, check_sharing, restore, selector_values, state_of, values_of
from pipeline.replay.pooling import fill_pool
from pipeline.replay.rooms import OwnRoom, Room
from pipeline.replay.saving import Loading, ReplayResumed, Saver
from pipeline.replay.state import STATE_VERSION, BufferState, check_version, checked
from pipeline.replay.state_rows import check_rows


class SavingVerbs(FolderVerbs):
    """What :class:`~pipeline.ReplayBuffer` has beside its rows."""

    options: ReplayOptions
    ranks: Ranks | None
    ring: Ring
    _saver: Saver
    _own: Parts
    _room: Room

    def _not_fed(self, verb: str) -> None:
        raise NotImplementedError

    def _parts(self, ring: Ring, room: Room | None = None) -> Parts:
        """Return the parts of a buffer of the rows of ``ring``, as they are at the beginning; ``room``: another one
        than the buffer's own."""
        raise NotImplementedError

    def _clear(self) -> None:
        raise NotImplementedError

    def _use(self, parts: Parts) -> None:
        raise NotImplementedError

    def resume(
        self,
        step: int | None = None,
        *,
        continue_episodes: bool = False,
        verify: Literal["full", "lazy"] = "full",
        rebalance: bool = False,
        evict_oldest: bool = False,
        allow_partial: bool = False,
    ) -> ReplayResumed:
        """Go on from the newest generation, or from the newest one of ``step``; in an empty directory, begin.

        Everything is checked before anything is changed. What is attached is loaded in place. Rows that were added
        after the generation are not there; of a smaller capacity than before, the newest rows are.

        Args:
            step: the trainer's step.
            continue_episodes: whether the next rows go on with the episodes that were open. By default these are ended
                where they were, as environments begin anew in a new process.
            verify: ``lazy`` reads no rows now: it checks that their blocks are there, of the sizes and with the headers
                that they had. Rows are read, and checksums compared, when they are first wanted. A verb that meets
                damage raises Damaged and changes nothing; so it does again.
            rebalance: with ``ranks``, whether episodes are shared out anew though there are as many ranks as saved
                them; by default each has its own again. Of another number of ranks they always are: whole, the oldest
                first, so that each rank has about as many rows.
            evict_oldest: whether the oldest episodes go where other ranks have no room for all of them.
            allow_partial: whether to go on with what is whole where segments, or shards of ranks, are damaged or
                missing: ``ReplayResumed.lost`` and the log say what is gone. What is left of an episode on each side
                of a gap is an episode of its own. What is attached must be whole.

        Raises:
            ConfigError: ``verify`` is something else, or ``lazy`` for a buffer that processes share; or episodes are
                shared out anew, and there is no room, or they were to be continued.
            RankFailed, RankLost: another rank failed, or was not heard from: no rank was changed.
            UsageError: there is no directory, or rows were added before, or other things are attached; or the options
                name signals, and this is not the main thread.
            Damaged: the generation cannot be read. The message says which one can.
            Locked: another process writes there.
        """

        def how() -> Loading:
            self._usable()
            lazily = self._lazily(verify)
            if allow_partial:
                self._check_partial(lazily=lazily, continue_episodes=continue_episodes)
            self.listen()
            self._room.replacing()
            return Loading(lazily, continue_episodes, rebalance, evict_oldest, allow_partial)

        return self._resume(step, how)

    def _resume(self, step: int | None, how: Callable[[], Loading]) -> ReplayResumed:
        with self._hearing(), self._saver.lock:
            before = self._own
            with self.gate.lock:
                found = self._saver.find(step, self.ring, how, self._taken)
                read = None if found is None else found[0]
                if found is not None:
                    self._saver.load_attached(found[0])
                    # On several ranks nothing fails from here on, but for what the saver makes of an older generation.
                    self._use(found[1])
                    if not self._saver.loading.continue_episodes:
                        self.ring.cut()
                else:
                    self._use(self._own)
            try:
                resumed = self._saver.ready(read, self._own)
            except BaseException:
                self._give_back(before)
                raise
            if self._due is not None:
                self._due.saved(resumed.step)
        self.gate.changed()
        return resumed

    def _taken(self, found: Read) -> Parts:
        """Return the parts of what was read of a generation."""
        parts = self._parts(found.ring)
        self._saver.take_over(found, parts)
        return parts

    def _give_back(self, before: Parts) -> None:
        """Be as before a resume that failed: it may be called again. Rows that processes share lie where those were:
        these are in use, and the next save makes the generation."""
        if self.options.storage == "shared":
            self._saver.begun = True
            return
        with self.gate.lock:
            self._use(before)

    def _check_partial(self, *, lazily: bool, continue_episodes: bool) -> None:
        """Refuse what does not go with ``allow_partial``."""
        pooled = self.options.remove.by != "fifo"
        for option, given, why in (
            ("verify", lazily, "what is damaged must be known at once; leave verify='lazy' out"),
            ("continue_episodes", continue_episodes, "of open episodes rows may be gone; leave continue_episodes out"),
            ("storage", self.options.storage == "shared", "rows that processes share must all be there"),
            (
                "remove",
                pooled and self.ranks is not None,
                "with ranks= and remove= other than fifo all must be there; tools.salvage_run saves what is whole",
            ),
        ):
            if given:
                raise ConfigError(f"allow_partial: {why}. Or resume(step=...) an older generation", option=option)

    def _lazily(self, verify: str) -> bool:
        if verify not in ("full", "lazy"):
            raise ConfigError.of("verify", verify, "'full' or 'lazy' is needed")
        if verify == "lazy" and self.options.storage == "shared":
            raise ConfigError.of(
                "verify", verify, "with storage='shared' other processes could not bring rows in; use verify='full'"
            )
        if verify == "lazy" and self.options.compress:
            raise ConfigError.of("verify", verify, "compressed rows are read whole; use verify='full'")
        return verify == "lazy"

    # -- in memory ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values and arrays, copies all of them. Costs as much memory as the rows;
        :meth:`save` does not."""
        with self.gate.lock:
            self._usable()
            if self.ring.storage.unread is not None:
                self.ring.storage.unread.all()
            state = state_of(self._own, self.options, self._saver.stale_updates)
            slots = self.ring.slots(self.ring.keys())
            layout = self.ring.storage.layout
            names = [] if layout is None else [*layout.schema.names, *KEPT_MARKS]
            return {
                "state": msgspec.to_builtins(state),
                "values": values_of(self._own),
                "rows": {name: self.ring.storage.view(name)[slots] for name in sorted(names)},
            }

    def load_state_dict(self, state: Mapping[str, Any], *, continue_episodes: bool = False) -> None:
        """Take back what :meth:`state_dict` gave; what the buffer holds goes. Of a smaller capacity than before, the
        newest rows come back.

        Of a shared buffer it takes the memory of the rows once more while it works. Should the process be killed in its
        midst, the others go on with an empty buffer.

        Args:
            state: of this buffer or of another one.
            continue_episodes: see :meth:`resume`.

        Raises:
            ConfigError: it is no such state. Nothing was changed.
            NewerFormat: it is that of a newer version.
            UsageError: next observations were stored in another way, or a save with a directory has begun.
        """
        self._not_fed("load_state_dict")
        with self.gate.lock:
            self._usable()
            self._saver.check_replaceable()
            room: Room = self._room
            if self.options.storage == "shared":
                self._restored(state, OwnRoom(self.options))  # finds what is wrong before anything is changed
                self._clear()
            room.replacing()
            parts, self._saver.stale_updates = self._restored(state, room)
            self._use(parts)
            if not continue_episodes:
                self.ring.cut()
        self.gate.changed()

    def _restored(self, given: Mapping[str, Any], room: Room) -> tuple[Parts, int]:
        try:
            check_version(given["state"], STATE_VERSION, "state")
            state = checked(msgspec.convert(given["state"], BufferState))
            check_sharing(state, self.options, "the state")
            check_kind(state, self.ring, "the state")
            rows = dict(given["rows"])
            check_rows(state, rows, scattered=self.ring.scattered)
            ring = (self.ring if room is self._room else room.ring()).like(state.schema)
            if isinstance(ring, Pool):
                fill_pool(ring, state, given["values"], rows)
            else:
                ring.restore(state.added, state.size, state.cut_keys, state.truncated_keys)
                ring.episodes.load(state.open_episodes, state.next_episode)
                if state.schema is not None:
                    take_back(ring, state.added - state.size, state.size, rows)
                    ring.relink()
            parts = self._parts(ring, room)
            restore(parts, self.options, state, given["values"])
        except ForebayError:
            raise
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"state: no state of a replay buffer ({error!r})", option="state") from None
        return parts, state.stale_updates

    def sampling_state(self) -> dict[str, Any]:
        """Return what the next draws depend on beside the rows, for another object to save: plain values and
        arrays."""
        not_shared(self.options.storage, "sampling_state", "save() it with a directory= of its own, not read_only")
        with self.gate.lock:
            self._usable()
            state = state_of(self._own, self.options, self._saver.stale_updates)
            return {"state": msgspec.to_builtins(state), "values": selector_values(self._own)}

    def sampling_parts(self, given: Mapping[str, Any]) -> Parts:
        """Return parts of this buffer's rows that go on as :meth:`sampling_state` says, for :meth:`use_parts`.

        Raises:
            UsageError: the rows are others.
            LookupError, TypeError, ValueError, AttributeError: it is no such state.
        """
        not_shared(self.options.storage, "sampling_parts", "resume() it with a directory= of its own, not read_only")
        with self.gate.lock:
            self._usable()
            state = checked(msgspec.convert(given["state"], BufferState))
            held = state_of(self._own, self.options, 0)
            for name in ("columns", "capacity", "added", "size", "remove", "selection"):
                now, then = getattr(held, name), getattr(state, name)
                if now != then:
                    raise UsageError(f"the buffer holds other rows than it did: {name} is {now} now, and was {then}")
            # What belongs to the rows stays as it is, with them.
            state = msgspec.structs.replace(state, written_columns=[], next_obs_columns=None, numbered=held.numbered)
            parts = self._parts(self.ring)
            restore(parts, self.options, state, given["values"])
            own = self._own
            return parts._replace(next_obs=own.next_obs, stepping=own.stepping, written=own.written)

    def use_parts(self, parts: Parts) -> None:
        """Go on with what :meth:`sampling_parts` gave."""
        with self.gate.lock:
            self._usable()
            self._use(parts)
        self.gate.changed()
