"""Finished rollouts out of a pipeline's run: what its journals say that there is, and the payloads of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec

from pipeline.checkpoint.fold import ProducerFold
from pipeline.checkpoint.halves import read_half
from pipeline.checkpoint.manifest import REPLAY_BUFFER
from pipeline.checkpoint.parts import Part, parts_of
from pipeline.errors import ConfigError, Damaged
from pipeline.ledger import FINISHED, PARKED, UNREWARDED
from pipeline.locations import Location
from pipeline.records import Rewarded
from pipeline.store.codec import ITEM_KEY, PayloadHeader, read_bytes
from pipeline.store.journal import read_journals
from pipeline.store.segments import PayloadReader, Place
from pipeline.tools.interchange.runs import Opened
from pipeline.tools.interchange.streams import ROLLOUTS, Record, Records

BUFFERED, TRAINED, WAITS = "buffered", "trained", "parked"
STATUSES = (BUFFERED, WAITS, TRAINED)
"""Buffered: finished, and not trained yet, or only by steps that were not saved; parked: its reward is to come."""
_AT_ONCE = 16 << 20  # bytes of payloads that are held
_decode_header = msgspec.msgpack.Decoder(PayloadHeader).decode


def rollouts_of(
    opened: Opened, *, tasks: frozenset[str] = frozenset(), statuses: frozenset[str] = frozenset()
) -> Records:
    """Return every finished rollout whose payload is there, by uid and member.

    What was trained goes with its segments, unless the run was made with ``archive="all"``.

    Args:
        opened: the run.
        tasks: of these alone; empty: of all.
        statuses: of :data:`STATUSES` these alone; empty: all but what is parked.

    Raises:
        ConfigError: the generation was saved without its buffer; or there is no such status, or task.
        Damaged: a journal is.
    """
    unknown = sorted(statuses - set(STATUSES))
    if unknown:
        raise ConfigError.of("status", ", ".join(unknown), f"there are {', '.join(STATUSES)}")
    found = _Found(opened)
    missing = sorted(tasks - found.tasks)
    if missing:
        raise ConfigError.of("task", ", ".join(missing), f"the run has {', '.join(sorted(found.tasks)) or 'none'}")
    places = found.places(tasks, statuses or frozenset({BUFFERED, TRAINED}))

    def records() -> Iterator[Record]:
        return _records(opened, places, found.rewards)

    return Records(ROLLOUTS, opened.about, records, sum(place[2].length for place, _ in places), len(places))


class _Found:
    """What the journals say."""

    def __init__(self, opened: Opened) -> None:
        stored = opened.stored
        if REPLAY_BUFFER in stored.manifest.left_out:
            raise ConfigError(
                f"{stored.folder}: the generation was saved without its buffer, so it has no rollouts; choose another "
                "with --step",
                option="step",
            )
        self._opened = opened
        self._parts = [_Part(part) for part in parts_of(opened.layout, opened.tag, stored)]
        self.tasks = {name for part in self._parts for name in part.ledger.totals}
        self.rewards = {key: reward for part in self._parts for key, reward in part.rewards.items()}

    def places(self, tasks: frozenset[str], statuses: frozenset[str]) -> list[tuple[Place, str]]:
        """Return where the payloads lie that are wanted, each with its status, by uid and member."""
        there = self._there()
        found = []
        for part in self._parts:
            for place, status in part.places(tasks):
                if status in statuses and (status != TRAINED or there(place[2])):
                    found.append((place, status))
        return sorted(found, key=lambda each: each[0][:2])

    def _there(self) -> Callable[[Location], bool]:
        names = set(self._opened.layout.list_segments())
        return lambda at: os.path.basename(self._opened.layout.segment(*at.segment_key)) in names


class _Part:
    """What one process wrote, or one of several ranks."""

    def __init__(self, part: Part) -> None:
        half, _ = read_half(part.stored.folder)
        line = part.line()
        fold = ProducerFold(
            half, (), seed=0, line=part.stored.manifest, discarded=line.discarded, sampler=part.sampler()
        )
        self.rewards: dict[tuple[int, int], float] = {}
        for logged in read_journals(part.layout, run_tag=part.run_tag, skip=line.unneeded):
            if fold.apply(logged) and isinstance(logged.event, Rewarded):
                self.rewards[logged.event.uid, logged.event.member] = logged.event.reward
        self.ledger, self._places = fold.ledger, fold.places.places
        self._task_of = {uid: entry.task for uid, entry in fold.ledger.entries.items()}
        fold.ledger.restore(half)

    def places(self, tasks: frozenset[str]) -> Iterator[tuple[Place, str]]:
        """Yield where the payloads of tasks lie, of all tasks if none is named, each with its status."""
        for uid, members in self._places.items():
            if not tasks or self._task_of.get(uid) in tasks:
                for member, at in members.items():
                    yield (uid, member, at), self._status(uid, member)

    def _status(self, uid: int, member: int) -> str:
        if uid in self.ledger.trained:
            return TRAINED
        entry = self.ledger.entries.get(uid)
        if entry is None:
            return ""
        if entry.members[member] == UNREWARDED:
            return WAITS
        if entry.members[member] != FINISHED or (entry.unsettled and entry.state != PARKED):
            return ""  # of a group that is not whole yet
        return WAITS if entry.state == PARKED else BUFFERED


def _records(
    opened: Opened, places: list[tuple[Place, str]], rewards: dict[tuple[int, int], float]
) -> Iterator[Record]:
    reader = PayloadReader(opened.layout, opened.tag)
    chunk: list[tuple[Place, str]] = []
    size = 0
    for at, each in enumerate(places):
        chunk.append(each)
        size += each[0][2].length
        if size < _AT_ONCE and at + 1 < len(places):
            continue
        blobs = reader.read_many(place for place, _ in chunk)
        for (uid, member, _), status in chunk:
            yield record_of(blobs.pop((uid, member)), status, rewards.get((uid, member)))
        chunk, size = [], 0


def record_of(blob: bytes, status: str, reward: float | None = None) -> Record:
    """Return a payload as a record.

    Args:
        blob: the payload.
        status: of :data:`STATUSES`.
        reward: what counts instead of the payload's own.

    Raises:
        Damaged: it is no rollout.
    """
    tensors = read_bytes(blob)
    raw = tensors.pop(ITEM_KEY, None)
    try:
        header = _decode_header(raw.array.tobytes() if raw is not None else b"")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"payload: the item header is damaged ({error})") from None
    fields = {
        "uid": header.uid,
        "member": header.member,
        "task": header.task,
        "status": status,
        "epoch": header.epoch,
        "index": header.index,
        "attempt": header.attempt,
        "reward": header.reward if reward is None else reward,
        "oldest": header.oldest,
        "newest": header.newest,
        "tokens": header.tokens,
        "agents": [agent for agent, _ in header.traces],
        "policies": [policy for _, policy in header.traces],
        "info": header.info,
    }
    return Record(fields, tensors)
