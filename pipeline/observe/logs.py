"""Logging by ``structlog`` that works with what the user has set up, and sets nothing up by itself.

* ``structlog`` is configured (by :func:`configure` or by the user's own call): lines go there.
* It is not: they go to the standard ``logging`` logger ``forebay`` as ``name key=value ...``. So a program that
  configured neither sees warnings and errors on stderr and nothing else, and ``logging.basicConfig``, levels and
  handlers work as with any other library.

Which of the two is looked up at every line, so that a logger made at import follows what is configured later.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from pipeline.errors import ConfigError
from pipeline.observe.lines import (
    NAME,
    LineWriter,
    StandardLogger,
    as_json,
    as_standard,
    is_terminal,
    keep_enabled,
)

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("auto", "console", "json")


class RunContext:
    """What every line of a run says about it (run, incarnation, rank, step): given once, changed in place.

    ::

        context = RunContext(run="a", incarnation=3, rank=0)
        with context.active():  # here, and in the tasks and worker threads started from here
            logger().info("run.opened")  # run=a incarnation=3 rank=0
            context.update(step=12)  # seen at once by all of them
    """

    def __init__(self, **fields: Any) -> None:
        self._fields: Mapping[str, Any] = fields

    @property
    def fields(self) -> Mapping[str, Any]:
        """What lines carry now."""
        return self._fields

    def update(self, **fields: Any) -> None:
        """Add or change fields, for every task and thread that uses this context."""
        self._fields = {**self._fields, **fields}

    @contextmanager
    def active(self) -> Iterator[RunContext]:
        """Make it the context of lines logged in the body. Enter and leave it in one task."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[RunContext | None] = ContextVar("forebay_run", default=None)


class _Logger:
    """Looks the real logger up at every use; also keeps our frame out of what reports the caller."""

    def __init__(self, context: RunContext | None, fields: Mapping[str, Any]) -> None:
        self._context = context
        self._fields = fields

    def bind(self, **fields: Any) -> _Logger:
        return _Logger(self._context, {**self._fields, **fields})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        context = self._context or _CURRENT.get()
        target = structlog.get_logger(NAME) if structlog.is_configured() else _standard()
        run = context.fields if context is not None else {}
        return getattr(target.bind(**{"logger": NAME, **run, **self._fields}), name)


def logger(context: RunContext | None = None, /, **fields: Any) -> FilteringBoundLogger:
    """Return the library's logger, with ``fields`` bound to it.

    Lines carry the fields of ``context``, or, without one, of the :class:`RunContext` that is active where
    they are logged.
    """
    return cast(FilteringBoundLogger, _Logger(context, fields))


@functools.cache
def _standard() -> Any:
    return structlog.wrap_logger(
        StandardLogger(),
        processors=[keep_enabled, structlog.contextvars.merge_contextvars, as_standard],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def configure(
    *,
    format: Literal["auto", "console", "json"] = "auto",  # noqa: A002
    level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Set ``structlog`` up for the whole process; for scripts, never called by the library.

    Lines go above progress bars that are on the same terminal, those of the user's own ``tqdm`` included.

    Args:
        format: ``console`` for people, in colours on a terminal; ``json`` for one JSON object a line; ``auto``
            takes ``console`` on a terminal and ``json`` elsewhere.
        level: the least level shown: debug, info, warning, error or critical.
        stream: where lines go. Left out, to whatever ``sys.stderr`` is when a line is written.

    Raises:
        ConfigError: an unknown format or level.
    """
    if format not in FORMATS:
        raise ConfigError.of("format", format, f"must be one of {', '.join(FORMATS)}")
    if str(level).lower() not in LEVELS:
        raise ConfigError.of("level", level, f"must be one of {', '.join(LEVELS)}")
    terminal = is_terminal(stream or sys.stderr)
    people = format == "console" or (format == "auto" and terminal)
    writer = LineWriter(stream)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            *(_for_people(terminal) if people else _for_programs()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        context_class=dict,
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,
    )


def _for_people(colors: bool) -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def _for_programs() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        as_json,
    ]
