"""Writes the dataset ``lerobot_0_4_4`` (version 3.0), or ``lerobot_0_3_3`` (2.1): run it where that LeRobot is
installed, from the project's root. What is not read here is removed: statistics, and the list of episodes."""

from __future__ import annotations

import runpy
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

VERSION = version("lerobot")
HERE = Path(__file__).parent
# By its path: draccus, which LeRobot needs, brings a package called `tests`.
PEERS = runpy.run_path(str(HERE.parents[1] / "support" / "peers.py"))
TASKS = ("lift the cube", "put it down")


def main() -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    where = HERE / f"lerobot_{VERSION.replace('.', '_')}"
    shutil.rmtree(where, ignore_errors=True)
    features = {
        name: {"dtype": dtype, "shape": shape, "names": ["height", "width", "channels"] if dtype == "image" else None}
        for name, (dtype, shape) in PEERS["LEROBOT_FEATURES"].items()
    }
    dataset: Any = LeRobotDataset.create("peers/three", fps=10, features=features, root=where, use_videos=False)
    for number, length in enumerate(PEERS["LEROBOT_LENGTHS"]):
        episode = PEERS["lerobot_episode"](number)
        for at in range(length):
            frame = {name: episode[name][at] for name in features}
            task = TASKS[episode["task_index"][at]]
            if VERSION < "0.4":
                dataset.add_frame(frame, task=task)
            else:
                dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    if VERSION >= "0.4":
        dataset.finalize()
    for unread in ("images", "meta/episodes", "meta/stats.json", "meta/episodes_stats.jsonl"):
        path = where / unread
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
