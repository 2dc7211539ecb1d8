"""Many lives of one run that fills a replay buffer, each ended in another way; what a list of its rows says must hold.

A life saves now and then, changes rows and priorities, goes back to an older step, is of another capacity, and has a
disk that fails once, or on which nothing more is written from some call on, as after a kill. Of every row that is
there, attempt and place are known: none is there twice, and those of an attempt are in their order, without a gap. No
item is lost.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from pipeline import Context, Damaged, ForebayError, Item, Pipeline, Prioritized, ReplayBuffer, Rollout, StoreError
from pipeline.checkpoint import verify
from tests.support.disk import ScriptedFiles
from tests.support.experience import ROWS, block, fed

ITEMS = 14
SEEDS = int(os.environ.get("FOREBAY_SOAK", "1")) * 20


class Trainer:
    """Its weights are the last step, and what it made of rows by that step."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


async def play(item: Item, ctx: Context) -> Rollout:
    """Rows say which attempt made them, in which order; some attempts fail between."""
    for part in range(3):
        await anyio.lowlevel.checkpoint()
        mark = float(item.uid * 100 + ctx.attempt)
        rows = block(item, part, ends=part == 2)
        await ctx.extend({**rows, "mark": np.full(ROWS, mark, np.float32)})
        if part == 0 and item.index % 5 == 0 and ctx.attempt == 1:
            raise ValueError("fell over")
    return Rollout(reward=float(item.index))


def rows_of(buffer: ReplayBuffer) -> list[tuple[int, int, int, int, float]]:
    """(key, index, place, mark, reward) of every row that is there."""
    if buffer.schema is None:
        return []
    keys = buffer.ring.keys()
    slots = buffer.ring.slots(keys)
    view = {name: buffer.ring.storage.view(name)[slots] for name in ("obs", "mark", "reward")}
    return [
        (int(key), int(obs[0]), int(obs[1]), int(mark), float(reward))
        for key, obs, mark, reward in zip(keys, view["obs"], view["mark"], view["reward"], strict=True)
    ]


def priorities(buffer: ReplayBuffer) -> list[float]:
    found = buffer.drawer.arrays()["priorities"]
    values: list[float] = np.asarray(found).tolist()
    return values


class Lives:
    """The run, as its lives see it one after the other."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = str(directory), random.Random(seed)
        self.steps: set[int] = set()
        self.faults: list[Exception] = []
        self.options: dict[str, Any] = {
            "durability": self.random.choice(["kill", "kill", "power", "none"]),
            "after_crash": self.random.choice(["reuse", "reuse", "discard"]),
            "keep": self.random.choice([1, 2, None]),
            "segment_bytes": self.random.choice([1500, 4000, 1 << 20]),
            "concurrency": self.random.choice([1, 3]),
        }
        self.capacities = self.random.choice([[10], [40], [1000], [10, 40], [4, 1000]])

    def pipe(self, files: Any = None) -> tuple[Pipeline, ReplayBuffer, Trainer]:
        capacity = self.random.choice(self.capacities)
        buffer, trainer = ReplayBuffer(capacity, select=Prioritized(), seed=4), Trainer()
        pipe = fed(
            buffer, ITEMS, run=play, directory=self.directory, files=files or ScriptedFiles(), max_deaths=99,
            **self.options,
        )  # fmt: skip
        return pipe, buffer, trainer

    async def one(self, *, kill_at: int = 0, fail_at: int = 0) -> None:
        files = ScriptedFiles(kill_at, stays=True, torn=True) if kill_at else ScriptedFiles(fail_at)
        pipe, buffer, trainer = self.pipe(files)
        try:
            with contextlib.suppress(ForebayError):
                async with pipe:
                    pipe.attach(trainer=trainer)
                    older = (
                        self.random.choice(sorted(self.steps)) if self.steps and self.random.random() < 0.3 else None
                    )
                    try:
                        found = await pipe.resume(older)
                    except Damaged as error:
                        self.faults.append(error)
                        return
                    except StoreError:  # that one is not kept, or the disk fails
                        return
                    self.check(buffer, trainer, found.step, pipe)
                    async with pipe.weight_update(version=found.version):
                        pass
                    await pipe.start()
                    for step in range(found.step + 1, found.step + 1 + self.random.randrange(1, 6)):
                        await self.train(pipe, buffer, trainer, step)
        finally:
            files.end()

    async def train(self, pipe: Pipeline, buffer: ReplayBuffer, trainer: Trainer, step: int) -> None:
        dice = self.random
        batch = await pipe.sample(4)
        buffer.update_priorities(batch.keys, np.asarray(batch["reward"]) + step)
        if dice.random() < 0.5:
            buffer.write_back(batch.keys[:2], {"reward": np.full(2, -float(step), np.float32)})
        trainer.step = step
        for _ in range(dice.randrange(SEEDS)):
            await anyio.lowlevel.checkpoint()
        if dice.random() < 0.3:
            async with pipe.weight_update(version=step, running=dice.choice(["keep", "abort"])):
                pass
        pipe.ledger.check()
        if dice.random() < 0.7:
            saving = await pipe.save(step)
            if dice.random() < 0.7:
                with contextlib.suppress(ForebayError):
                    await saving.committed()
                    self.steps.add(step)
                assert buffer.ring.before_overwriting is None, "nothing is copied for a save that has ended"
        else:
            await pipe.ack(step)

    def check(self, buffer: ReplayBuffer, trainer: Trainer, step: int, pipe: Pipeline) -> None:
        assert trainer.step == step
        pipe.ledger.check()
        rows = rows_of(buffer)
        made = Counter((index, place, mark) for _, index, place, mark, _ in rows)
        assert not made or max(made.values()) == 1, "no row of an attempt is there twice"
        by_attempt: dict[int, list[int]] = {}
        for _, _, place, mark, _ in rows:
            by_attempt.setdefault(mark, []).append(place)
        for places in by_attempt.values():
            assert places == list(range(places[0], places[0] + len(places))), "in their order, without a gap"
        assert all(reward == place or -step <= reward <= -1 for _, _, place, _, reward in rows)
        assert buffer.statistics().open_episodes == 0

    async def to_the_end(self) -> None:
        """A last life, in peace: every item is done, and what it saved comes back."""
        pipe, buffer, trainer = self.pipe()
        async with pipe:
            pipe.attach(trainer=trainer)
            found = await pipe.resume()
            self.check(buffer, trainer, found.step, pipe)
            async with pipe.weight_update(version=found.version):
                pass
            await pipe.start()
            state = pipe._run.state
            with anyio.fail_after(20):
                await state.changed.wait_for(lambda: not pipe.ledger.outstanding and pipe._run.producer.drained)
            totals = pipe.ledger.totals["numbers"]
            assert totals.claimed == totals.retired == ITEMS
            trainer.step = found.step + 1
            await (await pipe.save(trainer.step)).committed()
            expected = rows_of(buffer), priorities(buffer), [buffer.sample(3).keys.tolist() for _ in range(3)]
        assert verify(self.directory).whole
        self.capacities = [buffer.options.capacity]
        pipe, buffer, trainer = self.pipe()
        async with pipe:
            pipe.attach(trainer=trainer)
            await pipe.resume()
            found_now = rows_of(buffer), priorities(buffer), [buffer.sample(3).keys.tolist() for _ in range(3)]
            assert found_now == expected


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_ends_its_lives_the_run_ends_with_every_item_done(tmp_path: Path, seed: int) -> None:
    lives = Lives(tmp_path / "run", seed)
    dice = lives.random
    for _ in range(5):
        kind = dice.choice(["peace", "killed", "killed", "failing"])
        at = dice.randrange(1, 90)
        await lives.one(kill_at=at if kind == "killed" else 0, fail_at=at if kind == "failing" else 0)
    await lives.to_the_end()
    assert not lives.faults
