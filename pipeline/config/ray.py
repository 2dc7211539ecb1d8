"""The options of an engine of Ray actors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.config.base import LEAST, MOST, Options
from pipeline.errors import ConfigError


class RayOptions(Options, frozen=True, kw_only=True):
    """Options of a :class:`~pipeline.RayEngine`."""

    actors: int = 4
    """Actors for each kind of runner, plain and ``async def``, that the tasks have."""
    per_actor: int = 8
    """How many attempts of an ``async def`` runner one actor runs at once. A plain one has its actor to itself."""
    max_actors: int | None = None
    """How many ``resize`` may ask for; ``concurrency`` is lowered to the places that these have. None: ``actors``."""
    address: str | None = None
    """Of the cluster, such as ``"auto"`` or ``"ray://head:10001"``. None: the Ray that this process is connected to, or
    else a local one, which ends with the engine."""
    resources: Mapping[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1})
    """What each actor takes of its node: ``{"CPU": 1, "GPU": 0.5, "simulator": 1}``."""
    runtime_env: Mapping[str, Any] = {}
    """Ray's own: what actors have beside what lies on their node, such as ``{"working_dir": ".", "env_vars": {}}``."""
    init: Mapping[str, Any] = {}
    """More arguments of ``ray.init``, if the engine calls it."""
    grace_s: float = 1.0
    """Seconds that an actor has to end what was cut, or to leave when the pipeline closes; then it is killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("actors", 1)
        self._at_least("per_actor", 1)
        if self.max_actors is None:
            msgspec.structs.force_setattr(self, "max_actors", self.actors)
        if self.most < self.actors:
            raise ConfigError.of("max_actors", self.max_actors, f"no less than actors={self.actors} are needed")
        if not LEAST <= self.grace_s <= MOST:
            raise ConfigError.of("grace_s", self.grace_s, f"seconds from {LEAST:g} to {MOST:g} are needed")
        for name, amount in self.resources.items():
            if not name or not math.isfinite(amount) or amount < 0:
                raise ConfigError.of("resources", {name: amount}, "a name and an amount from 0 are needed")
        if "address" in self.init:
            raise ConfigError.of("init", dict(self.init), "the address is an option of its own: address=")

    @property
    def most(self) -> int:
        """``max_actors``, resolved."""
        assert self.max_actors is not None
        return self.max_actors
