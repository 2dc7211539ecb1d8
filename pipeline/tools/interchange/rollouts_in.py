"""A pipeline's run out of rollouts: groups that wait to be trained, as if they had been put there by hand.

``Pipeline(tasks, directory=...).resume()`` loads it, with tasks of the names that the rollouts have; the first batches
are made of them. No source has drawn anything yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pipeline.checkpoint.manifest import CONSUMER_FILE, PIPELINE, PROGRESS_FILE
from pipeline.errors import Damaged, RolloutInvalid
from pipeline.ledger import ConsumerHalf
from pipeline.records import EXTERNAL, Claimed, Finished, Item, Opened, Parked, Rollout, Started, Trace
from pipeline.runner.policies import check_rollout
from pipeline.sampler.progress import Progress, encode_progress
from pipeline.store.codec import pack, tensor_of
from pipeline.store.plain import PlainValueError, from_plain
from pipeline.tools.interchange.new_run import INCARNATION, NewRun
from pipeline.tools.interchange.rollouts_out import WAITS
from pipeline.tools.interchange.streams import Record, Records, flat_bytes


def write_rollouts(stream: Records, directory: str, *, step: int, progress: Callable[[int], None]) -> tuple[str, int]:
    """Write a run into an empty folder; return its id, and how many rollouts it has.

    Raises:
        Damaged: a record is no rollout.
        WriteFailed: it cannot be written.
    """
    run = NewRun(directory)
    count, last = 0, -1
    try:
        run.append(Opened(INCARNATION, wall=time.time(), version=step, step=step))
        for group in _groups(stream.records()):
            uid = int(group[0].fields["uid"])
            uid = last = uid if uid > last else last + 1
            _write_group(run, uid, group)
            count += len(group)
            progress(sum(record.nbytes for record in group))
        run_id = run.commit(
            PIPELINE, generation_files(stream.progress or Progress(), step), step, options={"imported": True}
        )
    except BaseException:
        run.abandon()
        raise
    return run_id, count


def generation_files(progress: Progress, step: int) -> dict[str, bytes]:
    """Return what a generation of a pipeline holds, after ``step`` steps of which nothing else is known."""
    progress = msgspec.structs.replace(
        progress,
        next_consumer_step=step + 1,
        producer_future_step=step + 1,
        target_upto_future_step=step,
        model_step=step,
    )
    half = msgspec.json.format(msgspec.json.encode(ConsumerHalf(step=step))) + b"\n"
    return {CONSUMER_FILE: half, PROGRESS_FILE: encode_progress(progress)}


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield the records that follow each other and are of one item."""
    held: list[Record] = []
    for record in records:
        if held and (held[0].fields["uid"], held[0].fields["task"]) != (record.fields["uid"], record.fields["task"]):
            yield held
            held = []
        held.append(record)
    if held:
        yield held


def _write_group(run: NewRun, uid: int, group: list[Record]) -> None:
    task, size = str(group[0].fields["task"]), len(group)
    packed = [_packed(record, uid, member) for member, record in enumerate(group)]
    run.append(Claimed(uid, task, -1, -1, -1, size, size, EXTERNAL))
    for member, (rollout, _) in enumerate(packed):
        run.append(Started(uid, member, group[member].fields["attempt"], rollout.oldest or 0))
    for member, (rollout, blob) in enumerate(packed):
        at = run.place(blob, uid, member)
        fields: dict[str, Any] = group[member].fields
        attempt, oldest, newest = fields["attempt"], fields["oldest"], fields["newest"]
        where = (at.segment, at.offset, at.length)
        if fields.get("status") == WAITS:
            run.append(Parked(uid, member, attempt, oldest, newest, *where, rollout.tokens))
        else:
            run.append(Finished(uid, member, attempt, rollout.reward, oldest, newest, *where, rollout.tokens))


def _packed(record: Record, uid: int, member: int) -> tuple[Rollout, bytes]:
    fields = record.fields
    traces: list[dict[str, Any]] = [{} for _ in fields["agents"]]
    where = f"the rollout of uid {fields['uid']}, member {fields['member']}"
    try:
        for name, tensor in record.tensors.items():
            number, _, plain = name.partition(".")
            traces[int(number)][plain] = tensor_of(tensor.dtype, tensor.shape, flat_bytes(tensor).copy())
        rollout = Rollout(
            tuple(
                Trace(named, agent, policy)
                for named, agent, policy in zip(traces, fields["agents"], fields["policies"], strict=True)
            ),
            fields["reward"],
            from_plain(fields["info"]),
            fields["oldest"],
            fields["newest"],
            fields["tokens"],
        )
    except (ValueError, LookupError, TypeError, PlainValueError) as error:
        raise Damaged(f"{where}: does not fit together ({error})") from None
    item = Item(str(fields["task"]), fields["epoch"], fields["index"], uid)
    fault = check_rollout(rollout, item) if fields.get("status") != WAITS else None
    if fault is not None:
        raise Damaged(f"{where}: {fault}")
    try:
        versions = (fields["oldest"], fields["newest"])
        return rollout, pack(rollout, item, member=member, attempt=fields["attempt"], life=0, versions=versions)
    except RolloutInvalid as error:
        raise Damaged(f"{where}: {error}") from None
