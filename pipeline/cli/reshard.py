"""``forebay reshard RUN --to N --out OUT``: a run for another number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.cli.making import add_common, carry_out, parser_of
from pipeline.tools import reshard

DESCRIPTION = """\
Write the buffer of one process, or of M ranks, as that of N ranks, each of which then takes its own part back. The plan
is that of resume() on N ranks: whole episodes or trajectories, the oldest first, each to the rank that has the fewest
rows by then. As many ranks as before keep what they have, bit for bit. The run is only read. What the trainer had
attached comes along. Of a pipeline, all that was claimed and has not ended is shared out likewise, by turns.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reshard, and return the exit code."""
    given = parser().parse_args(arguments)
    options = {name: getattr(given, name) for name in ("step", "capacity", "evict_oldest", "rebalance", "dry_run")}
    return carry_out("reshard", given, lambda told: reshard(given.run, given.out, given.to, told=told, **options))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = parser_of("reshard", DESCRIPTION, "forebay reshard runs/a --to 16 --out runs/b")
    made.add_argument("run", metavar="RUN", help="the run's folder")
    made.add_argument("--to", type=int, metavar="N", required=True, help="how many ranks there will be")
    made.add_argument("--out", metavar="OUT", required=True, help="folder of the new run, absent or empty")
    made.add_argument("--step", type=int, metavar="STEP", help="read the newest generation of this step")
    made.add_argument(
        "--capacity", type=int, metavar="N", help="rows, or trajectories, that a rank has room for; all, if not said"
    )
    made.add_argument("--evict-oldest", action="store_true", help="let the oldest go where there is no room for all")
    made.add_argument("--rebalance", action="store_true", help="share all out anew though the ranks are as many")
    return add_common(made)
