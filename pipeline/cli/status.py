"""``forebay status RUN``: how a run stands, for a person, for a program, and for a batch script by its exit code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pipeline.checkpoint.lives import Life
from pipeline.checkpoint.manifest import OF_SHARDS, PIPELINE, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.checkpoint.outlook import Drawn, Work
from pipeline.checkpoint.status import BROKEN, CONTINUES, FINISHED, NOTHING, RUNS, Hold, Newest, Status, status_of
from pipeline.cli.terminal import make_parser, run_command
from pipeline.cli.words import counted, in_bytes
from pipeline.control.place import Place
from pipeline.errors import ConfigError

USAGE = 2
CODES = {FINISHED: 0, BROKEN: 1, CONTINUES: 3, RUNS: 4, NOTHING: 5}
DESCRIPTION = """\
Say how the run in a folder stands: what was saved, who has the folder, how the last life ended, what waits, what is
damaged. It only reads: the folder may be in use, or a copy that cannot be written. Payloads are not read.
"""
EXAMPLE = "forebay status runs/a --until 1000 || echo $?"
EXITS = """\
0  finished: there is nothing left to do
1  broken: a resume would be refused; or the folder cannot be read
2  the command line is wrong
3  to be continued: the same command as before goes on with it
4  running: a process has the folder
5  nothing: no run is there
130  stopped by Ctrl-C
"""
_SHOWN = 5  # damages that are shown to a person


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how a run stands, and return the exit code."""
    own = parser()
    given = own.parse_args(arguments)
    return run_command("status", lambda: _run(own, given))


def _run(own: argparse.ArgumentParser, given: Any) -> int:
    try:
        status = status_of(given.run, until=given.until)
    except ConfigError as error:
        own.error(str(error))
    if given.field is not None:
        try:
            print(_plain(_field(msgspec.to_builtins(status), given.field)))
        except LookupError:
            own.error(f"--field {given.field}: the JSON has no such field; `forebay status RUN --json` shows all of it")
    elif given.json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        print("\n".join(lines(status)))
    return CODES[status.state]


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = make_parser("status", DESCRIPTION, EXAMPLE, EXITS)
    made.add_argument("run", metavar="RUN", help="the run's folder")
    made.add_argument(
        "--until",
        type=int,
        metavar="STEP",
        help="the training's last step: a run that has saved it is finished, and no other is",
    )
    shown = made.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print all of it as JSON")
    shown.add_argument(
        "--field", metavar="NAME", help="print one field of the JSON, such as newest.step; empty if there is none"
    )
    return made


def _field(value: Any, name: str) -> Any:
    """Return a field by its path; None below what is None itself."""
    for part in name.split("."):
        if value is None:
            return None
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value[part]
        else:
            raise LookupError(part)
    return value


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def lines(status: Status) -> Iterator[str]:
    """Yield what is printed for a person."""
    yield f"{status.directory}: {status.state}"
    yield f"  {status.why}"
    if status.state == NOTHING:
        return
    newest = status.newest
    if newest is not None:
        yield _line("run", f"{status.kind} {status.run_id}")
        yield from _newest(newest, status.kind)
    yield _line("kept", f"{counted(status.generations, 'generation')}, {in_bytes(status.bytes)} in all")
    yield _line("held by", _holder(status.hold))
    for place in status.control:
        yield _line("control", _place(place, len(status.control)))
    if status.life is not None:
        yield _line("last life", _life(status.life))
    if status.work is not None:
        yield from _work(status.work)
    for damage in status.damages[:_SHOWN]:
        yield _line("damaged", damage.what)
    if len(status.damages) > _SHOWN:
        yield _line("damaged", f"and {len(status.damages) - _SHOWN} places more; --json lists them")
    for note in status.notes:
        yield _line("note", note)
    if status.state == BROKEN and status.kind == PIPELINE:
        yield _line("help", "forebay salvage RUN OUT writes what is whole of it into a new run")


def _line(name: str, text: str) -> str:
    return f"  {name:<10}{text}"


def _newest(newest: Newest, kind: str) -> Iterator[str]:
    yield _line("newest", f"generation {newest.generation}, step {newest.step}, {newest.written} ({newest.reason})")
    if newest.rows is not None:
        yield _line("holds", f"{newest.rows} {'trajectories' if kind in (TRAJECTORIES, TRAJECTORY_SHARDS) else 'rows'}")
    if kind in OF_SHARDS:
        sizes = ", ".join(f"rank {shard.rank}: {shard.held}" for shard in newest.shards)
        yield _line("shards", f"{len(newest.shards)} of {newest.world_size} ranks; rows of {sizes}")
    if newest.without:
        yield _line("without", ", ".join(newest.without))


def _holder(hold: Hold) -> str:
    if not hold.process:
        return "somebody" if hold.held else "nobody" if hold.held is False else "not known"
    who = f"process {hold.process} on {hold.host or 'an unknown host'}, incarnation {hold.incarnation}"
    if hold.held:
        return f"{who}; it lives"
    how = {True: "a process of that number lives", False: "it has ended", None: "cannot be seen from here"}[hold.alive]
    return f"{'nobody' if hold.held is False else 'not known'}; the last was {who} ({how})"


def _place(place: Place, ranks: int) -> str:
    of = f" of rank {place.rank}" if ranks > 1 or place.rank else ""
    return f"{place.address}{of} on {place.host or 'an unknown host'}" + (", with a token" if place.token else "")


def _life(life: Life) -> str:
    ended = {
        "running": "goes on",
        "stopped": f"was asked to stop by {life.reason or 'somebody'}, and saved",
        "closed": "ended by itself" + (f" ({life.reason})" if life.reason else ""),
        "failed": f"ended by an error: {life.reason}",
        "killed": "was killed",
        "unclosed": "was killed, or left without close()",
        "unknown": "left nothing that says how it ended",
    }[life.ended]
    asked = f", after {life.asked} had asked it to stop" if life.asked else ""
    at = f" {life.over}" if life.over else ""
    flight = f"; {counted(life.in_flight, 'attempt')} in flight" if life.in_flight else ""
    return f"incarnation {life.incarnation} {ended}{asked}{at}{flight}"


def _work(work: Work) -> Iterator[str]:
    yield _line("waits", f"{work.buffered} to be trained, {work.waiting} to be run, {work.parked} for a reward")
    for name, task in work.tasks.items():
        yield _line("task", f"{name}: {_drawn(task)}")


def _drawn(task: Drawn) -> str:
    if task.epoch < 0:
        return "nothing was drawn"
    items = f"{task.drawn} of {task.length} items" if task.length >= 0 else f"{task.drawn} items"
    epochs = f" of {task.epochs}" if task.epochs is not None and task.length >= 0 else ""
    return f"epoch {task.epoch + 1}{epochs}, {items} drawn"
