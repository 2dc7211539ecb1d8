"""The learning curve of a run as a picture, from the audit of its files. matplotlib is imported when it is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.demo import plan

if TYPE_CHECKING:
    from tasks.demo.audit import Audit, Step
    from tasks.demo.report import Summary

CURVE_FILE = "curve.png"
TRAINING, EVALUATION, KILL, GREY = "#2f6f9f", "#d9822b", "#b3261e", "#6b6b6b"
SHADES = ("#d4e6f3", "#8dbbdc", "#2f6f9f")


def draw(path: str, summary: Summary, found: Audit) -> None:
    """Draw returns and staleness over the trainer's steps, with every kill marked.

    Each step is shown once, as the weights at the end of the run have seen it.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    figure.suptitle(f"CartPole-v1 from asynchronous rollouts, seed {summary.seed}", fontsize=12)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    _draw_returns(top, found.steps, summary)
    _draw_staleness(bottom, found.steps)
    last = max((step.step for step in found.steps), default=1)
    for kill in found.kills:
        if kill.resumed_from is not None:
            _draw_kill(top, kill.step, kill.resumed_from, on_the_left=kill.resumed_from > 0.19 * last)
            bottom.axvline(kill.step, color=KILL, linewidth=1.6)
    bottom.set_xlim(0.5, last + 0.5)
    bottom.set_xlabel(f"trainer step ({plan.BATCH} rollouts each)")
    figure.savefig(path, dpi=150)


def _draw_returns(axes: Any, steps: list[Step], summary: Summary) -> None:
    if steps:
        x = [step.step for step in steps]
        mean = [float(np.mean(step.returns)) for step in steps]
        low, high = np.array([np.percentile(step.returns, (25, 75)) for step in steps]).T
        axes.plot(x, mean, color=TRAINING, linewidth=1.8, label="training (actions sampled), mean of a batch")
        axes.fill_between(x, low, high, color=TRAINING, alpha=0.18, linewidth=0, label="its middle half")
    if summary.evaluations:
        at, value = zip(*summary.evaluations, strict=True)
        label = f"evaluation (likeliest action), mean of {plan.EVALUATION_EPISODES}"
        axes.plot(at, value, color=EVALUATION, linewidth=0.8, marker="D", markersize=5, label=label)
    axes.axhline(summary.mark, color=GREY, linewidth=0.9, linestyle=(0, (5, 3)))
    where = {"xy": (0, summary.mark), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(f"mark: {summary.mark:g}", xytext=(4, -4), va="top", fontsize=9, color=GREY, **where)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)
    axes.set_ylim(0, 520)
    axes.set_ylabel("return")


def _draw_staleness(axes: Any, steps: list[Step]) -> None:
    x = [step.step for step in steps]
    floor = np.zeros(len(x))
    for value in range(plan.MAX_STALENESS + 1):
        share = np.array([sum(group.staleness == value for group in step.groups) / len(step.groups) for step in steps])
        axes.bar(x, share, bottom=floor, width=1.0, color=SHADES[value], label=f"{value}")
        floor = floor + share
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 1], ["0 %", "100 %"])
    axes.set_ylabel("of a batch")
    axes.legend(title="staleness", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)


def _draw_kill(axes: Any, step: int, resumed_from: int, *, on_the_left: bool) -> None:
    axes.axvspan(resumed_from + 0.5, step + 0.5, color=KILL, alpha=0.10, linewidth=0)
    axes.axvline(step, color=KILL, linewidth=1.6)
    text = f"kill -9 in step {step},\nresumed from {resumed_from};\nshaded: done again"
    x, side = (resumed_from + 0.5, "right") if on_the_left else (step + 0.5, "left")
    shift = (-6, 0) if on_the_left else (6, 0)
    where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(text, (x, 0.8), xytext=shift, ha=side, va="top", fontsize=9, color=KILL, **where)
