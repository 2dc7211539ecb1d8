"""A replay buffer of transitions, for use without a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.compressed import compressed_bytes
from pipeline.buffer.transitions.drawing import Drawer, make_drawer
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.priorities import PriorityDrawer
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import Hindsight, ReplayOptions, Slices
from pipeline.config.replay import MOST_ROWS
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, UsageError
from pipeline.replay.adding_verbs import DEFAULT, AddingVerbs
from pipeline.replay.aio import AsyncReplayBuffer
from pipeline.replay.arguments import check_known, priorities_of, whole
from pipeline.replay.feeding import Inside, ReplayFeed, check_feedable
from pipeline.replay.folder_verbs import due_of, not_after_fork
from pipeline.replay.handles import ReplayHandle
from pipeline.replay.parts import Parts
from pipeline.replay.rank_saver import RankSaver, check_shardable
from pipeline.replay.rooms import Room, make_room
from pipeline.replay.sampling import Sampler, Wanted
from pipeline.replay.saving import Saver
from pipeline.replay.saving_verbs import SavingVerbs
from pipeline.replay.stepping import Stepping
from pipeline.replay.write_back import WriteBackVerb
from pipeline.store.files import FilesLike


class Updated(NamedTuple):
    """What became of an update of priorities."""

    applied: np.ndarray
    """[n] bool: whether the priority of each key was written. Where not, its row had gone before."""

    @property
    def stale(self) -> int:
        """How many were ignored, because another row has the place by now."""
        return int((~self.applied).sum())


class ReplayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How a buffer stands."""

    size: int
    capacity: int
    added: int
    sampled: int
    episodes: int
    """How many there have been."""
    open_episodes: int
    not_kept: int = 0
    """Rows that were added to a full buffer and were the first to go themselves; see the option ``remove``."""
    stale_updates: int
    """Priorities that came too late: their row had gone."""
    waiters: int
    """Threads and tasks of this process."""
    row_bytes: int
    """Bytes of a row, were nothing compressed."""
    compressed_bytes: int = 0
    """Bytes that all compressed rows take."""
    save: dict[str, int] = {}
    """Of the newest save of this process's rows, committed or not: ``rows`` that were there, how many are ``saved``,
    ``dropped_open`` and ``dropped_headless``, and how many episodes are ``truncated``. Empty before there is one."""


class ReplayBuffer(AddingVerbs, SavingVerbs, WriteBackVerb):
    """``capacity`` rows of fixed shape, to be sampled many times: the newest, or as the option ``remove`` says.

    ::

        buffer = ReplayBuffer(1_000_000, select=Prioritized(alpha=0.6, beta=0.4), seed=1)
        buffer.extend({"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "terminated": terminated})
        batch = buffer.sample(256, n_step=3, gamma=0.99)
        buffer.update_priorities(batch.keys, agent.update(batch))

    Every verb may be called from any thread of this process, and never from a fork of it, nor from any other: these
    join a buffer that was built with ``storage="shared"``, see :meth:`share`. ``buffer.aio`` has the same verbs for
    tasks. Options are those of :class:`~pipeline.config.ReplayOptions`.
    """

    def __init__(
        self,
        capacity: int,
        *,
        schema: Schema | None = None,
        ranks: Ranks | None = None,
        files: FilesLike | None = None,
        **options: Any,
    ) -> None:
        """Args:
        capacity: how many rows are held; with ``ranks``, by each of them.
        schema: the columns; else those of the first rows.
        ranks: this process among those that train together. Each has a shard of its own, and they have one folder:
            all of them call ``resume`` and ``save``, for the same steps.
        files: the file layer, for tests.
        options: see :class:`~pipeline.config.ReplayOptions`.

        Raises:
            ConfigError: an option is out of range, or the rows would not fit into memory.
        """
        built = ReplayOptions.build(capacity, options)
        if schema is not None and not isinstance(schema, Schema):
            raise ConfigError.of("schema", schema, "a Schema is needed, such as Schema.of(rows)")
        self._begin(built, make_room(built), files, ranks)
        if schema is not None:
            with self.gate.lock:
                self._shape(schema)

    def _begin(self, options: ReplayOptions, room: Room, files: FilesLike | None, ranks: Ranks | None = None) -> None:
        self.options, self._room, self.gate, self.ranks = options, room, room.gate, ranks
        if ranks is None:
            self._saver = Saver(options, room, files)
        else:
            check_shardable(options)
            self._saver = saver = RankSaver(options, room, ranks, files)
            ranks = saver.ranks
        self._due = due_of(self._saver.store, self.statistics, ranks)
        self._use(self._parts(room.ring()))
        self._forked = False
        not_after_fork(self)

    def share(self) -> ReplayHandle:
        """Return what another process of this machine joins the buffer with: an argument for it, however it is started
        (``fork``, ``forkserver``, ``spawn``).

        ::

            def act(handle, number):
                buffer = ReplayBuffer.join(handle)
                while True:
                    buffer.extend(play(), env=number)


            buffer = ReplayBuffer(1_000_000, storage="shared")
            Process(target=act, args=(buffer.share(), 0)).start()

        Environments are numbered across all processes: two of them do not add to the same one.
        Every process adds, samples and updates priorities; the one that built the buffer saves it as well. What one of
        them was about to do when it was killed is undone by whoever comes next.

        Raises:
            ConfigError: the buffer was built without ``storage="shared"``.
        """
        self._usable()
        return ReplayHandle.of(self, self._room)

    @classmethod
    def join(cls, handle: ReplayHandle) -> ReplayBuffer:
        """Return the buffer of another process, for use in this one.

        It draws from a random stream of its own. In a process that has the buffer already, it is that one.
        """
        return handle.join()

    @property
    def drawer(self) -> Drawer:
        """What draws rows, by the option ``select``."""
        return self._drawer

    @property
    def aio(self) -> AsyncReplayBuffer:
        """The same buffer for tasks: its verbs are awaited."""
        return AsyncReplayBuffer(self)

    def feed(self) -> ReplayFeed:
        """Return the side of this buffer that a pipeline sees, whose rollouts fill it from then on: ``Pipeline(tasks,
        buffer=buffer)``. Sampling and priorities stay the caller's; rows, saving and resuming are the pipeline's.

        Raises:
            ConfigError: an option of the buffer is in the way.
            UsageError: it holds rows, or another pipeline fills it.
        """
        with self.gate.lock:
            self._usable()
            self._not_fed("feed")
            check_feedable(self.options, self.ring)
            self._fed = True
        verbs = (self._parts, self._take_over, self._extend, self._counts_of, self._leave_feed)
        return ReplayFeed(self, Inside(lambda: self._own, *verbs))

    def _leave_feed(self) -> None:
        self._fed = False

    def _take_over(self, parts: Parts, stale_updates: int) -> None:
        self._use(parts)
        self._saver.stale_updates = stale_updates

    def _counts_of(self) -> tuple[Counts, int]:
        return self._counts, self._saver.stale_updates

    def _parts(self, ring: Ring, room: Room | None = None) -> Parts:
        room = room or self._room
        room.check()
        drawer = make_drawer(ring, self.options.select, self.options.seed, room.tree)
        next_obs = room.next_obs(ring) if self.options.share_next_obs else None
        counts = Counts(self.options.limiter)
        rng = room.rng()
        if self.ranks is not None:  # each rank draws from a stream of its own
            rng = np.random.Generator(np.random.PCG64([self.options.seed, 0, self.ranks.rank]))
        return Parts(ring, drawer, counts, rng, next_obs, Stepping(), room.written(ring))

    def _use(self, parts: Parts) -> None:
        self._own = parts
        if isinstance(parts.ring, Pool) and isinstance(parts.drawer, PriorityDrawer):
            parts.ring.new_value = parts.drawer.new_value
        self.ring, self._drawer, self._counts, self._rng = parts.ring, parts.drawer, parts.counts, parts.rng
        self.next_obs, self.stepping, self._written = parts.next_obs, parts.stepping, parts.written
        self._sampler = Sampler(parts.ring, parts.drawer, parts.rng, self.options, parts.next_obs)
        self._room.use(parts.ring, parts.drawer, parts.counts, self._saver)

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(
        self,
        count: int,
        *,
        n_step: int = 1,
        gamma: float | None = None,
        slices: Slices | Mapping[str, Any] | None = None,
        stack: int = 1,
        columns: Sequence[str] | None = None,
        hindsight: Hindsight | Mapping[str, Any] | None = None,
        where: Any = None,
        timeout: float | None = DEFAULT,
    ) -> TransitionBatch:
        """Return ``count`` rows, or slices, as the option ``select`` says.

        Args:
            count: how many.
            n_step: sum up to so many rewards: ``reward`` becomes their discounted sum, ``next_obs``, ``terminated``,
                ``truncated`` and ``done`` those of the last row that was summed. Never across the end of an episode,
                nor the newest row: then fewer are summed, and the discount is of those.
            gamma: the discount factor, 0 to 1; needed with ``n_step``. With it, the batch has ``discount``.
            slices: draw slices instead of rows.
            stack: give ``obs`` and ``next_obs`` as the so many newest ones, [n, stack, ...], oldest first; before an
                episode's first row that is repeated.
            columns: only these.
            hindsight: give a share of the rows another goal, which their episode reached.
            where: draw what meets a condition alone, in the same proportions as otherwise: ``{"reward": (">", 0.5),
                "task": 3}``, in which every column of one number is compared with a number, by ``==``, ``!=``, ``<``,
                ``<=``, ``>`` or ``>=``, with several by ``("in", [1, 2])`` or ``not in``, and with a list by each of
                it; or a function whose parameters are columns; or a pair of a function and the names of its columns. A
                function gets arrays [m, ...] of any rows, in any number, and returns [m] bool. ``#version``,
                ``#episode`` and ``#place`` are columns here. Of slices, stacks and returns the drawn row is meant.
                Without replacement, rows that do not meet it have had their turn in the epoch.
            timeout: seconds to wait for the limiter; by default the option of that name.

        Raises:
            ConfigError: what is asked can never be had.
            Starved: nothing that is there could be drawn, or meets the condition.
            TimedOut: the limiter lets nothing out now.
        """
        count = whole("count", count, 1, MOST_ROWS)
        wanted = Wanted.of(n_step, gamma, slices, stack, columns, hindsight, where)
        with self.gate.lock:
            self._usable()
            self.wait_to_sample(count, timeout)
            batch = self._sampler.sample(count, wanted)
            self._counts.sampled += len(batch)  # fewer at the end of an epoch
        self.gate.changed()
        return batch

    def check_sample(self, count: int, **more: Any) -> None:
        """Refuse arguments that :meth:`sample` would refuse, and draw nothing.

        Raises:
            ConfigError: what is asked can never be had.
        """
        wanted = Wanted.of(**{"n_step": 1, "gamma": None, "slices": None, "stack": 1, "columns": None, **more})
        with self.gate.lock:
            self._usable()
            self.options.check_batch(whole("count", count, 1, MOST_ROWS))
            self._sampler.check(wanted)

    def update_priorities(self, keys: ArrayLike, priorities: Any) -> Updated:
        """Set the priorities of rows, all or none of them.

        Args:
            keys: [n] of a batch. A row that has gone meanwhile is left out, and counted.
            priorities: [n] numbers, not negative; such as the absolute errors.

        Raises:
            ConfigError: one of them is negative or not finite, or was never the key of a row, or the numbers differ.
        """
        with self.gate.lock:
            self._usable()
            where, values = priorities_of(keys, priorities)
            applied = self.ring.alive(where)
            if np.count_nonzero(applied) == len(where):
                self._drawer.update(where, values)
            else:
                check_known(where, self.ring.keys_end, -int(self.ring.scattered))
                self._drawer.update(where[applied], values[applied])
                self._saver.stale_updates += len(where) - int(applied.sum())
        return Updated(applied)

    # -- the rest ----------------------------------------------------------------------------------------------

    def can_add(self, count: int = 1) -> bool:
        """Whether the limiter lets ``count`` rows in now."""
        self.gate.look()
        return self._counts.may_add(count, self.ring.size)

    def can_sample(self, count: int = 1) -> bool:
        """Whether the limiter lets ``count`` rows out now, and there are any."""
        self.gate.look()
        return self.ring.size > 0 and self._counts.may_sample(count, self.ring.size)

    def ready(self, count: int = 1) -> bool:
        """Whether every rank can sample ``count`` rows now: one that waits alone for rows, while the others are in a
        collective, would wait for ever. All ranks ask, at the same place of the script; without ``ranks`` it is
        :meth:`can_sample`.

        Raises:
            RankLost: a rank did not ask in time.
        """
        own = self.can_sample(count)
        return own if self.ranks is None else all(self.ranks.all("ready", own))

    def wait_to_add(self, count: int, timeout: float | None = DEFAULT) -> None:
        """Wait until ``count`` rows may be added.

        Raises:
            ConfigError: so many never may.
            TimedOut: that took longer than ``timeout`` seconds.
        """
        with self.gate.lock:
            self._counts.check_add(count, self.ring.size)
            self.gate.wait(
                lambda: self._counts.may_add(count, self.ring.size),
                self._seconds(timeout),
                lambda: self._counts.why_not_add(count),
            )

    def _waited_to_add(self, count: int, timeout: float | None) -> bool:
        """Wait for the limiter, and tell whether that was needed: then others had the lock meanwhile."""
        if self._counts.may_add(count, self.ring.size):
            return False
        self.wait_to_add(count, timeout)
        return True

    def wait_to_sample(self, count: int, timeout: float | None = DEFAULT) -> None:
        """Wait until ``count`` rows may be sampled.

        Raises:
            ConfigError: so many never may.
            TimedOut: that took longer than ``timeout`` seconds.
        """
        with self.gate.lock:
            self.options.check_batch(count)
            if self._counts.may_sample(count, self.ring.size):
                return
            self.gate.wait(
                lambda: self._counts.may_sample(count, self.ring.size),
                self._seconds(timeout),
                lambda: self._counts.why_not_sample(count, self.ring.size),
            )

    def _seconds(self, timeout: float | None) -> float | None:
        return self.options.timeout if timeout is DEFAULT else timeout

    def clear(self) -> None:
        """Forget every row, and the columns: others may be added then. Keys are not used again."""
        with self.gate.lock:
            self._usable()
            self._not_fed("clear")
            self._clear()
        self.gate.changed()

    def _clear(self) -> None:
        self.ring.about_to_change(self.ring.keys())  # a generation that is being written wants them
        self.ring.clear()
        self.ring.storage.forget()
        self.stepping.reset()
        if self.next_obs is not None:
            self.next_obs.forget()
        self._drawer.clear()
        self._written.clear()
        self._room.commit()  # other columns may come now, in the same place

    def statistics(self) -> ReplayStatistics:
        """Return how the buffer stands."""
        with self.gate.lock:
            return ReplayStatistics(
                size=self.ring.size,
                capacity=self.ring.capacity,
                added=self.ring.added,
                sampled=self._counts.sampled,
                episodes=self.ring.episodes.next,
                open_episodes=len(self.ring.episodes.open()),
                not_kept=self.ring.not_kept,
                stale_updates=self._saver.stale_updates,
                waiters=self.gate.waiters,
                row_bytes=self.ring.storage.row_bytes,
                compressed_bytes=compressed_bytes(self.ring.storage.large),
                save=self._saver.said(),
            )

    def __len__(self) -> int:
        self.gate.look()
        return self.ring.size

    def __bool__(self) -> bool:
        """True, whatever is there: ``given or ReplayBuffer(n)`` asks whether a buffer was given."""
        return True

    def _usable(self) -> None:
        if self._forked:
            raise UsageError(
                "this buffer was made before a fork, and is used in the child: what is added here the parent never "
                "sees. Make it in the process that uses it, or build it with storage='shared' and join() it there."
            )
