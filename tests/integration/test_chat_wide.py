"""A thousand chats at once, at servers that are well and at servers that fail in every way; and text that is hard."""

from __future__ import annotations

import json
import random
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Item, Pipeline, Retry, Rollout, Task
from tasks import SequenceSource, chat
from tasks.chat.text import cleaned
from tests.support.chat_server import Said, called, reply, serving, toy
from tests.support.continued import BREAK, Model, check, solve

pytest.importorskip("openai")
WIDE, STREAMS = 1024, 256
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def enough_sockets() -> Iterator[None]:
    """Both ends of each connection are here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * WIDE
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"{needed} files are needed, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_thousand_requests_are_in_flight_at_once_and_each_gets_its_own_reply() -> None:
    """No request is answered before all have come, twice: who waits for a place, or mixes replies up, is found out."""

    waiting, all_there = [0, 0], [anyio.Event(), anyio.Event()]

    async def answer(request: dict[str, Any]) -> Said:
        turn = len(request["messages"]) // 2
        waiting[turn] += 1
        if waiting[turn] == WIDE:
            all_there[turn].set()
        await all_there[turn].wait()
        number = int(request["messages"][0]["content"])
        said = [number * 10 + turn]
        return toy(f"{number}/{turn}", said, prompt=[9] if turn == 0 else [9, number * 10, 8])

    rollouts: dict[int, Rollout] = {}

    async def one(number: int) -> None:
        talk = client.session()
        for turn in range(2):
            assert (await talk.complete(str(number))).text == f"{number}/{turn}"
        rollouts[number] = talk.rollout(1.0)

    async with serving(answer) as server, chat.client(server.url, model="m", concurrency=WIDE) as client:
        async with anyio.create_task_group() as group:
            for number in range(WIDE):
                group.start_soon(one, number)
        (place,) = client.servers.all
        assert (place.most, place.in_flight, place.answered, place.failures) == (WIDE, 0, 2 * WIDE, 0)
    assert server.most_at_once == WIDE
    for number, rollout in rollouts.items():
        (trace,) = rollout.traces
        assert trace["completion_ids"].tolist() == [number * 10, 8, number * 10 + 1]


FAULTS = ["429", "503", "cut", "malformed", "no choice", "lengths", "slow"]


class Ill:
    """Fails a third of all requests, in turn in each way; the same chat is answered when it asks again."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.count = 0
        self.did: Counter[str] = Counter()
        self.many = anyio.Event()

    async def __call__(self, request: dict[str, Any]) -> Said:
        *_, last = request["messages"]
        words, turn = last["content"], len(request["messages"]) // 2
        self.count += 1
        if self.count == WIDE:
            self.many.set()
        number = int(words)
        good = toy(f"reply {words}", [number + 1], prompt=[9] if turn == 0 else [9, number + 1, 7])
        key = f"{words}/{turn}"
        self.seen[key] += 1
        if number % 3 or self.seen[key] > 1:
            return good
        how = FAULTS[number // 3 % len(FAULTS)]
        self.did[how] += 1
        if how == "slow":
            await self.many.wait()
        broken = {
            "429": Said({"error": "busy"}, status=429, headers={"retry-after": "0"}),
            "503": Said({"error": "ill"}, status=503),
            "cut": Said(json.loads(good.raw), cut=True),
            "malformed": Said(good.raw[:-9]),
            "no choice": Said({"choices": []}),
            "lengths": toy("x", [1, 2], prompt=[9], usage=2),
        }
        if how == "lengths":
            said = json.loads(broken[how].raw)
            said["choices"][0]["logprobs"]["content"].pop()
            return Said(said)
        return broken.get(how, good)


async def test_a_thousand_rollouts_though_servers_fail_in_every_way() -> None:
    """Every item ends with all its members right, and only log-probs of a wrong number cost an attempt."""
    ill, well, failed = Ill(), Ill(), Counter[str]()

    async def solve(item: Item, ctx: Any) -> Rollout:
        talk = ctx.resource.session(ctx)
        number = item.content * 4 + ctx.member
        for _ in range(2):
            try:
                assert (await talk.complete(str(number))).text == f"reply {number}"
            except Exception as error:
                failed[type(error).__name__] += 1
                raise
        made: Rollout = talk.rollout(reward=float(number))
        return made

    async with serving(ill) as one, serving(well) as two:
        client = chat.client([one.url, two.url], model="m", concurrency=WIDE, attempts=8, backoff_s=0.0)
        source = SequenceSource(list(range(WIDE // 4)))
        retry = Retry(attempts=20)
        task = Task("t", source=source, run=solve, group_size=4, resource=client, on_failure=retry)
        async with Pipeline([task], concurrency=WIDE, capacity=WIDE, watchdog=None) as pipe:
            await pipe.start()
            batch = await pipe.get_batch(groups=WIDE // 4)
            pipe.ledger.check()
        assert client.requests == len(one.requests) + len(two.requests)
    found = {}
    for group in batch:
        for member, rollout in enumerate(group):
            number = source.item(group.index) * 4 + member
            found[number] = rollout
            (trace,) = rollout.traces
            assert np.asarray(trace["completion_ids"]).tolist() == [number + 1, 7, number + 1]
            assert rollout.reward == number
    assert sorted(found) == list(range(WIDE))
    assert set(ill.did) == set(well.did) == set(FAULTS)
    assert failed == {"ReplyInvalid": ill.did["lengths"] + well.did["lengths"]}


async def test_hundreds_of_streams_of_which_many_break_and_all_are_aborted_twice() -> None:
    """No token of any reply is lost or sampled twice, and each has the version that made it."""
    model, chance = Model("hello world", "more", size=4), random.Random(1)
    model.stop_at = {n: (chance.randrange(1, 3), BREAK) for n in range(4 * STREAMS) if chance.random() < 0.25}
    versions: Counter[int] = Counter()
    async with serving(model) as server:
        client = chat.client(server.url, model="m", concurrency=STREAMS, attempts=20, backoff_s=0.0, continues=True)
        source = SequenceSource(list(range(STREAMS // 4)))
        task = Task("t", source=source, run=solve, group_size=4, resource=client)
        async with Pipeline([task], concurrency=STREAMS, capacity=STREAMS, watchdog=None) as pipe:
            await pipe.start()
            for version in (1, 2):
                await model.has_sampled(version * 4 * STREAMS)
                async with pipe.weight_update(version=version, running="abort"):
                    model.version = version
            rollouts = (await pipe.get_batch(groups=STREAMS // 4)).rollouts
            pipe.ledger.check()
    assert len(rollouts) == STREAMS
    for rollout in rollouts:
        versions.update(check(rollout, ["hello world", "more"]))
    assert versions.keys() == {0, 1, 2}
    assert versions.total() == 15 * STREAMS
    gone_on = sum("prompt" in each for each in model.asked)
    assert gone_on > STREAMS / 4


HARD = {
    "NULs": "\x00a\x00",
    "emoji": "\U0001f40d\u200d\U0001f468\U0001f3fd" * 10,
    "a megabyte": "x\u00e9" * 2**19,
    "a pair": "\ud83d\udc0d",
    "half a pair": "a\ud800b\udfff",
    "what ends a line": "a\u2028b\x85c\x0bd\r\n\x1b[0m",
    "what looks like JSON": '{"role": "tool", "\\u0000": [',
}


@pytest.mark.parametrize("name", HARD)
async def test_any_text_goes_through_tools_and_the_disk(name: str, run_directory: str) -> None:
    """What a user says, what a model calls a tool with, what that returns and what the model says: all of it comes back
    from the disk as it was, with halves of pairs as U+FFFD."""
    text = HARD[name]
    wanted = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    seen: list[str] = []

    def echo(words: str) -> str:
        """Say it again."""
        seen.append(words)
        return text

    async def answer(request: dict[str, Any]) -> Said:
        *_, last = request["messages"]
        assert last["content"] == wanted
        if last["role"] == "tool":
            return toy(text, [2], prompt=[9, 1])
        return toy("", [1], prompt=[9], tool_calls=[called("echo", json.dumps({"words": text}))])

    async def solve(item: Item, ctx: Any) -> Rollout:
        talk = ctx.resource.session(ctx, tools=[echo])
        assert (await talk.run(text)).text == wanted
        talk.keep()
        made: Rollout = talk.rollout(reward=1.0)
        return made

    async with serving(answer) as server:
        client = chat.client(server.url, model="m", attempts=1)
        task = Task("t", source=SequenceSource([0]), run=solve, resource=client)
        async with Pipeline([task], directory=run_directory) as pipe:
            await pipe.start()
            await pipe.get_batch(groups=1)  # and is not acked
        async with Pipeline([task], directory=run_directory) as pipe:
            await pipe.resume()
            await pipe.start(weights_current=True)
            (rollout,) = (await pipe.get_batch(groups=1)).rollouts
    assert len(server.requests) == 2, "what the second run has is what the first one wrote"
    assert seen == [wanted]
    user, call, tool, end = rollout.info["messages"]
    assert user["content"] == tool["content"] == end["content"] == wanted
    assert cleaned(json.loads(call["tool_calls"][0]["function"]["arguments"])["words"]) == wanted


async def test_ten_thousand_calls_in_each_of_a_few_replies() -> None:
    calls = [called("echo", f'{{"number": {n}}}', n) for n in range(10_000)]

    async def echo(number: int) -> int:
        """Say it again."""
        return number

    async def answer(request: dict[str, Any]) -> Said:
        told = [each["content"] for each in request["messages"] if each["role"] == "tool"]
        assert told == [str(n) for n in range(10_000)] * (len(told) // 10_000)
        return reply("", tool_calls=calls) if len(told) < 20_000 else reply("done")

    async with serving(answer) as server, chat.client(server.url, model="m") as client:
        talk = client.session(tools=[echo])
        assert (await talk.run("go")).text == "done"
    assert len(talk.messages) == 20_000 + 2 + 2


async def test_arguments_with_halves_of_pairs_reach_the_tool_and_others_are_told() -> None:
    def echo(words: str) -> str:
        """Say it again."""
        return words

    tool = chat.Tool(echo)
    assert await tool.call('{"words": "a\\ud800b"}') == "a\ufffdb"
    assert await tool.call('{"words": "a\ud800b"}') == "a\ufffdb"
    assert await tool.call('{"words": "\ud83d\udc0d"}') == "\U0001f40d"
    for wrong in ('{"words": 1, "x": "\\ud800"}', '{"words": "\\ud800"', "[" * 10**6):
        assert (await tool.call(wrong)).startswith("error: the arguments do not fit")
