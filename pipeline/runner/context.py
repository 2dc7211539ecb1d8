"""What a runner sees of its attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from pipeline.errors import UsageError
from pipeline.interfaces import AttemptFacts
from pipeline.records import EVALUATION, TRAIN, Item, Rollout


class Slots(Protocol):
    """The part of a pool that a context uses to give its slot away for a while."""

    def give_slot(self, ctx: Context) -> None: ...

    async def take_slot(self, ctx: Context) -> None: ...


class RunFacts(msgspec.Struct, frozen=True):
    """What all contexts of a run share."""

    seed: int = 0
    run: str = ""
    version_now: Callable[[], int] | None = None
    slots: Slots | None = None
    save_partial: Callable[[Any, Rollout], None] | None = None
    extend: Callable[[Any, Any], Awaitable[int]] | None = None
    log: Any = None


class _Defaults(msgspec.Struct, kw_only=True, eq=False, weakref=True):
    resource: Any = None
    deadline: float = float("inf")
    has_slot: bool = True
    kind: str = TRAIN
    parked: bool = False
    _failures: int = 0
    _run: RunFacts = RunFacts()
    _rng: np.random.Generator | None = None
    _stream: tuple[int, ...] | None = None
    _timer: Any = None
    _part: bytes | None = None
    _oldest: int | None = None
    _since: int | None = None


class Context(_Defaults, eq=False):
    """One attempt: ``async def solve(item, ctx)``.

    Attributes:
        item: what to work on.
        member: the attempt's place in the group, from 0.
        attempt: which try at this member it is, from 1.
        version: version number of the weights in use when it started.
        resource: what the task's ``resource`` opened.
        deadline: time on the event loop's clock at which it is cut; infinity for none.
        kind: ``train``, ``external`` (an item that was submitted) or ``evaluation``.
        parked: whether :meth:`park` was called.
    """

    item: Item
    member: int
    attempt: int
    version: int

    @property
    def uid(self) -> int:
        """The item's uid."""
        return self.item.uid

    @property
    def key(self) -> str:
        """A label for what this attempt makes outside: unique over all runs."""
        return f"{self._run.run}/{self.item.uid}/{self.member}/{self.attempt}"

    @property
    def rng(self) -> np.random.Generator:
        """A random stream of this member's own, keyed by (seed, uid, member, failures).

        An attempt that is cut by a crash starts again with the same stream; one after a failure gets another.
        """
        if self._rng is None:
            self._rng = np.random.default_rng(self._seeds)
        return self._rng

    @property
    def _seeds(self) -> tuple[int, ...]:
        return self._stream or (self._run.seed % 2**64, self.item.uid, self.member, self._failures)

    @property
    def log(self) -> Any:
        """A ``structlog`` logger whose lines say which attempt they are of: ``ctx.log.info("moved", pieces=3)``."""
        given = self._run.log
        if given is None:
            from pipeline.observe import logger

            given = logger()
        return given.bind(task=self.item.task, uid=self.item.uid, member=self.member, attempt=self.attempt)

    @property
    def base_url(self) -> str:
        """Where an agent that owns its loop finds a server of its model that records what is said there for this
        attempt: what the task's ``resource`` offers, such as a ``chat.recorder``.

        Raises:
            UsageError: the resource has no such server.
        """
        of = getattr(self.resource, "base_url_of", None)
        if of is None:
            raise UsageError(
                f"ctx.base_url: the resource of task {self.item.task!r} records nothing; use "
                "Task(resource=chat.recorder(client))"
            )
        url: str = of(self)
        return url

    @property
    def version_now(self) -> int:
        """Version number of the weights in use now; that of :attr:`version` until they are updated."""
        now = self._run.version_now
        return self.version if now is None else now()

    @property
    def version_changed(self) -> bool:
        """Whether the weights have been updated since this attempt started."""
        return self.version_now != self.version

    @property
    def partial(self) -> Rollout | None:
        """What an earlier attempt at this member kept before it was interrupted, or None; a fresh copy each time.

        Its ``oldest`` and ``newest`` say which weights made it. The rollout that is returned counts as old as that,
        unless it names its own versions.
        """
        from pipeline.store.codec import unpack  # needs torch, and a worker process may do without

        return None if self._part is None else unpack(self._part, f"partial of uid {self.item.uid}")[1]

    def save_partial(self, rollout: Rollout) -> None:
        """Keep what there is so far: an attempt that is interrupted (a weight update, a crash) is gone on with.

        Written like a finished rollout, beside the event loop; a later call replaces it. With ``partial=False`` nothing
        is kept. For versions by token put them in a tensor beside the tokens.

        Raises:
            RolloutInvalid: it cannot be stored.
        """
        save = self._run.save_partial
        if save is not None:
            save(self, rollout)

    async def extend(self, rows: Any) -> int:
        """Add rows [n, ...] to the buffer of transitions that the pipeline was given, in their order in time.

        ::

            async def play(item, ctx):
                env = ctx.resource
                ...
                await ctx.extend(
                    {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "terminated": end}
                )
                return Rollout(reward=total)

        One call is one block on the disk: several steps at a time cost less. All rows of an attempt are of one episode,
        unless ``terminated``, ``truncated`` or ``done`` end it before; it ends with the attempt. They stay whatever
        becomes of the attempt. Waits for the buffer's limiter, and for the disk if that is behind. In ``evaluate`` and
        ``try_one`` nothing is kept.

        Returns:
            How many rows were added.

        Raises:
            ConfigError: a column is missing or unknown, or of another shape or dtype. Nothing was added.
            UsageError: the pipeline has no buffer.
        """
        extend = self._run.extend
        if extend is None:
            if self._run.version_now is None:  # try_one: there is no run
                return 0
            raise UsageError("ctx.extend() adds to a buffer of transitions: Pipeline(tasks, buffer=ReplayBuffer(...))")
        return await extend(self, rows)

    def park(self) -> None:
        """Let what this attempt returns wait for its reward: ``pipe.reward(ctx.uid, value, ctx.member)`` gives it.

        The rollout is kept as it is, but for the reward in it, which does not count; its group is ``parked`` until
        every member that parked has its reward. An attempt that fails after this call has failed like any other. In
        ``evaluate`` and ``try_one`` nobody gives rewards later: there it changes nothing.

        Raises:
            UsageError: what the attempt makes are rows of a buffer, and these have their rewards already.
        """
        if self._run.extend is not None and self.kind != EVALUATION:
            raise UsageError("ctx.park(): rows have their rewards in them, and with buffer= nobody waits for others")
        self.parked = True

    def facts(self) -> AttemptFacts:
        """Return what an engine says of this attempt to the process that it runs it in."""
        rows = self._run.extend is not None and self.kind != EVALUATION
        return AttemptFacts(self.member, self.attempt, self.version, self.key, self._seeds, self.kind, self._part, rows)

    def queued(self) -> None:
        """Note that an engine has no place yet for this attempt: its ``timeout`` does not run."""

    def begun(self) -> None:
        """Note that it has one, and that its ``timeout`` begins."""

    def scoring(self) -> AbstractAsyncContextManager[None]:
        """Give the slot back while a judge works; it is waited for again at the end.

        ::

            async with ctx.scoring():
                reward = await judge(reply)
        """
        return self._scoring()

    @asynccontextmanager
    async def _scoring(self) -> AsyncIterator[None]:
        slots = self._run.slots
        if slots is None:
            yield
            return
        slots.give_slot(self)
        try:
            yield
        finally:
            await slots.take_slot(self)
