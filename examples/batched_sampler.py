"""A sampler that decodes the prompts of many rollouts together: what an inference server is to a large model."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from tiny_decoder import Decoder, Next, Prompts
from torch import nn
from torch.nn import functional


class Reply(NamedTuple):
    """What was sampled: ``ids`` int64, ``logprobs`` float32 and ``versions`` int64, each [tokens]."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


class _Asked:
    """A prompt that waits for its reply."""

    def __init__(self, prompt: Sequence[int], chances: Any) -> None:
        self.prompt, self.chances = prompt, chances
        self.over, self.left = anyio.Event(), False
        self.reply: Reply | None = None
        self.error: Exception | None = None


class Sampler:
    """Decodes in a worker thread, and sleeps while nobody asks. A task's ``resource``, shared by all attempts.

    A prompt takes a free row of the batch and gives it back with its last token, so short replies never wait for long
    ones. Weights that are pushed are used from the next token on: replies in flight go on, over the keys and values
    that they have. So every token is kept with the log-prob that it was drawn with, and with the version that drew it.
    """

    def __init__(self, model: Decoder, *, end: int, rows: int, most: int) -> None:
        """Args:
        model: one that nobody trains.
        end: the token that ends a reply.
        rows: how many replies are decoded at once.
        most: tokens of a reply at most.
        """
        self.end, self.rows, self.most = end, rows, most
        self._model, self._store = model.eval().requires_grad_(False), model.store(rows)
        whole, real = torch.int64, torch.float32
        self._columns = {
            "at": torch.zeros(rows, dtype=whole),  # where the newest token stands
            "count": torch.zeros(rows, dtype=whole),
            "chances": torch.zeros(rows, most, dtype=real),
            "ids": torch.zeros(rows, most, dtype=whole),
            "logprobs": torch.zeros(rows, most, dtype=real),
            "versions": torch.zeros(rows, most, dtype=whole),
        }
        self._active: list[_Asked] = []  # by row, without gaps
        self._queue: list[_Asked] = []
        self._pushed: tuple[int, Any] = (-1, None)
        self._version = -1

    def push(self, model: nn.Module, version: int) -> None:
        """Take the weights of ``model``. From any thread."""
        self._pushed = version, {name: value.detach().clone() for name, value in model.state_dict().items()}

    async def reply(self, prompt: Sequence[int], chances: Any = None) -> Reply:
        """Return a reply to ``prompt``.

        Args:
            prompt: token ids.
            chances: random numbers from 0 to 1, [most]; None: the likeliest tokens.
        """
        asked = _Asked(prompt, chances)
        self._queue.append(asked)
        self._work.set()
        try:
            await asked.over.wait()
        finally:
            asked.left = True  # an attempt that was cut gives its row back
        if asked.reply is None:
            raise RuntimeError("the sampler failed") from asked.error
        return asked.reply

    async def __aenter__(self) -> "Sampler":
        self._work = anyio.Event()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._serve)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._group.cancel_scope.cancel()
        return await self._group.__aexit__(kind, error, trace)

    async def _serve(self) -> None:
        while True:
            if not self._queue and not self._active:
                self._work = anyio.Event()
                await self._work.wait()
            room = self.rows - len(self._active)
            new, self._queue = self._queue[:room], self._queue[room:]
            new = [asked for asked in new if not asked.left]
            try:
                ended = await anyio.to_thread.run_sync(self._decode, new)
            except Exception as error:
                ended = [*self._active, *new]
                self._active = []
                for asked in ended:
                    asked.error = error
            for asked in ended:
                asked.over.set()

    # -- in the thread -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _decode(self, new: list[_Asked]) -> list[_Asked]:
        """Decode until a reply ends, or other weights come; return those that have ended."""
        pushed, weights = self._pushed
        if pushed != self._version:
            self._model.load_state_dict(weights)
            self._version = pushed
        if new:
            self._begin(new)
        ended = self._ended()
        while self._active and not ended and self._pushed[0] == self._version:
            rows = slice(0, len(self._active))
            newest = self._columns["ids"][rows].gather(1, self._columns["count"][rows, None] - 1)
            logits = self._model(newest, Next(self._store, self._columns["at"][rows]))
            self._draw(logits[:, 0], rows)
            ended = self._ended()
        return ended

    def _begin(self, new: list[_Asked]) -> None:
        """Read the prompts into free rows, and draw their first tokens."""
        first, columns = len(self._active), self._columns
        rows = slice(first, first + len(new))
        lengths = [len(asked.prompt) for asked in new]
        ids = torch.tensor([[*asked.prompt, *[0] * (max(lengths) - len(asked.prompt))] for asked in new])
        logits = self._model(ids, Prompts(self._store, first, ids.shape[1]))
        last = torch.tensor(lengths) - 1
        columns["at"][rows], columns["count"][rows] = last, 0
        greedy = np.full(self.most, -1.0)
        chances = np.stack([greedy if asked.chances is None else asked.chances for asked in new])
        columns["chances"][rows] = torch.from_numpy(chances)
        self._active += new
        self._draw(logits[torch.arange(len(new)), last], rows)

    def _draw(self, logits: torch.Tensor, rows: slice) -> None:
        """Choose the next token of ``rows``: where the distribution passes the row's next random number."""
        columns = {name: column[rows] for name, column in self._columns.items()}
        count, logprobs = columns["count"][:, None], functional.log_softmax(logits, -1)
        chance = columns["chances"].gather(1, count)
        passed = (logprobs.exp().cumsum(-1) < chance).sum(-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
        token = torch.where(chance < 0, logprobs.argmax(-1, keepdim=True), passed)
        columns["ids"].scatter_(1, count, token)
        columns["logprobs"].scatter_(1, count, logprobs.gather(1, token))
        columns["versions"].scatter_(1, count, self._version)
        columns["count"] += 1
        columns["at"] += 1

    def _ended(self) -> list[_Asked]:
        """Take out what is over, or what nobody waits for any more, and close the gaps."""
        total, columns = len(self._active), self._columns
        if not total:
            return []
        count = columns["count"][:total]
        last = columns["ids"][:total].gather(1, count[:, None] - 1)[:, 0]
        over = ((last == self.end) | (count == self.most)).tolist()
        gone = [row for row, asked in enumerate(self._active) if over[row] or asked.left]
        ended = [self._active[row] for row in gone]
        counts, told = count.tolist(), [columns[name].numpy() for name in ("ids", "logprobs", "versions")]
        for row, asked in zip(gone, ended, strict=True):
            asked.reply = Reply(*(each[row, : counts[row]].copy() for each in told))
        left = total - len(gone)
        holes = [row for row in gone if row < left]
        movers = sorted(set(range(left, total)) - set(gone))
        for hole, mover in zip(holes, movers, strict=True):
            self._active[hole] = self._active[mover]
        del self._active[left:]
        if holes:
            self._store[:, :, holes] = self._store[:, :, movers]
            for column in columns.values():
                column[holes] = column[movers]
        return ended
