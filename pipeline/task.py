"""A task: a source, a runner, a share of the draws, and its policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import msgspec

from pipeline.config import LEAST, MOST, FailurePolicy, Retry, ZeroVariance, failure_policy
from pipeline.config.base import is_text
from pipeline.errors import ConfigError, SourceError
from pipeline.interfaces import PlainRunner, Runner, Source, Stream
from pipeline.names import is_import_path
from pipeline.records import Rollout, SourceMark

GroupFilter: TypeAlias = ZeroVariance | Callable[[Sequence[Rollout]], bool]


class StreamSource:
    """A stream where a source is asked for: endless, and without items by index."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def item(self, index: int) -> Any:
        raise SourceError(f"item {index} was asked for, but the items of a stream have no index")

    def length(self) -> None:
        return None

    def mark(self) -> SourceMark:
        return SourceMark("stream")


class Task:
    """A named kind of work.

    Args:
        name: unique in the run; it stands in the journal, so keep it between runs.
        source: where the items come from: a :class:`~pipeline.Source`, or a stream (any async iterator; ``epochs`` and
            ``shuffle`` mean nothing then).
        run: ``async def run(item, ctx) -> Rollout``; for a :class:`~pipeline.ProcessEngine` a plain ``def`` as well, or
            the name of one, ``"module:function"``, which only its workers import.
        group_size: rollouts of each item; they are stored and consumed together.
        share: how much of all draws this task gets, relative to the other tasks' shares.
        on_failure: ``Retry(attempts=3)``, ``FailFast()`` or ``Skip()``, or the same as plain values.
        min_group: how many members must finish for a group to count; the rest may fail for good. Left out: all.
        timeout: seconds for each attempt; None: no limit.
        group_timeout: seconds from a group's first start to its last member's end, all attempts included; then the
            unfinished members are given up. None: no limit. It begins anew after a resume.
        filter: which finished groups are kept: ``ZeroVariance()``, or a function of the group's rollouts that returns
            whether to keep it. It runs on the event loop, so it must be quick. What it rejects is dropped as filtered.
        max_rejections: groups rejected in a row after which the run fails, since it would never end otherwise.
        max_failures: members given up in a row, with none that finished between, after which the run fails, since where
            nothing succeeds an endless source would never end.
        epochs: how often the source is gone through; None: for ever.
        shuffle: whether each epoch has an order of its own, or the source's.
        resource: what the runner needs and finds as ``ctx.resource``. An async context manager is opened once and
            shared by all attempts of the process (a client); a callable that returns one is called for each slot that
            works on this task, and what it opened is used by one attempt at a time (an environment). A worker process
            calls it for itself; there it may be named, as ``run`` may.

    Raises:
        ConfigError: an argument is of the wrong kind or out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        source: Source | Stream,
        run: Runner | PlainRunner | str,
        group_size: int = 1,
        share: float = 1.0,
        on_failure: FailurePolicy | Mapping[str, Any] | str = Retry(attempts=3),  # noqa: B008  frozen
        min_group: int | None = None,
        timeout: float | None = None,
        group_timeout: float | None = None,
        filter: GroupFilter | Mapping[str, Any] | str | None = None,  # noqa: A002
        max_rejections: int = 1000,
        max_failures: int = 1000,
        epochs: int | None = 1,
        shuffle: bool = True,
        resource: Any = None,
    ) -> None:
        if not isinstance(name, str) or not name or len(name) > 200 or not is_text(name):
            raise ConfigError.of("name", name, "a task needs a name of 1 to 200 characters that UTF-8 can encode")
        self._check_parts(name, source, run, resource)
        if not isinstance(shuffle, bool):
            raise ConfigError(f"task {name!r}: shuffle={shuffle!r}: True or False is needed", option="shuffle")
        _whole(name, "group_size", group_size, 1, 2**20)
        _number(name, "share", share)
        if min_group is not None:
            _whole(name, "min_group", min_group, 1, group_size)
        for option, seconds in (("timeout", timeout), ("group_timeout", group_timeout)):
            if seconds is not None:
                _number(name, option, seconds)
        _whole(name, "max_rejections", max_rejections, 1, 2**62)
        _whole(name, "max_failures", max_failures, 1, 2**62)
        if epochs is not None:
            _whole(name, "epochs", epochs, 1, 2**62)
        self.name = name
        self.run: Any = run
        self.source: Source = source if isinstance(source, Source) else StreamSource(source)
        self.group_size, self.share, self.timeout, self.group_timeout = group_size, float(share), timeout, group_timeout
        self.filter, self.max_rejections = _group_filter(name, filter), max_rejections
        self.on_failure, self.max_failures = failure_policy(on_failure), max_failures
        self.min_group = group_size if min_group is None else min_group
        self.epochs, self.shuffle, self.resource = epochs, shuffle, resource

    @staticmethod
    def _check_parts(name: str, source: Any, run: Any, resource: Any) -> None:
        if not isinstance(source, (Source, Stream)):
            raise ConfigError(
                f"task {name!r}: source={source!r} has no item(index), length() and mark(); "
                "for a list, use SequenceSource(list)",
                option="source",
            )
        if not callable(run) and not _is_name(run):
            raise ConfigError(
                f"task {name!r}: run={run!r} must be a function of (item, ctx), or 'module:function' that names one",
                option="run",
            )
        known = resource is None or callable(resource) or _is_name(resource)
        if not known and not isinstance(resource, AbstractAsyncContextManager):
            raise ConfigError(
                f"task {name!r}: resource={resource!r} must be an async context manager or a callable that returns one",
                option="resource",
            )

    def describe(self) -> dict[str, Any]:
        """Return the resolved options in plain values, for the manifest."""
        return {
            "group_size": self.group_size,
            "min_group": self.min_group,
            "share": self.share,
            "on_failure": self.on_failure.to_dict(),
            "timeout": self.timeout,
            "group_timeout": self.group_timeout,
            "filter": self.filter.to_dict() if isinstance(self.filter, ZeroVariance) else _named(self.filter),
            "max_rejections": self.max_rejections,
            "max_failures": self.max_failures,
            "epochs": self.epochs,
            "shuffle": self.shuffle,
            "source": str(self.source.mark()),
        }

    def __repr__(self) -> str:
        return f"Task({self.name!r}, group_size={self.group_size}, share={self.share})"


def _group_filter(task: str, given: Any) -> GroupFilter | None:
    if given is None or isinstance(given, ZeroVariance):
        return given
    if isinstance(given, (str, Mapping)):
        try:
            return msgspec.convert({"filter": given} if isinstance(given, str) else given, ZeroVariance)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"task {task!r}: filter={given!r}: 'zero_variance', a dict with filter: zero_variance, or a function "
                f"of the group's rollouts is needed ({error})",
                option="filter",
            ) from None
    if not callable(given) or inspect.iscoroutinefunction(given):
        raise ConfigError(
            f"task {task!r}: filter={given!r} must be ZeroVariance() or a plain function of the group's rollouts",
            option="filter",
        )
    function: GroupFilter = given
    return function


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and is_import_path(given)


def _named(function: Any) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)


def _whole(task: str, option: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(
            f"task {task!r}: {option}={value!r}: a whole number of {least} to {most} is needed", option=option
        )


def _number(task: str, option: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not LEAST <= value <= MOST:
        raise ConfigError(
            f"task {task!r}: {option}={value!r}: a number of {LEAST:g} to {MOST:g} is needed", option=option
        )
