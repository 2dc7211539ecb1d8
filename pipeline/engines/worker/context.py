"""What a runner sees of its attempt in a worker process.

The same names as :class:`pipeline.Context`, as far as they can be had there; what cannot says so. Verbs that change the
run are asked of the process that started the worker, over the socket.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from pipeline import errors
from pipeline.engines.values import Packer, Unpacker
from pipeline.engines.wire import Answer, Attempt, Tell
from pipeline.errors import ForebayError, RunnerRaised, UsageError
from pipeline.records import EVALUATION, Item, Rollout


class Line(Protocol):
    """How a context reaches the process that started the worker."""

    def tell(self, message: Tell, packer: Packer) -> None: ...


class WorkerContext:
    """Base of both contexts; attributes as in :class:`pipeline.Context`.

    ``deadline`` is a time on the clock of ``time.monotonic()``, or, in an ``async def`` runner, on its event loop's.
    """

    def __init__(self, line: Line, attempt: Attempt, item: Item, now: float) -> None:
        facts = attempt.facts
        self.item, self.uid = item, item.uid
        self.member, self.attempt, self.version = facts.member, facts.attempt, facts.version
        self.key, self.kind = facts.key, facts.kind
        self.resource: Any = None
        self.parked = False
        self.deadline = math.inf if attempt.left is None else now + attempt.left
        self._line, self._call, self._facts = line, attempt.call, facts
        self._rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The stream that the attempt would have in the process that started the worker."""
        if self._rng is None:
            self._rng = np.random.default_rng(self._facts.stream)
        return self._rng

    @property
    def partial(self) -> Rollout | None:
        """What an earlier attempt at this member kept, or None; a fresh copy each time."""
        if self._facts.part is None:
            return None
        from pipeline.store.codec import unpack

        return unpack(self._facts.part, f"partial of uid {self.uid}")[1]

    @property
    def log(self) -> WorkerLog:
        """A logger whose lines go to the log of the process that started the worker."""
        return WorkerLog(self._line, self._call)

    def park(self) -> None:
        """Let what this attempt returns wait for its reward."""
        if self._facts.rows and self.kind != EVALUATION:
            raise UsageError("ctx.park(): rows have their rewards in them, and with buffer= nobody waits for others")
        self.parked = True

    def scoring(self) -> Any:
        """Not offered: an attempt that waits for its judge would hold its worker all the same."""
        raise UsageError(
            "ctx.scoring() is not offered in a worker process: the attempt would hold its worker all the same. Judge "
            "in an async runner of the main process, which may call plain functions by engine.call()"
        )


class WorkerLog:
    """Sends lines to the process that started the worker: ``ctx.log.info("moved", pieces=3)``."""

    def __init__(self, line: Line, call: int) -> None:
        self._line, self._call = line, call

    def debug(self, event: str, **fields: Any) -> None:
        self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._say("error", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        packer = Packer(lenient=True)
        self._line.tell(Tell(self._call, "log", packer.plain([level, event, fields])), packer)


def answered(answer: Answer, body: Any) -> Any:
    """Return what was asked for, or raise what the verb raised."""
    if answer.error is None:
        return Unpacker(body).value(answer.value)
    name, text = answer.error
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ForebayError):
        raise kind(text)
    raise RunnerRaised(f"{name}: {text}", type_name=name)
