"""When a save is due on all ranks, and when all of them are to stop."""

from __future__ import annotations

from pipeline.config import SavingOptions
from pipeline.control.desk import HTTP
from pipeline.distributed import Ranks
from pipeline.errors import UsageError
from pipeline.replay.controlled import Controlled
from pipeline.replay.due import STOP_FILE, Due
from pipeline.replay.meeting import Meeting, Wish


class RankDue(Due):
    """Triggers of one rank's shard. What one rank hears, all of them do, at one step: see :mod:`meeting`. The option
    ``save_every`` says the same on all of them by itself."""

    def __init__(self, options: SavingOptions, stop_file: str, ranks: Ranks, control: Controlled | None = None) -> None:
        super().__init__(options, stop_file, control)
        self._ranks, self._meeting = ranks, Meeting(ranks)
        self._leaves = False

    def due(self, step: int | None) -> bool:
        """Whether all ranks save at this step.

        Raises:
            UsageError: there is no step, or it lies before the last one.
            RankLost: the store cannot be reached.
        """
        if step.__class__ is not int or step is None or step < 0:
            raise UsageError(f"save_due({step!r}): ranks agree on a step: call save_due(step) with the trainer's")
        if step < self._meeting.last:
            raise UsageError(
                f"save_due({step}) comes after save_due({self._meeting.last}): ranks agree on a step to come, so steps "
                "must not go back"
            )
        by_steps = self._due_by_steps(step)
        wish = self._wish()
        if wish is None and not by_steps and self._wanted:
            wish = Wish(self._ranks.rank, HTTP)
        elif wish is None and not by_steps and self._due_by_time():
            wish = Wish(self._ranks.rank, f"every {self._options.save_every_s:g} s")
        return self._meeting.arrive(step, wish) is not None or by_steps

    @property
    def all_save(self) -> bool:
        """Whether :meth:`due` binds this rank."""
        return True

    def begin(self, step: int) -> None:
        """A save is about to begin; it counts as made even if it fails, as it does on the other ranks."""
        if step.__class__ is not int:  # which the save refuses
            return
        if step >= self._meeting.last:
            self._meeting.arrive(step, self._wish())
        here = self._meeting.end()
        self._leaves = here is not None and here.stop
        if here is not None and here.stop:
            self._reason, self._code = here.reason, here.code
            self._where = "" if here.reason == STOP_FILE else f" at rank {here.rank}"
        self.saved(step)

    @property
    def stopping(self) -> bool:
        """Whether all ranks stop at the save that has begun."""
        return self._leaves

    def _wish(self) -> Wish | None:
        return Wish(self._ranks.rank, self._reason, True, self._code) if self._hears_stop() else None
