"""Generations on the disk: find, read, commit, and drop the old ones.

A commit writes into a folder aside (``00000012.part``), syncs every file and the folder, renames the folder, and
writes the manifest last, aside and renamed as well. Killed at any of these calls, the generations before are whole and
this one does not exist; what is left over is cleaned by the next commit.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from pipeline.checkpoint.manifest import (
    MANIFEST_FILE,
    PIPELINE,
    PIPELINE_RANKS,
    REPLAY,
    SHARDS,
    TRAINER_FOLDER,
    TRAJECTORIES,
    TRAJECTORY_SHARDS,
    FileInfo,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from pipeline.checkpoint.removing import PART, remove_generation, remove_tree
from pipeline.checkpoint.trainer_state import CapturedState, check_file
from pipeline.errors import Damaged, ForebayError, Locked, NewerFormat, OtherRun, StoreError, UsageError, WriteFailed
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.frames import crc32c_more, crc32c_of_file
from pipeline.store.layout import Layout, write_file

RETRY = "Free space or mend the disk; a retry may work"
"""What a message about a generation that could not be written ends with: nothing of it stays."""

KINDS = {
    PIPELINE: "pipeline",
    PIPELINE_RANKS: "pipeline of ranks",
    REPLAY: "replay buffer",
    TRAJECTORIES: "buffer of trajectories",
    SHARDS: "buffer of ranks",
    TRAJECTORY_SHARDS: "buffer of trajectories of ranks",
}
"""What people call what writes generations of each kind."""
_NAME = re.compile(r"\d+")


class Stored(NamedTuple):
    """A complete generation: its folder and its manifest."""

    folder: str
    manifest: Manifest

    def trainer_files(self) -> list[tuple[str, FileInfo]]:
        """Return where the trainer's files lie."""
        infos = (info for info in self.manifest.files if info.path.startswith(TRAINER_FOLDER + "/"))
        return [(os.path.join(self.folder, info.path), info) for info in infos]


class Found(NamedTuple):
    """Complete generations by rising number, and those whose manifest is damaged, with the error."""

    complete: list[Stored]
    damaged: list[tuple[int, Damaged]]
    unread: frozenset[int] = frozenset()
    """Numbers of those among the damaged that the disk did not give; they may be whole."""


def find_generations(layout: Layout, run_id: str, *, forgiving: bool = False) -> Found:
    """Read every manifest of a run. Numbers decide, never names as text and never file times.

    ``forgiving``: one of another run is damaged as well, as for who looks for damage, or for what is whole beside it.

    Raises:
        OtherRun: a manifest is of another run.
        NewerFormat: a manifest was written by a newer version.
    """
    complete: list[Stored] = []
    damaged: list[tuple[int, Damaged]] = []
    unread: set[int] = set()
    for name in sorted(_names(layout), key=int):
        folder = os.path.join(layout.generations, name)
        path = os.path.join(folder, MANIFEST_FILE)
        try:
            if not os.path.isdir(folder):
                continue
            with open_plain(path) as file:
                manifest = decode_manifest(file.read(), path)
        except FileNotFoundError:
            if os.path.islink(path):
                damaged.append((int(name), Damaged(f"{path}: a link that leads nowhere")))
            continue
        except NewerFormat:
            raise
        except OSError as error:
            damaged.append((int(name), Damaged(str(error) if isinstance(error, StoreError) else f"{path}: {error}")))
            if not isinstance(error, Damaged):
                unread.add(int(name))
            continue
        if manifest.run_id != run_id:
            strange = _strange(path, manifest.run_id, run_id)
            if not forgiving:
                raise strange
            damaged.append((int(name), Damaged(str(strange))))
            continue
        if manifest.generation != int(name):
            damaged.append((int(name), Damaged(f"{path}: says generation {manifest.generation}; renamed?")))
            continue
        complete.append(Stored(folder, manifest))
    return Found(complete, damaged, frozenset(unread))


def _names(layout: Layout) -> list[str]:
    try:
        return [name for name in os.listdir(layout.generations) if _NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"{layout.generations}: cannot be read: {error}") from error


def _strange(path: str, theirs: str, ours: str) -> OtherRun:
    return OtherRun(
        f"{path}: the generation belongs to run {theirs}, the folder to run {ours}. "
        "Was it copied here? Remove it, or resume it in its own folder."
    )


def of_kind(found: Found, kind: str, where: str, *, also: str = "") -> Found:
    """Return ``found``, whose generations must be of ``kind``, or of the kind ``also``.

    Raises:
        UsageError: something else wrote them.
    """
    for stored in found.complete:
        if stored.manifest.kind not in (kind, also):
            wrote = KINDS.get(stored.manifest.kind, stored.manifest.kind)
            raise UsageError(
                f"{where}: the run of a {wrote}, not of a {KINDS[kind]}; open it with what wrote it, or choose "
                "another directory"
            )
    return found


def next_number(layout: Layout) -> int:
    """Return a number above that of every generation, whole or not."""
    try:
        numbers = [int(match[0]) for name in os.listdir(layout.generations) if (match := _NAME.match(name))]
    except (FileNotFoundError, NotADirectoryError):
        numbers = []
    return max(numbers, default=-1) + 1


def choose(found: Found, step: int | None, where: str, external: str | None = None) -> Stored:
    """Return the generation to resume: the newest, or the newest of ``step``, or that goes with ``external``.

    Raises:
        Damaged: the newest has a damaged manifest; the message offers the one before.
        StoreError: there is none of ``step``, or for ``external``; the message lists what there is.
    """
    if external is not None:
        return _choose_external(found, step, where, external)
    if step is None:
        newest = found.complete[-1] if found.complete else None
        if found.damaged and (newest is None or found.damaged[-1][0] > newest.manifest.generation):
            number, error = found.damaged[-1]
            offer = f" resume(step={newest.manifest.step}) takes the one before it." if newest is not None else ""
            raise Damaged(f"generation {number} is damaged: {error}.{offer}")
        if newest is None:
            raise StoreError(f"{where}: holds no complete generation")
        return newest
    matching = [stored for stored in found.complete if stored.manifest.step == step]
    if not matching:
        steps = sorted({stored.manifest.step for stored in found.complete})
        raise StoreError(f"{where}: no generation of step {step}; there are steps {', '.join(map(str, steps))}")
    return matching[-1]


def _choose_external(found: Found, step: int | None, where: str, external: str) -> Stored:
    having = {each.manifest.external: each.manifest.step for each in found.complete if each.manifest.external}
    of_step = [each for each in found.complete if step is None or each.manifest.step == step]
    matching = [each for each in of_step if each.manifest.external == external]
    if not matching:
        known = ", ".join(f"{path} (step {of})" for path, of in having.items()) or "none"
        which = "no generation" if step is None else f"no generation of step {step}"
        raise StoreError(f"{where}: {which} goes with {external}. Saved with external=: {known}")
    return matching[-1]


def with_offer(error: Damaged, stored: Stored, found: Found) -> Damaged:
    """Return ``error``, which is about a file of ``stored``, with how to get at the generation before it."""
    number = stored.manifest.generation
    before = [each for each in found.complete if each.manifest.generation < number]
    offer = ""
    if before and before[-1].manifest.step != stored.manifest.step:
        offer = f" resume(step={before[-1].manifest.step}) takes the one before it."
    elif before:  # of the same step: a step alone does not tell them apart
        offer = f" Move {stored.folder} out of the run, and resume() takes the one before it."
    return Damaged(f"generation {number} is damaged: {str(error).removesuffix('.')}.{offer}")


def check_generation(stored: Stored, *, later: Collection[str] = (), told: Callable[[int], None] | None = None) -> None:
    """Compare every file of a generation with its manifest, those of ``later`` by size alone; ``told`` is told of the
    bytes read. Blocks.

    Raises:
        Damaged: names the first file that is missing, changed, or no plain file of the generation's folder.
    """
    for info in stored.manifest.files:
        check_listed(stored, info, size_alone=info.path in later, told=told)


def check_listed(
    stored: Stored, info: FileInfo, *, size_alone: bool = False, told: Callable[[int], None] | None = None
) -> None:
    """Compare one file of a generation with its line in the manifest; ``told`` is told of the bytes read. Blocks.

    Raises:
        Damaged: it is missing, changed, or no plain file of the generation's folder.
    """
    root = os.path.realpath(stored.folder)
    path = os.path.join(root, info.path)
    if os.path.lexists(path) and (os.path.realpath(path) != path or not os.path.isfile(path)):
        raise Damaged(f"{path}: a link or a special file, where the manifest lists a plain one")
    check_file(path, size=info.bytes, checksum=None if size_alone else info.crc32c, told=told)


@contextmanager
def writing_in(folder: str) -> Iterator[None]:
    """An error of the system says what could not be written, and what to do.

    Raises:
        WriteFailed: there was one.
    """
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"{folder}: could not be written: {error}. {RETRY}") from error


class GenerationWriter:
    """Writes one generation. All methods block, and belong to one thread at a time, but for :meth:`abandon`."""

    def __init__(self, layout: Layout, files: FilesLike, number: int, *, others: bool = False) -> None:
        """Args:
        layout: the run's paths.
        files: the file layer.
        number: of the generation.
        others: whether another process commits it, and removes it where it is given up.
        """
        self.number = number
        self._others = others
        self._layout, self._files = layout, files
        self._final = os.path.join(layout.generations, f"{number:08d}")
        self.folder = self._final + PART
        self.infos: list[FileInfo] = []
        self._renamed = self._abandoned = self._overtaken = False
        self._unsynced: list[int] = []
        self._one_ends_it = threading.Lock()

    def begin(self) -> None:
        """Make the folder aside; what a crash left under its name is removed.

        Raises:
            StoreError: a complete generation has this number: it is never written over.
        """
        if os.path.lexists(os.path.join(self._final, MANIFEST_FILE)):
            raise StoreError(f"{self._final}: generation {self.number} exists; a generation is never written over")
        remove_tree(self._files, self.folder)
        remove_generation(self._files, self._final)
        self._files.makedirs(self.folder)

    def begin_with(self, states: Sequence[CapturedState], links: Iterable[tuple[str, FileInfo]] = ()) -> None:
        """:meth:`begin`, with what cannot wait: the trainer's tensors, which are read here.

        Args:
            states: of the trainer's objects.
            links: files of earlier generations that this one takes over, by their paths.

        Raises:
            WriteFailed: it could not be written; nothing of it stays.
        """
        try:
            self.begin()
            for source, info in links:
                self.link(info.path, source, info)
            for state in states:
                path = f"{TRAINER_FOLDER}/{state.name}.safetensors"
                size, checksum = state.write(self._files, self.target(path), to_sync=self.sync_later)
                self.infos.append(FileInfo(path=path, bytes=size, crc32c=checksum))
        except BaseException as error:
            self.abandon()
            if isinstance(error, OSError) and not isinstance(error, ForebayError):
                raise WriteFailed(f"{self.folder}: could not be written: {error}. {RETRY}") from error
            raise

    def add(self, path: str, content: bytes | memoryview) -> None:
        """Write a small file."""
        target = self.target(path)
        handle = self._files.create(target)
        try:
            self._files.write(handle, [content])
            self._files.sync(handle)
        finally:
            self._files.close(handle)
        self.infos.append(FileInfo(path=path, bytes=len(content), crc32c=f"{crc32c_more(0, content):08x}"))

    @property
    def final(self) -> str:
        """The folder that the generation has once it exists."""
        return self._final

    def sync_folders(self, infos: Iterable[FileInfo]) -> None:
        """Sync the folders in which files of the generation lie."""
        for folder in sorted({os.path.dirname(os.path.join(self.folder, info.path)) for info in infos}):
            self._files.sync_directory(folder)

    def sync_later(self, handle: int) -> None:
        """Take over an open file of the generation: it is synced and closed when the generation is committed."""
        self._unsynced.append(handle)

    def link(self, path: str, source: str, info: FileInfo) -> None:
        """Take over a file of an earlier generation without copying it (or with, where links are impossible)."""
        target = self.target(path)
        try:
            self._files.link(source, target)
        except OSError:
            if os.path.lexists(target):  # over a network a link may be said to have failed that was made
                self._files.unlink(target)
            with open(source, "rb") as file:
                handle = self._files.create(target)
                try:
                    while chunk := file.read(16 << 20):
                        self._files.write(handle, [chunk])
                    self._files.sync(handle)
                finally:
                    self._files.close(handle)
        self.infos.append(info)

    def adopt(self) -> None:
        """List the files that somebody else wrote into the folder, such as the body of ``checkpoint``."""
        listed = {info.path for info in self.infos}
        for path in sorted(_walk(self.folder)):
            if path in listed:
                continue
            full = os.path.join(self.folder, path)
            if os.path.islink(full) or not os.path.isfile(full):
                raise StoreError(f"{full}: only plain files can be part of a checkpoint")
            with open(full, "rb") as file:
                os.fsync(file.fileno())
            size, checksum = crc32c_of_file(full)
            self.infos.append(FileInfo(path=path, bytes=size, crc32c=checksum))

    def commit(self, manifest: Manifest, *, keep: Callable[[], None] = lambda: None) -> Stored:
        """Make the generation exist.

        Args:
            manifest: what it consists of.
            keep: raises unless the folder is still this process's; asked right before anything gets its name.

        Raises:
            WriteFailed: it could not be written; the generations before it are untouched.
            Locked: another process has taken the folder.
        """
        with self._one_ends_it:
            if self._abandoned:
                raise WriteFailed(f"{self._final}: was given up before it was committed")
            try:
                return self._commit(manifest, keep)
            except Locked:
                self._overtaken = True
                raise

    def _commit(self, manifest: Manifest, keep: Callable[[], None]) -> Stored:
        try:
            while self._unsynced:
                self._files.sync(self._unsynced[-1])
                self._files.close(self._unsynced.pop())
            self.sync_folders(self.infos)
            self._files.sync_directory(self.folder)
            keep()
            self._renamed = True  # also if it says that it failed; `begin` made sure that nothing whole lay there
            self._files.rename(self.folder, self._final)
            self._files.sync_directory(self._layout.generations)
            path = os.path.join(self._final, MANIFEST_FILE)
            write_file(self._files, path, encode_manifest(manifest), before=keep)
        except ForebayError:
            raise
        except OSError as error:
            keep()  # who has taken the folder removes what is not complete in it
            raise WriteFailed(f"{self._final}: could not be committed: {error}. {RETRY}") from error
        self._renamed = False
        return Stored(self._final, manifest)

    def abandon(self) -> None:
        """Remove what was written, after a failure: nothing stays, neither aside nor under the final name, as far as
        the disk lets us; the next commit tries again.

        May be called while another thread is in :meth:`commit`, whose caller was cancelled: then whichever comes first
        decides, and a generation that was committed stays.
        """
        with self._one_ends_it:
            self._abandoned = True
            while self._unsynced:
                with suppress(OSError):
                    self._files.close(self._unsynced.pop())
            # What has these names by now may be the other process's, which cleans up too.
            if self._overtaken or self._others:
                return
            with suppress(OSError):
                remove_tree(self._files, self.folder)
            with suppress(OSError):
                if self._renamed:
                    remove_generation(self._files, self._final)

    def target(self, path: str) -> str:
        """Return where a file of the generation is written, and make its folder."""
        target = os.path.join(self.folder, path)
        parent = os.path.dirname(target)
        if parent != self.folder:
            self._files.makedirs(parent)
        return target


def _walk(folder: str) -> list[str]:
    found = []
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        found += [os.path.relpath(os.path.join(where, name), folder) for name in [*names, *links]]
    return found
