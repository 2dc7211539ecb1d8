"""Another reader, written from ``docs/format.md`` alone, finds in a run's folder what the library finds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task, Trace
from pipeline.checkpoint.generations import choose, find_generations
from pipeline.checkpoint.lines import find_line
from pipeline.intervals import IntervalSet
from pipeline.ledger import STATES
from pipeline.records import Opened
from pipeline.sampler import DrawPlan
from pipeline.store.codec import unpack
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader
from pipeline.wiring.recovery import Recovered, recover_run
from tests.golden import make_v1, make_v1b, make_v1c, make_v1d
from tests.support import independent_reader
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, train
from tests.support.disk import tree
from tests.support.runs import numbers

GOLDEN = Path(__file__).parents[1] / "golden"
STATE = {"waiting": "waiting", "parked": "parked", "finished": "buffered"}
FINISHED = 2


def recovered(directory: str, tasks: Sequence[Task], seed: int) -> Recovered:
    """What the library finds."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    stored = choose(find_generations(layout, run.run_id), None, directory)
    manifest = stored.manifest
    return recover_run(
        layout,
        stored,
        [DrawPlan(task.name, task.source, task.share, task.epochs, task.shuffle) for task in tasks],
        run_tag=run.tag,
        seed=seed,
        opened=Opened(99, 0, manifest.generation, manifest.step, manifest.step, seed),
        line=find_line(layout, run.tag, manifest, discard=False),
    )


def assert_the_same(directory: str, tasks: Sequence[Task], seed: int = 0) -> independent_reader.Run:
    """Both readers find the same, uid for uid, reward for reward, tensor for tensor. Returns what the other found."""
    before = tree(directory)
    found, other = recovered(directory, tasks, seed), independent_reader.Run(directory)
    ledger = found.ledger
    assert other.step == ledger.step
    assert other.trained == expanded(ledger.trained)
    assert other.dropped == expanded(ledger.dropped)
    assert {uid: describe(item) for uid, item in other.items.items()} == {
        uid: (
            *(entry.task, entry.epoch, entry.index, STATES[entry.state], list(entry.members), entry.life),
            *(entry.need, sorted(found.places.get(uid, {}))),
        )
        for uid, entry in ledger.entries.items()
    }
    run = Layout(directory).read_run()
    assert run is not None
    for uid, places in found.places.items():
        blobs = PayloadReader(Layout(directory), run.tag).read_many((uid, m, at) for m, at in places.items())
        item, given = other.items[uid], dict(ledger.entries[uid].given)
        rewards = {}
        for (_, member), blob in blobs.items():
            header, rollout = unpack(blob)
            if ledger.entries[uid].members[member] == FINISHED:
                rewards[member] = given.get(member, header.reward)
            assert_equal(item.tensors[member], rollout.traces)
        assert item.rewards == rewards
        assert sum(rewards.values()) == pytest.approx(ledger.entries[uid].rewards)
    assert tree(directory) == before
    return other


def expanded(uids: IntervalSet) -> set[int]:
    return {uid for first, last in uids.ranges() for uid in range(first, last + 1)}


def describe(item: Any) -> tuple[Any, ...]:
    return (
        *(item.task, item.epoch, item.index, STATE[item.state], item.members, item.life),
        *(item.need, sorted(item.places)),
    )


def assert_equal(tensors: dict[str, torch.Tensor], traces: Sequence[Trace]) -> None:
    expected = {
        f"{number}.{name}": value for number, trace in enumerate(traces) for name, value in trace.tensors.items()
    }
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize(
    ("name", "tasks", "seed"),
    [
        ("v1", make_v1.tasks(), 11),
        ("v1b", make_v1b.tasks(), 0),
        ("v1c", [make_v1c.task()], 0),
        ("v1d", [make_v1d.task()], 0),
    ],
    ids=["v1", "v1b", "v1c", "v1d"],
)
def test_the_golden_runs_at_every_generation(name: str, tasks: list[Task], seed: int, tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    shutil.copytree(GOLDEN / name, directory, ignore=shutil.ignore_patterns("every_event.fbj"))
    kept = 0
    while newest := sorted(Path(directory, "generations").iterdir()):
        found = assert_the_same(directory, tasks, seed)
        kept += sum(len(item.tensors) for item in found.items.values())
        shutil.rmtree(newest[-1])
    assert kept >= 20


async def mixed(item: Item, ctx: Context) -> Rollout:
    """By the item's number: 3, 9, 15: all fail; 4, 10: one fails for good; 1, 6, 11: the second member is parked."""
    await anyio.sleep(1.0 + ctx.member / 7 + item["n"] / 100)
    n = item["n"]
    if n % 6 == 3 or (n % 6 == 4 and ctx.member == 2):
        raise ValueError(f"nothing for {n}")
    if n % 5 == 1 and ctx.member == 1:
        ctx.park()
    traces = [
        Trace({"ids": torch.arange(n + ctx.member), "p": torch.full((2, n % 3), 0.5, dtype=torch.bfloat16)}, "solver"),
        Trace({"ids": torch.tensor(n, dtype=torch.uint8)}, "judge", "frozen"),
    ]
    return Rollout(traces, reward=n + ctx.member / 4, tokens=n)


def given(**more: Any) -> Task:
    return Task(
        "numbers",
        source=numbers(48),
        run=mixed,
        group_size=3,
        min_group=2,
        shuffle=False,
        on_failure=Retry(attempts=2),
        filter=lambda group: group[0]["ids"].shape != (13,),
        **more,
    )


def opened(directory: str, **options: Any) -> Pipeline:
    return inline_pipeline(
        given(),
        directory=directory,
        concurrency=9,
        capacity=9,
        max_staleness=4,
        segment_bytes=1500,
        keep=None,
        **options,
    )


async def live(directory: str, target: str, steps: int, *, buffer: bool = True, **options: Any) -> str:
    """Train so many steps, save after each but the last, and die while a batch is out."""
    async with opened(directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        for step in range(steps):
            await train(pipe, trained, await pipe.get_batch(2))
            if step < steps - 1:
                await (await pipe.save(len(trained.batches), replay_buffer=buffer)).committed()
            for place, uid in enumerate(sorted(pipe.ledger.parked)):
                await (pipe.discard(uid) if place % 3 == 1 else pipe.reward(uid, -uid / 8, member=1))
            await anyio.sleep(1.1)
        await pipe.get_batch(2)
        return crashed_copy(directory, target)


virtual = pytest.mark.virtual_time


@virtual
async def test_a_run_of_three_lives_that_crashed(tmp_path: Path) -> None:
    folder, states = str(tmp_path / "0"), set[str]()
    for life in range(1, 4):
        folder = await live(folder, str(tmp_path / str(life)), 3)
        found = assert_the_same(folder, [given()])
        states |= {item.state for item in found.items.values()}
        assert any(item.members.count(independent_reader.GIVEN_UP) for item in found.items.values())
        assert found.trained
        assert found.dropped
    assert states == {"waiting", "parked", "finished"}


@virtual
async def test_a_batch_that_was_out_at_a_save_is_among_the_leases(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "run")) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await train(pipe, trained, await pipe.get_batch(2))
        out = await pipe.get_batch(2)
        await (await pipe.save(1)).committed()
        folder = crashed_copy(str(tmp_path / "run"), tmp_path / "left")
    assert [(lease["step"], lease["uids"]) for lease in assert_the_same(folder, [given()]).leases] == [(2, out.uids)]


@virtual
async def test_a_run_that_set_aside_what_came_after_its_generation(tmp_path: Path) -> None:
    first = await live(str(tmp_path / "0"), str(tmp_path / "1"), 3)
    full = independent_reader.Run(first)
    before = set(Path(first, "generations").iterdir())
    async with opened(first, after_crash="discard") as pipe:
        pipe.attach(trained=Trained())
        assert (await pipe.resume(step=1)).set_aside > 0
        await pipe.start(weights_current=True)
        await pipe.get_batch(2)
        second = crashed_copy(first, tmp_path / "2")
    found = assert_the_same(second, [given()])
    assert found.step == 1
    assert full.items.keys() - found.items.keys() - found.trained, "nothing was set aside"
    # Back to the line that was left: what set it aside does not count.
    for each in Path(second, "generations").iterdir():
        if each.name not in {name.name for name in before}:
            shutil.rmtree(each)
    found = assert_the_same(second, [given()])
    assert (found.step, found.items.keys()) == (2, full.items.keys())


@virtual
async def test_a_generation_without_its_buffer_and_the_life_after_it(tmp_path: Path) -> None:
    first = await live(str(tmp_path / "0"), str(tmp_path / "1"), 3, buffer=False)
    found = assert_the_same(first, [given()])
    assert not any(item.tensors for item in found.items.values())
    second = await live(first, str(tmp_path / "2"), 3)
    Path(second, "journals", "000001-0000.fbj").write_bytes(b"needed no more")
    assert any(item.tensors for item in assert_the_same(second, [given()]).items.values())


@virtual
async def test_a_fork_of_another_run(tmp_path: Path) -> None:
    first = await live(str(tmp_path / "0"), str(tmp_path / "1"), 3)
    fork = str(tmp_path / "fork")
    async with opened(fork) as pipe:
        pipe.attach(trained=Trained())
        await pipe.resume(from_=first)
        left = crashed_copy(fork, tmp_path / "left")
    found = assert_the_same(left, [given()])
    assert any(item.rewards for item in found.items.values())


@virtual
@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 100])
async def test_a_torn_end_ends_a_journal(tmp_path: Path, cut: int) -> None:
    folder = await live(str(tmp_path / "0"), str(tmp_path / "1"), 2)
    journal = Path(folder, "journals", "000001-0000.fbj")
    raw = journal.read_bytes()
    journal.write_bytes(raw[:-cut] if cut else raw + b"FBAY and no more")
    assert_the_same(folder, [given()])


@virtual
async def test_the_other_reader_refuses_damage(tmp_path: Path) -> None:
    folder = await live(str(tmp_path / "0"), str(tmp_path / "1"), 3)
    independent_reader.Run(folder)
    newest = max(Path(folder, "generations").iterdir())
    for path in [Path(folder, "journals", "000001-0000.fbj"), newest / "manifest.json", newest / "consumer.json"]:
        raw = path.read_bytes()
        path.write_bytes(raw[:90] + bytes([raw[90] ^ 1]) + raw[91:])
        with pytest.raises((AssertionError, ValueError)):
            independent_reader.Run(folder)
        path.write_bytes(raw)
    Path(folder, "journals", "000001-0000.fbj").unlink()
    with pytest.raises(FileNotFoundError):
        independent_reader.Run(folder)
