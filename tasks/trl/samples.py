"""The queue that the trainer takes samples from, which are made of a pipeline's groups."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.buffer import Batch, Group
from pipeline.clock import running_clock
from pipeline.records import Rollout
from tasks.llm import TokenRow, token_rows

Fetch = Callable[[float | None], Batch]


class Samples(queue.Queue[Any]):
    """A queue that is filled when it is taken from: groups are leased no sooner than the trainer wants them, so that
    what it gets is as fresh as the pipeline's bound says.

    Args:
        fetch: gives the next batch, or raises :class:`queue.Empty` when so many seconds are over.
        made: gives the samples of a batch.
        taken: told of each sample that is handed out.
    """

    def __init__(self, fetch: Fetch, made: Callable[[Batch], Sequence[Any]], taken: Callable[[Any], None]) -> None:
        super().__init__()
        self._fetch, self._made, self._taken = fetch, made, taken
        self._ready: deque[Any] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next sample; the pipeline makes rollouts meanwhile.

        Raises:
            queue.Empty: there was none in time.
            ForebayError: what a verb of the pipeline raises: a rollout failed for good, nothing is left, ...
        """
        while not self._ready:
            made = self._made(self._fetch(timeout if block else 0.0))
            self._ready.extend(made)
        sample = self._ready.popleft()
        self._taken(sample)
        return sample

    def qsize(self) -> int:
        """Return how many samples can be had at once: those of the batch that is being taken from."""
        return len(self._ready)

    def empty(self) -> bool:
        """Return whether none can be had at once."""
        return not self._ready

    def clear(self) -> None:
        """Forget what was not taken."""
        self._ready.clear()


def samples_of(
    batch: Batch,
    kind: Callable[..., Any],
    version_of: Callable[[int], int],
    advantages: str | Callable[[Group], Sequence[float]],
    epsilon: float,
) -> list[Any]:
    """Return a trainer's samples, one for each trace of a batch, group by group.

    Args:
        batch: whose traces have token ids and log-probs.
        kind: TRL's ``RolloutSample``.
        version_of: the trainer's number of a version of the pipeline's weights.
        advantages, epsilon: as :func:`tasks.llm.token_rows` takes them.

    Raises:
        ConfigError: a trace has no token ids or no log-probs, as :func:`tasks.llm.token_rows`.
    """
    now = running_clock().wall()
    found = []
    for row in token_rows(batch, advantages=advantages, epsilon=epsilon):
        group = batch.groups[row.group]
        rollout = group.rollouts[group.members.index(row.member)]
        prompt, completion = _messages(rollout, row.trace)
        found.append(
            kind(
                prompt=prompt,
                completion=completion,
                input_ids=row.input_ids.numpy(),
                completion_mask=row.completion_mask.numpy().astype(np.int64),
                old_log_probs=row.old_log_probs.numpy(),
                advantage=row.advantage,
                model_version=version_of(group.oldest),
                group_id=row.uid,
                metrics=_metrics(group, row, rollout),
                enqueued_at=now,
            )
        )
    return found


def _messages(rollout: Rollout, trace: int) -> tuple[list[Any], list[Any]]:
    """Return what was said before the first reply, and from it on; the trainer only shows it."""
    chats = rollout.info.get("chats")
    said = chats[trace] if chats and trace < len(chats) else rollout.info.get("messages") or []
    first = next((at for at, each in enumerate(said) if each.get("role") == "assistant"), len(said))
    return list(said[:first]), list(said[first:])


def _metrics(group: Group, row: TokenRow, rollout: Rollout) -> dict[str, float]:
    """Return what the trainer takes the mean of and logs, by the names that its own worker uses."""
    rewards = [each.reward for each in group.rollouts]
    found = {"reward": row.reward, "reward_std": float(np.std(rewards))}
    for kind in ("rewards", "metrics"):
        for name, value in (rollout.info.get(kind) or {}).items():
            if isinstance(value, int | float):
                found[f"{kind}/{name}"] = float(value)
    return found
