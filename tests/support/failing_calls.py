"""Errors in any function of the library that a thread calls, one after the other."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pipeline
from pipeline.conversation import Conversation
from pipeline.distributed import Ranks

_ROOT = str(Path(pipeline.__file__).parent)
_NAMES = ("distributed.py", "conversation.py", "connections.py", "errors.py", "observe")
_LEFT_OUT = tuple(f"{_ROOT}/{name}" for name in _NAMES)
"""How ranks speak with each other, what an error says, and logs."""

_FINALIZED = weakref.finalize.__call__.__code__


class Injected(Exception):
    """Nothing of the library's own, and nothing that it would take for an error of the disk."""


class Calls:
    """The functions that a thread calls in what ranks agree upon, each once, in their order; in one of them it
    fails."""

    def __init__(self, fails: CodeType | None = None) -> None:
        self.seen: dict[CodeType, None] = {}
        self._fails = fails
        self.failed = False
        self._end: FrameType | None = None  # of an object that goes, which may be anybody's

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what this thread calls in here. No garbage is collected meanwhile: what goes then is of whatever ran
        before, in the whole process, and may call something, a generator that ends where it had come to for one."""
        before, collects = sys.getprofile(), gc.isenabled()
        gc.disable()
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and frame is self._end:
            self._end = None
        if event != "call" or self._end is not None:
            return
        # When it comes hangs on what ran before, in the whole process; and nobody hears of an error in it.
        if code.co_name == "__del__" or code is _FINALIZED:
            self._end = frame
            return
        if not code.co_filename.startswith(_ROOT) or code.co_filename.startswith(_LEFT_OUT):
            return
        self.seen[code] = None
        if code is self._fails and not self.failed:
            self.failed = True
            raise Injected(code.co_qualname)


def watch_what_is_agreed(patch: Any, calls: Callable[[int], Calls | None]) -> None:
    """Look at what is done in what ranks do together, on those that ``calls`` knows."""

    def watching(wanted: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, what: str, do: Callable[[], Any], **more: Any) -> Any:
            def watched() -> Any:
                looking = calls(self.rank)
                if looking is None:
                    return do()
                with looking.watched():
                    return do()

            return wanted(self, what, watched, **more)

        return method

    for owner, name in ((Ranks, "together"), (Conversation, "agreed")):
        patch.setattr(owner, name, watching(getattr(owner, name)))
