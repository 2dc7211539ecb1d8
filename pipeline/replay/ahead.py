"""Going through an iterator in a thread of its own, a little ahead of whoever takes what it gives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """Yield what ``items`` yields, of which up to ``depth`` are made beforehand. Blocks; close it, or go to its end.

    What ``items`` raises is raised here, after all that it had given.
    """
    made: deque[T] = deque()
    changed = threading.Condition()
    stopped = ended = False
    error: BaseException | None = None

    def work() -> None:
        nonlocal ended, error
        try:
            for item in items:
                with changed:
                    made.append(item)
                    changed.notify_all()
                    changed.wait_for(lambda: stopped or len(made) < depth)
                    if stopped:
                        return
        except BaseException as raised:
            error = raised
        finally:
            with changed:
                ended = True
                changed.notify_all()

    thread = threading.Thread(target=work, name="forebay ahead")
    try:
        thread.start()  # Ctrl-C may come in here too
        while True:
            with changed:
                changed.wait_for(lambda: made or ended)
                if not made:
                    break
                item = made.popleft()
                changed.notify_all()
            yield item
        if error is not None:
            raise error
    finally:
        with changed:
            stopped = True
            changed.notify_all()
        if thread.ident is not None:
            thread.join()
