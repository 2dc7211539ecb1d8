"""Errors, batches and the rest as messages, and back."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pipeline import errors
from pipeline.buffer import Batch, Group
from pipeline.errors import ConfigError, ForebayError, RemoteError, Stopped
from pipeline.records import Item, Rollout
from pipeline.runner.policies import check_rollout
from pipeline.serve.wire import ErrorNote
from pipeline.store.codec import pack, unpack
from pipeline.wiring.evaluations import Evaluation, Outcome

_KNOWN = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ForebayError)
}
_PLAIN = ("TypeError", "ValueError", "KeyError", "TimeoutError")  # what wrong arguments raise


def note_of(error: BaseException) -> ErrorNote:
    """Return an error as it travels."""
    cause = "" if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
    if isinstance(error, Stopped):
        names = ("code", "reason", "step", "generation")
        return ErrorNote("Stopped", str(error), cause, {name: getattr(error, name) for name in names})
    name = next((kind.__name__ for kind in type(error).__mro__ if _KNOWN.get(kind.__name__) is kind), "")
    if name:
        return ErrorNote(name, str(error), cause, {"option": getattr(error, "option", None)})
    if type(error).__name__ in _PLAIN:
        return ErrorNote(type(error).__name__, str(error), cause)
    return ErrorNote("RemoteError", f"{type(error).__name__}: {error}", cause)


def error_of(note: ErrorNote) -> BaseException:
    """Return the error that a note is of."""
    error: BaseException
    if note.name == "Stopped":
        error = Stopped(**note.details)
    elif note.name == "ConfigError":
        error = ConfigError(note.message, option=note.details.get("option"))
    elif note.name in _PLAIN:
        error = getattr(builtins, note.name)(note.message)
    else:
        error = _KNOWN.get(note.name, RemoteError)(note.message)
    if note.cause:
        error.__cause__ = RemoteError(note.cause)
    return error


# -- batches -------------------------------------------------------------------------------------------------------


class GroupNote(msgspec.Struct, array_like=True):
    """A :class:`~pipeline.Group` without its payloads, of which it has the lengths."""

    uid: int
    task: str
    epoch: int
    index: int
    oldest: int
    newest: int
    staleness: int
    reward_mean: float
    lengths: list[int]
    given: list[tuple[int, float]] = []
    least: int | None = None
    aged: list[int] = []


class BatchNote(msgspec.Struct, array_like=True):
    """A batch, or a part of one."""

    step: int
    repeated: bool
    groups: list[GroupNote]

    @property
    def lengths(self) -> list[int]:
        """Lengths of all payloads, in order."""
        return [length for group in self.groups for length in group.lengths]


def batch_note(batch: Batch, groups: Sequence[Group]) -> tuple[BatchNote, list[bytes | memoryview]]:
    """Return some groups of a batch as a message, and their payloads."""
    notes = [
        GroupNote(
            group.uid,
            group.task,
            group.epoch,
            group.index,
            group.oldest,
            group.newest,
            group.staleness,
            group.reward_mean,
            [len(blob) for blob in group._blobs],
            list(group._given),
            group._least,
            sorted(group._aged),
        )
        for group in groups
    ]
    return BatchNote(batch.step, batch.repeated, notes), [blob for group in groups for blob in group._blobs]


def batch_of(value: Any, payloads: Sequence[Any], release: Callable[[int], object]) -> Batch:
    """Return the batch that a message is of; ``payloads`` are views of what came with it."""
    note = msgspec.convert(value, BatchNote)
    groups, at = [], 0
    for each in note.groups:
        end = at + len(each.lengths)
        groups.append(
            Group(
                each.uid,
                each.task,
                each.epoch,
                each.index,
                each.oldest,
                each.newest,
                each.staleness,
                each.reward_mean,
                payloads[at:end],
                tuple(each.given),
                _least=each.least,
                _aged=frozenset(each.aged),
            )
        )
        at = end
    return Batch(note.step, groups, release=release, repeated=note.repeated)


def lengths_of(value: Any) -> list[int]:
    """Return the lengths of the payloads of a batch's message."""
    return msgspec.convert(value, BatchNote).lengths


def part_of(groups: Sequence[Group], rank: int, size: int) -> Sequence[Group]:
    """Return the share of ``rank``: contiguous, and no two differ by more than one group."""
    return groups[len(groups) * rank // size : len(groups) * (rank + 1) // size]


# -- evaluations, and rollouts by hand -----------------------------------------------------------------------------


def evaluation_note(found: Evaluation) -> dict[str, Any]:
    """Return an evaluation as a message; rollouts are in it as they are stored."""
    outcomes = [[each.index, each.member, each.reward, each.error, each.reused, each._blob] for each in found.outcomes]
    return {"task": found.task, "version": found.version, "seconds": found.seconds, "outcomes": outcomes}


def evaluation_of(value: dict[str, Any]) -> Evaluation:
    """Return the evaluation that a message is of."""
    names = ("index", "member", "reward", "error", "reused", "_blob")
    outcomes = [Outcome(**dict(zip(names, each, strict=True))) for each in value["outcomes"]]
    return Evaluation(task=value["task"], version=value["version"], outcomes=outcomes, seconds=value["seconds"])


def rollout_note(rollout: Any, task: str) -> list[Any]:
    """Return a rollout as a message.

    Raises:
        RolloutInvalid: something of it cannot be stored.
    """
    item = Item(task, -1, -1, -1)
    check_rollout(rollout, item)  # a reward that is not finite is refused where it arrives
    blob = pack(rollout, item, member=0, attempt=1, life=0, versions=(0, 0))
    return [blob, rollout.oldest, rollout.newest, rollout.reward]


def rollout_of(value: Any) -> Rollout:
    """Return the rollout that a message is of."""
    blob, oldest, newest, reward = value
    _, rollout = unpack(blob, "a rollout by hand")
    return msgspec.structs.replace(rollout, oldest=oldest, newest=newest, reward=reward)
