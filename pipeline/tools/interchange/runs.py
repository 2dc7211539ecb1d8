"""Opening a run to read it: no lock is taken, and nothing is changed."""

from __future__ import annotations

import os
from typing import NamedTuple

from pipeline.checkpoint.generations import KINDS, Stored, check_listed, choose, find_generations
from pipeline.checkpoint.manifest import PIPELINE, PIPELINE_RANKS, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.errors import ConfigError, NotARun
from pipeline.replay.state import STATE_FILE
from pipeline.store.layout import Layout
from pipeline.tools.interchange.streams import ROLLOUTS, TRANSITIONS, About
from pipeline.tools.interchange.streams import TRAJECTORIES as OF_TRAJECTORIES


class Opened(NamedTuple):
    """A run, and the generation of it that is read."""

    layout: Layout
    tag: int
    stored: Stored

    @property
    def about(self) -> About:
        """What every stream of it says."""
        manifest = self.stored.manifest
        return About(run_id=manifest.run_id, kind=manifest.kind, generation=manifest.generation, step=manifest.step)


def open_run(directory: str, step: int | None = None) -> Opened:
    """Choose a generation, the newest by default, and compare its small files with its manifest.

    Raises:
        NotARun: there is no run.
        StoreError: there is no generation of ``step``.
        Damaged: a file of the generation is.
    """
    layout = Layout(directory)
    run = layout.read_run() if os.path.isdir(directory) else None
    if run is None:
        raise NotARun(f"{directory}: there is no run to read")
    stored = choose(find_generations(layout, run.run_id), step, layout.directory)
    for info in stored.manifest.files:
        check_listed(stored, info, size_alone=info.path.startswith(("trainer/", "files/")))
    return Opened(layout, run.tag, stored)


def content_of(opened: Opened, wanted: str | None) -> str:
    """Return what is to be read of a run: ``wanted``, or all that it has.

    Raises:
        ConfigError: it has no such thing.
    """
    manifest = opened.stored.manifest
    if manifest.kind in (TRAJECTORIES, TRAJECTORY_SHARDS):
        there = [OF_TRAJECTORIES]
    elif manifest.kind in (PIPELINE, PIPELINE_RANKS):
        rows = any(info.path == STATE_FILE for info in manifest.files)
        there = [TRANSITIONS, ROLLOUTS] if rows else [ROLLOUTS]
        if rows and wanted is None:
            raise ConfigError(
                f"{opened.layout.directory}: the run has transitions and rollouts; say which of them is wanted, with "
                "--content or content=: 'transitions' or 'rollouts'"
            )
    else:
        there = [TRANSITIONS]
    if wanted is not None and wanted not in there:
        kind = KINDS.get(manifest.kind, manifest.kind)
        raise ConfigError.of("content", wanted, f"{opened.layout.directory} is the run of a {kind}; it has {there[0]}")
    return wanted or there[0]
