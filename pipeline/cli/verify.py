"""``forebay verify RUN``: is everything there that was promised, and if not, what is lost."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.checkpoint.verify import Damage, Verified, bytes_to_verify, verify
from pipeline.cli.terminal import Terminal, make_parser, run_command
from pipeline.cli.words import counted, in_bytes, in_time
from pipeline.store.layout import Layout
from pipeline.store.lock import look

WHOLE, NOT_WHOLE = 0, 1
DESCRIPTION = """\
Check a run from the outside: every digest and every reference from one file to another, of all generations that are
kept. It only reads, and takes no lock: the run may be in use.
"""
EXAMPLE = "forebay verify runs/a && rsync -a runs/a backup:"
EXITS = """\
0  whole: everything that was promised is there
1  damaged: the places are listed; or the folder cannot be read
2  the command line is wrong, or there is no run
130  stopped by Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a run, print what was found, and return the exit code."""
    own = parser()
    given = own.parse_args(arguments)
    return run_command("verify", lambda: _run(given))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = make_parser("verify", DESCRIPTION, EXAMPLE, EXITS)
    made.add_argument("run", metavar="RUN", help="the run's folder")
    made.add_argument(
        "--quick",
        action="store_true",
        help="read manifests, journals, sizes and the headers of records; not what rollouts, rows and trainers hold",
    )
    made.add_argument("--json", action="store_true", help="print what was found as JSON")
    return made


def _run(given: Any) -> int:
    out = Terminal()
    begun = time.monotonic()
    found = _checked(out, given.run, quick=given.quick)
    seconds = time.monotonic() - begun
    if given.json:
        out.json({**msgspec.to_builtins(found), "whole": found.whole, "quick": given.quick, "seconds": seconds})
    else:
        _show(out, given.run, found, seconds, quick=given.quick)
    return WHOLE if found.whole else NOT_WHOLE


def _checked(out: Terminal, run: str, *, quick: bool) -> Verified:
    """Check a run; what another process removes while that goes on is no damage."""
    found = _once(out, run, quick=quick)
    if not found.damages or not look(Layout(run).lock_file).held:
        return found
    again = _once(out, run, quick=quick)
    both = [each for each in again.damages if each in found.damages]
    return msgspec.structs.replace(again, damages=both)


def _once(out: Terminal, run: str, *, quick: bool) -> Verified:
    with out.progress(bytes_to_verify(run, quick=quick), "verify") as advance:
        return verify(run, quick=quick, told=advance)


def _show(out: Terminal, run: str, found: Verified, seconds: float, *, quick: bool) -> None:
    verdict = "whole" if found.whole else f"damaged, {counted(len(found.damages), 'place')}"
    depth = ", as far as sizes and headers tell" if quick and found.whole else ""
    out.line(f"{os.path.abspath(run)}: {verdict}{depth}", style="good" if found.whole else "bad")
    rate = "" if quick else f" ({in_bytes(found.bytes / max(seconds, 1e-9))}/s)"
    out.fields(
        [
            ("generations", f"{found.generations:,}"),
            ("journals", f"{found.journals:,} with {counted(found.events, 'event')}"),
            ("payloads", f"{found.payloads:,}"),
            ("bytes", f"{in_bytes(found.bytes)} in {in_time(seconds)}{rate}"),
        ]
    )
    for number, damage in enumerate(found.damages, 1):
        _show_damage(out, number, damage)
    if found.unpromised:
        out.line("A crash left these; nothing was promised there, and a resume does without:", style="faint")
        for line in found.unpromised:
            out.line(line, indent=2)
    if not found.whole:
        out.line("What is whole can be written into a new run: forebay salvage RUN OUT")


def _show_damage(out: Terminal, number: int, damage: Damage) -> None:
    at = "" if damage.offset is None else f" at byte {damage.offset}"
    out.title(f"{number}. {damage.path}{at}")
    out.fields([("found", damage.what), *([("lost", damage.lost)] if damage.lost else [])])
