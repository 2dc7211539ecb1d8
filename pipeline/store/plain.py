"""Plain values to MessagePack and back, without loss.

MessagePack through ``msgspec`` has no tuples, no integers beyond 64 bits, no text with lone surrogates, and
no mapping keys but text. Each of these is wrapped in a one-entry mapping under a reserved key; everything
else travels as it is. NaN, the infinities and -0.0 need no help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MARK = "\x00forebay"
_LEAST, _MOST = -(2**63), 2**64 - 1
_DEEPEST = 200


class PlainValueError(TypeError):
    """A value that cannot be stored; the message says where it stands."""


class TooDeepError(PlainValueError):
    """A value is nested too deep."""


def to_plain(value: Any, *, leaf: Callable[[Any, str], Any] | None = None) -> Any:
    """Return ``value`` in terms that MessagePack keeps.

    Args:
        value: None, bool, int, float, str, bytes, numpy scalars, and lists, tuples and mappings of them.
        leaf: called with (value, path) for what is none of these; returns a plain value. For a subclass of tuple it may
            return None: then it is stored as a tuple.

    Raises:
        PlainValueError: something else, or nested deeper than 200 levels (a tuple counts as two of them, a mapping
            with other keys than plain text as three).
    """
    return _to(value, "$", 0, leaf)


def _to(value: Any, path: str, depth: int, leaf: Callable[[Any, str], Any] | None) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is bytes:
        return value
    if kind is int:
        return value if _LEAST <= value <= _MOST else {MARK: ["int", hex(value)]}
    if kind is str:
        return _text(value)
    if depth >= _DEEPEST:
        raise TooDeepError(f"nested deeper than {_DEEPEST} levels at {path[:60]}...")
    if isinstance(value, Mapping):
        return _mapping(value, path, depth, leaf)
    if kind is list:
        return [_to(each, f"{path}[{place}]", depth + 1, leaf) for place, each in enumerate(value)]
    if kind is not tuple and leaf is not None and isinstance(value, tuple):
        special = leaf(value, path)
        if special is not None:
            return special
    if isinstance(value, tuple):  # wrapped, it is two levels on the wire
        return {MARK: ["tuple", [_to(each, f"{path}[{i}]", depth + 2, leaf) for i, each in enumerate(value)]]}
    if isinstance(value, (np.bool_, np.integer, np.floating)) and not isinstance(value, np.longdouble):
        return _to(value.item(), path, depth, leaf)
    bases: tuple[Any, ...] = (int, float, str, bytes)
    for base in bases:  # an enum, a subclass of str: stored as what it is
        if isinstance(value, base):
            return _to(base.__new__(base, value), path, depth, leaf)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if leaf is not None:
        return leaf(value, path)
    raise PlainValueError(
        f"a {kind.__name__} at {path} cannot be stored; plain values are None, bool, int, float, str, bytes, "
        "lists, tuples and dicts (put arrays into the traces)"
    )


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {MARK: ["text", value.encode("utf-8", "surrogatepass")]}
    return value


def _mapping(value: Mapping[Any, Any], path: str, depth: int, leaf: Callable[[Any, str], Any] | None) -> Any:
    if all(type(key) is str for key in value) and MARK not in value:
        try:
            "".join(value).encode()
        except UnicodeEncodeError:
            pass
        else:
            return {key: _to(each, f"{path}.{key}", depth + 1, leaf) for key, each in value.items()}
    pairs = [
        [_to(key, f"{path} (key)", depth + 3, leaf), _to(each, f"{path}[{key!r}]", depth + 3, leaf)]
        for key, each in value.items()
    ]  # wrapped, it is three levels on the wire
    return {MARK: ["map", pairs]}


def from_plain(value: Any, *, leaf: Callable[[str, Any], Any] | None = None) -> Any:
    """Undo :func:`to_plain`. ``leaf`` gets (kind, content) of wrapped values that are not this module's."""
    if isinstance(value, list):
        return [from_plain(each, leaf=leaf) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: from_plain(each, leaf=leaf) for key, each in value.items()}
    kind, content = value[MARK]
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return tuple(from_plain(each, leaf=leaf) for each in content)
    if kind == "text":
        return content.decode("utf-8", "surrogatepass")
    if kind == "map":
        return {from_plain(key, leaf=leaf): from_plain(each, leaf=leaf) for key, each in content}
    if leaf is not None:
        return leaf(kind, content)
    raise PlainValueError(f"a stored value is of the unknown kind {kind!r}; it was written by a newer version")
