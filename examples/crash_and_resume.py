"""Kills itself in the middle of training, goes on, and shows that nothing was lost and nothing trained twice.

python examples/crash_and_resume.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile

import anyio
import torch

from forebay import Pipeline, Rollout, SequenceSource, Task

ITEMS = 240


class Tally:
    """Stands for a model: counts how often each item was trained, and goes back with the checkpoint."""

    def __init__(self):
        self.seen = torch.zeros(ITEMS, dtype=torch.int64)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen.copy_(state["seen"])


async def work(item, ctx):
    await anyio.sleep(0.002 + 0.004 * ctx.rng.random())
    return Rollout({"n": [item["n"]]}, reward=1.0)


async def train(directory, die_at):
    tally = Tally()
    task = Task("count", source=SequenceSource([{"n": n} for n in range(ITEMS)]), run=work)
    # An item whose rollout became too old is run again as often as it takes: without max_rerolls= it is dropped, with a
    # warning, after the third time.
    options = {"max_staleness": 2, "max_rerolls": 1000, "concurrency": 16}
    async with Pipeline(task, options, directory=directory) as pipe:
        pipe.attach(tally=tally)
        resumed = await pipe.resume()
        async with pipe.weight_update(version=resumed.version):
            pass
        await pipe.start()
        print(
            f"  from step {resumed.step}: {resumed.buffered} finished groups and {resumed.waiting} cut ones came back, "
            f"{resumed.repeated} batches are handed out again",
            flush=True,
        )
        async for batch in pipe.batches(groups=8):
            tally.seen[[group.index for group in batch]] += 1
            async with pipe.weight_update(version=batch.step):
                pass
            if batch.step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if batch.step % 4 == 0:
                await pipe.save(batch.step)
        await pipe.save(pipe.ledger.step)
    print(json.dumps({"never": int((tally.seen == 0).sum()), "twice": int((tally.seen > 1).sum())}))


def main():
    with tempfile.TemporaryDirectory() as directory:
        for die_at in (7, 14, 22, 0):
            print(f"run{f', to be killed at step {die_at}' if die_at else ', to the end'}", flush=True)
            done = subprocess.run(
                [sys.executable, __file__, os.path.join(directory, "run"), str(die_at)],
                stdout=subprocess.PIPE,
                text=True,
            )
            print(done.stdout, end="")
        counts = json.loads(done.stdout.splitlines()[-1])
    print(f"{ITEMS} items: {counts['never']} never trained, {counts['twice']} trained twice")
    return 0 if counts == {"never": 0, "twice": 0} else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(train, sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
