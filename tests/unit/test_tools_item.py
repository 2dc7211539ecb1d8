"""One rollout, row or trajectory of a run can be read, whatever is in it; and what happens is told as it is written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from pipeline import ConfigError, ReplayBuffer
from pipeline.cli import main
from pipeline.cli.item_view import show_one
from pipeline.cli.terminal import Terminal
from pipeline.tools import show_item
from pipeline.tools.event_lines import Happened
from pipeline.tools.following import Follower, follow
from pipeline.tools.one_item import readable
from tests.support import kept
from tests.support.crashes import Trained, begin, inline_pipeline, train
from tests.support.runs import task


def printed(item: Any) -> str:
    stream = io.StringIO()
    show_one(Terminal(stream), item)
    return stream.getvalue()


class TestRollout:
    pytestmark = pytest.mark.virtual_time

    async def test_text_tokens_tool_calls_rewards_and_what_happened(self, run_directory: str) -> None:
        item = show_item(await kept.rollouts(run_directory), 4)
        (member,) = item.members
        assert (item.facts["state"], item.facts["task"], item.facts["index"]) == ("buffered", "numbers", 4)
        assert (member.reward, member.tokens, member.attempt, member.info["n"]) == (0.5, 4, 2, 4)
        assert [(each.name, each.dtype, each.shape) for each in member.traces[0].tensors] == [
            ("prompt_ids", "int64", (3,)),
            ("completion_ids", "int64", (4,)),
            ("logprobs", "float64", (4,)),
        ]
        assert [each.event for each in item.happened] == ["claimed", "started", "failed", "started", "finished"]
        text = printed(item)
        assert "Member 0: reward 0.5\n" in text
        assert "  messages: (4 messages)\n    user:\n      What is 6 times 7?\n      Think first.\n" in text
        assert '    assistant:\n      -> multiply({"a": 6, "b": 7})\n' in text
        assert "    tool:\n      42\n      name: multiply\n" in text
        assert "completion_ids" in text
        assert "0, 1, 2, 3\n" in text
        assert "reason error, error ValueError: no answer to 4" in text

    async def test_text_cannot_steer_the_terminal(self, run_directory: str) -> None:
        text = printed(show_item(await kept.rollouts(run_directory), 4))
        assert "\x1b" not in text
        assert "It is 42. \\x1b[2J\\x1b]0;owned\\x07" in text

    async def test_content_that_the_journal_keeps(self, run_directory: str) -> None:
        async with inline_pipeline(task(2, kept.talk), directory=run_directory, concurrency=1) as pipe:
            await begin(pipe)
            uid = await pipe.submit("numbers", {"n": 3, "prompt": "by hand"})
            await anyio.sleep(1)
            await (await pipe.save(0)).committed()
        item = show_item(run_directory, uid)
        assert (item.content, item.facts["kind"]) == ({"n": 3, "prompt": "by hand"}, "external")
        assert "Item\n  n: 3\n  prompt: by hand\n" in printed(item)

    async def test_one_whose_payload_is_gone_and_one_that_never_was(self, run_directory: str) -> None:
        await kept.rollouts(run_directory)
        with pytest.raises(ConfigError, match="never claimed; uids go up to 7"):
            show_item(run_directory, 8)
        for path in Path(run_directory, "segments").iterdir():
            path.unlink()
        item = show_item(run_directory, 1)
        assert item.facts["state"] == "trained"
        assert not item.members
        assert "is gone" in item.notes[0]

    async def test_by_the_command(self, run_directory: str, capsys: Any) -> None:
        await kept.rollouts(run_directory)
        assert main(["inspect", run_directory, "--item", "4", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["members"][0]["info"]["messages"][2]["content"] == "42"
        assert main(["inspect", run_directory, "--item", "99"]) == 2
        assert "never claimed" in capsys.readouterr().err


class TestOfBuffers:
    def test_a_row(self, run_directory: str) -> None:
        item = show_item(kept.transitions(run_directory), 145)
        assert (item.what, item.facts["version"], item.facts["place"], item.facts["end"]) == ("row", 4, 5, "it went on")
        assert {each.name: each.first for each in item.tensors} == {
            "obs": [145.0, 290.0],
            "reward": [145.0],
            "terminated": [False],
        }
        assert show_item(run_directory, 149).facts["end"] == "terminated"
        for gone in (49, 150):
            with pytest.raises(ConfigError, match="50 to 149 are there"):
                show_item(run_directory, gone)

    def test_a_row_where_any_may_go(self, run_directory: str) -> None:
        kept.transitions(run_directory, remove={"by": "min", "field": "reward"})
        from pipeline.checkpoint.generations import find_generations
        from pipeline.replay.loading import read_values
        from pipeline.store.layout import Layout

        layout = Layout(run_directory)
        run = layout.read_run()
        assert run is not None
        keys = read_values(find_generations(layout, run.run_id).complete[-1])["pool.keys.int64"]
        rewards = sorted(show_item(run_directory, int(key)).tensors[1].first[0] for key in keys[:20])
        assert len(set(rewards)) == 20
        assert min(rewards) >= 50

    def test_a_row_of_compressed_columns(self, tmp_path: Path) -> None:
        rows = np.arange(1200, dtype=np.float32).reshape(3, 400)
        with ReplayBuffer(9, directory=tmp_path, compress={"obs": "zlib", "half": "zlib"}) as buffer:
            buffer.extend({"obs": rows, "half": torch.from_numpy(rows).repeat(1, 2).bfloat16()})
            buffer.save(1, wait=True)
        half, obs = show_item(tmp_path, 1).tensors
        assert (obs.dtype, obs.shape, obs.first[:3]) == ("float32", (400,), [400.0, 401.0, 402.0])
        assert (half.dtype, half.shape, half.first[:2]) == ("bfloat16", (800,), [400.0, 400.0])

    def test_a_trajectory(self, run_directory: str) -> None:
        item = show_item(kept.trajectories(run_directory), 3)
        assert (item.what, item.facts["steps"], item.facts["environments"]) == ("trajectory", 4, 3)
        (rewards,) = [each for each in item.tensors if each.name == "rewards"]
        assert (rewards.shape, rewards.first[:4]) == ((4, 3), [3000.0, 3001.0, 3002.0, 3010.0])
        with pytest.raises(ConfigError, match="0 to 5 are there"):
            show_item(run_directory, 6)

    def test_a_row_of_a_shard(self, run_directory: str) -> None:
        kept.shards(run_directory)
        with pytest.raises(ConfigError, match="name a shard"):
            show_item(run_directory, 3)
        item = show_item(f"{run_directory}/generations/00000000/shards/0001", 3)
        assert item.tensors[1].first == [103.0]


def test_values_that_json_lacks_are_said_in_words() -> None:
    assert readable({1: (b"\x00", float("nan"), 2**80, "\ud800")}) == {"1": ["b'\\x00'", "nan", str(2**80), "\\ud800"]}


class TestFollowing:
    pytestmark = pytest.mark.virtual_time

    async def test_events_and_generations_are_told_once_each_in_order(self, run_directory: str) -> None:
        async with inline_pipeline(task(8, kept.talk), directory=run_directory, concurrency=1) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            follower = Follower(run_directory)
            found: list[Happened] = []
            for _ in range(2):
                await train(pipe, trained, await pipe.get_batch(2))
                found += follower.look()
                await (await pipe.save(len(trained.batches))).committed()
                found += follower.look()
            assert follower.look() == []
        found += follower.look()
        numbers = [each.sequence for each in found if each.event != "committed"]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert [each.said for each in found if each.event == "committed"] == [
            "generation 1, step 1, save",
            "generation 2, step 2, save",
        ]
        assert {"finished", "batch handed out"} <= {each.event for each in found}
        assert found[-1].event == "closed"

    async def test_a_record_that_is_half_written_waits_for_the_rest(self, run_directory: str) -> None:
        await kept.rollouts(run_directory)
        journal = Path(run_directory, "journals/000001-0000.fbj")
        content = journal.read_bytes()
        journal.write_bytes(content[:-200])
        follower = Follower(run_directory)
        assert follower.look() == []
        journal.write_bytes(content[:-130])
        assert follower.look() == []
        journal.write_bytes(content)
        assert [each.event for each in follower.look()] == ["closed"]

    async def test_a_new_life_is_followed_and_a_buffer_tells_of_its_generations(self, run_directory: str) -> None:
        kept.transitions(run_directory)
        follower = Follower(run_directory)
        from pipeline import ReplayBuffer

        with ReplayBuffer(100, directory=run_directory) as buffer:
            buffer.attach(learner=kept.Learner())
            buffer.resume()
            buffer.extend(kept.rows(5))
            buffer.save(3, wait=True)
        assert [(each.event, each.said) for each in follower.look()] == [
            ("closed", "how closed"),
            ("committed", "generation 2, step 3, save"),
        ]

    async def test_it_goes_on_until_it_is_cancelled(self, run_directory: str) -> None:
        await kept.rollouts(run_directory)
        told: list[list[Happened]] = []
        with anyio.move_on_after(10) as scope:
            await follow(run_directory, told.append)
        assert scope.cancelled_caught
        assert told == []

    async def test_a_part_of_a_run_is_refused(self, run_directory: str) -> None:
        await kept.rollouts(run_directory)
        with pytest.raises(ConfigError, match="this is a journal"):
            Follower(f"{run_directory}/journals/000001-0000.fbj")
