"""Ranks fill and save one buffer, each its own shard: the training that the launch scripts beside it start.

torchrun --standalone --nproc-per-node 2 examples/launch/train_ranks.py runs/ranks --steps 200

Run the same command again after any end: it goes on from the newest generation. All ranks save at the same steps;
a SIGTERM is heard at the next of these, and ends the script there with code 143.
"""

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from forebay import Ranks, ReplayBuffer

ROWS, BATCH = 16, 64


def train(buffer, model, optimizer, steps, save_every, seconds):
    """Learn to tell a number from its parts; every rank plays by itself, and all of them share the gradients."""
    ranks = dist.get_world_size()
    for step in range(buffer.resume().step + 1, steps + 1):
        chance = np.random.default_rng([step, dist.get_rank()])
        parts = chance.normal(size=(ROWS, 4)).astype(np.float32)
        buffer.extend({"parts": parts, "whole": parts.sum(1)})
        batch = buffer.sample(BATCH)
        loss = nn.functional.mse_loss(model(batch["parts"]).squeeze(1), batch["whole"])
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= ranks
        optimizer.step()
        time.sleep(seconds)  # stands for what a step of a real training takes
        if step % save_every == 0:
            buffer.save(step, wait=True)  # a rank that was asked to stop does not return from here
            print(f"rank {dist.get_rank()}: step {step} is saved, loss {loss.item():.3g}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.01)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ReplayBuffer(10_000, directory=given.directory, seed=1, ranks=Ranks.torch()) as buffer:
        buffer.attach(model=model, optimizer=optimizer)
        train(buffer, model, optimizer, given.steps, given.save_every, given.seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
