"""Rewards out of weighted parts, and what another model says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from pipeline import ConfigError, UsageError
from pipeline.errors import ReplyInvalid
from tasks import chat
from tasks.llm import Judge, Rubric, Score
from tests.support.chat_server import Said, reply, serving


def right(text: str, answer: str) -> bool:
    return text == answer


async def short(text: str, answer: str) -> float:
    return 1 / len(text)


async def test_parts_are_weighted_and_told_apart() -> None:
    rubric = Rubric(right, Score(short, weight=0.5, name="brief"))
    scored = await rubric("ab", "ab")
    assert (scored.reward, scored.parts) == (1.25, {"right": 1.0, "brief": 0.5})
    assert (await rubric("ab", answer="c")).reward == 0.25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "x", [1]])
async def test_what_is_no_finite_number_is_no_score(value: Any) -> None:
    def odd(text: str) -> Any:
        return value

    with pytest.raises(UsageError, match="score 'odd': it returned"):
        await Rubric(odd)("a")


async def test_what_a_part_raises_is_raised() -> None:
    def wrong(text: str) -> float:
        raise KeyError(text)

    async def never(text: str) -> float:
        await anyio.sleep_forever()
        return 1.0

    with pytest.raises(KeyError, match="a"):
        await Rubric(wrong, never)("a")


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_part_that_takes_too_long_is_named(kind: str) -> None:
    let = threading.Event()

    async def waits() -> float:
        await anyio.sleep_forever()
        return 1.0

    def hangs() -> float:
        let.wait()
        return 1.0

    made: Callable[..., Any] = waits if kind == "async" else hangs
    with pytest.raises(TimeoutError, match=r"score 'slow': more than 0\.05 s"):
        await Rubric(Score(made, name="slow", timeout_s=0.05))()
    let.set()


async def test_each_part_has_a_limit_of_its_own() -> None:
    now, most = 0, 0

    async def busy() -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        now -= 1
        return 1.0

    rubric = Rubric(Score(busy, concurrency=3))
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(rubric)
    assert most == 3


def test_rubrics_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="one at least"):
        Rubric()
    with pytest.raises(ConfigError, match="a name of its own"):
        Rubric(right, right)
    for wrong in ({"weight": float("nan")}, {"timeout_s": 0}, {"concurrency": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Score(right, **wrong)
    with pytest.raises(ConfigError, match="a function is needed"):
        Score(3)  # type: ignore[arg-type]


async def test_another_model_judges() -> None:
    pytest.importorskip("openai")
    said = ["I cannot say.", "Score: 99", "It is fine. **Score:** 7.5", "Score: 3, no: Score: 4"]

    async def answer(request: dict[str, Any]) -> Said:
        asked.append(request["messages"][-1]["content"])
        return reply(said.pop(0))

    asked: list[str] = []
    async with serving(answer) as server, chat.client(server.url, model="judge") as client:
        judge = Judge(client, "Rate {answer}.", low=0, high=10)
        scored = await Rubric(judge)(answer="{42}")
        assert scored.parts == {"judge": 0.75}
        assert await judge(answer="x") == 0.4
        assert asked == ["Rate {42}."] * 3 + ["Rate x."]
        said += ["no", "nothing", "none"]
        with pytest.raises(ReplyInvalid, match=r"from 0 to 10 in 3 replies; they end with \['no', 'nothing', 'none'\]"):
            await judge(answer="x")
    with pytest.raises(ConfigError, match="low=1"):
        Judge(client, "", low=1, high=1)
