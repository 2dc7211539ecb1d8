"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

pytest_plugins = ["pipeline.testing.plugin"]


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
        left = len(os.listdir("/proc/self/fd"))
        assert left < 200, f"{left} files are open after the last test"


@pytest.fixture
def run_directory(tmp_path: Any) -> str:
    """A folder that does not exist yet, for a run."""
    return str(tmp_path / "run")
