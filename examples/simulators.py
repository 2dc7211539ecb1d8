"""A simulator in worker processes, that takes its process down now and then: that costs an attempt, and nothing else.

python examples/simulators.py
"""

import os

from forebay import Rollout


def throw(item, ctx):
    """How far a stone flies. A plain function, alone in its worker's main thread; one attempt in thirty crashes."""
    if ctx.attempt == 1 and ctx.rng.random() < 1 / 30:
        os.abort()
    angle, speed = item["angle"], 20 + ctx.rng.normal()
    distance, height, rise, run = 0.0, 0.0, speed * angle / 2, speed * (1 - angle / 2)
    while height >= 0:
        distance, height, rise = distance + 0.01 * run, height + 0.01 * rise, rise - 0.0981
    return Rollout({"angle": [angle]}, reward=distance, info={"process": os.getpid()})


if __name__ == "__main__":  # workers import this file as well, and are not to run what follows
    from forebay import Pipeline, ProcessEngine, SequenceSource, Task

    source = SequenceSource([{"angle": n / 50} for n in range(50)])
    task = Task("throw", source=source, run=throw, group_size=2, on_failure="fail_fast")
    with Pipeline(task, engine=ProcessEngine(workers=2)).sync() as pipe:
        pipe.start()
        seen, best = set(), (0.0, 0)
        for batch in pipe.batches(groups=10):
            seen |= {rollout.info["process"] for rollout in batch.rollouts}
            best = max([best, *((rollout.reward, rollout["angle"].item()) for rollout in batch.rollouts)])
        lost = pipe.statistics().rollouts.interrupted
    print(f"100 throws, {lost} lost with their process and thrown again, by {len(seen)} processes")
    print(f"the farthest: {best[0]:.1f} m")
