"""What a chat costs its client, beside the bare client of the same server in a task group.

1,024 chats at once, of 5 turns each, with a scripted server in a process of its own, so that its processor time is not
counted. Processor time of this process, medians of rounds in which the sides take turns. The bare side is the official
client with the same HTTP settings and the same requests; it throws away what ours keeps.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import anyio

from benchmarks.agents_server import SAID, TURNS
from benchmarks.harness import Endless, Row, times
from pipeline import Context, Item, Pipeline, Rollout, Task
from tasks import chat
from tasks.chat.clients import http_client

CHATS, ROUNDS = 1024, 3
CONNECT_S = 300.0  # a thousand connections are made at once, and the machine may be busy
SYSTEM = "You are a policy that is asked five times. " * 8
SAYS = [f"This is what the user says at turn {turn}, and it is not very long." for turn in range(TURNS)]


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.agents_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        process.stdin.close()


def _client(url: str) -> chat.ChatClient:
    how: dict[str, Any] = {"concurrency": 1 << 20, "connect_timeout_s": CONNECT_S}
    return chat.client(url, model="policy", temperature=1.0, max_tokens=SAID, **how)


async def _at_once(count: int, one: Callable[[], Coroutine[Any, Any, None]]) -> tuple[float, float]:
    """Microseconds of processor time for each request, and requests per second, of so many chats at once."""
    cpu, wall = time.process_time(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)
    requests = count * TURNS
    return (time.process_time() - cpu) / requests * 1e6, requests / (time.perf_counter() - wall)


async def _talk(talk: chat.Session) -> Rollout:
    for words in SAYS:
        await talk.complete(words)
    made = talk.rollout(1.0)
    assert len(made.traces) == 1
    return made


async def _ours(url: str, count: int) -> tuple[float, float]:
    async with _client(url) as client:

        async def one() -> None:
            await _talk(client.session(system=SYSTEM))

        await one()
        return await _at_once(count, one)


async def _bare(url: str, count: int, *, raw: bool) -> tuple[float, float]:
    """The official client: with its models of replies, or with the bytes alone, which nobody decodes."""
    import openai

    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http_client(openai, CONNECT_S))
    fields: dict[str, Any] = {"model": "policy", "temperature": 1.0, "max_tokens": SAID, "logprobs": True}
    fields["extra_body"] = {"return_token_ids": True}
    spoken = f"reply {{}} {'word ' * SAID}"

    async def one() -> None:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for turn, words in enumerate(SAYS):
            messages.append({"role": "user", "content": words})
            if raw:
                await client.chat.completions.with_raw_response.create(messages=messages, **fields)
                said = spoken.format(turn)
            else:
                said = (await client.chat.completions.create(messages=messages, **fields)).choices[0].message.content
            messages.append({"role": "assistant", "content": said})

    async with client:
        await one()
        return await _at_once(count, one)


async def _pipeline(url: str, count: int) -> tuple[float, float]:
    """The same chats as rollouts of a pipeline in memory, which keeps what was said after each turn."""

    async def solve(item: Item, ctx: Context) -> Rollout:
        return await _talk(ctx.resource.session(ctx, system=SYSTEM))

    task = Task("chats", source=Endless(), run=solve, resource=_client(url))
    async with Pipeline([task], concurrency=count, capacity=count, watchdog=None) as pipe:
        cpu, wall = time.process_time(), time.perf_counter()
        await pipe.start()
        batch = await pipe.get_batch(groups=count)
        assert len(batch.rollouts) == count
        before = time.process_time() - cpu
        return before / (count * TURNS) * 1e6, count * TURNS / (time.perf_counter() - wall)


async def _rows(scale: float) -> list[Row]:
    count = max(4, int(CHATS * scale))
    with _server() as url:
        sides: dict[str, Callable[[], Awaitable[tuple[float, float]]]] = {
            "ours": lambda: _ours(url, count),
            "bare": lambda: _bare(url, count, raw=False),
            "raw": lambda: _bare(url, count, raw=True),
            "pipeline": lambda: _pipeline(url, count),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(ROUNDS):  # each side makes a chat before it is measured
            for name, side in sides.items():
                found[name].append(await side())
    cpu = {name: [each[0] for each in rounds] for name, rounds in found.items()}
    rate = {name: median(each[1] for each in rounds) for name, rounds in found.items()}
    what = f"{count} chats of {TURNS} turns"
    bare, bytes_alone = "the bare client in a task group", "the bare client, replies not even decoded"
    least = rate["bare"] / 1.3
    return [
        times(f"processor time of a request, {what}", cpu["ours"], bare, cpu["bare"], unit="us", most=1.3),
        times("the same", cpu["ours"], bytes_alone, cpu["raw"], unit="us", most=1.3),
        times("the same, in a whole pipeline", cpu["pipeline"], bare, cpu["bare"], unit="us", most=1.3),
        Row(
            name="time of a request, 1 / requests per second",
            ours=1e6 / rate["ours"],
            unit="us",
            limit=1e6 / least,
            asked=f"within 1.3x of {bare} ({rate['ours']:.0f} requests per second)",
            peers={"requests per second of it": rate["bare"], "in a pipeline": rate["pipeline"]},
        ),
    ]


def run(scale: float) -> list[Row]:
    """Measure. About two minutes at scale 1."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))
    try:
        return anyio.run(_rows, scale)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
