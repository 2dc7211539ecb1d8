"""Datasets of LeRobot with videos, made here by PyAV (``av``) as LeRobot makes them, but with times, orders and faults
that it would not write. Needs ``pyarrow``, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS = 10
TICK = Fraction(1, 90_000)
"""The unit of the times of films."""


class Film(NamedTuple):
    """A video file."""

    times: Sequence[float]
    """When its frames are shown, in seconds."""
    size: tuple[int, int] = (48, 64)
    codec: str = "libx264"
    options: tuple[tuple[str, str], ...] = (("g", "2"), ("crf", "30"))
    """Of the encoder; these are LeRobot's."""


class Take(NamedTuple):
    """An episode of a camera: in which film it is, and from when on."""

    film: int
    begin: float


def pictures(film: Film, seed: int) -> np.ndarray:
    """Return what a film shows, [frames, height, width, 3]: no two pictures are alike."""
    y, x = np.mgrid[0 : film.size[0], 0 : film.size[1]]
    each = [
        np.stack([x + y, 200 - x, np.full_like(x, (seed * 90 + 35 * at) % 250)], -1) for at in range(len(film.times))
    ]
    found: np.ndarray = np.clip(np.stack(each), 0, 255).astype(np.uint8)
    return found


def shoot(path: Path, film: Film, seed: int = 0) -> None:
    """Write a video file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream: Any = container.add_stream(film.codec, FPS, options=dict(film.options))
        stream.height, stream.width = film.size
        stream.pix_fmt, stream.time_base = "yuv420p", TICK
        stream.codec_context.time_base = TICK
        for seconds, picture in zip(film.times, pictures(film, seed), strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(seconds / TICK), TICK
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def sought(path: Path, seconds: float) -> np.ndarray:
    """Return the frame that is shown at a time, as one is found by itself: a seek to the key frame before it."""
    with av.open(str(path)) as container:
        stream: Any = container.streams.video[0]
        container.seek(max(0, round(seconds / stream.time_base)), stream=stream)
        frames = []
        for frame in container.decode(stream):
            frames.append(frame)
            if frame.time > seconds:
                break
        found: np.ndarray = min(frames, key=lambda frame: abs(frame.time - seconds)).to_ndarray(format="rgb24")
        return found


def write_dataset(
    folder: Path,
    rows: Sequence[Sequence[float]],
    cameras: Mapping[str, tuple[Sequence[Film], Sequence[Take]]],
    *,
    change: Callable[[dict[str, Any]], None] = lambda info: None,
    order: Sequence[int] | None = None,
) -> Path:
    """Write a dataset of version 3.0.

    Args:
        folder: where it goes.
        rows: the timestamps of each episode's frames.
        cameras: by name: its films, and where each episode is in them.
        change: changes what ``meta/info.json`` says.
        order: in which episodes come in the data; left out, by their numbers.
    """
    numbers = list(range(len(rows))) if order is None else list(order)
    lengths = [len(rows[number]) for number in numbers]
    table = {
        "action": pa.array(np.arange(sum(lengths), dtype=np.float32)),
        "timestamp": pa.array(np.concatenate([np.asarray(rows[number], np.float32) for number in numbers])),
        "frame_index": pa.array(np.concatenate([np.arange(length) for length in lengths])),
        "episode_index": pa.array(np.repeat(numbers, lengths)),
        "index": pa.array(np.arange(sum(lengths))),
        "task_index": pa.array(np.zeros(sum(lengths), np.int64)),
    }
    dtypes = {name: str(column.type).replace("float", "float32") for name, column in table.items()}
    features: dict[str, Any] = {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in dtypes.items()}
    told: dict[str, Any] = {"episode_index": np.arange(len(rows))}
    for seed, (name, (films, takes)) in enumerate(cameras.items()):
        features[name] = {"dtype": "video", "shape": [*films[0].size, 3], "names": ["height", "width", "channels"]}
        for number, film in enumerate(films):
            shoot(film_path(folder, name, number), film, seed)
        told[f"videos/{name}/chunk_index"] = np.zeros(len(rows), np.int64)
        told[f"videos/{name}/file_index"] = np.array([take.film for take in takes])
        told[f"videos/{name}/from_timestamp"] = np.array([take.begin for take in takes])
    info = {
        "codebase_version": "v3.0",
        "fps": FPS,
        "total_frames": sum(lengths),
        "total_episodes": len(rows),
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }
    change(info)
    for name, content in (("data", table), ("meta/episodes", told)):
        path = folder / name / "chunk-000" / "file-000.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table(content), path)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


def film_path(folder: Path, camera: str, number: int) -> Path:
    """Return where a film of a dataset lies."""
    return folder / "videos" / camera / "chunk-000" / f"file-{number:03d}.mp4"
