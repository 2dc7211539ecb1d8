"""`forebay demo`: trains CartPole, kills its own training process half way, goes on, and shows what was lost: nothing.

This process only supervises. What the table says is read from the run's files by `audit.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.errors import ForebayError
from tasks.demo import plan

OK, NOT_REACHED, USAGE, UNSOUND, FAILED = 0, 1, 2, 3, 4
DESCRIPTION = f"""\
Train CartPole-v1 from asynchronous rollouts until the mean of {plan.EVALUATION_EPISODES} evaluation episodes
is at least {plan.MARK:g}. On the way the training process is killed with SIGKILL and
started again. A table, made from the run's files, says what became of every rollout.
"""
EXITS = """\
exit codes:
  0  the mark was reached, nothing was lost and nothing trained twice
  1  the steps were used up before the mark was reached
  2  the command line is wrong, or a package is missing
  3  something was lost or trained twice; the table says what
  4  the training process failed, or the directory cannot be used
  130, 143  stopped by Ctrl-C or SIGTERM; run it again to go on
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    own = parser()
    given = own.parse_args(arguments)
    if given.steps < 1:
        own.error(f"--steps {given.steps}: at least 1 is needed")
    absent = missing_extras()
    if "gymnasium" in absent:
        print("forebay demo needs Gymnasium: pip install 'forebay[gym,ui]'", file=sys.stderr)
        return USAGE
    if "matplotlib" in absent:
        say("matplotlib is missing, so no curve will be drawn: pip install 'forebay[ui]'")
    try:
        return _run(given)
    except ForebayError as error:
        say(f"{type(error).__name__}: {error}")
        return FAILED
    except KeyboardInterrupt:
        return 130


def missing_extras() -> list[str]:
    """Return which of the demo's optional packages are not installed."""
    return [name for name in ("gymnasium", "matplotlib") if importlib.util.find_spec(name) is None]


def say(text: str) -> None:
    """Write a line for people to stderr, over the bar that the training process may have drawn there."""
    clear = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog="forebay demo",
        description=DESCRIPTION,
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--seed", type=int, help="seed of everything; left out: the directory's, or 0")
    made.add_argument(
        "--steps", type=int, default=plan.STEPS, metavar="N", help="trainer steps at most (default: %(default)s)"
    )
    made.add_argument("--no-kill", action="store_true", help="let the training process live")
    made.add_argument("--json", action="store_true", help="print the summary as JSON on stdout, and no table")
    made.add_argument(
        "--directory", metavar="DIR", help="the run's folder (default: runs/demo-SEED); one that is used is continued"
    )
    made.add_argument("--verbose", action="store_true", help="structured logs on stderr, not in DIR/log.jsonl")
    return made


def _run(given: argparse.Namespace) -> int:
    """Run, or go on with, one directory."""
    from tasks.demo.books import read_books
    from tasks.demo.report import Measured, read_measured

    directory = given.directory or os.path.join("runs", f"demo-{given.seed or 0}")
    books = read_books(directory)
    seed = given.seed if given.seed is not None else (books.seed if books and books.seed is not None else 0)
    measured = read_measured(directory)
    if books is not None and _is_finished(books, given.steps):
        say(f"{directory} is finished; this is what its files say. For another run, use another --seed or --directory.")
        return _conclude(given, directory, measured)
    kill = not given.no_kill and not (books is not None and _was_killed(books))
    begun = time.monotonic()
    code, supervisor = _supervise(given, directory, seed, kill=kill)
    if supervisor.stopped_by is not None:
        again = ["forebay", "demo", "--seed", str(seed), "--steps", str(given.steps), "--directory", directory]
        again += ["--no-kill"] if given.no_kill else []
        stopped = "Stopped and saved." if code == 0 else "Stopped; what followed the last checkpoint is done again."
        say(f"{stopped} To go on: {shlex.join(again)}")
        return 128 + int(supervisor.stopped_by)
    if code != 0:
        say(f"The training process failed: {supervisor.error or f'exit code {code}. Run it again to go on'}")
        return FAILED
    seconds_to_resume = supervisor.seconds_to_resume or measured.seconds_to_resume
    measured = Measured(seconds=time.monotonic() - begun, seconds_to_resume=seconds_to_resume)
    return _conclude(given, directory, measured)


def _is_finished(books: Any, steps: int) -> bool:
    from tasks.demo.report import evaluations_of

    evaluations = evaluations_of(books)
    return plan.is_over(books.step, steps, evaluations[-1][1] if evaluations else None)


def _was_killed(books: Any) -> bool:
    from tasks.demo.audit import audit

    # One that nobody resumed yet may still be alive, and saving because its parent is gone.
    return any(kill.resumed_from is not None for kill in audit(books).kills)


def _supervise(given: argparse.Namespace, directory: str, seed: int, *, kill: bool) -> tuple[int, Any]:
    from tasks.demo.supervise import Supervisor

    def tell(report: dict[str, Any]) -> None:
        event, step = report["event"], report.get("step")
        if event == "resumed" and (step or report["buffered"]):
            kept, batches = report["buffered"], report["repeated"]
            say(f"Resumed from step {step}: {kept} finished rollouts are there, {batches} batches come again.")
        elif event == "evaluated":
            say(f"Step {step}: evaluation {report['value']:.1f}")
        elif event == "killed":
            say("Sent SIGKILL to the training process, in the middle of its work. Starting it again.")
        elif event == "stopping":
            say("Saving; once more to leave at once.")

    arguments = ["--directory", directory, "--seed", str(seed), "--steps", str(given.steps)]
    arguments += ["--verbose"] if given.verbose else []
    due = (lambda step: plan.kill_due(step, given.steps)) if kill else None
    say(f"Training CartPole-v1 in {directory}, {given.steps} steps at most" + ("; one kill to come." if kill else "."))
    supervisor = Supervisor(arguments, tell, due)
    return supervisor.run(), supervisor


def _conclude(given: argparse.Namespace, directory: str, measured: Any) -> int:
    """Audit the run's files; write and show the result."""
    from tasks.demo.books import read_books
    from tasks.demo.report import draw_curve, summarize, table, write_summary

    books = read_books(directory)
    assert books is not None
    summary, found = summarize(books, measured)
    summary.curve = draw_curve(directory, summary, found)
    write_summary(directory, summary)
    if given.json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        print(table(summary))
        if summary.curve:
            print(f"  The learning curve is in {os.path.join(directory, summary.curve)}")
    if not summary.sound:
        return UNSOUND
    return OK if summary.solved else NOT_REACHED
