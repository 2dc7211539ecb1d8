"""Recovering what one process wrote of a generation, or one rank, without a run that goes on from it: what a resume
does, and what tools do that write what it would find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.lines import Line, find_line
from pipeline.errors import Damaged
from pipeline.observe import events
from pipeline.records import Opened
from pipeline.sampler import DrawPlan, Sampler
from pipeline.store.layout import Layout
from pipeline.wiring.feed import Feed
from pipeline.wiring.recovery import Recovered, recover_run
from pipeline.wiring.tails import cut_off, let_go_since, unwritten_tails


def _nothing(event: Any, **fields: Any) -> None: ...


class Recovering(NamedTuple):
    """How it is done.

    Attributes:
        plans: the tasks that there are now.
        seed: the run's.
        discard: whether what came after the generation is set aside.
        feed: reads the buffer of transitions, where rollouts fill one.
        warn: told what is worth a warning, as the log is.
    """

    plans: Sequence[DrawPlan]
    seed: int
    discard: bool
    feed: Feed | None = None
    warn: Callable[..., None] = _nothing

    def recover(
        self,
        layout: Layout,
        run_tag: int,
        stored: Stored,
        reusable: Sequence[int] | None,
        opened: Opened,
        sampler: Callable[[], Sampler] | None = None,
    ) -> tuple[Recovered, Line]:
        """Fold what came of a generation; return that, and which events count for it. Blocks, and changes nothing.

        Args:
            layout, run_tag: of the run.
            stored: the generation, or a rank's part of it.
            reusable: what the newest generation says of that.
            opened: the event that begins the next journal.
            sampler: makes what draws are folded into, where that is no plain one.

        Raises:
            Damaged: something that was promised to be there is missing or changed.
            UsageError: the seed is not the run's.
        """

        def recover(line: Line) -> Recovered:
            return recover_run(
                layout,
                stored,
                self.plans,
                run_tag=run_tag,
                seed=self.seed,
                opened=opened,
                line=line,
                torn=lambda path, at, left: self.warn(events.JOURNAL_TORN, file=path, offset=at, bytes=left),
                feed=self.feed,
                sampler=None if sampler is None else sampler(),
            )

        line = self._line(layout, run_tag, stored, reusable)
        try:
            return recover(line), line
        except Damaged:
            # After a loss of power a journal may name payloads that the disk never got: it ends before them.
            tails = unwritten_tails(layout, run_tag, line, stored.manifest.journals)
            if not tails:
                raise
            for tail in tails:
                self.warn(events.JOURNAL_UNWRITTEN, **tail._asdict())
            return recover(cut_off(line, tails)), line

    def _line(self, layout: Layout, run_tag: int, stored: Stored, reusable: Sequence[int] | None) -> Line:
        """Return which events count for the generation."""
        manifest = stored.manifest
        line = find_line(layout, run_tag, manifest, discard=self.discard)
        whole = reusable is None or manifest.generation in reusable
        if (whole and self.feed is None) or not let_go_since(layout, run_tag, manifest, line, whole=whole):
            return line
        # One that is kept for good does not keep what came after it, and with durability='none' rows are written by the
        # next generation alone: all of it is set aside, and run again.
        self.warn(events.RUN_SET_ASIDE, generation=manifest.generation, step=manifest.step)
        return find_line(layout, run_tag, manifest, discard=True)
