"""Processes of a served run: one holds the pipeline, others train. Told through pipes when to go on."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import torch

from pipeline import Context, Item, Pipeline, Rollout, Task, connect
from pipeline.errors import EndOfSource
from tests.support.runs import numbers

GROUPS = 4
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint64, torch.uint32, torch.uint16),
    torch.bool,
)


async def rich(item: Item, ctx: Context) -> Rollout:
    """A rollout of every dtype, of no elements, of no dimensions, with text and bytes beside it."""
    n = item["n"]
    tensors: dict[str, Any] = {str(dtype): torch.arange(n, n + 3).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(n), "noise": ctx.rng.random(4)}
    info = {"text": f"item {n} é 火", "bytes": bytes([n]), "list": [1, None, {"deep": 2.5}]}
    traces = [{**tensors}, {"second": torch.full((n % 3, 2), n)}]
    return Rollout(traces, reward=n / 3, info=info, tokens=n)


async def large(item: Item, ctx: Context) -> Rollout:
    """A rollout of 25 MB."""
    return Rollout({"x": torch.full((25 << 18,), item["n"], dtype=torch.float32)}, reward=1.0)


async def plain(item: Item, ctx: Context) -> Rollout:
    """A small rollout."""
    return Rollout({"n": [item["n"]]}, reward=float(item["n"]))


def pipeline(directory: str | None, count: int, run: Any = plain, **options: Any) -> Pipeline:
    """The pipeline of all of them."""
    task = Task("numbers", source=numbers(count), run=run, group_size=2, shuffle=False)
    usual: dict[str, Any] = {"watchdog": None, "order": "strict", "max_deaths": 10**6}
    return Pipeline([task], directory=directory, **{**usual, **options})


def produce(pipe: Connection, directory: str | None, count: int, kind: str, options: dict[str, Any]) -> None:
    """Hold the pipeline until the trainers are done; go back when one was lost. Says ("serving", address) each time."""

    async def hold() -> bool:
        async with pipeline(directory, count, globals()[kind], **options) as held:
            await held.resume()
            await held.start(weights_current=True)
            serving = await held.serve()
            pipe.send(("serving", serving.address))
            lost = await serving.ended()
            held.ledger.check()
            pipe.send(("lost" if lost else "done", held.statistics().groups.trained))
            return lost

    async def main() -> None:
        while await hold():
            pass

    anyio.run(main)


class Tally:
    """Stands for the weights: how often each item was trained. It goes back with the checkpoint."""

    def __init__(self, files: str) -> None:
        self.seen: dict[str, int] = {}
        if files:
            with open(os.path.join(files, "tally.json")) as file:
                self.seen = json.load(file)

    def train(self, indices: list[int]) -> None:
        for index in indices:
            self.seen[str(index)] = self.seen.get(str(index), 0) + 1

    def write(self, folder: str) -> None:
        with open(os.path.join(folder, "tally.json"), "w") as file:
            json.dump(self.seen, file)


def train(pipe: Connection, run: str, stop_at: dict[str, int], everywhere: bool = False) -> None:
    """Train to the end, every second step saved. At the places named it says so, and waits to be killed; or it says so
    ``everywhere``, and goes on."""

    def at(place: str, step: int) -> None:
        if everywhere:
            pipe.send((place, step))
        elif stop_at.get(place) == step:
            pipe.send((place, step))
            pipe.recv()

    with connect(run).sync() as held:
        tally = Tally(held.joined.files)
        with held.weight_update(held.joined.version):  # whoever was before may have been killed amid a push
            pass
        while True:
            try:
                batch = held.get_batch(GROUPS)
            except EndOfSource:
                break
            at("leased", batch.step)
            tally.train([group.index for group in batch])
            if batch.step % 3 == 0:
                with held.weight_update(batch.step):
                    at("pushing", batch.step)
                at("pushed", batch.step)
            if batch.step % 2:
                held.ack(batch.step)
                at("acked", batch.step)
                continue
            with held.checkpoint(batch.step) as folder:
                tally.write(folder)
                at("saving", batch.step)
            at("saved", batch.step)
        with held.checkpoint(held._client._opened().now.step) as folder:
            tally.write(folder)
    pipe.send(("finished", tally.seen))


def take(pipe: Connection, run: str, part: tuple[int, int] | None, groups: int) -> None:
    """Take batches as told: ("get",), ("ack", step), ("read",); says what came of it."""
    with connect(run, part=part).sync() as held:
        pipe.send(("joined", held.joined.step))
        batch = None
        while (told := pipe.recv()) is not None:
            if told[0] == "get":
                try:
                    batch = held.get_batch(groups)
                    pipe.send(("batch", batch.step, batch.uids))
                except EndOfSource as error:
                    pipe.send(("end", str(error)))
            elif told[0] == "ack":
                held.ack(told[1])
                pipe.send(("acked", told[1]))
            elif told[0] == "update":
                with held.weight_update(told[1]):
                    pipe.send(("updating", told[1]))
                    pipe.recv()
            elif told[0] == "fork":  # as a loader of data does
                number = os.fork()
                if number == 0:
                    signal.pause()
                pipe.send(("forked", number))
            elif told[0] == "read":
                assert batch is not None
                before = peak(reset=True)
                total = float(sum(rollout["x"].sum() for rollout in batch.rollouts))
                pipe.send(("read", total, peak() - before))


def peak(process: int | str = "self", *, reset: bool = False) -> int:
    """Return the most bytes of memory that a process has had, from the last reset on."""
    if reset:
        with open(f"/proc/{process}/clear_refs", "w") as file:
            file.write("5")
    with open(f"/proc/{process}/status") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
