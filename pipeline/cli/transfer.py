"""What ``forebay export`` and ``forebay import`` have in common: a bar, and how they end."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from pipeline.errors import ConfigError, ForebayError
from pipeline.observe.lines import is_terminal

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_ARROW = "ARROW_DEFAULT_MEMORY_POOL"
EXITS = """\
exit codes:
  0  it is done, and {what} is whole; or, with --dry-run, it could be done
  1  {source} cannot be read or is damaged, or {what} cannot be written: nothing of it stays
  2  the command line is wrong, or does not fit what is there; or a package is missing
  130, 143  stopped by Ctrl-C or SIGTERM: nothing of it stays
"""


def ended(name: str, do: Callable[[Callable[[int, int], None]], Any]) -> int:
    """Do what takes long, with a bar of bytes on a terminal, and return the exit code.

    Args:
        name: of the command, for messages.
        do: gets what is to be told of the progress, and prints what came of it.
    """
    try:
        with _terminated(), _sparing(), _bar() as told:
            do(told)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE
    except ForebayError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{name}: stopped; nothing of it stays", file=sys.stderr)
        return INTERRUPTED
    return DONE


@contextlib.contextmanager
def _sparing() -> Iterator[None]:
    """Have Arrow, if it is loaded meanwhile, take its memory from the system: its own allocator keeps what threads let
    go, more and more of it, of 4 GB of frames 80 MB."""
    before = os.environ.get(_ARROW)
    os.environ.setdefault(_ARROW, "system")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_ARROW, None)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM end the process as Ctrl-C does, so that what was begun is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Yield what shows progress: on a terminal where ``tqdm`` is installed, else nothing."""
    tqdm: Any = None
    if is_terminal(sys.stderr):
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm").tqdm
    if tqdm is None:
        yield lambda done, total: None
        return
    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})  # a monitor would be one more thread
    with quiet(unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True, leave=False) as bar:

        def told(done: int, total: int) -> None:
            bar.total = max(total, bar.n + done) if total else None
            bar.update(done)

        yield told


def said(count: int | None, what: str) -> str:
    """Return how many of something there are, for a person."""
    return f"some {what}" if count is None else f"{count:,} {what if count != 1 else what.rstrip('s')}"
