"""What a worker says of an error that ended an attempt or a call."""

from __future__ import annotations

import traceback

from pipeline.engines.wire import Raised
from pipeline.engines.worker.loading import NotLoaded
from pipeline.store.plain import TooDeepError

_MOST_TEXT = 20_000


def raised(call: int, error: BaseException) -> Raised:
    """Return the message that says it."""
    why = "error"
    if isinstance(error, NotLoaded):
        why = "unloadable"
    elif isinstance(error, TooDeepError):
        why = "too deep"
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    where = "".join(traceback.format_exception(error))
    return Raised(call, type(error).__name__, _sendable(text), _sendable(where), why)


def _sendable(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MOST_TEXT else "..." + text[-_MOST_TEXT:]
