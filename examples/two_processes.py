"""The rollouts in one process, the training in another, which may be killed. Run it twice: the second goes on.

python examples/two_processes.py runs/two         trains 40 steps, and saves every 20
python examples/two_processes.py runs/two 30      the trainer kills itself, SIGKILL, at step 30 of a new run

The first process holds the pipeline, and starts the second.
"""

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import torch

from forebay import Pipeline, Rollout, SequenceSource, Task, connect

STEPS = 40  # more than the last time


def served(directory):
    """Where the weights lie that rollouts use, as an inference server would hold them."""
    return Path(directory).with_suffix(".weights")


# -- the process of the rollouts ---------------------------------------------------------------------------------------


async def keep_training(directory, die_at):
    """Start the trainer, and again for as long as it is killed."""
    while True:
        command = [sys.executable, __file__, "train", directory, die_at]
        async with await anyio.open_process(command, stdout=None, stderr=None) as trainer:
            if await trainer.wait() == 0:
                return


async def produce(directory, die_at):
    async def measure(item, ctx):
        """A rollout: the policy's guess for y = 3x + 1, scored."""
        await anyio.sleep(0.001)
        weights = json.loads(served(directory).read_text())
        guess, answer = weights["weight"] * item["x"] + weights["bias"], 3 * item["x"] + 1
        return Rollout({"x": [item["x"]], "y": [answer]}, reward=-abs(guess - answer))

    source = SequenceSource([{"x": n / 10} for n in range(-20, 20)])
    task = Task("line", source=source, run=measure, group_size=2, epochs=None)
    async with Pipeline(task, directory=directory, max_staleness=2) as pipe:
        await pipe.resume()
        serving = await pipe.serve()  # the trainer pushes its weights, and starts the rollouts
        async with anyio.create_task_group() as group:
            group.start_soon(keep_training, directory, die_at)
            lost = await serving.ended()
            if lost:  # killed, with steps that it had not saved: the run goes back to where its weights are
                group.cancel_scope.cancel()
        return lost


# -- the process of the training ---------------------------------------------------------------------------------------


def train(directory, die_at):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def push():
        aside = served(directory).with_suffix(".part")
        aside.write_text(json.dumps({"weight": model.weight.item(), "bias": model.bias.item()}))
        aside.replace(served(directory))

    with connect(directory).sync() as pipe:
        joined = pipe.joined
        if joined.files:  # of the newest generation
            state = torch.load(f"{joined.files}/trainer.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        with pipe.weight_update(version=joined.version):
            push()
        if not joined.started:
            pipe.start()
        print(f"from step {joined.step}", flush=True)
        for batch in pipe.batches(groups=8, until=joined.step + STEPS):
            x = torch.cat([rollout["x"] for rollout in batch.rollouts]).float()[:, None]
            y = torch.cat([rollout["y"] for rollout in batch.rollouts]).float()[:, None]
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if batch.step == die_at and joined.incarnation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pipe.weight_update(version=batch.step):
                push()
            if batch.step % 20 == 0:
                with pipe.checkpoint(batch.step) as folder:  # these files and the run are committed as one
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, f"{folder}/trainer.pt")
                print(f"step {batch.step}: loss {loss.item():.4f}, staleness {batch.staleness}, saved", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]))
    else:
        directory = sys.argv[1] if len(sys.argv) > 1 else "runs/two"
        while anyio.run(produce, directory, sys.argv[2] if len(sys.argv) > 2 else "0"):
            print("the trainer was killed: going back with it", flush=True)
