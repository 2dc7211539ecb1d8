"""What all tests share."""

from __future__ import annotations

from typing import Any

import pytest

pytest_plugins = ["pipeline.testing.plugin"]


@pytest.fixture
def run_directory(tmp_path: Any) -> str:
    """A folder that does not exist yet, for a run."""
    return str(tmp_path / "run")
