"""Environments of ``verifiers`` before ``verifiers.v1`` as tasks: each of its base classes that needs no sandbox."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import ConfigError, Pipeline, RolloutFailed, SourceMark
from pipeline.errors import EnvironmentFailed
from tasks import chat
from tasks.verifiers import verifiers_task
from tests.support.chat_server import Said, called, serving, toy
from tests.support.cua_server import browsing
from tests.support.gates import turn
from tests.support.word_games import WORD, one_word

vf: Any = pytest.importorskip("verifiers")
if not hasattr(vf, "SingleTurnEnv"):
    pytest.skip("this version of verifiers has verifiers.v1 alone", allow_module_level=True)
datasets: Any = pytest.importorskip("datasets")
openai: Any = pytest.importorskip("openai")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Making an Environment takes SIGINT and SIGTERM, which are the test runner's."""
    import signal

    held = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in held.items():
        signal.signal(each, handler)


class Toy:
    """A model whose tokens are bytes: its prompt is the text of all messages."""

    def __init__(self, say: Callable[[dict[str, Any]], Any]) -> None:
        self.say = say
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, request: dict[str, Any]) -> Said:
        self.asked.append(request)
        prompt = [code for each in request["messages"] for code in _text(each).encode()]
        said = self.say(request)
        if isinstance(said, dict):
            return toy("", [0], prompt=prompt, tool_calls=[said], usage=1, finish="tool_calls")
        return toy(said, list(said.encode()), prompt=prompt, usage=len(said))


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content


def rows(count: int = 2) -> Any:
    return datasets.Dataset.from_list([{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(count)])


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def text_of(trace: Any, name: str = "completion_ids") -> bytes:
    return bytes(np.asarray(trace[name]).tolist())


async def rollouts_of(env: Any, model: Any, *, groups: int = 1, **options: Any) -> list[Any]:
    async with serving(model) as server:
        client = chat.client(server.url, model="policy", backoff_s=0.0)
        task = verifiers_task(env, client=client, **{"shuffle": False, **options})
        async with Pipeline([task]) as pipe:
            await pipe.start()
            batch = await pipe.get_batch(groups=groups)
    return [rollout for group in sorted(batch.groups, key=lambda each: each.index) for rollout in group.rollouts]


async def test_single_turn() -> None:
    env = vf.SingleTurnEnv(dataset=rows(), system_prompt="Add. ", rubric=vf.Rubric(funcs=[right], weights=[2.0]))
    model = Toy(lambda _: "2")
    first, second = await rollouts_of(env, model, groups=2, sampling={"temperature": 0.25})
    assert (first.reward, second.reward) == (0.0, 2.0)
    (trace,) = second.traces
    assert (text_of(trace, "prompt_ids"), text_of(trace)) == (b"Add. 1+1", b"2")
    assert trace["logprobs"].tolist() == pytest.approx([-5.0])
    assert second.info["metrics"]["right"] == 1.0
    assert second.info["example"] == 1
    assert {each["temperature"] for each in model.asked} == {0.25}


class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        return [{"role": "user", "content": "no"}]


async def test_several_turns() -> None:
    env = Guess(dataset=rows(1), rubric=vf.Rubric(funcs=[right]), max_turns=3)
    (rollout,) = await rollouts_of(env, Toy(lambda request: str(2 - len(request["messages"]) // 2)))
    (trace,) = rollout.traces
    assert text_of(trace) == b"2no1no0"
    assert np.asarray(trace["completion_mask"]).tolist() == [True, False, False, True, False, False, True]
    assert (rollout.reward, rollout.info["turns"], rollout.info["metrics"]["num_turns"]) == (1.0, 3, 3.0)
    assert rollout.info["stopped"] == "max_turns_reached"


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: which.
    """
    return 2 * number


def _calls_once(request: dict[str, Any]) -> Any:
    last = request["messages"][-1]
    return (
        last["content"] if last["role"] == "tool" else called(request["tools"][0]["function"]["name"], '{"number": 1}')
    )


async def test_tools() -> None:
    env = vf.ToolEnv(dataset=rows().select([1]), tools=[double], rubric=vf.Rubric(funcs=[right]))
    (rollout,) = await rollouts_of(env, Toy(_calls_once))
    assert (rollout.reward, rollout.info["metrics"]["double_calls"]) == (1.0, 1.0)
    assert [each["role"] for each in rollout.info["chats"][-1]] == ["user", "assistant", "tool", "assistant"]


class Counting(vf.StatefulToolEnv):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_tool(self.times, args_to_skip=["factor"])

    async def times(self, number: int, factor: int) -> str:
        """Multiply.

        Args:
            number: which.
            factor: by what; not the model's to say.
        """
        return str(number * factor)

    def update_tool_args(
        self, name: str, args: dict[str, Any], messages: Any, state: Any, **more: Any
    ) -> dict[str, Any]:
        return {**args, "factor": 2}


async def test_tools_with_a_state() -> None:
    env = Counting(dataset=rows().select([1]), rubric=vf.Rubric(funcs=[right]))
    model = Toy(_calls_once)
    (rollout,) = await rollouts_of(env, model)
    assert rollout.reward == 1.0
    assert "factor" not in json.dumps(model.asked[0]["tools"])


async def test_a_group_of_environments_with_rubrics_of_their_own() -> None:
    one = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[right]))
    two = Guess(dataset=rows(1), rubric=vf.Rubric(funcs=[lambda state: 0.5]), max_turns=2)
    env = vf.EnvGroup([one, two], env_names=["one", "two"])
    first, second = await rollouts_of(env, Toy(lambda _: "0"), groups=2)
    assert (first.reward, first.info["turns"]) == (1.0, 1)
    assert (second.reward, second.info["turns"]) == (0.5, 2)


class Walk:
    """Two steps to the end."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.at = 0
        return "at 0", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return f"at {self.at}", 0.5, self.at == 2, False, {}


async def test_a_gym_environment() -> None:
    env = vf.GymEnv(env_cls=Walk, num_train_episodes=2, num_eval_episodes=1)
    (rollout,) = await rollouts_of(env, Toy(lambda _: "go"))
    assert rollout.reward == 1.0


# -- those that need a package more ------------------------------------------------------------------------------------

MCP_SERVER = """
from mcp.server.fastmcp import FastMCP
server = FastMCP("doubles", log_level="ERROR")
@server.tool()
def double(number: int) -> str:
    "Twice a number."
    return str(2 * number)
server.run("stdio")
"""


async def test_tools_of_an_mcp_server() -> None:
    pytest.importorskip("mcp.server.fastmcp", exc_type=ImportError)
    servers = [{"name": "doubles", "command": sys.executable, "args": ["-c", MCP_SERVER]}]
    env = vf.MCPEnv(mcp_servers=servers, dataset=rows().select([1]), rubric=vf.Rubric(funcs=[right]))
    try:
        model = Toy(_calls_once)
        (rollout,) = await rollouts_of(env, model)
    finally:
        await env.teardown_mcp_servers()
    assert rollout.reward == 1.0
    assert [each["role"] for each in rollout.info["chats"][-1]] == ["user", "assistant", "tool", "assistant"]
    assert model.asked[0]["tools"][0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"


async def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    env = vf.ReasoningGymEnv("chain_sum", num_train_examples=2, num_eval_examples=1, system_prompt="", seed=3)
    known = [str(env.rg_dataset[index]["answer"]) for index in range(2)]

    def say(request: dict[str, Any]) -> str:
        first = request["messages"][-1]["content"] == env.rg_dataset[0]["question"]
        return f"<answer>{known[0] if first else 'none'}</answer>"

    first, second = await rollouts_of(env, Toy(say), groups=2)
    assert first.reward == 1.0 > second.reward
    assert first.info["metrics"]["check_answer_reward_func"] == 1.0
    assert text_of(first.traces[0]) == f"<answer>{known[0]}</answer>".encode()


async def test_text_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_word(tmp_path, monkeypatch)
    pytest.importorskip("textarena")

    def guessed(completion: Any, parser: Any, answer: str) -> float:
        return float(parser.parse_answer(completion) == f"[{answer}]")

    parser = vf.XMLParser(fields=["guess"], answer_field="guess")
    rubric = vf.Rubric(funcs=[guessed], parser=parser)
    env = vf.TextArenaEnv(game="Wordle-v0", num_train_examples=1, parser=parser, rubric=rubric)
    said = iter(["slate", WORD])
    (rollout,) = await rollouts_of(env, Toy(lambda _: f"<guess>[{next(said)}]</guess>"))
    assert (rollout.reward, rollout.info["turns"]) == (1.0, 2)
    (trace,) = rollout.traces
    assert b"X X G X G" in text_of(trace)
    assert np.asarray(trace["completion_mask"]).sum() == 2 * len(f"<guess>[{WORD}]</guess>")


@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")
async def test_a_browser_whose_server_is_stood_in_for() -> None:
    pytest.importorskip("stagehand.session", exc_type=ImportError)  # as of 4.0 there is none
    with browsing() as (url, asked):
        options: dict[str, Any] = {"mode": "cua", "use_sandbox": False, "server_url": url, "env": "LOCAL"}
        env = vf.BrowserEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[lambda: 1.0]), **options)

        def say(request: dict[str, Any]) -> Any:
            tool = next((each for each in request["messages"] if each["role"] == "tool"), None)
            return "done" if tool else called("goto", '{"url": "http://a.test/"}')

        model = Toy(say)
        try:
            (rollout,) = await rollouts_of(env, model)
        finally:
            await env.teardown()
    assert (rollout.reward, rollout.info["turns"]) == (1.0, 2)
    assert [(method, path) for method, path, _ in asked] == [
        ("GET", "/health"),
        ("POST", "/sessions"),
        ("POST", "/sessions/one/action"),
        ("DELETE", "/sessions/one"),
    ]
    assert "session_id" not in json.dumps(model.asked[0]["tools"])


async def test_rubrics_of_the_package_in_a_group() -> None:
    async with (
        serving(Toy(lambda _: "yes")) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none") as client,
    ):
        judged = vf.JudgeRubric(judge_client=client, judge_model="judge")

        async def agreed(judge: Any, prompt: Any, completion: Any, answer: str, state: Any) -> float:
            return float(await judge(prompt, completion, answer, state) == "yes")

        judged.add_reward_func(agreed, weight=3.0)
        rubric = vf.RubricGroup([vf.Rubric(funcs=[right]), vf.MathRubric(), judged])
        env = vf.SingleTurnEnv(dataset=rows().select([1]), rubric=rubric)
        (rollout,) = await rollouts_of(env, Toy(lambda _: "\\boxed{4/2}"))
    found = {name: rollout.info["metrics"][name] for name in ("right", "correct_answer", "agreed")}
    assert found == {"right": 0.0, "correct_answer": 1.0, "agreed": 1.0}
    assert rollout.reward == 4.0


# -- rewards of whole groups -------------------------------------------------------------------------------------------


def better(completions: Any, answers: Any) -> list[float]:
    """What each is above the mean."""
    said = [float(each[-1].content) for each in completions]
    return [each - sum(said) / len(said) for each in said]


def numbered() -> Toy:
    said = iter(range(100))
    return Toy(lambda _: str(next(said)))


async def test_members_are_scored_together() -> None:
    env = vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric(funcs=[better], weights=[1.0]))
    model = numbered()
    found = await rollouts_of(env, model, groups=2, group_size=4)
    for group in (found[:4], found[4:]):
        said = [float(text_of(each.traces[0])) for each in group]
        assert [each.reward for each in group] == pytest.approx([each - sum(said) / 4 for each in said])
        assert all("scored_with_its_group" not in each.info for each in group)
    assert len(model.asked) == 8


async def test_a_member_that_failed_is_played_again_and_the_others_are_not() -> None:
    class Flaky(Toy):
        async def __call__(self, request: dict[str, Any]) -> Said:
            said = await super().__call__(request)
            return Said({"error": {"message": "bad"}}, status=400) if len(self.asked) == 2 else said

    said = iter(range(100))
    model = Flaky(lambda _: str(next(said)))
    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[better], weights=[1.0]))
    found = await rollouts_of(env, model, group_size=3)
    assert len(model.asked) == 4
    assert sum(each.reward for each in found) == pytest.approx(0.0)


async def test_slots_are_free_while_members_wait_for_each_other() -> None:
    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[better], weights=[1.0]))
    async with serving(numbered()) as server:
        task = verifiers_task(env, client=chat.client(server.url, model="policy"), group_size=4)
        async with Pipeline([task], concurrency=1) as pipe:
            await pipe.start()
            assert len((await pipe.get_batch(groups=1)).rollouts) == 4


async def test_members_that_are_cut_while_they_are_scored_are_played_again(run_directory: str) -> None:
    begun, opened = anyio.Event(), anyio.Event()

    async def compared(completions: Any) -> list[float]:
        begun.set()
        await opened.wait()
        return better(completions, None)

    compared.__annotations__["return"] = list[float]
    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[compared], weights=[1.0]))
    model = numbered()
    async with serving(model) as server:
        task = verifiers_task(env, client=chat.client(server.url, model="policy"), group_size=3)
        async with Pipeline([task], directory=run_directory) as pipe:
            await pipe.start()
            await begun.wait()
            async with pipe.weight_update(version=1, running="abort"):
                opened.set()
            rewards = [each.reward for each in (await pipe.get_batch(groups=1)).rollouts]
    assert sorted(rewards) == pytest.approx([-1.0, 0.0, 1.0])
    assert len(model.asked) == 6


async def test_members_that_are_cut_after_they_were_scored_return_what_they_had(run_directory: str) -> None:
    """Their siblings may have finished by then, and would not be there to be compared with."""
    begun, opened = anyio.Event(), anyio.Event()

    class Slow(Toy):
        async def __call__(self, request: dict[str, Any]) -> Said:
            if request["messages"][-1]["content"] == "1+1":
                begun.set()
                await opened.wait()
            return await super().__call__(request)

    said = iter(range(100))
    model = Slow(lambda _: str(next(said)))
    env = vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric(funcs=[better], weights=[1.0]))
    async with serving(model) as server:
        task = verifiers_task(env, client=chat.client(server.url, model="policy"), group_size=3, shuffle=False)
        async with (
            Pipeline([task], directory=run_directory, concurrency=1) as pipe,
            anyio.create_task_group() as group,
        ):
            batches: list[Any] = []

            async def take() -> None:
                batches.append(await pipe.get_batch(groups=2))

            await pipe.start()
            group.start_soon(take)
            await begun.wait()  # the only slot is the second item's, and the first one's members wait for it
            while task.resource._groups._open:
                await turn()
            async with pipe.weight_update(version=1, running="abort"):
                opened.set()
    (batch,) = batches
    (first,) = [each for each in batch.groups if each.index == 0]
    assert sorted(each.reward for each in first.rollouts) == pytest.approx([-1.0, 0.0, 1.0])
    assert [each["messages"][-1]["content"] for each in model.asked].count("0+0") == 3


async def test_a_group_reward_that_raises_fails_the_attempts() -> None:
    def shorter(completions: Any) -> list[float]:
        return [0.0]

    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[shorter], weights=[1.0]))
    async with serving(numbered()) as server:
        task = verifiers_task(env, client=chat.client(server.url, model="policy"), group_size=2, on_failure="fail_fast")
        async with Pipeline([task]) as pipe:
            await pipe.start()
            with pytest.raises(RolloutFailed) as error:
                await pipe.get_batch(groups=1)
    assert isinstance(error.value.__cause__, IndexError)


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_servers_that_fail_are_asked_as_often_as_the_client_says() -> None:
    asked: list[Any] = []

    async def answer(request: dict[str, Any]) -> Said:
        asked.append(request)
        return Said({"error": {"message": "no"}}, status=503)

    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[right]))
    async with serving(answer) as server:
        client = chat.client(server.url, model="policy", backoff_s=0.0, attempts=3)
        with pytest.raises(EnvironmentFailed, match=r"item 0.*SingleTurnEnv"):
            await Pipeline.try_one(verifiers_task(env, client=client))
    assert len(asked) == 3


async def test_a_cancelled_attempt_hangs_up() -> None:
    begun, ended = anyio.Event(), anyio.Event()

    async def never(request: dict[str, Any]) -> Said:
        begun.set()
        try:
            await anyio.sleep_forever()
            raise AssertionError
        finally:
            ended.set()

    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[right]))
    async with serving(never) as server:
        async with Pipeline([verifiers_task(env, client=chat.client(server.url, model="policy"))]) as pipe:
            await pipe.start()
            await begun.wait()
        with anyio.fail_after(5):
            await ended.wait()


def test_what_does_not_go_together_is_refused() -> None:
    client = chat.client("http://localhost:1/v1", model="m")
    env = vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric(funcs=[better]))
    with pytest.raises(ConfigError, match="min_group=1"):
        verifiers_task(env, client=client, group_size=2, min_group=1)
    with pytest.raises(ConfigError, match="reward="):
        verifiers_task(env, client=client, reward=lambda episode: 0.0)
    source = verifiers_task(env, client=client).source
    assert isinstance(source.mark(), SourceMark)
    assert source.length() == 1
