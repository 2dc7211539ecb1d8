"""What the options of triggers mean: names of signals, and times."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from datetime import datetime

from pipeline.config.base import MOST
from pipeline.errors import ConfigError


def check_signals(option: str, names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of signals.

    Raises:
        ConfigError: there is no such signal, or it cannot be handled.
    """
    numbers = []
    for name in names:
        number = getattr(signal, name, None) if name.startswith("SIG") else None
        if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError.of(option, name, "names of signals that can be handled are needed, such as 'SIGTERM'")
        numbers.append(int(number))
    return tuple(numbers)


def calendar_time(given: float | str) -> float:
    """Return a time in seconds since 1970.

    Raises:
        ConfigError: it is none.
    """
    try:
        seconds = datetime.fromisoformat(given).timestamp() if isinstance(given, str) else float(given)
    except (ValueError, OverflowError, OSError):
        seconds = math.nan
    if not abs(seconds) <= MOST:
        raise ConfigError.of("stop_at", given, "seconds since 1970, or a time such as '2030-01-31T18:00', is needed")
    return seconds
