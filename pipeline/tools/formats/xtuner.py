"""The progress file of XTuner's producer, ``agent_loop_manager_state.json``, or a folder with one: a run that goes on
after its last consumed step, with its counts. Its buffer is a pickle; which items were drawn is not in the file.
"""

from __future__ import annotations

import os

import msgspec

from pipeline.errors import ConfigError
from pipeline.sampler.xtuner import read_xtuner_progress
from pipeline.store.files import open_plain
from pipeline.tools.formats.pickles import XTUNER_BUFFER
from pipeline.tools.interchange.streams import ROLLOUTS, About, Records, Stream

NAME = "xtuner"
FILE = "agent_loop_manager_state.json"


def recognises(path: str) -> bool:
    """Whether such a file lies there."""
    return os.path.basename(path) == FILE or os.path.isfile(os.path.join(path, FILE))


def read(path: str) -> Stream:
    """Return a stream of no rollouts that has the file's progress.

    Raises:
        Damaged: it is no such file.
    """
    file_path = os.path.join(path, FILE) if os.path.isdir(path) else path
    try:
        with open_plain(file_path) as file:
            found = read_xtuner_progress(file.read(), file_path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no {FILE} in it", option="path") from None
    progress = found.progress
    notes = ["sources begin at their first item: which items were drawn is not in the file"]
    if progress.replay_buffer_saved:
        notes.append(f"rollouts that waited are in {XTUNER_BUFFER}, a pickle: `forebay import` on it says what to do")
    if found.status:
        notes.append(f"its status was {found.status}")
    if found.unknown:
        notes.append(f"fields without a counterpart: {', '.join(sorted(found.unknown))}")
    step = progress.next_consumer_step - 1
    # What was asked for and not consumed is in no buffer here, and is asked for again.
    progress = msgspec.structs.replace(progress, target_samples=dict(progress.consumed_samples))
    about = About(step=step, notes=notes)
    return Records(ROLLOUTS, about, lambda: iter(()), 0, 0, progress)
