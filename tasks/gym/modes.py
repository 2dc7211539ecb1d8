"""What Gymnasium's vector environments say: their autoreset mode, their spaces, and their infos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from pipeline.errors import ConfigError
from pipeline.replay import stepping

_STORABLE = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)


def mode_of(given: Any) -> AutoresetMode:
    """Return the mode that ``given`` names: Gymnasium's own, ``"NEXT_STEP"``, ``"SameStep"`` and the like.

    Raises:
        ConfigError: it names none.
    """
    name = stepping.mode_of(given, option="autoreset_mode").replace("_", "")
    return next(mode for mode in AutoresetMode if mode.value.lower() == name)


def check_space(what: str, space: gymnasium.Space[Any]) -> None:
    """Check that the samples of a vector environment's ``space`` are batched arrays, or nested ones.

    Raises:
        ConfigError: they are not; the message names the part.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        for key, part in space.spaces.items():
            check_space(f"{what}.{key}", part)
    elif isinstance(space, gymnasium.spaces.Tuple):
        for index, part in enumerate(space.spaces):
            check_space(f"{what}.{index}", part)
    elif not isinstance(space, _STORABLE):
        raise ConfigError(
            f"the {what} space is a {type(space).__name__}; Box, Discrete, MultiDiscrete, MultiBinary, and Dict "
            "and Tuple of these can be stored. Wrap the environment to encode it",
            option="envs",
        )


def env_info(info: Any, env: int, inside: bool = False) -> dict[str, Any]:
    """Return the part of a vector environment's info that environment ``env`` has.

    Gymnasium keeps ``{key: [N] values, "_key": [N] bool}``, nested for dicts, and its own wrappers leave the
    inner masks out (``inside``); a list of dicts is taken too.
    """
    if isinstance(info, (list, tuple)):
        return dict(info[env])
    part: dict[str, Any] = {}
    for key, value in info.items() if isinstance(info, Mapping) else ():
        is_mask = isinstance(key, str) and key.startswith("_") and key[1:] in info
        mask = info.get(f"_{key}")
        if is_mask or not (inside if mask is None else mask[env]):
            continue
        if isinstance(value, Mapping):
            part[key] = env_info(value, env, inside=True)
        elif hasattr(value, "__getitem__"):
            part[key] = value[env]
    return part
