"""A taskset of ``verifiers.v1`` whose tasks come with a tool server."""

# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Doubles"]


class Doubling(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def double(self, number: int) -> str:
        """Twice a number."""
        return str(2 * number)


class DoubleConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Double(vf.Task[vf.TaskData, vf.State, DoubleConfig]):
    @classmethod
    def toolsets(cls, config: DoubleConfig) -> list[Any]:
        return [Doubling(config.tools)]

    @vf.reward
    async def right(self, trace: Any) -> float:
        return float(trace.nodes[-1].message.content == "42")


class DoublesConfig(vf.TasksetConfig):
    task: DoubleConfig = DoubleConfig()


class Doubles(vf.Taskset[Double, DoublesConfig]):
    def load(self) -> Iterator[Double]:
        yield Double(vf.TaskData(prompt="Double 21."), self.config.task)


if __name__ == "__main__":  # so a server of tools is run
    Doubling.run()
