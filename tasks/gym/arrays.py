"""Observations, actions and infos of any structure as flat, named copies.

``obs`` of a ``Box`` is one array named ``obs``; of a ``Dict`` or ``Tuple`` space it is one array per leaf, named
``obs.camera``, ``obs.0``, ``obs.robot.joints``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RolloutInvalid

Array: TypeAlias = NDArray[Any]
Named: TypeAlias = dict[str, Array]

RESERVED = frozenset(("obs", "action", "reward", "terminated", "truncated", "discount", "next_obs", "final_obs"))


def named(name: str, value: Any) -> Named:
    """Return copies of the leaves of ``value`` (nested mappings and tuples of arrays or numbers) by name.

    Raises:
        RolloutInvalid: a leaf is no array of numbers or bools, or two leaves would have one name.
    """
    if isinstance(value, (Mapping, tuple)):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        leaves: Named = {}
        for key, part in parts:
            for leaf, array in named(f"{name}.{key}", part).items():
                if leaf in leaves:
                    raise RolloutInvalid(f"two parts of {name} would both be called {leaf!r}; rename a key")
                leaves[leaf] = array
        return leaves
    try:
        if hasattr(value, "detach"):  # a torch tensor, perhaps on a device or with a gradient
            value = value.detach().cpu().numpy()
        array = np.array(value)
    except (TypeError, ValueError) as error:
        raise RolloutInvalid(f"{name} is a {type(value).__name__} that makes no array: {error}") from error
    if array.dtype.kind not in "biufc":
        raise RolloutInvalid(
            f"{name} is a {type(value).__name__} (dtype {array.dtype}); arrays of numbers or bools, and nested "
            "dicts and tuples of them, can be stored. Wrap the environment to encode the rest"
        )
    return {name: array}


def named_extras(extras: Mapping[str, Any] | None) -> Named:
    """Return copies of what a policy gave beside its action.

    Raises:
        RolloutInvalid: a name is taken, or a value is no array of numbers or bools.
    """
    leaves: Named = {}
    for key, value in (extras or {}).items():
        if key.partition(".")[0] in RESERVED:
            raise RolloutInvalid(f"extra {key!r}: this name is taken; call it otherwise")
        leaves.update(named(key, value))
    return leaves


def stacked(steps: Sequence[Named]) -> Named:
    """Return the arrays of all ``steps``, each stacked on a new first axis.

    Raises:
        RolloutInvalid: a name or a shape changed from one to the next.
    """
    tensors: Named = {}
    for index, step in enumerate(steps):
        if step.keys() != steps[0].keys():
            raise RolloutInvalid(f"the names changed from {sorted(steps[0])} to {sorted(step)} at row {index}")
    for name in steps[0] if steps else ():
        try:
            tensors[name] = np.stack([step[name] for step in steps])
        except ValueError:
            shapes = sorted({step[name].shape for step in steps})
            raise RolloutInvalid(f"{name} has several shapes in one episode: {shapes}") from None
    return tensors


def renamed(leaves: Mapping[str, Array], old: str, new: str) -> Named:
    """Return the leaves of ``old`` (``old`` itself, or ``old.key``) under ``new``."""
    return {new + name[len(old) :]: array for name, array in leaves.items() if name.partition(".")[0] == old}


def plain_info(info: Any, depth: int = 8) -> dict[str, Any]:
    """Return a copy of the plain values of a Gymnasium info: numbers, texts, and lists and dicts of them.

    What is anything else (arrays, objects), or deeper than ``depth``, is left out.
    """
    kept: dict[str, Any] = {}
    for key, value in info.items() if isinstance(info, Mapping) else ():
        part = _plain(value, depth)
        if part is not _LEFT_OUT:
            kept[str(key)] = part
    return kept


_LEFT_OUT = object()


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if depth > 0 and isinstance(value, Mapping):
        return plain_info(value, depth - 1)
    if depth > 0 and isinstance(value, (list, tuple)):
        parts = [_plain(part, depth - 1) for part in value]
        return [part for part in parts if part is not _LEFT_OUT]
    return _LEFT_OUT
