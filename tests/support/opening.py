"""Looking into a run's folder as ``resume`` does, without a pipeline and without changing anything."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pipeline import PipelineOptions, Task
from pipeline.checkpoint.generations import find_generations
from pipeline.checkpoint.manifest import MANIFEST_FILE, FileInfo, encode_manifest
from pipeline.errors import NotARun
from pipeline.store.frames import crc32c_of_file
from pipeline.store.layout import Layout
from pipeline.wiring.resuming import Found, Origin, find_to_resume
from pipeline.wiring.state import RunState


def find(directory: str, tasks: Sequence[Task], attached: Sequence[str], seed: int = 0) -> Found:
    """What a resume of the newest generation would take over."""
    run = Layout(directory).read_run()
    if run is None:
        raise NotARun(f"{directory}: no run")
    state = RunState(tasks, PipelineOptions(directory=directory, seed=seed, watchdog=None))
    state.incarnation = 9
    return find_to_resume(state, Origin(Layout(directory), run.run_id, run.tag, False), None, attached)


def told(found: Found) -> Any:
    """Everything that a resume would take over, in comparable values."""
    recovered = found.recovered
    return (
        found.stored.manifest.generation,
        recovered.ledger.snapshot(),
        {uid: dict(members) for uid, members in recovered.places.items() if members},
        recovered.pending,
        {name: (each.epoch, each.position) for name, each in recovered.sampler.cursors.items()},
        msgspec.to_builtins(recovered.progress),
        repr(found.states),
    )


def reseal(directory: str) -> str:
    """Give the newest manifest the checksums of the files as they are now. Returns the generation's folder."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    folder, manifest = find_generations(layout, run.run_id).complete[-1]
    files = [
        FileInfo(path=each.path, bytes=size, crc32c=checksum)
        for each in manifest.files
        for size, checksum in [crc32c_of_file(os.path.join(folder, each.path))]
    ]
    rewrite(directory, files=files)
    return folder


def rewrite(directory: str, **fields: Any) -> None:
    """Change fields of the newest manifest; its checksum fits."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    folder, manifest = find_generations(layout, run.run_id).complete[-1]
    changed = msgspec.structs.replace(manifest, **fields)
    Path(folder, MANIFEST_FILE).write_bytes(encode_manifest(changed))


@contextmanager
def little_memory(more: int) -> Iterator[None]:
    """Let this process have ``more`` bytes on top of what it has, and no more: who asks for them gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
