"""What all tests share."""

from __future__ import annotations

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


@pytest.fixture
def run_directory(tmp_path: Any) -> str:
    """A folder that does not exist yet, for a run."""
    return str(tmp_path / "run")
