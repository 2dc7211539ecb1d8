"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

pytest_plugins = ["pipeline.testing.plugin"]


def pytest_configure() -> None:
    """Started by a shell as a job beside others, Ctrl-C is ignored by this process and by each that a test starts.

    torch asks for the name of each address that a store connects to. Without a network that takes the name service's
    limit, which is 5 s twice over, for each of some hundred connections.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def structlog_as_it_was() -> Iterator[None]:
    """What a test configures (capturing logs does) must not decide where the next one's lines go."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def no_file_stays_open() -> Iterator[None]:
    """Thousands of tests open files; one that leaves some open would break another, far from it."""
    yield
    if os.path.isdir("/proc/self/fd"):
        left = [_what(name) for name in os.listdir("/proc/self/fd")]
        assert len(left) < 200, f"{len(left)} files are open after the last test: {Counter(left).most_common(9)}"


def _what(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
    except OSError:
        return "closed meanwhile"


@pytest.fixture
def run_directory(tmp_path: Any) -> str:
    """A folder that does not exist yet, for a run."""
    return str(tmp_path / "run")
