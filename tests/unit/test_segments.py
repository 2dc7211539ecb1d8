"""Payloads on the disk: where the writer said they would lie, whole, and nobody else's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import Damaged
from pipeline.locations import Location
from pipeline.records import Dropped, Finished
from pipeline.store.frames import FOOTER, HEADER_BYTES, PAYLOAD, frame_bytes, scan
from pipeline.store.layout import Layout, RunFile
from pipeline.store.segments import Block, Footer, FooterBuilder, PayloadReader, SegmentEntry, needed_blocks
from pipeline.store.writer import StoreWriter
from tests.support.disk import ScriptedFiles, events_of, flush, new_run, new_writer


@pytest.fixture
def run(tmp_path: Path) -> tuple[Layout, RunFile]:
    return new_run(tmp_path / "run")


def finish(writer: StoreWriter, uid: int, blob: bytes, *, member: int = 0, life: int = 0) -> Location:
    place = writer.place(blob, uid, member, life)
    writer.append(Finished(uid, member, 1, 0.0, 0, 0, place.segment, place.offset, len(blob)))
    return place


def test_payloads_are_read_where_they_were_placed_in_any_order(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run, segment_bytes=1000)
    blobs = {(uid, member): bytes([uid, member]) * (150 * uid) for uid in range(5) for member in range(2)}
    places = []
    for (uid, member), blob in blobs.items():
        places.append((uid, member, finish(writer, uid, blob, member=member)))
        if uid % 2:
            flush(writer)
    flush(writer)
    reader = PayloadReader(run[0], run[1].tag)
    assert reader.read_many(reversed(places)) == blobs
    assert reader.read_many(places[3:4]) == {(1, 1): blobs[1, 1]}
    assert reader.read_many([]) == {}
    assert {place.segment for _, _, place in places} == {1, 2, 3, 4, 5}
    assert len(events_of(*run)) == len(blobs)
    writer.close()
    assert reader.read_many(places) == blobs


def test_a_segment_is_sealed_with_a_footer_once_it_is_longer_than_its_size(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run, segment_bytes=300)
    places = [finish(writer, uid, b"x" * 100, member=uid, life=7) for uid in range(5)]
    flush(writer)
    assert [place.segment for place in places] == [1, 1, 2, 2, 3]
    assert [place.offset for place in places] == [0, 192, 0, 192, 0]
    _, before = writer.sync()
    assert [(info.name, info.sealed) for info in before] == [
        ("000001-0000-000001.fbs", True),
        ("000001-0000-000002.fbs", True),
        ("000001-0000-000003.fbs", False),
    ]
    writer.close()
    assert run[0].list_segments() == [info.name for info in before]
    for info in before:
        path = os.path.join(run[0].segments, info.name)
        frames = list(scan(path, run_tag=run[1].tag))
        assert [frame.header.kind for frame in frames[:-1]] == [PAYLOAD] * (len(frames) - 1)
        assert frames[-1].header.kind == FOOTER
        footer = msgspec.msgpack.decode(frames[-1].payload, type=Footer)
        number = int(info.name[12:18])
        expected = [SegmentEntry(n, n, 7, p.offset, 100) for n, p in enumerate(places) if p.segment == number]
        assert footer.entries == expected
        if info.sealed:
            assert os.path.getsize(path) == info.bytes


@pytest.mark.parametrize("count", [0, 1, 15, 16, 255, 256, 65535, 65536])
def test_a_footer_is_what_messagepack_makes_of_its_entries(count: int) -> None:
    entries = [SegmentEntry(2**40 + number, number % 7, 0, number << 9, 300) for number in range(count)]
    built = FooterBuilder()
    for entry in entries:
        built.add(entry)
    assert built.encode() == msgspec.msgpack.encode(Footer(entries))
    assert built.count == count


def test_a_payload_larger_than_a_segment_has_one_of_its_own(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run, segment_bytes=64)
    places = [finish(writer, uid, bytes([uid]) * 5000) for uid in range(3)]
    flush(writer)
    assert [(place.segment, place.offset) for place in places] == [(1, 0), (2, 0), (3, 0)]
    found = PayloadReader(run[0], run[1].tag).read_many([(uid, 0, place) for uid, place in enumerate(places)])
    assert found == {(uid, 0): bytes([uid]) * 5000 for uid in range(3)}
    writer.close()


def test_a_large_batch_is_written_in_pieces_and_a_sync_covers_every_segment_of_it(run: tuple[Layout, RunFile]) -> None:
    files = ScriptedFiles()
    writer = new_writer(*run, files, segment_bytes=10 << 20)
    places = [finish(writer, uid, bytes([uid]) * (1 << 20)) for uid in range(36)]
    flush(writer)
    assert files.calls.count("write") == 3 * (3 + 1) + 2 + 1, "4 MB each, a footer for each sealed one, and the events"
    assert len(files.open) == 3, "the journal, the open segment and the one before, whose sync may take its time"
    writer.sync()
    assert len(files.open) == 2
    assert not files.unsynced(run[0].segments)
    assert [info.sealed for info in writer.sync()[1]] == [True, True, True, False]
    blobs = PayloadReader(run[0], run[1].tag).read_many([(uid, 0, place) for uid, place in enumerate(places)])
    assert all(blobs[uid, 0] == bytes([uid]) * (1 << 20) for uid in range(36))
    writer.close()
    assert not files.open


@pytest.mark.parametrize("at", [0, 300_000, 699_999])
def test_a_flipped_bit_anywhere_in_a_large_payload_is_found(run: tuple[Layout, RunFile], at: int) -> None:
    writer = new_writer(*run)
    places = [(uid, 0, finish(writer, uid, bytes([uid]) * 700_000)) for uid in range(3)]
    flush(writer)
    writer.close()
    reader = PayloadReader(run[0], run[1].tag)
    reader.verify(places)
    with open(run[0].segment(1, 0, 1), "r+b") as file:
        file.seek(places[1][2].offset + HEADER_BYTES + at)
        file.write(b"\x7f")
    with pytest.raises(Damaged, match="uid 1, member 0"):
        reader.verify(places)
    with pytest.raises(Damaged, match="uid 1, member 0"):
        reader.read_many(places)
    assert [place for place, _ in reader.damaged(places)] == [places[1]]
    assert len(list(scan(run[0].segment(1, 0, 1), run_tag=run[1].tag, payloads=False))) == 1


def test_a_payload_is_written_before_the_event_that_names_it(run: tuple[Layout, RunFile]) -> None:
    """Whatever call is the last one: every event that is there names a payload that can be read."""
    for last in range(1, 40):
        layout, marker = new_run(Path(run[0].directory) / str(last))
        files = ScriptedFiles(last)
        try:
            writer = new_writer(layout, marker, files, segment_bytes=200)
            for uid in range(6):
                finish(writer, uid, bytes([uid]) * 90)
                if uid % 2:
                    flush(writer)
            writer.close()
        except OSError:
            assert len(files.calls) >= last
        files.end()
        reader = PayloadReader(layout, marker.tag)
        names = layout.list_journals()
        found = events_of(layout, marker) if names else []
        for event in found:
            assert isinstance(event, Finished)
            place = Location(1, 0, event.segment, event.offset, event.length)
            blobs = reader.read_many([(event.uid, 0, place)])
            assert blobs == {(event.uid, 0): bytes([event.uid]) * 90}
        if last > len(files.calls):
            assert len(found) == 6
            return
    raise AssertionError("the loop never came to a run without a failure")


def test_no_payload_opens_no_segment(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run)
    writer.append(Dropped(1, "failed"))
    flush(writer)
    assert writer.sync()[1] == []
    writer.close()
    assert run[0].list_segments() == []


def test_a_missing_segment_names_itself_and_what_is_lost(run: tuple[Layout, RunFile]) -> None:
    place = Location(4, 0, 9, 0, 10)
    with pytest.raises(Damaged, match=r"000004-0000-000009\.fbs: the segment is missing; it holds uid 31"):
        PayloadReader(run[0], run[1].tag).read_many([(31, 2, place)])


def test_every_flipped_byte_of_a_payload_is_damage_with_file_offset_uid_and_member(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run)
    finish(writer, 1, b"a" * 64)
    place = finish(writer, 2, b"b" * 64, member=3)
    flush(writer)
    writer.close()
    path = Path(run[0].segments) / "000001-0000-000001.fbs"
    raw = path.read_bytes()
    reader = PayloadReader(run[0], run[1].tag)
    assert place.offset == HEADER_BYTES + 64
    expected = re.escape(f"{path} at byte 128: the payload of uid 2, member 3")
    for at in range(place.offset, place.offset + frame_bytes(64)):
        bad = bytearray(raw)
        bad[at] ^= 0x40
        path.write_bytes(bad)
        with pytest.raises(Damaged, match=expected):
            reader.read_many([(2, 3, place)])
    for cut in range(place.offset, place.offset + frame_bytes(64)):
        path.write_bytes(raw[:cut])
        with pytest.raises(Damaged, match=expected):
            reader.read_many([(2, 3, place)])


@pytest.mark.parametrize(("uid", "member"), [(2, 0), (1, 1)])
def test_the_payload_of_another_is_not_taken_for_it(run: tuple[Layout, RunFile], uid: int, member: int) -> None:
    writer = new_writer(*run)
    place = finish(writer, 1, b"a" * 64)
    flush(writer)
    writer.close()
    with pytest.raises(Damaged, match=f"uid {uid}, member {member}"):
        PayloadReader(run[0], run[1].tag).read_many([(uid, member, place)])
    with pytest.raises(Damaged):
        PayloadReader(run[0], run[1].tag + 1).read_many([(1, 0, place)])
    footer = msgspec.structs.replace(place, offset=place.offset + frame_bytes(64))
    with pytest.raises(Damaged):
        PayloadReader(run[0], run[1].tag).read_many([(0, 1, footer)])


def test_segments_are_listed_by_number(run: tuple[Layout, RunFile]) -> None:
    for name in ("000010-0000-000001.fbs", "000009-0000-1000000.fbs", "000009-0000-999999.fbs", "x.fbs", "1-1.fbs"):
        (Path(run[0].segments) / name).touch()
    assert run[0].list_segments() == [
        "000009-0000-999999.fbs",
        "000009-0000-1000000.fbs",
        "000010-0000-000001.fbs",
    ]


def test_blocks_that_are_needed_in_their_order() -> None:
    def block(first: int, count: int, offset: int) -> Block:
        return Block(first, count, 1, 0, 1, offset, 8)

    given = [block(8, 4, 0), block(0, 4, 1), block(12, 2, 2), block(4, 4, 3), block(12, 5, 4)]
    assert [each.offset for each in needed_blocks(given, 4)] == [3, 0, 4]
    assert [each.offset for each in needed_blocks(given, 3)] == [1, 3, 0, 4]
    assert needed_blocks(given, 17) == []
