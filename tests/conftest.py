"""What all tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pipeline.testing import VirtualClockLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked ``virtual_time`` run on a clock that leaps."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualClockLoop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def run_directory(tmp_path: Any) -> str:
    """A folder that does not exist yet, for a run."""
    return str(tmp_path / "run")
