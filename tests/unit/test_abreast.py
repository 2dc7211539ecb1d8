"""Jobs that two threads do: results in their order, errors where the caller waits, and no thread left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from pipeline.store.abreast import Told, abreast

MB = 1 << 20


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_results_have_the_order_of_the_jobs_whichever_ends_first() -> None:
    second = threading.Event()

    def first(told: Told) -> str:
        assert second.wait(60)  # so both are under way at one time
        return "first"

    def other(told: Told) -> str:
        second.set()
        return "second"

    assert abreast([first, other, lambda told: "third"], lambda count: None) == ["first", "second", "third"]
    assert abreast([], lambda count: None) == []


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_the_caller_hears_of_every_byte_in_its_own_thread(threads: int) -> None:
    told: list[int] = []
    heard = set()

    def tell(count: int) -> None:
        told.append(count)
        heard.add(threading.current_thread())

    def job(size: int) -> Callable[[Told], int]:
        def read(told: Told) -> int:
            for _ in range(size):
                told(MB)
            return size

        return read

    sizes = [0, 1, 30, 2, 5]
    assert abreast([job(size) for size in sizes], tell, threads=threads) == sizes
    assert (sum(told), heard) == (sum(sizes) * MB, {threading.current_thread()})


def test_the_error_of_the_first_job_that_fails_is_raised_and_no_other_is_begun() -> None:
    failed = threading.Event()
    begun = []

    def slow(told: Told) -> None:
        assert failed.wait(60)
        raise ValueError("the first")

    def quick(told: Told) -> None:
        failed.set()
        raise KeyError("the second")

    with pytest.raises(ValueError, match="the first"):
        abreast([slow, quick, lambda told: begun.append(1)], lambda count: None)
    assert begun == []


def test_a_caller_that_fails_is_not_waited_for_with_all_the_rest() -> None:
    pieces = []

    def endless(told: Told) -> None:
        while True:
            pieces.append(1)
            told(MB)

    def full(count: int) -> None:
        raise BrokenPipeError("nobody reads the progress")

    with pytest.raises(BrokenPipeError):
        abreast([endless, endless], full)
    assert pieces


def test_ctrl_c_ends_the_call_and_its_threads_at_once() -> None:
    script = """
import os, signal, threading
from pipeline.store.abreast import abreast

def endless(told):
    while True:
        told(1 << 10)

def tell(count):  # both are under way
    os.kill(os.getpid(), signal.SIGINT)

try:
    abreast([endless, endless], tell)
except KeyboardInterrupt:
    print("stopped with", threading.active_count())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("stopped with 1\n", "", 0)


def test_a_signal_comes_through_while_the_caller_waits() -> None:
    """Nothing is told here: the caller only waits."""
    main = threading.main_thread().ident
    assert main is not None
    stop = threading.Event()

    def quiet(told: Told) -> None:
        signal.pthread_kill(main, signal.SIGUSR1)
        while not stop.is_set():
            told(0)

    def leave(number: int, frame: object) -> None:
        raise TimeoutError("the signal")

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(TimeoutError, match="the signal"):
            abreast([quiet, lambda told: None], lambda count: None)
    finally:
        stop.set()
        signal.signal(signal.SIGUSR1, before)
