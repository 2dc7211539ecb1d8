"""Which generations of a damaged run can be used, and what is wrong with the others. Nothing is changed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.generations import KINDS
from pipeline.checkpoint.halves import joined_halves, read_half
from pipeline.checkpoint.lines import PRODUCER_FILE, read_inherited
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import (
    BLOCKS_FILE,
    CONSUMER_FILE,
    MANIFEST_FILE,
    PIPELINE,
    PIPELINE_RANKS,
    PROGRESS_FILE,
    REPLAY_BUFFER,
    SHARDS_FOLDER,
    FileInfo,
    Manifest,
    decode_manifest,
    shard_prefix,
)
from pipeline.checkpoint.trainer_state import check_file
from pipeline.errors import Damaged, NewerFormat, NotARun, StoreError, UsageError
from pipeline.ledger import ConsumerHalf
from pipeline.records import Inherited
from pipeline.sampler.progress import Progress, decode_progress
from pipeline.store.files import open_plain
from pipeline.store.layout import Layout, RunFile

_NAME = re.compile(r"\d+")


class RankHalf(NamedTuple):
    """What one of several ranks wrote of a generation, as far as it can be read."""

    half: ConsumerHalf | None
    progress: Progress | None
    unknown: dict[str, Any]


class Candidate(NamedTuple):
    """A generation, as far as it can be read."""

    number: int
    folder: str
    manifest: Manifest | None
    half: ConsumerHalf | None
    """None: this generation cannot be used."""
    progress: Progress | None
    unknown: dict[str, Any]
    inherited: Inherited | None
    """What is to be drawn again, of a generation without its buffer."""
    faults: dict[str, str]
    """What is wrong, by path in the generation's folder."""
    ranks: Sequence[RankHalf] = ()
    """Of a pipeline of several ranks, what each wrote; ``half`` is then what all of them say together."""

    @property
    def left_out(self) -> dict[str, str]:
        """The trainer's files that are not whole, and why."""
        own = (MANIFEST_FILE, CONSUMER_FILE, PROGRESS_FILE, PRODUCER_FILE)
        faults = {path: why for path, why in self.faults.items() if not path.startswith(f"{SHARDS_FOLDER}/")}
        rows = self.manifest is not None and fills_buffer(self.manifest)
        return {path: why for path, why in faults.items() if path not in own and not (rows and of_buffer(path))}

    @property
    def partial(self) -> bool:
        """Whether some ranks, if not all, say what the weights have seen."""
        return any(each.half is not None for each in self.ranks)

    @property
    def whole(self) -> bool:
        """Whether everything that a trainer goes on from is there."""
        return self.half is not None and not self.left_out

    @property
    def name(self) -> str:
        """Its number, and its step if that is known."""
        return f"generation {self.number}" + ("" if self.manifest is None else f" (step {self.manifest.step})")


class Survey(NamedTuple):
    """What a run's folder holds besides journals and segments."""

    run: RunFile
    candidates: list[Candidate]
    losses: list[Loss]
    """What is wrong with the marker."""


def survey(layout: Layout, *, rows: bool = False) -> Survey:
    """Look at the marker and at every generation. Blocks.

    ``rows``: also of a run whose rollouts fill a buffer of transitions.

    Raises:
        NotARun: there is no run.
        NewerFormat: a newer version wrote it.
        UsageError: it is a run of another kind.
        Damaged: neither the marker nor a manifest says which run this is.
    """
    found = _manifests(layout)
    run, losses = identify(layout, [manifest for _, _, manifest in found if isinstance(manifest, Manifest)])
    for _, folder, manifest in found:
        if not isinstance(manifest, Manifest) or manifest.run_id != run.run_id:
            continue
        whole = "pipeline.tools.salvage_run takes what is whole of it"
        if manifest.kind not in (PIPELINE, PIPELINE_RANKS):
            raise UsageError(
                f"{folder}: of a {KINDS.get(manifest.kind, manifest.kind)}; resume(step=...) goes on from an older "
                f"generation of it, and {whole}"
            )
        if not rows and fills_buffer(manifest):
            raise UsageError(f"{folder}: its rollouts fill a replay buffer; {whole}")
    return Survey(run, [_examine(run.run_id, *each) for each in found], losses)


def fills_buffer(manifest: Manifest) -> bool:
    """Whether a generation is of a pipeline whose rollouts fill a buffer of transitions."""
    return manifest.kind == PIPELINE and any(info.path == BLOCKS_FILE for info in manifest.files)


def of_buffer(path: str) -> bool:
    """Whether a file of a generation says how the buffer stood that rollouts fill."""
    return path in (BLOCKS_FILE, "replay.json") or path.startswith("values/")


def choose_whole(candidates: list[Candidate], step: int | None, where: str) -> Candidate:
    """Return the newest generation with a whole trainer, or else the newest that says what the weights have seen; of
    several ranks, if none does, the newest in which some ranks do.

    Raises:
        StoreError: there is none of ``step``.
        Damaged: none can be used; the message says what is wrong with each.
    """
    asked = [each for each in candidates if each.manifest is not None and step in (None, each.manifest.step)]
    if step is not None and not asked:
        steps = sorted({each.manifest.step for each in candidates if each.manifest is not None})
        raise StoreError(f"{where}: no generation of step {step} can be read; there are steps {steps}")
    usable = [each for each in asked if each.half is not None] or [each for each in asked if each.partial]
    if not usable:
        told = "".join(
            f"\n  {each.name}: {'; '.join(each.faults.values())}" for each in (candidates if step is None else asked)
        )
        raise Damaged(
            f"{where}: no generation says what the weights have seen, so there is nothing that rollouts could be "
            f"added to. Restore one of them from a copy:{told or ' there is none'}"
        )
    return ([each for each in usable if not each.left_out] or usable)[-1]


def _manifests(layout: Layout) -> list[tuple[int, str, Manifest | str]]:
    """Return number, folder, and manifest or what is wrong with it, of each generation, by rising number."""
    found: list[tuple[int, str, Manifest | str]] = []
    for number, path in _numbered(layout):
        read: Manifest | str
        try:
            with open_plain(path) as file:
                read = decode_manifest(file.read(), path)
        except NewerFormat:
            raise
        except FileNotFoundError:
            read = f"{path}: not there; the generation was never committed, or it was damaged since"
        except OSError as error:
            read = str(error)
        found.append((number, os.path.dirname(path), read))
    return found


def without_manifest(layout: Layout) -> list[str]:
    """Return the folders of generations that hold no manifest: never committed, or damaged since; nobody can tell."""
    return [os.path.dirname(path) for _, path in _numbered(layout) if not os.path.lexists(path)]


def _numbered(layout: Layout) -> list[tuple[int, str]]:
    """Return the number of each generation and the path of its manifest, by rising number."""
    try:
        names = [name for name in os.listdir(layout.generations) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [(int(name), os.path.join(layout.generations, name, MANIFEST_FILE)) for name in sorted(names, key=int)]


def identify(layout: Layout, manifests: list[Manifest] | None = None) -> tuple[RunFile, list[Loss]]:
    """Return the run's marker; where it is damaged, what the manifests say instead, and that it is.

    Raises:
        NotARun: there is no run.
        NewerFormat: a newer version wrote it.
        Damaged: neither the marker nor a manifest says which run this is.
    """
    if manifests is None:
        manifests = [manifest for _, _, manifest in _manifests(layout) if isinstance(manifest, Manifest)]
    ids = Counter(each.run_id for each in manifests)
    try:
        run = layout.read_run() if os.path.isdir(layout.directory) else None
        if run is None:
            raise NotARun(f"{layout.directory}: there is no run")
        if run.run_id in ids or not ids:
            return run, []
        error: OSError = Damaged(f"{layout.run_file}: it names run {run.run_id}, and no generation is of that run")
    except NewerFormat:
        raise
    except OSError as caught:
        error = caught
    for run_id, _ in ids.most_common():
        run = RunFile(run_id=run_id)
        try:
            run.tag  # noqa: B018  the id must be hexadecimal
        except ValueError:
            continue
        lost = "nothing: the manifests say which run this is"
        return run, [Loss(path=os.path.basename(layout.run_file), what=str(error), lost=lost)]
    raise error


def _examine(run_id: str, number: int, folder: str, read: Manifest | str) -> Candidate:
    nothing = Candidate(number, folder, None, None, None, {}, None, {})
    if isinstance(read, str):
        return nothing._replace(faults={MANIFEST_FILE: read})
    path = os.path.join(folder, MANIFEST_FILE)
    if read.run_id != run_id:
        return nothing._replace(faults={MANIFEST_FILE: f"{path}: of run {read.run_id}, and this is {run_id}"})
    if read.generation != number:
        return nothing._replace(faults={MANIFEST_FILE: f"{path}: says generation {read.generation}; renamed?"})
    faults = {info.path: why for info in read.files if (why := _fault(folder, info)) is not None}
    if read.kind == PIPELINE_RANKS:
        return _of_ranks(nothing._replace(manifest=read, faults=faults), read)
    half = _read(faults, CONSUMER_FILE, lambda: read_half(folder)[0])
    progress = _read(faults, PROGRESS_FILE, lambda: _read_progress(os.path.join(folder, PROGRESS_FILE)))
    if fills_buffer(read) and any(map(of_buffer, faults)):
        half = None  # nobody knows what its rows are
    inherited = None
    if REPLAY_BUFFER in read.left_out:
        inherited = _read(faults, PRODUCER_FILE, lambda: read_inherited(os.path.join(folder, PRODUCER_FILE)))
        half = half if inherited is not None else None
    known, unknown = progress or (None, {})
    return Candidate(number, folder, read, half, known, unknown, inherited, faults)


def _of_ranks(found: Candidate, manifest: Manifest) -> Candidate:
    """Return a generation that several ranks wrote."""
    if [each.rank for each in manifest.shards] != list(range(len(manifest.shards))) or not manifest.shards:
        found.faults[MANIFEST_FILE] = f"{found.folder}: does not list a part of each rank from 0 on"
        return found
    listed = {info.path for info in manifest.files}
    ranks = []
    for rank in range(len(manifest.shards)):
        prefix, folder = shard_prefix(rank), os.path.join(found.folder, shard_prefix(rank))
        for name in (CONSUMER_FILE, PROGRESS_FILE):
            if prefix + name not in listed:
                found.faults[prefix + name] = f"{folder}{name}: the manifest does not list it"
        half = _read(found.faults, prefix + CONSUMER_FILE, lambda folder=folder: read_half(folder)[0])
        path = os.path.join(folder, PROGRESS_FILE)
        known, unknown = _read(found.faults, prefix + PROGRESS_FILE, lambda path=path: _read_progress(path)) or (
            None,
            {},
        )
        ranks.append(RankHalf(half, known, unknown))
    path = os.path.join(found.folder, PROGRESS_FILE)
    known, unknown = _read(found.faults, PROGRESS_FILE, lambda: _read_progress(path)) or (None, {})
    halves = [each.half for each in ranks if each.half is not None]
    whole = len(halves) == len(ranks) == manifest.world_size
    return found._replace(
        half=joined_halves(halves) if whole else None, progress=known, unknown=unknown, ranks=tuple(ranks)
    )


def _read(faults: dict[str, str], path: str, read: Any) -> Any:
    if path in faults:
        return None
    try:
        return read()
    except NewerFormat:
        raise
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        faults[path] = str(error)
        return None


def _read_progress(path: str) -> tuple[Progress, dict[str, Any]]:
    with open_plain(path) as file:
        return decode_progress(file.read(), path)


def _fault(folder: str, info: FileInfo) -> str | None:
    """Return what is wrong with a file of a generation, or None."""
    root = os.path.realpath(folder)
    path = os.path.join(root, info.path)
    if os.path.lexists(path) and (os.path.realpath(path) != path or not os.path.isfile(path)):
        return f"{path}: a link or a special file, where the manifest lists a plain one"
    try:
        check_file(path, size=info.bytes, checksum=info.crc32c)
    except OSError as error:
        return str(error)
    return None
