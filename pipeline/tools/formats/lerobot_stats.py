"""The statistics that LeRobot's policies scale their inputs by: of each episode, and of all."""

from __future__ import annotations

from typing import Any

import numpy as np

Stats = dict[str, np.ndarray]
"""``min``, ``max``, ``mean``, ``std`` and the quantiles of :data:`QUANTILES`, a number for each place of a feature's
last dimension, or for each channel of an image, which is from 0 to 1."""
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def stats_of(values: np.ndarray) -> Stats:
    """Return the statistics of rows [n, places]; n is 1 or more. A quantile lies between its neighbours, as numpy's."""
    ordered = np.sort(values, axis=0)
    with np.errstate(all="ignore"):  # numbers of the user's: not finite ones give what is not finite
        wide = ordered.astype(np.float64)
        found = {
            "min": values.min(axis=0),
            "max": values.max(axis=0),
            "mean": wide.mean(axis=0),
            "std": wide.std(axis=0),
        }
        for name, part in QUANTILES.items():
            at = part * (len(wide) - 1)
            low = int(at)
            high = min(low + 1, len(wide) - 1)
            found[name] = wide[low] + (wide[high] - wide[low]) * (at - low)
    return found


def image_stats_of(images: np.ndarray) -> Stats:
    """Return the statistics of images [n, height, width, 3] uint8, [3] each."""
    count = images.size // 3
    found = []
    for channel in range(3):
        often = np.bincount(images[..., channel].reshape(-1), minlength=256)
        levels, upto = np.arange(256) / 255, np.cumsum(often)
        there = np.flatnonzero(often)
        mean = float(levels @ often) / count
        deviation = float((levels - mean) ** 2 @ often / count) ** 0.5
        quantiles = [float(levels[np.searchsorted(upto, part * count)]) for part in QUANTILES.values()]
        found.append([levels[there[0]], levels[there[-1]], mean, deviation, *quantiles])
    return dict(zip(("min", "max", "mean", "std", *QUANTILES), np.transpose(found), strict=True))


class Totals:
    """Statistics of all episodes, of those of each.

    Means and deviations are joined as in Chan, Golub and LeVeque, *Updating formulae and a pairwise algorithm for
    computing sample variances* (1979); quantiles are means by the number of frames, as in LeRobot.
    """

    def __init__(self) -> None:
        self._count = 0
        self._found: Stats = {}

    def add(self, stats: Stats, count: int) -> None:
        """Take in those of an episode of so many frames."""
        if not self._found:
            self._found, self._count = dict(stats), count
            return
        own, part = self._found, count / (self._count + count)
        with np.errstate(all="ignore"):
            apart = stats["mean"] - own["mean"]
            variance = own["std"] ** 2 * (1 - part) + stats["std"] ** 2 * part + apart**2 * part * (1 - part)
            self._found = {
                "min": np.minimum(own["min"], stats["min"]),
                "max": np.maximum(own["max"], stats["max"]),
                "mean": own["mean"] + apart * part,
                "std": np.sqrt(variance),
                **{name: own[name] + (stats[name] - own[name]) * part for name in QUANTILES},
            }
        self._count += count

    def told(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return them as lists of a shape, with ``count``."""
        lists = {name: array.reshape(shape).tolist() for name, array in self._found.items()}
        return {**lists, "count": [self._count]} if lists else {}
