"""``forebay export RUN OUT --to FORMAT``: what a run holds, for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import msgspec

from pipeline.cli.transfer import EXITS, ended, said
from pipeline.tools.exporting import Exported, export
from pipeline.tools.formats.folder import PART_BYTES
from pipeline.tools.formats.registry import TO
from pipeline.tools.interchange.rollouts_out import STATUSES
from pipeline.tools.interchange.streams import CONTENTS

DESCRIPTION = """\
Write what a generation of a run holds into a new folder: the rows of a buffer (of all its shards), trajectories, or
finished rollouts. The run is only read; it may be in use. The folder gets its name when it is whole.

example: forebay export runs/b rows --to parquet --where 'reward>0'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, and return the exit code."""
    given = parser().parse_args(arguments)

    def do(told: Callable[[int, int], None]) -> None:
        found = export(
            given.run,
            given.out,
            to=given.to,
            content=given.content,
            step=given.step,
            tasks=given.task,
            statuses=given.status,
            where=given.where,
            part_bytes=given.part_mb << 20,
            fps=given.fps,
            dry_run=given.dry_run,
            progress=told,
        )
        print(msgspec.json.format(msgspec.json.encode(found)).decode() if given.json else _line(found, given.dry_run))

    return ended("forebay export", do)


def _line(found: Exported, dry: bool) -> str:
    what = f"{said(found.count, found.content)} of step {found.step} as {found.to}"
    notes = "".join(f"\n  note: {note}" for note in found.notes)
    if dry:
        return f"{found.out}: {what} would be written, from {found.bytes:,} bytes{notes}"
    size = sum(info.bytes for info in found.files)
    return f"{found.out}: {what}, {said(len(found.files), 'files')} of {size:,} bytes{notes}"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog="forebay export",
        description=DESCRIPTION,
        epilog=EXITS.format(what="OUT", source="the run"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", metavar="RUN", help="the run's folder")
    made.add_argument("out", metavar="OUT", help="where to write: absent, or an empty folder")
    made.add_argument("--to", required=True, choices=TO, metavar="FORMAT", help=f"one of {', '.join(TO)}")
    made.add_argument(
        "--content", choices=CONTENTS, metavar="WHAT", help="rollouts or transitions, where the run has both"
    )
    made.add_argument("--step", type=int, metavar="STEP", help="the generation of this step, and not the newest")
    made.add_argument(
        "--task", action="append", default=[], metavar="NAME", help="rollouts of this task alone; may be given again"
    )
    made.add_argument(
        "--status",
        action="append",
        default=[],
        choices=STATUSES,
        metavar="STATUS",
        help=f"rollouts of this status alone ({', '.join(STATUSES)}); left out: all but parked ones",
    )
    made.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="those alone that meet it, such as 'reward>=0.5' or '#version>3'; may be given again",
    )
    made.add_argument(
        "--part-mb",
        type=int,
        default=PART_BYTES >> 20,
        metavar="MB",
        help="about how large a file may become (default: %(default)s)",
    )
    made.add_argument("--fps", type=int, metavar="N", help="frames per second, of lerobot alone (default: 1)")
    made.add_argument("--dry-run", action="store_true", help="look at everything, and write nothing")
    made.add_argument("--json", action="store_true", help="print what was written as JSON")
    return made
