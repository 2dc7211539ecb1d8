"""One rollout, row or trajectory of a run, as a person would read it."""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec
import numpy as np

from pipeline.checkpoint.manifest import OF_SHARDS, PIPELINE, PIPELINE_RANKS, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.checkpoint.status import status_of
from pipeline.errors import ConfigError, Damaged, ForebayError
from pipeline.locations import Location
from pipeline.records import Added, Claimed, Inherited, Trace
from pipeline.store.codec import unpack
from pipeline.store.contents import decode_content
from pipeline.store.journal import Logged, payload_place
from pipeline.store.segments import PayloadReader, Place
from pipeline.tools.event_lines import Happened, said_of
from pipeline.tools.one_row import row_of, trajectory_of
from pipeline.tools.rollouts import RolloutReaders, read_events
from pipeline.tools.target import RUN, Target, find_target

FIRST = 8
"""Values that are shown of a tensor."""
_UID = frozenset(("uid",))


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, in short."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: list[Any]
    """Its first values."""


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's part of a rollout."""

    agent: str
    policy: str
    tensors: list[TensorFacts]


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a member of a group returned."""

    member: int
    reward: float
    oldest: int
    newest: int
    tokens: int
    attempt: int
    info: Any
    """What it kept beside its tensors: text, messages, tool calls."""
    traces: list[TraceFacts]
    segment: str
    offset: int
    bytes: int


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`show_item` found."""

    path: str
    what: str
    """``rollout``, ``row`` or ``trajectory``."""
    number: int
    """Its uid, its key, or its number."""
    facts: dict[str, Any]
    """What it is, by name."""
    content: Any = None
    """The item itself, where the journal keeps it; a source that can give it again does not."""
    members: list[MemberFacts] = []
    tensors: list[TensorFacts] = []
    """Of a row or a trajectory."""
    happened: list[Happened] = []
    """In the order of the journals."""
    notes: list[str] = []


def show_item(path: str | os.PathLike[str], number: int, *, step: int | None = None) -> Shown:
    """Return one item of a run, with what it returned. Blocks, takes no lock, and changes nothing.

    Args:
        path: a run's folder, a generation's, or a shard's.
        number: of a run of rollouts, the item's uid; of a buffer, a row's key, or a trajectory's number.
        step: of a run, look at the newest generation of this step.

    Raises:
        NotARun: it is nothing of a run.
        ConfigError: there is no such item.
        Damaged: it cannot be read.
    """
    target = find_target(path, step=step)
    stored = target.stored
    if stored is None:
        raise ConfigError.of("PATH", target.path, "a run with a generation, a generation, or a shard is needed")
    kind = stored.manifest.kind
    if kind in OF_SHARDS and target.rank is None:
        raise ConfigError.of("PATH", target.path, "each rank has such a number; name a shard (.../shards/0000)")
    if kind in (PIPELINE, PIPELINE_RANKS):
        return _Item(target, number).result()
    of_trajectories = kind in (TRAJECTORIES, TRAJECTORY_SHARDS)
    find = trajectory_of if of_trajectories else row_of
    facts, tensors = find(target.layout, target.run.tag, stored, number, target.rank)
    return Shown(
        path=target.path,
        what="trajectory" if of_trajectories else "row",
        number=number,
        facts=facts,
        tensors=[tensor_facts(name, each) for name, each in tensors.items()],
    )


class _Item:
    """One item of a run of rollouts; is told the events of every journal."""

    def __init__(self, target: Target, uid: int) -> None:
        self.target, self.uid = target, uid
        self.content: bytes | None = None
        self.claimed: Claimed | None = None
        self.happened: list[Happened] = []
        self.places: dict[int, Location] = {}
        """Where each member's payload lay last."""
        self.notes: list[str] = []

    def take(self, logged: Logged) -> None:
        """Take in an event."""
        event = logged.event
        if isinstance(event, Inherited):
            for item in event.items:
                if item.uid == self.uid:
                    self.content = item.content
                    self.places.update((place[0], Location(*place[1:])) for place in item.places)
                    self._note(logged, f"inherited with members {list(item.members)}")
            return
        if getattr(event, "uid", None) != self.uid:
            if self.uid in (getattr(event, "uids", None) or ()):
                self._note(logged, said_of(event, without=frozenset(("uids",))))
            return
        if isinstance(event, Claimed):
            self.claimed, self.content = event, event.content
        place = payload_place(logged)
        if place is not None and not isinstance(event, Added):
            self.places[place[1]] = place[2]
        self._note(logged, said_of(event, without=_UID))

    def _note(self, logged: Logged, said: str) -> None:
        self.happened.append(Happened.of(logged, said))

    def result(self) -> Shown:
        target, stored = self.target, self.target.stored
        assert stored is not None
        reader = RolloutReaders(target.layout, target.run.tag, stored)
        self.notes += read_events(target.layout, target.run.tag, reader, self)
        held = target.what == RUN and status_of(target.path).hold.held
        reader.finish(running=bool(held))
        if reader.wrong is not None:
            self.notes.append(reader.wrong)
        if not self.happened:
            last = reader.next_uid - 1
            raise ConfigError.of("--item", self.uid, f"it was never claimed; uids go up to {last}")
        facts: dict[str, Any] = {"state": reader.holder(self.uid).ledger.state(self.uid)}
        if self.claimed is not None:
            of = self.claimed
            facts |= {"task": of.task, "epoch": of.epoch, "index": of.index, "size": of.size, "need": of.need}
            facts |= {"kind": of.kind}
        return Shown(
            path=target.path,
            what="rollout",
            number=self.uid,
            facts=facts,
            content=None if self.content is None else readable(decode_content(self.content)),
            members=self._members(),
            happened=self.happened,
            notes=self.notes,
        )

    def _members(self) -> list[MemberFacts]:
        layout = self.target.layout
        found = []
        places: list[Place] = [(self.uid, member, at) for member, at in sorted(self.places.items())]
        for (_, member, at), blob in PayloadReader(layout, self.target.run.tag, forgiving=True).each(places):
            path = layout.segment(*at.segment_key)
            if isinstance(blob, Damaged):
                gone = not os.path.lexists(path)
                why = f"{path}: is gone; nothing that is kept needs it" if gone else str(blob)
                self.notes.append(f"member {member}: {why}")
                continue
            try:
                found.append(_member(blob, os.path.relpath(path, layout.directory), at))
            except ForebayError as error:
                self.notes.append(f"member {member}: {error}")
        return sorted(found, key=lambda each: each.member)


def _member(blob: bytes, segment: str, at: Location) -> MemberFacts:
    header, rollout = unpack(blob, f"{segment} at byte {at.offset}")
    return MemberFacts(
        member=header.member,
        reward=header.reward,
        oldest=header.oldest,
        newest=header.newest,
        tokens=header.tokens,
        attempt=header.attempt,
        info=readable(dict(rollout.info)),
        traces=[_trace(each) for each in rollout.traces],
        segment=segment,
        offset=at.offset,
        bytes=at.length,
    )


def _trace(trace: Trace) -> TraceFacts:
    tensors = [tensor_facts(name, tensor) for name, tensor in trace.tensors.items()]
    return TraceFacts(agent=trace.agent, policy=trace.policy, tensors=tensors)


def tensor_facts(name: str, tensor: Any) -> TensorFacts:
    """Return a tensor or array in short."""
    if isinstance(tensor, np.ndarray) and tensor.dtype == object:  # compressed rows
        return TensorFacts(name=name, dtype="compressed", shape=tensor.shape, first=[])
    if isinstance(tensor, np.ndarray):
        dtype, flat = str(tensor.dtype), tensor.reshape(-1)[:FIRST]
    else:
        dtype, flat = str(tensor.dtype).removeprefix("torch."), tensor.reshape(-1)[:FIRST]
        flat = flat.float() if flat.is_floating_point() else flat
    return TensorFacts(name=name, dtype=dtype, shape=tuple(tensor.shape), first=readable(flat.tolist()))


def readable(value: Any) -> Any:
    """Return a plain value in terms that JSON has: text for bytes, for numbers that it lacks, and for keys."""
    if isinstance(value, str):  # which may hold half a surrogate pair
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {readable(key) if isinstance(key, str) else repr(key): readable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [readable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float)) else repr(value)
