"""The sampler of the examples: what it decodes in one batch is what the model says of each text by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY, LONGEST, MOST = 11, 24, 12


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("batched_sampler")


@pytest.fixture
def decoder(sampling: Any) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = sampling.Decoder(VOCABULARY, LONGEST, width=32, layers=2)
            torch.nn.init.normal_(made.head.weight, std=0.2)
            return made

    return make


class Told:
    """Makes a model do something before its n-th pass, in the sampler's thread."""

    def __init__(self, model: Any, number: int, do: Callable[[], object]) -> None:
        self.passes = 0

        def before(*_: object) -> None:
            self.passes += 1
            if self.passes == number:
                do()

        model.register_forward_pre_hook(before)


def said(model: Any, prompt: list[int], ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] at each place of a reply, by one pass over the whole text."""
    text = torch.cat([torch.tensor(prompt), ids])
    with torch.inference_mode():
        return model(text[None, :-1]).log_softmax(-1)[0, len(prompt) - 1 :]  # type: ignore[no-any-return]


async def test_a_batch_of_replies_is_what_the_model_says_of_each(sampling: Any, decoder: Callable[[int], Any]) -> None:
    chance, model = np.random.default_rng(1), decoder(1)
    prompts = [chance.integers(VOCABULARY, size=chance.integers(1, 9)).tolist() for _ in range(50)]
    draws: list[Any] = [chance.random(MOST) if number % 2 else None for number in range(50)]
    replies: dict[int, Any] = {}
    sampler = sampling.Sampler(decoder(2), end=0, rows=7, most=MOST)
    sampler.push(model, 3)

    async def ask(number: int) -> None:
        replies[number] = await sampler.reply(prompts[number], draws[number])

    async with sampler, anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(ask, number)
    lengths = {len(reply.ids) for reply in replies.values()}
    assert len(lengths) > 4
    assert MOST in lengths
    for number, reply in replies.items():
        ids, logprobs, versions = map(torch.from_numpy, reply)
        every = said(model, prompts[number], ids)
        torch.testing.assert_close(logprobs, every.gather(1, ids[:, None])[:, 0], atol=1e-5, rtol=1e-4)
        assert versions.tolist() == [3] * len(ids)
        assert 0 not in ids[:-1]
        assert ids[-1] == 0 or len(ids) == MOST
        if draws[number] is None:
            assert ids.tolist() == every.argmax(-1).tolist()
        else:
            below = every.exp().cumsum(-1)
            for place, token in enumerate(ids.tolist()):  # the random number lies in the token's own interval
                low = 0.0 if token == 0 else float(below[place, token - 1])
                assert low - 1e-5 <= draws[number][place] <= float(below[place, token]) + 1e-5


async def test_pushed_weights_are_used_from_the_next_token_on(sampling: Any, decoder: Callable[[int], Any]) -> None:
    first, second, own = decoder(1), decoder(2), decoder(3)
    sampler = sampling.Sampler(own, end=-1, rows=4, most=MOST)
    sampler.push(first, 0)
    Told(own, 5, lambda: sampler.push(second, 1))
    async with sampler:
        ids, logprobs, versions = map(torch.from_numpy, await sampler.reply([1, 2, 3]))
        assert versions.tolist() == [0] * 5 + [1] * (MOST - 5)
        told = said(first, [1, 2, 3], ids).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logprobs[:5], told[:5], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(logprobs[5:], told[5:], atol=1e-3)
        ids, logprobs, _ = map(torch.from_numpy, await sampler.reply([1, 2, 3]))
        torch.testing.assert_close(logprobs, said(second, [1, 2, 3], ids).amax(-1), atol=1e-5, rtol=1e-4)


async def test_who_is_cancelled_gives_its_row_back(sampling: Any, decoder: Callable[[int], Any]) -> None:
    own, left, cut = decoder(1), anyio.Event(), anyio.CancelScope()
    sampler = sampling.Sampler(own, end=-1, rows=1, most=MOST)
    sampler.push(decoder(1), 0)

    async def hang_up() -> None:
        cut.cancel()
        await left.wait()

    told = Told(own, 3, lambda: anyio.from_thread.run(hang_up))
    async with sampler:
        with cut:
            try:
                await sampler.reply([1])
            finally:
                left.set()
        reply = await sampler.reply([2])
    assert len(reply.ids) == MOST
    assert told.passes == 3 + MOST


async def test_an_error_in_the_thread_reaches_who_asked_and_not_the_next(
    sampling: Any, decoder: Callable[[int], Any]
) -> None:
    own = decoder(1)
    sampler = sampling.Sampler(own, end=-1, rows=4, most=MOST)
    sampler.push(decoder(1), 0)

    def fail() -> None:
        raise ArithmeticError("no")

    Told(own, 2, fail)
    async with sampler:
        with pytest.raises(RuntimeError, match="sampler failed") as raised:
            await sampler.reply([1])
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert len((await sampler.reply([1])).ids) == MOST
