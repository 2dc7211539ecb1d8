"""Any byte of any file changed, and any file cut anywhere: an error of ours that names the file, or what is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from pipeline import ForebayError, Task
from pipeline.checkpoint import verify
from pipeline.checkpoint.lines import Line
from pipeline.store.frames import EVENTS, Frame, scan
from pipeline.store.journal import payload_place, read_journals
from pipeline.store.layout import Layout
from pipeline.wiring import recovering
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, lasting, train
from tests.support.disk import tree
from tests.support.opening import find, little_memory, told
from tests.support.runs import task

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
STRIDE = 1 if SOAK > 1 else 20
"""One of so many changes is made, and all of them under ``make soak``; no multiple of 3, so that each way comes up."""
MEMORY = 256 << 20
JOURNAL, SEGMENT = "journals/000001-0000.fbj", "segments/000001-0000-000001.fbs"


def tasks() -> list[Task]:
    return [task(6, lasting({2: 0.5, 4: 3.0}), group_size=2)]


class Run(NamedTuple):
    """A run of one life, and what is found in it when its journal ends after any of its events."""

    directory: str
    files: dict[str, bytes]
    newest: str
    promised: int
    frames: dict[str, list[Frame]]
    named: dict[int, int]
    """By the number of its event: where in the segment a payload lies."""
    synced: int
    prefixes: list[Any]

    def look(self) -> Any:
        return told(find(self.directory, tasks(), ["trained"]))


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A step trained and saved, a batch out, groups finished before the save and after it, and one half done."""
    async with inline_pipeline(tasks(), directory=str(tmp_path / "1"), concurrency=3, capacity=6) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await train(pipe, trained, await pipe.get_batch(1))
        await anyio.sleep(1.1)
        await (await pipe.save(1)).committed()
        await pipe.get_batch(1)
        await anyio.sleep(2.4)
        directory = crashed_copy(str(tmp_path / "1"), tmp_path / "run")
    layout = Layout(directory)
    marker = layout.read_run()
    assert marker is not None
    logged = list(read_journals(layout, run_tag=marker.tag))
    places = {each.sequence: place[2].offset for each in logged if (place := payload_place(each)) is not None}
    frames = {name: list(scan(os.path.join(directory, name), run_tag=marker.tag)) for name in (JOURNAL, SEGMENT)}
    synced = max(each.header.sequence for each in frames[JOURNAL] if each.header.kind != EVENTS)
    stored = find(directory, tasks(), ["trained"]).stored
    (position,) = stored.manifest.journals
    newest = os.path.relpath(stored.folder, directory)
    made = Run(directory, tree(directory), newest, position.bytes, frames, places, synced, [])
    for last in range(len(logged) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(recovering, "find_line", lambda *_, last=last, **__: Line([(1, 0, last)], frozenset()))
            made.prefixes.append(made.look())
    assert made.prefixes[-1] == made.look()
    assert position.sequence == synced < len(logged) - 5
    return made


def changes(raw: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Every STRIDE-th of the changes of a file: where, what is left, and whether an end was cut off."""
    for place in range(len(raw)):
        for way in range(3):
            if (3 * place + way) % STRIDE:
                continue
            if way == 2:
                yield place, raw[:place], True
            else:
                mask = 0xFF if way else 1 << place % 8
                yield place, raw[:place] + bytes([raw[place] ^ mask]) + raw[place + 1 :], False


def hit(run: Run, name: str, place: int, cut: bool) -> list[Frame]:
    """The frames that a change leaves damaged, zeros at their end apart."""
    ends = [(frame, frame.offset + 64 + len(frame.payload)) for frame in run.frames[name]]
    return [frame for frame, end in ends if place < end and (cut or place >= frame.offset)]


def expected(run: Run, name: str, place: int, cut: bool) -> Any:
    """What is found after a change of a journal or a segment; None where there must be an error."""
    damaged = hit(run, name, place, cut)
    if not damaged:
        return run.prefixes[-1]
    if name == JOURNAL:
        first = damaged[0].offset
        whole = [each for each in run.frames[name] if each.offset < first and each.header.kind == EVENTS]
        marked = not cut and any(each.offset > first and each.header.kind != EVENTS for each in run.frames[name])
        return None if first < run.promised or marked else run.prefixes[sum(each.header.number for each in whole)]
    gone = {each.offset for each in damaged}
    if not needed(run.prefixes[-1]) & gone:
        return run.prefixes[-1]
    tail = min((number for number, at in run.named.items() if at in gone and number > run.synced), default=None)
    return None if tail is None or needed(run.prefixes[tail - 1]) & gone else run.prefixes[tail - 1]


def needed(found: Any) -> set[int]:
    """Where the payloads lie that are still to be trained."""
    return {at.offset for members in found[2].values() for at in members.values()}


def check(run: Run, name: str, place: int, cut: bool) -> str:
    """Open the changed run in both ways. Returns how it ended."""
    where, found, refusal = f"{name} at byte {place}", None, ""
    try:
        found = run.look()
    except ForebayError as error:
        refusal = str(error)
    # What the marker says of the run is compared with what each file says.
    assert found is not None or name in refusal or (name == "run.json" and run.directory in refusal), (where, refusal)
    if name in run.frames:
        assert found == expected(run, name, place, cut), where
    elif name.startswith(run.newest) and not name.endswith("manifest.json"):
        assert found is None, where
    else:  # spaces may be others in a manifest, and older generations are not looked at
        assert found is None or found == run.prefixes[-1], where
    try:
        verified = verify(run.directory)
    except ForebayError:
        return "refused" if found is None else "refused alone"
    assert found is not None or not verified.whole, where
    # Of a journal that was cut between two records nobody can tell.
    seen = name != JOURNAL or any(frame.offset < place for frame in hit(run, name, place, cut))
    assert found in (None, run.prefixes[-1]) or verified.unpromised or not verified.whole or not seen, where
    return "damaged" if found is None else "whole" if found == run.prefixes[-1] else "shorter"


@pytest.mark.slow
@pytest.mark.virtual_time
@pytest.mark.timeout(120 * SOAK)
async def test_every_changed_byte_and_every_cut_is_an_error_of_ours_or_leaves_what_is_whole(run: Run) -> None:
    ways: dict[str, set[str]] = {}
    with little_memory(MEMORY):
        for name, raw in run.files.items():
            path = Path(run.directory, name)
            for place, content, cut in changes(raw):
                path.write_bytes(content)
                ways.setdefault(name, set()).add(check(run, name, place, cut))
            path.write_bytes(raw)
    assert run.look() == run.prefixes[-1]
    assert ways[JOURNAL] == {"damaged", "shorter", "whole"}
    assert ways[SEGMENT] == {"damaged", "shorter", "whole"}
    assert "damaged" in ways["run.json"], "the manifests say which run it is, and verify goes on to name the marker"
    assert not any("refused alone" in each for each in ways.values()), ways
    assert ways[f"{run.newest}/trainer/trained.safetensors"] == {"damaged"}
