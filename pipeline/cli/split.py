"""``forebay split RUN --count N --out OUT1 OUT2``: a run as several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.cli.making import add_common, carry_out, parser_of
from pipeline.tools import split

DESCRIPTION = """\
Write what a run holds into several new runs: the oldest episodes, trajectories, groups or items and the others, or
those that meet a condition and the others, or one run for each version or task. It is only read. Episodes stay whole,
and forebay merge puts the parts together again. What the trainer had attached is left out.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Split, and return the exit code."""
    given = parser().parse_args(arguments)
    options = {name: getattr(given, name) for name in ("count", "fraction", "by", "where", "step", "dry_run")}
    return carry_out("split", given, lambda told: split(given.run, given.out, told=told, **options))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = parser_of("split", DESCRIPTION, "forebay split runs/a --fraction 0.9 --out runs/train runs/test")
    made.add_argument("run", metavar="RUN", help="the run's folder")
    how = made.add_mutually_exclusive_group(required=True)
    how.add_argument("--count", type=int, metavar="N", help="the first part has the N oldest")
    how.add_argument("--fraction", type=float, metavar="F", help="the first part has that part of them, the oldest")
    how.add_argument("--by", choices=("task", "version"), metavar="WHAT", help="a run in OUT for each task or version")
    how.add_argument(
        "--where",
        metavar="EXPR",
        help="the first part has those that meet a condition with one of their rows: 'reward > 0.5 and task == 3'",
    )
    made.add_argument(
        "--out",
        metavar="OUT",
        nargs="+",
        required=True,
        help="folders of the first part and of the rest, absent or empty; without the second the rest is left out",
    )
    made.add_argument("--step", type=int, metavar="STEP", help="read the newest generation of this step")
    return add_common(made)
