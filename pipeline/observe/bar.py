"""A progress bar for training loops: how far, how fast, and how fresh.

On a terminal, with ``tqdm`` installed, it is drawn on stderr. Anywhere else (a file, a pipe, a notebook, no
``tqdm``, ``TQDM_DISABLE=1``) the same figures are logged as ``run.advanced``, at level info, every ``interval``
seconds and once at the end; where nothing shows that level, nothing is shown. Nothing is ever written to stdout.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self, TextIO

from pipeline.errors import UsageError
from pipeline.observe import metrics as names
from pipeline.observe.events import RUN_ADVANCED
from pipeline.observe.lines import is_terminal
from pipeline.observe.logs import logger

REDRAW_SECONDS: Final = 0.1
RATE_SECONDS: Final = 30.0
LAYOUT: Final = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})

# What a line calls it, and the metric it is; the bar shows them in this order, and a narrow terminal cuts the end.
FIGURES: Final = {
    "reward_mean": names.REWARD_MEAN,
    "staleness_mean": names.STALENESS_MEAN,
    "staleness_max": names.STALENESS_MAX,
    "rollouts_per_second": names.ROLLOUTS_PER_SECOND,
    "in_flight": names.ROLLOUTS_IN_FLIGHT,
    "groups": names.BUFFER_GROUPS,
}


class ProgressBar:
    """Shows the step, reward and staleness of the last batch, rollouts a second, in flight and buffered.

    ::

        with ProgressBar(total=1000) as bar:
            for batch in pipe.batches(groups=64, until=1000):
                ...
                bar.update(batch.step, pipe.metrics())

    Args:
        total: the last step, or None if there is no such thing.
        description: stands before the bar.
        stream: where to draw; left out, ``sys.stderr``.
        interval: seconds between log lines where nothing can be drawn; None: no lines.
        now: the clock; given by tests.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        description: str = "train",
        stream: TextIO | None = None,
        interval: float | None = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._description = description
        self._stream = stream
        self._interval = math.inf if interval is None else interval
        self._now = now
        self._entered = False
        self._drawn: Any = None

    def __enter__(self) -> Self:
        self._entered = True
        self._step: int | None = None
        self._shown: int | None = None
        self._figures: dict[str, float] = {}
        self._counts: deque[tuple[float, float]] = deque()
        self._drawn = _draw(self._total, self._description, self._stream or sys.stderr)
        self._due = self._now() + (self._interval if self._drawn is None else 0.0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered = False
        if self._step is not None and self._step != self._shown:
            self._show()
        if self._drawn is not None:
            self._give_up_on_error(self._drawn.close)
            self._drawn = None

    def update(self, step: int, metrics: Mapping[str, float] = NOTHING) -> None:
        """Tell the step that is done and what :func:`pipeline.observe.flatten` gave; cheap at any rate.

        Figures that ``metrics`` lacks, or that are not finite, are not shown.

        Raises:
            UsageError: outside the bar's ``with`` block.
        """
        if not self._entered:
            raise UsageError("ProgressBar.update outside of its `with` block; write `with ProgressBar() as bar:`")
        now = self._now()
        if self._step is None and self._drawn is not None:  # of a resumed run only the rest counts for the speed
            self._drawn.initial = max(0, step - 1)
        self._step = step
        self._count(now, metrics)
        if now >= self._due:
            self._show()
            self._due = now + (self._interval if self._drawn is None else REDRAW_SECONDS)

    def _count(self, now: float, metrics: Mapping[str, float]) -> None:
        figures = {name: metrics[metric] for name, metric in FIGURES.items() if metric in metrics}
        finished = metrics.get(names.ROLLOUTS_FINISHED)
        if finished is not None and "rollouts_per_second" not in figures:
            counts = self._counts
            if not counts or now >= counts[-1][0] + REDRAW_SECONDS:
                counts.append((now, finished))
            while len(counts) > 2 and counts[1][0] <= now - RATE_SECONDS:
                counts.popleft()
            began, before = counts[0]
            if now > began:
                figures["rollouts_per_second"] = (finished - before) / (now - began)
        self._figures = {name: value for name, value in figures.items() if math.isfinite(value)}

    def _show(self) -> None:
        self._shown = self._step
        if self._drawn is not None:
            self._drawn.n = self._step
            self._drawn.set_postfix_str(_text(self._figures), refresh=False)
            self._give_up_on_error(self._redraw)
        elif math.isfinite(self._interval):
            until = {} if self._total is None else {"until": self._total}
            figures = {name: float(f"{value:.4g}") for name, value in self._figures.items()}
            logger().info(RUN_ADVANCED, step=self._step, **until, **figures)

    def _redraw(self) -> None:
        with self._drawn.get_lock():  # tqdm's own way would keep its lock if the stream fails
            self._drawn.refresh(nolock=True)

    def _give_up_on_error(self, draw: Callable[[], Any]) -> None:
        try:
            draw()
        except (OSError, ValueError):  # the terminal is gone: a bar must not end a run
            self._drawn.disable = True
            self._drawn = None


def _draw(total: int | None, description: str, stream: TextIO | None) -> Any:
    """Return a bar on the terminal, or None where there cannot be one."""
    if not is_terminal(stream):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    # A monitor would be one more thread, and would live on; bars are redrawn by `update` only.
    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})
    drawn = quiet(total=total, desc=description, file=stream, dynamic_ncols=True, bar_format=LAYOUT)
    return None if drawn.disable else drawn


def _text(figures: Mapping[str, float]) -> str:
    short = {name: _short(value) for name, value in figures.items()}
    stale = "/".join(short[name] for name in ("staleness_mean", "staleness_max") if name in short)
    parts = [
        f"reward {short['reward_mean']}" if "reward_mean" in short else "",
        f"stale {stale}" if stale else "",
        f"{short['rollouts_per_second']}/s" if "rollouts_per_second" in short else "",
        f"{short['in_flight']} running" if "in_flight" in short else "",
        f"{short['groups']} buffered" if "groups" in short else "",
    ]
    return ", ".join(filter(None, parts))


def _short(value: float) -> str:
    return f"{value / 1000:.3g}k" if 1000 <= value < 1e6 else f"{value:.3g}"
