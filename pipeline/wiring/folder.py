"""The folder of a run while this process holds it: the lock, the marker, and what was there before."""

from __future__ import annotations

import contextlib
import os

from pipeline.checkpoint.generations import find_generations, next_number
from pipeline.config import PipelineOptions
from pipeline.errors import ForebayError, StoreError, WriteFailed
from pipeline.records import Closed, Inherited, Opened
from pipeline.store.files import FilesLike
from pipeline.store.journal import read_journals
from pipeline.store.layout import Layout
from pipeline.store.lock import RunLock
from pipeline.store.writer import StoreWriter


class RunFolder:
    """One run's folder. All methods block.

    Attributes:
        run_id, tag: the run's identity, as text and as every frame carries it.
        incarnation: the number of this life of the process.
        used: whether the folder holds a run already.
        next_generation: a number above that of every generation.
    """

    def __init__(self, directory: str, files: FilesLike) -> None:
        self.layout = Layout(directory)
        self.files = files
        self.run_id = ""
        self.tag = 0
        self.incarnation = 1
        self.used = False
        self.next_generation = 0
        self._lock = RunLock(self.layout.lock_file)

    def open(self) -> None:
        """Make the folder if it is absent, take its lock, and look at what is in it.

        Raises:
            NotARun: it holds something else; nothing was made in it.
            Locked: somebody else writes in it.
            StoreError: it cannot be made or written in.
        """
        layout = self.layout
        layout.read_run()  # a foreign folder is refused before anything is made in it
        try:
            self.files.makedirs(layout.directory)
            self._lock.acquire()
            try:
                self._look()
            except BaseException:
                self._lock.release()
                raise
        except ForebayError:
            raise
        except OSError as error:
            raise StoreError(f"{layout.directory}: cannot be used as a run's directory: {error}") from error

    def writer(self, incarnation: int, options: PipelineOptions) -> StoreWriter:
        """Begin the journal of an incarnation."""
        return StoreWriter(
            self.layout,
            self.files,
            run_tag=self.tag,
            incarnation=incarnation,
            rank=options.rank,
            segment_bytes=options.segment_bytes,
            queue_bytes=options.write_queue_bytes,
        )

    def follow(self, run_id: str, incarnation: int, next_generation: int) -> None:
        """Use the folder beside the process that has its lock, by what that one told.

        Raises:
            StoreError: this is another folder than that one's.
        """
        run = self.layout.read_run()
        if run is None or run.run_id != run_id:
            found = "nothing" if run is None else f"run {run.run_id}"
            raise StoreError(
                f"{self.layout.directory}: holds {found}, and the first rank has run {run_id} there. All ranks need "
                "the same folder: name one of a file system that they share"
            )
        self.run_id, self.tag, self.incarnation, self.next_generation = run_id, run.tag, incarnation, next_generation

    def keep(self) -> None:
        """Make sure that the folder is still this process's.

        Raises:
            Locked: another process has taken it.
            WriteFailed: that cannot be told, or its lock was removed.
        """
        try:
            self._lock.keep()
        except ForebayError:
            raise
        except OSError as error:
            raise WriteFailed(
                f"{self.layout.lock_file}: cannot be read or locked: {error}. A retry may work"
            ) from error

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def _look(self) -> None:
        for name in self.layout.list_scratch():  # of a process that was killed
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(os.path.join(self.layout.directory, name))
        run = self.layout.read_run() or self.layout.create_run(self.files)
        self.run_id, self.tag = run.run_id, run.tag
        for folder in (self.layout.journals, self.layout.segments, self.layout.generations):
            if not os.path.isdir(folder):  # a copy may lack what was empty
                self.files.makedirs(folder)
        journals = self.layout.list_journals()
        found = find_generations(self.layout, run.run_id)
        lived = [name.incarnation for name in journals]
        # Journals may be gone, where a generation does not need them; a number is never used twice all the same.
        lived += [int(name.split("-")[0]) for name in self.layout.list_segments()]
        lived += [stored.manifest.incarnation for stored in found.complete]
        self.incarnation = max(lived, default=0) + 1
        self._lock.describe(self.incarnation)
        self.next_generation = next_number(self.layout)
        self.used = bool(found.complete or found.damaged)
        if not self.used and any(os.path.getsize(name.path) for name in journals):
            self.used = self._holds_events()

    def _holds_events(self) -> bool:
        """Whether anything happened: a start that died before generation 0 leaves no more than its beginning."""
        logged = read_journals(self.layout, run_tag=self.tag)
        return any(type(each.event) not in (Opened, Closed, Inherited) for each in logged)
