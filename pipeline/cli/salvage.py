"""``forebay salvage RUN OUT``: everything that is whole of a damaged run, in a new one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.checkpoint.losses import Loss, Salvaged
from pipeline.checkpoint.verify import bytes_to_verify
from pipeline.cli.terminal import Terminal, make_parser, run_command
from pipeline.cli.words import counted
from pipeline.tools.output import Outputs
from pipeline.tools.salvaging import (
    SalvagedBuffer,
    SalvagedRows,
    SalvagedShards,
    SalvagedTrajectories,
    SalvagedTrajectoryShards,
    salvage_run,
)
from pipeline.tools.salvaging_episodes import SalvagedEpisodes
from pipeline.tools.target import find_target

DONE = 0
DESCRIPTION = """\
Write everything that is whole of a damaged run into a new run, and list what is not: of a run of rollouts, or of a
buffer of transitions or trajectories, of one process or of ranks. The damaged run is only read; no other process may
write in it meanwhile. The new one appears when it is complete.
"""
EXAMPLE = "forebay salvage runs/a runs/a-salvaged --dry-run"
EXITS = """\
0  done: OUT is a run that can be resumed. What did not come along is listed
1  nothing was written: no generation can be gone on from, or a file cannot be read or written
2  the command line is wrong, OUT holds something, or there is no run
130  stopped by Ctrl-C: nothing was written
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Salvage a run, print what was lost, and return the exit code."""
    own = parser()
    given = own.parse_args(arguments)
    return run_command("salvage", lambda: _run(given))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = make_parser("salvage", DESCRIPTION, EXAMPLE, EXITS)
    made.add_argument("run", metavar="RUN", help="the damaged run's folder")
    made.add_argument("out", metavar="OUT", help="where the new run goes: absent, or an empty folder")
    made.add_argument("--step", type=int, metavar="STEP", help="begin with the newest generation of this step")
    made.add_argument("--dry-run", action="store_true", help="write nothing; say what would come along")
    made.add_argument("--json", action="store_true", help="print what was done as JSON")
    return made


def _run(given: Any) -> int:
    out = Terminal()
    found = _rehearsed(out, given) if given.dry_run else _salvaged(out, given)
    if given.json:
        out.json({**msgspec.to_builtins(found), "whole": found.whole, "dry_run": given.dry_run})
    else:
        _show(out, found, os.path.abspath(given.run), dry_run=given.dry_run)
    return DONE


def _salvaged(out: Terminal, given: Any) -> Salvaged | SalvagedBuffer:
    find_target(given.run)  # what is no run is refused before a folder is made
    outputs = Outputs([given.out], "salvage")
    outputs.check([given.run])
    with outputs, out.progress(bytes_to_verify(given.run), "salvage") as advance:
        found = salvage_run(given.run, outputs.each[0].folder, step=given.step, told=advance, called=given.out)
        outputs.finish()
    return found


def _rehearsed(out: Terminal, given: Any) -> Salvaged | SalvagedBuffer:
    with out.progress(bytes_to_verify(given.run), "salvage, dry run") as advance:
        return salvage_run(given.run, given.out, step=given.step, told=advance, rehearse=True)


def _show(out: Terminal, found: Salvaged | SalvagedBuffer, run: str, *, dry_run: bool) -> None:
    verb = "would be written" if dry_run else "written"
    out.line(f"{found.directory}: {verb}", style="good")
    usable, every = found.generations_usable, found.generations_usable + found.generations_unusable
    says = "how the buffer stood" if isinstance(found, SalvagedBuffer) else "what the weights have seen"
    out.fields(
        [
            ("from", f"{run}, {found.origin.replace('/', ', generation ')} (step {found.step})"),
            *_kept(found),
            ("generations", f"{usable} of {every} say {says}"),
            *[("left out", f"{path}: {why}") for path, why in found.left_out.items()],
        ]
    )
    if found.whole:
        out.line("Nothing was lost.")
    for number, loss in enumerate(found.losses, 1):
        _show_loss(out, number, loss)
    if dry_run:
        out.line("Nothing was written: this was a dry run.", style="faint")


def _kept(found: Salvaged | SalvagedBuffer) -> list[tuple[str, str]]:
    if isinstance(found, Salvaged) and not isinstance(found, SalvagedEpisodes):
        return _rollouts(found)
    lost = f"{found.rows_lost:,} are lost"
    kept = counted(found.rows_kept, "row")
    if isinstance(found, SalvagedTrajectories):
        lost = f"{found.trajectories_lost:,} with {counted(found.rows_lost, 'row')} are lost"
        kept = f"{counted(found.trajectories_kept, 'trajectory', 'trajectories')} with {kept}"
    shown = [("kept", f"{kept}, and {lost}")]
    if isinstance(found, (SalvagedShards, SalvagedTrajectoryShards)):
        ranks = ", ".join(f"{rank}: {rows:,}" for rank, rows in enumerate(found.shards))
        shown.append(("ranks", ranks + "".join(f"; the shard of rank {rank} is lost" for rank in found.shards_lost)))
    if isinstance(found, (SalvagedRows, SalvagedShards, SalvagedEpisodes)) and found.episodes_split:
        split = counted(found.episodes_split, "episode")
        shown.append(("split", f"{split} by rows that are gone between others"))
    if isinstance(found, SalvagedEpisodes):
        shown.append(("again", f"{counted(found.items_again, 'item')} from the start"))
    return shown


def _rollouts(found: Salvaged) -> list[tuple[str, str]]:
    kept = f"{counted(found.groups_kept, 'finished group')}, {counted(found.members_kept, 'payload')}"
    again = (
        f"{counted(found.members_again, 'member')} to be run again; {counted(found.items_again, 'item')} from the start"
    )
    shown = [("kept", kept), ("again", again)]
    if found.ranks:
        ranks = ", ".join(f"{rank}: {groups:,}" for rank, groups in enumerate(found.ranks))
        lost = "".join(f"; what the weights have seen of rank {rank} is lost" for rank in found.ranks_lost)
        shown.insert(1, ("ranks", ranks + lost))
    return shown


def _show_loss(out: Terminal, number: int, loss: Loss) -> None:
    at = "" if loss.offset is None else f" at byte {loss.offset}"
    size = f", {loss.bytes:,} bytes" if loss.bytes else ""
    out.title(f"{number}. {loss.path}{at}{size}")
    out.fields([("found", loss.what), ("lost", loss.lost)])
