"""Chats with real servers: ``transformers serve``, which gives text alone, and llama.cpp's, which gives ids and
log-probs. See ``tests/support/real_server.py`` for what they need."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from pipeline import Item, Pipeline, Rollout, Task
from tasks import SequenceSource, chat
from tasks.chat.growing import Growing
from tests.support.children import Ended, child
from tests.support.real_server import LLAMA, PYTHON, free_port, llama_server, make_model, transformers_serve

pytest.importorskip("openai")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="FOREBAY_SERVER_PYTHON names no interpreter with transformers[serving]"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
NEEDS_LLAMA = pytest.mark.skipif(not LLAMA, reason="FOREBAY_LLAMA_SERVER names no llama-server")
GREEDY: dict[str, Any] = {"temperature": 0.0}
QUESTIONS = [f"what is {a}{sign}{b}?" for a in (2, 3, 4, 5) for sign in "+-" for b in (6, 7, 8, 9)]
TO_GO = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module", params=["transformers", pytest.param("llama.cpp", marks=NEEDS_LLAMA)])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[dict[str, Any]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    if request.param == "transformers":
        with transformers_serve(model, port):
            yield {"urls": url, "model": str(model / "model"), "token_ids": False}
    else:
        with llama_server(model, port):
            yield {"urls": url, "model": "tiny"}


@pytest.fixture(scope="module")
def llama(model: Path) -> Iterator[str]:
    port = free_port()
    with llama_server(model, port):
        yield f"http://127.0.0.1:{port}"


def calculate(expression: str) -> str:
    """Work out a sum."""
    return str(sum(int(each) for each in expression.replace("-", "+-").split("+")))


async def test_a_plain_chat(server: dict[str, Any]) -> None:
    async with chat.client(**server, **GREEDY) as client:
        talk = client.session(max_tokens=300)
        reply = await talk.complete("where is Ada?")
        rollout = talk.rollout(1.0)
    assert "<tool_call>" in reply.text or reply.tool_calls
    assert reply.finish_reason in ("stop", "tool_calls")
    assert rollout.tokens == talk.used_tokens > 20
    assert rollout.info["unknown_tokens"] == 1, "neither server says all ids of a turn"
    assert list(rollout.traces) == []


async def test_several_turns_with_a_tool(server: dict[str, Any]) -> None:
    async with chat.client(**server, **GREEDY) as client:
        for question in ("what is 3+4?", "what is 2+6?"):
            talk = client.session(tools=[calculate], max_turns=4)
            reply = await talk.run(question)
            roles = [each["role"] for each in talk.messages]
            assert roles == ["user", "assistant", "tool", "assistant"]
            assert json.loads(talk.messages[1]["tool_calls"][0]["function"]["arguments"])["expression"]
            assert (talk.turns, reply.stopped, reply.tool_calls) == (2, "", [])
            assert reply.text


async def test_limits_of_tokens_end_a_reply(server: dict[str, Any]) -> None:
    async with chat.client(**server, **GREEDY) as client:
        talk = client.session(max_tokens=10)
        assert (await talk.complete("where is Ada?")).finish_reason == "length"
        assert talk.used_tokens == 10


async def test_many_at_once_are_each_answered(server: dict[str, Any]) -> None:
    replies: dict[str, Any] = {}
    async with chat.client(**server, **GREEDY, concurrency=8) as client, anyio.create_task_group() as group:

        async def one(question: str) -> None:
            replies[question] = await client.session(tools=[calculate]).complete(question)

        for question in QUESTIONS:
            group.start_soon(one, question)
    assert replies.keys() == set(QUESTIONS)
    assert all(each.tool_calls or each.text for each in replies.values())


@NEEDS_LLAMA
async def test_ids_and_log_probs_are_the_servers_own(llama: str) -> None:
    """Each id is the token's that the server names beside it, and its log-prob the one that it gives again for the same
    tokens."""
    async with chat.client(f"{llama}/v1", model="tiny", **GREEDY, top_logprobs=1) as client:
        reply = await client.request([{"role": "user", "content": "where is Ada?"}])
        (choice,) = reply["choices"]
        ids = [each["id"] for each in choice["logprobs"]["content"]]
        text = post(f"{llama}/detokenize", {"tokens": ids})["content"]
        assert text.removesuffix("<|im_end|>") == choice["message"]["content"]
        again = await client.request([{"role": "user", "content": "where is Ada?"}])
    assert [each["id"] for each in again["choices"][0]["logprobs"]["content"]] == ids
    found = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert found == pytest.approx([each["logprob"] for each in again["choices"][0]["logprobs"]["content"]], abs=1e-3)


@NEEDS_LLAMA
@pytest.mark.parametrize("cut", [1, 7, 40, 80])
async def test_a_reply_is_gone_on_with_from_its_very_ids(llama: str, cut: int) -> None:
    """Cut anywhere, the tokens and log-probs are those of the reply that was not. This server does not say a chat's
    prompt ids with the reply; the test asks it for them."""
    messages = [{"role": "user", "content": "where is Ada?"}]
    rendered = post(f"{llama}/apply-template", {"messages": messages})["prompt"]
    prompt = post(f"{llama}/tokenize", {"content": rendered, "parse_special": True, "add_special": True})["tokens"]
    async with chat.client(f"{llama}/v1", model="tiny", **GREEDY, top_logprobs=1) as client:
        whole = await client.request(messages)
        said = whole["choices"][0]["logprobs"]["content"]
        growing = Growing(lambda: 1, "here")
        growing.take({"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": prompt})
        for each in said[:cut]:
            content = {"content": [{"id": each["id"], "logprob": each["logprob"]}]}
            growing.take({"choices": [{"delta": {"content": each["token"]}, "logprobs": content}]})
        await client.request(messages, growing=growing)
        assert client.requests == 2
    made = growing.reply(None)["choices"][0]
    ids = [each["id"] for each in said]
    assert made["token_ids"][: len(ids)] == ids
    assert made["message"]["content"] == whole["choices"][0]["message"]["content"]
    assert made["finish_reason"] == "stop"
    found = [each["logprob"] for each in made["logprobs"]["content"]][: len(ids)]
    assert found == pytest.approx([each["logprob"] for each in said], abs=1e-3)


@NEEDS_LLAMA
async def test_a_cancelled_chat_reaches_the_server(model: Path) -> None:
    """Its only slot is free again, and has not made the 8,000 tokens that were asked for."""
    port = free_port()
    with llama_server(model, port, slots=1, context=8192):
        url = f"http://127.0.0.1:{port}"
        async with chat.client(f"{url}/v1", model="tiny") as client, anyio.create_task_group() as group:
            group.start_soon(endless_chat, client)
            await until(f"{url}/slots", busy=True)
            group.cancel_scope.cancel()
        (slot,) = await until(f"{url}/slots", busy=False, every_s=2)
        assert 0 < slot["n_prompt_tokens"] < 8000, "what is in its memory: the prompt, and what was made"
        async with chat.client(f"{url}/v1", model="tiny") as client:
            assert (await client.session().complete("where is Ada?", max_tokens=5)).text


async def endless_chat(client: chat.ChatClient) -> None:
    await client.session().complete("where is Ada?", max_tokens=8000, extra_body={"ignore_eos": True})


async def until(url: str, *, busy: bool, every_s: float = 0) -> Any:
    """Ask the server what its slots do until that is so, and return it: it has no other way to tell. It looks whether
    clients are still there only after a second in which it had nothing to say to anybody, these questions included."""
    with anyio.fail_after(60):
        while True:
            await anyio.sleep(every_s)
            slots = await anyio.to_thread.run_sync(get, url)
            if any(each["is_processing"] for each in slots) is busy:
                return slots


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as found:
        return json.load(found)


def post(url: str, body: Any) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as found:
        return json.load(found)


# -- killed ------------------------------------------------------------------------------------------------------------


def _run(pipe: Connection, directory: str, server: dict[str, Any]) -> None:
    anyio.run(_train, pipe, directory, server)


async def solve(item: Item, ctx: Any) -> Rollout:
    talk = ctx.resource.session(ctx, tools=[calculate], max_turns=4)
    reply = await talk.run(item.content)
    made: Rollout = talk.rollout(reward=float(bool(reply.text)))
    return made


async def _train(pipe: Connection, directory: str, server: dict[str, Any]) -> None:
    client = chat.client(**server, **GREEDY, concurrency=8)
    task = Task("sums", source=SequenceSource(QUESTIONS * 2), run=solve, resource=client)
    async with Pipeline([task], directory=directory, concurrency=16, max_deaths=10**6) as run:
        resumed = await run.resume()
        async with run.weight_update(version=resumed.version):
            pass
        await run.start()
        async for batch in run.batches(groups=4):
            indices = [group.index for group in batch]
            roles = {tuple(m["role"] for m in each.info["messages"]) for each in batch.rollouts}
            assert all(each[:2] == ("user", "assistant") for each in roles)
            pipe.send((resumed.step, batch.step, indices))
            if batch.step % 2 == 0:
                await (await run.save(batch.step)).committed()
        run.ledger.check()


def test_64_rollouts_though_the_process_is_killed(server: dict[str, Any], run_directory: str) -> None:
    """Killed after its fifth batch, with four or two saved; the run that goes on has trained every item once."""
    with child(_run, run_directory, server) as process:
        before = [process.hear() for _ in range(5)]
        process.kill()
    assert [step for _, step, _ in before] == [1, 2, 3, 4, 5]
    after: list[Any] = []
    with child(_run, run_directory, server) as process:
        try:
            while True:
                after.append(process.hear())
        except Ended:
            process.process.join()
    assert process.process.exitcode == 0, after[-1]
    first = after[0][0]
    assert first in (2, 4)
    trained = Counter(at for _, step, indices in before if step <= first for at in indices)
    trained.update(at for _, _, indices in after for at in indices)
    assert trained == Counter(range(TO_GO))
