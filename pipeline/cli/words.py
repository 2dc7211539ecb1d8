"""Numbers as people read them, and text that is safe to show: what files hold is data, and may hold a terminal's
control sequences."""

from __future__ import annotations

import re
import unicodedata

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def counted(count: int, what: str, several: str | None = None) -> str:
    """Return a number with its noun: ``1 row``, ``12,000 rows``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {several or what + 's'}"


def in_bytes(count: float) -> str:
    """Return a number of bytes, by thousands: ``512 B``, ``12.4 GB``."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def in_time(seconds: float) -> str:
    """Return a length of time: ``0.25 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    for size, unit, below, lower in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit} {rest} {lower}" if rest else f"{whole // size} {unit}"
    raise AssertionError(seconds)


def number(value: float | None) -> str:
    """Return a figure of a few digits; a dash for none."""
    if value is None:
        return "-"
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e9)
    return f"{int(value):,}" if whole else f"{value:.4g}"


def printable(text: str) -> str:
    """Return text without what would move a terminal's cursor, change its colours or the order of its letters; lines
    and tabs stay."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def width_of(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text that is at most ``width`` cells wide: broken at blanks, else anywhere."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines += _wrapped_line(paragraph.expandtabs(4), max(1, width))
    return lines


def _wrapped_line(text: str, width: int) -> list[str]:
    lines = []
    while width_of(text) > width:
        end = _prefix(text, width)
        blank = text.rfind(" ", 0, end + 1)
        if blank > 0 and text[:blank].strip():
            lines.append(text[:blank].rstrip())
            text = text[blank:].lstrip()
        else:
            lines.append(text[:end])
            text = text[end:]
    return [*lines, text]


def _prefix(text: str, width: int) -> int:
    """Return how many characters fit into ``width`` cells; at least one."""
    taken = 0
    for place, character in enumerate(text):
        taken += _cells(character)
        if taken > width:
            return max(1, place)
    return len(text)


def shortened(text: str, width: int) -> str:
    """Return a text cut to ``width`` cells, with a mark where it was."""
    if width_of(text) <= width:
        return text
    return text[: _prefix(text, max(1, width - 1))] + "…"
