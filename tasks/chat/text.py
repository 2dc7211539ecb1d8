"""Text that can travel: JSON may escape half a surrogate pair, which UTF-8 cannot hold."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def decoded(raw: bytes) -> Any:
    """Return what JSON says; halves of surrogate pairs as U+FFFD.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return cleaned(parsed(raw))


def parsed(raw: bytes) -> Any:
    """Return what JSON says, with halves of surrogate pairs as they are: the other one may be in the next chunk.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(raw)  # takes such halves, and says clearly what else is wrong


def cleaned(value: Any) -> Any:
    """Return plain values with halves of surrogate pairs put together, or as U+FFFD where the other one is missing."""
    if isinstance(value, str):
        return value if _travels(value) else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {cleaned(name): cleaned(each) for name, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value


def _travels(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
