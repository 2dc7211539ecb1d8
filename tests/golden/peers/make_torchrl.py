"""Writes the folders ``torchrl_0_14_1``: run it where TorchRL 0.14.1 is installed, from the project's root.

The compiled sum tree of that release does not load with the torch that it was run with (2.13.0), so a list stands in
for it here; what writes the files is TorchRL's own. ``prefetch.pkl`` is removed: it is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import peers

HERE = Path(__file__).parent / "torchrl_0_14_1"
SLOTS = 12


class Tree(list[float]):
    """What the sampler asks of a sum tree, as far as it writes files."""

    def __init__(self, size: int) -> None:
        super().__init__([0.0] * size)

    def __setitem__(self, at: Any, value: Any) -> None:
        places = np.atleast_1d(at)
        for one, each in zip(places, np.broadcast_to(np.asarray(value), places.shape), strict=True):
            super().__setitem__(int(one), float(each))

    def query(self, begin: int, end: int) -> float:
        return sum(self[begin:end])


def rows(first: int, count: int) -> Any:
    from tensordict import TensorDict

    given = {name: torch.from_numpy(array) for name, array in peers.transitions(first, count).items()}
    done = (given["terminated"] | given["truncated"])[:, None]
    after = {
        "observation": given["next_observation"],
        "reward": given["reward"][:, None],
        "terminated": given["terminated"][:, None],
        "truncated": given["truncated"][:, None],
        "done": done,
    }
    return TensorDict(
        {
            "observation": given["observation"],
            "action": given["action"],
            "pixels": given["pixels"],
            "half": given["half"].bfloat16(),
            "done": torch.zeros_like(done),
            "collector": {"traj_ids": given["traj"]},
            "next": after,
        },
        [count],
    )


def main() -> None:
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer  # type: ignore[import-not-found]
    from torchrl.data.replay_buffers.samplers import prioritized  # type: ignore[import-not-found]

    prioritized.SumSegmentTreeFp32 = prioritized.MinSegmentTreeFp32 = Tree
    prioritized.SumSegmentTreeFp64 = prioritized.MinSegmentTreeFp64 = Tree
    sampler = prioritized.PrioritizedSampler(SLOTS, alpha=0.5, beta=0.4, eps=0.0)
    wrapped = TensorDictReplayBuffer(storage=LazyMemmapStorage(SLOTS), sampler=sampler, batch_size=4)
    wrapped.extend(rows(0, 9))
    wrapped.extend(rows(9, 8))  # rows 0 to 4 are gone
    number = torch.arange(5, 17)
    sampler.update_priority(number % SLOTS, torch.from_numpy(peers.priority(number.numpy())))
    wrapped.dumps(str(HERE / "wrapped"))
    envs = ReplayBuffer(storage=LazyMemmapStorage(2 * SLOTS, ndim=2), batch_size=4)
    envs.extend(TensorDict.stack([rows(0, 7).exclude("collector"), rows(100, 7).exclude("collector")], 0))
    envs.dumps(str(HERE / "envs"))
    single = ReplayBuffer(storage=LazyTensorStorage(SLOTS), batch_size=4)
    single.extend(torch.from_numpy(peers.transitions(0, 5)["observation"]))
    single.dumps(str(HERE / "single"))
    for path in HERE.rglob("prefetch.pkl"):
        path.unlink()


if __name__ == "__main__":
    main()
