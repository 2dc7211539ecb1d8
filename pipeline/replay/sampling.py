"""How a batch is put together out of drawn keys."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.drawing import Drawer, Starts
from pipeline.buffer.transitions.following import Needs, check_reward, n_step_returns, slice_keys, stacked, stacked_next
from pipeline.buffer.transitions.layout import RowLayout
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.config import Hindsight, ReplayOptions, Slices
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ConfigError, StoreError, UsageError
from pipeline.replay.arguments import whole
from pipeline.replay.hindsight import Relabelling
from pipeline.replay.where import Matching, Where

Ints = np.ndarray


class Wanted(NamedTuple):
    """What is asked for beside a number of rows."""

    n_step: int = 1
    gamma: float | None = None
    slices: Slices | None = None
    stack: int = 1
    columns: tuple[str, ...] | None = None
    hindsight: Hindsight | None = None
    where: Where | None = None

    @classmethod
    def of(
        cls,
        n_step: int,
        gamma: float | None,
        slices: Slices | Mapping[str, Any] | None,
        stack: int,
        columns: Sequence[str] | None,
        hindsight: Hindsight | Mapping[str, Any] | None = None,
        where: Any = None,
    ) -> Wanted:
        """Check what is asked for.

        Raises:
            ConfigError: it contradicts itself.
        """
        given = (gamma, slices, columns, hindsight, where)
        if (n_step, stack) == (1, 1) and all(each is None for each in given):
            return _PLAIN
        n_step, stack = whole("n_step", n_step, 1, MOST_ROWS), whole("stack", stack, 1, MOST_ROWS)
        if gamma is None and n_step > 1:
            raise ConfigError.of("gamma", gamma, f"a discount factor is needed with n_step={n_step}")
        if gamma is not None and not (isinstance(gamma, numbers.Real) and 0 <= gamma <= 1):
            raise ConfigError.of("gamma", gamma, "a number from 0 to 1 is needed")
        wanted = None if slices is None else Slices.of(slices)
        if wanted is not None and (gamma is not None or stack > 1):
            raise ConfigError(
                "slices: n_step, gamma and stack are for single rows; returns of a slice follow from its rewards",
                option="slices",
            )
        if hindsight is not None and (wanted is not None or n_step > 1 or stack > 1):
            raise ConfigError(
                "hindsight: slices, n_step and stack go on with rows whose goals and rewards are the old ones; relabel "
                "single rows",
                option="hindsight",
            )
        her = None if hindsight is None else Hindsight.of(hindsight)
        return cls(n_step, gamma, wanted, stack, _names(columns), her, Where.of(where))


def _names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    return (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)


_PLAIN = Wanted()


class Sampler:
    """Draws keys, and gathers what belongs to them."""

    def __init__(
        self,
        ring: Ring,
        drawer: Drawer,
        rng: np.random.Generator,
        options: ReplayOptions,
        shared: SharedNextObs | None = None,
    ) -> None:
        self._ring, self._drawer, self._rng, self._options = ring, drawer, rng, options
        self._shared = shared
        self._needs: dict[tuple[Slices | None, int], Needs] = {}

    def sample(self, count: int, wanted: Wanted, *, reading: bool = False) -> TransitionBatch:
        """Return a batch; see :meth:`~pipeline.replay.ReplayBuffer.sample`.

        Raises:
            StoreError: rows lie on the disk alone, and cannot be read; nothing was drawn.
        """
        ring = self._ring
        if ring.storage.unread is not None and not reading:
            return self._sample_and_read(count, wanted)
        if wanted is _PLAIN:
            keys = self._drawer.draw(self._rng, count)
            rows = ring.storage.gather(ring.slots(keys))
            if self._shared is not None:
                rows.arrays |= self._shared.gather(keys, self._shared.names())
            return TransitionBatch(
                self._layout, rows.records, rows.arrays, keys, self._options.returns, weights=self._weights(keys)
            )
        self._check(wanted)
        wanted = wanted._replace(columns=self._columns(wanted))
        keys = self._drawer.draw(self._rng, count, self._starts(wanted))
        weights = self._weights(keys)
        if wanted.slices is not None:
            return self._slices(keys, weights, wanted, wanted.slices)
        return self._rows(keys, weights, wanted)

    def _sample_and_read(self, count: int, wanted: Wanted) -> TransitionBatch:
        before, random = self._drawer.before(), self._rng.bit_generator.state
        try:
            return self.sample(count, wanted, reading=True)
        except (StoreError, UsageError):
            self._drawer.undo(before)
            self._rng.bit_generator.state = random
            raise

    def check(self, wanted: Wanted) -> None:
        """Refuse what can never be had, before anything is drawn.

        Raises:
            ConfigError: it never can.
        """
        if wanted is not _PLAIN:
            self._check(wanted)
            self._columns(wanted)

    @property
    def _layout(self) -> RowLayout:
        """Where the columns that are given out lie."""
        layout = self._ring.storage.layout if self._shared is None else self._shared.layout
        assert layout is not None
        return layout

    def _weights(self, keys: Ints) -> np.ndarray | None:
        weights = self._drawer.weights(keys)
        return None if weights is None else weights.astype(np.float32)

    def _starts(self, wanted: Wanted) -> Starts | None:
        needs = self._needed(wanted)
        return needs if wanted.where is None else Matching(self._ring, wanted.where, self._column, needs)

    def _needed(self, wanted: Wanted) -> Needs | None:
        if wanted.slices is None and wanted.stack == 1:
            return None
        key = (wanted.slices, wanted.stack)
        if key not in self._needs:
            if len(self._needs) >= 16:
                self._needs.clear()
            self._needs[key] = Needs(self._ring, *key)
        return self._needs[key]

    def _check(self, wanted: Wanted) -> None:
        ring, fields = self._ring, self._options.fields
        if ring.scattered:
            self._check_alone(wanted)
        if wanted.slices is not None:
            wanted.slices.check(ring.capacity)
        for option, value in (("n_step", wanted.n_step), ("stack", wanted.stack)):
            if value > ring.capacity:
                raise ConfigError.of(option, value, f"capacity={ring.capacity} rows are held")
        layout = self._layout
        if wanted.gamma is not None:
            check_reward(ring, fields.reward)
        if wanted.hindsight is not None:
            Relabelling.of(wanted.hindsight, layout, fields)  # before anything is drawn
        if wanted.where is not None:
            wanted.where.check(layout)
            Matching(ring, wanted.where, self._column, None).mask(ring.one())  # before anything is drawn
        if wanted.stack > 1 and not _group(layout, fields.obs):
            layout.column(fields.obs)

    def _check_alone(self, wanted: Wanted) -> None:
        asked = {
            "slices": wanted.slices is not None,
            "n_step": wanted.n_step > 1,
            "stack": wanted.stack > 1,
            "hindsight": wanted.hindsight is not None,
        }
        for option in (name for name, is_ in asked.items() if is_):
            raise ConfigError(
                f"{option}: it is made of rows that follow each other, and with "
                f"remove={self._options.remove.by!r} none knows its neighbours; build the buffer with remove='fifo'",
                option=option,
            )

    def _columns(self, wanted: Wanted) -> tuple[str, ...] | None:
        """Return the names of the columns that are wanted, a group as all of its own; None: all."""
        if wanted.columns is None:
            return None
        layout = self._layout
        return tuple(each for name in wanted.columns for each in _group(layout, name) or [layout.column(name).name])

    def _slices(self, keys: Ints, weights: np.ndarray | None, wanted: Wanted, slices: Slices) -> TransitionBatch:
        ring = self._ring
        chain, mask = slice_keys(ring, keys, slices)
        rows = ring.storage.gather(ring.slots(chain), wanted.columns)
        arrays = dict(rows.columns())
        if self._shared is not None:
            nexts = self._shared.gather(chain.reshape(-1), self._shared.names(wanted.columns))
            arrays |= {name: array.reshape(*chain.shape, *array.shape[1:]) for name, array in nexts.items()}
        return TransitionBatch(
            self._layout,
            rows.records.reshape(chain.shape),
            arrays,
            keys,
            self._options.returns,
            weights=weights,
            mask=mask,
            burn_in=slices.burn_in,
            bootstrap=slices.bootstrap,
        )

    def _rows(self, keys: Ints, weights: np.ndarray | None, wanted: Wanted) -> TransitionBatch:
        ring, fields = self._ring, self._options.fields
        rows = ring.storage.gather(ring.slots(keys), wanted.columns)
        arrays = dict(rows.arrays)
        discount = steps = None
        last = keys
        if wanted.gamma is not None:
            returns = n_step_returns(ring, keys, wanted.n_step, wanted.gamma, fields.reward)
            discount, steps, last = returns.discount, returns.steps, returns.last
            if fields.reward in arrays:
                arrays[fields.reward] = returns.reward
            if wanted.n_step > 1:
                ends = [*_group(rows.layout, fields.next_obs), fields.terminated, fields.truncated, fields.done]
                ends = [name for name in ends if name in arrays]
                if ends:
                    arrays |= ring.storage.gather(ring.slots(last), ends).arrays
        if self._shared is not None:
            arrays |= self._shared.gather(last, self._shared.names(wanted.columns))
        if wanted.stack > 1:
            self._stack(arrays, keys, last, wanted.stack)
        relabelled = None
        if wanted.hindsight is not None:
            relabelled = self._relabel(arrays, keys, discount, wanted)
        return TransitionBatch(
            self._layout,
            rows.records,
            arrays,
            keys,
            self._options.returns,
            weights=weights,
            discount=discount,
            steps=steps,
            relabelled=relabelled,
        )

    def _relabel(self, arrays: Arrays, keys: Ints, discount: np.ndarray | None, wanted: Wanted) -> np.ndarray:
        """Give some of the rows other goals; return which [n] bool."""
        assert wanted.hindsight is not None
        relabelling = Relabelling.of(wanted.hindsight, self._layout, self._options.fields)
        chosen, later = relabelling.choose(self._ring, keys, self._rng)
        relabelled = np.zeros(len(keys), bool)
        relabelled[chosen] = True
        if len(chosen):
            own, goal = (self._column(relabelling.achieved, of) for of in (keys[chosen], later))
            ended = relabelling.apply(arrays, chosen, own, goal, self._options.fields)
            if ended is not None and discount is not None:
                discount[chosen] = np.where(ended, 0.0, wanted.gamma or 0.0)
        return relabelled

    def _column(self, name: str, keys: Ints) -> np.ndarray:
        """Copy a column out, wherever it lies."""
        if self._shared is not None and name in self._shared.names():
            return self._shared.gather(keys, [name])[name]
        return self._ring.storage.gather(self._ring.slots(keys), [name]).arrays[name]

    def _stack(self, arrays: Arrays, keys: Ints, last: Ints, count: int) -> None:
        """Put stacks in the place of observations and next ones: those of ``keys`` and, n-step, of ``last``."""
        ring, fields, layout = self._ring, self._options.fields, self._layout
        twins = {fields.next_obs + name[len(fields.obs) :]: name for name in _group(layout, fields.obs)}
        nexts = [name for name in _group(layout, fields.next_obs) if name in arrays]
        like = [name for name in nexts if name in twins and _alike(layout, name, twins[name])]
        given = {name: arrays[name] for name in like}
        if given:
            arrays |= stacked_next(ring, last, given, {name: twins[name] for name in like}, count)
        for names, of in ((_group(layout, fields.obs), keys), ([each for each in nexts if each not in like], last)):
            wanted = [name for name in names if name in arrays]
            if wanted:
                arrays |= stacked(ring, of, wanted, count)


def _alike(layout: RowLayout, one: str, other: str) -> bool:
    left, right = layout.column(one), layout.column(other)
    return (left.dtype, left.shape) == (right.dtype, right.shape)


def _group(layout: RowLayout, name: str) -> list[str]:
    """Return the columns of a name, or of a group of that name."""
    return [each.name for each in layout.schema.columns if each.name == name or each.name.startswith(f"{name}.")]
