"""A DQN with prioritized three-step replay balances CartPole, and is killed on the way.

python examples/dqn_cartpole.py [--seed N] [--kills N]

The training runs in a process of its own, which is killed (SIGKILL) at random steps and started again. It ends when 20
greedy episodes last 475 steps on average.
"""

import argparse
import copy
import os
import signal
import sys
import tempfile

import gymnasium
import numpy as np
import torch
from killing import supervise
from torch import nn
from torch.nn import functional

from forebay import Anneal, Prioritized, ReplayBuffer

STEPS, WARM_UP, BATCH, N_STEP, GAMMA = 60_000, 1_000, 128, 3, 0.99
SAVE_EVERY, LOOK_EVERY, MARK = 500, 2_000, 475


class Agent:
    """A double DQN: two networks, and the optimizer of the first."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.target = copy.deepcopy(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-4)

    def act(self, obs):
        with torch.no_grad():
            return int(self.net(torch.from_numpy(obs)).argmax())

    def update(self, batch):
        """Take one gradient step; return the absolute errors, which are the new priorities."""
        with torch.no_grad():
            best = self.net(batch["next_obs"]).argmax(1, keepdim=True)
            value = self.target(batch["next_obs"]).gather(1, best).squeeze(1)
            wanted = batch["reward"] + batch.discount * value
        found = self.net(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        loss = (batch.weights * functional.smooth_l1_loss(found, wanted, reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        return (found - wanted).detach().abs() + 1e-3

    def state_dict(self):
        return {
            "net": self.net.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])


def episode(env, agent, seed):
    """Return what a greedy episode comes to."""
    obs, total, over = env.reset(seed=seed)[0], 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(agent.act(obs))
        total, over = total + reward, terminated or truncated
    return total


def train(directory, seed, die_after):
    torch.set_num_threads(1)
    agent = Agent(seed)
    env, other = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    select = Prioritized(alpha=0.6, beta=Anneal(start=0.4, end=1.0, over=STEPS))
    with ReplayBuffer(20_000, select=select, directory=directory, seed=seed) as buffer:
        buffer.attach(agent=agent)
        begin = buffer.resume().step
        print(f"  from step {begin}, with {len(buffer)} transitions", flush=True)
        obs, _ = env.reset(seed=1000 * seed + begin)
        chance = np.random.default_rng([seed, begin])
        for step in range(begin + 1, STEPS + 1):
            explores = chance.random() < max(0.04, 1 - step / 8_000)
            action = int(chance.integers(2)) if explores else agent.act(obs)
            next_obs, reward, terminated, truncated, info = env.step(action)
            buffer.add(obs, action, reward, next_obs, terminated, truncated, info)
            obs = env.reset()[0] if terminated or truncated else next_obs
            if step > WARM_UP:
                batch = buffer.sample(BATCH, n_step=N_STEP, gamma=GAMMA)
                buffer.update_priorities(batch.keys, agent.update(batch))
            if step % SAVE_EVERY == 0:
                buffer.save(step)
            if step == begin + die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % LOOK_EVERY == 0:
                mean = np.mean([episode(other, agent, 10_000 + number) for number in range(20)])
                print(f"  step {step}: {mean:.1f}", flush=True)
                if mean >= MARK and not die_after:  # who is to be killed on the way is
                    return True
    return False


def main(script, about, train):
    """Train in the folder that the command line names, or have it done in processes that are killed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--directory")
    parser.add_argument("--die-after", type=int, default=0)
    given = parser.parse_args()
    if given.directory:
        return train(given.directory, given.seed, given.die_after)
    with tempfile.TemporaryDirectory() as folder:
        return supervise(script, given.seed, given.kills, (1500, 3500), "--directory", f"{folder}/run") == 0


if __name__ == "__main__":
    sys.exit(0 if main(__file__, __doc__, train) else 1)
