"""What is made of rows that follow each other: slices, n-step returns, stacked frames, relabelled goals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.layout import END, EPISODE, PLACE, TERMINATED
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import Slices
from pipeline.errors import ConfigError

Ints = np.ndarray


class Needs:
    """Which rows can be drawn, for slices and for stacked frames. A kind of
    :class:`~pipeline.buffer.transitions.drawing.Starts`."""

    def __init__(self, ring: Ring, slices: Slices | None, stack: int) -> None:
        self._ring, self._slices, self._stack = ring, slices, stack
        self._all: Ints | None = None
        self._as_of = (-1, -1)

    def mask(self, keys: Ints) -> Ints:
        ring, slices = self._ring, self._slices
        valid = np.ones(len(keys), bool)
        if slices is not None:
            if not slices.pad:
                valid &= ring.following(keys) >= slices.span
            if slices.start == "first":
                valid &= ring.mark(PLACE, keys) == 0
            if slices.ended:
                valid &= self._ended(keys)
        if self._stack > 1:
            oldest, _ = ring.chain_back(keys, self._stack)
            valid &= oldest[:, -1] >= ring.oldest
        return valid

    def _ended(self, keys: Ints) -> Ints:
        return ~np.isin(self._ring.mark(EPISODE, keys), self._ring.episodes.open())

    def all(self) -> Ints:
        ring = self._ring
        if self._all is None or self._as_of != (ring.added, ring.cuts):
            keys = ring.keys()
            self._all, self._as_of = keys[self.mask(keys)], (ring.added, ring.cuts)
        return self._all


def slice_keys(ring: Ring, keys: Ints, slices: Slices) -> tuple[Ints, Ints]:
    """Return the keys of slices that begin at ``keys`` [n], which can be drawn for them.

    Returns:
        keys [n, window] and whether each is one of the slice's own rows; where not, the last one is repeated.
    """
    stride = ring.stride
    if stride and not slices.pad:  # each has all of its rows, or it could not be drawn
        every = keys[:, None] + np.arange(0, slices.span * stride, slices.dilation * stride)
        return every, np.ones(every.shape, bool)
    chain, counts = ring.chain(keys, slices.span)
    places = np.arange(0, slices.span, slices.dilation)
    mask = places < counts[:, None]
    if slices.dilation > 1:
        chain = chain[
            np.arange(len(keys))[:, None],
            np.where(mask, places, (counts[:, None] - 1) // slices.dilation * slices.dilation),
        ]
    return chain, mask


class Returns(NamedTuple):
    """n-step returns of n rows."""

    reward: np.ndarray
    """``sum_k gamma^k r_k`` over the rows that were summed, in the reward's dtype (float64 for one of whole
    numbers)."""
    discount: np.ndarray
    """[n] float32: ``gamma^m`` after m summed rows, 0 where the episode terminated: what the value of ``last``'s next
    observation is multiplied with."""
    last: Ints
    """[n] keys of the last rows that were summed."""
    steps: Ints
    """[n] how many were."""


def n_step_returns(ring: Ring, keys: Ints, n: int, gamma: float, reward: str) -> Returns:
    """Sum up to ``n`` rewards from each row on: fewer where the episode ends, or has no more rows yet.

    Source: Sutton and Barto, Reinforcement Learning (2018), eq. 7.1; cut as in Hessel et al. 2018, arXiv:1710.02298.
    """
    if n == 1:
        last, counts = keys, np.ones(len(keys), np.int64)
        total = ring.mark(reward, keys)
        if total.dtype.kind != "f":
            total = total.astype(np.float64)
    else:
        chain, counts = ring.chain(keys, n)
        rewards = ring.mark(reward, chain.reshape(-1)).reshape(len(keys), n)
        if rewards.dtype.kind != "f":
            rewards = rewards.astype(np.float64)
        factors = np.where(np.arange(n) < counts[:, None], gamma ** np.arange(n), 0.0)
        total = np.einsum("ij,ij->i", rewards, factors).astype(rewards.dtype)
        last = chain[:, -1]
    discount = np.where(ring.mark(END, last) == TERMINATED, 0.0, gamma**counts).astype(np.float32)
    return Returns(total, discount, last, counts)


def check_reward(ring: Ring, name: str) -> None:
    """Raises:
    ConfigError: there is no such column of one real number.
    """
    assert ring.storage.layout is not None
    column = ring.storage.layout.column(name)
    if column.shape or column.torch_only is not None or column.bits.kind == "c":
        hint = "; add it as [n], not [n, 1]" if column.shape == (1,) else ""
        raise ConfigError(
            f"column {column}: one real number in each row is needed for returns, of a dtype that numpy has{hint}",
            option="fields",
        )


def later_rows(ring: Ring, keys: Ints, rng: np.random.Generator) -> Ints:
    """Return for each row a row of the same episode, itself or a later one, each alike (the strategy ``future`` of
    Andrychowicz et al. 2017, arXiv:1707.01495)."""
    left = ring.following(keys).astype(np.int64)
    steps = rng.integers(0, left)
    stride = ring.stride
    if stride:
        return keys + steps * stride
    chain = ring.chain(keys, int(steps.max(initial=0)) + 1)[0]
    return chain[np.arange(len(keys)), steps]


def last_rows(ring: Ring, keys: Ints) -> Ints:
    """Return for each row the last one of its episode that there is."""
    left = ring.following(keys).astype(np.int64)
    stride = ring.stride
    if stride:
        return keys + (left - 1) * stride
    return ring.chain(keys, int(left.max(initial=1)))[0][:, -1]


def earlier_or_later_rows(ring: Ring, keys: Ints, rng: np.random.Generator) -> Ints:
    """Return for each row a row of the same episode that is there, itself or any other, each alike (the strategy
    ``episode`` of Andrychowicz et al. 2017, arXiv:1707.01495)."""
    left, places = ring.following(keys).astype(np.int64), ring.mark(PLACE, keys).astype(np.int64)
    stride = ring.stride
    if stride:
        steps = rng.integers(-np.minimum(places, (keys - ring.oldest) // stride), left)
        return keys + steps * stride
    before = ring.chain_back(keys, int(places.max(initial=0)) + 1)[0]
    steps = rng.integers(-np.minimum(places, (before >= ring.oldest).sum(axis=1) - 1), left)
    after = ring.chain(keys, int(steps.max(initial=0)) + 1)[0]
    rows = np.arange(len(keys))
    found: Ints = np.where(steps < 0, before[rows, np.maximum(-steps, 0)], after[rows, np.maximum(steps, 0)])
    return found


def stacked(ring: Ring, keys: Ints, names: list[str], count: int) -> Arrays:
    """Return columns [n, count, ...] of the rows that end with each of ``keys``, oldest first; before an episode's
    first row that one is repeated."""
    chain, _ = ring.chain_back(keys, count)
    rows = ring.storage.gather(ring.slots(chain[:, ::-1]), names)
    return rows.columns()


def stacked_next(ring: Ring, keys: Ints, nexts: Arrays, of: Mapping[str, str], count: int) -> Arrays:
    """Return next observations [n, count, ...] as the successors' stacks are: the newest of them, oldest first.

    Args:
        ring: of the rows.
        keys: [n] of the rows.
        nexts: [n, ...] their next observations by column.
        of: for each of these columns that of the observation.
        count: how many are stacked, 2 at the least.
    """
    chain, _ = ring.chain_back(keys, count - 1)
    rows = ring.storage.gather(ring.slots(chain[:, ::-1]), set(of.values())).columns()
    return {name: np.concatenate([rows[of[name]], array[:, None]], axis=1) for name, array in nexts.items()}
