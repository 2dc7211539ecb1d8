"""Runs of which one was made of another one, or both of a third: what they have in common would be there twice.

What has one id in several runs is found by that; what a process, a reshard or a salvage gave an id of its own is not.
So it is compared, too, from which runs the content of each has come (:mod:`pipeline.checkpoint.descent`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.descent import distinct, ways_of
from pipeline.checkpoint.manifest import MadeOf
from pipeline.errors import ConfigError
from pipeline.store.layout import RunFile, Way
from pipeline.tools.sources import Source


class Read(NamedTuple):
    """A run that is read, and what names that which is in it."""

    source: Source
    parts: Sequence[MadeOf]

    @property
    def ways(self) -> list[Way]:
        """From where its content has come."""
        source = self.source
        own = {part.name for part in self.parts if part.run_id == source.run_id}
        named = min(own, default="")
        return ways_of(source.layout, source.run_id, source.stored.manifest, kept=not own, named=named)


def check_apart(reads: Sequence[Read]) -> None:
    """Refuse runs that have something in common, as far as their ids do not tell.

    Raises:
        ConfigError: the message names two, and says what to do.
    """
    came: dict[str, list[tuple[Source, Way]]] = {}
    for each in reads:
        for way in each.ways:
            came.setdefault(way.run_id, []).append((each.source, way))
    for ways in came.values():
        for (one, first), (other, second) in _differing(ways):
            if not _disjoint(first, second):
                raise _related(one, other, first if len(first.directory) >= len(second.directory) else second)


def _differing(ways: Sequence[tuple[Source, Way]]) -> Iterator[tuple[tuple[Source, Way], tuple[Source, Way]]]:
    """Yield those of two runs each by whose ids nobody can tell whether they have something in common."""
    if len({way.named for _, way in ways}) > 1:
        for one, other in combinations(ways, 2):
            if one[0].directory != other[0].directory and one[1].named != other[1].named:
                yield one, other


def _disjoint(one: Way, other: Way) -> bool:
    splits = dict(one.splits)
    return any(splits.get(lot, part) != part for lot, part in other.splits)


def _related(one: Source, other: Source, common: Way) -> ConfigError:
    if one.run_id == other.run_id:
        how = (
            f"{one.directory} and {other.directory} are both run {one.run_id}, whose rows a resume has given other keys"
        )
    elif common.run_id in (one.run_id, other.run_id):
        old, new = (one, other) if common.run_id == one.run_id else (other, one)
        how = f"{new.directory} was made of {old.directory} (run {common.run_id})"
    else:
        what = f"{common.directory} (run {common.run_id})" if common.directory else f"run {common.run_id}"
        how = f"{one.directory} and {other.directory} were both made of {what}"
    return ConfigError(
        f"runs: {how}, so that what they have in common would be there twice. Leave one of them out; or, if they have "
        "nothing in common any more, or it is to be there twice, say allow_related=True (--allow-related)",
        option="allow_related",
    )


class Descent:
    """What the markers of new runs say of where their content has come from."""

    def __init__(self, reads: Sequence[Read], runs: int) -> None:
        """Args:
        reads: of what they are made.
        runs: how many are made; of several each has another part of all.
        """
        self._ways = distinct(way for each in reads for way in each.ways)
        self._lot = secrets.token_hex(8) if runs > 1 else ""

    def of(self, run: RunFile, parts: Sequence[MadeOf]) -> RunFile:
        """Return the marker of a run which is made of ``parts``, that say how much there is of each."""
        having = {part.name for part in parts if part.units}
        ways = [way for way in self._ways if way.named in having]
        if self._lot:
            splits = [(*way.splits, (self._lot, run.run_id)) for way in ways]
            ways = [msgspec.structs.replace(way, splits=each) for way, each in zip(ways, splits, strict=True)]
        return msgspec.structs.replace(run, made_of=ways)
