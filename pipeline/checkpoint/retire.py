"""Which generations stay, and removing the others."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import NamedTuple

from pipeline.checkpoint.collect import Needs
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import MANIFEST_FILE
from pipeline.checkpoint.removing import PART, remove_generation, remove_tree
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout

_NAME = re.compile(r"\d+")


class Kept(NamedTuple):
    """Which generations stay. The newest complete one always does."""

    steps: int | None
    """The newest one of each of so many distinct steps; None: all."""
    every: int | None = None
    """The newest one of each step that this divides."""
    within_s: float | None = None
    """Those that were written less than so many seconds before ``now``."""
    now: float = 0.0
    """Seconds since 1970."""
    held: frozenset[int] = frozenset()
    """Numbers of those that are being read."""

    def recent(self, stored: list[Stored]) -> set[int]:
        """Return the numbers of those that stay as they are among the newest, of ``stored`` by rising number."""
        if self.steps is None:
            return {each.manifest.generation for each in stored}
        newest = {each.manifest.step: each.manifest.generation for each in stored}
        return set(sorted(newest.values())[-self.steps :]) | {each.manifest.generation for each in stored[-1:]}

    def choose(self, stored: list[Stored]) -> set[int]:
        """Return the numbers of those that stay, of ``stored`` by rising number."""
        kept = self.recent(stored)
        newest = {each.manifest.step: each.manifest.generation for each in stored}
        if self.every is not None:
            kept |= {number for step, number in newest.items() if step % self.every == 0}
        if self.within_s is not None:
            kept |= {each.manifest.generation for each in stored if self.now - _written(each) < self.within_s}
        return kept | self.held


def needs_of(stored: Iterable[Stored], reusable: Collection[int] | None) -> Needs:
    """Return what generations need of the segments; those that are ``reusable`` (None: all), of what came after too."""
    needs = Needs()
    for each in stored:
        needs.add(each.manifest, reusable=reusable is None or each.manifest.generation in reusable)
    return needs


def _written(stored: Stored) -> float:
    """When a generation was written, in seconds since 1970; one that does not say is taken for an old one."""
    try:
        return datetime.fromisoformat(stored.manifest.written).timestamp()
    except ValueError:
        return -math.inf


def retire(layout: Layout, files: FilesLike, found: Iterable[Stored], kept: Kept) -> list[int]:
    """Remove the generations that are not kept, and what crashes left over. Blocks.

    Returns:
        The numbers of the generations that were removed.
    """
    stored = sorted(found, key=lambda each: each.manifest.generation)
    staying = kept.choose(stored)
    gone = []
    for each in stored:
        if each.manifest.generation not in staying:
            remove_generation(files, each.folder)
            gone.append(each.manifest.generation)
    newest = stored[-1].manifest.generation if stored else -1
    for name in os.listdir(layout.generations):
        number, dot, rest = name.partition(".")
        folder = os.path.join(layout.generations, name)
        unfinished = dot + rest == PART
        if not dot and _NAME.fullmatch(name):
            unfinished = not os.path.exists(os.path.join(folder, MANIFEST_FILE))
        if unfinished and _NAME.fullmatch(number) and int(number) <= newest:
            remove_tree(files, folder)
    return gone
