"""How a batch is put together out of drawn keys."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.drawing import Drawer
from pipeline.buffer.transitions.following import Needs, check_reward, n_step_returns, slice_keys, stacked
from pipeline.buffer.transitions.layout import RowLayout
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import Fields, ReplayOptions, Slices
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ConfigError
from pipeline.replay.arguments import whole

Ints = np.ndarray


class Wanted(NamedTuple):
    """What is asked for beside a number of rows."""

    n_step: int = 1
    gamma: float | None = None
    slices: Slices | None = None
    stack: int = 1
    columns: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        n_step: int,
        gamma: float | None,
        slices: Slices | Mapping[str, Any] | None,
        stack: int,
        columns: Sequence[str] | None,
    ) -> Wanted:
        """Check what is asked for.

        Raises:
            ConfigError: it contradicts itself.
        """
        if n_step == 1 and gamma is None and slices is None and stack == 1 and columns is None:
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
        return cls(n_step, gamma, wanted, stack, _names(columns))


def _names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    return (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)


_PLAIN = Wanted()


class Sampler:
    """Draws keys, and gathers what belongs to them."""

    def __init__(self, ring: Ring, drawer: Drawer, rng: np.random.Generator, options: ReplayOptions) -> None:
        self._ring, self._drawer, self._rng, self._options = ring, drawer, rng, options
        self._needs: dict[tuple[Slices | None, int], Needs] = {}

    def sample(self, count: int, wanted: Wanted) -> TransitionBatch:
        """Return a batch; see :meth:`~pipeline.replay.ReplayBuffer.sample`."""
        ring = self._ring
        if wanted is _PLAIN:
            keys = self._drawer.draw(self._rng, count)
            rows = ring.storage.gather(keys % ring.capacity)
            return TransitionBatch(
                rows.layout, rows.records, rows.arrays, keys, self._options.returns, weights=self._weights(keys)
            )
        self._check(wanted)
        columns = self._columns(wanted)
        keys = self._drawer.draw(self._rng, count, self._starts(wanted))
        weights = self._weights(keys)
        if wanted.slices is not None:
            return self._slices(keys, weights, columns, wanted.slices)
        return self._rows(keys, weights, columns, wanted)

    def _weights(self, keys: Ints) -> np.ndarray | None:
        weights = self._drawer.weights(keys)
        return None if weights is None else weights.astype(np.float32)

    def _starts(self, wanted: Wanted) -> Needs | None:
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
        if wanted.slices is not None:
            wanted.slices.check(ring.capacity)
        for option, value in (("n_step", wanted.n_step), ("stack", wanted.stack)):
            if value > ring.capacity:
                raise ConfigError.of(option, value, f"capacity={ring.capacity} rows are held")
        layout = ring.storage.layout
        assert layout is not None
        if wanted.gamma is not None:
            check_reward(ring, fields.reward)
        if wanted.stack > 1 and not _group(layout, fields.obs):
            layout.column(fields.obs)

    def _columns(self, wanted: Wanted) -> list[str] | None:
        """Return the names of the columns that are wanted, a group as all of its own; None: all."""
        layout = self._ring.storage.layout
        assert layout is not None
        if wanted.columns is None:
            return None
        return [each for name in wanted.columns for each in _group(layout, name) or [layout.column(name).name]]

    def _slices(
        self, keys: Ints, weights: np.ndarray | None, columns: list[str] | None, slices: Slices
    ) -> TransitionBatch:
        ring = self._ring
        chain, mask = slice_keys(ring, keys, slices)
        rows = ring.storage.gather(ring.slots(chain), columns)
        return TransitionBatch(
            rows.layout,
            rows.records.reshape(chain.shape),
            rows.columns(),
            keys,
            self._options.returns,
            weights=weights,
            mask=mask,
            burn_in=slices.burn_in,
            bootstrap=slices.bootstrap,
        )

    def _rows(
        self, keys: Ints, weights: np.ndarray | None, columns: list[str] | None, wanted: Wanted
    ) -> TransitionBatch:
        ring, fields = self._ring, self._options.fields
        rows = ring.storage.gather(ring.slots(keys), columns)
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
        if wanted.stack > 1:
            for group, of in ((fields.obs, keys), (fields.next_obs, last)):
                names = [name for name in _group(rows.layout, group) if name in arrays]
                if names:
                    before = _observations(rows.layout, names, fields) if group == fields.next_obs else None
                    arrays |= stacked(ring, of, names, wanted.stack, before)
        return TransitionBatch(
            rows.layout,
            rows.records,
            arrays,
            keys,
            self._options.returns,
            weights=weights,
            discount=discount,
            steps=steps,
        )


def _observations(layout: RowLayout, names: list[str], fields: Fields) -> dict[str, str]:
    """Return, for columns of next observations, those of the observations before, where there are such."""
    there = {each.name: each for each in layout.schema.columns}
    pairs = {name: fields.obs + name.removeprefix(fields.next_obs) for name in names}
    alike = {name: of for name, of in pairs.items() if of in there}
    return {
        name: of
        for name, of in alike.items()
        if (there[name].dtype, there[name].shape) == (there[of].dtype, there[of].shape)
    }


def _group(layout: RowLayout, name: str) -> list[str]:
    """Return the columns of a name, or of a group of that name."""
    return [each.name for each in layout.schema.columns if each.name == name or each.name.startswith(f"{name}.")]
