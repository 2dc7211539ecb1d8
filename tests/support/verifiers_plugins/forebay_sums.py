"""A taskset of ``verifiers.v1``, and a harness that chats in this process: what a package of that kind exports."""

# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["Chat", "Sums"]
DONE = "done"


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=2.0)
    async def right(self, trace: Any, task: Any) -> float:
        return float(trace.nodes[-1].message.content == task.answer)

    @vf.reward
    async def short(self, trace: Any) -> float:
        return 0.25

    @vf.metric
    async def letters(self, trace: Any) -> float:
        return float(len(trace.nodes[-1].message.content))


class SumsConfig(vf.TasksetConfig):
    count: int = 3
    endless: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self) -> Iterator[SumTask]:
        number = 0
        while self.config.endless or number < self.config.count:
            yield SumTask(Sum(prompt=f"{number}+{number}", answer=str(2 * number)), self.config.task)
            number += 1


class ChatConfig(vf.HarnessConfig):
    turns: int = 1
    more: str = "and?"
    retries: int = 2


class Chat(vf.Harness[ChatConfig]):
    """Says the prompt, and then asks on; its own client tries again, as those of such programs do."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(_wire, prompt or ())]
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=self.config.retries) as client:
            for turn in range(self.config.turns):
                if turn:
                    messages.append({"role": "user", "content": self.config.more})
                try:
                    found = await client.chat.completions.create(model=ctx.model, messages=messages)
                except openai.APIError as error:
                    return vf.ProgramResult(1, "", str(error))
                messages.append({"role": "assistant", "content": found.choices[0].message.content})
        return vf.ProgramResult(0, "", "")


def _wire(message: Any) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}
