"""What travels between a run and a file: rows of fixed shape in batches, or records of named tensors, one by one.

A stream says what it consists of before its first value is read, and may be read several times. Whoever writes holds no
more than a batch, or a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.sampler.progress import Progress
from pipeline.store.codec import TensorBytes

TRANSITIONS, ROLLOUTS, TRAJECTORIES = "transitions", "rollouts", "trajectories"
CONTENTS = (TRANSITIONS, ROLLOUTS, TRAJECTORIES)

KEY, EPISODE, PLACE, VERSION, END, PRIORITY, RANK = (
    "#key",
    "#episode",
    "#place",
    "#version",
    "#end",
    "#priority",
    "#rank",
)
MARK_DTYPES: dict[str, np.dtype[Any]] = {
    KEY: np.dtype(np.int64),
    EPISODE: np.dtype(np.int64),
    PLACE: np.dtype(np.int32),
    VERSION: np.dtype(np.int32),
    END: np.dtype(np.uint8),
    PRIORITY: np.dtype(np.float64),
    RANK: np.dtype(np.int32),
}
"""What is told of each transition beside its columns."""


@dataclass(frozen=True)
class Rows:
    """Some transitions, [n, ...] each.

    Attributes:
        columns: by name, in the dtype in which a column is held (:attr:`Column.bits`).
        marks: of :data:`MARK_DTYPES`.
    """

    columns: Arrays
    marks: Arrays

    def __len__(self) -> int:
        return len(next(iter((self.columns or self.marks).values())))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(array.nbytes for array in self.columns.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of columns and marks: of narrow rows the marks are most of it."""
        return self.nbytes + sum(array.nbytes for array in self.marks.values())

    def part(self, which: Any) -> Rows:
        """Return some of them, by a slice, a mask or places."""
        return Rows(
            {name: array[which] for name, array in self.columns.items()},
            {name: array[which] for name, array in self.marks.items()},
        )


class Record(NamedTuple):
    """A rollout or a trajectory.

    Attributes:
        fields: plain values that JSON keeps, but for ``info``, which is as :func:`pipeline.store.plain.to_plain`
            gives it.
        tensors: by name: ``<trace>.<name>`` of a rollout, the column of a trajectory; flat bytes each.
    """

    fields: dict[str, Any]
    tensors: dict[str, TensorBytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.array.nbytes for tensor in self.tensors.values())


class About(msgspec.Struct, kw_only=True):
    """Where a stream came from, and what is true of the whole of it; every field has a default."""

    run_id: str = ""
    kind: str = ""
    """Of the run."""
    generation: int = -1
    step: int = 0
    capacity: int = 0
    """Of the buffer."""
    contiguous: bool = False
    """Whether keys follow each other, the oldest row first."""
    next_key: int = 0
    next_episode: int = 0
    open_episodes: list[list[int]] = []
    """[environment, key of the newest row, number, its place] each, where keys are contiguous."""
    priority_alpha: float | None = None
    """The exponent of ``#priority``, which is the priority to the power of it; None: there are none."""
    next_trajectory: int = 0
    notes: list[str] = []
    """What did not come along, for people."""


class Transitions(NamedTuple):
    """Rows of one schema."""

    schema: Schema
    marks: tuple[str, ...]
    """Those that every batch has."""
    about: About
    batches: Callable[[], Iterator[Rows]]
    nbytes: int = 0
    """About how many bytes are read for them; 0: not known."""
    total: int | None = None
    """How many; None: not known."""
    most: int | None = None
    """At the most so many; None: not known."""
    scattered: bool = False
    """Whether rows of an episode come in any order, its end too: their places in it say which follows which."""


class Records(NamedTuple):
    """Rollouts or trajectories."""

    content: str
    about: About
    records: Callable[[], Iterator[Record]]
    nbytes: int = 0
    total: int | None = None
    progress: Progress | None = None
    """How far whoever made them was; None: nothing is known."""
    """How many; None: not known."""


Stream = Transitions | Records


def flat_bytes(tensor: TensorBytes) -> np.ndarray:
    """Return the bytes of a tensor, [bytes] uint8."""
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)


def rechunked(batches: Iterator[Rows], most: Callable[[Rows], int]) -> Iterator[Rows]:
    """Yield rows in batches of as many as ``most`` says of the first of them, the last but for one."""
    held: list[Rows] = []
    have = size = 0
    for batch in batches:
        if not len(batch):
            continue
        size = size or max(1, most(batch))
        held.append(batch)
        have += len(batch)
        while have >= size:
            whole = joined(held)
            yield whole.part(slice(0, size))
            have -= size
            held = [whole.part(slice(size, None))] if have else []
    if have:
        yield joined(held)


def joined(batches: list[Rows]) -> Rows:
    """Return some batches as one."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return Rows(
        {name: np.concatenate([each.columns[name] for each in batches]) for name in first.columns},
        {name: np.concatenate([each.marks[name] for each in batches]) for name in first.marks},
    )
