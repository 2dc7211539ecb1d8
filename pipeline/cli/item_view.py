"""What ``forebay inspect --item`` prints for a person: one rollout as it can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pipeline.cli.terminal import Terminal
from pipeline.cli.words import counted, in_bytes, number
from pipeline.tools.one_item import FIRST, MemberFacts, Shown, TensorFacts

_LONGEST = 40  # events that are shown


def show_one(out: Terminal, item: Shown) -> None:
    """Print an item."""
    out.title(f"{item.path}: {item.what} {item.number}")
    out.fields([(name, _flat(value)) for name, value in item.facts.items()])
    if item.content is not None:
        out.line()
        out.title("Item")
        _value(out, item.content)
    for member in item.members:
        _member(out, member)
    if item.tensors:
        out.line()
        _tensors(out, item.tensors)
    if item.happened:
        out.line()
        out.title("What happened")
        rows = [[f"{e.incarnation}.{e.rank}.{e.sequence}", e.event, e.said] for e in item.happened[-_LONGEST:]]
        out.table(["event", "what", "said"], rows)
        if len(item.happened) > _LONGEST:
            out.line(f"and {len(item.happened) - _LONGEST:,} before; --json has them", style="faint", indent=2)
    for note in item.notes:
        out.line(note, style="bad")


def _member(out: Terminal, member: MemberFacts) -> None:
    out.line()
    out.title(f"Member {member.member}: reward {number(member.reward)}")
    versions = str(member.oldest) if member.oldest == member.newest else f"{member.oldest} to {member.newest}"
    out.fields(
        [
            ("versions", versions),
            ("tokens", number(member.tokens)),
            ("attempt", str(member.attempt)),
            ("lies in", f"{member.segment} at byte {member.offset}, {in_bytes(member.bytes)}"),
        ]
    )
    if member.info:
        _value(out, member.info)
    for trace in member.traces:
        names = ", ".join(f"{what} {name}" for what, name in (("agent", trace.agent), ("policy", trace.policy)) if name)
        out.line(f"trace{': ' if names else ''}{names}", indent=2)
        _tensors(out, trace.tensors)


def _tensors(out: Terminal, tensors: list[TensorFacts]) -> None:
    rows = [[each.name, each.dtype, str(list(each.shape)), _first(each)] for each in tensors]
    out.table(["tensor", "dtype", "shape", "first values"], rows, indent=4)


def _first(tensor: TensorFacts) -> str:
    size = 1
    for length in tensor.shape:
        size *= length
    shown = ", ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in tensor.first)
    return shown + (", ..." if size > FIRST else "")


# -- plain values, as text that can be read ----------------------------------------------------------------------


def _value(out: Terminal, value: Any) -> None:
    for indent, text in _lines(value):
        out.line(text, indent=2 + indent)


def _lines(value: Any, indent: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the lines of a plain value; a list of messages reads as a conversation."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _named(str(name), each, indent)
    elif isinstance(value, list):
        if _is_conversation(value):
            for message in value:
                yield from _message(message, indent)
        else:
            for place, each in enumerate(value):
                yield from _named(f"[{place}]", each, indent)
    else:
        yield indent, _flat(value)


def _named(name: str, value: Any, indent: int) -> Iterator[tuple[int, str]]:
    if _is_short(value):
        yield indent, f"{name}: {_flat(value)}"
        return
    length = f" ({counted(len(value), 'message')})" if isinstance(value, list) and _is_conversation(value) else ""
    yield indent, f"{name}:{length}"
    if isinstance(value, str):
        yield indent + 2, value
    else:
        yield from _lines(value, indent + 2)


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return "\n" not in value and len(value) <= 200
    if isinstance(value, list):
        plain = not any(isinstance(each, (list, Mapping)) for each in value)
        return not value or (plain and len(_flat(value)) <= 200)
    return not isinstance(value, Mapping) or not value


def _is_conversation(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)


def _message(message: Mapping[str, Any], indent: int) -> Iterator[tuple[int, str]]:
    rest = {name: each for name, each in message.items() if name not in ("role", "content", "tool_calls") and each}
    yield indent, f"{message['role']}:"
    content = message.get("content")
    if isinstance(content, str) and content:
        yield indent + 2, content
    elif content:
        yield from _lines(content, indent + 2)
    for call in message.get("tool_calls") or ():
        yield indent + 2, f"-> {_call(call)}"
    yield from _lines(rest, indent + 2)


def _call(call: Any) -> str:
    """Return a tool call as a call."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or "name" not in function:
        return _flat(call)
    arguments = function.get("arguments", "")
    return f"{function['name']}({arguments if isinstance(arguments, str) else _flat(arguments)})"


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else msgspec.json.encode(value).decode()
