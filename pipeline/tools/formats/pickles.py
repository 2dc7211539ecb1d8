"""Files that only their own library may open, because they can run code as they are read: how to export them there."""

from __future__ import annotations

import os
import zipfile

from pipeline.errors import ConfigError

_SUFFIXES = (".pkl", ".pickle", ".pth", ".joblib", ".dill")
XTUNER_BUFFER = "replay_buffer.pth"

STABLE_BASELINES3 = """\
# where Stable-Baselines3 is installed; for a ReplayBuffer, not a DictReplayBuffer
import numpy as np
from safetensors.numpy import save_file
from stable_baselines3.common.save_util import load_from_pkl

b = load_from_pkl({path!r})
lost = int(b.optimize_memory_usage)  # of the oldest row the observation is gone then
order = np.arange(b.pos + lost, b.pos + b.buffer_size) % b.buffer_size if b.full else np.arange(b.pos)
done, cut = b.dones[order].astype(bool), b.timeouts[order].astype(bool)
late = b.observations[(order + 1) % b.buffer_size] if b.optimize_memory_usage else b.next_observations[order]
envs = done.shape[1]
before = np.concatenate([np.zeros((1, envs), np.int64), np.cumsum(done, 0)[:-1]])
rows = {{
    "obs": b.observations[order], "action": b.actions[order], "reward": b.rewards[order], "next_obs": late,
    "terminated": done & ~cut, "truncated": cut, "#episode": before * envs + np.arange(envs),
}}
save_file({{k: np.ascontiguousarray(v.reshape(-1, *v.shape[2:])) for k, v in rows.items()}}, "rows.safetensors")
"""
XTUNER = """\
# where XTuner is installed
import json
import torch

state = torch.load({path!r}, map_location="cpu", weights_only=False)["storage_state"]
groups = state["items"] if "items" in state else state["df"].to_dict("records")
with open("rollouts.jsonl", "w") as out:
    for group in groups:
        get = group.get if isinstance(group, dict) else lambda name: getattr(group, name)
        for member, one in enumerate(get("item")):
            if one.status.value != "completed":
                continue
            steps = one.response_model_steps or [0]
            score = one.reward["score"] if isinstance(one.reward, dict) else one.reward
            ids, logs = one.response_ids or [], one.logprobs or []
            lists = {{"prompt_ids": ("I64", one.prompt_ids), "completion_ids": ("I64", ids), "logprobs": ("F32", logs)}}
            tensors = {{
                f"0.{{k}}": {{"dtype": kind, "shape": [len(v)], "data": torch.tensor(v, dtype=dtypes[kind]).tolist()}}
                for dtypes in [{{"I64": torch.int64, "F32": torch.float32}}] for k, (kind, v) in lists.items()
            }}
            out.write(json.dumps({{
                "uid": int(get("uid")), "member": member, "task": get("task_name"), "reward": float(score),
                "oldest": min(steps), "newest": max(steps), "tokens": len(ids), "agents": [""], "policies": [""],
                "info": {{"message": one.message, "response": one.response}}, "tensors": tensors,
            }}) + "\\n")
"""


def is_pickle(path: str) -> bool:
    """Whether a file can be read by unpickling it alone."""
    return path.endswith(_SUFFIXES) and not os.path.isdir(path)


def refusal(path: str) -> ConfigError:
    """Return the error for such a file: it says what to run where it came from, and what to do then."""
    if os.path.basename(path) == XTUNER_BUFFER or (path.endswith(".pth") and _is_torch(path)):
        what, script, made = "XTuner's buffer", XTUNER, "rollouts.jsonl"
    else:
        what, script, made = "a buffer of Stable-Baselines3", STABLE_BASELINES3, "rows.safetensors"
    return ConfigError(
        f"{path}: a pickle, which runs code as it is read, so it is not opened here. If it is {what}, run this where "
        f"it was made, and `forebay import {made} OUT` then:\n\n{script.format(path=path)}",
        option="path",
    )


def _is_torch(path: str) -> bool:
    return os.path.isfile(path) and zipfile.is_zipfile(path)
