"""The first rollouts, in memory: plain functions and a plain loop."""

from forebay import Pipeline, Rollout, SequenceSource, Task


async def solve(item, ctx):
    guess = int(ctx.rng.integers(20))
    return Rollout({"guess": [guess]}, reward=-abs(guess - item["answer"]))


task = Task("guess", source=SequenceSource([{"answer": n} for n in range(20)]), run=solve, group_size=4)
with Pipeline(task).sync() as pipe:
    pipe.start()
    for batch in pipe.batches(groups=5):
        print(f"step {batch.step}: {len(batch.rollouts)} rollouts, mean reward {batch.rewards.mean():.2f}")
