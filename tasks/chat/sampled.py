"""What a server says of the tokens that it sampled: ids and log-probs, never made of the text.

Servers say it in different places. What is not said is None, and stays unknown.

====================  ========================================================================================
vLLM, newer SGLang    ``return_token_ids``: ``choice.token_ids``, and ``prompt_token_ids`` of the choice or the reply
SGLang                ``return_meta_info``: ``choice.meta_info.output_token_logprobs``: [log-prob, id, text] each
llama.cpp             ``choice.logprobs.content``: each has an ``id``
vLLM                  ``return_tokens_as_token_ids``: each ``token`` there is ``token_id:17``
completions           ``choice.logprobs.token_logprobs``; llama.cpp says them as in a chat
====================  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.errors import ReplyInvalid

ASKED = {"return_token_ids": True}
"""What is asked for beside the standard fields; a server that does not know it leaves it."""
_AS_TEXT = "token_id:"


class Sampled(msgspec.Struct, frozen=True):
    """The tokens of one reply.

    Attributes:
        prompt_ids: of everything that the server put before the reply; None: it does not say.
        ids: of the reply; None: it does not say.
        logprobs: of each token of the reply when it was sampled; None: it does not say.
    """

    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    logprobs: list[float] | None = None

    @property
    def whole(self) -> bool:
        """Whether prompt and reply are known token by token."""
        return self.prompt_ids is not None and self.ids is not None


def sampled(reply: Mapping[str, Any], choice: Mapping[str, Any], where: str) -> Sampled:
    """Return what a reply says of the tokens of a choice.

    Args:
        reply: as it came, decoded.
        choice: of it.
        where: what it is a reply to, for messages.

    Raises:
        ReplyInvalid: it says things that do not belong together.
    """
    prompt = _first(choice.get("prompt_token_ids"), reply.get("prompt_token_ids"))
    ids, logprobs = _ids_and_logprobs(choice, where)
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        raise ReplyInvalid(
            f"{where}: the server sent {len(ids)} token ids and {len(logprobs)} log-probs, which do not belong "
            "together. Nothing was kept of this reply"
        )
    if logprobs is not None and not all(isinstance(each, int | float) and each == each for each in logprobs):
        raise ReplyInvalid(f"{where}: the server sent a log-prob that is no number. Nothing was kept of this reply")
    return Sampled(
        None if prompt is None else _whole_numbers(prompt, "prompt_token_ids", where),
        None if ids is None else _whole_numbers(ids, "token ids", where),
        None if logprobs is None else [float(each) for each in logprobs],
    )


def _first(*found: Any) -> Any:
    return next((each for each in found if each is not None), None)


def _ids_and_logprobs(choice: Mapping[str, Any], where: str) -> tuple[list[Any] | None, list[Any] | None]:
    told = choice.get("token_ids")
    meta = (choice.get("meta_info") or {}).get("output_token_logprobs")
    said = choice.get("logprobs") or {}
    content = said.get("content")
    logprobs = said.get("token_logprobs") if content is None else [each.get("logprob") for each in content]
    if told is not None:
        return told, logprobs if logprobs is not None or meta is None else [each[0] for each in meta]
    if meta is not None:
        if not all(isinstance(each, Sequence) and len(each) >= 2 for each in meta):
            raise ReplyInvalid(f"{where}: meta_info.output_token_logprobs are no pairs of log-prob and id")
        return [each[1] for each in meta], [each[0] for each in meta]
    if content is None:
        return None, logprobs
    ids = [_id_of(each) for each in content]
    return (None if any(each is None for each in ids) else ids), logprobs


def _id_of(entry: Mapping[str, Any]) -> Any:
    token = entry.get("token")
    if entry.get("id") is not None:
        return entry["id"]
    if isinstance(token, str) and token.startswith(_AS_TEXT) and token[len(_AS_TEXT) :].isdecimal():
        return int(token[len(_AS_TEXT) :])
    return None


def _whole_numbers(given: Any, what: str, where: str) -> list[int]:
    if not isinstance(given, list) or not all(each.__class__ is int and each >= 0 for each in given):
        raise ReplyInvalid(f"{where}: {what} that are no whole numbers. Nothing was kept of this reply")
    return given
