"""Batches out of several replay buffers, such as recorded data beside what comes in."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.mixed_batch import MixedBatch
from pipeline.config import MixtureOptions
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ConfigError, ForebayError, UsageError
from pipeline.replay.adding_verbs import DEFAULT
from pipeline.replay.arguments import check_known, priorities_of, whole
from pipeline.replay.buffer import ReplayBuffer, Updated
from pipeline.replay.gate import holding
from pipeline.replay.state import generator_state, set_generator
from pipeline.sampler.quotas import divide

Given = Mapping[str, tuple[ReplayBuffer, Any]]


class MixtureStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How a mixture stands."""

    batches: int
    """How many were sampled: the position of annealed weights."""
    drawn: dict[str, int]
    """Rows, or slices, by source."""
    shares: dict[str, float]
    """The share of each source in the next batch."""


class MixedReplay:
    """Several replay buffers, out of which one batch is drawn.

    ::

        mixed = MixedReplay(
            {"online": (buffer, Anneal(start=0.1, end=1.0, over=10_000)), "offline": (recorded, 0.5)},
            read_only="offline",
            seed=1,
        )
        buffer.attach(agent=agent, mixed=mixed)
        batch = mixed.sample(256, n_step=3, gamma=0.99)
        mixed.update_priorities(batch, agent.update(batch))

    Rows are added to the buffers themselves. It can be attached: its position, its random generator, and what is
    drawn next of sources that are ``read_only`` are then saved; the other sources save themselves. Options are those of
    :class:`~pipeline.config.MixtureOptions`.
    """

    def __init__(self, sources: Given, **options: Any) -> None:
        """Args:
        sources: (buffer, weight) by name.
        options: see :class:`~pipeline.config.MixtureOptions`.

        Raises:
            ConfigError: an option is out of range, or a source is no buffer, or is there twice.
        """
        self._buffers: dict[str, ReplayBuffer] = {}
        weights = {}
        for name, given in sources.items():
            if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[0], ReplayBuffer):
                raise ConfigError.of("sources", given, f"of {name}: (a ReplayBuffer, its weight) is needed")
            self._buffers[name], weights[name] = given
        if len({id(buffer) for buffer in self._buffers.values()}) < len(self._buffers):
            raise ConfigError.of("sources", list(self._buffers), "a buffer is there twice")
        self.options = MixtureOptions.build(weights, options)
        self._lock = threading.RLock()  # taken after those of the buffers, never before
        self._rng = np.random.Generator(np.random.PCG64([self.options.seed, 2]))
        self._batches = 0
        self._drawn = dict.fromkeys(self._buffers, 0)

    @property
    def sources(self) -> dict[str, ReplayBuffer]:
        """The buffers by name."""
        return dict(self._buffers)

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, count: int, *, timeout: float | None = DEFAULT, **more: Any) -> MixedBatch:
        """Return ``count`` rows, or slices, of all sources together.

        Args:
            count: how many.
            timeout: seconds to wait for the limiters, all together; by default each source's own option, counted from
                the call on.
            more: what :meth:`~pipeline.ReplayBuffer.sample` takes; it holds for every source.

        Raises:
            ConfigError: what is asked can never be had of a source, or columns differ. Nothing was drawn.
            TimedOut: a source's limiter let nothing out in that time. Nothing was drawn.
            Starved: nothing of a source could be drawn. The mixture stays where it was; sources that were asked before
                it have moved on.
        """
        count = whole("count", count, 1, MOST_ROWS)
        begun = time.monotonic()
        while True:
            # With all locks, as what a limiter lets out now may be gone when the next source has been asked.
            with holding([buffer.gate.lock for buffer in self._buffers.values()]), self._lock:
                before = self._rng.bit_generator.state
                batch = None
                try:
                    places = self._split(count)
                    batch = self._drawn_at_once(places, more)
                finally:
                    if batch is None:
                        self._rng.bit_generator.state = before
                if batch is not None:
                    self._batches += 1
                    return batch
            self._wait(places, timeout, begun)

    def _drawn_at_once(self, places: Mapping[str, int], more: dict[str, Any]) -> MixedBatch | None:
        """Return a batch, if every limiter lets its part out now. The caller has all locks.

        Raises:
            ConfigError: what is asked can never be had of a source; nothing was drawn.
        """
        asked = {name: self._buffers[name] for name, number in places.items() if number}
        schema = self._schema(asked)
        if self.options.columns == "common" and more.get("columns") is None:
            more = {**more, "columns": sorted(schema.names)}
        for name, buffer in asked.items():
            buffer.check_sample(places[name], **more)
        if not all(buffer.can_sample(places[name]) for name, buffer in asked.items()):
            return None
        parts: dict[str, TransitionBatch | None] = dict.fromkeys(self._buffers)
        for name, buffer in asked.items():
            parts[name] = buffer.sample(places[name], timeout=0, **more)
        for name, part in parts.items():
            self._drawn[name] += 0 if part is None else len(part)
        return MixedBatch.join(parts, schema, next(iter(self._buffers.values())).options.returns)

    def _wait(self, places: Mapping[str, int], timeout: float | None, begun: float) -> None:
        """Wait until the limiter of each source would have let its part out.

        Raises:
            TimedOut: that took longer, in all, than ``timeout`` seconds since ``begun``.
        """
        for name, number in places.items():
            if number:
                buffer = self._buffers[name]
                seconds = buffer.options.timeout if timeout is DEFAULT else timeout
                left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begun))
                buffer.wait_to_sample(number, left)

    def _split(self, count: int) -> dict[str, int]:
        weights = self.options.at(self._batches)
        if self.options.split == "exact":
            places = divide(count, {name: each for name, each in weights.items() if each > 0}, {})
            return {name: places.get(name, 0) for name in weights}
        shares = np.array(list(weights.values()))
        thrown = self._rng.multinomial(count, shares / shares.sum())
        return dict(zip(weights, thrown.tolist(), strict=True))

    def _schema(self, asked: Mapping[str, ReplayBuffer]) -> Schema:
        """Return the columns of a batch, which do not depend on the sources that it happens to be of.

        Raises:
            ConfigError: a source has none yet, or they differ.
        """
        known = {name: schema for name, buffer in self._buffers.items() if (schema := buffer.schema) is not None}
        for name in asked:
            if name not in known:
                raise ConfigError(f"source {name} has no columns yet: add rows, or name them with schema=", option=name)
        (first, columns), *others = ((name, schema.columns) for name, schema in known.items())
        for name, own in others:
            by_name = {column.name: column for column in own}
            for column in columns:
                if column.name in by_name and by_name[column.name] != column:
                    raise ConfigError(
                        f"columns: {column} in source {first}, {by_name[column.name]} in {name}", option="columns"
                    )
            differing = sorted({column.name for column in columns} ^ by_name.keys())
            if differing and self.options.columns == "same":
                raise ConfigError(
                    f"columns: sources {first} and {name} differ in {', '.join(differing)}; columns='common' gives out "
                    "what all of them have",
                    option="columns",
                )
            columns = tuple(column for column in columns if column.name in by_name)
        if not columns:
            raise ConfigError("columns: the sources have none in common", option="columns")
        return Schema(columns)

    # -- priorities --------------------------------------------------------------------------------------------

    def update_priorities(self, batch: MixedBatch, priorities: Any) -> Updated:
        """Set the priorities of a batch's rows, each in its own source, all or none of them.

        Args:
            batch: what :meth:`sample` gave.
            priorities: [n] numbers, not negative, in the order of its rows.

        Returns:
            Which were written. Not those of rows that have gone, nor those of a source that is ``read_only`` or whose
            selection knows no priorities.

        Raises:
            ConfigError: one of them is negative or not finite, or their number is another.
        """
        self._check_own(batch)
        keys, values = priorities_of(batch.keys, priorities)
        check_known(keys, 2**63 - 1)
        takers = [name for name in self._takers if batch.is_of(name).any()]
        for name in takers:
            self._buffers[name].drawer.check_priorities(values[batch.is_of(name)])
        applied = np.zeros(len(keys), bool)
        for name in takers:
            own = batch.is_of(name)
            applied[own] = self._buffers[name].update_priorities(keys[own], values[own]).applied
        return Updated(applied)

    @property
    def _takers(self) -> Sequence[str]:
        return [
            name
            for name, buffer in self._buffers.items()
            if name not in self.options.read_only and buffer.drawer.takes_priorities
        ]

    def _check_own(self, batch: MixedBatch) -> None:
        if not isinstance(batch, MixedBatch) or batch.names != tuple(self._buffers):
            raise ConfigError.of("batch", batch, "a batch that this mixture sampled is needed")

    # -- the rest ----------------------------------------------------------------------------------------------

    def can_sample(self, count: int = 1) -> bool:
        """Whether the limiter of every source lets its share of ``count`` rows out now. With ``split="random"``,
        whether it would let out all of them."""
        with self._lock:
            weights = self.options.at(self._batches)
            exact = self.options.split == "exact"
            places = self._split(count) if exact else {name: count * (each > 0) for name, each in weights.items()}
        return all(self._buffers[name].can_sample(number) for name, number in places.items() if number)

    def statistics(self) -> MixtureStatistics:
        """Return how the mixture stands."""
        with self._lock:
            weights = self.options.at(self._batches)
            total = sum(weights.values())
            shares = {name: each / total for name, each in weights.items()}
            return MixtureStatistics(batches=self._batches, drawn=dict(self._drawn), shares=shares)

    def __len__(self) -> int:
        """How many rows the sources hold together."""
        return sum(map(len, self._buffers.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the generator, and what is drawn next of sources that are ``read_only``: plain values
        and arrays."""
        sources = {name: self._buffers[name].sampling_state() for name in self.options.read_only}
        with self._lock:
            return {
                "batches": self._batches,
                "drawn": dict(self._drawn),
                "generator": generator_state(self._rng),
                "read_only": sources,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. Sources that are ``read_only`` must hold the rows that they held.

        Raises:
            ConfigError: it is no such state. Nothing was changed.
            UsageError: a source holds other rows. Nothing was changed.
        """
        try:
            saved = state["read_only"]
            missing = sorted(set(self.options.read_only) ^ saved.keys())
            if missing:
                raise UsageError(f"read_only: {', '.join(missing)} was saved otherwise; build the mixture as it was")
            rng = np.random.Generator(np.random.PCG64(0))
            set_generator(rng, state["generator"])
            batches = whole("batches", state["batches"], 0, 2**63 - 1)
            drawn = {name: whole("drawn", state["drawn"].get(name, 0), 0, 2**63 - 1) for name in self._buffers}
            parts = {name: self._buffers[name].sampling_parts(saved[name]) for name in saved}
        except ForebayError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"state: no state of a mixture ({error!r})", option="state") from None
        for name, own in parts.items():
            self._buffers[name].use_parts(own)
        with self._lock:
            self._rng, self._batches, self._drawn = rng, batches, drawn
