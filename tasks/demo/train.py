"""CartPole from asynchronous rollouts: what a training script looks like with Forebay.

Rollouts run on the pipeline's own thread while this one trains, so a batch is up to ``MAX_STALENESS`` steps old; each
rollout carries the log-probs of the weights that made it, and the learner corrects for the difference. Killed at any
moment and started again, it goes on: `forebay demo` does exactly that to it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forebay import (
    Batch,
    Context,
    EnvSeeds,
    ForebayError,
    Item,
    Locked,
    Pipeline,
    PipelineOptions,
    ProgressBar,
    Rollout,
    Task,
)
from forebay import configure as configure_logs
from tasks.demo import plan
from tasks.demo.learner import Episode, Learner, LearnerConfig, Weights, evaluate
from tasks.demo.process import LOCKED, Reports, Stop
from tasks.gym import episode, make_env


class Actor:
    """Plays episodes with the weights that were pushed last."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    async def play(self, item: Item, ctx: Context) -> Rollout:
        """Play one episode; it is acted by one set of weights from its first step to its last."""
        weights, rng = self.weights, ctx.rng

        def policy(obs: Any) -> tuple[int, dict[str, Any]]:
            action, logprob = weights.act(obs, rng)
            return action, {"logprob": np.float32(logprob)}

        return (await episode(ctx.resource, policy, seed=item["seed"])).rollout()


class Evaluations:
    """The evaluations so far. They are saved with the weights, and go back with them."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def are_enough(self, step: int, steps: int) -> bool:
        """Whether the run may end at ``step``."""
        return plan.is_over(step, steps, self.points[-1][1] if self.points else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and the mean returns."""
        return {"steps": [step for step, _ in self.points], "returns": [value for _, value in self.points]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state."""
        self.points = list(zip(state["steps"], state["returns"], strict=True))


def episodes_of(batch: Batch) -> list[Episode]:
    """Return a batch's rollouts as the learner takes them."""
    return [
        Episode(
            **{name: rollout[name].numpy() for name in ("obs", "action", "logprob", "reward", "final_obs")},
            terminated=bool(rollout["terminated"][-1]),
            truncated=bool(rollout["truncated"][-1]),
        )
        for rollout in batch.rollouts
    ]


def train(directory: str, *, seed: int, steps: int, report: Reports, stop: Stop, verbose: bool = False) -> None:
    """Train until an evaluation reaches the mark, ``steps`` are done, or ``stop`` is requested; saved in any case."""
    learner = Learner(LearnerConfig(seed=seed, planned_steps=steps, batch_episodes=plan.BATCH))
    actor, evaluations = Actor(learner.weights()), Evaluations()
    cartpole = Task("cartpole", source=EnvSeeds(seed), run=actor.play, resource=make_env("CartPole-v1"))
    options = PipelineOptions(
        directory=directory,
        max_staleness=plan.MAX_STALENESS,
        concurrency=plan.CONCURRENCY,
        capacity=plan.CAPACITY,
        seed=seed,
        signals=(),  # the process that supervises this one hears them, and tells it
        keep=None,  # the audit follows the line of checkpoints back to the first
    )
    with Pipeline(cartpole, options).sync() as pipe:
        log(directory, verbose)
        pipe.attach(model=learner.model, optimizer=learner.optimizer, evaluations=evaluations)
        resumed = pipe.resume()
        report("resumed", step=resumed.step, repeated=resumed.repeated, buffered=resumed.buffered)
        if evaluations.are_enough(resumed.step, steps):
            return
        with pipe.weight_update(version=resumed.version):
            actor.weights = learner.weights()
        pipe.start()
        with ProgressBar(steps) as bar:
            for batch in pipe.batches(groups=plan.BATCH, until=steps):
                figures = learner.update(episodes_of(batch), batch.step)
                with pipe.weight_update(version=batch.step):
                    actor.weights = learner.weights()
                if due := batch.step % plan.SAVE_EVERY == 0 or batch.step == steps:
                    value = evaluate(actor.weights, episodes=plan.EVALUATION_EPISODES, seed=seed)
                    evaluations.points.append((batch.step, value))
                    report("evaluated", step=batch.step, value=value)
                ending = stop.requested or (due and evaluations.are_enough(batch.step, steps))
                if due or ending:
                    pipe.save(batch.step)
                bar.update(batch.step, pipe.metrics())
                report("trained", step=batch.step, value=figures["mean_return"], repeated=batch.repeated)
                if ending:
                    break


def log(directory: str, verbose: bool) -> None:
    """Send structured logs to a file of the run, or to stderr."""
    if verbose:
        configure_logs()
    else:
        stream = open(os.path.join(directory, "log.jsonl"), "a", encoding="utf-8")  # noqa: SIM115
        configure_logs(format="json", stream=stream)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training process; `forebay demo` starts it, and it can be run alone."""
    parser = argparse.ArgumentParser(prog="python -m tasks.demo.train", description=__doc__)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=plan.STEPS)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--report-to", type=int, help="a file descriptor for lines of JSON")
    given = parser.parse_args(arguments)
    stop = Stop()
    stop.listen()
    report = Reports(given.report_to, stop)
    torch.set_num_threads(1)
    begun = time.monotonic()
    try:
        train(given.directory, seed=given.seed, steps=given.steps, report=report, stop=stop, verbose=given.verbose)
    except Locked as error:
        report("failed", error=str(error))
        return LOCKED
    except ForebayError as error:
        report("failed", error=f"{type(error).__name__}: {error}")
        return 1
    report("ended", seconds=time.monotonic() - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
