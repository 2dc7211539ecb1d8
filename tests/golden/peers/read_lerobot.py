"""Opens a dataset with LeRobot itself, and writes what it gives into a file of numpy: run it where LeRobot is
installed, ``python read_lerobot.py FOLDER OUT.npz``. It needs nothing of this project."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import numpy as np


def main(folder: str, out: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("forebay/read", root=folder)
    items = [dataset[at] for at in range(len(dataset))]
    found: dict[str, Any] = {}
    for name, feature in dataset.features.items():
        found[f"item/{name}"] = np.stack([item[name].numpy() for item in items])  # as a trainer gets them
        if feature["dtype"] != "image":
            column = dataset.hf_dataset.with_format("arrow")[:].column(name)
            found[f"held/{name}"] = np.array(column.to_pylist(), feature["dtype"])  # as they lie in the file
    meta = dataset.meta
    told = {
        "fps": dataset.fps,
        "episodes": [[int(each[f"dataset_{side}_index"]) for side in ("from", "to")] for each in meta.episodes],
        "tasks": [item["task"] for item in items],
        "features": dataset.features,
        "stats": {name: {key: value.tolist() for key, value in each.items()} for name, each in meta.stats.items()},
    }
    steps = [0.0, 1 / dataset.fps]
    moved = LeRobotDataset("forebay/read", root=folder, delta_timestamps={"action": steps})
    found["pairs/action"] = np.stack([moved[at]["action"].numpy() for at in range(len(moved))])
    found["pairs/pad"] = np.stack([moved[at]["action_is_pad"].numpy() for at in range(len(moved))])
    told["after one more"] = _gone_on(folder, f"{out}-more")
    np.savez(out, told=json.dumps(told), **found)


def _gone_on(folder: str, copy: str) -> list[int]:
    """Record an episode of two frames into a copy; return how many frames and episodes it has then."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.datasets.utils import DEFAULT_FEATURES

    shutil.copytree(folder, copy)
    dataset = LeRobotDataset("forebay/read", root=copy)
    features = {name: each for name, each in dataset.features.items() if name not in DEFAULT_FEATURES}
    for _ in range(2):
        frame: dict[str, Any] = {
            name: np.zeros(each["shape"], "uint8" if each["dtype"] == "image" else each["dtype"])
            for name, each in features.items()
        }
        dataset.add_frame({**frame, "task": "one more"})
    dataset.save_episode()
    dataset.finalize()
    whole = LeRobotDataset("forebay/read", root=copy)
    return [len(whole), whole.num_episodes, int(whole[len(whole) - 1]["episode_index"])]


if __name__ == "__main__":
    main(*sys.argv[1:])
