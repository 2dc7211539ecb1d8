"""Gymnasium: environments as resources, whole episodes, and the right rows of vector environments.

The package is called ``gym`` so that nothing in it can ever stand in for ``import gymnasium``, which happens
here and nowhere else in ``tasks``.
"""

from __future__ import annotations

try:
    import gymnasium as _gymnasium  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "gymnasium":
        raise
    raise ImportError("tasks.gym needs Gymnasium: pip install 'forebay[gym]'", name="gymnasium") from error

from tasks.gym.envs import gym_env as gym_env
from tasks.gym.envs import make_env as make_env
from tasks.gym.envs import random_actions as random_actions
from tasks.gym.envs import vector_episodes as vector_episodes
from tasks.gym.episodes import Episode as Episode
from tasks.gym.episodes import episode as episode
from tasks.gym.rows import Cut as Cut
from tasks.gym.rows import Ended as Ended
from tasks.gym.rows import Rows as Rows
from tasks.gym.rows import shared_next_obs as shared_next_obs
from tasks.gym.vector import VectorRows as VectorRows
