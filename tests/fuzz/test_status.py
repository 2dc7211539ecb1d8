"""Whatever lies in a run's folder, there is an answer to how it stands."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from pipeline.checkpoint import status_of
from pipeline.store.frames import EVENTS, crc32c, encode_frame, scan
from pipeline.store.layout import Layout
from tests.fuzz.mutations import mutated
from tests.support.opening import little_memory

GOLDEN = Path(__file__).parents[1] / "golden"
STATES = {"finished", "to be continued", "broken", "nothing"}
EACH = 60 * int(os.environ.get("FOREBAY_SOAK", "1"))


def sealed(path: Path, data: bytes, layout: Layout, rng: random.Random) -> bytes:
    """Changed bytes with checksums that fit, so that what lies behind them is read."""
    if path.name == "manifest.json":
        try:
            fields = {**msgspec.json.decode(data, type=dict[str, object]), "checksum": ""}
            return msgspec.json.encode({**fields, "checksum": f"{crc32c(msgspec.json.encode(fields)):08x}"})
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return data
    run = layout.read_run()
    if path.suffix != ".fbj" or run is None:
        return data
    frames = [frame for frame in scan(str(path), run_tag=run.tag) if frame.header.kind == EVENTS]
    if not frames:
        return data
    changed = rng.choice(frames)
    header, payload = changed.header, mutated(rng, [frame.payload for frame in frames])
    frame = encode_frame(
        EVENTS,
        payload,
        incarnation=header.incarnation,
        rank=header.rank,
        run_tag=run.tag,
        sequence=header.sequence,
        number=header.number,
    )
    return path.read_bytes()[: changed.offset] + b"".join(frame)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v1", "v1b", "v1c", "v1d", "v1e", "replay_v1b/run", "trajectories_v1/run"])
def test_of_every_folder_something_can_be_said(tmp_path: Path, name: str) -> None:
    rng = random.Random(f"status {name}")
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / name, folder)
    layout = Layout(str(folder))
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    seen = set()
    with little_memory(512 << 20):
        for number in range(EACH):
            path = files[number % len(files)]
            before = path.read_bytes()
            data = sealed(path, mutated(rng, [before]), layout, rng)
            path.write_bytes(data)
            try:
                seen.add(status_of(folder).state)
            except BaseException as error:
                raise AssertionError(f"{path}: {data[:200]!r}") from error
            path.write_bytes(before)
    assert seen <= STATES
    assert len(seen) > 1
