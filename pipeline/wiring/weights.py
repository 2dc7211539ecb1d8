"""Weight updates: nothing starts while one is open, and nothing after one that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from pipeline.errors import ConfigError, UsageError
from pipeline.observe import events
from pipeline.runner.pool import Pool
from pipeline.wiring.pacing import Pacing
from pipeline.wiring.producing import Producer
from pipeline.wiring.state import RunState

Running: TypeAlias = Literal["keep", "finish", "abort"]


class Weights:
    """Which version of the weights rollouts are made with, and whether they may be made at all."""

    def __init__(
        self, state: RunState, producer: Producer, pool: Callable[[], Pool], pacing: Pacing | None = None
    ) -> None:
        self._state, self._producer, self._pool, self._pacing = state, producer, pool, pacing
        self._required: int | None = None
        self._open = False
        self._hurried = self._draining = False

    @property
    def updating(self) -> bool:
        """Whether an update is open."""
        return self._state.updating

    def require_update(self, version: int) -> None:
        """After a resume: servers may hold other weights, until an update has set ``version``."""
        self._required = version

    def check_start(self, weights_current: bool) -> None:
        """Raise unless rollouts may start with the weights that there are.

        Raises:
            UsageError: no update has set the restored version since the resume, or the last push failed.
        """
        if weights_current:
            self._required, self._state.weights_failed = None, False
        if self._state.weights_failed:
            raise UsageError("the last weight_update failed; repeat it, or start(weights_current=True)")
        if self._required is not None:
            raise UsageError(
                f"the run was resumed at version {self._required}, and its servers may hold other weights: "
                f"push them inside `weight_update(version={self._required})`, or start(weights_current=True)"
            )

    def open_gate(self) -> None:
        """From here on attempts start, whenever no update is open."""
        self._open = True
        self._producer.paused = self._state.updating or self._state.weights_failed

    def reopen(self) -> None:
        """Let attempts start again, at full concurrency within this turn of the loop, if nothing else forbids it."""
        if self._open and not self._state.weights_failed and not self._state.updating:
            self._producer.paused = False
            self._pool().pump()

    async def begin(self, version: int, running: Running | None) -> None:
        """Stop starting attempts, and treat those in flight as told; None: as ``partial=`` allows."""
        if running is None:
            running = "keep" if self._state.options.partial else "finish"
        if self._state.updating:
            raise UsageError("a weight_update is open already")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ConfigError.of("version", version, "a whole number of at least 0 is needed")
        if version < self._state.version:
            raise ConfigError.of(
                "version", version, f"versions never fall: the weights in use have {self._state.version}"
            )
        if running not in ("keep", "finish", "abort"):
            raise ConfigError.of("running", running, "'keep', 'finish' or 'abort' is needed")
        if running == "keep" and not self._state.options.partial:
            raise ConfigError.of(
                "running", running, "with partial=False a rollout has one version: 'finish' or 'abort' what runs"
            )
        if running == "finish" and self._state.experience is not None:
            raise ConfigError.of(
                "running",
                running,
                "rollouts that wait for the buffer's limiter would never end; 'keep' them or 'abort'",
            )
        self._state.updating = True
        try:
            if self._pacing is not None and running == "keep":
                await self._wait_for_the_old(self._pacing, version)
            self._producer.paused = True
            pool = self._pool()
            if running == "abort" or (running == "finish" and self._hurried):
                pool.abort("weight update")
            if running != "keep":
                self._draining = True
                await pool.drained()
                self._draining = False
                self._producer.sort_ready()
        except BaseException:
            self._draining = False
            # Nothing was pushed: rollouts go on with the weights that there are.
            self._state.updating = False
            self.reopen()
            self._state.changed.notify()
            raise

    def hurry(self) -> None:
        """The run is about to stop: nobody waits any more for rollouts to end, which are cut then anyway."""
        self._hurried = True
        if self._draining:
            self._pool().abort("stopping")
        self._state.changed.notify()

    async def _wait_for_the_old(self, pacing: Pacing, version: int) -> None:
        """Wait until whatever ``version`` would put past its bound has finished; others start and end meanwhile.

        Nobody is waited for who cannot end by itself: while nothing may start, or the run has failed, this returns.
        """
        state, producer = self._state, self._producer
        await state.changed.wait_for(
            lambda: producer.paused or self._hurried or state.failure is not None or not pacing.outdated_by(version)
        )

    def end(self, version: int, error: BaseException | None, *, failed: bool) -> None:
        """Close the update: with success the version is set and every slot has work at once."""
        self._state.updating = False
        if failed:
            self._state.weights_failed = True
            self._state.log.error(events.WEIGHTS_FAILED, version=version, error=repr(error))
            self._state.changed.notify()
            return
        self._state.weights_failed = False
        if self._required is not None and version >= self._required:
            self._required = None
        self._state.version, self._state.limit = version, None
        self.reopen()
        self._state.log.debug(events.WEIGHTS_UPDATED, version=version, running=self._pool().in_flight)
        self._state.changed.notify()
