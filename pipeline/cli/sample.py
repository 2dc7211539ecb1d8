"""``forebay sample PATH``: one batch out of a saved run, to see what it is made of and how fast it can be had."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pipeline.cli.terminal import Terminal, make_parser, run_command
from pipeline.cli.words import counted, in_bytes, in_time, number
from pipeline.tools.sampling import Sampled, sample_run

DONE = 0
DESCRIPTION = """\
Draw one batch from what a run's newest generation holds, and print its keys, shapes, dtypes, and rates: rows of a
buffer, as it would have drawn them next; finished groups of a run of rollouts. It only reads, takes no lock and copies
nothing: of a buffer the rows that are drawn are read, and no others. The run may be in use.
"""
EXAMPLE = "forebay sample runs/b -n 256"
EXITS = """\
0  a batch was drawn
1  there was nothing to be drawn, or it cannot be read
2  the command line is wrong, or there is no run
130  stopped by Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw once, print what was drawn, and return the exit code."""
    own = parser()
    given = own.parse_args(arguments)
    return run_command("sample", lambda: _run(given))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = make_parser("sample", DESCRIPTION, EXAMPLE, EXITS)
    made.add_argument("path", metavar="PATH", help="a run's folder, a generation's, or a shard's")
    made.add_argument(
        "-n", "--count", type=int, default=256, metavar="N", help="how many rows, or groups (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, metavar="SEED", help="draw by this, not as the buffer would have drawn next")
    made.add_argument("--step", type=int, metavar="STEP", help="of a run, the newest generation of this step")
    made.add_argument("--rank", type=int, default=0, metavar="RANK", help="of shards, whose (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="print it as JSON")
    return made


def _run(given: Any) -> int:
    out = Terminal()
    with out.bar("sample") as told:
        found = sample_run(given.path, given.count, seed=given.seed, step=given.step, rank=given.rank, told=told)
    if given.json:
        out.json(found)
    else:
        _show(out, found)
    return DONE


def _show(out: Terminal, found: Sampled) -> None:
    whose = "" if found.rank is None else f" of rank {found.rank}"
    out.title(f"{found.path}: {found.drawn:,} of {found.there:,} {found.of}{whose}, generation {found.generation}")
    out.table(
        ["key", "dtype", "shape", "least", "most", "not finite"],
        [
            [each.key, each.dtype, each.shape, number(each.least), number(each.most), number(each.not_finite)]
            for each in found.keys
        ],
    )
    members = f", {counted(found.rollouts, 'rollout')}" if found.rollouts else ""
    out.fields(
        [
            ("step", str(found.step)),
            ("batch", f"{in_bytes(found.bytes)}{members}"),
            ("loaded in", in_time(found.load_seconds)),
            ("drawn in", in_time(found.draw_seconds)),
            ("rate", f"{found.per_second:,.0f} {found.of}/s, {in_bytes(found.bytes_per_second)}/s"),
        ]
    )
    if found.drawn < found.asked:
        out.line(f"{found.asked:,} were asked for, and no more were there.", style="faint")
