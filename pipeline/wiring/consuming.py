"""The consumer: waits for a batch, leases it, and takes it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio.lowlevel

from pipeline.buffer import Batch, Group
from pipeline.buffer.staleness import floor, staleness
from pipeline.errors import ClosedError, ConfigError, Damaged, EndOfSource, ForebayError, Starved, TimedOut, UsageError
from pipeline.ledger import BUFFERED, LEASED, Entry, Lease
from pipeline.observe import events
from pipeline.records import BatchHint
from pipeline.runner.pool import Pool
from pipeline.sampler.progress import Progress, add_counts
from pipeline.store.segments import PayloadReader
from pipeline.store.service import RunBlocking
from pipeline.wiring.pacing import Pacing
from pipeline.wiring.producing import Producer
from pipeline.wiring.state import RunState


class Consumer:
    """Hands out batches. One ``get_batch`` may wait at a time."""

    def __init__(
        self, state: RunState, producer: Producer, pool: Callable[[], Pool], in_thread: RunBlocking[Any]
    ) -> None:
        self._state, self._producer, self._pool, self._in_thread = state, producer, pool, in_thread
        self.pacing: Pacing | None = None
        self.reader: PayloadReader | None = None
        self.closed = False

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._state.refresh_progress()

    async def get_batch(self, groups: int) -> Batch:
        """Wait for ``groups`` finished groups and lease them for the next step.

        Raises:
            EndOfSource: every source is at its end and nothing is left.
            Starved: nothing that could still be produced would be accepted.
            RolloutFailed: a task's policy is to stop at a failure.
        """
        state = self._state
        begun = state.clock.now()
        self._check(groups)
        # A trainer that always finds a batch ready would otherwise never let the rollouts have a turn.
        await anyio.lowlevel.checkpoint()
        self._check(groups)
        step = state.ledger.next_step
        state.asked = state.progress.batch_groups = groups
        state.limit = None
        lease = self._repeat(step, groups)
        repeated = lease is not None
        if lease is None:
            state.wanted = groups
            try:
                state.expire_stale()
                self._pool().pump()
                await state.changed.wait_for(lambda: self._answer(groups))
            finally:
                state.wanted = 0
            self.raise_failure()
            # Meanwhile a batch may have been given back: then this is the batch of its step.
            lease = self._lease(state.ledger.next_step, groups)
        return await self._given(lease, repeated, begun)

    async def _given(self, lease: Lease, repeated: bool, begun: float) -> Batch:
        """Return the batch that is leased: from here on a cancelled caller gives it back, so that it is not lost."""
        state = self._state
        try:
            batch = await self._assemble(lease, repeated)
        except BaseException:
            self.release(lease.step)
            raise
        state.log.debug(
            events.BATCH_GIVEN,
            step=batch.step,
            groups=len(batch),
            staleness_max=batch.staleness,
            repeated=repeated,
            waited=state.clock.now() - begun,
        )
        return batch

    async def sample(self, count: int, how: Mapping[str, Any]) -> Any:
        """Draw from the run's buffer, as soon as its limiter lets it.

        Raises:
            EndOfSource: too few rows are there, or none that may be drawn so, and no more will come.
            Starved: rows and samples wait for each other.
        """
        state, experience = self._state, self._state.experience
        if experience is None:
            raise UsageError("sample() is for a pipeline with buffer=; get_batch() gives groups")
        feed = experience.feed
        draw = partial(feed.sample, count, how)
        await anyio.lowlevel.checkpoint()
        while True:
            self.raise_failure()
            added = feed.added
            try:
                return await self._in_thread(draw) if feed.large(count, how) else draw()
            except TimedOut as error:
                may, why = error.may, str(error)
            except Starved as error:  # nothing that is there may be drawn so: what comes next perhaps may
                may, why = partial(self._more_than, added), str(error)
            self._pool().pump()
            await state.changed.wait_for(partial(self._settled, may))
            if self.closed or state.failure is not None or may():
                continue
            if self._producer.drained and not self._busy:
                raise EndOfSource(f"{why}; and every source is at its end")
            raise Starved(f"{why}; and no rollout can add more before that")

    def _more_than(self, added: int) -> bool:
        experience = self._state.experience
        return experience is not None and experience.feed.added > added

    @property
    def _busy(self) -> int:
        """How many attempts there are whose rows may come; those of evaluations add none."""
        return self._pool().in_flight + self._pool().scoring - self._state.evaluating

    def _settled(self, may: Callable[[], object]) -> bool:
        """Whether a waiting trainer can be answered: rows may be sampled, or never will be."""
        state, pool, busy = self._state, self._pool(), self._busy
        if self.closed or state.failure is not None or may():
            return True
        assert state.experience is not None
        if busy > state.experience.held:
            return False
        begun = pool.in_flight - state.evaluating + state.experience.without_slot
        if busy and (begun < pool.concurrency and not self._producer.blocked):
            return False
        return bool(busy) or self._nothing_comes()

    def release(self, step: int) -> None:
        """Take the batch of ``step`` back; does nothing if it is not leased."""
        state = self._state
        entries = state.ledger.release(step)
        state.buffer.put_back([(entry.uid, state.judged(entry)) for entry in entries])
        if entries:
            state.log.info(events.BATCH_RELEASED, step=step, groups=len(entries))
            state.changed.notify()

    def release_all(self) -> None:
        """Take every leased batch back."""
        for step in sorted(self._state.ledger.leases, reverse=True):
            self.release(step)

    def ack(self, step: int) -> None:
        """Note that the weights include every batch up to ``step``; their payloads are let go.

        Raises:
            UsageError: ``step`` was never handed out, or was trained before.
        """
        state = self._state
        state.ledger.check_ack(step)
        if state.experience is not None:
            state.experience.acked()
        entries, leases = state.ledger.entries, state.ledger.leases
        tasks = [entries[uid].task for leased, lease in leases.items() if leased <= step for uid in lease.uids]
        state.progress.consumed_samples = add_counts(state.progress.consumed_samples, tasks)
        done = state.ledger.ack(step)
        state.limit = None
        for uid in done:
            state.buffer.storage.discard(uid)
        state.context.update(step=step)
        self._pool().pump()

    # -- waiting -----------------------------------------------------------------------------------------------

    def _check(self, groups: int) -> None:
        if self._state.experience is not None:
            raise UsageError("these rollouts fill a buffer, and make no batches of groups: sample() from it")
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise ConfigError.of("groups", groups, "a whole number of at least 1 is needed")
        self.raise_failure()
        if self._state.wanted:
            raise UsageError("get_batch is being waited for already; one trainer takes one batch at a time")
        options = self._state.options
        if options.capacity is not None and groups > options.capacity:
            raise ConfigError(
                f"groups={groups} is more than capacity={options.capacity}: such a batch never comes; "
                "raise capacity= or ask for less",
                option="groups",
            )
        if self._state.mixing is not None:
            self._state.mixing.check(groups)

    def raise_failure(self) -> None:
        """Raise what ended the run, or that it is closed, if so it is."""
        state = self._state
        if state.failure is not None:
            state.told = True
            if isinstance(state.failure, ForebayError):
                raise state.failure
            raise ForebayError(f"the run has failed: {state.failure!r}") from state.failure
        if self.closed:
            raise ClosedError("the pipeline is closed; open it again with `async with`")

    def _answer(self, groups: int) -> bool:
        """Whether the waiting trainer can be answered: with a batch, an end, or an error."""
        state = self._state
        if self.closed or state.failure is not None:
            return True
        if state.buffer.ready(groups) and (self.pacing is None or self.pacing.fits(groups)):
            return True
        return self._nothing_comes()

    def _nothing_comes(self) -> bool:
        """Whether waiting is pointless: nothing runs, nothing can start, nothing is to be requeued."""
        pool, producer = self._pool(), self._producer
        if pool.in_flight + pool.scoring > self._state.evaluating:
            return False
        if producer.paused:
            return self._state.weights_failed and not self._state.updating
        return producer.blocked and not producer.rewards_due

    # -- leasing -----------------------------------------------------------------------------------------------

    def _repeat(self, step: int, groups: int) -> Lease | None:
        """Lease again the batch that was handed out for ``step`` before a crash, if it can be the same."""
        state = self._state
        if not self._repeats(step, groups):
            return None
        return self._take_lease(step, state.pending.popleft().uids)

    def _repeats(self, step: int, groups: int) -> bool:
        """Whether the batch of ``step`` can be the one that was handed out for it before a crash. If it cannot, the
        groups that wait to be handed out again are ordinary buffered ones from here on."""
        state = self._state
        if not state.pending:
            return False
        lease = state.pending[0]
        oldest = floor(step, state.options.max_staleness)
        fresh = oldest is None or all(state.judged(state.ledger.entries[uid]) >= oldest for uid in lease.uids)
        if lease.step == step and len(lease.uids) == groups and fresh:
            return True
        state.release_pending()
        return False

    def _lease(self, step: int, groups: int) -> Lease:
        state = self._state
        uids = state.buffer.take(groups)
        if len(uids) < groups and (state.weights_failed or not self._producer.drained):
            state.buffer.put_back([(uid, state.judged(state.ledger.entries[uid])) for uid in uids])
            raise Starved(self._why_starved(step, groups))
        if not uids:
            leased = state.ledger.count(LEASED)
            still = f"; {leased} groups are leased and may still be released" if leased else ""
            raise EndOfSource(f"step {step}: every source is at its end and nothing is left to train{still}")
        return self._take_lease(step, uids)

    def _take_lease(self, step: int, uids: list[int]) -> Lease:
        state = self._state
        lease = state.ledger.lease(step, uids)
        if state.masks:
            least = floor(step, state.options.max_staleness) or 0
            for uid in uids:
                entry = state.ledger.entries[uid]
                entry.masked = entry.too_old(least)
        state.record(BatchHint(step, lease.uids, lease.lives))
        progress = state.progress
        if step > progress.target_upto_future_step:
            tasks = [state.ledger.entries[uid].task for uid in uids]
            progress.target_samples = add_counts(progress.target_samples, tasks)
            progress.target_upto_future_step = step
        state.mark_window()
        return lease

    def _why_starved(self, step: int, groups: int) -> str:
        ledger, options, version = self._state.ledger, self._state.options, self._state.version
        facts = (
            f"the batch of step {step} needs {groups} groups, {ledger.count(BUFFERED)} are buffered, nothing runs, and "
            f"nothing may start: {ledger.count(LEASED)} are leased, {ledger.step} steps are trained, the weights have "
            f"version {version}, max_staleness={options.max_staleness}, capacity={options.capacity}"
        )
        disk = self._producer.disk
        if disk is not None and disk.full:
            return f"{facts}. {disk.why()}"
        if self._state.weights_failed:
            return f"{facts}. The last weight_update failed, and nothing starts until one succeeds"
        if options.max_staleness is not None and ledger.step - version > options.max_staleness:
            return f"{facts}. Rollouts of these weights would be too old: call weight_update() after each step"
        return f"{facts}. Call ack(step) when a step is done, or raise capacity= or max_staleness="

    # -- assembling ----------------------------------------------------------------------------------------------

    async def _assemble(self, lease: Lease, repeated: bool) -> Batch:
        storage, entries = self._state.buffer.storage, self._state.ledger.entries
        blobs = {uid: storage.blobs(uid) for uid in lease.uids}
        absent = [uid for uid, held in blobs.items() if held is None]
        if absent:
            blobs.update(await self._read(absent))
        least = floor(lease.step, self._state.options.max_staleness) if self._state.masks else None
        groups = [group_of(lease.step, entries[uid], blobs[uid], least) for uid in lease.uids]
        return Batch(lease.step, groups, release=self.release, repeated=repeated)

    async def _read(self, uids: list[int]) -> dict[int, list[bytes]]:
        """Return the payloads of groups that lie, at least in part, in segments alone."""
        assert self.reader is not None
        reader, storage = self.reader, self._state.buffer.storage
        held = {uid: storage.get(uid) for uid in uids}
        absent = [
            (uid, member, place)
            for uid, members in held.items()
            for member, (blob, place) in members.items()
            if blob is None and place is not None
        ]
        read = await self._in_thread(lambda: reader.read_many(absent))
        return {
            uid: [read[uid, member] if blob is None else blob for member, (blob, _) in sorted(members.items())]
            for uid, members in held.items()
        }


def group_of(step: int, entry: Entry, blobs: list[bytes] | None, least: int | None) -> Group:
    """Return a group as the trainer of ``step`` gets it.

    Args:
        step: the trainer's step.
        entry: what the ledger says of the item.
        blobs: its members' payloads, in order.
        least: the oldest version of a token that is not masked, where tokens are judged.

    Raises:
        Damaged: there is no payload.
    """
    if not blobs:
        raise Damaged(f"uid {entry.uid} is buffered, but no payload of it is known")
    return Group(
        entry.uid,
        entry.task,
        entry.epoch,
        entry.index,
        entry.effective,
        entry.newest,
        staleness(step, entry.effective),
        entry.rewards / len(blobs),
        blobs,
        entry.given,
        _least=least,
        _aged=frozenset() if least is None else entry.members_below(least),
    )
