"""A script that is asynchronous throughout: weights, staleness, checkpoints. Run it twice: the second goes on.

python examples/async_script.py runs/async
"""

import sys

import anyio
import torch

from forebay import Pipeline, Retry, Rollout, SequenceSource, Task

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
served = {"weight": 0.0, "bias": 0.0}  # what the rollouts use, as an inference server would hold it


async def measure(item, ctx):
    """A rollout: the policy's guess for y = 3x + 1, scored."""
    await anyio.sleep(0.001)
    guess = served["weight"] * item["x"] + served["bias"]
    answer = 3 * item["x"] + 1
    return Rollout({"x": [item["x"]], "y": [answer]}, reward=-abs(guess - answer))


def push(weights):
    served.update(weight=weights.weight.item(), bias=weights.bias.item())


def train_step(batch):
    x = torch.cat([rollout["x"] for rollout in batch.rollouts]).float()[:, None]
    y = torch.cat([rollout["y"] for rollout in batch.rollouts]).float()[:, None]
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


async def main(directory):
    source = SequenceSource([{"x": n / 10} for n in range(-20, 20)])
    task = Task("line", source=source, run=measure, group_size=2, epochs=None, on_failure=Retry(attempts=3), timeout=10)
    async with Pipeline(task, directory=directory, max_staleness=2, concurrency=32) as pipe:
        pipe.attach(model=model, optimizer=optimizer)
        resumed = await pipe.resume()
        async with pipe.weight_update(version=resumed.version):
            push(model)
        await pipe.start()
        print(f"from step {resumed.step}, {resumed.buffered} finished groups came back")
        async for batch in pipe.batches(groups=8, until=resumed.step + 200):
            loss = train_step(batch)
            async with pipe.weight_update(version=batch.step):
                push(model)
            if batch.step % 50 == 0:
                await pipe.save(batch.step)
                print(f"step {batch.step}: loss {loss:.4f}, staleness {batch.staleness}, saved")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "runs/async")
