"""What worker processes run in tests. They import this file: so it names only what is light, and torch inside."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from pipeline import Context, Item, Rollout

BIG = 10 << 20


def number(item: Item, ctx: Context) -> Rollout:
    """Its reward is the item's number; the random numbers are those that it would have anywhere."""
    return Rollout({"n": [item["n"]], "noise": ctx.rng.random(3)}, reward=float(item["n"]))


async def number_async(item: Item, ctx: Context) -> Rollout:
    """The same, awaiting."""
    await anyio.lowlevel.checkpoint()
    return number(item, ctx)


def whole(item: Item, ctx: Context) -> Rollout:
    """Says where it runs, and all that its context says."""
    info = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "loaded": sorted({"torch", "pipeline.pipeline"} & set(sys.modules)),
        "group": os.getpgrp(),
        "ctx": [ctx.uid, ctx.member, ctx.attempt, ctx.version, ctx.key, ctx.kind, ctx.parked],
        "item": [item.task, item.epoch, item.index, item.uid],
        "content": item.content,
        "left": ctx.deadline - time.monotonic(),
        "partial": ctx.partial,
        "env": os.environ.get("FOREBAY_TEST"),
        "argv": sys.argv[1:],
    }
    return Rollout(reward=float(ctx.rng.random()), info=info)


def tensors(item: Item, ctx: Context) -> Rollout:
    """Tensors of every kind."""
    import torch

    made = torch.Generator().manual_seed(3)
    return Rollout(
        {
            "float32": torch.randn(5, 3, generator=made),
            "bfloat16": torch.randn(4, generator=made).bfloat16(),
            "bool": torch.tensor([True, False, True]),
            "int64": torch.tensor([2**62, -1]),
            "empty": torch.empty(0, 7),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "numpy": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
            "list": [[1, 2], [3, 4]],
            "big": torch.arange(BIG // 4, dtype=torch.int32),
            "transposed": torch.randn(3, 4, generator=made).T,
        },
        reward=1.0,
        info={"bytes": b"\0\xff", "huge": 2**80, "tuple": (1, "a"), "nested": {"x": [None, 1.5]}},
        oldest=0,
        newest=0,
        tokens=7,
    )


class Strange:
    """Nothing that can be stored."""

    def __repr__(self) -> str:
        return "Strange()"


def deep() -> list[Any]:
    """A list in a list, and so on."""
    found: list[Any] = []
    for _ in range(300):
        found = [found]
    return found


RETURNED: dict[str, Any] = {
    "none": lambda: None,
    "strange": Strange,
    "reward": lambda: Rollout(reward="high"),  # type: ignore[arg-type]
    "not finite": lambda: Rollout(reward=float("nan")),
    "tensor": lambda: Rollout({"x": Strange()}),
    "masked": lambda: Rollout({"x": np.ma.masked_array([1, 2], [True, False])}),
    "complex": lambda: Rollout({"x": np.zeros(2, np.complex128)}),
    "ragged": lambda: Rollout({"x": [[1], [2, 3]]}),
    "info": lambda: Rollout(info={"a": [Strange()]}),
    "array in info": lambda: Rollout(info={"a": np.zeros(2)}),
    "deep": lambda: Rollout(info={"a": deep()}),
    "traces": lambda: Rollout(5),
    "versions": lambda: Rollout(oldest=3, newest=1),
}


def returns(item: Item, ctx: Any) -> Any:
    """Returns what is no good rollout."""
    return RETURNED[item["what"]]()


async def returns_async(item: Item, ctx: Any) -> Any:
    """The same."""
    return RETURNED[item["what"]]()


class OwnError(Exception):
    """An error that only this module knows."""


def fails(item: Item, ctx: Context) -> Rollout:
    """Every third item fails at its first two tries, each in another way."""
    if item["n"] % 3 == 0 and ctx.attempt == 1:
        raise OwnError(f"no {item['n']}")
    if item["n"] % 3 == 0 and ctx.attempt == 2:
        sys.exit("left")
    return number(item, ctx)


async def fails_async(item: Item, ctx: Context) -> Rollout:
    """The same, awaiting."""
    await anyio.lowlevel.checkpoint()
    return fails(item, ctx)


def always_fails(item: Item, ctx: Context) -> Rollout:
    """Never ends well."""
    raise OwnError("never")


def says(item: Item, ctx: Context) -> Rollout:
    """Writes where others read."""
    print("on stdout", item["n"], flush=True)  # noqa: T201
    print("on stderr", item["n"], file=sys.stderr, flush=True)  # noqa: T201
    os.write(1, b"straight\n")
    ctx.log.warning("looked", pieces=3, at=np.zeros(2), strange=Strange())
    return number(item, ctx)


def end(how: str) -> None:
    """End this process."""
    if how == "exit":
        os._exit(7)
    if how == "segfault":
        import faulthandler

        faulthandler._sigsegv()  # type: ignore[attr-defined]
    print("the last words", file=sys.stderr, flush=True)  # noqa: T201
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def dies(item: Item, ctx: Context) -> Rollout:
    """Its worker dies at the first try."""
    if ctx.attempt == 1:
        end(item["how"])
    return Rollout({"n": [ctx.attempt]}, reward=1.0)


def poison(item: Item, ctx: Context) -> Rollout:
    """Item 1 kills every worker."""
    if item["n"] == 1:
        end("kill")
    return number(item, ctx)


async def poison_async(item: Item, ctx: Context) -> Rollout:
    """Item 1 kills every worker, and those that run beside it there."""
    if item["n"] == 1:
        await anyio.sleep(0.05)
        end("kill")
    await anyio.sleep(0.1 if ctx.attempt == 1 else 0)
    return number(item, ctx)


def always_dies(item: Item, ctx: Context) -> Rollout:
    """Kills every worker."""
    end("kill")
    raise AssertionError


def number_and_pid(item: Item, ctx: Context) -> Rollout:
    """A number, and which worker made it, which takes a moment."""
    time.sleep(0.001)
    made = number(item, ctx)
    return Rollout(made.traces, made.reward, {"pid": os.getpid()})


def sleeps_a_while(item: Item, ctx: Context) -> Rollout:
    """Takes its time."""
    time.sleep(0.4)
    return Rollout(reward=1.0)


async def waits_async(item: Item, ctx: Context) -> Rollout:
    """Takes its time at the first try."""
    if ctx.attempt == 1:
        await anyio.sleep(5)
    return Rollout(reward=1.0)


def ring(bell: str, *words: object) -> None:
    """Say something to whoever has a :class:`tests.support.bells.Bell` there."""
    handle = os.open(bell, os.O_WRONLY)
    os.write(handle, " ".join(map(str, words)).encode() + b"\n")  # short enough to be one piece, whoever writes too
    os.close(handle)


def block() -> None:
    """Never return; nothing but a signal that kills ends it."""
    while True:
        signal.pause()


def hangs(item: Item, ctx: Context) -> Rollout:
    """The first try of item 0 never ends, or ends after a while."""
    if item["n"] == 0 and ctx.attempt == 1:
        ring(item["bell"], "began")
        if item["seconds"] is None:
            block()
        time.sleep(item["seconds"])
    return Rollout({"n": [item["n"]]}, info={"pid": os.getpid(), "attempt": ctx.attempt})


async def hangs_async(item: Item, ctx: Context) -> Rollout:
    """The first try of item 0 never ends, and says when it is cut; or it does not hear of it."""
    if item["n"] == 0 and ctx.attempt == 1:
        ring(item["bell"], "began")
        if item["deaf"]:
            block()
        try:
            await anyio.sleep_forever()
        finally:
            ring(item["bell"], "cut")
    return Rollout({"n": [item["n"]]}, info={"pid": os.getpid(), "attempt": ctx.attempt})


def never_ends(item: Item, ctx: Context) -> Rollout:
    """Says who it is, starts a process of its own, and stays."""
    child = subprocess.Popen(["sleep", "1000"])
    ring(item["bell"], os.getpid(), child.pid)
    block()
    raise AssertionError


async def never_ends_async(item: Item, ctx: Context) -> Rollout:
    """Says who it is, and stays, and does not hear that it is cut."""
    ring(item["bell"], os.getpid())
    block()
    raise AssertionError


@contextmanager
def counter(bell: str) -> Iterator[dict[str, int]]:
    """A resource that says when it is opened and closed."""
    ring(bell, "opened", os.getpid())
    yield {"uses": 0}
    ring(bell, "closed", os.getpid())


def uses(item: Item, ctx: Context) -> Rollout:
    """Counts how often its resource was used."""
    ctx.resource["uses"] += 1
    return Rollout({"n": [item["n"]]}, info={"pid": os.getpid(), "uses": ctx.resource["uses"]})


@asynccontextmanager
async def counter_async(bell: str) -> AsyncIterator[dict[str, int]]:
    """The same for asynchronous runners, with a task group that must be left in its own task."""
    async with anyio.create_task_group():
        with counter(bell) as opened:
            yield opened


async def uses_async(item: Item, ctx: Context) -> Rollout:
    """Counts how often its resource was used; nobody else may use it meanwhile."""
    before, ctx.resource["uses"] = ctx.resource["uses"], -1
    await anyio.sleep(0.001)
    assert before >= 0, "two attempts share what was opened for one"
    ctx.resource["uses"] = before + 1
    return Rollout({"n": [item["n"]]}, info={"pid": os.getpid(), "uses": before + 1})


@contextmanager
def broken() -> Iterator[None]:
    """A resource that cannot be opened."""
    raise ConnectionRefusedError("no server")
    yield


def no_manager() -> int:
    """Returns no resource."""
    return 5


def keeps(item: Item, ctx: Context) -> Rollout:
    """Makes three parts, keeps each, and dies after the second at the first try."""
    before = ctx.partial
    made = [] if before is None else before["made"].tolist()
    while len(made) < 3:
        made.append(ctx.attempt)
        ctx.save_partial(Rollout({"made": made}, tokens=len(made)))
        if len(made) == 2 and ctx.attempt == 1:
            end("kill")
    return Rollout({"made": made}, reward=1.0)


def keeps_what_cannot_be_kept(item: Item, ctx: Context) -> Rollout:
    """Says what came of it."""
    try:
        ctx.save_partial(Rollout({"x": Strange()}))
    except Exception as error:
        return Rollout(info={"error": f"{type(error).__name__}: {error}"})
    raise AssertionError


async def keeps_what_cannot_be_kept_async(item: Item, ctx: Context) -> Rollout:
    """Learns of it at its end."""
    if ctx.attempt == 1:
        ctx.save_partial(Rollout({"x": Strange()}))
    return Rollout(reward=1.0)


def parks(item: Item, ctx: Context) -> Rollout:
    """Waits for its reward."""
    ctx.park()
    return number(item, ctx)


def plays(item: Item, ctx: Any) -> Rollout:
    """Adds rows of an episode, three calls of two."""
    total = 0
    for first in range(0, 6, 2):
        steps = np.arange(first, first + 2, dtype=np.float32)
        total += ctx.extend(
            {
                "obs": steps[:, None] + 10 * item["n"],
                "action": steps.astype(np.int64),
                "reward": np.ones(2, np.float32),
                "next_obs": steps[:, None] + 1 + 10 * item["n"],
                "terminated": steps == 5,
                "truncated": np.zeros(2, bool),
            }
        )
    return Rollout(reward=float(total))


async def plays_async(item: Item, ctx: Context) -> Rollout:
    """The same, awaiting."""
    steps = np.arange(6, dtype=np.float32)
    count = await ctx.extend(
        {
            "obs": steps[:, None] + 10 * item["n"],
            "action": steps.astype(np.int64),
            "reward": np.ones(6, np.float32),
            "next_obs": steps[:, None] + 1 + 10 * item["n"],
            "terminated": steps == 5,
            "truncated": np.zeros(6, bool),
        }
    )
    return Rollout(reward=float(count))


def asks(item: Item, ctx: Any) -> Rollout:
    """Tries what a worker may not offer, and says what came of it."""
    said: dict[str, Any] = {}
    for name in ("scoring", "version_changed", "extend", "no_such_thing"):
        try:
            found = getattr(ctx, name)
            said[name] = found({"x": [1]}) if name == "extend" else found() if callable(found) else found
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return Rollout(info=said)


async def asks_async(item: Item, ctx: Any) -> Rollout:
    """The same, as far as it need not be awaited."""
    said: dict[str, Any] = {}
    for name in ("scoring", "version_changed"):
        with contextlib.suppress(TypeError):
            try:
                found = getattr(ctx, name)
                said[name] = found() if callable(found) else found
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    return Rollout(info=said)


def until_changed(item: Item, ctx: Context) -> Rollout:
    """Ends when the weights have changed."""
    ring(item["bell"], "began")
    while not ctx.version_changed:
        time.sleep(0.001)
    return Rollout(reward=1.0)


def sends_signals(item: Item, ctx: Context) -> Rollout:
    """Is sent what a terminal and a launcher send."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(["sleep", "1000"])
    child.terminate()
    return Rollout(info={"child": child.wait()})


def runs_a_loop(item: Item, ctx: Context) -> Rollout:
    """Runs an event loop of its own."""

    async def main() -> int:
        await anyio.lowlevel.checkpoint()
        return 5

    return Rollout(info={"said": anyio.run(main)})


def babbles() -> None:
    """Writes something of its own to every socket that it finds."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"\0" * 64)
    block()


# -- functions for ``engine.call`` ---------------------------------------------------------------------------------


def add(first: Any, second: Any = 1) -> Any:
    """A sum."""
    return first + second


def raises(text: str) -> None:
    """Raises."""
    raise OwnError(text)


def sleeps(seconds: float) -> int:
    """Returns its process, later."""
    time.sleep(seconds)
    return os.getpid()


def stuck() -> None:
    """Never returns."""
    block()


def big_array(value: int) -> Any:
    """Many numbers."""
    return np.full(BIG // 8, value, np.int64)


def returns_strange() -> Strange:
    """Returns what cannot travel."""
    return Strange()


number_of = functools.partial(add, second=100)


class Methods:
    """Functions of a class."""

    @staticmethod
    def static(value: int) -> int:
        """Twice."""
        return 2 * value

    @classmethod
    def of_class(cls, value: int) -> int:
        """Thrice."""
        return 3 * value

    def plain(self, value: int) -> int:
        """Needs an object."""
        return value
