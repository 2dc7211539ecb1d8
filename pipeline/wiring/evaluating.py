"""Evaluation on the pool of the training: outside the ledger, in a bounded part of the slots.

It begins nothing while a weight update is open, as rollouts do not; an attempt that an update cuts is begun again. Its
failures are its own: they end the evaluation at most, never the run. What it made is kept (:mod:`evaluations`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from pipeline.errors import (
    ConfigError,
    Damaged,
    ForebayError,
    RolloutFailed,
    RolloutInvalid,
    RolloutTooDeep,
    SourceError,
    Starved,
    UsageError,
    WorkerDied,
    WorkerFailed,
)
from pipeline.observe import events
from pipeline.records import EVALUATION, Evaluated, Item, Rollout
from pipeline.runner.context import RunFacts
from pipeline.runner.policies import Verdict, after_failure, check_rollout, error_text
from pipeline.runner.pool import Job, Pool
from pipeline.store.codec import pack
from pipeline.store.segments import PayloadReader
from pipeline.store.service import RunBlocking
from pipeline.task import StreamSource, Task
from pipeline.wiring.evaluations import Evaluation, Kept, Key, Outcome
from pipeline.wiring.state import RunState

_UIDS = 2**63  # above every uid of the ledger; the incarnation stands in the bits from 40 on


class Examination:
    """One call of ``evaluate`` while it goes on."""

    def __init__(self, task: Task, version: int, keys: Sequence[Key]) -> None:
        self.task, self.version, self.mark = task, version, _mark(task)
        self.outcomes: dict[Key, Outcome | None] = dict.fromkeys(keys)
        self.left = len(self.outcomes)
        self.error: ForebayError | None = None
        self.over = not self.left

    def settle(self, outcome: Outcome) -> None:
        """Note what an item came to."""
        self.outcomes[outcome.index, outcome.member] = outcome
        self.left -= 1
        self.over = self.over or not self.left

    def fail(self, error: ForebayError) -> None:
        """End it with an error; the first counts."""
        self.error = self.error or error
        self.over = True


class EvaluationJob(Job, eq=False):
    """An attempt of an evaluation."""

    examination: Examination
    deaths: int = 0


class _Due(NamedTuple):
    examination: Examination
    item: int
    member: int
    attempt: int = 1
    failures: int = 0
    deaths: int = 0


class Evaluator:
    """Which attempts of evaluations start, and what becomes of them. All but :meth:`evaluate` is synchronous."""

    def __init__(self, state: RunState, facts: Callable[[], RunFacts]) -> None:
        self.queue: Final[deque[_Due]] = deque()
        self._state, self._facts = state, facts
        self._jobs: set[EvaluationJob] = set()
        self._had_the_turn = False
        self._uids = 0

    # -- the producer's side -----------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether an evaluation may have the next slot, and training had the one before if there is only one."""
        return self._room and not (self._had_the_turn and self._part >= self._state.options.concurrency)

    @property
    def _part(self) -> int:
        options = self._state.options
        return max(1, int(options.concurrency * options.evaluation_share))

    @property
    def _room(self) -> bool:
        return sum(job.has_slot for job in self._jobs) < self._part

    def passed(self) -> None:
        """Note that a rollout for the training was begun."""
        self._had_the_turn = False

    def next_job(self) -> EvaluationJob | None:
        """Return the next attempt, or None if none may start now."""
        while self.queue and self._room:
            due = self.queue.popleft()
            if due.examination.over:
                continue
            try:
                content = due.examination.task.source.item(due.item)
            except Exception as error:
                name = due.examination.task.name
                failed = SourceError(f"task {name!r}: the source failed at item {due.item}: {error!r}")
                failed.__cause__ = error
                due.examination.fail(failed)
                self._state.changed.notify()
                continue
            self._had_the_turn = True
            return self._begin(due, content)
        return None

    def _begin(self, due: _Due, content: Any) -> EvaluationJob:
        state, task = self._state, due.examination.task
        self._uids += 1
        uid = _UIDS + (state.incarnation << 40) + self._uids
        job = EvaluationJob(
            Item(task.name, 0, due.item, uid, content),
            due.member,
            due.attempt,
            state.version,
            task,
            0,
            state.clock.now(),
            due.examination,
            due.deaths,
            kind=EVALUATION,
            _failures=due.failures,
            _run=self._facts(),
            _stream=_stream(state.options.seed, task.name, due),
        )
        self._jobs.add(job)
        state.evaluating = len(self._jobs)
        return job

    def finished(self, job: EvaluationJob, rollout: Rollout) -> None:
        """Take in what a runner returned."""
        state, examination = self._state, job.examination
        try:
            fault = check_rollout(rollout, job.item)
            if fault is not None:
                self.failed(job, ValueError(f"{job.item}: {fault}"), "not finite")
                return
            oldest = job.version if rollout.oldest is None else rollout.oldest
            newest = max(oldest, state.version) if rollout.newest is None else rollout.newest
            blob = pack(rollout, job.item, member=job.member, attempt=job.attempt, life=0, versions=(oldest, newest))
        except RolloutTooDeep as error:
            self.failed(job, error, "too deep")
            return
        except (RolloutInvalid, WorkerFailed) as error:
            self._ended(job)
            examination.fail(error)
            state.changed.notify()
            return
        self._ended(job)
        if not examination.over:
            self._keep(job, rollout, blob, (oldest, newest))
        state.changed.notify()

    def _keep(self, job: EvaluationJob, rollout: Rollout, blob: bytes, versions: tuple[int, int]) -> None:
        state, examination, index = self._state, job.examination, job.item.index
        segment, offset = -1, 0
        if state.writer is not None:
            location = state.writer.writer.place(blob, job.item.uid, job.member, 0)
            segment, offset = location.segment, location.offset
        reward = float(rollout.reward)
        state.record(
            Evaluated(
                job.task.name,
                examination.version,
                index,
                job.member,
                job.item.uid,
                reward,
                *versions,
                examination.mark,
                segment,
                offset,
                len(blob),
                rollout.tokens,
                state.clock.now() - job.started,
            )
        )
        examination.settle(Outcome(index=index, member=job.member, reward=reward, _blob=blob))

    def failed(self, job: EvaluationJob, error: BaseException, reason: str) -> None:
        """Retry, give up, or end the evaluation, as the task's policy says."""
        state, examination, index = self._state, job.examination, job.item.index
        self._ended(job)
        failures = job._failures + 1
        verdict = after_failure(job.task.on_failure, failures)
        text = error_text(error)
        final = verdict is not Verdict.RETRY
        log = state.log.warning if final else state.log.info
        log(
            events.EVALUATION_FAILED,
            task=job.task.name,
            index=index,
            attempt=job.attempt,
            reason=reason,
            error=text,
            final=final,
        )
        if verdict is Verdict.RETRY and not examination.over:
            self.queue.append(_Due(examination, index, job.member, job.attempt + 1, failures))
        elif verdict is Verdict.STOP:
            stop = RolloutFailed(f"{job.item}, sample {job.member}, attempt {job.attempt}: {text}")
            stop.__cause__ = error
            examination.fail(stop)
        elif not examination.over:
            examination.settle(Outcome(index=index, member=job.member, error=text))
        state.changed.notify()

    def interrupted(self, job: EvaluationJob) -> None:
        """An attempt was cut: it is begun again, unless nobody waits for it any more."""
        self._ended(job)
        self._again(job, job.deaths)

    def lost(self, job: EvaluationJob, error: WorkerDied) -> None:
        """A worker process died under an attempt: it is begun again, unless that has happened too often."""
        self._ended(job)
        state, examination, index, deaths = self._state, job.examination, job.item.index, job.deaths
        deaths += not error.planned
        if deaths > state.options.max_deaths and not examination.over:
            text = error_text(error)
            state.log.warning(
                events.EVALUATION_FAILED,
                task=job.task.name,
                index=index,
                attempt=job.attempt,
                reason="quarantined",
                error=text,
                final=True,
            )
            examination.settle(Outcome(index=index, member=job.member, error=text))
            state.changed.notify()
            return
        self._again(job, deaths)

    def _again(self, job: EvaluationJob, deaths: int) -> None:
        if not job.examination.over:
            again = _Due(job.examination, job.item.index, job.member, job.attempt + 1, job._failures, deaths)
            self.queue.appendleft(again)
        self._state.changed.notify()

    def _ended(self, job: EvaluationJob) -> None:
        self._jobs.discard(job)
        self._state.evaluating = len(self._jobs)

    # -- the caller's side -------------------------------------------------------------------------------------

    async def evaluate(
        self,
        examination: Examination,
        *,
        pool: Pool,
        reader: PayloadReader | None,
        in_thread: RunBlocking[Any],
        raise_failure: Callable[[], None],
        written: Callable[[], Awaitable[None]],
    ) -> Evaluation:
        """Run what is not kept already, and return all of it. Cancelled, it cuts what it has in flight."""
        state, begun = self._state, self._state.clock.now()
        await self._reuse(examination, reader, in_thread)
        self.queue.extend(_Due(examination, *key) for key, outcome in examination.outcomes.items() if outcome is None)
        try:
            pool.pump()
            await state.changed.wait_for(lambda: self._answer(examination))
        finally:
            self._stop(examination, pool)
        if examination.error is not None:
            raise examination.error
        raise_failure()
        if examination.left:
            raise Starved(
                f"evaluate({examination.task.name!r}): {examination.left} items are left, the last "
                "weight_update failed, and nothing starts until one succeeds"
            )
        await written()
        result = Evaluation(
            task=examination.task.name,
            version=examination.version,
            outcomes=[outcome for outcome in examination.outcomes.values() if outcome is not None],
            seconds=state.clock.now() - begun,
        )
        state.log.info(
            events.EVALUATION_DONE,
            task=result.task,
            version=result.version,
            items=len(result),
            failed=result.failed,
            reused=result.reused,
            seconds=result.seconds,
        )
        return result

    def _answer(self, examination: Examination) -> bool:
        state = self._state
        if examination.over or state.failure is not None or state.ended:
            return True
        return state.weights_failed and not any(job.examination is examination for job in self._jobs)

    def _stop(self, examination: Examination, pool: Pool) -> None:
        """Forget what is due, and cut what is in flight: after the end there is neither, unless it was an early one."""
        examination.over = True
        if any(due.examination is examination for due in self.queue):
            others = [due for due in self.queue if due.examination is not examination]
            self.queue.clear()  # in place: the producer looks at this very one
            self.queue.extend(others)
        if any(job.examination is examination for job in self._jobs):
            pool.abort("evaluation ended", lambda job: type(job) is EvaluationJob and job.examination is examination)

    async def _reuse(self, examination: Examination, reader: PayloadReader | None, in_thread: RunBlocking[Any]) -> None:
        state, task, version = self._state, examination.task.name, examination.version
        kept = state.evaluations.find(task, version, examination.mark, state.incarnation)
        found = {key: each for key, each in kept.items() if key in examination.outcomes}
        if not found or reader is None or state.writer is None:
            return
        await state.writer.flush()  # some may be from this life, and still on their way to the disk
        for key, blob in (await in_thread(lambda: _read(reader, found))).items():
            if isinstance(blob, Damaged):
                # It is a saving, not a promise: what cannot be read is made again.
                state.log.warning(
                    events.EVALUATION_UNREADABLE, task=task, version=version, index=key[0], error=str(blob)
                )
                continue
            reward = found[key].made.reward
            examination.settle(Outcome(index=key[0], member=key[1], reward=reward, reused=True, _blob=blob))


def examine(
    state: RunState, task: Task | str, version: int | None, items: int | Sequence[int] | None, samples: int
) -> Examination:
    """Check the arguments of ``evaluate``.

    Raises:
        ConfigError: one of them is not what it can be.
    """
    found = state.tasks.get(task if isinstance(task, str) else getattr(task, "name", ""))
    if isinstance(task, Task) and found is not None and found is not task:
        raise ConfigError.of("task", task, f"the run has another task named {task.name!r}; give this one its own name")
    given = task if isinstance(task, Task) else found
    if given is None:
        raise ConfigError.of("task", task, f"a Task, or one of the run's tasks is needed: {', '.join(state.tasks)}")
    if isinstance(given.source, StreamSource):
        raise ConfigError.of("task", given, "the items of a stream have no index, so they cannot be evaluated")
    now = state.version
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= now):
        raise ConfigError.of("version", version, f"a version of 0 to {now}, that of the weights in use, is needed")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError.of("samples", samples, "a whole number of at least 1 is needed")
    indices = _indices(given, items)
    keys = [(index, member) for index in indices for member in range(samples)]
    return Examination(given, now if version is None else version, keys)


def _indices(task: Task, items: int | Sequence[int] | None) -> Sequence[int]:
    length = task.source.length()
    if items is None:
        if length is None:
            raise ConfigError.of("items", items, f"the source of {task.name!r} is endless; say how many items")
        return range(length)
    indices = range(items) if isinstance(items, int) and not isinstance(items, bool) else items
    if not isinstance(indices, Sequence) or isinstance(indices, (str, bytes)):
        raise ConfigError.of("items", items, "how many items, or a list of indices, is needed")
    most = 2**62 if length is None else length
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < most:
            raise ConfigError.of("items", items, f"the source of {task.name!r} has the items 0 to {most - 1}")
    if len(set(indices)) != len(indices):
        raise ConfigError.of("items", items, "each index may stand there once; for more of each, use samples=")
    return indices


def _mark(task: Task) -> str:
    try:
        mark = task.source.mark()
    except Exception as error:
        raise SourceError(f"task {task.name!r}: its source's mark() failed: {error!r}") from error
    return hashlib.blake2b(msgspec.msgpack.encode(mark), digest_size=8).hexdigest()


def check_evaluation(started: bool, updating: bool) -> None:
    """Raise UsageError where an evaluation could never begin."""
    if not started:
        raise UsageError("evaluate() comes after start()")
    if updating:
        raise UsageError("a weight_update is open, and nothing starts in it: evaluate() comes after its end")


def _read(reader: PayloadReader, found: dict[Key, Kept]) -> dict[Key, bytes | Damaged]:
    blobs: dict[Key, bytes | Damaged] = {}
    for key, kept in found.items():
        made = kept.made
        try:
            read = reader.read_many([(made.uid, made.member, kept.location)])
            blobs[key] = read[made.uid, made.member]
        except Damaged as error:
            blobs[key] = error
    return blobs


def _stream(seed: int, task: str, due: _Due) -> tuple[int, ...]:
    """What seeds the random stream of a sample: the same for every version, so that what differs is the weights."""
    name = int.from_bytes(hashlib.blake2b(f"evaluate/{task}".encode(), digest_size=8).digest(), "little")
    return seed % 2**64, name, due.item, due.member, due.failures
