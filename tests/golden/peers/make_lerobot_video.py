"""Writes datasets with videos, ``lerobot_0_4_4_av1``, ``lerobot_0_4_4_h264`` or ``lerobot_0_3_3_av1``, and into
``lerobot_videos.json`` the checksums of the pictures that LeRobot itself reads out of them: run it where that LeRobot
is installed with torchcodec, which looks for FFmpeg's libraries, with an argument ``av1`` or ``h264``, from the
project's root. Statistics, which are not read here, are removed."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

VERSION = version("lerobot")
HERE = Path(__file__).parent
# By its path: draccus, which LeRobot needs, brings a package called `tests`.
PEERS = runpy.run_path(str(HERE.parents[1] / "support" / "peers.py"))
CODECS = {"av1": "libsvtav1", "h264": "h264"}


def main(codec: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    name = f"lerobot_{VERSION.replace('.', '_')}_{codec}"
    where = HERE / name
    shutil.rmtree(where, ignore_errors=True)
    features: dict[str, Any] = {"action": {"dtype": "float32", "shape": (2,), "names": None}}
    for camera, shape in PEERS["LEROBOT_CAMERAS"].items():
        names = ["channels", "height", "width"] if shape[0] == 3 else ["height", "width", "channels"]
        features[camera] = {"dtype": "video", "shape": shape, "names": names}
    own = {} if VERSION < "0.4" else {"vcodec": CODECS[codec]}
    dataset: Any = LeRobotDataset.create("peers/filmed", fps=30, features=features, root=where, **own)
    if VERSION >= "0.4":  # a few episodes in a file; the versions before always have one
        dataset.meta.update_chunk_settings(video_files_size_in_mb=0.0034)
    for number, length in enumerate(PEERS["LEROBOT_FILMED"]):
        pictures = {camera: PEERS["lerobot_pictures"](number, camera) for camera in PEERS["LEROBOT_CAMERAS"]}
        for at in range(length):
            frame = {camera: each[at] for camera, each in pictures.items()}
            frame["action"] = np.array([number, at], np.float32)
            if VERSION < "0.4":
                dataset.add_frame(frame, task="look")
            else:
                dataset.add_frame({**frame, "task": "look"})
        dataset.save_episode()
    if VERSION >= "0.4":
        dataset.finalize()
    _told(name, LeRobotDataset("peers/filmed", root=where))
    for unread in ("images", "meta/stats.json", "meta/episodes_stats.jsonl"):
        path = where / unread
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in where.glob("meta/episodes/*/*.parquet"):
        _without_statistics(path)


def _told(name: str, dataset: Any) -> None:
    """Write down what LeRobot reads: it gives channels first, from 0 to 1."""
    path = HERE / "lerobot_videos.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    items = [dataset[at] for at in range(len(dataset))]
    told[name] = {}
    for camera in PEERS["LEROBOT_CAMERAS"]:
        pictures = np.rint(np.stack([item[camera].numpy() for item in items]) * 255).astype(np.uint8)
        told[name][camera] = [zlib.crc32(each.transpose(1, 2, 0).tobytes()) for each in pictures]
    path.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


def _without_statistics(path: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    pq.write_table(table.select([name for name in table.column_names if not name.startswith("stats/")]), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
