"""Reads a run's newest generation as docs/format.md describes it, with nothing of the library. Damage is an error."""

import json
import os
import struct
from types import SimpleNamespace
from typing import Any

import safetensors.torch
from google_crc32c import value as crc32c
from msgspec import msgpack

HEADER = struct.Struct("<4sBBHIIQQIIQQII")
PENDING, FINISHED, GIVEN_UP, PARKED = 0, 2, 3, 4
UNUSED = {"open", "mix", "epoch", "start", "intr", "part", "aged", "feed", "eval", "close", "batch", "rows"}


class Run:
    """The `step`, uids `trained` and `dropped`, the other `items` by uid, and `leases` as consumer.json has them."""

    def __init__(self, directory: str) -> None:
        self.directory, self.items, self.dropped = directory, dict[int, Any](), set[int]()
        self.tag = int(json.loads(self.read("run.json"))["run_id"][:16], 16)
        folders = [f"generations/{name}" for name in os.listdir(f"{directory}/generations") if name.isdigit()]
        whole = [name for name in folders if os.path.exists(f"{directory}/{name}/manifest.json")]
        newest = max(whole, key=lambda name: int(os.path.basename(name)))
        manifest = json.loads(self.read(f"{newest}/manifest.json"))
        compact = json.dumps(manifest | {"checksum": ""}, separators=(",", ":"), ensure_ascii=False).encode()
        assert (manifest["format_version"], manifest["checksum"]) == (1, f"{crc32c(compact):08x}"), newest
        files = {each["path"]: self.read(f"{newest}/{each['path']}") for each in manifest["files"]}
        found = [{"path": path, "bytes": len(raw), "crc32c": f"{crc32c(raw):08x}"} for path, raw in files.items()]
        assert found == manifest["files"], newest
        consumer = json.loads(files["consumer.json"])
        self.step, self.leases = consumer["step"], consumer["leases"]
        self.trained = {uid for first, last in consumer["trained"] for uid in range(first, last + 1)}
        if "producer.msgpack" in files:
            self.apply((), msgpack.decode(files["producer.msgpack"]))
        else:
            self.fold(manifest.get("base", 0), {(e["incarnation"], e["rank"]): e for e in manifest["journals"]})
        self.items = {uid: item for uid, item in self.items.items() if uid not in self.trained}
        for uid, item in self.items.items():
            item.state = state(item)
            item.tensors = {member: self.payload(uid, member, item) for member in item.places}

    def read(self, name: str) -> bytes:
        with open(os.path.join(self.directory, name), "rb") as file:
            return file.read()

    def frame(self, raw: bytes, at: int) -> tuple[tuple[Any, ...], bytes] | None:
        if len(raw) < at + 64 or raw[at : at + 4] != b"FBAY":
            return None
        head = HEADER.unpack_from(raw, at)
        payload = raw[at + 64 : at + 64 + head[7]]
        if head[13] != crc32c(raw[at : at + 60]) or len(payload) < head[7] or head[12] != crc32c(payload):
            return None
        assert (head[1], head[10]) == (1, self.tag), f"format {head[1]} of run {head[10]:x}"
        return head, payload

    def journal(self, key: tuple[int, ...], promised: int) -> list[Any]:
        raw, at, events = self.read(f"journals/{key[0]:06d}-{key[1]:04d}.fbj"), 0, list[Any]()
        while frame := self.frame(raw, at):
            assert frame[0][2] != 1 or frame[0][4:7] == (*key, len(events) + 1), (key, at)
            events += msgpack.decode(frame[1]) if frame[0][2] == 1 else []
            at += 64 + (frame[0][7] + 63) // 64 * 64
        marks = [frame for place in range(at, len(raw), 64) if (frame := self.frame(raw, place)) and frame[0][2] == 3]
        assert (at >= promised, marks) == (True, []), f"damage in journal {key} at byte {at}"
        return events

    def fold(self, base: int, counted: dict[tuple[int, ...], Any]) -> None:
        named = {tuple(map(int, name[:-4].split("-"))) for name in os.listdir(f"{self.directory}/journals")}
        named |= {key for key, each in counted.items() if each["bytes"]}
        logged = {k: self.journal(k, counted.get(k, {"bytes": 0})["bytes"]) for k in sorted(named) if k[0] >= base}
        last: dict[Any, int] = {}
        for key in sorted(logged, reverse=True):
            said = [((i, r), n) for i, r, n in logged[key][0][10]] if logged[key] and last.get(key) != 0 else []
            left = any(number < counted[each]["sequence"] for each, number in said if each in counted)
            last |= {key: 0} if left else {each: min(number, last.get(each, number)) for each, number in said}
        for key, events in logged.items():
            for event in events[: last.get(key)]:
                self.apply(key, event)

    def apply(self, key: tuple[int, ...], event: list[Any]) -> None:
        tag, uid, member, *rest = (*event, 0, None)
        if tag == "claim":
            self.items[uid] = claimed(*event[2:4], event[5], event[7], [PENDING] * event[6])
        elif tag == "inherit":
            self.items |= {e[0]: claimed(*e[1:4], e[6], list(e[9]), e[12], *e[22:24]) for e in event[1]}
            self.dropped |= {uid for first, last in event[6] for uid in range(first, last + 1)}
        elif tag not in UNUSED and (item := self.items.get(uid)):
            rejected = rest[{"done": 10, "reward": 2, "fail": 5}.get(tag, 99) :][:1] == [True]
            if tag == "done":
                item.members[member], item.rewards[member], item.places[member] = FINISHED, rest[1], [*key, *rest[4:7]]
            elif tag == "park":
                item.members[member], item.places[member] = PARKED, [*key, *rest[3:6]]
            elif tag == "move" and member in item.places:
                item.places[member] = [*key, *rest[:3]]
            elif tag == "reward" and item.members[member] == PARKED:
                item.members[member], item.rewards[member] = FINISHED, rest[1]
            elif tag == "fail" and rest[3]:
                item.members[member] = GIVEN_UP
            elif tag == "reopen":
                item.life += 1
                for each in rest[0] or range(len(item.members)):
                    item.members[each] = PENDING
                    item.places.pop(each, None), item.rewards.pop(each, None)
            assert tag in {"done", "park", "reward", "fail", "reopen", "drop", "move"}, f"unknown event {tag!r}"
            if uid not in self.trained and (tag == "drop" or rejected or state(item) == "dropped"):
                del self.items[uid]
                self.dropped.add(uid)

    def payload(self, uid: int, member: int, item: Any) -> dict[str, Any]:
        incarnation, rank, segment, offset, _ = item.places[member]
        frame = self.frame(self.read(f"segments/{incarnation:06d}-{rank:04d}-{segment:06d}.fbs"), offset)
        head, raw = frame or ((), b"")
        assert (head[2:3], head[6:7], head[8:9]) == ((2,), (uid,), (member,)), f"damage: {member} of {uid}: {head}"
        tensors = safetensors.torch.load(raw)
        header = msgpack.decode(tensors.pop("__item__").numpy().tobytes())
        if item.members[member] == FINISHED:
            item.rewards.setdefault(member, header.get("reward", 0.0))
        return tensors


def claimed(task: str, epoch: int, index: int, need: int, members: list[int], life: int = 0, *more: Any) -> Any:
    places, rewards = {m: at for m, *at in (*more, [])[0]}, dict((*more, [], [])[1])
    known = {"task": task, "epoch": epoch, "index": index, "need": need, "members": members, "life": life}
    return SimpleNamespace(**known, places=places, rewards=rewards)


def state(item: Any) -> str:
    if PENDING in item.members:
        return "waiting"
    few = len(item.members) - item.members.count(GIVEN_UP) < item.need
    return "dropped" if few else "parked" if PARKED in item.members else "finished"
