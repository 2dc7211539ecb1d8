"""A small language model learns to add two-digit numbers by GRPO, from asynchronous rollouts, and is killed on the way.

python examples/grpo_arithmetic.py [--seed N] [--kills N] [--synchronous]

First the model is shown the answers of 2,000 sums, which teaches it what a reply looks like, until it has 15% of them
right. From then on nobody tells it an answer: a right reply earns 1, any other 0. 500 sums are held out of both.

The training runs in a process of its own, which is killed (SIGKILL) at random steps and started again. It ends when 90%
of the held-out sums are right. With --synchronous the same recipe makes the rollouts of a batch only after the step
before it: all of them are on policy, and sampler and trainer wait for each other.

A pause stands in for a grader elsewhere (a sandbox, a judge): --grader-ms on average, exponentially distributed, so
that some replies wait long for their reward. 0 leaves it out.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time

import anyio
import numpy as np
import torch
from batched_sampler import Sampler
from killing import supervise
from tiny_decoder import Decoder
from torch.nn import functional

from forebay import Pipeline, Rollout, SequenceSource, Task, ZeroVariance
from tasks.demo.audit import audit
from tasks.demo.books import read_books
from tasks.llm import padded, token_rows

ALPHABET = ".0123456789+="  # the first ends a reply
LONGEST, MOST = 12, 5  # tokens of prompt and reply, and of the reply alone
HELD_OUT, SHOWN, ENOUGH = 500, 2000, 0.15
STEPS, GROUPS, MEMBERS, AT_ONCE, STALENESS = 2500, 16, 8, 128, 2
CLIP, ENTROPY, RATE, LONGEST_STRIDE = (0.2, 0.28), 0.05, 5e-4, 0.5
SAVE_EVERY, LOOK_EVERY, MARK, GRADER_MS = 20, 50, 0.9, 20


def ids_of(text):
    return [ALPHABET.index(char) for char in text]


def sums(seed):
    """Return what is held out, and the rest. Answers are written from the last digit to the first."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    items = [{"prompt": f"{a:02}+{b:02}=", "answer": f"{str(a + b)[::-1]}."} for a, b in pairs]
    return items[:HELD_OUT], items[HELD_OUT:]


def adding(grader_s):
    """Return the rollout function: a reply to one sum is sampled (in an evaluation, the likeliest one) and graded."""

    async def add(item, ctx):
        prompt = ids_of(item["prompt"])
        reply = await ctx.resource.reply(prompt, None if ctx.kind == "evaluation" else ctx.rng.random(MOST))
        text = "".join(ALPHABET[number] for number in reply.ids.tolist())
        if grader_s:
            async with ctx.scoring():  # the slot is another attempt's meanwhile
                await anyio.sleep(ctx.rng.exponential(grader_s))
        tensors = {"prompt_ids": np.array(prompt), "completion_ids": reply.ids, "logprobs": reply.logprobs}
        return Rollout(
            {**tensors, "versions": reply.versions},
            reward=float(text == item["answer"]),
            oldest=int(reply.versions[0]),
            newest=int(reply.versions[-1]),
            tokens=len(reply.ids),
        )

    return add


class Curve:
    """What the weights have gone through so far: it goes back with them."""

    def __init__(self):
        self.rows, self.rewards, self.staleness = [], [], []

    def seen(self, batch):
        self.rewards.append(float(batch.rewards.mean()))
        self.staleness += [group.staleness for group in batch]

    def look(self, step, since, accuracy):
        """Add a row: step, seconds since the beginning, held-out accuracy; reward and staleness since the last row."""
        means = [sum(each) / max(1, len(each)) for each in (self.rewards, self.staleness)]
        self.rows.append([step, time.time() - since, accuracy, *means])
        self.rewards, self.staleness = [], []

    def state_dict(self):
        return {"rows": self.rows, "rewards": self.rewards, "staleness": self.staleness}

    def load_state_dict(self, state):
        self.rows, self.rewards, self.staleness = state["rows"], state["rewards"], state["staleness"]


def decoder():
    return Decoder(len(ALPHABET), LONGEST)


def warm_up(model, optimizer, shown, seed):
    """Teach the form of a reply: cross-entropy on the sums that are shown, until ``ENOUGH`` of a batch is right."""
    chance, right = random.Random(seed), 0.0
    prompt = len(shown[0]["prompt"])
    while right < ENOUGH:
        texts = [torch.tensor(ids_of(item["prompt"] + item["answer"])) for item in chance.sample(shown, 128)]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)
        wanted = ids[:, prompt:]
        logits = model(ids[:, :-1].clamp(min=0))[:, prompt - 1 :]
        optimizer.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1).backward()
        optimizer.step()
        right = float(((logits.argmax(-1) == wanted) | (wanted < 0)).all(1).float().mean())


def descend(model, optimizer, batch):
    """Take one gradient step on ``-mean(min(r A, clip(r, 1 - 0.2, 1 + 0.28) A) + 0.05 H)`` over all sampled tokens.

    r is the probability of the token now over that with which the sampler drew it, whatever weights it had then; A is
    the advantage of the reply in its group. Shao et al., *DeepSeekMath*, 2024, section 4.1.1, without the KL term. As
    in Yu et al., *DAPO*, 2025, section 3: the upper bound is the wider one, groups without an advantage are drawn anew
    (``filter=ZeroVariance()``), and the mean is over the tokens of the batch. H is the entropy of what may come at the
    token's place (Williams and Peng 1991): a digit that is never tried is never learnt.
    """
    data = padded(token_rows(batch, advantages="grpo"))
    ids, sampled = data["input_ids"], data["completion_mask"][:, 1:]
    every = functional.log_softmax(model(ids[:, :-1]), -1)
    logprobs = every.gather(2, ids[:, 1:, None]).squeeze(2)
    ratio = (logprobs - data["old_log_probs"][:, 1:]).exp()
    gain = data["advantages"][:, 1:]
    least = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * gain)
    entropy = -(every.exp() * every).sum(-1)
    optimizer.zero_grad()
    (-(least + ENTROPY * entropy)[sampled].mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), LONGEST_STRIDE)
    optimizer.step()


def train(given):
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    model, curve = decoder(), Curve()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    sampler = Sampler(decoder(), end=0, rows=AT_ONCE, most=MOST)
    held_out, others = sums(given.seed)
    how = {"resource": sampler, "run": adding(given.grader_ms / 1000)}
    task = Task("sums", source=SequenceSource(others), group_size=MEMBERS, epochs=None, filter=ZeroVariance(), **how)
    exam = Task("exam", source=SequenceSource(held_out), **how)
    order = {"strategy": "synchronous", "max_staleness": 0} if given.synchronous else {"max_staleness": STALENESS}
    options = {"directory": given.directory, "seed": given.seed, "concurrency": AT_ONCE, "batch_groups": GROUPS}
    # All generations are kept for the audit at the end. On two busy cores the loop is late, and need not say so.
    with Pipeline(task, **options, **order, evaluation_share=0.5, keep=None, watchdog=1.0).sync() as pipe:
        pipe.attach(model=model, optimizer=optimizer, curve=curve)
        resumed = pipe.resume()
        print(f"  from step {resumed.step}, with {resumed.buffered} groups", flush=True)
        if resumed.generation is None:
            warm_up(model, optimizer, others[:SHOWN], given.seed)
        with pipe.weight_update(version=resumed.version):
            sampler.push(model, resumed.version)
        pipe.start()

        def look(step):
            curve.look(step, given.since, pipe.evaluate(exam, version=step).reward_mean)
            print(f"  step {step}: {curve.rows[-1][2]:.1%} of the held-out sums", flush=True)

        if not curve.rows:
            look(0)
        for batch in pipe.batches(groups=GROUPS):
            step = batch.step
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - (step - 1) / given.steps)
            descend(model, optimizer, batch)
            curve.seen(batch)
            with pipe.weight_update(version=step):
                sampler.push(model, step)
            if step % LOOK_EVERY == 0 or step == given.steps:
                look(step)
                if curve.rows[-1][2] >= given.mark or step == given.steps:
                    pipe.save(step)
                    break
            if step % given.save_every == 0:
                pipe.save(step)
            if step == resumed.step + given.die_after:
                os.kill(os.getpid(), signal.SIGKILL)


def conclude(directory, given):
    """Print the curve and what became of the rollouts, as the run's files have it; return whether all is well."""
    books = read_books(directory)
    assert books is not None
    found, rows = audit(books), books.attached("curve")["rows"]
    print("  step   seconds   held-out   reward   staleness")
    for step, seconds, accuracy, reward, staleness in rows:
        print(f"{step:6} {seconds:9.1f} {accuracy:10.1%}" + (f"{reward:9.2f} {staleness:11.2f}" if step else ""))
    stale = ", ".join(f"{count} groups {steps}" for steps, count in found.staleness.items())
    print(f"trained on {found.trained} groups of {MEMBERS}, steps stale: {stale}; dropped: {found.dropped}")
    print(f"killed {len(found.kills)} times, {found.recovered} groups of before a kill trained after it")
    first, last = rows[0], rows[-1]
    print(
        f"held-out accuracy {first[2]:.1%} -> {last[2]:.1%} in {last[1]:.0f} s, "
        f"{sum(os.times()[2:4]):.0f} s of processor time; "  # that of the processes that have ended
        f"lost: {len(found.lost)}, trained twice: {len(found.twice)}"
    )
    return last[2] >= given.mark and len(found.kills) == given.kills and not found.lost and not found.twice


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--mark", type=float, default=MARK, help="held-out accuracy at which it ends (default: %(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--synchronous", action="store_true", help="rollouts and training by turns")
    parser.add_argument("--grader-ms", type=float, default=GRADER_MS, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each of torch's operations (default: %(default)s)")
    parser.add_argument("--directory", help="train here, and in this process")
    parser.add_argument("--die-after", type=int, default=0, metavar="STEPS", help="then this process kills itself")
    parser.add_argument("--since", type=float, default=time.time(), help="when the clock began, in seconds since 1970")
    given = parser.parse_args()
    if given.directory:
        train(given)
        return True
    with tempfile.TemporaryDirectory() as folder:
        more = ["--directory", f"{folder}/run"] + ["--synchronous"] * given.synchronous
        for name in ("since", "steps", "mark", "save_every", "grader_ms", "threads"):
            more += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
        code = supervise(__file__, given.seed, given.kills, (given.steps // 40, given.steps // 18), *more)
        return code == 0 and conclude(f"{folder}/run", given)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
