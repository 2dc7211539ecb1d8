"""How batches of several buffers are made one, as options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pipeline.config.base import Options
from pipeline.config.selecting import Anneal
from pipeline.errors import ConfigError


class MixtureOptions(Options, frozen=True):
    """Everything that a :class:`~pipeline.MixedReplay` was built with, but for its buffers.

    Attributes:
        weights: by source, from 0 on; each gets its weight divided by their sum. An :class:`~pipeline.config.Anneal`
            moves with every batch.
        seed: of the random choices; those of a source are its own.
        split: how many rows of a batch come from each source. ``exact``: its share, to the largest remainder (Hamilton
            1792; ties by order), the same for every batch. ``random``: as many as ``count`` throws of a die give.
        columns: ``same``: all sources must have the same columns. ``common``: a batch has those that all of them have.
        read_only: sources whose rows do not change, such as recorded data that was loaded into them. What is drawn
            of them next is part of the mixture's state; they take no priorities.
    """

    weights: dict[str, float | Anneal]
    seed: int = 0
    split: Literal["exact", "random"] = "exact"
    columns: Literal["same", "common"] = "same"
    read_only: tuple[str, ...] = ()

    @classmethod
    def build(cls, weights: Mapping[str, Any], given: Mapping[str, Any]) -> MixtureOptions:
        """Build from keywords; a weight may be a number, an :class:`Anneal` or the mapping of one.

        Raises:
            ConfigError: the message names the option.
        """
        try:
            found = {name: msgspec.convert(each, float | Anneal) for name, each in weights.items()}
        except msgspec.ValidationError as error:
            raise ConfigError.of("weights", dict(weights), f"numbers are needed, or Anneal(...): {error}") from None
        unknown = sorted(given.keys() - set(cls.__struct_fields__))
        if unknown:
            known = ", ".join(sorted(set(cls.__struct_fields__) - {"weights"}))
            raise ConfigError(f"MixedReplay has no option {unknown[0]!r}; it has {known}", option=unknown[0])
        read_only = given.get("read_only", ())
        names = (read_only,) if isinstance(read_only, str) else tuple(read_only)
        return cls(weights=found, **{**given, "read_only": names})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("seed", 0)
        if not self.weights:
            raise ConfigError.of("weights", self.weights, "at least one source is needed")
        for name in self.read_only:
            if name not in self.weights:
                raise ConfigError.of("read_only", name, f"the sources are {', '.join(self.weights)}")
        ends = [0]
        for name, weight in self.weights.items():
            values = (weight.start, weight.end) if isinstance(weight, Anneal) else (weight,)
            if any(not (math.isfinite(value) and 0 <= value <= 1e12) for value in values):
                raise ConfigError.of("weights", weight, f"of {name}: numbers from 0 to 1e12 are needed")
            ends += [weight.over] if isinstance(weight, Anneal) else []
        # Each weight moves in one direction and then stays: were all of them 0 at once, they would be at one of these.
        empty = [at for at in ends if not any(self.at(at).values())]
        if empty:
            raise ConfigError.of("weights", self.weights, f"all of them are 0 after {empty[0]} batches")

    def at(self, batches: int) -> dict[str, float]:
        """Return the weights after so many batches."""
        return {
            name: each.at(batches) if isinstance(each, Anneal) else float(each) for name, each in self.weights.items()
        }
