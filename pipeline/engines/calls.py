"""What a worker runs, and a worker of any kind: a process of this machine, or an actor of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

from pipeline.engines.values import Packer
from pipeline.engines.wire import Answer, AnyMessage, Ask, Cancel, Done, Frame, Raised, Ready
from pipeline.errors import UsageError, WorkerDied


class Call:
    """Something that a worker runs: an attempt, or a function."""

    def __init__(self, worker: Worker, number: int, what: object) -> None:
        self.worker, self.number, self.what = worker, number, what
        self.over = anyio.Event()
        """Set when the worker has ended it, or has died."""
        self.company = 1
        """How many calls its worker ran when it died."""
        self.cut = False
        self._asks: set[int] = set()
        self._frames: deque[Frame | WorkerDied] = deque()
        self._wake: anyio.Event | None = None

    def send(self, message: AnyMessage, packer: Packer | None = None) -> None:
        """Send something about this call."""
        self.worker.send(message, packer)

    def answer(self, ask: int, value: Any = None, error: BaseException | None = None) -> None:
        """Answer what the worker asked for."""
        self._asks.discard(ask)
        if error is None:
            packer = Packer()
            self.send(Answer(self.number, ask, packer.plain(value)), packer)
        else:
            self.send(Answer(self.number, ask, error=(type(error).__name__, str(error))))

    async def hear(self) -> Frame:
        """Return the next that the worker says about it.

        Raises:
            WorkerDied: nothing more comes.
        """
        while not self._frames:
            self._wake = anyio.Event()
            await self._wake.wait()
        frame = self._frames.popleft()
        if isinstance(frame, WorkerDied):
            raise frame
        return frame

    def take(self, frame: Frame | WorkerDied) -> None:
        """Take in what came."""
        if isinstance(frame, Frame) and isinstance(frame.message, Ask):
            self._asks.add(frame.message.ask)
        self._frames.append(frame)
        if self._wake is not None:
            self._wake.set()
        if self.cut:
            self._refuse()

    def let_go(self) -> None:
        """Cut it: nobody listens any more, and what the worker asks for is refused."""
        self.cut = True
        self.send(Cancel(self.number))
        self._refuse()

    def _refuse(self) -> None:
        self._frames.clear()
        for ask in list(self._asks):
            self.answer(ask, error=UsageError("the attempt was cut: nothing is taken in from it any more"))


class Worker(ABC):
    """A worker from its start to its end. :meth:`live` is a task of the owner's."""

    name: str
    """What it is called in errors."""

    def __init__(self, on_ready: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Start nothing yet.

        Args:
            on_ready: called when it can be given work.
            on_room: called when a call has ended.
        """
        self.ready, self.alone, self.stopping, self.leaving = False, False, False, False
        self.calls: dict[int, Call] = {}
        self.knows: set[int] = set()
        """Numbers of the tasks that it was told of."""
        self.over = anyio.Event()
        self._on_ready, self._on_room = on_ready, on_room
        self._planned, self._numbers = False, 0

    @property
    def takes_work(self) -> bool:
        """Whether it may be given a call, if it has a place for it."""
        if not self.ready or self.stopping or self.leaving or self.alone:
            return False
        return not any(call.cut for call in self.calls.values())

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process that it is, on its machine; 0 while that is not known."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it has not ended; one that has takes no work any more."""

    def begin(self, what: object, *, alone: bool = False) -> Call:
        """Take a place in it for ``what``; ``alone``: all of them."""
        self._numbers += 1
        call = self.calls[self._numbers] = Call(self, self._numbers, what)
        self.alone = alone
        return call

    def end(self, call: Call) -> None:
        """Free the place of a call that the worker knows nothing of, or has ended."""
        if self.calls.pop(call.number, None) is not None:
            self.alone = False
            call.over.set()
            self._on_room()

    @abstractmethod
    def send(self, message: AnyMessage, packer: Packer | None = None) -> None:
        """Send a message; nothing is waited for."""

    @abstractmethod
    async def live(self) -> None:
        """Return when it has ended and everybody who waits for it has been told."""

    @abstractmethod
    def death(self, when: str) -> WorkerDied:
        """Return the error that says how it ended."""

    @abstractmethod
    def stop(self) -> None:
        """Tell it to leave."""

    @abstractmethod
    def kill(self) -> None:
        """End it, on purpose."""

    def _took(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Ready):
            self.ready = True
            self._on_ready()
            return
        call = self.calls.get(getattr(message, "call", 0))
        if call is not None:
            call.take(frame)
            if isinstance(message, (Done, Raised)):
                self.end(call)

    def _lose_calls(self) -> None:
        """Tell everybody who waits for it that it has ended."""
        self.over.set()
        company = len(self.calls)
        for call in list(self.calls.values()):
            call.company = company
            call.take(self.death(f"while it ran {call.what}"))
            self.end(call)
