"""Which kinds of parts a run is wired of: those of one process, or of one of several ranks."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.wiring.consuming import Consumer
from pipeline.wiring.folder import RunFolder
from pipeline.wiring.outside import Outside
from pipeline.wiring.saving import Saver
from pipeline.wiring.triggering import Triggers


class Parts(NamedTuple):
    """The classes of what differs."""

    consumer: type[Consumer] = Consumer
    outside: type[Outside] = Outside
    folder: type[RunFolder] = RunFolder
    saver: type[Saver] = Saver
    triggers: type[Triggers] = Triggers
