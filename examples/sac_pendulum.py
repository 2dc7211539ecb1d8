"""A soft actor-critic learns to swing a pendulum up, from uniform replay, and is killed on the way.

python examples/sac_pendulum.py [--seed N] [--kills N]

Four environments run at once. The training runs in a process of its own, which is killed at random moments and started
again. It ends when 20 episodes come to more than -200 on average.
"""

import argparse
import copy
import os
import signal
import sys
import tempfile

import gymnasium
import torch
from killing import supervise
from torch import nn
from torch.nn import functional

from forebay import ReplayBuffer

STEPS, WARM_UP, BATCH, GAMMA, ENVS = 6_000, 250, 256, 0.99, 4
SAVE_EVERY, LOOK_EVERY, MARK = 250, 500, -200


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Agent:
    """An actor, two critics with slow copies, and a temperature."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.actor, self.critics = layers(3, 2), nn.ModuleList([layers(4, 1), layers(4, 1)])
        self.slow = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.optimizers = [
            torch.optim.Adam(self.actor.parameters(), lr=1e-3),
            torch.optim.Adam(self.critics.parameters(), lr=1e-3),
            torch.optim.Adam([self.log_alpha], lr=1e-3),
        ]

    def sample(self, obs):
        """Return actions [n, 1] within -2 to 2, and their log-probabilities [n]."""
        mean, spread = self.actor(obs).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        raw = normal.rsample()
        squashed = torch.tanh(raw)
        log_prob = normal.log_prob(raw) - torch.log(2 * (1 - squashed**2) + 1e-6)
        return 2 * squashed, log_prob.sum(-1)

    def best(self, obs):
        with torch.no_grad():
            return (2 * torch.tanh(self.actor(torch.from_numpy(obs))[..., :1])).numpy()

    def values(self, critics, obs, action):
        return torch.stack([critic(torch.cat([obs, action], -1)).squeeze(-1) for critic in critics])

    def update(self, batch):
        obs, alpha = batch["obs"], self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = self.sample(batch["next_obs"])
            value = self.values(self.slow, batch["next_obs"], action).amin(0) - alpha * log_prob
            wanted = batch["reward"] + batch.discount * value
        self.descend(1, functional.mse_loss(self.values(self.critics, obs, batch["action"]), wanted.expand(2, -1)))
        action, log_prob = self.sample(obs)
        self.descend(0, (alpha * log_prob - self.values(self.critics, obs, action).amin(0)).mean())
        self.descend(2, -(self.log_alpha * (log_prob.detach().mean() - 1)))
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    def descend(self, which, loss):
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()

    def state_dict(self):
        nets = [self.actor, self.critics, self.slow, *self.optimizers]
        return {"nets": [each.state_dict() for each in nets], "log_alpha": self.log_alpha.detach()}

    def load_state_dict(self, state):
        nets = [self.actor, self.critics, self.slow, *self.optimizers]
        for each, saved in zip(nets, state["nets"], strict=True):
            each.load_state_dict(saved)
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])


def mean_return(agent, envs):
    """Return what 20 episodes without noise come to on average; all of them have 200 steps."""
    obs, total = envs.reset(seed=10_000)[0], 0.0
    for _ in range(200):
        obs, reward, _, _, _ = envs.step(agent.best(obs))
        total += reward.mean()
    return total


def train(directory, seed, die_after):
    torch.set_num_threads(1)
    agent = Agent(seed)
    envs, others = (gymnasium.make_vec("Pendulum-v1", number, vectorization_mode="sync") for number in (ENVS, 20))
    with ReplayBuffer(50_000, directory=directory, seed=seed) as buffer:
        buffer.attach(agent=agent)
        begin = buffer.resume().step
        print(f"  from step {begin}, with {len(buffer)} transitions", flush=True)
        obs, _ = envs.reset(seed=1000 * seed + begin)
        torch.manual_seed(1000 * seed + begin)
        for step in range(begin + 1, STEPS + 1):
            with torch.no_grad():
                action = agent.sample(torch.from_numpy(obs))[0].numpy()
            next_obs, reward, terminated, truncated, info = envs.step(action)
            buffer.add(obs, action, reward, next_obs, terminated, truncated, info, autoreset="next_step")
            obs = next_obs
            if step > WARM_UP:
                for _ in range(2):
                    agent.update(buffer.sample(BATCH, gamma=GAMMA))
            if step % SAVE_EVERY == 0:
                buffer.save(step)
            if step == begin + die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % LOOK_EVERY == 0:
                mean = mean_return(agent, others)
                print(f"  step {step}: {mean:.1f}", flush=True)
                if mean > MARK and not die_after:  # who is to be killed on the way is
                    return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--directory")
    parser.add_argument("--die-after", type=int, default=0)
    given = parser.parse_args()
    if given.directory:
        sys.exit(0 if train(given.directory, given.seed, given.die_after) else 1)
    with tempfile.TemporaryDirectory() as folder:
        code = supervise(__file__, given.seed, given.kills, (300, 700), "--directory", f"{folder}/run")
    sys.exit(0 if code == 0 else 1)
