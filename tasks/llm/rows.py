"""The tokens of a batch as rows, one for each trace: what padding and packing work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.buffer import Batch, Group
from pipeline.errors import ConfigError
from pipeline.records import Rollout, Trace
from tasks.llm.advantages import advantages as group_advantages

PROMPT, COMPLETION, MASK, LOGPROBS = "prompt_ids", "completion_ids", "completion_mask", "logprobs"
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One trace's tokens, prompt and completion side by side.

    Attributes:
        input_ids: [tokens] int64.
        completion_mask: [tokens] bool: what the policy sampled, and is to be trained on. False in the prompt, in what
            tools said between turns, and where a token is too old for ``staleness_policy="mask"``.
        old_log_probs: [tokens] float32: what the server said of each sampled token when it sampled it; 0 elsewhere.
        advantage: of the rollout in its group.
        reward: of the rollout.
        uid, member, trace: where it comes from.
        group: the place of its group in the batch.
    """

    input_ids: torch.Tensor
    completion_mask: torch.Tensor
    old_log_probs: torch.Tensor
    advantage: float
    reward: float
    uid: int
    member: int
    trace: int
    group: int

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.input_ids)


def token_rows(
    batch: Batch | Sequence[Group],
    *,
    advantages: str | Callable[[Group], Sequence[float]] = "grpo",
    epsilon: float = 0.0,
    logprobs: bool = True,
) -> list[TokenRow]:
    """Return a row for every trace of a batch, group by group.

    A trace has ``prompt_ids`` [p] and ``completion_ids`` [c], and may have ``completion_mask`` [c] (left out: all of
    it) and ``logprobs`` [c]. A member that failed is not there, and has no part in its group's mean. A rollout of
    several traces counts once in it, and each of its traces has its advantage.

    Args:
        batch: what ``get_batch`` gave, or some of its groups.
        advantages: as :func:`tasks.llm.advantages` calls them; or a function of a group that returns one for each of
            its rollouts, for what can be said of members side by side alone.
        epsilon: handed to the first.
        logprobs: whether they are needed; if not, those of a trace without them are NaN, so that nobody takes them for
            what a server said.

    Raises:
        ConfigError: a trace has no token ids, or no log-probs, or they do not belong together; the message says which.
    """
    rows: list[TokenRow] = []
    for place, group in enumerate(batch):
        rollouts, members, masks = group.rollouts, group.members, iter(group.staleness_mask)
        gains = _gains(group, advantages, epsilon)
        for rollout, member, gain in zip(rollouts, members, gains, strict=True):
            for number, trace in enumerate(rollout.traces):
                where = f"trace {number} of member {member} of uid {group.uid} (task {group.task!r})"
                mask = next(masks)
                tokens = _tokens(trace, where, logprobs, mask if group.masks_tokens else None)
                rows.append(_row(tokens, rollout, gain, (group.uid, member, number, place)))
    return rows


def _gains(group: Group, kind: str | Callable[[Group], Sequence[float]], epsilon: float) -> list[float]:
    if isinstance(kind, str):
        rewards = [each.reward for each in group.rollouts]
        found: list[float] = group_advantages(rewards, kind, epsilon=epsilon).tolist()
        return found
    given = [float(each) for each in kind(group)]
    if len(given) != len(group) or not all(map(math.isfinite, given)):
        raise ConfigError(
            f"advantages: the function returned {given} for {group}; a finite number for each of its {len(group)} "
            "rollouts is needed",
            option="advantages",
        )
    return given


def _row(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rollout: Rollout,
    gain: float,
    at: tuple[int, int, int, int],
) -> TokenRow:
    ids, mask, log_probs = tokens
    uid, member, number, place = at
    return TokenRow(
        input_ids=ids,
        completion_mask=mask,
        old_log_probs=log_probs,
        advantage=gain,
        reward=rollout.reward,
        uid=uid,
        member=member,
        trace=number,
        group=place,
    )


def _tokens(trace: Trace, where: str, needed: bool, young: torch.Tensor | None) -> Tokens:
    prompt, completion = _ids(trace, PROMPT, where), _ids(trace, COMPLETION, where)
    count = len(completion)
    mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), _mask(trace, count, where)])
    if young is not None:
        mask[len(prompt) :] &= _of_completion(young, len(prompt), count, where)
    log_probs = torch.cat([torch.zeros(len(prompt)), _log_probs(trace, count, where, needed)])
    return torch.cat([prompt, completion]), mask, log_probs


def _of_completion(young: torch.Tensor, prompt: int, count: int, where: str) -> torch.Tensor:
    """Return the part of a staleness mask that is of the completion: ``versions`` may be given for it alone, or for the
    prompt too."""
    if bool(young.all()) or not bool(young.any()):
        return torch.full((count,), bool(young.all()))
    if len(young) == count:
        return young
    if len(young) == prompt + count:
        return young[prompt:]
    raise ConfigError(
        f"{where}: versions of {len(young)} tokens, beside {prompt} of the prompt and {count} of the completion; one "
        "for each token of the completion is needed",
        option="versions",
    )


def _given(trace: Trace, name: str) -> Any:
    found = trace.tensors.get(name)
    return found if found is None or isinstance(found, torch.Tensor) else torch.as_tensor(np.asarray(found))


def _ids(trace: Trace, name: str, where: str) -> torch.Tensor:
    found = _given(trace, name)
    if found is None:
        raise ConfigError(
            f"{where}: no {name!r} among its tensors ({', '.join(sorted(trace.tensors)) or 'none'}). Token ids are the "
            "server's own, and are never made of text: ask a server that gives them, or train on the text yourself",
            option=name,
        )
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ConfigError(
            f"{where}: {name!r} is {found.dtype} {tuple(found.shape)}; whole numbers [tokens] are needed", option=name
        )
    ids: torch.Tensor = found.to(torch.int64)
    return ids


def _mask(trace: Trace, count: int, where: str) -> torch.Tensor:
    found = _given(trace, MASK)
    if found is None:
        return torch.ones(count, dtype=torch.bool)
    if found.shape != (count,):
        raise ConfigError(
            f"{where}: {MASK!r} is {tuple(found.shape)} beside {count} tokens of the completion", option=MASK
        )
    mask: torch.Tensor = found != 0
    return mask


def _log_probs(trace: Trace, count: int, where: str, needed: bool) -> torch.Tensor:
    found = _given(trace, LOGPROBS)
    if found is None:
        if needed and count:
            raise ConfigError(
                f"{where}: no {LOGPROBS!r} among its tensors ({', '.join(sorted(trace.tensors))}). They are the "
                "server's own, and never made up: ask it for them, or pass logprobs=False and compute them anew",
                option=LOGPROBS,
            )
        return torch.full((count,), float("nan"))
    if found.shape != (count,):
        raise ConfigError(
            f"{where}: {LOGPROBS!r} is {tuple(found.shape)} beside {count} tokens of the completion: they do not "
            "belong together",
            option=LOGPROBS,
        )
    log_probs: torch.Tensor = found.to(torch.float32)
    return log_probs
