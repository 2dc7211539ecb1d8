"""An agent with a calculator and a search over a local text, against a real server of language models.

    python examples/tool_agent.py [--base-url http://localhost:8000/v1 --model NAME]

Without an address it makes a model of 120,000 parameters on the spot (``examples/tiny_model.py``, a minute) and starts
``transformers serve`` with it: ``pip install 'transformers[serving]'``, here or in another environment, which
``--python`` or FOREBAY_SERVER_PYTHON names. That model knows no language; it has learnt how to call these two tools,
and now and then gets it wrong. Everything else is as with a large one: its calls are read by the server, run here,
and told to it; conversations have limits; each is a rollout with a reward, in groups.
"""

import argparse
import ast
import operator
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager

import anyio

from forebay import Pipeline, Retry, SequenceSource, Task, chat

PLACES = {"Ada": "Bern", "Bob": "Oslo", "Eve": "Rome", "Kim": "Lima", "Leo": "Kyiv", "Mia": "Baku"}
TEXT = [f"{name} lives in {city}." for name, city in PLACES.items()]
SUMS = {"7*8": "56", "3+4": "7", "9-2": "7", "6*6": "36"}
QUESTIONS = [
    *({"question": f"what is {each}?", "answer": result} for each, result in SUMS.items()),
    *({"question": f"where is {name}?", "answer": city} for name, city in list(PLACES.items())[:4]),
]
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Work out a sum of numbers with + - * / and brackets."""

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{ast.unparse(node)}: numbers and + - * / are needed")

    return f"{value(ast.parse(expression, mode='eval').body):g}"


def search(words: str) -> str:
    """Return the line of the text that has the most of these words."""
    wanted = set(words.lower().split())
    best = max(TEXT, key=lambda line: len(wanted & set(line.lower().rstrip(".").split())))
    return best if wanted & set(best.lower().rstrip(".").split()) else "nothing found"


async def solve(item, ctx):
    talk = ctx.resource.session(ctx, tools=[calculate, search], max_turns=3, max_tokens=300, timeout_s=120)
    reply = await talk.run(item["question"])
    used = [call["function"]["name"] for each in talk.messages for call in each.get("tool_calls") or []]
    right = reply.text.strip() == item["answer"]
    return talk.rollout(reward=float(right), info={"answer": reply.text, "used": used})


def show(conversation):
    for each in conversation:
        calls = [each["function"] for each in each.get("tool_calls") or []]
        said = [each.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in calls)]
        print(f"  {each['role']:<10} {' '.join(said).strip()}")


async def run(base_url, model, token_ids):
    client = chat.client(base_url, model=model, token_ids=token_ids, temperature=1.0)
    source = SequenceSource(QUESTIONS)
    task = Task("tools", source=source, run=solve, resource=client, group_size=4, on_failure=Retry(attempts=2))
    rollouts = []
    async with Pipeline([task], concurrency=8) as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=2):
            for group in batch:
                answers = [rollout.info["answer"] for rollout in group]
                rewards = [rollout.reward for rollout in group]
                print(f"{QUESTIONS[group.index]['question']:<16} answers {answers}, rewards {rewards}", flush=True)
            rollouts += batch.rollouts
        pipe.ledger.check()
    print("\nthe last conversation")
    show(rollouts[-1].info["messages"])
    right = sum(each.reward for each in rollouts) / len(rollouts)
    used = Counter(name for each in rollouts for name in each.info["used"])
    stopped = Counter(each.info["stopped"] or "the model was done" for each in rollouts)
    print(f"\n{len(rollouts)} conversations, {right:.0%} right; called {dict(used)}; ended: {dict(stopped)}")
    print(f"token ids of the server: {'yes' if rollouts[-1].traces else 'no, so these cannot be trained on'}")


@contextmanager
def server(python):
    """A server of a model that is made for it: its address, and the model's name."""
    maker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny_model.py")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, maker, folder], check=True)
        with socket.create_server(("127.0.0.1", 0)) as place:
            port = place.getsockname()[1]
        command = [python, "-m", "transformers.cli.transformers", "serve", folder, "--device", "cpu"]
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        assert process.stderr
        try:
            if not any("running on" in line for line in process.stderr):
                raise SystemExit(f"transformers serve ended with {process.wait()}")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            yield f"http://127.0.0.1:{port}/v1", folder
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", help="of a server that is there already")
    parser.add_argument("--model", help="the name that it knows its model by")
    parser.add_argument("--token-ids", action="store_true", help="ask for token ids and log-probs, as vLLM gives them")
    parser.add_argument("--python", default=os.environ.get("FOREBAY_SERVER_PYTHON", sys.executable))
    given = parser.parse_args()
    if given.base_url:
        anyio.run(run, given.base_url, given.model, given.token_ids)
    else:
        with server(given.python) as (url, name):
            anyio.run(run, url, name, False)
