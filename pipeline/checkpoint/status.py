"""How a run stands, for whoever looks at its folder: nothing is taken, started or changed, and payloads are not read.

:func:`status_of` gives one answer for every folder, those included that hold no run, or a broken one.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.generations import Found, Stored, choose, find_generations, with_offer
from pipeline.checkpoint.lives import KILLED, UNCLOSED, UNKNOWN, Life, LifeReader
from pipeline.checkpoint.manifest import (
    BLOCKS_FILE,
    MANIFEST_FILE,
    PIPELINE,
    PIPELINE_RANKS,
    REPLAY,
    SHARDS,
    TRAJECTORIES,
    TRAJECTORY_SHARDS,
    Manifest,
    ShardInfo,
)
from pipeline.checkpoint.outlook import Outlook, Work
from pipeline.checkpoint.verify import Damage, Verified, verify_quickly
from pipeline.control.place import Place, find_places
from pipeline.errors import ConfigError, Damaged, ForebayError, NotARun
from pipeline.store.files import open_plain
from pipeline.store.journal import Logged
from pipeline.store.layout import Layout, RunFile
from pipeline.store.lock import Seen, is_alive, look

FINISHED, CONTINUES, RUNS, BROKEN, NOTHING = "finished", "to be continued", "running", "broken", "nothing"
_STATE_FILES = {PIPELINE: "replay.json", REPLAY: "replay.json", TRAJECTORIES: "trajectories.json"}
_JOURNAL = re.compile(r"(\d+)-\d+\.fbj")


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """The newest generation that is there."""

    generation: int
    step: int
    written: str
    reason: str
    incarnation: int
    world_size: int
    shards: list[ShardInfo]
    """What each rank wrote, of a buffer that ranks share."""
    bytes: int
    """Of its own files, rows aside."""
    rows: int | None = None
    """Of a buffer: its rows, or trajectories; None: there is none."""
    external: str = ""
    """The trainer's own checkpoint that it goes with."""
    without: list[str] = []
    """What generations of this kind usually hold, and this one does not."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Who has the folder, or had it last."""

    held: bool | None
    """Whether somebody has it now; None: the file system does not say."""
    host: str = ""
    process: int = 0
    incarnation: int = 0
    alive: bool | None = None
    """Whether a process of that number is there; None: of another host, or nobody is named."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands."""

    directory: str
    state: str
    """``finished``, ``to be continued``, ``running``, ``broken``, or ``nothing``: there is no run."""
    why: str
    """Why that is said of it, in a sentence."""
    kind: str = ""
    """What wrote it, as in the manifest; empty: nothing was saved."""
    run_id: str = ""
    newest: Newest | None = None
    generations: int = 0
    """How many are kept."""
    bytes: int = 0
    """Of all files; what generations share counts once."""
    hold: Hold = Hold(held=False)
    life: Life | None = None
    """The last one."""
    work: Work | None = None
    """Of a run of rollouts: what there is to do. None also where that cannot be told."""
    control: list[Place] = []
    """Where its ranks are asked over HTTP, while somebody has the folder."""
    damages: list[Damage] = []
    """By sizes, manifests and journals; ``verify`` reads the rest. Older generations have theirs here too."""
    unpromised: list[str] = []
    """What a crash left, and a resume does without."""
    notes: list[str] = []
    """What else a person should know."""


def status_of(directory: str | os.PathLike[str], *, until: int | None = None) -> Status:
    """Return how the run in a folder stands. Blocks; takes no lock and changes nothing.

    Args:
        directory: the run's, or a copy of it that may only be read.
        until: the last step of the training, if the caller knows it: a run that has saved it is finished.

    Raises:
        ConfigError: ``until`` is no step.
    """
    if until is not None and (until.__class__ is not int or until < 0):
        raise ConfigError.of("until", until, "a whole number from 0 on is needed")
    layout = Layout(os.fspath(directory))
    notes: list[str] = []
    hold = _hold(layout, notes)
    try:
        run = layout.read_run() if os.path.lexists(layout.directory) else None
        if run is None:
            return _without_run(layout, hold, notes)
        found = find_generations(layout, run.run_id)
        checked = _checked(layout, run, found, hold)
    except NotARun as error:
        state = BROKEN if _has_manifests(layout) else NOTHING
        return Status(directory=layout.directory, state=state, why=str(error), hold=hold, notes=notes)
    except OSError as error:
        state = RUNS if hold.held else BROKEN
        return Status(directory=layout.directory, state=state, why=str(error), hold=hold, notes=notes)
    return _judged(layout, run, found, checked, hold, until, notes)


def _hold(layout: Layout, notes: list[str]) -> Hold:
    try:
        seen = look(layout.lock_file)
    except OSError as error:
        notes.append(f"{layout.lock_file}: cannot be looked at ({error}), so whether somebody runs it is not known")
        return Hold(held=None)
    if seen.held is None:
        notes.append(
            f"{layout.lock_file}: this file system does not tell who has a lock; look for the process yourself"
        )
    return _hold_of(seen)


def _hold_of(seen: Seen) -> Hold:
    holder = seen.holder
    return Hold(
        held=seen.held,
        host=holder.host,
        process=holder.process,
        incarnation=holder.incarnation,
        alive=True if seen.held else is_alive(holder),
    )


def _has_manifests(layout: Layout) -> bool:
    """Whether generations lie in a folder that does not say which run it is."""
    paths = (os.path.join(layout.generations, name, MANIFEST_FILE) for name in _listdir(layout.generations))
    return any(map(os.path.lexists, paths))


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _without_run(layout: Layout, hold: Hold, notes: list[str]) -> Status:
    if hold.held:
        return Status(directory=layout.directory, state=RUNS, why=_who(hold) + " begins a run in it", hold=hold)
    there = "an empty folder" if os.path.isdir(layout.directory) else "there is nothing"
    return Status(directory=layout.directory, state=NOTHING, why=f"{layout.directory}: {there}", notes=notes)


class _Checked(NamedTuple):
    """What one reading of the journals gave."""

    verified: Verified
    life: Life | None
    happened: bool
    work: Work | None


def _checked(layout: Layout, run: RunFile, found: Found, hold: Hold) -> _Checked:
    """Look through the folder; what is removed while that goes on is no damage."""
    checked = _check(layout, run, found, hold)
    if not (hold.held and checked.verified.damages):
        return checked
    again = _check(layout, run, find_generations(layout, run.run_id), hold)
    both = [each for each in again.verified.damages if each in checked.verified.damages]
    return again._replace(verified=msgspec.structs.replace(again.verified, damages=both))


def _check(layout: Layout, run: RunFile, found: Found, hold: Hold) -> _Checked:
    newest = found.complete[-1] if found.complete else None
    lives = LifeReader(layout.list_journals(), hold.incarnation)
    rollouts = newest is not None and newest.manifest.kind in (PIPELINE, PIPELINE_RANKS)
    outlook = Outlook(layout, run.tag, newest) if newest is not None and rollouts else None

    def seen(logged: Logged) -> None:
        lives.take(logged)
        if outlook is not None:
            outlook.take(logged)

    verified = verify_quickly(layout, run, seen)
    damages = verified.damages
    work: Work | None = None
    if outlook is not None and newest is not None:
        if not any(each.path.startswith("journals") and _breaks(each, newest) for each in damages):
            work = outlook.result()
        if outlook.wrong is not None:
            damages = [*damages, Damage(os.path.relpath(newest.folder, layout.directory), outlook.wrong)]
    written = newest is None or newest.manifest.options.get("durability") != "none" or not rollouts
    life = lives.result(held=bool(hold.held), rollouts=rollouts or lives.happened, written=written)
    return _Checked(msgspec.structs.replace(verified, damages=damages), life, lives.happened, work)


def _judged(
    layout: Layout, run: RunFile, found: Found, checked: _Checked, hold: Hold, until: int | None, notes: list[str]
) -> Status:
    stored = found.complete[-1] if found.complete else None
    newest = None if stored is None else _newest(stored)
    state, why = _state(layout, found, checked, hold, until)
    verified = checked.verified
    if newest is not None and newest.external and not os.path.lexists(newest.external):
        notes.append(
            f"the newest generation goes with the trainer's checkpoint {newest.external}, which is not there (from "
            f"{os.getcwd()})"
        )
    ended = None if checked.life is None else checked.life.ended
    if hold.held is False and hold.host and hold.alive is None and ended in (KILLED, UNCLOSED, UNKNOWN):
        notes.append(
            f"nobody closed it, and host {hold.host} had it last: if that one's locks are not seen from here, as on "
            f"some shared file systems, process {hold.process} may still run there"
        )
    return Status(
        directory=layout.directory,
        state=state,
        why=why,
        kind="" if stored is None else stored.manifest.kind,
        run_id=run.run_id,
        newest=newest,
        generations=len(found.complete),
        bytes=_bytes(layout.directory),
        hold=hold,
        life=checked.life,
        work=checked.work,
        control=find_places(layout.directory, hold.incarnation) if hold.held is not False else [],
        damages=verified.damages,
        unpromised=verified.unpromised,
        notes=notes,
    )


def _newest(stored: Stored) -> Newest:
    manifest = stored.manifest
    return Newest(
        generation=manifest.generation,
        step=manifest.step,
        written=manifest.written,
        reason=manifest.reason,
        incarnation=manifest.incarnation,
        world_size=manifest.world_size,
        shards=manifest.shards,
        bytes=sum(info.bytes for info in manifest.files),
        rows=_rows(stored),
        external=manifest.external,
        without=sorted(manifest.left_out),
    )


def _rows(stored: Stored) -> int | None:
    manifest = stored.manifest
    if manifest.kind == SHARDS:
        return sum(shard.held for shard in manifest.shards)
    if manifest.kind == TRAJECTORY_SHARDS:
        return sum(shard.episodes for shard in manifest.shards)
    name = _STATE_FILES.get(manifest.kind)
    if name is None or not any(info.path == name for info in manifest.files):
        return None
    try:
        with open_plain(os.path.join(stored.folder, name)) as file:
            size = msgspec.json.decode(file.read(), type=_Size)
        return size.size - sum(size.dropped.values())
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):  # noted as damage, if its size is wrong
        return None


class _Size(msgspec.Struct):
    size: int = 0
    dropped: dict[str, int] = {}


def _bytes(directory: str) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:  # gone meanwhile
                continue
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


# -- what is said of it ------------------------------------------------------------------------------------------


def _state(layout: Layout, found: Found, checked: _Checked, hold: Hold, until: int | None) -> tuple[str, str]:
    """Return the state, and why."""
    if hold.held:
        return RUNS, _who(hold) + " writes in it"
    if not found.complete and not found.damaged:
        if checked.happened:
            return BROKEN, f"{layout.generations}: journals hold rollouts, but every generation is gone; restore them"
        return CONTINUES, "it was begun, and nothing was saved: the same command begins anew"
    try:
        stored = choose(found, None, layout.directory)
    except ForebayError as error:
        return BROKEN, str(error)
    breaking = [each for each in checked.verified.damages if _breaks(each, stored)]
    if breaking:
        return BROKEN, str(with_offer(Damaged(breaking[0].what), stored, found))
    return _unbroken(stored.manifest, checked, until)


def _unbroken(manifest: Manifest, checked: _Checked, until: int | None) -> tuple[str, str]:
    step, work = manifest.step, checked.work
    if until is not None:
        if step >= until:
            return FINISHED, f"step {step} of {until} is saved"
        nothing = work is not None and work.ended and not work.left
        more = ", and every source is drawn to its end: a resume finds no more" if nothing else ""
        return CONTINUES, f"step {step} of {until} is saved{more}"
    buffered = any(info.path == BLOCKS_FILE for info in manifest.files)
    if work is None or manifest.kind not in (PIPELINE, PIPELINE_RANKS) or buffered:
        return CONTINUES, f"step {step} is saved; when a buffer's training is over, only its script knows"
    if work.ended and 0 < work.left < manifest.world_size:
        rest = f"{work.left} left, which {manifest.world_size} ranks cannot share out"
        return FINISHED, f"every source is drawn to its end, and step {step} has seen all items but {rest}"
    if work.left:
        return CONTINUES, f"step {step} is saved, and {work.left} items that were drawn are not trained yet"
    if work.ended is None:
        return CONTINUES, f"step {step} is saved and nothing waits; whether its stream has ended, only its script knows"
    if not work.ended:
        return CONTINUES, f"step {step} is saved, and there is more to draw"
    return FINISHED, f"every source is drawn to its end, and step {step} has seen all of it"


def _breaks(damage: Damage, stored: Stored) -> bool:
    """Whether it keeps a resume of the newest generation from its work."""
    manifest = stored.manifest
    folder, _, name = damage.path.partition("/")
    if folder == "generations":
        return name.split("/")[0] == os.path.basename(stored.folder)
    if folder == "segments":
        return name in {info.name for info in manifest.segments}
    match = _JOURNAL.fullmatch(name)
    if folder != "journals" or match is None or manifest.left_out.get("replay_buffer"):
        return False
    if manifest.kind not in (PIPELINE, PIPELINE_RANKS):
        return False
    return int(match[1]) >= manifest.base


def _who(hold: Hold) -> str:
    if not hold.process:
        return "a process that does not say which it is"
    life = f", incarnation {hold.incarnation}," if hold.incarnation else ""
    return f"process {hold.process} on host {hold.host or 'unknown'}{life}"
