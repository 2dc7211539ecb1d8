"""``forebay merge A B C --out OUT``: several runs of one kind as one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.cli.making import add_common, carry_out, parser_of
from pipeline.tools import merge

DESCRIPTION = """\
Write what several runs of one kind hold into a new run: buffers of transitions, or of trajectories, or pipelines, of
one process or of ranks. They are only read. What has one id comes in the order of the runs' names, rank_2 before
rank_10. Ids that clash are others then, and OUT/ids.json says which. What the trainer had attached is left out.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge, and return the exit code."""
    given = parser().parse_args(arguments)
    options = {name: getattr(given, name) for name in ("allow_related", "dry_run")}
    return carry_out("merge", given, lambda told: merge(given.run, given.out, told=told, **options))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = parser_of("merge", DESCRIPTION, "forebay merge runs/rank_* --out runs/all")
    made.add_argument("run", metavar="RUN", nargs="+", help="folders of the runs")
    made.add_argument("--out", metavar="OUT", required=True, help="folder of the new run, absent or empty")
    made.add_argument(
        "--allow-related",
        action="store_true",
        help="merge runs though one was made of another, or both of a third: what they have in common is there twice",
    )
    return add_common(made)
