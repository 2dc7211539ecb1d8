"""What the trainer calls a rollout worker, around a pipeline in its synchronous form."""

from __future__ import annotations

import queue
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from pipeline import Batch, Group, Pipeline
from pipeline.errors import ConfigError, EndOfSource, TimedOut, UsageError
from pipeline.sync_form import SyncPipeline
from pipeline.wiring.resuming import Resumed
from tasks.trl.samples import Samples, samples_of
from tasks.trl.transfer import Push, WeightTransfer

Running = Literal["keep", "finish", "abort"]


class RolloutWorker:
    """Gives TRL's ``AsyncGRPOTrainer`` the rollouts of a pipeline, on whose own thread they are made.

    A context manager: the pipeline is open within it. The trainer calls the rest, all of it on its own thread.

    A step of the trainer takes a known number of samples: ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` times its processes. After so many steps so many have been trained, in the order in
    which they were taken, and a batch of the pipeline is acked when its last sample has been. With one trace for each
    rollout and ``groups`` times ``group_size`` samples a step, the pipeline's steps are the trainer's.

    A sample's ``model_version`` is that of the oldest weights in its group, in the trainer's numbers.

    Attributes:
        pipe: the pipeline's synchronous form.
        rollout_buffer: what the trainer takes :class:`RolloutSample` from.
        metrics_queue: what the trainer logs beside: the step and staleness of each batch.
    """

    def __init__(
        self,
        pipe: Pipeline,
        args: Any,
        *,
        groups: int,
        running: Running | None = None,
        advantages: str | Callable[[Group], Sequence[float]] = "grpo",
        epsilon: float = 0.0,
    ) -> None:
        """Args:
            pipe: not open yet. Its sources should have no end: the trainer asks for a batch more than it trains.
            args: the trainer's ``AsyncGRPOConfig``.
            groups: of a batch: those of one step of the trainer.
            running: what becomes of attempts in flight in a weight update, as :meth:`pipeline.Pipeline.weight_update`
                takes it.
            advantages, epsilon: as :func:`tasks.llm.token_rows` takes them.

        Raises:
            ConfigError: the trainer's options and the pipeline's do not go together.
            ImportError: TRL is not installed.
        """
        self._kind = _sample_kind()
        self._per_step = _check(pipe, args, groups)
        self._groups, self._running = groups, running
        self._bound: int = args.max_staleness
        self._sync_steps: int = args.weight_sync_steps
        self._advantages, self._epsilon = advantages, epsilon
        self._keeps = pipe.options.directory is not None
        # The trainer's own checkpoints hold the weights: what a trigger made without one could not be resumed.
        pipe._run.saves.own_files = True
        self.pipe: SyncPipeline = pipe.sync()
        self.rollout_buffer = Samples(self._fetch, self._samples, self._taken)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.dropped = 0
        self._left: dict[int, int] = {}  # of each step that is leased: its samples that were not trained yet
        self._ready: deque[int] = deque()  # the step of each sample that was not taken yet
        self._untrained: deque[int] = deque()  # and of those that were, and have not been trained
        self._done = 0
        self._started = self._stopped = self._followed = self._pushes = False
        self._model_version = 0
        self._versions: list[tuple[int, int]] = []  # the pipeline's number of a version, and the trainer's
        self._failure: BaseException | None = None
        self._seen, self._moved = -1, monotonic()

    def __enter__(self) -> Self:
        self.pipe.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipe.__exit__(kind, error, trace)

    def resume(self) -> Resumed:
        """Go on from the newest generation, and say with which of the trainer's checkpoints it goes::

            with RolloutWorker(pipe, args, groups=8) as worker:
                resumed = worker.resume()
                ...
                trainer.train(resume_from_checkpoint=resumed.external or None)

        In an empty directory this does nothing.

        Raises:
            ForebayError: as :meth:`pipeline.Pipeline.resume`.
        """
        return self.pipe.resume()

    def callback(self) -> Any:
        """Return a ``TrainerCallback`` for ``callbacks=``: it says exactly which steps are done, and commits a
        generation of the pipeline with each of the trainer's checkpoints, so that both go on from one place.

        Without it steps are counted by the weight updates that the trainer tells of, and nothing is saved.
        """
        from tasks.trl.following import following

        self._followed = True
        return following(self)

    def weight_transfer(self, push: Push) -> WeightTransfer:
        """Return what the trainer takes as ``weight_transfer=``: your function pushes the weights then.

        Args:
            push: is given the trainer's ``(name, tensor)`` pairs, and returns when the servers have them. No attempt
                starts meanwhile, and those in flight are treated as ``running=`` says.
        """
        self._pushes = True
        return WeightTransfer(self, push)

    # -- what the trainer calls ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let rollouts run. Called once, after the first weights were pushed.

        Raises:
            UsageError: the worker is not entered, or no weights were pushed.
        """
        self.pipe.start()
        self._started, self._moved = True, monotonic()

    def stop(self) -> None:
        """Take no more batches; called when training ends. The pipeline is closed at the end of the ``with``."""
        self._stopped = True
        self.rollout_buffer.clear()

    def update_model_version(self, model_version: int) -> None:
        """Note that the weights in use are the trainer's version ``model_version``: 1 at the start, one more for each
        time that it pushed."""
        if self._versions and not self._followed:
            self._trained((model_version - self._versions[0][1]) * self._sync_steps)
        if not self._pushes:
            with self._updating():  # they were pushed already, by the trainer
                pass
        self._model_version = model_version
        version = self.pipe.version
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, model_version))

    def check_health(self, stale_after_s: float) -> None:
        """Raise what went wrong; called while the trainer waits.

        Raises:
            ForebayError: what a verb of the pipeline raised.
            RuntimeError: no rollout has ended for ``stale_after_s`` seconds, the trainer's ``heartbeat_stale_after_s``:
                longer than any rollout may take.
        """
        if self._failure is not None:
            raise self._failure
        totals = self.pipe.ledger.totals.values()
        ended = sum(each.finished + each.failed + each.interrupted for each in totals)
        if ended != self._seen:
            self._seen, self._moved = ended, monotonic()
        elif monotonic() - self._moved > stale_after_s:
            raise RuntimeError(
                f"no rollout has ended for {stale_after_s:g} s: {self.pipe.statistics()}. If one may take so long, "
                "raise heartbeat_stale_after_s; else give the task a timeout="
            )

    # -- samples ---------------------------------------------------------------------------------------------------

    def _fetch(self, timeout: float | None) -> Batch:
        if not self._started or self._stopped:
            raise UsageError("rollout_buffer: samples are taken between start() and stop()")
        if self._failure is not None:
            raise self._failure
        try:
            return self.pipe.get_batch(self._groups, timeout=timeout)
        except TimedOut:
            raise queue.Empty from None
        except EndOfSource as error:
            self._failure = EndOfSource(
                f"{error}; the trainer takes samples ahead of its last step: Task(epochs=None), and max_steps= or "
                "num_train_epochs= to end"
            )
            raise self._failure from error
        except BaseException as error:
            self._failure = error
            raise

    def _samples(self, batch: Batch) -> list[Any]:
        made = samples_of(batch, self._kind, self._version_of, self._advantages, self._epsilon)
        self._left[batch.step] = len(made)
        self._ready.extend([batch.step] * len(made))
        self.metrics_queue.put({"forebay/step": float(batch.step), "forebay/staleness_max": float(batch.staleness)})
        return made

    def _taken(self, sample: Any) -> None:
        step = self._ready.popleft()
        if self._model_version - sample.model_version > self._bound:  # the trainer throws it away, by this very rule
            self.dropped += 1
            self._left[step] -= 1
        else:
            self._untrained.append(step)

    def _trained(self, steps: int) -> None:
        """Note that the trainer has done so many steps since training began, and ack the batches that were whole."""
        for _ in range(min(steps * self._per_step - self._done, len(self._untrained))):
            self._left[self._untrained.popleft()] -= 1
            self._done += 1
        last = None
        for step in sorted(self._left):
            if self._left[step]:
                break
            last = step
        if last is not None:
            self._left = {step: left for step, left in self._left.items() if step > last}
            self.pipe.ack(last)

    def _saved(self, checkpoint: str) -> None:
        """Commit a generation that goes with a checkpoint of the trainer's."""
        if self._keeps:
            self.pipe.save(self.pipe.ledger.step, external=checkpoint).committed()

    # -- versions --------------------------------------------------------------------------------------------------

    @contextmanager
    def _updating(self) -> Iterator[None]:
        with self.pipe.weight_update(max(self.pipe.ledger.step, self.pipe.version), self._running):
            yield

    def _version_of(self, version: int) -> int:
        """Return the trainer's number of a version of the pipeline. One of before a resume has none, and is taken for
        as many versions older than the first as steps lie between."""
        at = bisect_right(self._versions, version, key=lambda each: each[0]) - 1
        if at >= 0:
            return self._versions[at][1]
        first, model_version = self._versions[0]
        return model_version - -(-(first - version) // self._sync_steps)


def _sample_kind() -> Any:
    try:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    except ImportError as error:
        raise ImportError("tasks.trl needs the extra trl: pip install 'forebay[trl]'") from error
    return RolloutSample


def _check(pipe: Pipeline, args: Any, groups: int) -> int:
    """Return how many samples a step of the trainer takes.

    Raises:
        ConfigError: it is not known, or the trainer and the pipeline would wait for each other or throw samples away.
    """
    if groups.__class__ is not int or groups < 1:
        raise ConfigError.of("groups", groups, "a whole number of at least 1 is needed")
    if args.token_budget is None or args.token_budget > 0:
        raise ConfigError.of(
            "token_budget", args.token_budget, "0 is needed, so that each step takes a known number of samples"
        )
    bound, each, most = pipe.options.max_staleness, args.weight_sync_steps, args.max_staleness
    if bound is None or not each <= bound <= each * most:
        raise ConfigError(
            f"Pipeline(max_staleness={bound}): {each} to {each * most} steps are needed beside "
            f"AsyncGRPOConfig(weight_sync_steps={each}, max_staleness={most}). The trainer takes a batch ahead of the "
            "one that it trains, so with less both would wait for each other; with more it would throw samples away "
            "that the pipeline takes for fresh",
            option="max_staleness",
        )
    if pipe.options.to_dict()["staleness_policy"] == "mask":
        raise ConfigError(
            "staleness_policy='mask': the trainer throws away whole samples by their oldest token; use another",
            option="staleness_policy",
        )
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)
