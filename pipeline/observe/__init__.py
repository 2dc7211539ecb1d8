"""Seeing what a run does: event names, logs, metrics, a progress bar, and a watchdog for the event loop."""

from pipeline.observe import events as events
from pipeline.observe.bar import ProgressBar as ProgressBar
from pipeline.observe.logs import RunContext as RunContext
from pipeline.observe.logs import configure as configure
from pipeline.observe.logs import logger as logger
from pipeline.observe.metrics import flatten as flatten
from pipeline.observe.watchdog import Held as Held
from pipeline.observe.watchdog import Watchdog as Watchdog
