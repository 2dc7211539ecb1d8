"""Rows and trajectories as other systems were given them, so that what they wrote can be compared value by value. Needs
numpy alone: it is imported where these systems are installed."""

from __future__ import annotations

from typing import Any

import numpy as np


def transitions(first: int, count: int) -> dict[str, np.ndarray]:
    """Return the rows ``first`` and so on: an episode has 5 of them, and every other one is truncated."""
    number = np.arange(first, first + count)
    last = number % 5 == 4
    return {
        "observation": (number[:, None] * 10 + np.arange(3)).astype(np.float32),
        "action": number % 4,
        "pixels": ((number[:, None, None] * 7 + np.arange(16).reshape(4, 4)) % 256).astype(np.uint8),
        "half": (number[:, None] / 4 + np.arange(2)).astype(np.float16),
        "traj": number // 5,
        "next_observation": (number[:, None] * 10 + 5 + np.arange(3)).astype(np.float32),
        "reward": (number / 8).astype(np.float32),
        "terminated": last & (number // 5 % 2 == 0),
        "truncated": last & (number // 5 % 2 == 1),
    }


def priority(number: np.ndarray) -> np.ndarray:
    """Return the priorities of rows, before the exponent."""
    return 1.0 + number % 3


def episode(number: int, length: int) -> dict[str, Any]:
    """Return an episode as Minari has it: one observation more than steps."""
    rng = np.random.default_rng(number)
    ended = number % 2 == 0
    return {
        "observations": {"state": rng.standard_normal((length + 1, 3)), "image": _images(rng, length + 1)},
        "actions": rng.integers(0, 4, length),
        "rewards": rng.standard_normal(length),
        "terminations": np.arange(length) == (length - 1 if ended else -1),
        "truncations": np.arange(length) == (-1 if ended else length - 1),
    }


def _images(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, 4, 4, 3), np.uint8)


LEROBOT_FEATURES: dict[str, tuple[str, tuple[int, ...]]] = {
    "observation.state": ("float32", (3,)),
    "observation.images.front": ("image", (6, 4, 3)),
    "observation.grid": ("int16", (2, 2)),
    "action": ("float32", (2,)),
    "next.reward": ("float64", (1,)),
    "next.done": ("bool", (1,)),
    "next.truncated": ("bool", (1,)),
    "force": ("float32", (1,)),
}
"""The features of a dataset of LeRobot: dtype and shape."""
LEROBOT_LENGTHS = (3, 2, 2)
"""Frames of its episodes: the first is terminated, the second truncated, the last was left where it was."""


def lerobot_episode(number: int) -> dict[str, np.ndarray]:
    """Return an episode as LeRobot is given it, [frames, ...] of each feature, and ``task_index``."""
    rng = np.random.default_rng(100 + number)
    length = LEROBOT_LENGTHS[number]
    found: dict[str, np.ndarray] = {}
    for name, (dtype, shape) in LEROBOT_FEATURES.items():
        whole = dtype in ("image", "int16")
        values = rng.integers(0, 256, (length, *shape)) if whole else rng.standard_normal((length, *shape))
        found[name] = values.astype("uint8" if dtype == "image" else dtype)
    last = np.arange(length)[:, None] == length - 1
    found["next.done"], found["next.truncated"] = last & (number < 2), last & (number == 1)
    found["task_index"] = np.full(length, number % 2)
    return found


LEROBOT_CAMERAS: dict[str, tuple[int, int, int]] = {
    "observation.images.front": (64, 96, 3),
    "observation.images.wrist": (3, 72, 64),
}
"""The videos of a dataset of LeRobot, channels last and first."""
LEROBOT_FILMED = (4, 2, 5, 1, 3)
"""Frames of its episodes."""


def lerobot_pictures(number: int, camera: str) -> np.ndarray:
    """Return what a camera saw in an episode, [frames, *shape] uint8: no two pictures are alike, and a codec changes
    them little."""
    shape, length = LEROBOT_CAMERAS[camera], LEROBOT_FILMED[number]
    first = shape[0] == 3
    height, width = shape[1:] if first else shape[:2]
    y, x = np.mgrid[0:height, 0:width]
    begun, of = 40 * sum(LEROBOT_FILMED[:number]), 90.0 * first
    pictures = [
        np.stack([x + y + of, 250 - x - y - of, np.full_like(x, (begun + 40 * at) % 250)], 0 if first else -1)
        for at in range(length)
    ]
    found: np.ndarray = np.clip(np.stack(pictures), 0, 255).astype(np.uint8)
    return found
