"""Tables that fit a width: columns are wrapped first; where that is not enough, each row becomes lines of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.cli.words import width_of, wrapped

_NUMBER = re.compile(r"[-+]?(\d[\d,]*(\.\d+)?(e[-+]?\d+)?|inf|nan)( (B|kB|MB|GB|TB))?")
_GAP = 2
_LEAST = 10
"""Cells below which a column of text is not made narrower."""


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> tuple[list[str], list[str]]:
    """Return the lines of a table's header, and those of its rows; numbers stand to the right. Where there is no room
    for a table, there is no header.

    Args:
        header: a name for each column.
        rows: the cells, as text.
        width: cells that there are; None: as many as it takes.
    """
    right = [bool(rows) and all(_is_number(row[at]) for row in rows) for at in range(len(header))]
    widths = [max(map(width_of, (name, *(row[at] for row in rows)))) for at, name in enumerate(header)]
    fitting = widths if width is None else _fitted(widths, right, header, width)
    if fitting is None:
        return [], _stacked(header, rows, width or 0)
    return _row(header, fitting, right), [line for row in rows for line in _row(row, fitting, right)]


def _is_number(cell: str) -> bool:
    return not cell or cell == "-" or _NUMBER.fullmatch(cell) is not None


def _fitted(widths: list[int], right: list[bool], header: Sequence[str], width: int) -> list[int] | None:
    """Return narrower columns that fit, taken from the widest of text; None if there are none."""
    fitted = list(widths)
    least = [w if r else min(w, max(_LEAST, width_of(name))) for w, r, name in zip(widths, right, header, strict=True)]
    excess = sum(fitted) + _GAP * (len(fitted) - 1) - width
    while excess > 0:
        can = [at for at in range(len(fitted)) if fitted[at] > least[at]]
        if not can:
            return None
        widest = max(can, key=lambda at: fitted[at])
        fitted[widest] -= 1
        excess -= 1
    return fitted


def _row(cells: Sequence[str], widths: list[int], right: list[bool]) -> list[str]:
    parts = [wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for at in range(max(map(len, parts))):
        line = ""
        for part, width, to_right in zip(parts, widths, right, strict=True):
            text = part[at] if at < len(part) else ""
            blanks = " " * (width - width_of(text))
            line += (blanks + text if to_right else text + blanks) + " " * _GAP
        lines.append(line.rstrip())
    return lines


def _stacked(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return each row as its first cell, and the others below it, one a line."""
    names = max(map(width_of, header[1:]), default=0)
    lines: list[str] = []
    for row in rows:
        lines += wrapped(f"{header[0]} {row[0]}", width)
        for name, cell in zip(header[1:], row[1:], strict=True):
            lines += field_lines(name, cell, names, width, indent=2)
    return lines


def field_lines(name: str, text: str, names: int, width: int | None, *, indent: int = 0) -> list[str]:
    """Return a name and, beside it, its text; below it, if the width has no room for both."""
    lead = " " * indent + name + " " * (names - width_of(name) + _GAP)
    if width is None:
        first, *rest = text.split("\n")
        return [(lead + first).rstrip(), *(" " * len(lead) + line for line in rest)]
    room = width - width_of(lead)
    if room < _LEAST:
        inner = " " * (indent + 2)
        return [" " * indent + name, *(inner + line for line in wrapped(text, width - len(inner)))]
    first, *rest = wrapped(text, room)
    return [(lead + first).rstrip(), *(" " * width_of(lead) + line for line in rest)]
