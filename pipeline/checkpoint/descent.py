"""Of which runs something may be in a run that a tool made: its marker lists them, for good.

What a tool names by the ids that it had elsewhere can be told apart one by one, until a process goes on with the run:
from then on its content has ids of its own, as has that of a run that was resharded or salvaged. Then only the runs are
known of which it came, and by which splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import Manifest
from pipeline.errors import ForebayError
from pipeline.store.layout import Layout, Way

ORIGIN = "origin/"
"""What the paths of files begin with that name content by the ids that it had elsewhere."""


def keeps_ids(manifest: Manifest) -> bool:
    """Return whether what a generation holds is named by the ids that it had elsewhere."""
    return any(info.path.startswith(ORIGIN) for info in manifest.files)


def ways_of(layout: Layout, run_id: str, manifest: Manifest, *, kept: bool | None = None, named: str = "") -> list[Way]:
    """Return from which runs the content of a generation has come, and how; of what has ids of its own, the run itself
    is the first.

    Args:
        layout, run_id: of the run.
        manifest: of the generation.
        kept: whether its content is named by the ids that it had elsewhere; None: if the generation says so.
        named: what names the run by its own ids, where that is not its id alone.
    """
    ways = _listed(layout, manifest)
    if kept is None:
        kept = keeps_ids(manifest)
    if kept and ways:
        return ways
    named = named or run_id
    own = Way(run_id=run_id, directory=layout.directory, named=named)
    return distinct([own, *(msgspec.structs.replace(way, named=named) for way in ways)])


def ways_after(layout: Layout, run_id: str, manifest: Manifest) -> list[Way]:
    """Return from which runs the content of a new run comes that is made of a generation and has ids of its own."""
    ways = ways_of(layout, run_id, manifest)
    own = Way(run_id=run_id, directory=layout.directory)
    return distinct([own, *(msgspec.structs.replace(way, named="") for way in ways)])


def distinct(ways: Iterable[Way]) -> list[Way]:
    """Return ways in their order, each once."""
    found = {(way.run_id, way.named, way.splits): way for way in reversed(list(ways))}
    return list(reversed(found.values()))


def _listed(layout: Layout, manifest: Manifest) -> list[Way]:
    """Return what the marker lists; or, if an earlier version wrote it, or it is damaged or gone, what generations say:
    the first one does, as long as it is there."""
    try:
        run = layout.read_run()
    except ForebayError:
        run = None
    if run is not None and run.made_of:
        return list(run.made_of)
    return distinct(way for each in (manifest, *_others(layout, manifest)) for way in _said(each))


def _others(layout: Layout, manifest: Manifest) -> list[Manifest]:
    try:
        return [each.manifest for each in find_generations(layout, manifest.run_id).complete]
    except ForebayError:  # whoever reads them says so
        return []


def _said(manifest: Manifest) -> Iterator[Way]:
    """Yield what a generation says."""
    for part in manifest.made_of:
        if part.units or not keeps_ids(manifest):
            yield Way(run_id=part.run_id, directory=part.directory, named=part.name)
    origin = manifest.origin.partition("/")[0]
    if origin:
        yield Way(run_id=origin)
