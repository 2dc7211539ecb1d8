"""``forebay import PATH OUT``: a run out of what an export, or another system, wrote."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import msgspec

from pipeline.cli.transfer import EXITS, ended, said
from pipeline.errors import ConfigError
from pipeline.tools.formats.registry import FROM
from pipeline.tools.importing import Imported, import_data

DESCRIPTION = """\
Make a run of what lies at PATH, which is only read: rows become a buffer's run, trajectories one of trajectories, and
rollouts a pipeline's run in which they wait to be trained. The folder gets its name when it is whole.

example: forebay import rows.jsonl runs/new --rename terminals=terminated
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Import, and return the exit code."""
    given = parser().parse_args(arguments)

    def do(told: Callable[[int, int], None]) -> None:
        found = import_data(
            given.path,
            given.out,
            from_=given.from_,
            step=given.step,
            rename=dict(map(_pair, given.rename)),
            dry_run=given.dry_run,
            progress=told,
        )
        print(msgspec.json.format(msgspec.json.encode(found)).decode() if given.json else _lines(found))

    return ended("forebay import", do)


def _pair(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not sign or not old or not new:
        raise ConfigError.of("rename", text, "OLD=NEW is needed")
    return old, new


def _lines(found: Imported) -> str:
    made = f"run {found.run_id} with" if found.run_id else "a run would be made with"
    lines = [f"{found.out}: {made} {said(found.count, found.content)} of {found.from_}, after step {found.step}"]
    return "\n".join([*lines, *(f"  note: {note}" for note in found.notes)])


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog="forebay import",
        description=DESCRIPTION,
        epilog=EXITS.format(what="OUT", source="PATH"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("path", metavar="PATH", help="a file or a folder")
    made.add_argument("out", metavar="OUT", help="where the run goes: absent, or an empty folder")
    made.add_argument(
        "--from",
        dest="from_",
        choices=FROM,
        metavar="FORMAT",
        help=f"one of {', '.join(FROM)}; left out, it is guessed",
    )
    made.add_argument(
        "--step", type=int, metavar="STEP", help="the trainer's step that the run begins after; else the export's, or 0"
    )
    made.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="call a column of transitions otherwise, such as terminals=terminated; may be given again",
    )
    made.add_argument("--dry-run", action="store_true", help="look at what is there, and make nothing")
    made.add_argument("--json", action="store_true", help="print what was made as JSON")
    return made
