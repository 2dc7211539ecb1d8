"""A pytest plugin: tests marked ``virtual_time`` run on a clock that leaps.

It needs pytest-asyncio, and is asked for in the ``conftest.py`` at the root of a suite::

    pytest_plugins = ["pipeline.testing.plugin"]


    @pytest.mark.virtual_time
    async def test_an_hour_passes_at_once():
        await anyio.sleep(3600)

It is not installed as a plugin by itself: pytest-asyncio names the loop in the id of every test once loops are chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from pipeline.testing.clock import VirtualClockLoop


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "virtual_time: runs on a clock that leaps to the next timer; only for tests without threads"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give the test the loop that its marker asks for."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualClockLoop}
    return {"asyncio": asyncio.new_event_loop}
