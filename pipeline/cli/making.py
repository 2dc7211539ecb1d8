"""What commands that make new runs have in common: what they print, how they end, and the bar while they work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from pipeline.checkpoint.manifest import OF_SHARDS, PIPELINE, PIPELINE_RANKS, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.cli.terminal import USAGE, Terminal, make_parser, run_command
from pipeline.cli.words import printable
from pipeline.errors import UsageError
from pipeline.tools.made import Made
from pipeline.tools.output import Told

EXITS = """\
0    done; on a dry run: it could be
1    a run cannot be read or is damaged, or the new one cannot be written; nothing of it stays
2    the command line is wrong, asks for what cannot be, or names what is no run: nothing was written
130  stopped by Ctrl-C; nothing of it stays
"""
_UNITS = {
    TRAJECTORIES: "trajectories",
    TRAJECTORY_SHARDS: "trajectories",
    PIPELINE: "groups",
    PIPELINE_RANKS: "groups",
}


def parser_of(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a command's parser, which has no arguments yet."""
    return make_parser(name, description, example, EXITS)


def add_common(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that all of them have, which come last, and return the parser."""
    made.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    made.add_argument("--json", action="store_true", help="print what was made as JSON")
    return made


def carry_out(name: str, given: argparse.Namespace, do: Callable[[Told | None], Made | Sequence[Made]]) -> int:
    """Do it, print what came of it, and return the exit code."""

    def body() -> int:
        terminal = Terminal()
        try:
            with terminal.bar(name) as told:
                made = do(None if given.dry_run else told)
        except UsageError as error:
            print(printable(f"forebay {name}: {error}"), file=sys.stderr)
            return USAGE
        every = [made] if isinstance(made, Made) else list(made)
        if given.json:
            terminal.json(every)
        else:
            for each in every:
                for line in lines(each, dry=given.dry_run):
                    terminal.line(line)
        return 0

    return run_command(name, body)


def lines(made: Made, *, dry: bool) -> Iterator[str]:
    """Yield what is printed for a person."""
    yield f"{made.directory}: {'would be ' if dry else ''}{made.kind}, step {made.step}"
    what = "items" if made.of_rows else _UNITS.get(made.kind, "episodes")
    rows = "rollouts" if what == "groups" else "rows"
    units = f"{made.units} {what}, " if made.capacity is None else ""  # rows of pools go by themselves
    yield f"  holds     {units}{made.rows} {rows}, {made.bytes} bytes"
    if made.capacity is not None:
        yield f"  built     with capacity={made.capacity}: a buffer goes on with it that has the same"
    if made.kind in (*OF_SHARDS, PIPELINE_RANKS):
        each = rows if made.kind in OF_SHARDS else what
        yield f"  ranks     {len(made.shards)}; {each} of each: {', '.join(map(str, made.shards))}"
    if made.linked:
        yield f"  linked    {made.linked} bytes, of files that the source has too"
    if made.renumbered:
        yield f"  renamed   {made.renumbered} {what}; ids.json says which"
    for part in made.made_of:
        shard = "" if part.shard < 0 else f", rank {part.shard}"
        yield f"  made of   {part.directory}{shard}, generation {part.generation}, step {part.step}"
    for name, why in made.left_out.items():
        yield f"  left out  {name}: {why}"
