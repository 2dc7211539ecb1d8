"""Faults by script: which attempts fail, hang, are slow or are cancelled, and after which write the process dies.

::

    task = Task("math", source=source, run=faulty(solve, Fail(index=3), Hang(index=5, attempt=None)), timeout=30)
    pipe = Pipeline(task, directory="runs/a", files=KillingFiles(after=100))
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import msgspec

from pipeline.errors import ConfigError
from pipeline.interfaces import Runner
from pipeline.records import Item, Rollout
from pipeline.runner.context import Context
from pipeline.store.files import OsFiles


class ScriptedFault(RuntimeError):
    """What :class:`Fail` raises."""


class _Where(msgspec.Struct, frozen=True, kw_only=True):
    task: str | None = None
    index: int | None = None
    epoch: int | None = None
    member: int | None = None
    attempt: int | None = 1

    def __post_init__(self) -> None:
        # A fault that can never strike would make a test that cannot fail.
        for name, least in (("index", 0), ("epoch", 0), ("member", 0), ("attempt", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError.of(name, value, f"a whole number of at least {least} is needed, or None for any")

    def hits(self, item: Item, ctx: Context) -> bool:
        """Whether the attempt is one of those that are meant."""
        place = (item.task, item.index, item.epoch, ctx.member, ctx.attempt)
        meant = (self.task, self.index, self.epoch, self.member, self.attempt)
        return all(want is None or want == have for want, have in zip(meant, place, strict=True))


class Fail(_Where, frozen=True, kw_only=True):
    """The attempt raises. None for ``task``, ``index``, ``epoch``, ``member`` or ``attempt`` means any; attempts count
    from 1, so an item that always fails has ``attempt=None``.
    """

    late: bool = False
    """Whether the runner runs first, and what it returned is lost."""
    message: str = "this attempt fails by script"


class Hang(_Where, frozen=True, kw_only=True):
    """The attempt never ends by itself: a timeout, a weight update or the end of the run cuts it."""


class Slow(_Where, frozen=True, kw_only=True):
    """The attempt takes longer, on the event loop's clock."""

    seconds: float


class Cancel(_Where, frozen=True, kw_only=True):
    """The runner lets out a cancellation that nobody asked for, as when what it waits for was cancelled; on asyncio."""


class Return(_Where, frozen=True, kw_only=True):
    """The attempt returns ``value``: a reward that is not finite, something that is no rollout."""

    value: Any


Fault: TypeAlias = Fail | Hang | Slow | Cancel | Return


def faulty(run: Runner, *faults: Fault) -> Runner:
    """Return a runner that does what ``run`` does, but for ``faults``; the first that hits an attempt counts."""

    @functools.wraps(run)
    async def with_faults(item: Item, ctx: Context) -> Rollout:
        for fault in faults:
            if fault.hits(item, ctx):
                return await _suffer(fault, run, item, ctx)
        return await run(item, ctx)

    return with_faults


async def _suffer(fault: Fault, run: Runner, item: Item, ctx: Context) -> Rollout:
    match fault:
        case Fail():
            if fault.late:
                await run(item, ctx)
            raise ScriptedFault(f"{item}, member {ctx.member}, attempt {ctx.attempt}: {fault.message}")
        case Hang():
            await anyio.sleep_forever()
            raise AssertionError("unreachable")
        case Slow():
            await anyio.sleep(fault.seconds)
            return await run(item, ctx)
        case Cancel():
            await anyio.lowlevel.checkpoint()
            raise anyio.get_cancelled_exc_class()
        case Return():
            returned: Rollout = fault.value
            return returned


def _counted(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def with_count(self: _CountingFiles, *args: Any) -> Any:
        self._comes(verb.__name__)
        return verb(self, *args)

    return with_count


class _CountingFiles(OsFiles):
    """Counts the calls that change the file system: every event is part of one, and every step of a commit is one."""

    def __init__(self, *, after: int) -> None:
        self.after = after
        self.changes = 0

    def _comes(self, verb: str) -> None:
        if self.changes >= self.after:
            self._strike(verb)
        self.changes += 1

    def _strike(self, verb: str) -> None:
        raise NotImplementedError

    makedirs = _counted(OsFiles.makedirs)
    create = _counted(OsFiles.create)
    write = _counted(OsFiles.write)
    rename = _counted(OsFiles.rename)
    link = _counted(OsFiles.link)
    unlink = _counted(OsFiles.unlink)
    rmdir = _counted(OsFiles.rmdir)


class KillingFiles(_CountingFiles):
    """A file layer that kills its process, SIGKILL, instead of changing the folder for the ``after + 1``-th time.

    For a script that a test runs as a process of its own; in one process :class:`~pipeline.testing.RecordingFiles` and
    :class:`~pipeline.testing.Replay` do the same without a death.
    """

    def _strike(self, verb: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FailingFiles(_CountingFiles):
    """A file layer whose calls fail with ``error`` once there have been ``after`` of them, until ``mended``."""

    def __init__(self, *, after: int, error: OSError) -> None:
        super().__init__(after=after)
        self.error = error
        self.mended = False

    def _strike(self, verb: str) -> None:
        if not self.mended:
            raise self.error
