"""Waiting: woken by whoever changes the state, once, and never lost, whoever is cancelled or raises."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest

from pipeline.waiting import Signal


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_predicate_that_holds_does_not_wait() -> None:
    signal = Signal()
    await signal.wait_for(lambda: True)
    assert signal.waiters == 0


async def test_the_notifier_evaluates_the_predicate_and_wakes_nobody_for_nothing() -> None:
    signal, state, evaluated = Signal(), {"value": 0}, 0

    def predicate() -> bool:
        nonlocal evaluated
        evaluated += 1
        return state["value"] >= 2

    task = asyncio.ensure_future(signal.wait_for(predicate))
    await turns()
    assert (evaluated, signal.waiters) == (1, 1)
    state["value"] = 1
    signal.notify()
    assert evaluated == 2, "within the notifying call"
    await turns()
    assert evaluated == 2, "the waiter slept through it"
    state["value"] = 2
    await turns()
    assert not task.done(), "a change without a notification is seen by nobody"
    signal.notify()
    await turns()
    assert task.done()
    assert signal.waiters == 0


async def test_a_waiter_whose_predicate_no_longer_holds_waits_on() -> None:
    """Woken, but another took it first."""
    signal, items = Signal(), [1]
    got: list[str] = []

    async def take(name: str) -> None:
        await signal.wait_for(lambda: items)
        items.pop()
        got.append(name)

    items.clear()
    async with anyio.create_task_group() as group:
        for name in "ab":
            group.start_soon(take, name)
        await turns()
        items.append(1)
        signal.notify()
        await turns()
        assert got == ["a"]
        assert signal.waiters == 1
        items.append(2)
        signal.notify()
    assert got == ["a", "b"]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_an_item_handed_to_a_receiver_that_is_cancelled_stays(native: bool, cancelled_first: bool) -> None:
    """CASES 95: cancelled in the very turn in which the item comes; it is still obtainable, and once."""
    signal, items = Signal(), list[str]()
    scope = anyio.CancelScope()
    got: list[str] = []

    async def take() -> None:
        with scope:
            await signal.wait_for(lambda: items)
            got.append(items.pop())

    task = asyncio.ensure_future(take())
    await turns()
    cancel = task.cancel if native else scope.cancel
    if cancelled_first:
        cancel()
    items.append("x")
    signal.notify()
    if not cancelled_first:
        cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert got + items == ["x"]
    assert signal.waiters == 0


async def test_a_cancelled_waiter_that_was_woken_wakes_the_others_itself() -> None:
    signal, free = Signal(), [False]
    order: list[str] = []

    def may(name: str) -> bool:
        return free[0] and not (name == "second" and first.get_name() == "reserved")

    async def wait(name: str) -> None:
        await signal.wait_for(lambda: may(name))
        order.append(name)

    first = asyncio.ensure_future(wait("first"))
    first.set_name("reserved")
    await turns()
    second = asyncio.ensure_future(wait("second"))
    await turns()
    free[0] = True
    signal.notify()
    first.set_name("given up")
    first.cancel()
    await asyncio.wait_for(asyncio.gather(second, first, return_exceptions=True), 2)
    assert order == ["second"], "nobody else notifies: the cancelled one did"


async def test_a_predicate_that_raises_ends_its_own_wait_and_nobody_elses() -> None:
    signal, state = Signal(), {"broken": False, "ready": False}

    def raising() -> bool:
        if state["broken"]:
            raise ValueError("broken")
        return False

    bad = asyncio.ensure_future(signal.wait_for(raising))
    await turns()
    good = asyncio.ensure_future(signal.wait_for(lambda: state["ready"]))
    await turns()
    state.update(broken=True, ready=True)
    signal.notify()  # must not raise here: whoever changed the state has done nothing wrong
    await turns()
    assert good.done()
    with pytest.raises(ValueError, match="broken"):
        await bad
    assert signal.waiters == 0


async def test_items_are_neither_lost_nor_doubled_when_receivers_are_cancelled_at_random() -> None:
    """CASES 95, the fuzz: thousands of items, receivers that come, wait, and are cancelled."""
    rng = random.Random(3)
    signal, queue = Signal(), list[int]()
    got: list[int] = []

    async def receive() -> None:
        await signal.wait_for(lambda: queue)
        got.append(queue.pop(0))

    tasks = [asyncio.ensure_future(receive()) for _ in range(10)]
    for item in range(3000):
        queue.append(item)
        signal.notify()
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
        if rng.random() < 0.7:
            await asyncio.sleep(0)
        tasks = [task for task in tasks if not task.done()]
        tasks += [asyncio.ensure_future(receive()) for _ in range(10 - len(tasks))]
    for _ in range(3000):
        if not queue:
            break
        tasks += [asyncio.ensure_future(receive())]
        await asyncio.sleep(0)
    await turns()
    assert queue == []
    assert sorted(got) == list(range(3000))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert signal.waiters == 0
