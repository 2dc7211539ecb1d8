"""A buffer as a dataset of torch's."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.epochs import EpochDrawer
from pipeline.errors import ConfigError, UsageError
from pipeline.replay.arguments import whole
from pipeline.replay.buffer import ReplayBuffer

_MOST_AHEAD = 1 << 16
_ASKED = frozenset(inspect.signature(ReplayBuffer.sample).parameters) - {"self", "count"}


class ReplayDataset(IterableDataset[Any]):
    """Batches of a buffer, drawn ahead, and on their way to a device before they are asked for.

    ::

        dataset = ReplayDataset(buffer, 256, prefetch=2, device="cuda", n_step=3, gamma=0.99)
        buffer.attach(agent=agent, dataset=dataset)
        for batch in dataset:
            ...

    What is yielded is a :class:`~pipeline.TransitionBatch`; with ``device``, the dict that its ``to`` gives, with
    ``keys`` (an int64 array) beside the columns. Rows are drawn and copied when a batch is taken, ``prefetch`` batches
    ahead of it, in the thread that takes it: so what is drawn never depends on how long anything takes, and only the
    copy to the device goes on beside the training. A batch that is drawn ahead does not know of rows, and of
    priorities, that come after it was drawn.

    Iterating goes on where the last iteration left off. It ends with the epoch, where the buffer draws without
    replacement and ``last`` is ``keep`` or ``drop``; else never.

    It can be attached: the batches that were drawn ahead are then part of what is saved, and are the next ones after a
    resume. With ``DataLoader``, use ``batch_size=None`` and ``num_workers=0``: a worker process would draw from a copy
    of the buffer.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        batch_size: int,
        *,
        prefetch: int = 0,
        device: Any = None,
        pin_memory: bool | None = None,
        **more: Any,
    ) -> None:
        """Args:
        buffer: where batches come from.
        batch_size: how many rows, or slices, a batch has.
        prefetch: how many batches are drawn ahead.
        device: where they go; None: they stay where they are.
        pin_memory: whether they are copied to pinned memory first, from which a device copies by itself; by default
            where ``device`` is a CUDA one.
        more: what :meth:`~pipeline.ReplayBuffer.sample` takes.

        Raises:
            ConfigError: a number is out of range, or ``sample`` takes no such argument, or there is no such device.
        """
        super().__init__()
        if not isinstance(buffer, ReplayBuffer):
            raise ConfigError.of("buffer", type(buffer).__name__, "a ReplayBuffer is needed")
        unknown = sorted(more.keys() - _ASKED)
        if unknown:
            raise ConfigError(
                f"ReplayDataset has no option {unknown[0]!r}; beside its own it has those of sample(): "
                f"{', '.join(sorted(_ASKED))}",
                option=unknown[0],
            )
        self.buffer = buffer
        self.batch_size = whole("batch_size", batch_size, 1, 2**31 - 1)
        self.prefetch = whole("prefetch", prefetch, 0, _MOST_AHEAD)
        self.device = None if device is None else torch.device(device)
        cuda = self.device is not None and self.device.type == "cuda"
        self.pin_memory = cuda if pin_memory is None else pin_memory
        if self.pin_memory and not torch.cuda.is_available():
            option, value = ("pin_memory", pin_memory) if pin_memory else ("device", str(device))
            raise ConfigError.of(option, value, "there is no CUDA device")
        self._more = more
        self._ahead: deque[tuple[TransitionBatch, Any]] = deque()  # a batch, and what is yielded for it
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        if torch.utils.data.get_worker_info() is not None:
            raise UsageError("a buffer cannot be sampled in a DataLoader's worker process; use num_workers=0")
        while True:
            self._fill(self.prefetch + 1)
            if not self._ahead:
                self._ended = False  # the next iteration is of the next epoch
                return
            yield self._ahead.popleft()[1]

    def _fill(self, count: int) -> None:
        while len(self._ahead) < count and not self._ended:
            batch = self.buffer.sample(self.batch_size, **self._more)
            self._ahead.append((batch, self._placed(batch)))
            self._ended = self._epoch_is_over()

    def _epoch_is_over(self) -> bool:
        """Whether the epoch that the last batch was of has no other one."""
        drawer = self.buffer.drawer
        if not isinstance(drawer, EpochDrawer) or drawer.last == "carry":
            return False
        return drawer.left < (self.batch_size if drawer.last == "drop" else 1)

    def _placed(self, batch: TransitionBatch) -> Any:
        if self.device is None:
            return batch
        if self.pin_memory:
            batch = batch.pinned()
        return batch.to(self.device, non_blocking=self.pin_memory) | {"keys": batch.keys}

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that were drawn ahead."""
        return {"ahead": [batch.state() for batch, _ in self._ahead], "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            ConfigError: it is no such state. Nothing was changed.
        """
        try:
            batches = [TransitionBatch.restored(each, self.buffer.options.returns) for each in state["ahead"]]
            ended = state["ended"]
            if ended not in (True, False):
                raise ValueError(f"ended is {ended!r}; True or False is needed")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"state: no state of a dataset ({error!r})", option="state") from None
        self._ahead = deque((batch, self._placed(batch)) for batch in batches)
        self._ended = bool(ended)
