"""Where log lines end: a stream that may be a terminal, with bars of ``tqdm`` on it, or the standard ``logging``.

A line is written whole, in one piece and with the bars taken away for that moment. A stream that can no longer be
written to loses its lines and stops nobody.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

NAME = "forebay"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether ``stream`` is a terminal that can move its cursor."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


@contextmanager
def above_bars(stream: TextIO | None) -> Iterator[None]:
    """Take the bars off ``stream``'s terminal, and put them back below what the body wrote."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", None):
        yield
        return
    with tqdm.external_write_mode(file=stream):
        yield


class LineWriter:
    """The last stage of :func:`pipeline.observe.configure`: writes lines to ``stream``, or to ``sys.stderr``."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.RLock()

    def msg(self, message: str) -> None:
        """Write one line."""
        stream = self._stream or sys.stderr
        if stream is None:  # started without a console
            return
        try:
            with self._lock, above_bars(stream):
                stream.write(message + "\n")
                stream.flush()
        except (OSError, ValueError):  # the terminal is gone: a log must not end a run
            pass

    log = debug = info = warning = warn = error = critical = exception = fatal = msg


class StandardLogger(logging.LoggerAdapter[logging.Logger]):
    """The standard library's logger ``forebay``, writing above the bars."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger(NAME), {})

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Hand one line to the handlers."""
        with above_bars(sys.stderr):
            super().log(level, msg, *args, stacklevel=_caller(), **kwargs)


def _caller() -> int:
    """Return the ``stacklevel`` of whoever logs, which does not count the frames of ``logging``."""
    level, frame = 0, sys._getframe(1)
    while True:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        level += module != "logging"
        if frame.f_back is None or not (module in ("logging", "structlog") or frame.f_globals is globals()):
            return level
        frame = frame.f_back


def keep_enabled(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Drop what the standard logger would not show (processor)."""
    if not logging.getLogger(NAME).isEnabledFor(logging.getLevelNamesMapping()[method.upper()]):
        raise structlog.DropEvent
    return event


def as_standard(_: WrappedLogger, __: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Render ``name key=value ...`` as arguments for the standard logger (processor)."""
    event.pop("logger", None)
    extra = {name: event.pop(name) for name in ("exc_info", "stack_info") if name in event}
    parts = [str(event.pop("event", "")), *(f"{name}={_plain(value)}" for name, value in event.items())]
    return (" ".join(parts),), extra


def as_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    """Render one line of valid JSON, whatever the values are (processor)."""
    first = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
    line = {**first, **event}
    try:
        return msgspec.json.encode(line, enc_hook=repr).decode()
    except Exception:  # text that is no Unicode, odd keys, cycles
        return msgspec.json.encode({ascii(k)[1:-1]: ascii(v) for k, v in line.items()}).decode()


def _plain(value: object) -> str:
    if isinstance(value, str) and value.isprintable() and value and " " not in value:
        return value
    return repr(value)
