"""Events of journals as lines for people."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.records import AnyEvent, Inherited
from pipeline.store.journal import Logged

_LONGEST = 160


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a run."""

    incarnation: int
    rank: int
    sequence: int
    """Of the event in its journal; of a generation, its number."""
    event: str
    """What happened, in a word or two."""
    said: str
    """And the rest."""

    @classmethod
    def of(cls, logged: Logged, said: str | None = None) -> Happened:
        """Return an event of a journal."""
        event = logged.event
        return cls(
            incarnation=logged.incarnation,
            rank=logged.rank,
            sequence=logged.sequence,
            event=verb_of(event),
            said=said_of(event) if said is None else said,
        )


_VERBS = {
    "open": "begun",
    "mix": "shares",
    "claim": "claimed",
    "start": "started",
    "fail": "failed",
    "intr": "interrupted",
    "done": "finished",
    "part": "kept a part",
    "move": "moved",
    "rows": "rows added",
    "park": "parked",
    "reward": "rewarded",
    "drop": "dropped",
    "aged": "ages",
    "reopen": "reopened",
    "batch": "batch handed out",
    "feed": "feedback",
    "eval": "evaluated",
    "close": "closed",
    "inherit": "inherited",
    "epoch": "epoch begun",
}
_LEFT_OUT = frozenset(("incarnation", "rank", "segment", "offset", "wall", "content", "mark", "lives"))
"""Fields that stand elsewhere, or say nothing to people."""


def verb_of(event: AnyEvent) -> str:
    """Return what happened, in a word or two."""
    tag = str(event.__struct_config__.tag)
    return _VERBS.get(tag, tag)


def said_of(event: AnyEvent, *, without: frozenset[str] = frozenset()) -> str:
    """Return what an event says beside that: its fields that are not as they always are."""
    if isinstance(event, Inherited):
        return f"{len(event.items)} items"
    parts = []
    for field in msgspec.structs.fields(type(event)):
        value = getattr(event, field.name)
        if field.name in _LEFT_OUT or field.name in without or value == field.default or value in ([], {}, ""):
            continue
        parts.append(f"{field.name} {_short(value)}")
    return ", ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) > 8:
        return f"{_plain(value[:8])[:-1]}, ... {len(value)} in all]"
    return _plain(value)


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    first = " / ".join(text.splitlines())
    return first if len(first) <= _LONGEST else first[:_LONGEST] + "..."
