"""A signal that comes while something is told of is told of behind it: streams refuse to be written to within that."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tasks.demo.supervise import Supervisor


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_what_is_told(number: signal.Signals) -> None:
    told: list[str] = []
    telling = False

    def tell(report: dict[str, Any]) -> None:
        nonlocal telling
        assert not telling, "a stream would say: reentrant call"
        telling = True
        told.append(report["event"])
        if report["event"] == "evaluated":
            signal.raise_signal(number)
        telling = False

    supervisor = Supervisor([], tell, None)
    with supervisor._signals():
        supervisor._report({"event": "evaluated"})
    assert told == ["evaluated", "stopping"]
    assert supervisor.stopped_by == number


def test_a_signal_at_another_moment_is_told_of_at_once() -> None:
    told: list[str] = []
    supervisor = Supervisor([], lambda report: told.append(report["event"]), None)
    with supervisor._signals():
        signal.raise_signal(signal.SIGTERM)
        assert told == ["stopping"]
        supervisor._report({"event": "evaluated"})
    assert told == ["stopping", "evaluated"]
