"""What is nested, by the names of its leaves; and the final observations that an info holds (mode ``same_step``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipeline.buffer.transitions.columns import as_array, check_depth
from pipeline.errors import ConfigError

Named = dict[str, Any]
_LEAVES = (np.ndarray, float, bool)  # what need not be looked at: the common case, quickly


def leaves(name: str, value: Any) -> Named:
    """Return the leaves of nested mappings and tuples by name: ``obs.camera``, ``obs.0``; nothing is copied.

    Raises:
        ConfigError: two leaves would have one name, or it is nested too deep.
    """
    found: Named = {}
    put(found, name, value)
    return found


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, a tensor, or what makes one.

    Raises:
        ConfigError: it makes none.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return tuple(value.shape)
    try:
        return np.shape(value)
    except ValueError as error:
        raise ConfigError(f"rows of one shape are needed ({error})", option="rows") from None


def put(found: Named, name: str, value: Any, depth: int = 0) -> None:
    """Add the leaves of ``value`` to ``found``; see :func:`leaves`."""
    plain = value.__class__ in _LEAVES
    if not plain and isinstance(value, (Mapping, tuple)):
        check_depth(name, depth + 1)
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            put(found, f"{name}.{key}", part, depth + 1)
        return
    if name in found:
        raise ConfigError(f"column {name}: two values would be called so; rename one of them", option=name)
    found[name] = np.asarray(value) if not plain and isinstance(value, (int, np.generic)) else value


def with_finals(rows: Named, ended: np.ndarray, info: Any, name: str, base: int) -> list[tuple[Any, Named]]:
    """Put the final observations of the environments that ended [N] bool into the columns ``name`` of ``rows``.

    Returns:
        Those that are an environment's own objects, each with the bytes of its leaves as they are now.

    Raises:
        ConfigError: there is none of an environment, or it is not like the others.
    """
    own = {each for each in rows if each == name or each.startswith(f"{name}.")}
    copied: set[str] = set()
    lent: list[tuple[Any, Named]] = []
    for env in np.flatnonzero(ended).tolist():
        final = final_of(info, env)
        if final is None:
            raise no_final(base + env)
        parts = leaves(name, final)
        if parts.keys() != own:
            raise ConfigError(
                f"final_obs of environment {base + env} has {sorted(parts)}, and next_obs {sorted(own)}", option="info"
            )
        for each, part in parts.items():
            rows[each] = _replaced(each, rows[each], env, part, copy=each not in copied)
            copied.add(each)
        if is_own_object(info):
            lent.append((final, {key: as_array(key, part)[0].tobytes() for key, part in leaves("", final).items()}))
    return lent


def _replaced(name: str, batch: Any, env: int, part: Any, *, copy: bool) -> Any:
    """Return ``batch`` with one row replaced, in a dtype that holds both."""
    own, expected = shape_of(part), shape_of(batch)[1:]
    if own != expected:
        raise ConfigError(
            f"final_obs of environment {env}: {name} has shape {list(own)}, and next_obs {list(expected)}",
            option="info",
        )
    if isinstance(batch, torch.Tensor):
        final = torch.as_tensor(part, device=batch.device)
        tensor = batch.detach().to(torch.promote_types(batch.dtype, final.dtype), copy=copy)
        tensor[env] = final
        return tensor
    array = as_array(name, part)[0]
    given = as_array(name, batch)[0]
    rows = given.astype(np.result_type(given.dtype, array.dtype), copy=copy)
    rows[env] = array
    return rows


def final_of(info: Any, env: int | None) -> Any:
    """Return the final observation of an environment (None: of a single one); None if there is none.

    A vector environment's are one object for each environment, or batched by leaf, with ``_final_obs`` as a mask.
    """
    if isinstance(info, (list, tuple)) and env is not None:
        return info[env].get("final_obs")
    finals = info.get("final_obs") if isinstance(info, Mapping) else None
    if finals is None or env is None:
        return finals
    mask = info.get("_final_obs")
    return None if mask is not None and not mask[env] else _row(finals, env)


def _row(batch: Any, env: int, depth: int = 0) -> Any:
    check_depth("final_obs", depth)
    if isinstance(batch, Mapping):
        return {key: _row(part, env, depth + 1) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(part, env, depth + 1) for part in batch)
    return batch[env]


def is_own_object(info: Any) -> bool:
    """Whether ``info["final_obs"]`` holds each environment's own object, and not a batch made of them."""
    finals = info.get("final_obs") if isinstance(info, Mapping) else None
    return isinstance(finals, np.ndarray) and finals.dtype.hasobject


def no_final(env: int) -> ConfigError:
    """Return the error for a final observation that is missing."""
    return ConfigError(
        f"autoreset is same_step, but info has no final_obs for environment {env}, whose episode ended: either the "
        "environment is in another mode (see envs.metadata['autoreset_mode']), or a wrapper dropped it",
        option="autoreset",
    )
