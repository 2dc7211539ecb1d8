"""Writes the dataset ``minari_0_5_4``: run it where Minari 0.5.4 is installed with h5py, from the project's root."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tests.support import peers

HERE = Path(__file__).parent / "minari_0_5_4"
LENGTHS = (3, 2)


def main() -> None:
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    shutil.rmtree(HERE, ignore_errors=True)
    image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    observation = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (3,), np.float64), "image": image})
    HERE.mkdir()
    storage = MinariStorage.new(HERE / "data", observation_space=observation, action_space=spaces.Discrete(4))
    storage.update_metadata({"dataset_id": "peers/two-v0", "minari_version": "0.5.4"})
    storage.update_episodes(
        EpisodeBuffer(**peers.episode(number, length), seed=number) for number, length in enumerate(LENGTHS)
    )


if __name__ == "__main__":
    main()
