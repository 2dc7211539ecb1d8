"""The names of everything that is logged, one line each: when, at what level, and with which fields.

Names are an interface: people filter and count by them. One is never renamed, and never reused for something
else. Every line of a run also carries what its :class:`~pipeline.observe.RunContext` holds: run, incarnation,
rank, step.
"""

from __future__ import annotations

from typing import Final

RUN_OPENED: Final = "run.opened"
"""info. The folder is locked and a journal begun. directory, generation."""
RUN_RECOVERED: Final = "run.recovered"
"""info. A generation is in use. generation, step, version, events, buffered, waiting, repeated, parked."""
RUN_STARTED: Final = "run.started"
"""info. Rollouts may run from here on. version, tasks, concurrency."""
RUN_ADVANCED: Final = "run.advanced"
"""info. A progress bar's figures, where there is no terminal. step, until, and those of the bar."""
RUN_CLOSED: Final = "run.closed"
"""info. Everything is written and the lock is free. step."""
RUN_FAILED: Final = "run.failed"
"""error. An error ended the run; the next verb raises it. error."""

ROLLOUT_FAILED: Final = "rollout.failed"
"""warning when final, else info. An attempt failed. task, uid, member, attempt, reason, error, final."""
ROLLOUT_INVALID: Final = "rollout.invalid"
"""error. A runner returned what is no rollout. task, uid, member, error."""
ROLLOUT_INTERRUPTED: Final = "rollout.interrupted"
"""debug. An attempt was cut and will be run again. task, uid, member, attempt, reason."""
ROLLOUT_QUARANTINED: Final = "rollout.quarantined"
"""error. An item was in flight at too many deaths of the process and is given up. task, uid, deaths."""
GROUP_FILTERED: Final = "group.filtered"
"""debug. A task's filter rejected a finished group. task, uid, in_a_row."""
GROUP_LATE: Final = "group.late"
"""warning. A group had not finished by its deadline; its unfinished members are given up. task, uid, members."""
ROLLOUT_PARKED: Final = "rollout.parked"
"""debug. A member has run and waits for its reward. task, uid, member."""
STALE_EXPIRED: Final = "stale.expired"
"""info. Finished groups were too old to be trained; run again, or dropped. count, oldest, version."""
ITEM_EXPIRED: Final = "item.expired"
"""warning. A group was too old again after ``max_rerolls`` and is given up. task, uid, index, rerolls."""

BATCH_GIVEN: Final = "batch.given"
"""debug. A batch was handed to the trainer. step, groups, staleness_max, repeated, waited."""
BATCH_RELEASED: Final = "batch.released"
"""info. A batch went back untrained. step, groups."""
WEIGHTS_UPDATED: Final = "weights.updated"
"""debug. Rollouts start with a new version. version, running."""
WEIGHTS_FAILED: Final = "weights.failed"
"""error. A push failed; nothing starts until one succeeds. version, error."""

GENERATION_COMMITTED: Final = "generation.committed"
"""info. A checkpoint is on the disk. generation, step, bytes, seconds, reason."""
GENERATION_FAILED: Final = "generation.failed"
"""error. A checkpoint could not be written; the one before it stands. generation, step, error."""
GENERATION_REMOVED: Final = "generation.removed"
"""debug. A checkpoint past ``keep``, or an unfinished one, was deleted. generation."""

EVALUATION_DONE: Final = "evaluation.done"
"""info. An evaluation has ended. task, version, items, failed, reused, seconds."""
EVALUATION_FAILED: Final = "evaluation.failed"
"""warning when final, else info. An attempt of an evaluation failed. task, index, attempt, reason, error, final."""
EVALUATION_UNREADABLE: Final = "evaluation.unreadable"
"""warning. A kept result cannot be read, and is made again. task, version, index, error."""

SHARE_CHANGED: Final = "share.changed"
"""info. A task has another share of the draws. task, before, after, by (``set_share``, or ``task`` at a resume)."""
JOURNAL_TORN: Final = "journal.torn"
"""warning. A journal ends in a broken record, as a crash leaves it. file, offset, bytes."""
JOURNAL_UNWRITTEN: Final = "journal.unwritten"
"""warning. A journal names a payload that the disk never got, and ends before that. file, last, uid, member."""

SOURCE_CHANGED: Final = "source.changed"
"""warning. A source grew, or rows of it were corrected. task, before, after."""
TASK_CHANGED: Final = "task.changed"
"""warning. A task, or an option of the run, is not what the generation was saved with. what, before, now."""
TASK_MISSING: Final = "task.missing"
"""warning. The saved run has a task that this one has not; its counts are kept. task."""
PROGRESS_UNKNOWN_FIELD: Final = "progress.unknown_field"
"""warning. A saved progress holds a field that this version does not know; it is carried along. field, file."""
LOOP_HELD: Final = "loop.held"
"""warning. The event loop did not answer in time. The fields of :class:`~pipeline.observe.Held`, and times."""
