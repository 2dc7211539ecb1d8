"""What tells how rows are numbered from how they had been: a resume may give them other keys, or give the keys of rows
that it left behind to those that come. Ids of one number in two runs are of one row only where the name is the same."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pipeline.checkpoint.generations import Found, Stored


def name_of(said: Any) -> str:
    """Return the name that follows from what plain values say: the same from the same, on all ranks."""
    return hashlib.blake2b(msgspec.json.encode(said), digest_size=8).hexdigest()


def left_behind(stored: Stored, found: Found) -> str:
    """Return what names the line that is left by going back to a generation: the later ones may have been split, or
    copied, and keys that they have will be those of other rows. Empty: there is none."""
    number = stored.manifest.generation
    later: list[Any] = [
        [each.manifest.generation, each.manifest.checksum]
        for each in found.complete
        if each.manifest.generation > number
    ]
    later += [[other, ""] for other, _ in found.damaged if other > number]
    return name_of(later) if later else ""


def numbered_after(numbered: str, left: str) -> str:
    """Return the name of how rows are numbered where a line was left; without one it stays."""
    return name_of([numbered, left]) if left else numbered
