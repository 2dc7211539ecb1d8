"""Who has which batch: leases that end with their holders, and acks that count once every holder has given its own.

A batch belongs to one client, or in parts to several. The ledger's ack says that the weights include every batch up to
a step, so it is given for the last step before which nobody still trains.
"""

from __future__ import annotations

from typing import Any

from pipeline.buffer import Batch
from pipeline.errors import UsageError
from pipeline.wiring.run import Run


class Held:
    """A batch that is leased to clients."""

    def __init__(self, batch: Batch, parts: int) -> None:
        self.batch, self.parts = batch, parts
        self.holders: set[Any] = set()
        self.done: set[Any] = set()

    @property
    def trained(self) -> bool:
        """Whether all who are to have it had it, and have said that they are done."""
        return len(self.holders) == self.parts and self.done >= self.holders


class Leases:
    """All that is leased to clients. Belongs to the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._held: dict[int, Held] = {}

    def hold(self, batch: Batch, parts: int = 1) -> Held:
        """Note a batch that was made for clients."""
        held = self._held[batch.step] = Held(batch, parts)
        return held

    def settle(self) -> None:
        """Forget what is leased no longer; who held what is trained by now has trained it."""
        ledger = self._run.state.ledger
        for step, held in list(self._held.items()):
            if step not in ledger.leases or held.batch.released:
                del self._held[step]
                if not held.batch.released and step <= ledger.step:
                    for client in held.holders:
                        client.acked = max(client.acked, step)

    def ack(self, client: Any, step: int, *, if_leased: bool = False) -> bool:
        """Note that what ``client`` holds of the batches up to ``step`` is in its weights. Returns whether the ledger's
        step moved.

        Raises:
            UsageError: the step was never handed out, or to others.
        """
        self.settle()
        ledger = self._run.state.ledger
        if if_leased and step not in ledger.leases:
            return False
        if step not in ledger.leases:
            self._run.ack(step)  # which says what is wrong with it, if anything is
            return False
        if step not in self._held or client not in self._held[step].holders:
            raise UsageError(f"step {step}: its batch is leased, but not to this client")
        for leased, held in self._held.items():
            if leased <= step and client in held.holders:
                held.done.add(client)
        reached = None
        for leased in sorted(ledger.leases):
            if leased not in self._held or not self._held[leased].trained:
                break
            reached = leased
        if reached is not None:
            self._run.ack(reached)
            self.settle()
        return reached is not None

    def leave(self, client: Any, *, content: bool = False) -> None:
        """Take back whatever a client holds that was not trained, the last first, so that it comes again in order.

        Args:
            client: who leaves.
            content: in peace, with its weights: then what it has trained of a batch counts, though others still train
                their parts of it.
        """
        self.settle()
        for step in sorted(self._held, reverse=True):
            held = self._held[step]
            if client in held.holders and not (content and client in held.done):
                held.batch.release()
        self.settle()
