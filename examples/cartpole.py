"""CartPole-v1 from asynchronous rollouts, up to two steps stale. Stop it in any way, and run it again: it goes on.

python examples/cartpole.py runs/cartpole --steps 100
"""

import argparse

import numpy as np
import torch

from forebay import EnvSeeds, Pipeline, ProgressBar, Task
from tasks.demo.learner import Episode, Learner, LearnerConfig, evaluate
from tasks.gym import episode, make_env


def as_episode(rollout):
    arrays = {name: rollout[name].numpy() for name in ("obs", "action", "logprob", "reward", "final_obs")}
    terminated, truncated = bool(rollout["terminated"][-1]), bool(rollout["truncated"][-1])
    return Episode(**arrays, terminated=terminated, truncated=truncated)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", default="runs/cartpole")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    learner = Learner(LearnerConfig(seed=given.seed, planned_steps=given.steps))
    policy = learner.weights()  # what the rollouts act with; the learner's own change while it trains

    async def play(item, ctx):
        weights = policy

        def act(obs):
            action, logprob = weights.act(obs, ctx.rng)
            return action, {"logprob": np.float32(logprob)}

        return (await episode(ctx.resource, act, seed=item["seed"])).rollout()

    task = Task("cartpole", source=EnvSeeds(given.seed), run=play, resource=make_env("CartPole-v1"))
    options = {"directory": given.directory, "max_staleness": 2, "concurrency": 16, "seed": given.seed}
    with Pipeline(task, options).sync() as pipe, ProgressBar(given.steps) as bar:
        pipe.attach(model=learner.model, optimizer=learner.optimizer)
        with pipe.weight_update(version=pipe.resume().version):
            policy = learner.weights()
        pipe.start()
        for batch in pipe.batches(groups=16, until=given.steps):
            learner.update([as_episode(rollout) for rollout in batch.rollouts], batch.step)
            with pipe.weight_update(version=batch.step):
                policy = learner.weights()
            if batch.step % 10 == 0 or batch.step == given.steps:
                pipe.save(batch.step)
            bar.update(batch.step, pipe.metrics())
        trained = pipe.statistics().groups.trained
    print(
        f"{trained} episodes trained; mean return of 100 evaluation episodes: {evaluate(policy, seed=given.seed):.1f}"
    )


if __name__ == "__main__":
    main()
