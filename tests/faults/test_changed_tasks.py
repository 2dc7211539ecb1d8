"""Options that are not what they were in the life before: reported, and honoured from the next draw; or refused."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import anyio
import pytest

from pipeline import Pipeline, Resumed, Task, UsageError
from tests.support.crashes import Trained, finish, inline_pipeline, lasting, train
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time


def task(name: str = "a", count: int = 24, **more: Any) -> Task:
    more.setdefault("shuffle", False)
    return Task(name, source=numbers(count), run=lasting({}, 1.0), **more)


def make(directory: str, *tasks: Task, **options: Any) -> Pipeline:
    return inline_pipeline(list(tasks), directory=directory, concurrency=2, capacity=12, **options)


async def first_life(directory: str, *tasks: Task, **options: Any) -> None:
    async with make(directory, *tasks, **options) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.start()
        batch = await pipe.get_batch(4)
        await train(pipe, trained, batch)
        await (await pipe.save(1)).committed()
        await anyio.sleep(0.3)


async def test_nothing_changed_nothing_reported(run_directory: str, caplog: pytest.LogCaptureFixture) -> None:
    await first_life(run_directory, task())
    async with make(run_directory, task()) as pipe:
        pipe.attach(trained=Trained())
        assert (await pipe.resume()).changed == {}
    assert "task.changed" not in caplog.text


async def test_each_change_is_reported_and_logged(run_directory: str, caplog: pytest.LogCaptureFixture) -> None:
    await first_life(run_directory, task("a"), task("b"))
    with caplog.at_level(logging.WARNING, logger="forebay"):
        tasks = (task("a", share=3, group_size=2, timeout=9), task("c"))
        async with make(run_directory, *tasks, max_staleness=5, batch_groups=4) as pipe:
            pipe.attach(trained=Trained())
            resumed = await pipe.resume()
    assert resumed.changed == {
        "max_staleness": "None -> 5",
        "batch_groups": "None -> 4",
        "tasks.a.share": "1.0 -> 3.0",
        "tasks.a.group_size": "1 -> 2",
        "tasks.a.min_group": "1 -> 2",
        "tasks.a.timeout": "None -> 9",
        "tasks.b": "gone",
        "tasks.c": "new",
    }
    told = [record.getMessage() for record in caplog.records if "task.changed" in record.getMessage()]
    assert len(told) == len(resumed.changed)
    for what in resumed.changed:
        assert any(f"what={what}" in line for line in told), what


async def test_a_group_size_counts_from_the_next_draw(run_directory: str) -> None:
    await first_life(run_directory, task())
    async with make(run_directory, task(group_size=3)) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.resume()
        claimed = pipe.ledger.next_uid
        await pipe.start(weights_current=True)
        async for batch in pipe.batches(groups=4):
            for group in batch:
                assert len(group) == (1 if group.uid < claimed else 3)
            await train(pipe, trained, batch)
    assert trained.items == list(range(24))


async def test_a_share_counts_from_the_next_draw(run_directory: str) -> None:
    await first_life(run_directory, task("a"), task("b"))
    drawn: list[str] = []
    async with make(run_directory, task("a", share=3), task("b")) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.resume()
        claimed = pipe.ledger.next_uid
        await pipe.start(weights_current=True)
        async for batch in pipe.batches(groups=4):
            drawn += [group.task for group in batch if group.uid >= claimed]
            await train(pipe, trained, batch)
            if len(drawn) > 16:
                break
    shares = Counter(drawn[:16])
    assert shares["a"] in (11, 12, 13)


async def test_another_batch_size_is_honoured(run_directory: str) -> None:
    await first_life(run_directory, task())
    async with make(run_directory, task()) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.resume()
        await pipe.start(weights_current=True)
        await finish(pipe, trained, 6)
    assert [len(batch) for batch in trained.batches] == [4, 6, 6, 6, 2]
    assert trained.items == list(range(24))


@pytest.mark.parametrize("shuffle", [True, False])
async def test_another_order_in_the_midst_of_an_epoch_is_refused(run_directory: str, shuffle: bool) -> None:
    await first_life(run_directory, task(shuffle=not shuffle))
    async with make(run_directory, task(shuffle=shuffle)) as pipe:
        pipe.attach(trained=(trained := Trained()))
        with pytest.raises(UsageError, match=rf"shuffle={shuffle}.*shuffle={not shuffle}"):
            await pipe.resume()
        assert trained.batches == []
    async with make(run_directory, task(shuffle=shuffle)) as pipe:
        pipe.attach(trained=(trained := Trained()))
        resumed: Resumed = await pipe.resume(restart=["a"])
        assert "tasks.a.shuffle" in resumed.changed
        await pipe.start(weights_current=True)
        await finish(pipe, trained, 4)
    assert Counter(trained.items[4:]).total() == 24


async def test_another_order_is_allowed_between_two_epochs(run_directory: str) -> None:
    async with make(run_directory, task(count=8, shuffle=False)) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.start()
        async for batch in pipe.batches(groups=4):
            await train(pipe, trained, batch)
        await (await pipe.save(2)).committed()
    async with make(run_directory, task(count=8, shuffle=True, epochs=2)) as pipe:
        pipe.attach(trained=(trained := Trained()))
        await pipe.resume()
        await pipe.start(weights_current=True)
        await finish(pipe, trained, 4)
    assert Counter(trained.items) == dict.fromkeys(range(8), 2)
