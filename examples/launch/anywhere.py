"""One script, wherever it is started: rollouts in this process or in Ray actors, one trainer or several ranks.

python examples/launch/anywhere.py runs/any                                      rollouts in this process
python examples/launch/anywhere.py runs/any --engine ray                         in actors of a cluster
torchrun --standalone --nproc-per-node 2 examples/launch/anywhere.py runs/any    two ranks, which share each batch

The first rank holds the pipeline, and every rank is a client of it. Each item is trained once, in any of these; started
again with the same folder, it goes on, in the same way or in another one.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

from forebay import Pipeline, RayEngine, Rollout, SequenceSource, Task, connect

ITEMS, GROUPS = 48, 8


async def measure(item, ctx):
    """A rollout: a point of a line, with noise that is the item's own, wherever it is made."""
    x = item["x"]
    return Rollout({"x": [x], "y": [3 * x + 1 + 0.01 * ctx.rng.normal()]}, reward=1.0)


@contextlib.contextmanager
def held(directory, engine):
    """Hold the pipeline, and serve it to all ranks."""
    source = SequenceSource([{"x": n / ITEMS} for n in range(ITEMS)])
    task = Task("line", source=source, run=measure)
    # In draw order, batches are the same however long rollouts take.
    with Pipeline(task, engine=engine, directory=directory, order="strict").sync() as pipe:
        pipe.resume()
        pipe.serve()
        yield


def train(pipe, rank, size, until):
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    joined = pipe.joined
    if joined.files:  # of the newest generation
        state = torch.load(f"{joined.files}/trainer.pt", weights_only=True)
        model.load_state_dict(state["model"])
    if rank == 0:
        with pipe.weight_update(version=joined.version):
            pass  # here an inference server gets the weights
        pipe.start()
    together(size)
    for batch in pipe.batches(groups=GROUPS, until=until):
        x, y = (torch.tensor([[each[name].item()] for each in batch.rollouts]) for name in ("x", "y"))
        loss = (model(x) - y).square().sum() / GROUPS
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            if size > 1:
                dist.all_reduce(weight.grad)
        optimizer.step()
        if rank == 0:
            with pipe.weight_update(version=batch.step):
                pass
            with pipe.checkpoint(batch.step) as folder:  # these files and the run are committed as one
                torch.save({"model": model.state_dict()}, f"{folder}/trainer.pt")
        print(f"step {batch.step}, rank {rank}: trained items {[group.index for group in batch]}.", flush=True)
    print(f"rank {rank}: weight {model.weight.item():.4f}.", flush=True)


def together(size):
    """Wait for the other ranks."""
    if size > 1:
        dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--until", type=int, default=ITEMS // GROUPS, help="the last step")
    given = parser.parse_args()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    engine = RayEngine(actors=2, per_actor=4) if given.engine == "ray" and rank == 0 else None
    with held(given.directory, engine) if rank == 0 else contextlib.nullcontext():
        together(size)  # from here on it is served
        with connect(given.directory, part=(rank, size)).sync() as pipe:
            train(pipe, rank, size, given.until)
        together(size)  # the first rank leaves last
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
