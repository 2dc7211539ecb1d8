"""A run that format version 1 left behind opens in every version after it, with everything in it."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Pipeline
from pipeline.checkpoint.generations import check_generation, find_generations
from pipeline.checkpoint.lines import find_line
from pipeline.ledger import STATES
from pipeline.records import Opened
from pipeline.sampler import DrawPlan
from pipeline.store.codec import unpack
from pipeline.store.frames import FOOTER, PAYLOAD, scan
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName, Layout
from pipeline.store.segments import PayloadReader
from pipeline.wiring.recovery import Recovered, read_generation, recover_run
from tests.golden.make_v1 import EVERY_EVENT, OPTIONS, RUN_ID, Learner, tasks
from tests.support.disk import says_no_machine, tree

HERE = Path(__file__).parent / "v1"
TAG = int(RUN_ID[:16], 16)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    shutil.copytree(HERE, tmp_path / "run", ignore=shutil.ignore_patterns("every_event.fbj"))
    return Layout(str(tmp_path / "run"))


def recover(layout: Layout, number: int, torn: list[tuple[str, int, int]] | None = None) -> Recovered:
    stored = find_generations(layout, RUN_ID).complete[number]
    step = stored.manifest.step
    plans = [DrawPlan(task.name, task.source, task.share, task.epochs, task.shuffle) for task in tasks()]
    return recover_run(
        layout,
        stored,
        plans,
        run_tag=TAG,
        seed=11,
        opened=Opened(3, 0, number, step, step, 11),
        line=find_line(layout, TAG, stored.manifest, discard=False),
        torn=None if torn is None else lambda *what: torn.append(what),
    )


def items(recovered: Recovered) -> dict[int, tuple[Any, ...]]:
    """Task, epoch, index, state, members (2: finished), attempts, failures, interruptions, deaths, versions, reward."""
    return {
        uid: (
            *(entry.task, entry.epoch, entry.index, STATES[entry.state]),
            *(list(entry.members), list(entry.attempts), list(entry.failures)),
            *(entry.interruptions, entry.deaths, entry.oldest, entry.newest, entry.effective, entry.rewards),
        )
        for uid, entry in recovered.ledger.entries.items()
    }


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=100_000)
    for name in Layout(str(HERE)).list_journals():
        first = next(read_journal(name, run_tag=TAG)).event
        assert isinstance(first, Opened)
        assert (first.host, first.process, first.wall) == ("golden", 4242, 1_700_000_000.0)
    assert not (HERE / "lock").exists()


def test_the_run_and_its_generations_are_found_whole(layout: Layout) -> None:
    run = layout.read_run()
    assert run is not None
    assert (run.run_id, run.tag, run.format_version) == (RUN_ID, TAG, 1)
    found = find_generations(layout, RUN_ID)
    assert found.damaged == []
    told = [
        (m.generation, m.parent, m.step, m.incarnation, m.reason) for m in (each.manifest for each in found.complete)
    ]
    assert told == [
        (0, -1, 0, 1, "start"),
        (1, 0, 1, 1, "save"),
        (2, 1, 1, 2, "resume"),
        (3, 2, 2, 2, "save"),
        (4, 3, 3, 2, "save"),
    ]
    for stored in found.complete:
        check_generation(stored)
        assert stored.manifest.written == "2024-01-01T00:00:00+00:00"
        assert stored.manifest.attached == ["learner"]
    positions = [(each.incarnation, each.sequence, each.bytes) for each in found.complete[-1].manifest.journals]
    assert positions == POSITIONS


def test_an_event_of_each_kind_comes_back_with_every_field() -> None:
    name = JournalName(7, 0, str(HERE / "every_event.fbj"))
    logged = list(read_journal(name, run_tag=TAG, promised=os.path.getsize(name.path)))
    assert [each.event for each in logged] == EVERY_EVENT
    assert [each.sequence for each in logged] == list(range(1, 13))


def test_the_newest_generation_recovers_every_item(layout: Layout) -> None:
    torn: list[tuple[str, int, int]] = []
    recovered = recover(layout, 4, torn)
    assert items(recovered) == NEWEST
    ledger = recovered.ledger
    ledger.check()
    assert (ledger.trained.ranges(), ledger.dropped.ranges()) == ([(1, 5), (7, 7)], [(0, 0)])
    assert (ledger.step, ledger.next_uid, recovered.events) == (3, 13, EVENTS)
    assert [(lease.step, lease.uids, lease.lives, lease.consumer) for lease in recovered.pending] == [
        (4, [6, 8], [0, 0], "trainer")
    ]
    assert [(os.path.basename(path), offset, left) for path, offset, left in torn] == [
        ("000001-0000.fbj", POSITIONS[0][2], 9)
    ]
    cursors = {name: (c.epoch, c.position, c.length) for name, c in recovered.sampler.cursors.items()}
    assert cursors == {"math": (1, 2, 8), "chat": (0, 3, 3)}
    assert recovered.sampler.mixture.drawn == {"math": 10, "chat": 3}


def test_the_totals_are_recovered(layout: Layout) -> None:
    totals = recover(layout, 4).ledger.totals
    math_, chat = totals["math"], totals["chat"]
    assert (math_.claimed, math_.produced, math_.finished, math_.failed, math_.interrupted) == (10, 6, 13, 6, 7)
    assert (math_.trained, math_.trained_rollouts, math_.trained_tokens) == (4, 8, 22)
    assert (math_.dropped, math_.tokens, math_.reward_sum, math_.reward_count) == ({"failed": 1}, 48, 12.0, 13)
    assert math_.seconds == pytest.approx(17.86)
    assert (chat.claimed, chat.produced, chat.finished, chat.failed, chat.interrupted) == (3, 3, 3, 0, 1)
    assert (chat.trained, chat.trained_rollouts, chat.trained_tokens, chat.dropped) == (2, 2, 20, {})
    assert chat.seconds == pytest.approx(2.1)


def test_an_older_generation_recovers_what_its_weights_had_seen(layout: Layout) -> None:
    recovered = recover(layout, 1)
    recovered.ledger.check()
    assert recovered.ledger.trained.ranges() == [(1, 2)]
    assert items(recovered) == OLDER
    assert [(lease.step, lease.uids) for lease in recovered.pending] == [(2, [4, 5]), (3, [3, 7])]
    assert recover(layout, 0).ledger.trained.ranges() == []


def test_the_progress_is_recovered(layout: Layout) -> None:
    recovered = recover(layout, 4)
    progress = recovered.progress
    assert recovered.unknown == {}
    assert (progress.next_consumer_step, progress.producer_future_step, progress.target_upto_future_step) == (4, 6, 3)
    assert progress.target_samples == progress.consumed_samples == {"math": 4, "chat": 2}
    assert (progress.model_step, progress.replay_buffer_saved, progress.batch_groups) == (3, True, 2)
    assert progress.produced_samples == {"math": 0, "chat": 0}
    resumed = recover(layout, 2).progress
    assert resumed.produced_samples == {"math": 4, "chat": 1}
    assert resumed.produced_tokens == {"math": 30, "chat": 10}
    assert resumed.failed_samples == {"math": 4, "chat": 0}
    assert resumed.raw_rewards_sum == {"math": 7.5, "chat": 1.0}
    assert resumed.raw_rewards_count == {"math": 8, "chat": 1}
    assert resumed.produce_time_s == pytest.approx({"math": 11.04, "chat": 0.7})


def test_the_payloads_are_read_with_every_value(layout: Layout) -> None:
    recovered = recover(layout, 4)
    places = [(uid, member, where) for uid, each in recovered.places.items() for member, where in each.items()]
    blobs = PayloadReader(layout, TAG).read_many(places)
    assert sorted(blobs) == [(6, 0), (6, 1), (8, 0), (9, 0), (9, 1), (10, 0)]
    header, rollout = unpack(blobs[6, 1])
    assert (header.uid, header.task, header.epoch, header.index) == (6, "math", 0, 5)
    assert (header.member, header.attempt, header.life) == (1, 1, 0)
    assert (rollout.reward, rollout.oldest, rollout.newest, rollout.tokens) == (1.25, 1, 2, 5)
    solver, judge = rollout.traces
    assert (solver.agent, solver.policy, judge.agent, judge.policy) == ("solver", "big", "judge", "")
    assert {name: (value.dtype, value.tolist()) for name, value in solver.tensors.items()} == {
        "ids": (torch.int64, [0, 1, 2, 3, 4, 5]),
        "logprobs": (torch.float16, [-0.5] * 6),
        "done": (torch.bool, True),
        "image": (torch.uint8, [[[5] * 3] * 2] * 2),
        "nothing": (torch.float32, []),
    }
    assert solver["nothing"].shape == (0, 2)
    assert judge["ids"].tolist() == [5]
    assert set(rollout.info) == {"text", "pair", "by number"}
    assert (rollout.info["text"], rollout.info["pair"]) == ("ok \ud83d", (5, 2**70))
    nothing, nan, zero = rollout.info["by number"][7]
    assert (nothing, math.isnan(nan), zero) == (None, True, b"\x00")
    _, said = unpack(blobs[8, 0])
    assert said.info == {"said": "\U0001f600"}
    assert said["noise"].tolist() == NOISE


def test_the_segments_hold_what_their_footers_say(layout: Layout) -> None:
    kinds = {
        name: [f.header.kind for f in scan(os.path.join(layout.segments, name), run_tag=TAG)]
        for name in layout.list_segments()
    }
    assert kinds == {
        "000001-0000-000001.fbs": [PAYLOAD] * 5 + [FOOTER],
        "000001-0000-000002.fbs": [PAYLOAD] * 5 + [FOOTER],
        "000001-0000-000003.fbs": [PAYLOAD] * 2,
        "000002-0000-000001.fbs": [PAYLOAD] * 4 + [FOOTER],
    }


def test_what_was_attached_is_read_with_every_value(layout: Layout) -> None:
    state = read_generation(find_generations(layout, RUN_ID).complete[4], ["learner"])["learner"]
    assert (state["weight"].dtype, state["weight"].tolist()) == (torch.bfloat16, [[6.0] * 3] * 2)
    assert state["tied"] is state["weight"]
    assert list(state["moments"]) == [0, 1]
    assert (state["moments"][0].tolist(), state["moments"][1]) == ([3.0, 1 / 3], None)
    assert state["trained"] == [(1, 1), (1, 0), (2, 6), (2, 1), (3, 4), (3, 0)]
    assert (state["best"], state["big"], state["betas"]) == (-math.inf, 2**70, (0.9, 0.999))
    assert (state["empty"].shape, state["empty"].dtype, state["dtype"]) == ((0, 4), torch.bool, torch.float16)


def test_reading_changes_nothing_and_gives_the_same_again(layout: Layout) -> None:
    before = tree(layout.directory)
    assert items(recover(layout, 4)) == items(recover(layout, 4))
    assert recover(layout, 3).ledger.snapshot() == recover(layout, 3).ledger.snapshot()
    assert tree(layout.directory) == before


@pytest.mark.virtual_time
async def test_the_run_goes_on_to_its_end_and_its_files_stay_as_they_were(layout: Layout) -> None:
    before = tree(layout.directory)
    learner = Learner()
    async with Pipeline(tasks(), OPTIONS, directory=layout.directory, inline=True) as pipe:
        pipe.attach(learner=learner)
        resumed = await pipe.resume()
        assert (resumed.step, resumed.version, resumed.generation) == (3, 3, 4)
        assert (resumed.buffered, resumed.waiting, resumed.repeated) == (3, 3, 1)
        async with pipe.weight_update(version=3):
            pass
        await pipe.start()
        first = True
        async for batch in pipe.batches(2):
            assert batch.repeated is first
            assert not first or batch.uids == [6, 8]
            first = False
            learner.train(batch.step, [group.index for group in batch])
            async with pipe.weight_update(version=batch.step):
                pass
        pipe.ledger.check()
        totals = pipe.ledger.totals
        assert (totals["chat"].claimed, totals["chat"].trained) == (3, 3)
        assert (totals["math"].claimed, totals["math"].trained, totals["math"].dropped) == (16, 14, {"failed": 2})
    indices = [index for _, index in learner.trained]
    assert len(indices) == 17
    assert learner.trained[:6] == [(1, 1), (1, 0), (2, 6), (2, 1), (3, 4), (3, 0)]
    after = tree(layout.directory)
    assert {path: after[path] for path in before} == before


POSITIONS = [(1, 58, 4224), (2, 7, 576)]
EVENTS = 82
NOISE = [0.7247682660980186, 0.3008589750712163, 0.792129024507652]
NEWEST: dict[int, tuple[Any, ...]] = {
    6: ("math", 0, 5, "buffered", [2, 2], [1, 1], [0, 0], 0, 0, 1, 2, 1, 2.5),
    8: ("chat", 0, 2, "buffered", [2], [2], [0], 1, 1, 1, 3, 1, 1.0),
    9: ("math", 0, 7, "buffered", [2, 2], [2, 2], [0, 0], 1, 1, 2, 3, 2, 3.5),
    10: ("math", 0, 2, "waiting", [2, 0], [2, 1], [0, 0], 2, 1, 2, 3, 2, 0.5),
    11: ("math", 1, 3, "waiting", [0, 0], [1, 1], [0, 0], 2, 0, None, 0, 0, 0.0),
    12: ("math", 1, 4, "waiting", [0, 0], [1, 0], [0, 0], 1, 0, None, 0, 0, 0.0),
}
OLDER: dict[int, tuple[Any, ...]] = {
    3: ("math", 0, 4, "buffered", [2, 2], [2, 2], [1, 1], 0, 0, 1, 2, 1, 2.0),
    4: ("math", 0, 6, "buffered", [2, 2], [1, 1], [0, 0], 0, 0, 1, 1, 1, 3.0),
    5: ("chat", 0, 1, "buffered", [2], [1], [0], 0, 0, 1, 1, 1, 1.0),
    6: ("math", 0, 5, "buffered", [2, 2], [1, 1], [0, 0], 0, 0, 1, 2, 1, 2.5),
    7: ("math", 0, 0, "buffered", [2, 2], [1, 1], [0, 0], 0, 0, 1, 2, 1, 0.0),
    8: ("chat", 0, 2, "buffered", [2], [2], [0], 1, 1, 1, 3, 1, 1.0),
    9: ("math", 0, 7, "buffered", [2, 2], [2, 2], [0, 0], 1, 1, 2, 3, 1, 3.5),
    10: ("math", 0, 2, "waiting", [2, 0], [2, 1], [0, 0], 2, 1, 2, 3, 1, 0.5),
    11: ("math", 1, 3, "waiting", [0, 0], [1, 1], [0, 0], 2, 0, None, 0, 0, 0.0),
    12: ("math", 1, 4, "waiting", [0, 0], [1, 0], [0, 0], 1, 0, None, 0, 0, 0.0),
}
