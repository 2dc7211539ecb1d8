"""What a trainer gets: groups of rollouts, and tensors made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import msgspec
import torch

from pipeline.buffer.masks import young_enough
from pipeline.records import Rollout
from pipeline.store.codec import PayloadHeader, unpack


class Group(msgspec.Struct, eq=False):
    """One item's finished rollouts, by member. A member that failed for good is absent.

    Attributes:
        uid, task, epoch, index: the item's identity.
        oldest: version number of the oldest weights that made a part of it, in terms of the weights in use now.
        newest: version number of the newest.
        staleness: steps trained when the batch was made, minus ``oldest``. More than the bound under
            ``staleness_policy="mask"``, where the tokens that are too old are masked.
    """

    uid: int
    task: str
    epoch: int
    index: int
    oldest: int
    newest: int
    staleness: int
    reward_mean: float
    _blobs: Sequence[bytes | memoryview]
    _given: Sequence[tuple[int, float]] = ()
    _unpacked: list[tuple[PayloadHeader, Rollout]] | None = None
    _least: int | None = None
    """The oldest version of a token that is not masked."""
    _aged: frozenset[int] = frozenset()
    """Members that are masked whole."""

    def _read(self) -> list[tuple[PayloadHeader, Rollout]]:
        # Done at first use and on the caller's thread: the event loop does not copy tensors nobody looks at.
        if self._unpacked is None:
            self._unpacked = [unpack(blob, f"payload of uid {self.uid}") for blob in self._blobs]
            if self._given:
                self._give()
        return self._unpacked

    def _give(self) -> None:
        """Put the rewards that came later in the place of those that the runners returned."""
        assert self._unpacked is not None
        given = dict(self._given)
        for place, (header, rollout) in enumerate(self._unpacked):
            if header.member in given:
                self._unpacked[place] = header, msgspec.structs.replace(rollout, reward=given[header.member])

    @property
    def rollouts(self) -> list[Rollout]:
        """The members' rollouts; the tensors are fresh copies and the caller's to change."""
        return [rollout for _, rollout in self._read()]

    @property
    def members(self) -> list[int]:
        """Which members they are."""
        return [header.member for header, _ in self._read()]

    @property
    def staleness_mask(self) -> list[torch.Tensor]:
        """For each trace, rollout by rollout: which tokens are young enough to be trained, bool ``[tokens]``.

        All are, but under ``staleness_policy="mask"``.
        """
        return [
            young_enough(trace, self._least, oldest=header.oldest, aged=header.member in self._aged)
            for header, rollout in self._read()
            for trace in rollout.traces
        ]

    @property
    def masks_tokens(self) -> bool:
        """Whether single tokens may be masked, and :attr:`staleness_mask` says which."""
        return self._least is not None

    def __len__(self) -> int:
        return len(self._blobs)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __repr__(self) -> str:
        return f"Group(uid={self.uid}, task={self.task!r}, index={self.index}, rollouts={len(self)})"


class Batch:
    """Groups leased to the trainer for one step.

    The lease ends with ``ack`` (the next of ``batches``, or ``save``) or with :meth:`release`.

    Attributes:
        step: the trainer's step that it is for, from 1.
        groups: the groups, in the order in which they were selected.
        repeated: whether it is a batch of before a crash, handed out again.
    """

    def __init__(
        self, step: int, groups: Sequence[Group], *, release: Callable[[int], object], repeated: bool = False
    ) -> None:
        self.step, self.groups, self.repeated = step, tuple(groups), repeated
        self._release = release
        self.released = False
        """Whether it was given back; another batch may have its step by now."""

    def release(self) -> None:
        """Give the batch back untrained: its groups are buffered again. A second call does nothing."""
        if not self.released:
            self.released = True
            self._release(self.step)

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """Every rollout, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def uids(self) -> list[int]:
        """The groups' uids, in order."""
        return [group.uid for group in self.groups]

    @property
    def rewards(self) -> torch.Tensor:
        """Rewards of all rollouts, float32 ``[n]``."""
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float32)

    @property
    def staleness_mask(self) -> list[torch.Tensor]:
        """For each trace, group by group: which tokens are young enough to be trained, bool ``[tokens]``."""
        return [mask for group in self.groups for mask in group.staleness_mask]

    @property
    def staleness(self) -> int:
        """Staleness of the stalest group."""
        return max((group.staleness for group in self.groups), default=0)

    def padded(self, padding: float = 0) -> dict[str, torch.Tensor]:
        """Return each tensor name over all rollouts, stacked, padded at the end of the first dimension.

        Only tensors that every trace has are returned. Those of more than 0 dimensions become ``[n, longest, ...]``,
        0-d ones ``[n]``. Beside them stand ``lengths`` int64 ``[n]`` (of the longest named tensor), ``mask`` bool
        ``[n, longest]``, ``rewards`` float32 ``[n]`` and ``group`` int64 ``[n]``, where n counts traces. ``mask``
        leaves out the padding, and what is too old under ``staleness_policy="mask"``.

        Raises:
            ValueError: tensors of one name differ in dtype, or in shape beyond the first dimension; or every trace has
                one named as what stands beside them.
        """
        traces = [
            (place, rollout.reward, trace)
            for place, group in enumerate(self.groups)
            for rollout in group.rollouts
            for trace in rollout.traces
        ]
        names = (
            [name for name in traces[0][2].tensors if all(name in t.tensors for _, _, t in traces)] if traces else []
        )
        taken = sorted({"lengths", "mask", "rewards", "group"} & set(names))
        if taken:
            raise ValueError(
                f"{', '.join(taken)}: padded() adds something of this name; rename the tensor in the runner"
            )
        columns = {name: [trace.tensors[name] for _, _, trace in traces] for name in names}
        result = {name: _pad(name, tensors, padding) for name, tensors in columns.items()}
        lengths = [max((len(c[i]) for c in columns.values() if c[i].dim()), default=0) for i in range(len(traces))]
        result["lengths"] = torch.tensor(lengths, dtype=torch.int64)
        result["mask"] = torch.arange(max(lengths, default=0))[None, :] < result["lengths"][:, None]
        if any(group.masks_tokens for group in self.groups):
            for row, young in zip(result["mask"], self.staleness_mask, strict=True):
                row[: len(young)] &= young[: len(row)]
                row[len(young) :] = False
        result["rewards"] = torch.tensor([reward for _, reward, _ in traces], dtype=torch.float32)
        result["group"] = torch.tensor([place for place, _, _ in traces], dtype=torch.int64)
        return result

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, groups={len(self.groups)}, staleness={self.staleness})"


def _pad(name: str, tensors: list[torch.Tensor], padding: float) -> torch.Tensor:
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:] or tensor.dim() != first.dim():
            raise ValueError(
                f"{name!r}: cannot be padded into one tensor: {first.dtype} {tuple(first.shape)} beside "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    if first.dim() == 0:
        return torch.stack(tensors)
    longest = max(len(tensor) for tensor in tensors)
    out = torch.full((len(tensors), longest, *first.shape[1:]), padding, dtype=first.dtype)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out
