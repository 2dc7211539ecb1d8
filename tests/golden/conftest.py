"""What folders of before have in common."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A copy of the run that lies beside the test's module, as its ``HERE`` says."""
    shutil.copytree(request.module.HERE, tmp_path / "run", ignore=shutil.ignore_patterns("every_event.fbj"))
    return str(tmp_path / "run")
