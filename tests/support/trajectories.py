"""Trajectories for tests: every field of a transition tells where it is from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pipeline import TrajectoryBuffer


def trajectory(number: int, steps: int = 4, envs: int = 3, **more: Any) -> dict[str, Any]:
    """Fields of step t of environment b tell ``(number, t, b)``; small ones, a large one, and one that is neither."""
    where = torch.empty(steps, envs, 3, dtype=torch.int64)
    where[..., 0] = number
    where[..., 1] = torch.arange(steps)[:, None]
    where[..., 2] = torch.arange(envs)
    rewards = (1000 * number + 10 * where[..., 1] + where[..., 2]).float()
    image = rewards.long()[..., None].expand(*rewards.shape, 1500).to(torch.uint8)
    depth = rewards[..., None].expand(*rewards.shape, 300)
    fields = {
        "actions": where,
        "rewards": rewards,
        "dones": where[..., 1] == steps - 1,
        "curr_obs": {"image": image, "depth": depth, "half": rewards[..., None].bfloat16()},
        "zeros": torch.zeros(steps, envs, 2, dtype=torch.uint8) + (where[..., :1] % 200).to(torch.uint8),
    }
    return {**fields, "model_weights_id": f"w{number % 3}", "max_episode_length": number, **more}


def check(batch: dict[str, Any]) -> None:
    """Every field of a row is of the same step of the same environment of the same trajectory."""
    number, step, env = batch["actions"].reshape(-1, 3).T
    want = (1000 * number + 10 * step + env).float()
    assert torch.equal(batch["rewards"].reshape(-1), want)
    image = batch["curr_obs"]["image"].reshape(-1, 1500)
    assert torch.equal(image, want.long()[:, None].expand(-1, 1500).to(torch.uint8))
    assert torch.equal(batch["curr_obs"]["depth"].reshape(-1, 300), want[:, None].expand(-1, 300))
    assert torch.equal(batch["curr_obs"]["half"].reshape(-1), want.bfloat16())
    assert torch.equal(batch["zeros"].reshape(-1, 2)[:, 1].long(), number % 200)


def numbers(batch: dict[str, Any]) -> set[int]:
    """Which trajectories a batch is of."""
    return set(batch["actions"][:, 0].tolist())


def contents(buffer: TrajectoryBuffer) -> Any:
    """Everything that a buffer holds, and what it would draw next, in values that can be compared."""
    state = buffer.state_dict()
    rows = {name: np.asarray(array).reshape(len(array), -1)[:, :4].tolist() for name, array in state["rows"].items()}
    return {**state["state"], "sample_window_size": None, "weights": None}, buffer.infos(), rows


def draws(buffer: TrajectoryBuffer, count: int, size: int = 8) -> list[Any]:
    """What the next batches hold."""
    found = []
    for _ in range(count):
        batch = buffer.sample(size)
        check(batch)
        found.append(batch["actions"].tolist())
    return found


def run_for_ever(pipe: Any, directory: str) -> None:
    """A trainer's process, which says what it has reached: it adds, samples and saves, and the disk is never quiet."""
    options: dict[str, Any] = {"cache_size": 5, "capacity": 60, "sample_window_size": 0, "auto_save": True, "keep": 2}
    buffer, net = TrajectoryBuffer(directory=directory, seed=4, **options), torch.nn.Linear(64, 64)
    buffer.attach(net=net)
    step = buffer.resume().step
    pipe.send(("resumed", step))
    saving = None
    while True:
        step += 1
        with torch.no_grad():
            net.weight.fill_(step)
            net.bias.fill_(step)
        for number in range(10 * step, 10 * step + 10):
            buffer.add_trajectories([trajectory(number, 1 + number % 4, 1 + number % 3)])
        check(buffer.sample(16))
        if saving is not None and saving.done:
            pipe.send(("committed", saving.step))
            saving = None
        if saving is None:
            saving = buffer.save(step)
