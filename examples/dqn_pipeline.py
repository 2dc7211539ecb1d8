"""The same DQN as in dqn_cartpole.py, with the environments in a pipeline: several episodes at once fill the buffer.

python examples/dqn_pipeline.py [--seed N] [--kills N]

Each item is an episode. Buffer, agent, and what is played next are saved as one thing, and recovered as one: what was
played after the last save is in the journal, and is not lost.
"""

import copy
import os
import signal
import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from dqn_cartpole import BATCH, GAMMA, MARK, N_STEP, Agent, episode, main

from forebay import Anneal, Limiter, Pipeline, Prioritized, ReplayBuffer, Rollout, SequenceSource, Task

STEPS, WARM_UP, AT_ONCE = 60_000, 1_000, 16
PUSH_EVERY, SAVE_EVERY, LOOK_EVERY = 20, 500, 2_000


def player(actor):
    """Return the rollout function: it plays with the weights that were pushed last."""

    async def play(item, ctx):
        env = gymnasium.make("CartPole-v1")
        obs, total, over = env.reset(seed=item["seed"])[0], 0.0, False
        while not over:
            rows: list[Any] = []
            while not over and len(rows) < AT_ONCE:
                explores = ctx.rng.random() < max(0.04, 1 - ctx.version / 6_000)
                with torch.no_grad():
                    action = int(ctx.rng.integers(2)) if explores else int(actor(torch.from_numpy(obs)).argmax())
                next_obs, reward, terminated, truncated, _ = env.step(action)
                rows.append((obs, action, np.float32(float(reward)), next_obs, terminated, truncated))
                obs, total, over = next_obs, total + float(reward), terminated or truncated
            names = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
            await ctx.extend(dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True)))
        return Rollout(reward=total)

    return play


def train(directory, seed, die_after):
    torch.set_num_threads(1)
    agent = Agent(seed)
    actor, other = copy.deepcopy(agent.net), gymnasium.make("CartPole-v1")
    select = Prioritized(alpha=0.6, beta=Anneal(start=0.4, end=1.0, over=STEPS))
    limiter = Limiter(min_size=WARM_UP, ratio=BATCH, error_buffer=4 * AT_ONCE * BATCH)
    buffer = ReplayBuffer(20_000, select=select, limiter=limiter, seed=seed)
    task = Task(
        "cartpole", source=SequenceSource([{"seed": seed} for seed in range(1000)]), run=player(actor), epochs=None
    )
    with Pipeline(task, buffer=buffer, directory=directory, seed=seed, concurrency=4).sync() as pipe:
        pipe.attach(agent=agent)
        begin = pipe.resume().step
        print(f"  from step {begin}, with {len(buffer)} transitions", flush=True)
        with pipe.weight_update(version=begin):
            actor.load_state_dict(agent.net.state_dict())
        pipe.start()
        for step in range(begin + 1, STEPS + 1):
            batch = pipe.sample(BATCH, n_step=N_STEP, gamma=GAMMA)
            buffer.update_priorities(batch.keys, agent.update(batch))
            pipe.ack(step)
            if step % PUSH_EVERY == 0:
                with pipe.weight_update(version=step):
                    actor.load_state_dict(agent.net.state_dict())
            if step % SAVE_EVERY == 0:
                pipe.save(step)
            if step == begin + die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % LOOK_EVERY == 0:
                mean = np.mean([episode(other, agent, 10_000 + number) for number in range(20)])
                print(f"  step {step}: {mean:.1f}", flush=True)
                if mean >= MARK and not die_after:  # who is to be killed on the way is
                    return True
    return False


if __name__ == "__main__":
    sys.exit(0 if main(__file__, __doc__, train) else 1)
