"""What a buffer's state consists of, to plain values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.drawing import Drawer
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.buffer.transitions.writing import Written
from pipeline.config import ReplayOptions
from pipeline.errors import UsageError
from pipeline.replay.state import BufferState, generator_state, set_generator
from pipeline.replay.stepping import Stepping
from pipeline.replay.write_back import saved

DRAWING = ("select", "fields", "returns", "compress", "share_next_obs", "seed")
"""Options that say what is drawn."""


class Parts(NamedTuple):
    """What a buffer's state consists of; the saver reads them under the buffer's lock."""

    ring: Ring
    drawer: Drawer
    counts: Counts
    rng: np.random.Generator
    next_obs: SharedNextObs | None
    stepping: Stepping
    written: Written


def tag_of(options: ReplayOptions) -> str:
    """Return the name of the kind of selection."""
    return str(options.select.__struct_config__.tag)


def state_of(parts: Parts, options: ReplayOptions, stale_updates: int) -> BufferState:
    """Return everything but the rows, and what grows with them. The caller has the buffer's lock."""
    ring = parts.ring
    schema = ring.storage.schema
    return BufferState(
        columns=None if schema is None else list(schema.columns),
        capacity=ring.capacity,
        added=ring.added,
        size=ring.size,
        next_episode=ring.episodes.next,
        open_episodes=ring.episodes.state(),
        cut_keys=ring.cut_keys_there(),
        truncated_keys=ring.truncated_keys_there(),
        stale_updates=stale_updates,
        limiter=parts.counts.state(),
        generator=generator_state(parts.rng),
        selection=tag_of(options),
        selector=parts.drawer.state(),
        awaiting_reset=parts.stepping.state(),
        next_obs_columns=None if parts.next_obs is None else parts.next_obs.columns(),
        written_columns=parts.written.columns(),
        remove=options.remove.by,
        pool=ring.numbers(),
        processes=ring.processes,
        numbered=ring.numbered,
    )


def values_of(parts: Parts) -> dict[str, np.ndarray]:
    """Return what grows with the rows beside them, by names that end with a dtype; copies."""
    values: dict[str, np.ndarray] = {}
    if parts.next_obs is not None:
        keys, arrays = parts.next_obs.state()
        values["next_obs.keys"] = keys
        # By their number: a column's name may be none for a file.
        values |= {f"next_obs.{number}": each for number, each in enumerate(arrays.values())}
    for number, (_, keys, written) in enumerate(parts.written.state()):
        values |= {f"written.{number}.keys": keys, f"written.{number}.values": written}
    values |= {f"pool.{name}": each for name, each in parts.ring.places().items()}
    return selector_values(parts) | _with_dtypes(values)


def selector_values(parts: Parts) -> dict[str, np.ndarray]:
    """Return that part of :func:`values_of` which is the selection's."""
    return _with_dtypes({f"selector.{name}": each for name, each in parts.drawer.arrays().items()})


def _with_dtypes(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}.{each.dtype.name}": each for name, each in values.items()}


def check_kind(state: BufferState, ring: Ring, where: str) -> None:
    """Compare how rows lay with how they are to lie.

    Raises:
        UsageError: they differ.
    """
    check_order(state, ring, where)
    if ring.scattered and state.capacity != ring.capacity:
        raise UsageError(
            f"{where}: was saved with capacity={state.capacity}; where not the oldest rows go first, build with that"
        )


def check_order(state: BufferState, ring: Ring, where: str) -> None:
    """Compare whether rows lay in any order with whether they are to.

    Raises:
        UsageError: they differ.
    """
    if (state.remove != "fifo") != ring.scattered:
        raise UsageError(f"{where}: was saved with remove={state.remove!r}; build the buffer with that")


def check_sharing(state: BufferState, options: ReplayOptions, where: str) -> None:
    """Compare how next observations were stored with how they are to be; and, where processes have the buffer in
    common, what each of them makes the order of an epoch of.

    Raises:
        UsageError: they differ.
    """
    if state.columns is not None and (state.next_obs_columns is not None) != options.share_next_obs:
        raise UsageError(
            f"{where}: was saved with share_next_obs={not options.share_next_obs}; build the buffer with that"
        )
    seed = state.selector.get("seed", options.seed)
    if options.storage == "shared" and state.selection == tag_of(options) and seed != options.seed:
        raise UsageError(f"{where}: was saved with seed={seed}, of which the epoch's order follows; build with that")


def restore(parts: Parts, options: ReplayOptions, state: BufferState, values: Mapping[str, Any]) -> None:
    """Give parts whose ring has its rows back the rest of their state. Values are arrays; those of the selection may be
    what reads them where they lie.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it does not fit together.
    """
    plain = {name.rpartition(".")[0]: each for name, each in values.items()}
    # First, as selections may look at columns.
    parts.written.load(saved(_of_part(plain, "written"), state.written_columns, parts.ring.storage.schema))
    if state.generator:
        set_generator(parts.rng, state.generator)
    if state.limiter:
        parts.counts.load(state.limiter)
    same = state.selection == tag_of(options)
    of_rows = {name: each for name, each in _of_part(plain, "selector").items() if name != "order"}
    for name, each in of_rows.items() if same else ():
        if len(each) != state.size:
            raise ValueError(f"selector.{name} has {len(each)} values, of {state.size} rows")
    parts.drawer.load(state.selector if same else {}, _of_part(plain, "selector") if same else {})
    parts.stepping.load(state.awaiting_reset)
    parts.ring.processes = state.processes
    parts.ring.numbered = state.numbered
    if parts.next_obs is not None and state.next_obs_columns is not None:
        kept = _of_part(plain, "next_obs")
        keys = kept["keys"]
        arrays = {
            column.name: kept[str(number)].reshape(len(keys), *column.shape)
            for number, column in enumerate(state.next_obs_columns)
        }
        parts.next_obs.load(keys, arrays)


def _of_part(values: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name[len(part) + 1 :]: each for name, each in values.items() if name.startswith(f"{part}.")}
