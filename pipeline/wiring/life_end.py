"""How a life of a run ended: the last event of its journal, for whoever looks at the folder later."""

from __future__ import annotations

from pipeline.checkpoint.triggers import only_stopped
from pipeline.records import Closed
from pipeline.runner.policies import encodable

_MOST = 500  # characters of an error's text


def asked(wall: float, reason: object) -> Closed:
    """Return the event that says that the run was asked to stop: should the launcher lose its patience, the kill that
    follows is no death of an item's making."""
    return Closed(wall, "asked", _short(str(reason)))


def ended(wall: float, error: BaseException | None = None, stopped_by: object = None) -> Closed:
    """Return the event that a journal ends with.

    Args:
        wall: seconds since 1970.
        error: what the script's body was left by, or the run failed with.
        stopped_by: who had asked for the stop that was honoured, if one was.
    """
    stopped = only_stopped(error) if error is not None else None
    if stopped_by is not None or stopped is not None:
        return Closed(wall, "stopped", _short(str(stopped.reason if stopped_by is None and stopped else stopped_by)))
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return Closed(wall, "closed")
    return Closed(wall, "failed", _text_of(error))


def _text_of(error: BaseException) -> str:
    try:
        return _short(f"{type(error).__name__}: {error}")
    except Exception:  # its own text is the user's code
        return type(error).__name__


def _short(text: str) -> str:
    return encodable(text if len(text) <= _MOST else text[: _MOST - 3] + "...")
