"""Agents that own their loop talk to a recorder by the official client, as they would to any server."""

from __future__ import annotations

import gc
import json
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Item, Pipeline, Rollout, Skip, Task, UsageError
from tasks import SequenceSource, chat
from tasks.llm import token_rows
from tests.support.chat_server import Said, called, reply, serving, toy

openai: Any = pytest.importorskip("openai")


class Toy:
    """A model whose tokens are bytes: its prompt is the text of all messages, and it says the number of its turn."""

    async def __call__(self, request: dict[str, Any]) -> Said:
        messages = request["messages"]
        prompt = [code for each in messages for code in (each["content"] or "").encode()]
        text = str(sum(each["role"] == "assistant" for each in messages))
        return toy(text, list(text.encode()), prompt=prompt, usage=1)


async def collected(run: Any, answer: Any, *, size: int = 1, **options: Any) -> list[Rollout]:
    async with serving(answer) as server:
        recorder = chat.recorder(chat.client(server.url, model="policy", backoff_s=0.0), **options)
        source = SequenceSource([{"question": "q"}])
        task = Task("t", source=source, run=run, group_size=size, resource=recorder, on_failure=Skip())
        async with Pipeline([task]) as pipe:
            await pipe.start()
            batch = await pipe.get_batch(groups=1)
            token_rows(batch)
            return batch.rollouts


def client_of(ctx: Any) -> Any:
    return openai.AsyncOpenAI(base_url=ctx.base_url, api_key="any")


async def say(client: Any, messages: list[Any], **more: Any) -> str:
    found = await client.chat.completions.create(model="whatever", messages=messages, **more)
    text: str = found.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    return text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_what_an_agent_and_its_model_say_is_recorded() -> None:
    async def run(item: Item, ctx: Any) -> Rollout:
        messages: list[Any] = []
        async with client_of(ctx) as client:
            for _ in range(3):
                messages.append(user("ab"))
                await say(client, messages)
            assert [each.id async for each in client.models.list()] == ["policy"]
        made: Rollout = ctx.resource.rollout(ctx, 0.5, {"more": True})
        return made

    (rollout,) = await collected(run, Toy())
    (trace,) = rollout.traces
    assert bytes(np.asarray(trace["prompt_ids"]).tolist()) == b"ab"
    assert bytes(np.asarray(trace["completion_ids"]).tolist()) == b"0ab1ab2"
    assert np.asarray(trace["completion_mask"]).tolist() == [True, False, False, True, False, False, True]
    assert (rollout.reward, rollout.tokens, rollout.info["turns"], rollout.info["more"]) == (0.5, 3, 3, True)
    (said,) = rollout.info["chats"]
    assert [each["content"] for each in said] == ["ab", "0", "ab", "1", "ab", "2"]


async def test_sub_agents_and_shortened_histories_are_traces_of_their_own() -> None:
    async def run(item: Item, ctx: Any) -> Rollout:
        main: list[Any] = [user("main")]
        sub: list[Any] = [user("sub")]
        async with client_of(ctx) as client:
            await say(client, main)
            await say(client, sub)
            main.append(user("x"))
            await say(client, main)
            sub.append(user("y"))
            await say(client, sub)
            await say(client, [user("summary"), *main[-1:], user("z")])
        made: Rollout = ctx.resource.rollout(ctx, 1.0)
        return made

    (rollout,) = await collected(run, Toy())
    found = [bytes([*each["prompt_ids"].tolist(), *each["completion_ids"].tolist()]) for each in rollout.traces]
    assert found == [b"main0x1", b"sub0y1", b"summary1z1"]
    assert rollout.info["breaks"] == 2
    assert [len(each) for each in rollout.info["chats"]] == [4, 4, 4]


async def test_attempts_at_the_same_time_are_not_mixed() -> None:
    async def run(item: Item, ctx: Any) -> Rollout:
        messages = [user(str(ctx.member))]
        async with client_of(ctx) as client:
            for _ in range(4):
                await say(client, messages)
                messages.append(user("."))
        made: Rollout = ctx.resource.rollout(ctx, float(ctx.member))
        return made

    rollouts = await collected(run, Toy(), size=8)
    assert [bytes(each["prompt_ids"].tolist()) for each in rollouts] == [str(n).encode() for n in range(8)]
    assert all(len(each.traces) == 1 for each in rollouts)


async def test_streams_tools_and_what_was_asked_for_come_as_from_any_server() -> None:
    calls = [called("look", '{"at": 1}')]

    async def answer(request: dict[str, Any]) -> Said:
        asked.append(request)
        return toy("hi", [1], prompt=[9], tool_calls=calls, usage=1)

    asked: list[dict[str, Any]] = []
    seen: list[Any] = []

    async def run(item: Item, ctx: Any) -> Rollout:
        messages = [user("a")]
        async with client_of(ctx) as client:
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, temperature=0.25, tools=[{"type": "function"}]
            )
            seen.extend([chunk async for chunk in stream])
            seen.append(await client.chat.completions.create(model="m", messages=messages, logprobs=True))
            seen.append(await client.chat.completions.create(model="m", messages=messages))
        made: Rollout = ctx.resource.rollout(ctx, 1.0)
        return made

    await collected(run, answer)
    chunk, with_logprobs, plain = seen
    assert chunk.choices[0].delta.content == "hi"
    assert chunk.choices[0].delta.tool_calls[0].function.arguments == '{"at": 1}'
    assert with_logprobs.choices[0].logprobs.content[0].logprob == -0.1
    assert plain.choices[0].logprobs is None
    assert "token_ids" not in plain.choices[0].to_dict()
    assert (asked[0]["model"], asked[0]["temperature"], asked[0]["logprobs"]) == ("policy", 0.25, True)
    assert asked[0]["tools"] == [{"type": "function"}]
    assert "stream" not in asked[0]


@pytest.mark.parametrize(("status", "code"), [(400, 400), (503, 502)])
async def test_what_the_servers_refuse_the_agent_is_told_once(status: int, code: int) -> None:
    """Requests are tried again in one place: four times by us, and not four times by the agent's client again."""

    async def answer(request: dict[str, Any]) -> Said:
        asked.append(request)
        return Said({"error": {"message": "no"}}, status=status)

    asked: list[Any] = []
    told: list[Any] = []

    async def run(item: Item, ctx: Any) -> Rollout:
        async with client_of(ctx) as client:
            with pytest.raises(openai.APIStatusError) as error:
                await say(client, [user("a")])
            told.append(error.value)
        return Rollout(
            {"prompt_ids": np.zeros(1, int), "completion_ids": np.zeros(0, int)},
            info=ctx.resource.rollout(ctx, 0.0).info,
        )

    (rollout,) = await collected(run, answer)
    assert told[0].status_code == code
    assert "no" in str(told[0])
    assert len(asked) == (1 if status == 400 else 4)
    assert rollout.info["turns"] == 0


async def test_a_limit_of_requests() -> None:
    async def run(item: Item, ctx: Any) -> Rollout:
        async with client_of(ctx) as client:
            await say(client, [user("a")])
            with pytest.raises(openai.BadRequestError, match="max_requests=1"):
                await say(client, [user("a")])
        made: Rollout = ctx.resource.rollout(ctx, 0.0)
        return made

    (rollout,) = await collected(run, Toy(), max_requests=1)
    assert rollout.info["turns"] == 1


async def test_requests_that_are_none(run_directory: str) -> None:
    async def raw(url: str, request: bytes) -> bytes:
        host, port = url.removeprefix("http://").partition("/")[0].split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(request)
            found = b""
            try:
                while True:
                    found += await stream.receive()
            except anyio.EndOfStream:
                return found

    def post(path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async with serving(Toy()) as server:
        recorder = chat.recorder(chat.client(server.url, model="m"))
        async with recorder:
            ctx: Any = _Attempt()
            url = recorder.base_url_of(ctx)
            path = "/" + url.split("/", 3)[3]
            good = json.dumps({"messages": [user("a")]}).encode()
            for request, said in (
                (post(f"{path}/chat/completions", b"{"), b"400"),
                (post(f"{path}/chat/completions", b"[]"), b"400"),
                (post(f"{path}/chat/completions", b'{"messages": [], "n": 2}'), b"400"),
                (post(f"{path}/completions", good), b"404"),
                (post("/other/v1/chat/completions", good), b"404"),
                (post(f"{path}/chat/completions", good), b"200"),
                (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"404"),
            ):
                assert (await raw(url, request)).startswith(b"HTTP/1.1 " + said), request
            assert await raw(url, b"nonsense\r\n\r\n") == b""
            assert recorder.rollout(ctx, 1.0).info["turns"] == 1
            assert (await raw(url, post(f"{path}/chat/completions", good))).startswith(b"HTTP/1.1 404")
    with pytest.raises(UsageError, match="not open"):
        recorder.base_url_of(ctx)


class _Attempt:
    key, version_now, member, item = "k", 0, 0, "item"


async def test_attempts_that_fail_leave_nothing_behind() -> None:
    seen: list[chat.Recorder] = []

    async def run(item: Item, ctx: Any) -> Rollout:
        async with client_of(ctx) as client:
            await say(client, [user("a")])
        seen.append(ctx.resource)
        if ctx.member:
            raise ValueError("it came to nothing")
        made: Rollout = ctx.resource.rollout(ctx, 1.0)
        return made

    async with serving(Toy()) as server:
        recorder = chat.recorder(chat.client(server.url, model="m"))
        tasks = [
            Task(name, source=SequenceSource([0]), run=run, group_size=4, min_group=1, resource=recorder)
            for name in ("one", "two")
        ]
        async with Pipeline(tasks) as pipe:
            await pipe.start()
            assert len(await pipe.get_batch(groups=2)) == 2, "tasks share a client"
            gc.collect()
            assert len(seen) > 2
            assert not recorder._recordings


async def test_an_agent_that_is_cancelled_hangs_up_on_the_model() -> None:
    begun, ended = anyio.Event(), anyio.Event()

    async def never(request: dict[str, Any]) -> Said:
        begun.set()
        try:
            await anyio.sleep_forever()
            raise AssertionError
        finally:
            ended.set()

    async with serving(never) as server, chat.recorder(chat.client(server.url, model="m")) as recorder:
        ctx: Any = _Attempt()
        client = openai.AsyncOpenAI(base_url=recorder.base_url_of(ctx), api_key="x")
        async with client, anyio.create_task_group() as group:
            group.start_soon(say, client, [user("a")])
            await begun.wait()
            group.cancel_scope.cancel()
        with anyio.fail_after(5):
            await ended.wait()


async def test_a_server_without_ids_gives_no_trace() -> None:
    async def run(item: Item, ctx: Any) -> Rollout:
        async with client_of(ctx) as client:
            await say(client, [user("a")])
        made: Rollout = ctx.resource.rollout(ctx, 1.0)
        return made

    async def answer(request: dict[str, Any]) -> Said:
        return reply("x", usage=3)

    (rollout,) = await collected(run, answer)
    assert list(rollout.traces) == []
    assert (rollout.info["unknown_tokens"], rollout.tokens) == (1, 3)


async def test_a_task_without_a_recorder_has_no_base_url() -> None:
    async def run(item: Item, ctx: Any) -> Rollout:
        with pytest.raises(UsageError, match=r"ctx\.base_url: the resource of task 't' records nothing"):
            _ = ctx.base_url
        return Rollout()

    async with Pipeline([Task("t", source=SequenceSource([0]), run=run)]) as pipe:
        await pipe.start()
        await pipe.get_batch(groups=1)


async def test_several_recordings_of_an_attempt_at_one_address() -> None:
    async with serving(Toy()) as server, chat.recorder(chat.client(server.url, model="m")) as recorder:
        ctx: Any = _Attempt()
        one, two = recorder.session(ctx, "one"), recorder.session(ctx, "two")
        async with openai.AsyncOpenAI(base_url=recorder.shared_url, api_key="x", max_retries=0) as client:
            for name, text in (("one", "a"), ("two", "b"), ("one", "c")):
                await say(client, [user(text)], extra_headers={"X-Session-ID": name})
            with pytest.raises(openai.NotFoundError):
                await say(client, [user("a")], extra_headers={"X-Session-ID": "three"})
            with pytest.raises(openai.NotFoundError):
                await say(client, [user("a")])
        found = [[bytes(each["prompt_ids"].tolist()) for each in part.rollout(0.0).traces] for part in (one, two)]
        assert found == [[b"a", b"c"], [b"b"]]
        del one, two
        gc.collect()
        assert not recorder._recordings
    with pytest.raises(UsageError, match="not open"):
        _ = recorder.shared_url


async def test_an_agent_that_tries_again_itself_does_not_multiply_the_attempts() -> None:
    async def answer(request: dict[str, Any]) -> Said:
        asked.append(request)
        return Said({"error": {"message": "no"}}, status=503)

    asked: list[Any] = []
    async with (
        serving(answer) as server,
        chat.recorder(chat.client(server.url, model="m", attempts=2, backoff_s=0.0)) as recorder,
    ):
        ctx: Any = _Attempt()
        recording = recorder.session(ctx, "one")
        async with openai.AsyncOpenAI(base_url=recorder.shared_url, api_key="x", max_retries=0) as client:
            for status in (502, 400, 400):
                with pytest.raises(openai.APIStatusError) as error:
                    await say(client, [user("a")], extra_headers={"X-Session-ID": "one"})
                assert error.value.status_code == status
        assert len(asked) == 2
        assert "503" in str(recording.failure)
