"""The statistics that LeRobot's policies scale their inputs by: ``meta/stats.json``."""

from __future__ import annotations

from typing import Any

import numpy as np


class Moments:
    """Smallest, largest, mean and standard deviation of what comes batch by batch, for each number of a row.

    Batches are joined as in Chan, Golub and LeVeque, *Updating formulae and a pairwise algorithm for computing sample
    variances* (1979), in float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._min: Any = np.inf
        self._max: Any = -np.inf

    def add(self, values: np.ndarray) -> None:
        """Take in rows [n, ...]; n is 1 or more."""
        with np.errstate(all="ignore"):  # numbers of the user's: not finite ones give what is not finite
            wide = values.astype(np.float64)
            count, mean = len(wide), wide.mean(axis=0)
            squares = ((wide - mean) ** 2).sum(axis=0)
            both, apart = self.count + count, mean - self._mean
            self._mean = self._mean + apart * (count / both)
            self._squares = self._squares + squares + apart**2 * (self.count * count / both)
            self._min = np.minimum(self._min, wide.min(axis=0))
            self._max = np.maximum(self._max, wide.max(axis=0))
        self.count = both

    def told(self, shape: tuple[int, ...], count: int) -> dict[str, Any]:
        """Return them as lists of a shape; ``count`` is of frames."""
        with np.errstate(all="ignore"):
            deviation = np.sqrt(self._squares / self.count)
        found = {"min": self._min, "max": self._max, "mean": self._mean, "std": deviation}
        return {**{name: np.reshape(value, shape).tolist() for name, value in found.items()}, "count": [count]}


def image_rows(images: np.ndarray) -> np.ndarray:
    """Return the pixels of images [n, height, width, 3] as rows, from 0 to 1, as LeRobot has them."""
    return images.reshape(-1, images.shape[-1]) / 255.0
