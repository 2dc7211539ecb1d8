"""The demo's summary, computed from a run's files: a table for people, and `summary.json` for programs."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from tasks.demo import plan
from tasks.demo.audit import Audit, audit
from tasks.demo.books import Books

SUMMARY_FILE = "summary.json"


class Measured(msgspec.Struct, kw_only=True):
    """What the files do not say: the time that the processes took, as the parent process saw it."""

    seconds: float | None = None
    """From the command's begin to its end."""
    seconds_to_resume: float | None = None
    """From the start of the process after the kill, interpreter and imports included, to its first trained step."""


class Summary(msgspec.Struct, kw_only=True):
    """Content of `summary.json`; counts are rollouts."""

    seed: int | None
    steps: int
    evaluation: float | None
    """Mean return of the last evaluation."""
    mark: float
    solved: bool
    produced: int
    trained: int
    recovered: int
    lost: int
    trained_twice: int
    buffered: int
    unfinished: int
    dropped: dict[str, int]
    run_again_cut: int
    """In flight at a kill."""
    run_again_outdated: int
    """Finished, and too old to be trained."""
    repeated_steps: list[int]
    staleness: dict[int, int]
    """How many of the trained rollouts were how many steps stale."""
    kills: list[dict[str, int | None]]
    seconds: float | None
    seconds_to_resume: float | None
    findings: list[str]
    """Whatever was lost or trained twice, and why the audit says so."""
    evaluations: list[tuple[int, float]]
    curve: str | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing was lost and nothing trained twice."""
        return not self.lost and not self.trained_twice


def evaluations_of(books: Books) -> list[tuple[int, float]]:
    """Return the evaluations (step, mean return) that the newest checkpoint holds."""
    state: Any = books.attached("evaluations") or {"steps": [], "returns": []}
    return list(zip(state["steps"], state["returns"], strict=True))


def summarize(books: Books, measured: Measured) -> tuple[Summary, Audit]:
    """Return the summary of a run, and the audit that it is made from."""
    found, evaluations = audit(books), evaluations_of(books)
    last = evaluations[-1][1] if evaluations else None
    findings = [f"lost: {each.text}" for each in found.lost] + [f"trained twice: {each.text}" for each in found.twice]
    summary = Summary(
        seed=books.seed,
        steps=books.step,
        evaluation=last,
        mark=plan.MARK,
        solved=last is not None and last >= plan.MARK,
        produced=found.produced,
        trained=found.trained,
        recovered=found.recovered,
        lost=len(found.lost),
        trained_twice=len(found.twice),
        buffered=found.buffered,
        unfinished=found.unfinished,
        dropped=found.dropped,
        run_again_cut=found.cut,
        run_again_outdated=found.outdated,
        repeated_steps=[step.step for step in found.steps if step.repeated],
        staleness=found.staleness,
        kills=[{"step": kill.step, "resumed_from": kill.resumed_from} for kill in found.kills],
        seconds=measured.seconds,
        seconds_to_resume=measured.seconds_to_resume,
        findings=findings,
        evaluations=evaluations,
    )
    return summary, found


def table(summary: Summary) -> str:
    """Return the summary as lines of text."""
    kill = summary.kills[-1] if summary.kills else None
    resumed = "from the new process's start to its first step" if kill else ""
    rows = [
        ("steps", str(summary.steps), f"of {plan.BATCH} rollouts each"),
        ("return", _number(summary.evaluation, 1), _verdict(summary)),
        ("rollouts produced", str(summary.produced), _not_trained(summary)),
        ("trained", str(summary.trained), _stale(summary)),
        ("recovered after the kill", str(summary.recovered), _recovered(summary)),
        ("run again", str(summary.run_again_cut + summary.run_again_outdated), _run_again(summary)),
        ("lost", str(summary.lost), ""),
        ("trained twice", str(summary.trained_twice), "in the weights that survive"),
        ("killed in step", "-" if kill is None else str(kill["step"]), _resumed(kill)),
        ("seconds to resume", _number(summary.seconds_to_resume, 1), resumed),
        ("seconds in all", _number(summary.seconds, 1), ""),
    ]
    wide, right = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [f"  {name:<{wide}}  {value:>{right}}  {note}".rstrip() for name, value, note in rows]
    return "\n".join([*lines, *(f"  ! {finding}" for finding in summary.findings)])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _verdict(summary: Summary) -> str:
    reached = "reached" if summary.solved else "not reached"
    return f"mean of {plan.EVALUATION_EPISODES} evaluation episodes; the mark of {summary.mark:g} is {reached}"


def _not_trained(summary: Summary) -> str:
    parts = [
        (summary.buffered, "buffered at the end"),
        (summary.unfinished, "unfinished"),
        (sum(summary.dropped.values()), "dropped"),
    ]
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def _run_again(summary: Summary) -> str:
    parts = [(summary.run_again_outdated, "had become too old"), (summary.run_again_cut, "were cut by the kill")]
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def _stale(summary: Summary) -> str:
    if not summary.staleness:
        return ""
    return f"staleness at most {max(summary.staleness)}, of {plan.MAX_STALENESS} allowed"


def _recovered(summary: Summary) -> str:
    if not summary.kills:
        return "there was no kill"
    count = len(summary.repeated_steps)
    repeated = f"; {count} {'batch' if count == 1 else 'batches'} repeated" if count else ""
    return f"finished before it, trained after it{repeated}"


def _resumed(kill: dict[str, int | None] | None) -> str:
    if kill is None:
        return ""
    return f"resumed from the checkpoint of step {kill['resumed_from']}" if kill["resumed_from"] is not None else ""


def write_summary(directory: str, summary: Summary) -> None:
    """Write `summary.json` into the run's folder, whole or not at all."""
    path = os.path.join(directory, SUMMARY_FILE)
    with open(path + ".part", "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    os.replace(path + ".part", path)


def read_measured(directory: str) -> Measured:
    """Return what an earlier command measured in this folder; nothing if it left no summary."""
    try:
        with open(os.path.join(directory, SUMMARY_FILE), "rb") as file:
            return msgspec.json.decode(file.read(), type=Measured)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Measured()


def draw_curve(directory: str, summary: Summary, found: Audit) -> str | None:
    """Draw the learning curve and return its name in the folder; None where matplotlib is missing."""
    from tasks.demo.curve import CURVE_FILE, draw

    try:
        draw(os.path.join(directory, CURVE_FILE), summary, found)
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        return None
    return CURVE_FILE
