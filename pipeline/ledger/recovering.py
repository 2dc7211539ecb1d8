"""The ledger as a recovery finds it."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.ledger.entry import ConsumerHalf, Lease
from pipeline.ledger.ledger import Ledger
from pipeline.records import AnyEvent


def recover(half: ConsumerHalf, events: Iterable[AnyEvent]) -> tuple[Ledger, list[Lease]]:
    """Return the ledger that a generation's consumer half and all events give, and the batches to repeat.

    Pure: the same input gives the same result, and giving the result's own state again changes nothing.
    """
    ledger = Ledger(half)
    for event in events:
        ledger.apply(event)
    return ledger, ledger.restore(half)
