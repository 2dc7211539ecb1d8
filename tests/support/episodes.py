"""Runs whose rollouts fill a replay buffer, to be taken apart: what there is of them, and what they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, ReplayBuffer, Rollout
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.records import Added
from pipeline.store.frames import PAYLOAD
from pipeline.store.journal import read_journals
from pipeline.store.layout import Layout
from pipeline.waiting import Signal
from tests.support.crashes import crashed_copy
from tests.support.experience import ROWS, Agent, block, contents, fed, filled, reaches, resumed, walk, written
from tests.support.salvaging import frames

ITEMS = 20


def make(**options: Any) -> ReplayBuffer:
    """A buffer with priorities."""
    options.setdefault("capacity", 1000)
    return ReplayBuffer(options.pop("capacity"), select={"select": "prioritized"}, seed=3, **options)


def draws(buffer: ReplayBuffer, count: int = 20) -> list[list[int]]:
    """What is drawn next."""
    return [buffer.sample(16).keys.tolist() for _ in range(count)]


async def state_of(
    directory: str | Path, count: int = ITEMS, *, capacity: int = 1000, attach: bool = True, **options: Any
) -> Any:
    """All that a resume finds: rows with their marks, what the next draws are, and where every item is."""
    buffer, agent = make(capacity=capacity), Agent()
    async with fed(buffer, count, directory=str(directory), **options) as pipe:
        if attach:
            pipe.attach(agent=agent)
        found = await resumed(pipe)
        pipe.ledger.check()
        ring = buffer.ring
        keys = ring.keys()
        marks = {}
        if buffer.schema is not None:
            slots = ring.slots(keys)
            names = ("#episode", "#place", "#behind", "#version", "#end")
            marks = {name: ring.storage.view(name)[slots].tolist() for name in names}
            marks["following"] = ring.following(keys).tolist()
            marks["mass"] = buffer.drawer.mass(keys).tolist()
        state = buffer.state_dict()["state"]
        counts = {name: state[name] for name in ("limiter", "generator", "next_episode", "open_episodes")}
        items = {uid: (entry.task, entry.index, entry.kind) for uid, entry in pipe.ledger.entries.items()}
        totals = pipe.ledger.totals
        drawn = draws(buffer, 3) if len(buffer) else []
        cursors = {name: (each.epoch, each.position) for name, each in pipe._run.state.sampler.cursors.items()}
        return (
            found.step,
            agent.seen,
            keys.tolist(),
            contents(buffer),
            marks,
            counts,
            items,
            {name: (each.claimed, each.retired, each.retired_early, each.rows) for name, each in totals.items()},
            drawn,
            cursors,
        )


async def goes_on(directory: Path, count: int = ITEMS, run: Any = walk, **options: Any) -> Counter[tuple[int, int]]:
    """Play what is left; return how often each row is there."""
    buffer, agent = make(), Agent()
    async with fed(buffer, count, run=run, directory=str(directory), **options) as pipe:
        pipe.attach(agent=agent)
        assert (await resumed(pipe)).step == len(agent.seen)
        before = contents(buffer)
        await pipe.start()
        await filled(pipe)
        assert contents(buffer)[: len(before)] == before
        pipe.ledger.check()
        await (await pipe.save(pipe.ledger.step)).committed()
    assert verify(str(directory)).whole
    return Counter(contents(buffer))


class Gate:
    """Lets so many blocks in."""

    def __init__(self) -> None:
        self.left, self.changed = 0, Signal()

    async def let_in(self, pipe: Pipeline, buffer: ReplayBuffer, blocks: int) -> None:
        """Each is written before the next one comes."""
        for _ in range(blocks):
            self.left += 1
            self.changed.notify()
            await reaches(pipe, buffer, buffer.ring.added + ROWS)
            await written(pipe)

    async def walk(self, item: Item, ctx: Context) -> Rollout:
        """One to four blocks, each once it is let in."""
        parts = 1 + item.index % 4
        for part in range(parts):
            await self.changed.wait_for(lambda: self.left > 0)
            self.left -= 1
            await ctx.extend(block(item, part, ends=part == parts - 1))
        return Rollout()


async def two_lives(folder: Path, **options: Any) -> str:
    """A run that was saved, killed, resumed, saved and killed again, with rows that came after the last save, attempts
    that failed, and a column that was written back."""
    first, run = str(folder / "life 1"), str(folder / "run")
    second = str(folder / "life 2")
    for directory, target in ((first, second), (second, run)):
        buffer, agent, gate = make(**options), Agent(), Gate()
        async with fed(buffer, ITEMS, directory=directory, run=gate.walk, concurrency=4) as pipe:
            pipe.attach(agent=agent)
            begun = (await resumed(pipe)).step
            await pipe.start()
            await gate.let_in(pipe, buffer, 8)
            for _ in range(3):
                batch = await pipe.sample(8)
                buffer.update_priorities(batch.keys, agent.train(batch))
            keys = buffer.ring.keys()
            buffer.write_back(keys[::5], {"reward": 1000.0 + keys[::5]})
            await (await pipe.save(begun + 3)).committed()
            await gate.let_in(pipe, buffer, 8)
            crashed_copy(directory, target)
    return run


def added_later(directory: str) -> list[Added]:
    """Rows that came after the newest generation."""
    layout = Layout(directory)
    marker = layout.read_run()
    assert marker is not None
    manifest = find_generations(layout, marker.run_id).complete[-1].manifest
    positions = {each.incarnation: each.sequence for each in manifest.journals}
    every = read_journals(layout, run_tag=marker.tag)
    found = [each.event for each in every if each.sequence > positions.get(each.incarnation, 0)]
    return [event for event in found if isinstance(event, Added)]


def payloads(directory: str) -> Iterator[tuple[str, int, int]]:
    """Segment, offset and length of every payload."""
    for path in sorted((Path(directory) / "segments").iterdir()):
        for frame in frames(directory, f"segments/{path.name}"):
            if frame.header.kind == PAYLOAD:
                yield f"segments/{path.name}", frame.offset, frame.header.length


def fill(directory: Path, items: int) -> None:
    """A run that has played some items, of which a generation holds about half, and has ended."""

    async def play() -> None:
        buffer, gate = make(), Gate()
        async with fed(buffer, items, directory=str(directory), run=gate.walk, concurrency=1) as pipe:
            await pipe.start()
            await gate.let_in(pipe, buffer, items)
            await pipe.sample(4)
            await (await pipe.save(1)).committed()
            gate.left = 4 * items
            gate.changed.notify()
            await filled(pipe)

    anyio.run(play)
