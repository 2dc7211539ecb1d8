"""Runners in worker processes: they do what they do in this one, and are told the same when they fail."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from pipeline import (
    ConfigError,
    Context,
    EndOfSource,
    Item,
    Pipeline,
    ProcessEngine,
    ReplayBuffer,
    RolloutFailed,
    RolloutInvalid,
    RunnerRaised,
    Skip,
    Task,
    UsageError,
    WorkerFailed,
)
from pipeline.runner.policies import check_rollout
from pipeline.store.codec import pack
from tasks import threaded
from tests.support import in_workers
from tests.support.bells import Bell, bell_in
from tests.support.runs import numbers, pipeline, task
from tests.support.workers import engine, gone, items, one, rollouts, run_all, runner

KINDS = [pytest.param(None, "", id="plain"), pytest.param(2, "_async", id="async")]
"""How many attempts a worker runs at once, and what the names of the runners end with."""


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    with bell_in(tmp_path) as made:
        yield made


# -- what a runner sees --------------------------------------------------------------------------------------------


async def test_a_plain_runner_runs_in_the_main_thread_of_a_small_process_and_sees_its_attempt() -> None:
    content = {"n": 3, "array": np.arange(3), "tuple": (1, 2)}
    where = engine(env={"FOREBAY_TEST": "yes"})
    given = Task("look", source=items({"n": 3, "tuple": (1, 2)}), run=in_workers.whole, group_size=2, timeout=50)
    found = await run_all(given, where, seed=7)
    local = await run_all(task(1, in_workers.number_async, group_size=2), None, seed=7)
    for member, (rollout, expected) in enumerate(zip(found, local, strict=True)):
        info = rollout.info
        assert info["pid"] != os.getpid()
        assert (info["parent"], info["group"]) == (os.getpid(), info["pid"])
        assert info["main_thread"]
        assert info["ctx"][:4] == [0, member, 1, 0]
        assert info["ctx"][4].endswith(f"/0/{member}/1")
        assert info["ctx"][5:] == ["train", False]
        assert info["item"] == ["look", 0, 0, 0]
        assert info["content"] == {"n": 3, "tuple": (1, 2)}
        assert 0 < info["left"] <= 50
        assert (info["partial"], info["env"]) == (None, "yes")
        assert info["loaded"] == [], "a runner that needs no torch does not pay for it"
        assert rollout.reward == expected["noise"][0].item()
        assert gone(info["pid"])
    tried = await Pipeline.try_one(Task("t", source=items(content), run=in_workers.whole), engine=engine())
    np.testing.assert_array_equal(tried.info["content"]["array"], np.arange(3))
    assert tried.info["left"] == float("inf")


async def test_a_plain_runner_has_its_process_to_itself() -> None:
    async with engine() as where:
        # One that is named is imported by workers only.
        assert (await one(where, "tests.support.in_workers:number", {"n": 2})).reward == 2.0
        assert (await one(where, in_workers.runs_a_loop)).info == {"said": 5}
        # Signals are left to the parent, but not by what a runner starts.
        assert (await one(where, in_workers.sends_signals)).info == {"child": -signal.SIGTERM}
        # What cannot be had there says so by its name.
        said = (await one(where, in_workers.asks)).info
        assert said["scoring"].startswith("UsageError: ctx.scoring() is not offered in a worker process")
        assert (said["version_changed"], said["extend"]) == (False, 0), "with no run around it"
        assert said["no_such_thing"].startswith("AttributeError")


async def test_what_a_worker_writes_disturbs_nobody_and_its_log_is_the_runs(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = await run_all(task(2, in_workers.says), engine())
    assert [rollout.reward for rollout in found] == [0.0, 1.0]
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line] == ["on stdout 0", "straight", "on stdout 1", "straight"]
    assert ["on stderr 0" in err, "on stderr 1" in err] == [True, True]
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("looked")]
    assert len(lines) == 2
    for part in ("task=numbers", "uid=1", "member=0", "attempt=1", "pieces=3", "Strange()"):
        assert part in lines[1]


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_worker", "kind"), KINDS)
async def test_failures_are_counted_and_retried_as_in_this_process(per_worker: int | None, kind: str) -> None:
    told = []
    for where in (engine(per_worker=per_worker), None):
        run = in_workers.fails_async if where is None else runner("fails", kind)
        async with pipeline(task(7, run), engine=where, concurrency=1) as pipe:
            await pipe.start()
            found = await rollouts(pipe)
            totals = pipe.ledger.totals["numbers"]
            draws = [rollout["noise"].tolist() for rollout in found]
            told.append((draws, totals.failed, totals.interrupted, totals.finished))
    assert told[0] == told[1]
    assert told[0][1:] == (6, 0, 7)


async def test_an_error_arrives_with_its_type_its_message_and_where_it_was_raised() -> None:
    async with pipeline(task(1, in_workers.always_fails, on_failure="fail_fast"), engine=engine()) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match=r"attempt 1: OwnError: never$") as caught:
            await pipe.get_batch(1)
    cause = caught.value.__cause__
    assert isinstance(cause, RunnerRaised)
    assert (str(cause), cause.type_name) == ("OwnError: never", "OwnError")
    assert "in always_fails" in cause.traceback
    assert any("in always_fails" in note for note in cause.__notes__)


def judged(returned: Any, item: Item) -> str:
    """What a pipeline says of what a runner returned."""
    try:
        fault = check_rollout(returned, item)
        if fault is None:
            pack(returned, item, member=0, attempt=1, life=0, versions=(0, 0))
    except RolloutInvalid as error:
        return f"{type(error).__name__}: {error}"
    return fault or "stored"


@pytest.mark.parametrize(("per_worker", "kind"), KINDS)
async def test_what_is_no_good_rollout_is_refused_with_the_words_of_this_process(
    per_worker: int | None, kind: str
) -> None:
    given = Task("odd", source=numbers(1), run=runner("returns", kind))
    async with engine(per_worker=per_worker) as where:
        for what in in_workers.RETURNED:
            item = Item("odd", 0, 0, 0, {"what": what})
            told = judged(await where.run(given, item, Context(item, 0, 1, 0)), item)
            assert told == judged(in_workers.returns(item, None), item) != "stored", what
        if kind:
            said = (await one(where, in_workers.asks_async)).info
            assert said["scoring"].startswith("UsageError: ctx.scoring() is not offered in a worker process")
            assert said["version_changed"].startswith("UsageError: ctx.version_changed is not offered to an async run")


@pytest.mark.parametrize(("what", "failed"), [("strange", 0), ("deep", 1)])
async def test_a_run_ends_by_what_is_no_rollout_and_goes_on_where_the_data_are_at_fault(what: str, failed: int) -> None:
    given = Task("odd", source=items({"what": what}), run=in_workers.returns, on_failure=Skip())
    async with pipeline(given, engine=engine()) as pipe:
        await pipe.start()
        with pytest.raises(EndOfSource if failed else RolloutInvalid):
            await pipe.get_batch(1)
        assert pipe.ledger.totals["odd"].failed == failed


async def test_an_item_that_cannot_travel_fails_its_attempt_with_what_it_is() -> None:
    given = Task("odd", source=items({"x": in_workers.Strange()}), run=in_workers.number, on_failure="fail_fast")
    async with pipeline(given, engine=engine()) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match=r"its content goes to a worker process, and a Strange .*\$\.x"):
            await pipe.get_batch(1)


# -- options and tasks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("workers", value) for value in (0, -1, 1.5, "2", True)],
        *[("per_worker", value) for value in (0, -1, 1.5, True)],
        *[("grace_s", value) for value in (0, -1, None, "1", float("nan"))],
        *[("env", value) for value in ({"A": 1}, {"A=B": "1"}, {"": "1"}, {"A": "\0"}, ["A"])],
    ],
)
def test_an_option_out_of_range_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ProcessEngine({option: value})
    assert caught.value.option == option
    with pytest.raises(ConfigError, match="no option 'worker'"):
        ProcessEngine(worker=2)


def test_workers_are_as_many_as_there_are_processors_if_nothing_is_said() -> None:
    assert ProcessEngine().options.count == len(os.sched_getaffinity(0))
    assert ProcessEngine(ProcessEngine(workers=3).options, grace_s=2).options.to_dict() == {
        "workers": 3,
        "per_worker": None,
        "grace_s": 2,
        "env": {},
    }


@pytest.mark.parametrize(
    ("given", "where", "match"),
    [
        ({"run": in_workers.number}, None, r"must be an async function .* threaded\(\), or run in worker processes"),
        ({"run": "a:b"}, None, "must be an async function"),
        ({"run": in_workers.number_async, "resource": "a:b"}, None, "names are for runners in worker processes"),
        ({"run": lambda item, ctx: None}, engine, "is a lambda. Write it as a function at the top level"),
        ({"run": in_workers.number, "resource": lambda: None}, engine, "resource: .* is a lambda"),
        ({"run": in_workers.uses, "resource": in_workers.counter_async("x")}, engine, "is open in one process"),
        ({"run": threaded(in_workers.number)}, lambda: engine(per_worker=1), "is not what .*:number is"),
    ],
)
async def test_a_task_that_the_engine_cannot_run_is_refused_before_anything_is_opened(
    given: dict[str, Any], where: Any, match: str, run_directory: str
) -> None:
    refused = Task("t", source=numbers(1), **given)
    with pytest.raises(ConfigError, match=match):
        Pipeline(refused, engine=where and where(), directory=run_directory)
    assert not os.path.exists(run_directory)
    with pytest.raises(ConfigError, match=match):
        await Pipeline.try_one(refused, engine=where and where())
    async with pipeline(engine=where and where()) as pipe:
        await pipe.start()
        with pytest.raises(ConfigError, match=match):
            await pipe.evaluate(refused)


def test_no_more_attempts_are_begun_than_there_are_places() -> None:
    def concurrency(given: Sequence[Task], **options: Any) -> int:
        return Pipeline(given, engine=ProcessEngine(workers=3, **options), concurrency=50).options.concurrency

    plain, here = task(1, in_workers.number, "plain"), task(1, name="here")
    assert concurrency([plain]) == 3
    assert concurrency([here]) == 50
    assert concurrency([plain, here]) == 50
    assert concurrency([here], per_worker=4) == 12
    assert concurrency([plain, here], per_worker=4) == 15


async def test_an_engine_is_opened_once_and_calls_nothing_before() -> None:
    where = engine()
    with pytest.raises(UsageError, match="inside `async with engine`"):
        await where.call(in_workers.add, 1)
    async with where:
        assert where.processes == 0, "nothing is started before it is needed"
    with pytest.raises(UsageError, match="opened before"):
        await where.__aenter__()
    with pytest.raises(WorkerFailed, match="closed"):
        await where.call(in_workers.add, 1)


async def test_a_runner_that_workers_cannot_import_ends_the_run() -> None:
    async with engine() as where:
        for run, why in (
            ("no_such_module:play", "no_such_module:play cannot be imported: ModuleNotFoundError"),
            ("tests.support.in_workers:no_such", "AttributeError"),
            ("tests.support.in_workers:number_async", "is an async function: give the function itself"),
        ):
            told: Any = await one(where, run)
            assert isinstance(told, WorkerFailed)
            assert why in str(told)
    missing = task(5, "no_such_module:play")
    async with pipeline(missing, engine=engine()) as pipe:
        await pipe.start()
        with pytest.raises(WorkerFailed, match="no_such_module"):
            await pipe.get_batch(1)
    async with pipeline(engine=engine()) as pipe:
        await pipe.start()
        with pytest.raises(WorkerFailed, match="no_such_module"):
            await pipe.evaluate(task(5, "no_such_module:play", "other"))


async def test_workers_that_cannot_start_end_the_run_with_what_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline(task(5, in_workers.number), engine=engine(env={"PYTHONHOME": "/nowhere"})) as pipe:
        await pipe.start()
        with pytest.raises(WorkerFailed, match=r"3 in a row; the last: worker process \d+ left with exit code 1 bef"):
            await pipe.get_batch(1)
    monkeypatch.setattr("sys.executable", "/no/such/python")
    async with engine() as where:
        with pytest.raises(WorkerFailed, match=r"cannot be started: .*No such file"):
            await where.call(in_workers.add, 1)


# -- resources -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_worker", "kind"), KINDS)
async def test_each_worker_opens_the_resource_of_a_task_for_itself_and_closes_it(
    per_worker: int | None, kind: str, bell: Bell
) -> None:
    """Two tasks, one of which uses a resource."""
    given = [
        task(12, runner("uses", kind), resource=functools.partial(runner("counter", kind), bell.path)),
        task(12, runner("number", kind), "other"),
    ]
    found = await run_all(given, engine(2, per_worker))
    assert sorted(rollout["n"].item() for rollout in found) == sorted([*range(12)] * 2)
    by_worker: dict[int, list[int]] = {}
    for rollout in found:
        if "uses" in rollout.info:
            by_worker.setdefault(rollout.info["pid"], []).append(rollout.info["uses"])
    said = Counter(map(tuple, bell.heard()))
    for pid in by_worker:
        opened = said.pop(("opened", str(pid)))
        assert opened == said.pop(("closed", str(pid)))
        assert 1 <= opened <= (per_worker or 1)
    assert not said
    if not kind:
        assert all(sorted(uses) == list(range(1, len(uses) + 1)) for uses in by_worker.values())


async def test_an_error_inside_an_engine_leaves_it_as_it_is() -> None:
    async def fail() -> None:
        async with engine() as where:
            await where.call(in_workers.add, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with anyio.move_on_after(0):
        async with engine() as where:
            await where.call(in_workers.add, 1)


async def test_a_resource_that_cannot_be_opened_fails_the_attempt() -> None:
    async with engine() as where:
        with pytest.raises(RunnerRaised, match=r"^ConnectionRefusedError: no server\n"):
            await one(where, in_workers.uses, resource=in_workers.broken)
        with pytest.raises(RunnerRaised, match=r"^RunnerError: .* returned 5, which is no context manager"):
            await one(where, in_workers.uses, resource="tests.support.in_workers:no_manager")


# -- verbs of the context ------------------------------------------------------------------------------------------


async def test_a_parked_rollout_waits_for_its_reward() -> None:
    async with pipeline(task(1, in_workers.parks), engine=engine()) as pipe:
        await pipe.start()
        await pipe._run.state.changed.wait_for(lambda: bool(pipe.ledger.parked))
        await pipe.reward(0, 5.0)
        assert (await pipe.get_batch(1)).rewards.tolist() == [5.0]


async def test_what_an_attempt_kept_is_gone_on_from_and_tensors_of_every_kind_arrive_as_they_were(
    run_directory: str,
) -> None:
    """Two things in one run, as both need a worker with torch, which takes seconds."""
    given = [task(1, in_workers.keeps, "keeps", share=2), task(1, in_workers.tensors, "tensors")]
    async with pipeline(given, engine=engine(), directory=run_directory) as pipe:
        await pipe.start()
        kept, found = await rollouts(pipe)
        assert kept["made"].tolist() == [1, 1, 2], "its worker died after two parts"
        assert pipe.ledger.totals["keeps"].interrupted == 1
    item = Item("x", 0, 0, 0)
    expected = in_workers.tensors(item, Context(item, 0, 1, 0))
    assert [trace.tensors.keys() for trace in found] == [trace.tensors.keys() for trace in expected]
    for name, value in expected.traces[0].tensors.items():
        want, have = torch.as_tensor(np.ascontiguousarray(value) if name == "numpy" else value), found[name]
        assert (have.dtype, have.shape) == (want.dtype, want.shape), name
        assert torch.equal(have, want), name
    assert found.info == expected.info
    assert (found.reward, found.oldest, found.newest, found.tokens) == (1.0, 0, 0, 7)


async def test_what_cannot_be_kept_is_refused() -> None:
    (found,) = await run_all(task(1, in_workers.keeps_what_cannot_be_kept), engine())
    assert found.info["error"].startswith("RolloutInvalid: item 0 of epoch 0 of task 'numbers' (uid 0): field 'x'")
    async with pipeline(task(1, in_workers.keeps_what_cannot_be_kept_async), engine=engine(per_worker=1)) as pipe:
        await pipe.start()
        assert len(await rollouts(pipe)) == 1
        assert pipe.ledger.totals["numbers"].failed == 1


async def test_a_runner_is_told_that_the_weights_have_changed(bell: Bell) -> None:
    given = Task("wait", source=items({"bell": bell.path}), run=in_workers.until_changed)
    async with pipeline(given, engine=engine()) as pipe:
        await pipe.start()
        assert await bell.hear() == ["began"]
        async with pipe.weight_update(version=1, running="keep"):
            pass
        batch = await pipe.get_batch(1)
        assert [(rollout.oldest, rollout.newest) for rollout in batch.rollouts] == [(0, 1)]


@pytest.mark.parametrize(("per_worker", "kind"), KINDS)
async def test_rows_of_an_episode_go_into_the_runs_buffer(per_worker: int | None, kind: str) -> None:
    buffer = ReplayBuffer(100)
    async with Pipeline(
        task(4, runner("plays", kind)), engine=engine(2, per_worker), buffer=buffer, watchdog=None
    ) as pipe:
        await pipe.start()
        batch = await pipe.sample(256)
        while len(buffer) < 24:
            batch = await pipe.sample(256)
        assert sorted({obs.item() // 10 for obs in batch["obs"]}) == [0, 1, 2, 3]
        assert torch.equal(batch["next_obs"], batch["obs"] + 1)
        pipe.ledger.check()
