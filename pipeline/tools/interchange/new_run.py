"""A new run out of what an import reads: segments and one journal, one generation, and the marker last of all, so that
what a failure leaves behind is no run. It is written once, forward, and nothing of it is held."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import Manifest
from pipeline.errors import ForebayError, WriteFailed
from pipeline.locations import Location
from pipeline.records import AnyEvent
from pipeline.store.files import FilesLike, OsFiles
from pipeline.store.layout import Layout
from pipeline.tools.output import GrowingFile
from pipeline.tools.writing import SegmentWriter, committed

INCARNATION = 1
REASON = "import"


class NewRun:
    """Writes a run into a folder that is empty. Blocks."""

    def __init__(self, directory: str, files: FilesLike | None = None) -> None:
        self._files = files or OsFiles()
        self.layout = Layout(directory)
        self._run = self.layout.create_folders(self._files)
        self._segments = SegmentWriter(self.layout, self._files, self._run.tag, incarnation=INCARNATION)

    def place(self, blob: bytes | memoryview, uid: int, member: int = 0) -> Location:
        """Write a payload, sooner or later, and return where it lies."""
        _, _, at = self._segments.payload(blob, uid, 1, member=member).place
        return at

    def append(self, event: AnyEvent) -> None:
        """Write an event, sooner or later; payloads that came before it are written before."""
        self._segments.append(event)

    def commit(self, kind: str, files: Mapping[str, bytes | Iterator[bytes]], step: int, **more: Any) -> str:
        """Make it a run with one generation, and return its id.

        Args:
            kind: of the run.
            files: of the generation, by path: their bytes, or pieces of these.
            step: the trainer's.
            more: of the manifest.

        Raises:
            WriteFailed: it cannot be written.
        """
        try:
            wrote = self._segments.finish(time.time(), REASON)
            generation = GenerationWriter(self.layout, self._files, 0)
            generation.begin()
            for path, content in files.items():
                if isinstance(content, bytes):
                    generation.add(path, content)
                else:
                    self._grow(generation, path, content)
            committed(generation, [wrote], Manifest(step=step, reason=REASON, **more), self._run, kind=kind)
            self.layout.write_marker(self._files, self._run)
        except ForebayError:
            raise
        except OSError as error:
            raise WriteFailed(
                f"{self.layout.directory}: could not be written: {error}. Free space, and retry"
            ) from error
        return self._run.run_id

    def _grow(self, generation: GenerationWriter, path: str, pieces: Iterator[bytes]) -> None:
        file = GrowingFile(self._files, generation, path)
        try:
            for piece in pieces:
                file.write(piece)
            file.finish()
        finally:
            file.close()

    def abandon(self) -> None:
        """Close the files, after a failure; whoever made the folder removes it."""
        self._segments.close()


def is_empty(directory: str) -> bool:
    """Whether nothing is there, or an empty folder."""
    if not os.path.lexists(directory):
        return True
    return os.path.isdir(directory) and not os.path.islink(directory) and not os.listdir(directory)
