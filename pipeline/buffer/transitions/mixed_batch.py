"""Batches of several buffers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.batch import Kind, TransitionBatch
from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.layout import MARKS, RowLayout


class MixedBatch(TransitionBatch):
    """A :class:`TransitionBatch` whose rows are of several buffers: those of the first source first, and so on.

    Keys, versions and episodes are those of each row's own buffer, and so are its weights.

    Attributes:
        names: of the sources.
        sources: [n] int64 array: the place of each row's source among ``names``.
    """

    names: tuple[str, ...]
    sources: Any

    @classmethod
    def join(cls, parts: Mapping[str, TransitionBatch | None], schema: Schema, kind: Kind) -> MixedBatch:
        """Return the rows of ``parts`` as one batch.

        Args:
            parts: by source; None: nothing was drawn of it. One is there at the least, and all were asked for the same.
            schema: the columns that all of them have; what a part has beside them is left out.
            kind: what the batch gives out.
        """
        batches = [batch for batch in parts.values() if batch is not None]
        first = batches[0]
        arrays = {
            name: np.concatenate([batch._arrays[name] for batch in batches])
            for name in first._arrays
            if name in schema.names
        }
        records = np.empty((sum(map(len, batches)), *first._records.shape[1:]), MARKS)
        for name in MARKS.names or ():
            records[name] = np.concatenate([batch._records[name] for batch in batches])
        mixed = cls(
            RowLayout(schema),
            records,
            arrays,
            np.concatenate([batch.keys for batch in batches]),
            kind,
            weights=_joined([batch.numpy().weights for batch in batches]),
            mask=_joined([batch._mask for batch in batches]),
            discount=_joined([batch._discount for batch in batches]),
            steps=_joined([batch.steps for batch in batches]),
            relabelled=_joined([batch.relabelled for batch in batches]),
            burn_in=first.burn_in,
            bootstrap=first.bootstrap,
        )
        lengths = [0 if batch is None else len(batch) for batch in parts.values()]
        return mixed._of(tuple(parts), np.repeat(np.arange(len(lengths)), lengths))

    def _of(self, names: tuple[str, ...], sources: np.ndarray) -> MixedBatch:
        self.names, self.sources = names, sources
        return self

    def is_of(self, name: str) -> np.ndarray:
        """Return whether each row is of a source: [n] bool array."""
        own: np.ndarray = self.sources == self.names.index(name)
        return own

    def state(self) -> dict[str, Any]:
        return {**super().state(), "names": list(self.names), "sources": self.sources}

    @classmethod
    def restored(cls, state: Mapping[str, Any], kind: Kind) -> MixedBatch:
        batch = super().restored(state, kind)
        assert isinstance(batch, MixedBatch)
        return batch._of(tuple(state["names"]), state["sources"])


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays else None
