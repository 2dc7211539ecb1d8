"""Chats with vLLM, which says all ids of a turn: tokens are its own, and a reply that was cut goes on from them.

See ``tests/support/real_server.py`` for what this needs.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import FailFast, Item, Pipeline, Rollout, Task
from tasks import SequenceSource, chat
from tests.support.continued import heard
from tests.support.real_server import PYTHON, VLLM, free_port, make_model, vllm_server

pytest.importorskip("openai")
pytestmark = [
    pytest.mark.skipif(not (PYTHON and VLLM), reason="FOREBAY_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0}
QUESTION = "where is Ada?"
MOST = 200


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    port = free_port()
    with vllm_server(folder, port):
        yield f"http://127.0.0.1:{port}"


def post(url: str, body: Any) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as found:
        return json.load(found)


def search(words: str) -> str:
    """Look something up."""
    return f"{words} lives in Bern."


async def test_tokens_of_several_turns_are_the_servers_own(url: str) -> None:
    """Prompt and reply, byte for byte as the server renders them; one trace, as each turn goes on from the last."""
    async with chat.client(f"{url}/v1", **GREEDY) as client:
        talk = client.session(tools=[search], max_turns=4)
        await talk.run(QUESTION)
        rollout = talk.rollout(1.0)
    assert [each["role"] for each in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.info["unknown_tokens"] == 0
    (trace,) = rollout.traces
    prompt, made, mask = (trace[name] for name in ("prompt_ids", "completion_ids", "completion_mask"))
    first = [{"role": "user", "content": QUESTION}]
    assert prompt.tolist() == post(f"{url}/tokenize", {"model": "tiny", "messages": first})["tokens"]
    said = post(f"{url}/detokenize", {"model": "tiny", "tokens": made.tolist()})["prompt"]
    assert "Ada lives in Bern." in said
    assert said.endswith("Bern<|im_end|>")
    assert 0 < mask.sum() < len(mask), "what the tool said was not made by the model"
    assert rollout.tokens == mask.sum() == talk.used_tokens
    assert (trace["logprobs"][mask] <= 0).all()


async def long_reply(item: Item, ctx: Any) -> Rollout:
    talk = ctx.resource.session(ctx)
    await talk.complete(QUESTION, max_tokens=MOST, extra_body={"ignore_eos": True})
    made: Rollout = talk.rollout(reward=1.0)
    return made


async def trace_of(url: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trace of a reply that is cut by an update of the weights after so many more chunks, again and again."""
    client = chat.client(f"{url}/v1", **GREEDY, continues=True)
    task = Task("t", source=SequenceSource([0]), run=long_reply, resource=client, on_failure=FailFast())
    async with Pipeline([task]) as pipe:
        for version, chunks in enumerate(cuts, 1):
            with heard(monkeypatch, chunks) as came:
                if version == 1:
                    await pipe.start()
                with anyio.fail_after(60):
                    await came.wait()
            async with pipe.weight_update(version=version, running="abort"):
                pass
        if not cuts:
            await pipe.start()
        (rollout,) = (await pipe.get_batch(groups=1)).rollouts
        pipe.ledger.check()
    (trace,) = rollout.traces
    return trace


@pytest.mark.parametrize("cuts", [[1], [20], [5, 5, 5]])
async def test_a_reply_that_updates_cut_is_the_one_that_none_did(
    url: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await trace_of(url, [], monkeypatch)
    assert whole["versions"].tolist() == [0] * MOST
    trace = await trace_of(url, cuts, monkeypatch)
    assert trace["prompt_ids"].tolist() == whole["prompt_ids"].tolist()
    assert trace["completion_ids"].tolist() == whole["completion_ids"].tolist()
    assert trace["completion_mask"].all()
    np.testing.assert_allclose(trace["logprobs"], whole["logprobs"], atol=1e-3)
    versions = trace["versions"]
    assert (np.diff(versions) >= 0).all()
    assert np.unique(versions).tolist() == list(range(len(cuts) + 1))
    assert (versions == 0).sum() >= cuts[0]
