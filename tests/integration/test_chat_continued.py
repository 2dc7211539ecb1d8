"""Replies that were cut are gone on with: no token is lost or sampled twice, and each has the version that made it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import anyio
import pytest

from pipeline import ConfigError, FailFast, Item, Pipeline, Rollout, Task
from pipeline.errors import ReplyInvalid, RequestRefused, ServerFailed
from tasks import SequenceSource, chat
from tasks.chat.growing import Events, can_go_on
from tests.support.chat_server import CUT, Said, Stream, called, serving, toy
from tests.support.children import ChildProcess, child
from tests.support.continued import BREAK, FIRST_ID, HANG, Model, check, heard, solve

pytest.importorskip("openai")
WORDS = ["hello world", "more"]
GOES_ON: dict[str, Any] = {"continues": True, "backoff_s": 0.0}


async def one(model: Model, *, run: Any = solve, directory: str | None = None, **options: Any) -> Rollout:
    """A rollout of a pipeline that nothing disturbs."""
    async with serving(model) as server:
        task = Task(
            "t",
            source=SequenceSource([0]),
            run=run,
            resource=chat.client(server.url, model="m", **{**GOES_ON, **options}),
            on_failure=FailFast(),
        )
        async with Pipeline([task], directory=directory) as pipe:
            await pipe.start()
            return (await pipe.get_batch(groups=1)).rollouts[0]


async def test_a_streamed_reply_is_what_any_reply_is() -> None:
    for size in (1, 3, 100):
        rollout = await one(Model(*WORDS, size=size))
        assert check(rollout, WORDS) == [0] * 15
        assert [each["role"] for each in rollout.info["messages"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("size", [1, 4])
async def test_an_abort_at_every_chunk_loses_no_token_and_repeats_none(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [-(-len(each) // size) for each in WORDS]
    cuts = [(turn, at) for turn, count in enumerate(chunks) for at in range(count + 1)]
    for turn, at in cuts:
        model = Model(*WORDS, size=size)
        model.stop_at[turn] = at, HANG
        async with serving(model) as server:
            client = chat.client(server.url, model="m", **GOES_ON)
            task = Task("t", source=SequenceSource([0]), run=solve, resource=client, on_failure=FailFast())
            async with Pipeline([task]) as pipe:
                with heard(monkeypatch, turn * chunks[0] + at) as came:
                    await pipe.start()
                    await server.came(turn + 1)
                    await came.wait()
                async with pipe.weight_update(version=1, running="abort"):
                    model.version = 1
                (rollout,) = (await pipe.get_batch(groups=1)).rollouts
                pipe.ledger.check()
        before = turn * len(WORDS[0]) + min(at * size, len(WORDS[turn]))
        assert check(rollout, WORDS) == [0] * before + [1] * (15 - before), (turn, at)
        assert model.sampled == 15, "nothing was sampled twice"
        if at == chunks[turn]:
            assert len(model.asked) == 2, "a reply whose end alone was cut off is there"
            continue
        assert len(model.asked) == 3
        again = model.asked[turn + 1]
        assert ("prompt" in again) == (at > 0)
        if at > 0:
            assert again["prompt"][-1] == FIRST_ID + at * size - 1
            assert not {"messages", "tools"} & again.keys()


async def test_one_reply_through_many_updates_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(*WORDS)
    for number in range(5):
        model.stop_at[number] = 2, HANG
    async with serving(model) as server:
        client = chat.client(server.url, model="m", **GOES_ON)
        task = Task("t", source=SequenceSource([0]), run=solve, resource=client, on_failure=FailFast())
        async with Pipeline([task]) as pipe:
            for version in range(1, 6):
                with heard(monkeypatch, 2) as came:
                    if version == 1:
                        await pipe.start()
                    await came.wait()
                async with pipe.weight_update(version=version, running="abort"):
                    model.version = version
            (rollout,) = (await pipe.get_batch(groups=1)).rollouts
    assert check(rollout, WORDS) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 5]
    assert (rollout.oldest, rollout.newest) == (0, 5)


@pytest.mark.parametrize("most", [1, 4, 10, 11])
async def test_what_is_gone_on_with_has_no_more_tokens_than_were_allowed(most: int) -> None:
    """The budget is that of the whole reply, and not of each request for it."""
    for cut in range(1, most + 1):
        model = Model(*WORDS)
        model.stop_at[0] = cut, BREAK

        async def run(item: Item, ctx: Any) -> Rollout:
            talk = ctx.resource.session(ctx)
            assert (await talk.complete("a")).finish_reason == ("stop" if most == 11 else "length")
            made: Rollout = talk.rollout(reward=1.0)
            return made

        check(await one(model, run=run, max_tokens=most), [WORDS[0][:most]])
        assert model.sampled == most


async def test_a_connection_that_breaks_costs_no_token() -> None:
    for cut in range(11):
        model = Model(*WORDS)
        model.stop_at[0] = cut, BREAK
        assert check(await one(model), WORDS) == [0] * 15
        assert model.sampled == 15
        assert len(model.asked) == 3


async def test_a_server_that_breaks_each_time_is_asked_as_often_as_is_allowed() -> None:
    model = Model("x" * 100)
    model.stop_at = dict.fromkeys(range(10), (1, BREAK))
    async with serving(model) as server, chat.client(server.url, model="m", attempts=3, **GOES_ON) as client:
        with pytest.raises(ServerFailed, match="3 attempts were made"):
            await client.session().complete("a")
    assert [len(each.get("prompt", [])) for each in model.asked] == [0, 3, 4]


def _resumed(pipe: Connection, directory: str, url: str, kept: int) -> None:
    anyio.run(_train, pipe, directory, url, kept)


async def _train(pipe: Connection, directory: str, url: str, kept: int) -> None:
    """Save once so many tokens were kept, and say so; or, with 0, go on to the end and say the tokens' versions."""
    enough, keep = anyio.Event(), chat.Session.keep

    def told(self: chat.Session) -> None:
        keep(self)
        if self._growing is not None and self.used_tokens + len(self._growing.ids) >= kept > 0:
            enough.set()

    chat.Session.keep = told  # type: ignore[method-assign]
    client = chat.client(url, model="m", **GOES_ON, keep_tokens=2)
    task = Task("t", source=SequenceSource([0]), run=solve, resource=client, on_failure=FailFast())
    async with Pipeline([task], directory=directory, max_deaths=10**6) as run:
        await run.resume()
        async with run.weight_update(version=0):
            pass
        await run.start()
        if kept:
            await enough.wait()
            await (await run.save(0)).committed()
            pipe.send("saved")
            await anyio.sleep_forever()
        (rollout,) = (await run.get_batch(groups=1)).rollouts
        pipe.send(check(rollout, WORDS))


def hear(process: ChildProcess) -> Any:
    return process.hear()


async def test_what_was_kept_of_a_reply_survives_a_save_and_a_kill(run_directory: str) -> None:
    """Killed twice in the middle of the first reply and once in the second; what came after it was last kept, one token
    each time, is sampled again, and is in the rollout once."""
    model = Model(*WORDS)
    model.stop_at = {0: (7, HANG), 1: (3, HANG), 3: (3, HANG)}
    async with serving(model) as server:
        for kept in (6, 8, 11 + 2):
            with child(_resumed, run_directory, server.url, kept) as process:
                assert await anyio.to_thread.run_sync(hear, process) == "saved"
                await anyio.to_thread.run_sync(process.kill)
        with child(_resumed, run_directory, server.url, 0) as process:
            assert await anyio.to_thread.run_sync(hear, process) == [0] * 15
    assert [each["prompt"][-1] - FIRST_ID + 1 for each in model.asked if "prompt" in each] == [6, 8, 2]
    assert model.sampled == 15 + 3


async def test_what_was_kept_of_a_reply_survives_a_kill_at_any_time(run_directory: str) -> None:
    model = Model(*WORDS)
    model.stop_at = {0: (7, HANG), 1: (3, HANG), 3: (3, HANG)}
    async with serving(model) as server:
        for requests, letters in ((1, 7), (2, 8), (2, 9)):
            with child(_resumed, run_directory, server.url, 0) as process:
                await server.came(requests)
                await model.has_sampled(letters)
                await anyio.to_thread.run_sync(process.kill)
        model.stop_at.clear()
        with child(_resumed, run_directory, server.url, 0) as process:
            assert await anyio.to_thread.run_sync(hear, process) == [0] * 15


def events(*said: Any) -> Any:
    """A server that streams these to everybody."""

    async def answer(request: dict[str, Any]) -> Said:
        async def stream() -> AsyncIterator[Any]:
            for each in said:
                yield each

        return Stream(stream())

    return answer


def chunk(content: str | None, ids: list[int], **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "token_ids": ids, **choice}]}


PROMPT = {"prompt_token_ids": [9], **chunk("", [])}


async def test_calls_of_tools_come_in_pieces() -> None:
    def add(a: int) -> int:
        """Add one."""
        return a + 1

    def piece(index: int, **function: Any) -> dict[str, Any]:
        made = {"index": index, "function": function, **({"id": f"c{index}"} if "name" in function else {})}
        return {"choices": [{"index": 0, "delta": {"tool_calls": [made]}, "token_ids": [5], "finish_reason": None}]}

    pieces = [piece(0, name="add"), piece(0, arguments='{"a":'), piece(0, arguments="1}"), piece(1, name="add")]
    calls = events(PROMPT, *pieces, piece(1, arguments='{"a": 2}'), chunk(None, [], finish_reason="tool_calls"))
    done = events({"prompt_token_ids": [9, 5], **chunk("end", [6], finish_reason="stop")})

    async def answer(request: dict[str, Any]) -> Said:
        said: Said = await (done if len(server.requests) > 1 else calls)(request)
        return said

    async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        talk = client.session(tools=[add], parse=lambda text: {"content": text})
        assert (await talk.run("go")).text == "end"
    _, said, *told, _ = talk.messages
    assert [each["function"] for each in said["tool_calls"]] == [
        {"name": "add", "arguments": '{"a":1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]
    assert [(each["tool_call_id"], each["content"]) for each in told] == [("c0", "2"), ("c1", "3")]


async def test_a_call_in_a_reply_that_was_gone_on_with_is_read_by_parse() -> None:
    """Completions say text alone: what calls of tools look like in it, the caller has to know."""
    model = Model("say <add>", "done")
    model.stop_at[0] = 6, BREAK

    def parse(text: str) -> dict[str, Any]:
        said, _, name = text.partition("<")
        return {"content": said, **({"tool_calls": [called(name.rstrip(">"), "{}")]} if name else {})}

    def add() -> str:
        """Add."""
        return "added"

    async with serving(model) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        talk = client.session(tools=[add], parse=parse)
        assert (await talk.run("a")).text == "done"
    assert [each["role"] for each in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.messages[1]["content"] == "say "
    assert talk.messages[2]["content"] == "added"


@pytest.mark.parametrize(
    ("fields", "parses", "can"),
    [
        ({}, False, True),
        ({"temperature": 1.0, "max_tokens": 5, "stop": []}, False, True),
        ({"tools": [{}]}, False, False),
        ({"tools": [{}]}, True, True),
        ({"tools": [{}], "tool_choice": "required"}, True, False),
        ({"response_format": {"type": "json_object"}}, True, False),
        ({"guided_regex": "a*"}, False, False),
        ({"stop": ["</answer>"]}, False, False),
        ({"n": 2}, False, False),
    ],
)
async def test_which_replies_can_be_gone_on_with(fields: dict[str, Any], parses: bool, can: bool) -> None:
    assert can_go_on(fields, parses) == can
    if not fields.get("tools"):
        reply = events(PROMPT, chunk("x", [1], finish_reason="stop")) if can else None

        async def answer(request: dict[str, Any]) -> Said:
            assert request.get("stream", False) == can
            said: Said = toy("x", [1], prompt=[9]) if reply is None else await reply(request)
            return said

        async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
            assert (await client.session().complete("a", extra_body=fields)).text == "x"


BROKEN: dict[str, list[Any]] = {
    "no end": [PROMPT, chunk("ab", [1, 2])],
    "an error": [PROMPT, chunk("ab", [1, 2]), {"error": {"message": "out of memory"}}],
    "no JSON": [PROMPT, chunk("ab", [1, 2]), b"{"],
    "a list": [PROMPT, chunk("ab", [1, 2]), []],
    "aborted by the server": [PROMPT, chunk("ab", [1, 2]), chunk("", [], finish_reason="abort")],
}


@pytest.mark.parametrize("how", BROKEN)
async def test_streams_that_end_badly_are_gone_on_with(how: str) -> None:
    broken = events(*BROKEN[how])
    rest = {"index": 0, "text": "c", "token_ids": [3], "finish_reason": "stop", "prompt_token_ids": [9, 1, 2]}

    async def answer(request: dict[str, Any]) -> Said:
        said: Said = await (events({"choices": [rest]}) if "prompt" in request else broken)(request)
        return said

    async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        talk = client.session()
        assert (await talk.complete("a")).text == "abc"
    (trace,) = talk.rollout(0.0).traces
    assert trace["completion_ids"].tolist() == [1, 2, 3]
    assert [each.get("prompt") for each in server.requests] == [None, [9, 1, 2]]


async def test_an_end_without_text_of_its_own_is_an_end() -> None:
    """The token that ends a reply has no text; then the connection breaks."""
    end = events(PROMPT, chunk("ab", [1, 2]), chunk("", [3], finish_reason="stop"), CUT)
    async with serving(end) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        talk = client.session()
        assert (await talk.complete("a")).text == "ab"
        assert len(server.requests) == 1
    (trace,) = talk.rollout(0.0).traces
    assert trace["completion_ids"].tolist() == [1, 2, 3]


async def test_a_server_that_says_no_ids_is_asked_anew() -> None:
    """It streams, and what it said is no ground to go on from: nothing is made of text."""
    short = events({"choices": [{"index": 0, "delta": {"content": "ab"}}]})
    whole = events({"choices": [{"index": 0, "delta": {"content": "xyz"}, "finish_reason": "stop"}]})

    async def answer(request: dict[str, Any]) -> Said:
        said: Said = await (short if len(server.requests) == 1 else whole)(request)
        return said

    async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        talk = client.session()
        assert (await talk.complete("a")).text == "xyz"
    assert list(talk.rollout(0.0).traces) == []
    assert all("messages" in each for each in server.requests)


async def test_half_a_character_at_the_cut_is_sampled_again() -> None:
    """The server holds its bytes back until the other half is there; a pair of JSON's surrogates may come in halves."""
    first = events(PROMPT, chunk("a", [1]), chunk("", [2]))
    rest = [
        {"choices": [{"index": 0, "text": "", "token_ids": [2], "prompt_token_ids": [9, 1]}]},
        {"choices": [{"index": 0, "text": "\ud83d", "token_ids": [3]}]},
        {"choices": [{"index": 0, "text": "\udc0d", "token_ids": [4], "finish_reason": "stop"}]},
    ]

    async def answer(request: dict[str, Any]) -> Said:
        said: Said = await (events(*rest) if "prompt" in request else first)(request)
        return said

    async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        talk = client.session()
        assert (await talk.complete("a")).text == "a\U0001f40d"
    (trace,) = talk.rollout(0.0).traces
    assert trace["completion_ids"].tolist() == [1, 2, 3, 4]


async def test_a_server_that_did_not_go_on_from_the_ids_is_found_out() -> None:
    rest = {"index": 0, "text": "c", "token_ids": [3], "finish_reason": "stop", "prompt_token_ids": [9, 7]}

    async def answer(request: dict[str, Any]) -> Said:
        first = events(PROMPT, chunk("ab", [1, 2]))
        said: Said = await (events({"choices": [rest]}) if "prompt" in request else first)(request)
        return said

    async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        with pytest.raises(ReplyInvalid, match="turn 1: the server was to go on from 3 token ids, and says"):
            await client.session().complete("a")


async def test_log_probs_that_do_not_belong_to_the_ids_of_a_chunk_are_refused() -> None:
    wrong = chunk("ab", [1, 2], logprobs={"content": [{"logprob": -0.1}]})
    async with (
        serving(events(PROMPT, wrong)) as server,
        chat.client(server.url, model="m", **GOES_ON) as client,
    ):
        with pytest.raises(ReplyInvalid, match="2 token ids and 1"):
            await client.session().complete("a")
        assert len(server.requests) == 1


async def test_a_server_that_knows_no_such_verb_says_so() -> None:
    async def answer(request: dict[str, Any]) -> Said:
        if "prompt" in request:
            return Said({"error": {"message": "no such thing"}}, status=404)
        said: Said = await events(PROMPT, chunk("ab", [1, 2]))(request)
        return said

    async with serving(answer) as server, chat.client(server.url, model="m", **GOES_ON) as client:
        with pytest.raises(RequestRefused, match=r"answered 404.*no such thing"):
            await client.session().complete("a")


async def test_other_words_get_a_reply_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that says something else than the one before has no use for half a reply to that."""
    model, again = Model(*WORDS), anyio.Event()
    model.stop_at[0] = 3, HANG

    async def run(item: Item, ctx: Any) -> Rollout:
        talk = ctx.resource.session(ctx)
        await talk.complete("b" if again.is_set() else "a")
        made: Rollout = talk.rollout(reward=1.0)
        return made

    async with serving(model) as server:
        client = chat.client(server.url, model="m", **GOES_ON)
        task = Task("t", source=SequenceSource([0]), run=run, resource=client, on_failure=FailFast())
        async with Pipeline([task]) as pipe:
            with heard(monkeypatch, 3) as came:
                await pipe.start()
                await came.wait()
            async with pipe.weight_update(version=1, running="abort"):
                model.version = 1
                again.set()
            (rollout,) = (await pipe.get_batch(groups=1)).rollouts
    assert check(rollout, WORDS[:1], first="b") == [1] * 11
    assert "messages" in model.asked[1]


def test_events_are_cut_out_of_bytes_at_line_feeds_alone() -> None:
    """Text of a model may hold what Python takes for the end of a line."""
    text = b': hello\r\ndata: {"a": "x\xe2\x80\xa8y\xc2\x85\x0bz"}\r\n\r\nevent: e\ndata:{"b": 1}\n\ndata: [DONE]\n\n'
    for cut in range(len(text)):
        lines = Events()
        found = [*lines.of(text[:cut]), *lines.of(text[cut:])]
        assert found == [b'{"a": "x\xe2\x80\xa8y\xc2\x85\x0bz"}', b'{"b": 1}']


def test_it_is_off_unless_asked_for_and_needs_ids() -> None:
    assert not chat.ChatOptions().continues
    with pytest.raises(ConfigError, match="continues=True: token_ids=True is needed"):
        chat.client("http://x/v1", model="m", continues=True, token_ids=False)
    with pytest.raises(ConfigError, match="keep_tokens=0"):
        chat.client("http://x/v1", model="m", keep_tokens=0)
