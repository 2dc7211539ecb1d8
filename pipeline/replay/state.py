"""What a generation says of a buffer, beside its rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.given import MOST, distinct, each_whole, whole
from pipeline.buffer.transitions.layout import CUT, TRUNCATED
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ConfigError, Damaged, NewerFormat
from pipeline.replay.arguments import MOST_ENVS
from pipeline.store.files import open_plain

STATE_VERSION = 1
STATE_FILE = "replay.json"
VALUES_FOLDER = "values"
LISTED = "episodes.number.int64"
"""The values that are the numbers of the episodes that a save has not dropped."""
S = TypeVar("S", bound=msgspec.Struct)


class BufferState(msgspec.Struct, kw_only=True):
    """Content of ``replay.json``; every field has a default, so that old files load."""

    format_version: int = STATE_VERSION
    columns: list[Column] | None = None
    """None: nothing was ever added."""
    capacity: int = 0
    added: int = 0
    size: int = 0
    next_episode: int = 0
    open_episodes: list[list[int]] = []
    """[environment, key of the newest row, number, place of that row] each."""
    cut_keys: list[int] = []
    """Keys of rows with which an episode was left where it was."""
    truncated_keys: list[int] = []
    """Keys of rows with which a save has truncated an episode that was open: ``incomplete="truncate"``."""
    dropped: dict[str, int] = {}
    """How many of the rows are not to come back, by what their episodes are: ``open`` or ``headless``. The list of
    episodes in ``values`` has none of theirs: ``incomplete="drop"``."""
    stale_updates: int = 0
    limiter: dict[str, int] = {}
    generator: dict[str, Any] = {}
    """The state of numpy's PCG64; its 128 bit words in hexadecimal."""
    selection: str = ""
    """The tag of the selection that the next field is of."""
    selector: dict[str, Any] = {}
    awaiting_reset: list[int] = []
    """Environments whose next step is their reset."""
    next_obs_columns: list[Column] | None = None
    """Of the next observations that are kept aside; None: each row holds its own."""
    written_columns: list[str] = []
    """Columns that were changed in rows after these had been written. Those of number i are the values
    ``written.i.keys`` and ``written.i.values``, which count instead of what blocks hold."""
    remove: str = "fifo"
    """Which rows go first."""
    pool: list[int] = []
    """Where another than the oldest goes first: the least key of a slot that is empty, less the slot; the end of keys;
    how many rows were not kept; the next place on the disk."""

    processes: int = 0
    """How many processes have joined a shared buffer."""
    numbered: str = ""
    """What tells how the rows are numbered from how they had been before: a resume that leaves rows out, or brings them
    to other ranks, gives them other keys; one that goes back behind some, theirs to others. Empty: none has."""

    options: dict[str, Any] = {}
    """Of a buffer that a pipeline fills, whose manifest has the pipeline's: what draws depend on. Empty: it is none,
    or an earlier version wrote it."""

    @property
    def schema(self) -> Schema | None:
        """The columns."""
        return None if self.columns is None else Schema(tuple(self.columns))

    @property
    def held(self) -> int:
        """How many rows come back."""
        return self.size - sum(self.dropped.values())

    def coming_back(self, values: Mapping[str, np.ndarray], episodes: np.ndarray) -> np.ndarray:
        """Return of which of the episodes [n] the rows come back; ``values`` are the generation's.

        Raises:
            Damaged: it does not say.
        """
        if not self.dropped:
            return np.ones(len(episodes), bool)
        listed = values.get(LISTED)
        if listed is None:
            raise Damaged("rows were dropped, and the list of the episodes that were not is missing")
        return np.isin(episodes, listed)


class Ends:
    """How rows end an episode, where their blocks do not say so, as these are older than the end."""

    def __init__(self, state: BufferState) -> None:
        said = ((state.truncated_keys, TRUNCATED), (state.cut_keys, CUT))
        self._said = [(np.array(sorted(keys), np.int64), end) for keys, end in said if keys]

    def of(self, keys: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return how the rows of some keys [n] end one, of what their blocks say."""
        ends = ends.astype(np.uint8)
        for said, end in self._said:
            at = np.minimum(np.searchsorted(said, keys), len(said) - 1)
            ends[said[at] == keys] = end
        return ends


def encode_state(state: msgspec.Struct, unknown: dict[str, Any]) -> bytes:
    """Return the file's bytes; ``unknown`` are fields of a newer version that are carried along."""
    return msgspec.json.format(msgspec.json.encode({**unknown, **msgspec.to_builtins(state)})) + b"\n"


def decode_state(raw: bytes, where: str) -> tuple[BufferState, dict[str, Any]]:
    """Return the state in a file, and the fields of it that this version does not know.

    Raises:
        NewerFormat: it was written by a newer version.
        Damaged: it is no such state.
    """
    return decode_fields(raw, where, BufferState, STATE_VERSION, checked)


def read_buffer_state(folder: str) -> tuple[BufferState, dict[str, Any]]:
    """Return the state in a generation's folder, as :func:`decode_state` does."""
    path = os.path.join(folder, STATE_FILE)
    with open_plain(path) as file:
        return decode_state(file.read(), path)


def decode_fields(
    raw: bytes, where: str, kind: type[S], newest: int, check: Callable[[S], object]
) -> tuple[S, dict[str, Any]]:
    """Return the state of some kind in a file, and the fields of it that this version does not know.

    Raises:
        NewerFormat: it was written by a newer version.
        Damaged: it is no such state, or ``check`` finds it wrong.
    """
    try:
        fields = msgspec.json.decode(raw)
        check_version(fields, newest, where)
        state = msgspec.convert(fields, kind)
        check(state)
    except (msgspec.MsgspecError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{where}: the buffer's state is damaged ({error})") from None
    known = set(kind.__struct_fields__)
    return state, {name: value for name, value in fields.items() if name not in known}


def check_version(fields: Mapping[str, Any], newest: int, where: str) -> None:
    """Refuse a state of a newer version.

    Raises:
        NewerFormat: it is one.
    """
    version = fields.get("format_version", 0)
    if version > newest:
        raise NewerFormat(
            f"{where}: the buffer's state has format {version}; this version reads up to {newest}. "
            "Install a newer forebay."
        )


def checked(state: BufferState) -> BufferState:
    """Return a state whose parts fit together.

    Raises:
        ValueError: they do not.
    """
    if not (0 <= state.size <= state.added < MOST and state.size <= max(state.capacity, 0)):
        raise ValueError(f"{state.size} rows of {state.added} that were added to {state.capacity} places")
    if state.size and not state.columns:
        raise ValueError(f"{state.size} rows are said to have no columns")
    if min(state.dropped.values(), default=0) < 0 or state.held < 0:
        raise ValueError(f"of {state.size} rows {state.dropped} are said to have been dropped")
    for name in ("next_episode", "stale_updates", "processes"):
        whole(name, getattr(state, name), 0, MOST)
    _check_pool(state)
    end = state.added if state.remove == "fifo" else state.pool[1]
    for name in ("cut_keys", "truncated_keys"):
        each_whole(name, getattr(state, name), 0, end - 1)
    each_whole("awaiting_reset", state.awaiting_reset, 0, MOST_ENVS - 1)
    _check_open(state)
    for column in state.columns or ():
        if column.nbytes < 0 or min(column.shape, default=0) < 0:
            raise ValueError(f"a column is said to be {column}")
    try:
        _ = state.schema
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return state


def _check_pool(state: BufferState) -> None:
    """Refuse numbers of rows in any order that cannot be."""
    if state.remove == "fifo" and not state.pool:
        return
    if len(state.pool) != 4:
        raise ValueError(f"rows in any order are said to have the numbers {state.pool}")
    for name, number in zip(("floor", "end", "not_kept", "next_at"), state.pool, strict=True):
        whole(f"pool.{name}", number, 0, MOST)


def _check_open(state: BufferState) -> None:
    """Refuse open episodes that cannot be."""
    for given in state.open_episodes:
        if len(given) != 4 or not 0 <= given[0] < MOST_ENVS:
            raise ValueError(f"an open episode is said to be {given}")
        _, key, number, place = given
        if not (0 <= key < state.added and 0 <= number < state.next_episode and 0 <= place < MOST_ROWS):
            raise ValueError(
                f"an open episode is said to be {given}, of {state.added} rows and {state.next_episode} episodes"
            )
    for at, name in ((0, "environments"), (2, "numbers")):
        distinct(f"{name} of open episodes", np.array([given[at] for given in state.open_episodes], np.int64))


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the state of a PCG64 generator as plain values that JSON keeps."""
    state: Any = rng.bit_generator.state
    return {
        "name": state["bit_generator"],
        "state": hex(state["state"]["state"]),
        "inc": hex(state["state"]["inc"]),
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }


def set_generator(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Take back what :func:`generator_state` gave.

    Raises:
        ValueError, LookupError, TypeError: it is no such state.
    """
    words = {name: int(state[name], 16) for name in ("state", "inc")}
    for name, word in words.items():
        if not 0 <= word < 2**128:
            raise ValueError(f"generator: {name} is no number of 128 bits")
    if not words["inc"] % 2:
        raise ValueError("generator: inc is even, with which it would not run through all numbers")
    rng.bit_generator.state = {
        "bit_generator": state["name"],
        "state": words,
        "has_uint32": whole("has_uint32", state["has_uint32"], 0, 1),
        "uinteger": whole("uinteger", state["uinteger"], 0, 2**32 - 1),
    }
