"""``python -m benchmarks`` lists the benchmarks; ``python -m benchmarks NAME`` runs one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import agents, checkpoint, overhead, processes, replay, serving, sharded, staleness, tools, transitions
from benchmarks.harness import Row, show

BENCHMARKS: dict[str, Callable[[float], list[Row]]] = {
    "agents": agents.run,
    "checkpoint": checkpoint.run,
    "overhead": overhead.run,
    "processes": processes.run,
    "replay": replay.run,
    "sharded": sharded.run,
    "serving": serving.run,
    "staleness": staleness.run,
    "tools": tools.run,
    "transitions": transitions.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for. Exit code 0 whatever the figures are: they are for people to read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="print a list of rows on stdout")
    parser.add_argument("--scale", type=float, default=1.0, help="how much work, relative to the figures that count")
    parser.add_argument(
        "--folder", help="checkpoint, tools, transitions: a folder on the disk to be measured; else the current one"
    )
    parser.add_argument("--large", action="store_true", help="checkpoint: a buffer of 4 GB as well")
    given = parser.parse_args(arguments)
    names = [given.name] if given.name else sorted(BENCHMARKS)
    chosen: dict[str, Callable[[float], list[Row]]] = {
        **BENCHMARKS,
        "checkpoint": partial(checkpoint.run, folder=given.folder, large=given.large),
        "tools": partial(tools.run, folder=given.folder),
        "transitions": partial(transitions.run, folder=given.folder),
    }
    rows = [row for name in names for row in chosen[name](given.scale)]
    if given.json:
        json.dump([row.to_dict() for row in rows], sys.stdout, indent=2)
        print()
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
