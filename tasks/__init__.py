"""Runners and sources, each short enough to be copied as a start.

``tasks`` uses ``pipeline``; ``pipeline`` never uses ``tasks``. What needs an extra lies in a module of its own
and is imported by name: ``from tasks.gym import episode`` (Gymnasium, ``pip install 'forebay[gym]'``).
"""

from __future__ import annotations

from tasks.functions import threaded as threaded
from tasks.returns import NStep as NStep
from tasks.returns import n_step as n_step
from tasks.sources import EnvSeeds as EnvSeeds
from tasks.sources import JsonlSource as JsonlSource
from tasks.sources import SequenceSource as SequenceSource
