"""Environments of ``verifiers.v1`` as tasks: each kind of its environments that needs no container, played for real."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import ConfigError, EndOfSource, Pipeline, Retry, Rollout, Skip, Task
from pipeline.errors import EnvironmentFailed, ServerFailed, SourceError
from tasks import SequenceSource, chat
from tasks.llm import token_rows
from tasks.verifiers import verifiers_task
from tasks.verifiers.sources import TaskItems
from tests.support.chat_server import Said, called, serving, toy
from tests.support.word_games import WORD, one_word

vf: Any = pytest.importorskip("verifiers.v1")
PLUGINS = Path(__file__).parents[1] / "support" / "verifiers_plugins"
SUMS: dict[str, Any] = {"id": "forebay_sums"}
AGENT: dict[str, Any] = {"harness": {"id": "forebay_sums"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


class Toy:
    """A model whose tokens are bytes: its prompt is the text of all messages; it adds what it finds there."""

    def __init__(self, say: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self.say = say or _added
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, request: dict[str, Any]) -> Said:
        self.asked.append(request)
        prompt = [code for each in request["messages"] for code in (each["content"] or "").encode()]
        text = self.say(request)
        if isinstance(text, dict):
            return toy("", [0], prompt=prompt, tool_calls=[text], usage=1, finish="tool_calls")
        return toy(text, list(text.encode()), prompt=prompt, usage=len(text))


def _added(request: dict[str, Any]) -> str:
    first = next(each["content"] for each in request["messages"] if each["role"] == "user")
    left, _, right = first.partition("+")
    return str(int(left) + int(right))


def single(agent: dict[str, Any] | None = None, **taskset: Any) -> Any:
    config = vf.SingleAgentEnvConfig(taskset={**SUMS, **taskset}, agent={**AGENT, **(agent or {})})
    return vf.load_environment(config)


async def batch_of(env: Any, answer: Any, *, groups: int = 1, directory: str | None = None, **options: Any) -> Any:
    async with serving(answer) as server:
        client = chat.client(server.url, model="policy", backoff_s=0.0, temperature=0.5)
        task = verifiers_task(env, client=client, **{"shuffle": False, **options})
        async with Pipeline([task], directory=directory) as pipe:
            await pipe.start()
            return await pipe.get_batch(groups=groups)


def text_of(trace: Any, name: str = "completion_ids") -> bytes:
    return bytes(np.asarray(trace[name]).tolist())


async def test_a_single_agent_environment_with_the_tokens_that_were_sampled() -> None:
    model = Toy()
    batch = await batch_of(single({"harness": {"id": "forebay_sums", "turns": 2}}), model, groups=3, group_size=2)
    assert [each.task for each in batch.groups] == ["forebay_sums"] * 3
    assert sorted(each.index for each in batch.groups) == [0, 1, 2]
    for group in batch.groups:
        assert group.members == [0, 1]
        for rollout in group.rollouts:
            (trace,) = rollout.traces
            number = group.index
            assert text_of(trace, "prompt_ids") == f"{number}+{number}".encode()
            assert text_of(trace) == f"{2 * number}and?{2 * number}".encode()
            assert np.asarray(trace["completion_mask"]).tolist() == [True, *[False] * 4, True]
            assert trace["logprobs"][0] == pytest.approx(-ord(str(2 * number)) / 10)
            assert trace.agent == "agent"
            assert rollout.reward == 2.25
            assert rollout.info["rewards"] == {"right": 2.0, "short": 0.25}
            assert rollout.info["metrics"]["letters"] == 1.0
            assert (rollout.info["environment"], rollout.info["turns"], rollout.info["breaks"]) == (
                "forebay_sums",
                2,
                0,
            )
            assert [each["content"] for each in rollout.info["chats"][0]][-1] == str(2 * number)
            assert rollout.tokens == 2
    assert len(token_rows(batch)) == 6
    assert {each["temperature"] for each in model.asked} == {0.5}, "the client's own fields count"
    assert all(each["return_token_ids"] for each in model.asked)


async def test_several_attempts_in_one_episode_are_traces_with_a_reward_of_all() -> None:
    said = iter(["2", "0", "2", "0"])
    config = vf.resolve_env_config({"id": "best-of-n", "n": 4, "agent": AGENT, "taskset": {**SUMS, "count": 2}})
    env = vf.load_environment(config)
    assert type(env).__name__ == "BestOfNEnv"
    batch = await batch_of(env, Toy(lambda request: next(said) if _added(request) == "2" else "0"), groups=2)
    by_index = {group.index: group.rollouts[0] for group in batch.groups}
    rollout = by_index[1]
    assert [text_of(each) for each in rollout.traces] == [b"2", b"0", b"2", b"0"]
    assert rollout.reward == pytest.approx((2.25 + 0.25 + 2.25 + 0.25) / 4)
    assert [each["metrics"]["best"] for each in rollout.info["agents"]] == [1.0, 0.0, 1.0, 0.0]
    assert rollout.info["metrics"]["pass_at_n"] == 1.0


async def test_a_reward_of_the_callers_own() -> None:
    config = vf.resolve_env_config({"id": "best-of-n", "n": 2, "agent": AGENT, "taskset": {**SUMS, "count": 1}})
    said = iter(["1", "0"])
    env = vf.load_environment(config)
    best = await batch_of(env, Toy(lambda _: next(said)), reward=lambda episode: max(t.reward for t in episode.traces))
    assert best.rollouts[0].reward == 2.25


async def test_an_agent_that_is_not_trained_talks_and_leaves_no_tokens() -> None:
    def say(request: dict[str, Any]) -> str:
        first = request["messages"][0]
        if first["role"] == "system":  # the user, who is modelled
            return "###DONE###" if sum(each["role"] == "assistant" for each in request["messages"]) else "0+0"
        return "0"

    agents = {"assistant": AGENT, "user": AGENT}
    env = vf.load_environment(vf.resolve_env_config({"id": "user-sim", **agents, "taskset": {**SUMS, "count": 1}}))
    assert type(env).__name__ == "UserSimEnv"
    (rollout,) = (await batch_of(env, Toy(say))).rollouts
    (trace,) = rollout.traces
    assert (trace.agent, text_of(trace, "prompt_ids"), text_of(trace)) == ("assistant", b"0+0", b"0")
    assert {each["agent"]: each["trained"] for each in rollout.info["agents"]} == {"assistant": True, "user": False}
    assert rollout.reward == 2.25
    assert rollout.info["metrics"]["user_turns"] == 2.0


class DuelConfig(vf.EnvConfig):  # type: ignore[misc]
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):  # type: ignore[misc]
    """An environment of one's own: two agents at one task, and a reward that compares them."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.first.run(task)
        await agents.second.run(task)

    async def finalize(self, task: Any, episode: Any) -> None:
        first, second = episode.traces
        first.record_reward("won", float(first.reward > second.reward))


async def test_an_environment_of_ones_own_with_two_agents() -> None:
    said = iter(["0", "1"])
    env = Duel(DuelConfig(taskset={**SUMS, "count": 1}, first=AGENT, second=AGENT))
    (rollout,) = (await batch_of(env, Toy(lambda _: next(said)))).rollouts
    assert [(each.agent, text_of(each)) for each in rollout.traces] == [("first", b"0"), ("second", b"1")]
    assert rollout.info["rewards"]["won"] == 1.0


async def test_a_judge_talks_to_its_own_server_and_leaves_no_tokens() -> None:
    def say(request: dict[str, Any]) -> str:
        return "yes" if request["model"] == "judge" else _added(request)

    model = Toy(say)
    async with serving(model) as server:
        judge = {"id": "reference", "base_url": server.url, "api_key_var": "NO_KEY", "model": "judge", "weight": 3.0}
        env = single(count=1, task={"judges": [judge]})
        rollout = await Pipeline.try_one(verifiers_task(env, client=chat.client(server.url, model="policy")))
    assert rollout.info["rewards"] == {"right": 2.0, "short": 0.25, "reference": 3.0}
    assert rollout.info["turns"] == len(rollout.traces) == 1
    assert [each["model"] for each in model.asked] == ["policy", "judge"]


async def test_judges_with_criteria_and_with_grades(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(
        '[[criteria]]\nname = "sure"\ntext = "It is sure."\n[[criteria]]\nname = "kind"\ntext = "It is kind."\n'
    )
    verdicts = [{"name": name, "reason": "", "verdict": said} for name, said in (("sure", "yes"), ("kind", "no"))]

    async def answer(request: dict[str, Any]) -> Said:
        if request["model"] == "decider":
            return Said({"answers": {"grade": {"score": 0.75}}})
        return await Toy(lambda _: json.dumps({"verdicts": verdicts}) if request["model"] == "judge" else "0")(request)

    if not hasattr(vf, "DecisionJudge"):
        pytest.skip("this version of verifiers has no DecisionJudge")
    async with serving(answer) as server:
        judges = [
            {"id": "rubric", "base_url": server.url, "model": "judge", "path": str(rubric), "api_key_var": "NO_KEY"},
            {"id": "decision", "base_url": f"{server.url}/x", "model": "decider", "api_key_var": "NO_KEY"},
        ]
        env = single(count=1, task={"judges": judges})
        rollout = await Pipeline.try_one(verifiers_task(env, client=chat.client(server.url, model="policy")))
    assert rollout.info["rewards"] == {"right": 2.0, "short": 0.25, "rubric": 0.5, "decision": 0.75}
    assert (rollout.info["metrics"]["rubric/sure"], rollout.info["metrics"]["rubric/kind"]) == (1.0, 0.0)
    assert rollout.info["turns"] == len(rollout.traces) == 1


async def test_a_game_of_text_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_word(tmp_path, monkeypatch)
    pytest.importorskip("textarena")

    def say(request: dict[str, Any]) -> str:
        return f"[{WORD}]" if any(each["role"] == "assistant" for each in request["messages"]) else "[C]"

    config = {"taskset": {"id": "textarena", "game": "Hangman-v0"}, "player": AGENT}
    env = vf.load_environment(vf.resolve_env_config(config))
    assert type(env).__name__ == "TextArenaEnv"
    async with serving(Toy(say)) as server:  # the taskset has no end
        rollout = await Pipeline.try_one(verifiers_task(env, client=chat.client(server.url, model="policy")))
    (trace,) = rollout.traces
    assert (trace.agent, rollout.info["turns"], rollout.reward) == ("player", 2, 1.0)
    assert text_of(trace).startswith(b"[C]")
    assert b"C   _   _   _   _" in text_of(trace)
    assert np.asarray(trace["completion_mask"]).sum() == len("[C]") + len(f"[{WORD}]")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_environment_of_openenv() -> None:
    pytest.importorskip("openenv.core.env_server", exc_type=ImportError)
    from tests.support.open_counter import counting

    async with counting() as url:
        env = vf.load_environment(
            vf.resolve_env_config(
                {"taskset": {"id": "openenv", "base_url": url, "resets": [{"seed": 5}]}, "player": AGENT}
            )
        )
        assert type(env).__name__ == "OpenEnvEnv"
        said = iter(["2", '{"number": 1}'])
        (rollout,) = (await batch_of(env, Toy(lambda _: next(said)))).rollouts
    (trace,) = rollout.traces
    assert (trace.agent, rollout.info["turns"], rollout.reward) == ("player", 2, 3.0)
    assert b'"total": 5' in text_of(trace, "prompt_ids")
    assert b'"total": 7' in text_of(trace)


@pytest.mark.skipif("FOREBAY_VERIFIERS_PROGRAMS" not in os.environ, reason="uv installs their packages")
@pytest.mark.parametrize("program", ["null", "bash"])
async def test_the_packages_own_programs_with_a_tool_server(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set FOREBAY_VERIFIERS_PROGRAMS, and have ``uv`` and a package index at hand."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=os.pathsep)

    def say(request: dict[str, Any]) -> Any:
        last = request["messages"][-1]
        return last["content"] if last["role"] == "tool" else called("double", '{"number": 21}')

    config = {"harness": {"id": program}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "forebay_tools"}, agent=config))
    model = Toy(say)
    (rollout,) = (await batch_of(env, model)).rollouts
    assert rollout.reward == 1.0
    assert rollout.info["turns"] == 2
    assert all(np.asarray(trace["completion_mask"]).any() for trace in rollout.traces)
    assert "double" in [each["function"]["name"] for each in model.asked[0]["tools"]]


async def test_servers_that_fail_are_asked_as_often_as_the_client_says_and_the_cause_is_named() -> None:
    asked: list[Any] = []

    async def answer(request: dict[str, Any]) -> Said:
        asked.append(request)
        return Said({"error": {"message": "no"}}, status=503)

    async with serving(answer) as server:
        client = chat.client(server.url, model="policy", backoff_s=0.0, attempts=3)
        task = verifiers_task(single(count=1), client=client)
        with pytest.raises(EnvironmentFailed, match=r"item 0.*member 0.*'forebay_sums'.*503") as error:
            await Pipeline.try_one(task)
    assert isinstance(error.value.__cause__, ServerFailed)
    assert len(asked) == 3, "the harness's own client tried twice again"


async def test_an_episode_that_failed_is_begun_anew_as_the_task_says() -> None:
    class Flaky(Toy):
        async def __call__(self, request: dict[str, Any]) -> Said:
            said = await super().__call__(request)
            return Said({"error": {"message": "bad"}}, status=400) if len(self.asked) == 1 else said

    model = Flaky()
    batch = await batch_of(single(count=1), model, on_failure=Retry(attempts=2))
    assert batch.rollouts[0].reward == 2.25
    assert len(model.asked) == 2


async def test_an_episode_that_failed_for_good_is_no_rollout_with_reward_zero() -> None:
    async def answer(request: dict[str, Any]) -> Said:
        return Said({"error": {"message": "bad"}}, status=400)

    async with serving(answer) as server:
        task = verifiers_task(single(count=1), client=chat.client(server.url, model="policy"), on_failure=Skip())
        async with Pipeline([task]) as pipe:
            await pipe.start()
            with pytest.raises(EndOfSource):
                await pipe.get_batch(groups=1)


async def test_a_killed_run_goes_on_by_place_in_the_taskset(run_directory: str) -> None:
    model = Toy()
    seen: list[Any] = []
    async with serving(model) as server:

        def task() -> Task:
            client = chat.client(server.url, model="policy")
            return verifiers_task(single(count=6), client=client, shuffle=False)

        async with Pipeline([task()], directory=run_directory, concurrency=2) as pipe:
            await pipe.start()
            seen += (await pipe.get_batch(groups=2)).groups
            await pipe.save(1)
        async with Pipeline([task()], directory=run_directory, concurrency=2) as pipe:
            await pipe.resume()
            await pipe.start(weights_current=True)
            async for batch in pipe.batches(groups=2):
                seen += batch.groups
    assert sorted(group.index for group in seen) == [0, 1, 2, 3, 4, 5]
    assert all(group.rollouts[0].reward == 2.25 for group in seen)


async def test_a_cancelled_attempt_hangs_up_and_leaves_nothing_behind() -> None:
    begun, ended = anyio.Event(), anyio.Event()

    async def never(request: dict[str, Any]) -> Said:
        begun.set()
        try:
            await anyio.sleep_forever()
            raise AssertionError
        finally:
            ended.set()

    async with serving(never) as server:
        task = verifiers_task(single(count=1), client=chat.client(server.url, model="policy"))
        async with Pipeline([task]) as pipe:
            await pipe.start()
            await begun.wait()
            async with pipe.weight_update(version=1, running="abort"):
                with anyio.fail_after(5):
                    await ended.wait()
                gc.collect()
                assert not task.resource._recorder._recordings


async def test_tasks_share_a_client() -> None:
    async with serving(Toy()) as server:
        client = chat.client(server.url, model="policy")

        async def solve(item: Any, ctx: Any) -> Rollout:
            talk = ctx.resource.session(ctx)
            await talk.complete("1+1")
            rollout: Rollout = talk.rollout(reward=1.0)
            return rollout

        tasks = [
            verifiers_task(single(), client=client, name="one"),
            verifiers_task(single(), client=client, name="two"),
            Task("plain", source=SequenceSource([0]), run=solve, resource=client),
        ]
        async with Pipeline(tasks) as pipe:
            await pipe.start()
            assert {group.task for group in (await pipe.get_batch(groups=7)).groups} == {"one", "two", "plain"}


async def test_tasks_without_an_end_are_come_by_in_any_order() -> None:
    source = TaskItems(single(endless=True).taskset)
    assert source.length() is None
    assert [source.item(index).data.answer for index in (3, 4, 0, 2, 2)] == ["6", "8", "0", "4", "4"]
    assert source.mark() == TaskItems(single(endless=True).taskset).mark()
    assert not source.mark().agrees(TaskItems(single(count=5).taskset).mark())
    finite = TaskItems(single(count=5).taskset)
    assert finite.mark().agrees(TaskItems(single(count=5).taskset).mark())
    with pytest.raises(SourceError, match="5 items"):
        finite.item(5)


def test_what_does_not_go_together_is_refused() -> None:
    client = chat.client("http://localhost:1/v1", model="m")
    with pytest.raises(ConfigError, match="an Env"):
        verifiers_task(object(), client=client)
    with pytest.raises(ConfigError, match=r"chat\.client"):
        verifiers_task(single(), client="http://x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run="):
        verifiers_task(single(), client=client, run=print)


async def test_try_one_plays_one_episode() -> None:
    async with serving(Toy()) as server:
        task = verifiers_task(single(), client=chat.client(server.url, model="policy"), name="sums")
        rollout = await Pipeline.try_one(task, 2)
    assert isinstance(rollout, Rollout)
    assert text_of(rollout.traces[0]) == b"4"
