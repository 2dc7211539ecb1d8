"""Agreement between the ranks of a run, through the key-value store of their process group.

No collective is used: a rank that dies would leave the others in it. Each tells what it has to tell under a key of its
own, and waits for the keys of the others with a time limit; who is missing then is named. Errors are told like values,
so that what fails on one rank fails on all of them, at the same place. Keys are never used twice: the n-th
:class:`Ranks` of a name on one rank speaks with the n-th on the others, and with no other one.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from pipeline.connections import Connections, KeyStore
from pipeline.errors import ConfigError, RankFailed, RankLost, UsageError

T = TypeVar("T")
_LINGERS_S = 5.0
_LONGEST_S = 1e6


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells."""

    value: Any = None
    error: str | None = None


class Ranks:
    """This process among the data-parallel ranks of a run.

    ::

        torch.distributed.init_process_group("gloo")
        buffer = ReplayBuffer(1_000_000, directory="runs/b", ranks=Ranks.torch())

    Every verb is called by all ranks, the calls of one name in the same order. Verbs block, and may be called from
    several threads, each with names of its own.
    """

    def __init__(
        self, store: KeyStore, rank: int, size: int, *, timeout_s: float = 300.0, name: str = "forebay"
    ) -> None:
        """Args:
        store: the process group's.
        rank: this one's number, from 0 on.
        size: how many there are.
        timeout_s: seconds to wait for the others.
        name: what keys begin with. All ranks make their :class:`Ranks` of one name in the same order.

        Raises:
            ConfigError: one of these is out of range.
            RankLost: the store cannot be reached.
        """
        if size.__class__ is not int or size < 1:
            raise ConfigError.of("size", size, "a whole number of ranks from 1 on is needed")
        if rank.__class__ is not int or not 0 <= rank < size:
            raise ConfigError.of("rank", rank, f"a whole number from 0 to {size - 1} is needed")
        if not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise ConfigError.of("timeout_s", timeout_s, "seconds, more than 0, are needed")
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._given = store
        self._connections = Connections(store, timeout_s)
        self._lost: set[int] = set()
        self._begin(name)

    def _begin(self, name: str) -> None:
        self._rounds: defaultdict[str, int] = defaultdict(int)
        self._counting = threading.Lock()
        life = self._reach(lambda store: store.add(f"{name}/lives/{self.rank}", 1))
        self._name = f"{name}/{life}"

    def branch(self, name: str) -> Ranks:
        """Return the same ranks for other keys than these, and than those of any other branch: they agree on what
        belongs together by themselves. All ranks call it, in the same order."""
        other = copy.copy(self)
        other._begin(f"{self._name}/{name}")
        return other

    @classmethod
    def torch(cls, *, timeout_s: float = 300.0, name: str = "forebay") -> Ranks:
        """Return the ranks of torch's default process group.

        Raises:
            UsageError: there is none.
        """
        import torch.distributed as dist  # costs a moment that others need not spend

        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("Ranks.torch(): torch.distributed.init_process_group() comes first")
        group: Any = dist.distributed_c10d
        return cls(group._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout_s=timeout_s, name=name)

    @property
    def first(self) -> bool:
        """Whether this is the rank that does what is done once."""
        return self.rank == 0

    # -- agreement ---------------------------------------------------------------------------------------------

    def together(self, what: str, do: Callable[[], T]) -> list[Any]:
        """Do something on every rank, and return what it gave on each, by rank; plain values.

        Raises:
            RankFailed: it failed on another rank.
            RankLost: a rank was not heard from in time.
            Exception: it failed on this rank, with this.
        """
        try:
            value = do()
        except BaseException as error:
            self.tell(what, error=error)
            raise
        return self.all(what, value)

    def all(self, what: str, value: Any = None, *, number: int | None = None) -> list[Any]:
        """Tell the others a plain value, and return everybody's, by rank.

        Args:
            what: what it is, for keys and messages.
            value: what plain JSON can hold.
            number: of the round; by default calls of this name are counted.

        Raises:
            RankFailed, RankLost: as :meth:`together`.
        """
        number = self.tell(what, value, number=number)
        found = self.hear(what, number)
        if number > 0:  # everybody is past it
            self.forget(what, number - 1, [self.rank])
        return found

    def of_first(self, what: str, do: Callable[[], T]) -> Any:
        """Do something on the first rank alone, and return on every rank what it gave there; a plain value.

        Raises:
            RankFailed, RankLost, Exception: as :meth:`together`.
        """
        if not self.first:
            return self.hear(what, self._next(what), [0])[0]
        try:
            value = do()
        except BaseException as error:
            self.tell(what, error=error)
            raise
        self.tell(what, value)
        return value

    def alike(self, what: str, do: Callable[[], T]) -> T:
        """Do something on every rank that must give the same plain value on all, and return that.

        Raises:
            RankFailed: it differs, and the message says how; or it failed on another rank.
            RankLost: a rank was not heard from in time.
            Exception: it failed on this rank, with this.
        """
        values: list[T] = self.together(what, do)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankFailed(
                    f"{what}: rank {rank} has {other!r}, and rank 0 has {values[0]!r}. All ranks need the same; "
                    "look for what differs between their scripts, files or versions. Nothing was changed"
                )
        return values[0]

    def tell(
        self, what: str, value: Any = None, *, error: BaseException | None = None, number: int | None = None
    ) -> int:
        """Tell the others a plain value, or what this rank failed with; return the number of the round. Nobody is
        waited for."""
        number = self._next(what) if number is None else number
        told = Told(value, None if error is None else f"{type(error).__name__}: {error}")
        key = self._key(what, number, self.rank)
        if error is None:
            self._set(key, told)
        else:  # on its way out, and not to be hidden by another one
            with contextlib.suppress(RankLost):
                self._set(key, told)
        return number

    def hear(self, what: str, number: int, ranks: Sequence[int] | None = None, *, patience: int = 1) -> list[Any]:
        """Return what ranks, all by default, tell in a round.

        Args:
            what, number: of the round.
            ranks: whom to listen to.
            patience: how many time limits to wait; two for who waits for another one that waits itself, and knows
                whom for.

        Raises:
            RankFailed, RankLost: as :meth:`together`.
        """
        ranks = range(self.size) if ranks is None else ranks
        until = time.monotonic() + patience * self.timeout_s
        values = []
        for rank in ranks:
            self._wait(what, number, ranks, rank, until)
            told = self._get(self._key(what, number, rank))
            if told.error is not None and rank != self.rank:
                raise RankFailed(f"{what}: rank {rank} failed: {told.error}. {self._unchanged()}")
            values.append(told.value)
        return values

    def told(self, what: str, number: int, rank: int) -> bool:
        """Whether a rank has told something in a round. Nobody is waited for."""
        key = self._key(what, number, rank)
        return self._reach(lambda store: store.check([key]))

    def failed_first(self, what: str, number: int) -> RankFailed | None:
        """Return what the first rank failed with in a round, if it has told so. Nobody is waited for."""
        with contextlib.suppress(RankLost):
            if self.told(what, number, 0):
                try:
                    self.hear(what, number, [0])
                except RankFailed as cause:
                    return cause
        return None

    def within(self, what: str, number: int, ranks: Sequence[int], seconds: float) -> list[int]:
        """Wait some seconds until ranks have told something in a round; return those that have not. Nobody is lost by
        that: see :meth:`lost`."""
        left = timedelta(seconds=max(0.001, seconds))
        keys = [self._key(what, number, rank) for rank in ranks]
        try:
            _hearing_signals(partial(self._connections.use, lambda store: store.wait(keys, left)))
        except RuntimeError:
            return [rank for rank in ranks if not self.told(what, number, rank)]
        return []

    def lost(self, what: str, missing: list[int]) -> RankLost:
        """Return the error for ranks that were waited for in vain."""
        return self._not_heard(what, missing)

    def linger(self, what: str, number: int, ranks: Sequence[int]) -> None:
        """Wait until ranks have told something in a round, but a few seconds at most, and not for one that was lost
        before. For who may be about to end, and with its process the store."""
        until = time.monotonic() + min(self.timeout_s, _LINGERS_S)
        for rank in ranks:
            if rank not in self._lost:
                with contextlib.suppress(RankLost):
                    self._wait(what, number, [rank], rank, until)

    def forget(self, what: str, number: int, ranks: Sequence[int]) -> None:
        """Remove what ranks told in a round, once nobody is to hear it any more."""
        with contextlib.suppress(RankLost):  # what is left takes a few bytes
            for rank in ranks:
                key = self._key(what, number, rank)
                self._reach(lambda store, key=key: store.delete_key(key))  # type: ignore[misc]

    def post(self, what: str, value: Any) -> None:
        """Leave a plain value that every rank may :meth:`look` at."""
        self._set(f"{self._name}/{what}", Told(value))

    def claim(self, what: str, value: Any) -> Any:
        """Leave a plain value, unless a rank has done so before; return what lies there then, on all ranks the same."""
        key, raw = f"{self._name}/{what}", msgspec.json.encode(Told(value)).decode()
        found = self._reach(lambda store: store.compare_set(key, "", raw))
        return msgspec.json.decode(found, type=Told).value

    def look(self, what: str) -> Any:
        """Return what was posted or claimed; None: nothing was. Nobody is waited for."""
        key = f"{self._name}/{what}"
        return self._get(key).value if self._reach(lambda store: store.check([key])) else None

    def post_then_look(self, posted: str, value: Any, what: str) -> Any:
        """:meth:`post`, and, when that is in the store, :meth:`look`."""
        raw, key = msgspec.json.encode(Told(value)).decode(), f"{self._name}/{what}"

        def both(store: KeyStore) -> bool:
            store.set(f"{self._name}/{posted}", raw)  # torch does not wait for an answer: the next one tells
            return store.check([key])

        return self._get(key).value if self._reach(both) else None

    # -- the store ---------------------------------------------------------------------------------------------

    def _next(self, what: str) -> int:
        with self._counting:
            number = self._rounds[what]
            self._rounds[what] = number + 1
        return number

    def _key(self, what: str, number: int, rank: int) -> str:
        return f"{self._name}/{what}/{number}/{rank}"

    def _wait(self, what: str, number: int, ranks: Sequence[int], rank: int, until: float) -> None:
        key = self._key(what, number, rank)
        if self.told(what, number, rank):
            return
        left = timedelta(seconds=min(max(0.001, until - time.monotonic()), _LONGEST_S))
        try:
            _hearing_signals(partial(self._connections.use, lambda store: store.wait([key], left)))
        except RuntimeError as error:  # torch's own errors are of this kind
            missing = [each for each in ranks if not self.told(what, number, each)]
            if rank in missing:  # else it has come in the last moment
                raise self._not_heard(what, missing) from error

    def _unchanged(self) -> str:
        return f"Nothing was changed on this one, rank {self.rank}"

    def _not_heard(self, what: str, missing: list[int]) -> RankLost:
        self._lost.update(missing)
        who = f"rank {missing[0]} was" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} were"
        return RankLost(
            f"{what}: {who} not heard from within {self.timeout_s:g} s: ended, stopped, or elsewhere in the script. "
            f"{self._unchanged()}. Look at their logs, and start all ranks again; "
            "resume() goes on from the newest generation"
        )

    def _unreachable(self, error: RuntimeError) -> RankLost:
        self._lost.update(range(self.size))
        return RankLost(
            f"the process group's store does not answer ({error}): the process that serves it, usually rank 0, has "
            "ended. Start all ranks again; resume() goes on from the newest generation"
        )

    def _set(self, key: str, told: Told) -> None:
        raw = msgspec.json.encode(told).decode()
        self._reach(lambda store: store.set(key, raw))

    def _get(self, key: str) -> Told:
        return msgspec.json.decode(self._reach(lambda store: store.get(key)), type=Told)

    def _reach(self, do: Callable[[KeyStore], T]) -> T:
        try:
            return self._connections.use(do)
        except RuntimeError as error:
            raise self._unreachable(error) from error


class _Held:
    """What one process tells itself."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Nobody else could tell anything."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._values.setdefault(key, desired).encode()

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


def alone() -> Ranks:
    """Return a rank that is the only one."""
    return Ranks(_Held(), 0, 1)


def _hearing_signals(do: Callable[[], object]) -> None:
    """Do what blocks without letting Python see to signals: their handlers run in the main thread, which waits for
    another one meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        do()
        return
    failed: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="forebay ranks", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
