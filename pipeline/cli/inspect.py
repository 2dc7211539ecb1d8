"""``forebay inspect PATH``: what a run, or a part of one, holds, how it came about, and what is wrong with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from pipeline.cli.inspect_views import show
from pipeline.cli.item_view import show_one
from pipeline.cli.terminal import Terminal, make_parser, run_command
from pipeline.cli.words import printable
from pipeline.tools.event_lines import Happened
from pipeline.tools.following import follow
from pipeline.tools.inspecting import inspect
from pipeline.tools.one_item import show_item

DONE = 0
DESCRIPTION = """\
Say what lies at PATH: a run's folder, a generation's (RUN/generations/00000012), a shard's in it (shards/0003), a
manifest, a journal (.fbj) or a segment (.fbs). What it holds, how it came about, and, in short, what is wrong with it.
It only reads: the run may be in use, or a copy that cannot be written.
"""
EXAMPLE = "forebay inspect runs/a --item 17"
EXITS = """\
0  done, whatever was found; forebay verify says whether all of it is whole
1  nothing can be said of it: it cannot be read
2  the command line is wrong, nothing of a run is there, or there is no such item
130  stopped by Ctrl-C; with --follow that is how it ends, with 0
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is at a path, and return the exit code."""
    own = parser()
    given = own.parse_args(arguments)
    return run_command("inspect", lambda: _run(given))


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = make_parser("inspect", DESCRIPTION, EXAMPLE, EXITS)
    made.add_argument("path", metavar="PATH", help="what to look at")
    made.add_argument("--step", type=int, metavar="STEP", help="of a run, the newest generation of this step")
    how = made.add_mutually_exclusive_group()
    how.add_argument(
        "--item",
        type=int,
        metavar="UID",
        help="print one rollout: its item, text, tokens, tool calls and rewards. Of a buffer, one row by its key, or "
        "one trajectory by its number",
    )
    how.add_argument("--follow", action="store_true", help="print what happens in the run from now on, until Ctrl-C")
    made.add_argument("--json", action="store_true", help="print it as JSON; with --follow, one value a line")
    return made


def _run(given: Any) -> int:
    out = Terminal()
    if given.follow:
        return _follow(out, given.path, as_json=given.json)
    if given.item is not None:
        item = show_item(given.path, given.item, step=given.step)
        if given.json:
            out.json(item)
        else:
            show_one(out, item)
        return DONE
    with out.bar("inspect") as told:
        found = inspect(given.path, step=given.step, told=told)
    if given.json:
        out.json(found)
    else:
        show(out, found)
    return DONE


def _follow(out: Terminal, path: str, *, as_json: bool) -> int:
    def tell(happened: list[Happened]) -> None:
        for each in happened:
            if as_json:
                out.line(msgspec.json.encode(each).decode())
            else:
                said = printable(each.said).replace("\n", " ")
                where = f"{each.incarnation}.{each.rank}.{each.sequence}"
                out.line(f"{where:<10}  {each.event:<16}  {said}")
        out.flush()

    try:
        anyio.run(follow, path, tell, lambda: print("forebay inspect: following; Ctrl-C ends it", file=sys.stderr))
    except KeyboardInterrupt:
        return DONE
    raise AssertionError("it goes on until it is stopped")
