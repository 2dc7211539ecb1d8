"""Chats over real sockets: tokens as they were sampled, tools, limits; and servers that fail in every way."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from pipeline import ConfigError, FailFast, Item, Pipeline, Retry, Rollout, Task
from pipeline.errors import ChatLimit, ReplyInvalid, RequestRefused, ServerFailed, UsageError
from tasks import SequenceSource, chat
from tasks.chat.traces import Tokens, TokenTrace
from tasks.llm import token_rows
from tests.support.chat_server import Said, called, reply, serving, toy

pytest.importorskip("openai")
QUICK: dict[str, Any] = {"backoff_s": 0.0}


def always(said: Said) -> Callable[[Any], Any]:
    async def answer(request: dict[str, Any]) -> Said:
        return said

    return answer


def in_turn(*said: Said) -> Callable[[Any], Any]:
    left = list(said)

    async def answer(request: dict[str, Any]) -> Said:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return what will be the pauses between attempts, which then take no time."""
    paused: list[float] = []
    asleep = anyio.sleep

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        await asleep(0)

    monkeypatch.setattr("tasks.chat.clients.anyio.sleep", sleep)
    return paused


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_ids_and_log_probs_are_the_servers_own() -> None:
    """CASES 140: a server that samples [1, 2] and says "ab" is never taken to have said [3]."""
    async with serving(always(toy("ab", [1, 2], prompt=[9]))) as server, chat.client(server.url, model="m") as client:
        talk = client.session()
        found = await talk.complete("hello")
        rollout = talk.rollout(1.0, {"more": 1})
    assert found.text == "ab"
    (trace,) = rollout.traces
    assert trace["prompt_ids"].tolist() == [9]
    assert trace["completion_ids"].tolist() == [1, 2]
    assert trace["completion_mask"].tolist() == [True, True]
    assert trace["logprobs"].tolist() == pytest.approx([-0.1, -0.2])
    assert trace["versions"].tolist() == [0, 0]
    assert (rollout.tokens, rollout.reward, rollout.info["more"]) == (2, 1.0, 1)
    assert rollout.info["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "ab"},
    ]
    (request,) = server.requests
    assert (request["model"], request["logprobs"], request["return_token_ids"]) == ("m", True, True)


async def test_a_server_that_gives_no_ids_gets_no_trace() -> None:
    """CASES 140: nothing is made of the text, and nothing is filled up with zeros."""
    content = [{"token": "ab", "logprob": -0.3}]
    said = reply("ab", logprobs={"content": content}, usage=2)
    async with serving(always(said)) as server, chat.client(server.url, model="m") as client:
        talk = client.session()
        await talk.complete("hello")
        rollout = talk.rollout(1.0)
    assert list(rollout.traces) == []
    assert (rollout.info["unknown_tokens"], rollout.tokens) == (1, 2)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            {"token_ids": [1, 2], "logprobs": {"content": [{"token": "a", "logprob": -0.1}]}},
            "2 token ids and 1",
        ),
        ({"token_ids": [1, "b"]}, "token ids that are no whole numbers"),
        ({"token_ids": [1], "logprobs": {"content": [{"token": "a", "logprob": None}]}}, "log-prob that is no number"),
        ({"meta_info": {"output_token_logprobs": [3]}}, "no pairs"),
    ],
)
async def test_what_contradicts_itself_is_refused_and_not_asked_again(choice: dict[str, Any], said: str) -> None:
    answer = always(reply("a", prompt_token_ids=[9], **choice))
    async with serving(answer) as server, chat.client(server.url, model="m") as client:
        talk = client.session()
        with pytest.raises(ReplyInvalid, match=f"turn 1.*{said}"):
            await talk.complete("hello")
        assert len(server.requests) == 1
        assert talk.messages == []
        assert talk.turns == 0


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1, 2], "prompt_token_ids": [9]},
        {"meta_info": {"output_token_logprobs": [[-0.1, 1, "a"], [-0.2, 2, "b"]]}, "token_ids": None},
        {"logprobs": {"content": [{"token": "a", "id": 1, "logprob": -0.1}, {"token": "b", "id": 2, "logprob": -0.2}]}},
        {"logprobs": {"content": [{"token": f"token_id:{n}", "logprob": -n / 10} for n in (1, 2)]}},
    ],
)
async def test_servers_say_it_in_different_places(choice: dict[str, Any]) -> None:
    answer = always(reply("ab", **{"prompt_token_ids": [9], **choice}))
    async with serving(answer) as server, chat.client(server.url, model="m") as client:
        talk = client.session()
        await talk.complete("hello")
        (trace,) = talk.rollout(0.0).traces
    assert trace["completion_ids"].tolist() == [1, 2]
    if "logprobs" in choice or "meta_info" in choice:
        assert trace["logprobs"].tolist() == pytest.approx([-0.1, -0.2])
    else:
        assert "logprobs" not in trace.tensors


async def test_turns_that_go_on_are_one_trace_and_a_history_that_is_rendered_anew_begins_another() -> None:
    said = [
        toy("a", [1, 2], prompt=[9]),
        toy("b", [3], prompt=[9, 1, 2, 7, 7]),
        toy("c", [4], prompt=[8, 1, 2]),
        toy("d", [5], prompt=[8, 1, 2, 4]),
    ]
    async with serving(in_turn(*said)) as server, chat.client(server.url, model="m") as client:
        talk = client.session(system="be brief")
        for number in range(4):
            await talk.complete(str(number))
        rollout = talk.rollout(0.0)
    first, second = rollout.traces
    assert first["completion_ids"].tolist() == [1, 2, 7, 7, 3]
    assert first["completion_mask"].tolist() == [True, True, False, False, True]
    assert first["logprobs"].tolist() == pytest.approx([-0.1, -0.2, 0, 0, -0.3])
    assert second["prompt_ids"].tolist() == [8, 1, 2]
    assert second["completion_ids"].tolist() == [4, 5]
    assert (rollout.info["breaks"], rollout.info["turns"], rollout.tokens) == (1, 4, 5)
    assert [each["role"] for each in server.requests[-1]["messages"]] == ["system", *["user", "assistant"] * 3, "user"]


def told(ids: list[int], prompt: list[int], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(toy("x", ids, prompt=prompt, **more).raw)
    return found


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [
        ([9, 8, 1, 2], True),
        ([9, 8, 1, 2, 7], True),
        ([9, 7, 1, 2], False),
        ([9, 8, 1, 3], False),
        ([9, 8, 1], False),
        ([9], False),
        ([], False),
        ([8, 9, 8, 1, 2], False),
    ],
)
def test_a_prompt_goes_on_from_the_very_tokens_alone(prompt: list[int], goes_on: bool) -> None:
    tokens = Tokens()
    tokens.take(told([1, 2], [9, 8]), "here", 0)
    tokens.take(told([5], prompt), "here", 0)
    assert (len(tokens.traces), tokens.breaks) == ((1, 0) if goes_on else (2, 1))


def test_of_two_that_fit_the_newer_goes_on() -> None:
    tokens = Tokens()
    for prompt in ([9], [9], [9, 1]):
        tokens.take(told([1], prompt), "here", 0)
    assert [each.completion_ids.tolist() for each in tokens.traces] == [[1], [1, 1]]


def test_what_it_was_after_some_turns() -> None:
    tokens = Tokens()
    seen: list[Any] = []
    for ids, prompt, more in (
        ([1], [9], {}),
        ([2, 3], [9, 1, 7], {"finish": "length"}),
        ([4], [8], {}),
        ([5], [9, 1, 7, 2, 3], {}),
    ):
        tokens.take(told(ids, prompt, **more), "here", len(seen))
        seen.append(shown(tokens.rollout(0.0, {})))
    assert [shown(tokens.cut(turns).rollout(0.0, {})) for turns in range(1, 5)] == seen
    again = Tokens([TokenTrace.of(each.trace().tensors) for each in tokens.traces], tokens.turns)
    assert shown(again.rollout(0.0, {})) == seen[-1]
    assert not tokens.cut(0).traces


def shown(rollout: Rollout) -> Any:
    traces = [{name: np.asarray(each).tolist() for name, each in trace.tensors.items()} for trace in rollout.traces]
    return traces, rollout.info, rollout.oldest, rollout.tokens


# -- tools, structures, limits -----------------------------------------------------------------------------------------


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def shout(text: str) -> str:
    if not text:
        raise ValueError("nothing to shout")
    return text.upper()


async def test_tools_are_called_until_the_model_calls_none() -> None:
    calls = [
        called("add", '{"a": 2}', 0),
        called("shout", '{"text": "hi"}', 1),
        called("shout", '{"text": ""}', 2),
        called("add", '{"a": "two"}', 3),
        called("fly", "{}", 4),
        called("add", "{", 5),
    ]
    said = [toy("", [1], prompt=[9], tool_calls=calls, finish="tool_calls"), toy("done", [2], prompt=[9, 1, 5, 5])]
    async with serving(in_turn(*said)) as server, chat.client(server.url, model="m") as client:
        talk = client.session(tools=[add, shout])
        found = await talk.run("go")
    assert found.text == "done"
    told = [each for each in server.requests[1]["messages"] if each["role"] == "tool"]
    assert [each["tool_call_id"] for each in told] == [f"call{n}" for n in range(6)]
    results = [each["content"] for each in told]
    assert results[:3] == ["3", "HI", "error: ValueError: nothing to shout"]
    assert results[3].startswith("error: the arguments do not fit: Expected `int`, got `str`")
    assert results[4] == "error: there is no tool 'fly'; there are add, shout"
    assert results[5].startswith("error: the arguments do not fit")
    spec = server.requests[0]["tools"][0]["function"]
    assert (spec["name"], spec["description"]) == ("add", "Add two numbers.")
    assert spec["parameters"]["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}}
    assert spec["parameters"]["required"] == ["a"]
    assert spec["parameters"]["additionalProperties"] is False


async def test_ten_thousand_calls_in_one_reply() -> None:
    calls = [called("add", f'{{"a": {n}}}', n) for n in range(10_000)]
    said = [toy("", [1], prompt=[9], tool_calls=calls), toy("done", [2], prompt=[9, 1])]

    async def double(a: int) -> int:
        return 2 * a

    double.__name__ = "add"
    async with serving(in_turn(*said)) as server, chat.client(server.url, model="m") as client:
        await client.session(tools=[double]).run("go")
    assert [each["content"] for each in server.requests[1]["messages"][2:]] == [str(2 * n) for n in range(10_000)]


def test_tools_that_a_model_cannot_be_told_of_are_refused() -> None:
    def many(*numbers: int) -> None: ...

    with pytest.raises(ConfigError, match="tool 'many': parameter"):
        chat.Tool(many)
    with pytest.raises(ConfigError, match="two of this name"):
        chat.client("http://x/v1", model="m").session(tools=[add, add])


class Sum(msgspec.Struct):
    total: int


async def test_structured_output() -> None:
    said = in_turn(toy('{"total": 3}', [1], prompt=[9]), toy('{"total": "x"}', [1], prompt=[9, 1]))
    async with serving(said) as server, chat.client(server.url, model="m") as client:
        talk = client.session()
        assert (await talk.complete("1 + 2", schema=Sum)).parsed == Sum(3)
        with pytest.raises(ReplyInvalid, match=r"turn 3: the reply is no .*Sum.*Expected `int`"):
            await talk.complete("again", schema=Sum)
    asked = server.requests[0]["response_format"]
    assert asked["json_schema"]["name"] == "Sum"
    assert asked["json_schema"]["schema"]["$defs"]["Sum"]["required"] == ["total"]


async def test_limits_of_turns_tokens_and_time() -> None:
    calls = [called("add", '{"a": 1}')]
    prompts = ([9], [9, 1, 2], [9, 1, 2, 1, 2])
    said = [toy("", [1, 2], prompt=prompt, tool_calls=calls) for prompt in prompts]
    async with serving(in_turn(*said)) as server, chat.client(server.url, model="m", max_tokens=100) as client:
        talk = client.session(tools=[add], max_turns=2)
        assert (await talk.run("go")).stopped == "turns"
        assert (talk.turns, talk.rollout(0.0).info["stopped"]) == (2, "turns")
        with pytest.raises(ChatLimit, match="turn 3: max_turns=2 replies are there") as limit:
            await talk.complete("more")
        assert limit.value.what == "turns"
        talk = client.session(max_tokens=3)
        await talk.complete("a")
        await talk.complete("b")
        with pytest.raises(ChatLimit, match="max_tokens=3 tokens were sampled"):
            await talk.complete("c")
    assert [each["max_tokens"] for each in server.requests] == [100, 100, 3, 1]


async def test_the_time_of_a_conversation_ends_a_request_and_the_server_is_told() -> None:
    gone = anyio.Event()

    async def slow(request: dict[str, Any]) -> Said:
        try:
            await anyio.sleep_forever()
            raise AssertionError
        finally:
            gone.set()

    async with serving(slow) as server, chat.client(server.url, model="m") as client:
        talk = client.session(timeout_s=0.05)
        with pytest.raises(ChatLimit, match="time of the conversation"):
            await talk.complete("hello")
        with anyio.fail_after(5):
            await gone.wait()
        assert server.dropped == 1
        assert client.servers.all[0].in_flight == 0


@pytest.mark.parametrize("option", [{"max_turns": 0}, {"max_tokens": 1.5}, {"timeout_s": 0}])
def test_limits_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        chat.client("http://x/v1", model="m").session(**option)


# -- servers that fail -------------------------------------------------------------------------------------------------


async def test_a_server_that_is_never_well_is_asked_as_often_as_is_allowed() -> None:
    """CASES 143: four attempts are four requests, wherever retries might be hidden."""
    answer = always(Said({"error": "busy"}, status=503))
    async with serving(answer) as server, chat.client(server.url, model="m", attempts=4, **QUICK) as client:
        with pytest.raises(ServerFailed, match=r"answered 503.*4 attempts were made"):
            await client.session().complete("hello")
        assert len(server.requests) == client.requests == 4


async def test_there_is_a_pause_between_attempts_and_none_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = pauses(monkeypatch)
    answer = always(Said({"error": "busy"}, status=503))
    async with serving(answer) as server, chat.client(server.url, model="m", backoff_s=4.0) as client:
        for _ in range(2):
            with pytest.raises(ServerFailed):
                await client.request([], key="a")
        with pytest.raises(ServerFailed):
            await client.request([], key="b")
    first, again, other = paused[:3], paused[3:6], paused[6:]
    assert [4 / 2 <= first[0] <= 4, 8 / 2 <= first[1] <= 8, 16 / 2 <= first[2] <= 16] == [True] * 3
    assert first == again
    assert len(other) == 3
    assert other != first, "attempts that failed together do not come back together"


async def test_a_server_that_is_busy_is_not_asked_again_if_there_is_another() -> None:
    busy = always(Said({"error": "busy"}, status=429))
    async with (
        serving(busy) as one,
        serving(always(toy("a", [1], prompt=[9]))) as two,
        chat.client([one.url, two.url], model="m", attempts=2, **QUICK) as client,
    ):
        for _ in range(4):
            assert (await client.session().complete("hello")).text == "a"
        assert client.servers.all[0].failures == 0


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_what_would_be_refused_again_is_asked_once(status: int) -> None:
    """CASES 143."""
    answer = always(Said({"error": {"message": "no such model"}}, status=status))
    async with serving(answer) as server, chat.client(server.url, model="m", **QUICK) as client:
        with pytest.raises(RequestRefused, match=f"answered {status}, and would again.*no such model"):
            await client.session().complete("hello")
        assert len(server.requests) == 1
        assert client.servers.all[0].failures == 0


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_what_a_server_says_in_retry_after_is_waited(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 143: Retry-After: 1."""
    paused = pauses(monkeypatch)
    after = "1" if form == "seconds" else formatdate(time.time() + 60, usegmt=True)
    busy = Said({"error": "busy"}, status=429, headers={"retry-after": after})
    answer = in_turn(busy, toy("a", [1], prompt=[9]))
    async with serving(answer) as server, chat.client(server.url, model="m", backoff_s=1000.0) as client:
        assert (await client.session().complete("hello")).text == "a"
    (waited,) = paused
    assert waited == 1.0 if form == "seconds" else 50 < waited <= 60


BROKEN = {
    "malformed": Said(b'{"choices": [{"mess'),
    "no json": Said(b"\xff\xfe"),
    "cut": Said({"choices": [{"message": {"content": "abc" * 100}}]}, cut=True),
    "no choice": Said({"choices": []}),
    "no message": Said({"choices": [{"index": 0}]}),
    "a list": Said([1]),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_replies_that_are_broken_are_asked_for_again(how: str) -> None:
    answer = in_turn(BROKEN[how], toy("a", [1], prompt=[9]))
    async with serving(answer) as server, chat.client(server.url, model="m", **QUICK) as client:
        assert (await client.session().complete("hello")).text == "a"
        assert len(server.requests) == 2
    async with (
        serving(always(BROKEN[how])) as server,
        chat.client(server.url, model="m", attempts=2, **QUICK) as client,
    ):
        with pytest.raises(ServerFailed, match="2 attempts were made"):
            await client.session().complete("hello")


async def test_a_slow_server_is_given_up_and_another_one_is_asked() -> None:
    async def never(request: dict[str, Any]) -> Said:
        await anyio.sleep_forever()
        raise AssertionError

    limits = QUICK | {"timeout_s": 2.0}  # which the quick one keeps on a busy machine, too
    async with (
        serving(never) as slow,
        serving(always(toy("a", [1], prompt=[9]))) as quick,
        chat.client([slow.url, quick.url], model="m", **limits) as client,
    ):
        talk = client.session()
        for _ in range(3):
            assert (await talk.complete("hello")).text == "a"
        first, second = client.servers.all
        assert (len(slow.requests), first.failures, second.answered) == (1, 1, 3)


async def test_a_server_that_is_gone_rests_and_comes_back() -> None:
    async with serving(always(toy("a", [1], prompt=[9]))) as gone:
        pass  # its port is closed now
    async with (
        serving(always(toy("a", [1], prompt=[9]))) as there,
        chat.client([gone.url, there.url], model="m", **QUICK) as client,
    ):
        for _ in range(4):
            await client.session().complete("hello")
        first, second = client.servers.all
        assert (first.answered, second.answered) == (0, 4)
        assert first.rests_until > anyio.current_time()
        first.rests_until, second.rests_until = 0.0, anyio.current_time() + 60
        first.url = there.url
        await client.session().complete("hello")
        assert (first.answered, first.failures) == (1, 0)


async def test_no_more_requests_at_once_than_are_allowed_and_waiting_is_nobodys_time() -> None:
    """CASES 142: 300 chats through 10 places, 50 ms each, a limit of 1 s for a request: all succeed."""

    async def answer(request: dict[str, Any]) -> Said:
        await anyio.sleep(0.05)
        return toy("a", [1], prompt=[9])

    done: list[str] = []
    limits: dict[str, Any] = {"concurrency": 10, "timeout_s": 1.0, "attempts": 1}
    async with serving(answer) as server, chat.client(server.url, model="m", **limits) as client:

        async def one() -> None:
            done.append((await client.session().complete("hello")).text)

        async with anyio.create_task_group() as group:
            for _ in range(300):
                group.start_soon(one)
    assert len(done) == 300
    assert server.most_at_once == 10


async def test_requests_go_to_the_server_that_has_the_fewest() -> None:
    let = anyio.Event()

    async def answer(request: dict[str, Any]) -> Said:
        await let.wait()
        return toy("a", [1], prompt=[9])

    async with (
        serving(answer) as one,
        serving(answer) as two,
        chat.client([one.url, two.url], model="m") as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(8):
            group.start_soon(client.session().complete, "hello")
        await one.came(4)
        await two.came(4)
        let.set()


async def test_one_that_is_cancelled_while_it_waits_for_a_place_leaves_it_to_others() -> None:
    let = anyio.Event()

    async def answer(request: dict[str, Any]) -> Said:
        await let.wait()
        return toy("a", [1], prompt=[9])

    done: list[int] = []
    async with serving(answer) as server, chat.client(server.url, model="m", concurrency=1) as client:

        async def one(number: int) -> None:
            await client.session().complete("hello")
            done.append(number)

        async with anyio.create_task_group() as group:
            group.start_soon(one, 0)
            await server.came(1)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(one, 1)
                    await anyio.wait_all_tasks_blocked()
                    assert client.servers.waiting == 1
                    scope.cancel()
            assert client.servers.waiting == 0
            group.start_soon(one, 2)
            let.set()
    assert done == [0, 2]


async def test_a_client_is_open_as_long_as_anybody_has_it_open() -> None:
    async with serving(always(toy("ab", [1, 2], prompt=[9]))) as server:
        client = chat.client(server.url, model="m")
        with pytest.raises(UsageError, match="not open"):
            await client.session().complete("hello")
        for _ in range(2):
            async with client:
                async with client, anyio.create_task_group() as group:

                    async def share() -> None:
                        async with client:
                            pass

                    group.start_soon(share)
                    group.start_soon(share)
                assert (await client.session().complete("hello")).text == "ab"
                with pytest.raises(UsageError, match="another event loop"):
                    await anyio.to_thread.run_sync(anyio.run, client.__aenter__)
            with pytest.raises(UsageError, match="not open"):
                await client.session().complete("hello")


def test_a_client_is_checked_when_it_is_made() -> None:
    for wrong in ([], ["gpu1:8000"], [3]):
        with pytest.raises(ConfigError, match="urls"):
            chat.client(wrong, model="m")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="attempts=0"):
        chat.client("http://x/v1", model="m", attempts=0)
    assert chat.client("http://x/v1", model="m", options={"attempts": 2}).options.attempts == 2


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\x00a\x00", "\U0001f40d" * 10, "x" * 2**20, "\ud83d\udc0d", "a\ud800b", ""])
async def test_any_text_comes_and_goes(text: str) -> None:
    async def answer(request: dict[str, Any]) -> Said:
        return reply(request["messages"][-1]["content"])

    wanted = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    async with serving(answer) as server, chat.client(server.url, model="m") as client:
        talk = client.session()
        assert (await talk.complete(text)).text == wanted
    half = Said(b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "a\\ud800b"}}]}')
    async with serving(always(half)) as server, chat.client(server.url, model="m") as client:
        assert (await client.session().complete("hello")).text == "a\ufffdb"


# -- in a pipeline -----------------------------------------------------------------------------------------------------


async def test_a_group_of_conversations_becomes_rows_for_a_trainer() -> None:
    async def answer(request: dict[str, Any]) -> Said:
        return toy("a", [1, 2], prompt=[9])

    async def solve(item: Item, ctx: Any) -> Rollout:
        talk = ctx.resource.session(ctx)
        await talk.complete(item["prompt"])
        made: Rollout = talk.rollout(reward=float(ctx.member))
        return made

    async with serving(answer) as server:
        task = Task(
            "math",
            source=SequenceSource([{"prompt": "1 + 1"}]),
            run=solve,
            group_size=4,
            resource=chat.client(server.url, model="m"),
        )
        async with Pipeline([task]) as pipe:
            await pipe.start()
            rows = token_rows(await pipe.get_batch(groups=1), advantages="mean")
    assert [row.input_ids.tolist() for row in rows] == [[9, 1, 2]] * 4
    assert [row.advantage for row in rows] == [-1.5, -0.5, 0.5, 1.5]


async def test_an_attempt_that_is_interrupted_goes_on_after_its_last_turn(run_directory: str) -> None:
    """Neither the model nor a tool is asked twice; tokens of before keep their version."""
    added: list[int] = []
    wait = anyio.Event()
    again = anyio.Event()

    def count(a: int) -> int:
        added.append(a)
        return a

    async def answer(request: dict[str, Any]) -> Said:
        turn = sum(each["role"] == "assistant" for each in request["messages"])
        if turn == 0:
            return toy("", [1], prompt=[9], tool_calls=[called("count", '{"a": 5}')])
        if not again.is_set():
            wait.set()
            await anyio.sleep_forever()
        return toy("end", [2], prompt=[9, 1, 7])

    async def solve(item: Item, ctx: Any) -> Rollout:
        talk = ctx.resource.session(ctx, tools=[count])
        await talk.run("go")
        made: Rollout = talk.rollout(reward=1.0)
        return made

    async with serving(answer) as server:
        client = chat.client(server.url, model="m")
        task = Task("t", source=SequenceSource([0]), run=solve, resource=client, on_failure=Retry(attempts=1))
        async with Pipeline([task], directory=run_directory, partial=True) as pipe:
            await pipe.start()
            await wait.wait()
            async with pipe.weight_update(version=1, running="abort"):
                again.set()
            (rollout,) = (await pipe.get_batch(groups=1)).rollouts
    assert added == [5]
    assert len(server.requests) == 3
    (trace,) = rollout.traces
    assert np.asarray(trace["completion_ids"]).tolist() == [1, 7, 2]
    assert np.asarray(trace["versions"]).tolist() == [0, 1, 1]
    assert (rollout.oldest, rollout.newest) == (0, 1)
    assert [each["role"] for each in rollout.info["messages"]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(("keep", "other", "asked"), [(True, False, 3), (False, False, 4), (True, True, 4)])
async def test_only_the_same_words_get_the_replies_of_before(keep: bool, other: bool, asked: int) -> None:
    """Two turns are asked for, the second one is interrupted, and the attempt begins anew: with the same words it has
    the first reply already, with others or without keeping it is asked for again."""
    waits, again = anyio.Event(), anyio.Event()

    async def answer(request: dict[str, Any]) -> Said:
        turn = sum(each["role"] == "assistant" for each in request["messages"])
        if turn and not again.is_set():
            waits.set()
            await anyio.sleep_forever()
        prompt = [9, *[1] * turn]
        return toy(request["messages"][0]["content"], [1], prompt=prompt)

    async def solve(item: Item, ctx: Any) -> Rollout:
        talk = ctx.resource.session(ctx, keep=keep)
        words = "other" if other and again.is_set() else "same"
        assert (await talk.complete(words)).text == words
        await talk.complete("more")
        made: Rollout = talk.rollout(reward=1.0)
        return made

    async with serving(answer) as server:
        client = chat.client(server.url, model="m")
        task = Task("t", source=SequenceSource([0]), run=solve, resource=client, on_failure=FailFast())
        async with Pipeline([task]) as pipe:
            await pipe.start()
            await waits.wait()
            async with pipe.weight_update(version=1, running="abort"):
                again.set()
            (rollout,) = (await pipe.get_batch(groups=1)).rollouts
    assert len(server.requests) == asked
    (trace,) = rollout.traces
    assert np.asarray(trace["completion_ids"]).tolist() == [1, 1]
    assert np.asarray(trace["versions"]).tolist() == [int(asked == 4), 1]
    assert rollout.info["turns"] == 2


async def test_what_a_side_talk_says_is_kept_by_nobody() -> None:
    waits, again = anyio.Event(), anyio.Event()

    async def answer(request: dict[str, Any]) -> Said:
        words = [each["content"] for each in request["messages"] if each["role"] == "user"]
        if words == ["side", "side"] and not again.is_set():
            waits.set()
            await anyio.sleep_forever()
        return reply(words[0])

    async def solve(item: Item, ctx: Any) -> Rollout:
        talk, side = ctx.resource.session(ctx), ctx.resource.session(ctx, keep=False)
        for each in (talk, side):
            for _ in range(2):
                words = "talk" if each is talk else "side"
                assert (await each.complete(words)).text == words
        made: Rollout = talk.rollout(reward=1.0)
        return made

    async with serving(answer) as server:
        client = chat.client(server.url, model="m")
        task = Task("t", source=SequenceSource([0]), run=solve, resource=client, on_failure=FailFast())
        async with Pipeline([task]) as pipe:
            await pipe.start()
            await waits.wait()
            async with pipe.weight_update(version=1, running="abort"):
                again.set()
            await pipe.get_batch(groups=1)
    assert len(server.requests) == 4 + 3
