"""What tools tell of what they made, or would make."""

from __future__ import annotations

import msgspec

from pipeline.checkpoint.manifest import MadeOf


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a tool made, or, on a dry run, would make."""

    directory: str
    kind: str
    run_id: str = ""
    """Empty on a dry run."""
    step: int = 0
    of_rows: bool = False
    """Of a pipeline: whether its rollouts fill a buffer of transitions."""
    units: int = 0
    """Episodes, trajectories or groups; of pools, rows; of a pipeline whose rollouts fill a buffer, items."""
    rows: int = 0
    """Transitions; of groups, their rollouts."""
    shards: list[int] = []
    """Rows of each rank, if ranks have it; of a pipeline, finished groups."""
    capacity: int | None = None
    """Of a pool: what the buffer that goes on with it is built with. None: it is none, and that may have any."""
    bytes: int = 0
    """Of payloads; on a dry run, of those that they would be copied from."""
    linked: int = 0
    """How many of these lie in files that the source has too."""
    renumbered: int = 0
    """Ids that are others now; ``ids.json`` says which."""
    left_out: dict[str, str] = {}
    """What was not taken over, and why."""
    made_of: list[MadeOf] = []
