"""The order of an epoch: a keyed permutation that needs no state.

Position ``p`` of epoch ``e`` maps to an index by a Feistel network over the smallest square power of two that
holds the length; values that fall outside are walked on until they fall inside (Black and Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002). So any position of any epoch is known at once, and nothing but
``(seed, epoch, position)`` decides it.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6


def shuffled(seed: int, epoch: int, positions: np.ndarray, length: int) -> np.ndarray:
    """Return the index of each position.

    Args:
        seed: the run's seed, any 64-bit integer.
        epoch: counted from 0.
        positions: int64 ``[n]``, each in ``0 .. length - 1``.
        length: how many items the epoch has.

    Returns:
        int64 ``[n]``; over all positions a permutation of ``0 .. length - 1``.
    """
    if length <= 1:
        return np.zeros(len(positions), np.int64)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = _feistel(positions.astype(np.uint64), keys, half)
    outside = values >= np.uint64(length)
    while outside.any():
        values[outside] = _feistel(values[outside], keys, half)
        outside = values >= np.uint64(length)
    return values.astype(np.int64)


def in_order(seed: int, epoch: int, positions: np.ndarray, length: int) -> np.ndarray:
    """Return the positions themselves: the order of a source that is not shuffled."""
    return positions


def _keys(seed: int, epoch: int) -> np.ndarray:
    raw = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(raw, "<u8").astype(np.uint64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014); overflow wraps, as it is meant to."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
