"""A training process that is sent signals: run by a fork server, so that starting one takes milliseconds.

It says through a pipe where it is, and ends as a script would: by its exit code, or by the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, Rollout, SyncPipeline
from tests.support.crashes import Trained
from tests.support.runs import task

COUNT = 40
Say = Callable[[str], None]


async def work(item: Item, ctx: Context) -> Rollout:
    """The last twenty items never end, unless the environment lets them."""
    if item["n"] >= 20 and "FOREBAY_TEST_ENDS" not in os.environ:
        await anyio.sleep_forever()
    return Rollout({"n": [item["n"]]}, reward=0.0)


def made(directory: str, **options: Any) -> Pipeline:
    return Pipeline(task(COUNT, work), directory=directory, watchdog=None, **options)


def busy(seconds: float) -> None:
    """A training step that holds the thread: signals interrupt it for their handlers, and it goes on."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)


def train(pipe: SyncPipeline, say: Say, *, seconds: float = 0.0, trained: Trained | None = None) -> None:
    """Resume, start, and train for ever."""
    trained = trained or Trained()
    pipe.attach(trained=trained)
    with pipe.weight_update(version=pipe.resume().version):
        say("resumed")
    pipe.start()
    say("started")
    for batch in pipe.batches(groups=4):
        trained.step(batch)
        say(f"step {batch.step}")
        busy(seconds)
        with pipe.weight_update(version=batch.step):
            pass
    say("done")


def steps(directory: str, say: Say) -> None:
    """Steps of half a second."""
    with made(directory).sync() as pipe:
        train(pipe, say, seconds=0.5)


def long_step(directory: str, say: Say) -> None:
    """Steps that last longer than any test waits."""
    with made(directory, grace_s=0.2).sync() as pipe:
        train(pipe, say, seconds=100)


def waits(directory: str, say: Say) -> None:
    """Trains what there is at once, and then waits in vain."""
    with made(directory).sync() as pipe:
        train(pipe, say)


def waits_async(directory: str, say: Say) -> None:
    """The same, awaiting."""

    async def main() -> None:
        trained = Trained()
        async with made(directory) as pipe:
            pipe.attach(trained=trained)
            async with pipe.weight_update(version=(await pipe.resume()).version):
                pass
            await pipe.start()
            async for batch in pipe.batches(groups=4):
                trained.step(batch)
                say(f"step {batch.step}")

    anyio.run(main)


def flagged(directory: str, say: Say) -> None:
    """The script has a handler of its own, and it is called as well; afterwards it is there again."""

    def mine(number: int, frame: FrameType | None) -> None:
        say("told")

    signal.signal(signal.SIGTERM, mine)
    try:
        waits(directory, say)
    finally:
        say("restored" if signal.getsignal(signal.SIGTERM) is mine else "lost")


def leaving(directory: str, say: Say) -> None:
    """The script's own handler leaves with a code of its own."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    waits(directory, say)


def by_choice(directory: str, say: Say) -> None:
    """USR1 saves and goes on; Ctrl-C saves and stops."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with made(directory, signals=["SIGINT"], save_signals=["SIGUSR1"], keep=None).sync() as pipe:
        train(pipe, say, seconds=0.3)


def unheard(directory: str, say: Say) -> None:
    """The signal comes when no verb follows: after the pipeline is closed it does what it would have done."""
    with made(directory).sync() as pipe:
        pipe.start()
        pipe.get_batch(4)
        say("leased")
        busy(0.5)
    say("closed")
    busy(0.5)
    say("went on")


def failing(directory: str, say: Say) -> None:
    """An error leaves by its own code, a signal or not."""
    with made(directory).sync() as pipe:
        pipe.start()
        pipe.get_batch(4)
        say("leased")
        busy(0.5)
        raise ValueError("the step failed")


def forks(directory: str, say: Say) -> None:
    """A forked worker is ended by the signal as if nobody had taken it over."""
    with made(directory).sync() as pipe:
        pipe.start()
        ready, born = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(born, b"x")  # Python forgets signals that come in the midst of a fork
            busy(100)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        say(f"child {os.WTERMSIG(status)}")


def run(body: Callable[[str, Say], None], directory: str, pipe: Any) -> None:
    """The process's main function."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        body(directory, pipe.send)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        raise
