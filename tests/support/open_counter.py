"""An environment of OpenEnv with a server of its own: it adds the numbers that it is given, twice."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openenv.core.env_server as openenv
import uvicorn


class Number(openenv.Action):  # type: ignore[misc]
    number: int


class Total(openenv.Observation):  # type: ignore[misc]
    total: int


class Counter(openenv.Environment):  # type: ignore[misc]
    """Starts at the seed; each number is its reward."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Total:
        self.total, self.steps = seed or 0, 0
        return Total(total=self.total)

    def step(self, action: Number, timeout_s: float | None = None, **more: Any) -> Total:
        self.total += action.number
        self.steps += 1
        return Total(total=self.total, reward=float(action.number), done=self.steps == 2)

    @property
    def state(self) -> Any:
        return openenv.State(step_count=self.steps)


@asynccontextmanager
async def counting() -> AsyncIterator[str]:
    """The environment's server at a free port, until the end of the block; its address."""
    app = openenv.create_fastapi_app(Counter, Number, Total)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
