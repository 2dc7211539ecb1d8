"""Reads the progress file of XTuner's producer into a :class:`~pipeline.sampler.Progress`.

``agent_loop_manager_state.json`` is flat JSON. Its counts by task have the names that are used here; ``status`` and
``model_step`` stand beside them. Files of before pull request 1899 lack ``replay_buffer_saved``, and still older ones
some of the counts: those had a buffer beside them, and a count that is absent is zero. ``produce_time_s`` is one number
there, for all tasks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pipeline.errors import Damaged
from pipeline.sampler.progress import Progress

ALL_TASKS = ""
"""The name under which ``produce_time_s`` stands: it is not known by task."""
_OWN = ("format_version", "batch_groups", "window_marks")  # fields that no file of XTuner has


class ImportedProgress(NamedTuple):
    """What such a file says."""

    progress: Progress
    status: str
    """XTuner's state of the manager, such as ``NORMAL`` or ``UPDATE_WEIGHT_AND_ABORT``; empty if the file has none."""
    unknown: dict[str, Any]
    """Fields that have no counterpart here."""


def read_xtuner_progress(raw: bytes, where: str = "agent_loop_manager_state.json") -> ImportedProgress:
    """Return what a progress file of XTuner says.

    Args:
        raw: the file's content.
        where: its name, for errors.

    Raises:
        Damaged: it is no such file; names the field that is wrong.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        if "next_consumer_step" not in fields and "model_step" not in fields:
            raise msgspec.ValidationError("neither next_consumer_step nor model_step is in it")
        known = set(Progress.__struct_fields__) - set(_OWN)
        given = {name: value for name, value in fields.items() if name in known}
        if isinstance(given.get("produce_time_s"), (int, float)):
            given["produce_time_s"] = {ALL_TASKS: float(given["produce_time_s"])}
        progress = msgspec.convert(given, Progress)
        if min(progress.next_consumer_step, progress.producer_future_step) < 1 or progress.target_upto_future_step < 0:
            raise msgspec.ValidationError("steps are counted from 1")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Damaged(f"{where}: not a progress file of XTuner ({error})") from None
    unknown = {name: value for name, value in fields.items() if name not in known and name != "status"}
    return ImportedProgress(progress, str(fields.get("status", "")), unknown)
