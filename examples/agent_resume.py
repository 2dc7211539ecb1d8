"""Three kinds of agents, killed five times at random, beside the same run left in peace: both train the same.

python examples/agent_resume.py [--seed 0]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter

import anyio

from forebay import Pipeline, Retry, Rollout, SequenceSource, Task

KILLS = 5
GROUPS = 8
SPEEDS = {"browse": 0.250, "code": 0.060, "chat": 0.010}  # seconds of a turn


class Weights:
    """Stands for a model: remembers what it was trained on, and goes back with the checkpoint."""

    def __init__(self):
        self.trained = []

    def state_dict(self):
        return {"trained": self.trained}

    def load_state_dict(self, state):
        self.trained = list(state["trained"])


def agent(seconds):
    async def run(item, ctx):
        before = ctx.partial  # what an attempt had that was killed
        turns = [] if before is None else before.info["turns"]
        while len(turns) < 4:
            await anyio.sleep(seconds * (0.5 + ctx.rng.random()))
            turns.append(f"turn {len(turns)} of attempt {ctx.attempt}")
            ctx.save_partial(Rollout(info={"turns": turns}))
        if ctx.rng.random() < 0.1:
            raise RuntimeError("the tool was not there")
        return Rollout(reward=float(ctx.rng.random()), info={"turns": turns})

    return run


def tasks():
    return [
        Task(
            name,
            source=SequenceSource([{"prompt": f"{name} {n}"} for n in range(24 * share)]),
            run=agent(seconds),
            group_size=2,
            share=share,
            on_failure=Retry(attempts=20),
        )
        for (name, seconds), share in zip(SPEEDS.items(), (1, 2, 3), strict=True)
    ]


async def train(directory):
    weights = Weights()
    async with Pipeline(tasks(), directory=directory, concurrency=48, capacity=40, max_deaths=20) as pipe:
        pipe.attach(weights=weights)
        resumed = await pipe.resume()
        async with pipe.weight_update(version=resumed.version):
            pass
        await pipe.start()
        print(
            f"  from step {resumed.step}: {resumed.buffered} finished groups and {resumed.waiting} cut ones, "
            f"{resumed.repeated} batches again",
            flush=True,
        )
        async for batch in pipe.batches(groups=GROUPS):
            weights.trained += [f"{group.task}/{group.index}" for group in batch]
            await anyio.sleep(0.05)
            if batch.step % 3 == 0:
                await pipe.save(batch.step)
        pipe.ledger.check()
    print(json.dumps(weights.trained))


def start(directory):
    command = [sys.executable, __file__, "--directory", directory]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    print(child.stdout.readline(), end="", flush=True)  # it has resumed, and works
    return child


def main(seed):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        print("left in peace")
        peaceful = Counter(json.loads(start(os.path.join(folder, "peaceful")).communicate()[0].splitlines()[-1]))
        killed = os.path.join(folder, "killed")
        for number in range(KILLS):
            print(f"to be killed, {number + 1} of {KILLS}")
            child = start(killed)
            time.sleep(chance.uniform(0.05, 0.3))
            child.kill()
            child.communicate()
            print(f"  ended by signal {-child.returncode}")
        print("to the end")
        survived = Counter(json.loads(start(killed).communicate()[0].splitlines()[-1]))
    print("task     items   in peace   killed five times")
    for name in SPEEDS:
        counts = [sum(n for key, n in found.items() if key.startswith(name)) for found in (peaceful, survived)]
        items = len({key for key in peaceful | survived if key.startswith(name)})
        print(f"{name:<8} {items:5}   {counts[0]:8}   {counts[1]:17}")
    twice = sum(count > 1 for count in survived.values())
    print(f"the same trained: {peaceful == survived}; trained twice: {twice}")
    return 0 if peaceful == survived and not twice else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory")
    given = parser.parse_args()
    if given.directory:
        anyio.run(train, given.directory)
    else:
        sys.exit(main(given.seed))
