"""Pipelines of several ranks, as threads, that are killed, and what the weights have seen of them in the end."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec

from pipeline import Context, EndOfSource, Item, Pipeline, Ranks, Rollout, Task
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader
from pipeline.sync_form import SyncPipeline
from tests.support.crashes import crashed_copy
from tests.support.ranks import fine, on_ranks
from tests.support.runs import numbers

GROUPS = 6
"""Of a batch, on all ranks together."""
COUNTS = {"a": 54, "b": 9}
EPOCHS = {"a": 1, "b": 2}
ITEMS = sum(COUNTS[name] * EPOCHS[name] for name in COUNTS)


class Seen:
    """Stands for weights that all ranks train alike: the uids that they have seen, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = [list(each) for each in state["steps"]]

    @property
    def count(self) -> Counter[int]:
        return Counter(uid for step in self.steps for uid in step)


async def uneven(item: Item, ctx: Context) -> Rollout:
    """What comes of it hangs on the item; the odd ones take longer, so ranks are not equally far, and some a while."""
    await anyio.sleep(0.0005 * (item["n"] % 5) + 0.002 * (item.uid % 2) + 0.02 * (item["n"] % 7 == 1))
    if item["n"] % 9 == 4 and ctx.partial is None:
        ctx.save_partial(Rollout({"n": [item["n"]], "half": [item.uid]}))
    return Rollout({"n": [item["n"]], "noise": ctx.rng.random(2)}, reward=float(item["n"]))


def tasks(share: float = 6.0) -> list[Task]:
    """Two tasks; the first has so many times the other's share."""
    shares = {"a": share, "b": 1.0}
    return [
        Task(name, source=numbers(count), run=uneven, share=shares[name], group_size=2, epochs=EPOCHS[name])
        for name, count in COUNTS.items()
    ]


def opened(ranks: Ranks, directory: Path, **options: Any) -> SyncPipeline:
    how: dict[str, Any] = {"watchdog": None, "seed": 3, "keep": None, "max_deaths": 99, "segment_bytes": 2000}
    given = tasks(options.pop("share", 6.0))
    return Pipeline(given, directory=str(directory), ranks=ranks, **{**how, "concurrency": 8, **options}).sync()


def live(
    directory: Path, size: int, steps: int, *, more: int = 0, copy: Path | None = None, **options: Any
) -> list[Seen]:
    """Train some steps with so many ranks and save every other, then some more that are not saved, and copy the folder
    as a kill leaves it. With ``steps`` 0 train to the end. Return what each rank's weights have seen."""
    anew: dict[str, Any] = {"rebalance": options.pop("rebalance")} if "rebalance" in options else {}

    def run(ranks: Ranks) -> Seen:
        seen = Seen()
        with opened(ranks, directory, **options) as pipe:
            pipe.attach(seen=seen)
            begun = pipe.resume(**anew)
            assert begun.step == len(seen.steps), "the weights and the run went back to different steps"
            pipe.ledger.check()
            pipe.start(weights_current=True)
            _train(pipe, ranks, seen, begun.step, steps, more)
            pipe.ledger.check()
            if copy is not None and ranks.first:
                crashed_copy(str(directory), copy)
            ranks.all("copied")
        return seen

    return fine(on_ranks(size, run, timeout_s=30.0))


def _train(pipe: SyncPipeline, ranks: Ranks, seen: Seen, begun: int, steps: int, more: int) -> None:
    last = begun
    with suppress(EndOfSource):  # so few may be left that there are not so many steps
        for batch in pipe.batches(GROUPS, until=begun + steps + more if steps else None):
            together = ranks.all("trained", [group.uid for group in batch])
            seen.steps.append(sorted(uid for each in together for uid in each))
            last = batch.step
            with pipe.weight_update(version=last):
                pass
            if steps and last <= begun + steps and (last - begun) % 2 == 0:
                pipe.save(last).committed()
    if not steps:
        pipe.save(last).committed()


def killed(folder: Path, *sizes: int, steps: int = 4, more: int = 2, **options: Any) -> Path:
    """A run that so many ranks trained for some steps, and were killed, and then so many; as the last ones left it."""
    directory = folder / "life0"
    for number, size in enumerate(sizes, 1):
        copy = folder / f"life{number}"
        live(directory, size, steps, more=more, copy=copy, **options)
        directory = copy
    return directory


def trained_to_the_end(directory: Path, size: int, **options: Any) -> Counter[int]:
    """Train all that is left with so many ranks. Return how often each uid was trained, all lives together."""
    seen = live(directory, size, 0, **options)
    assert all(each.steps == seen[0].steps for each in seen)
    return seen[0].count


EVERY = dict.fromkeys(range(ITEMS), 1)


def found_by(directory: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    """Return what each of some ranks finds when it resumes: its items with what was made of them, batches that are to
    be handed out again, its draws, how the order stands, and the progress. Changes the run, as a resume does."""
    anew: dict[str, Any] = {"rebalance": options.pop("rebalance")} if "rebalance" in options else {}

    def run(ranks: Ranks) -> dict[str, Any]:
        with opened(ranks, directory, **options) as pipe:
            pipe.attach(seen=Seen())
            pipe.resume(**anew)
            return _state(pipe, directory)

    return fine(on_ranks(size, run, timeout_s=30.0))


def _state(pipe: SyncPipeline, directory: Path) -> dict[str, Any]:
    state: Any = pipe._run.state
    snapshot = dict(state.ledger.snapshot())
    for entry in snapshot["entries"].values():
        del entry["made"]  # a life of before, in either case
    sampler = state.sampler
    wanted = [
        (uid, member, place)
        for uid in state.ledger.entries
        if uid in state.buffer.storage
        for member, (_, place) in state.buffer.storage.get(uid).items()
        if place is not None
    ]
    layout = Layout(str(directory))
    marker = layout.read_run()
    assert marker is not None
    reader = PayloadReader(layout, marker.tag)
    return {
        **snapshot,
        "payloads": {key: bytes(blob) for key, blob in reader.read_many(wanted).items()},
        "partials": {(uid, member): bytes(part.blob) for uid, member, part in state.partials.items()},
        "pending": [msgspec.to_builtins(lease) for lease in state.pending],
        "reserved": [(each.number, each.task, each.epoch, each.index) for each in sampler.reserved.values()],
        "turns": ((sampler.next - sampler.base) % sampler.size, sampler.next),
        "cursors": {name: (each.epoch, each.position, each.length) for name, each in sampler.cursors.items()},
        "shares": (sampler.mixture.shares, sampler.mixture.drawn),
        "progress": msgspec.to_builtins(state.progress),
    }
