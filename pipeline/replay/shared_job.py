"""The rows of a shared buffer on their way to the disk, while any process adds others."""

from __future__ import annotations

import numpy as np

from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.shared.spill import Spill
from pipeline.replay.gate import Gate
from pipeline.replay.job import Job
from pipeline.replay.state import BufferState


class SharedJob(Job):
    """As a :class:`~pipeline.replay.job.Job`, but that who overwrites a row sets it aside in the shared memory."""

    def __init__(
        self, spill: Spill, ring: Ring, gate: Gate, state: BufferState, values: dict[str, np.ndarray], first: int
    ) -> None:
        """See :class:`~pipeline.replay.job.Job`."""
        self._spill = spill
        super().__init__(ring, gate, state, values, first)

    def _guard(self) -> None:
        schema = self._ring.storage.schema
        assert schema is not None
        self._aside = Ring(self._spill.begin(self._next, self._end, schema))

    def _source(self) -> tuple[Ring, int]:
        upto = self._spill.upto
        return (self._aside, upto) if self._next < upto else (self._ring, self._end)

    def _copied(self) -> None:
        self._spill.saved(self._next)

    def close(self) -> None:
        with self._gate.lock:
            self._spill.end()
