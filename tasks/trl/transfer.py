"""Weights that are pushed by a function of the user's own, as part of a weight update of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.trl.worker import RolloutWorker

Push = Callable[[Iterator[tuple[str, Any]]], object]


class WeightTransfer:
    """What the trainer takes as ``weight_transfer=``; see :meth:`RolloutWorker.weight_transfer`."""

    def __init__(self, worker: RolloutWorker, push: Push) -> None:
        self._worker, self._push = worker, push
        self._update: ExitStack | None = None

    def init_weight_transfer(self) -> None:
        """Called by the trainer when training begins: nothing is to be set up."""

    def pause(self) -> None:
        """Let no attempt start from here on, and treat the running ones as the worker was told."""
        update = ExitStack()
        update.enter_context(self._opened())
        self._update = update

    def _opened(self) -> AbstractContextManager[None]:
        return self._worker._updating()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push ``(name, tensor)`` pairs. After a push that failed nothing starts until one has succeeded."""
        assert self._update is not None, "the trainer pauses before it sends"
        try:
            self._push(iterator)
        except BaseException as error:
            update, self._update = self._update, None
            update.__exit__(type(error), error, error.__traceback__)
            raise

    def resume(self) -> None:
        """Let attempts start again, with the new weights."""
        if self._update is not None:
            update, self._update = self._update, None
            update.close()

    def destroy(self) -> None:
        """Called by the trainer when training ends. An update that is still open has failed."""
        if self._update is not None:
            update, self._update = self._update, None
            error = RuntimeError("training ended within a weight update")
            update.__exit__(type(error), error, None)
