"""A task out of an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import ConfigError
from pipeline.interfaces import Source
from pipeline.task import Task
from tasks.chat import ChatClient
from tasks.chat import recorder as recorder_of
from tasks.verifiers.classic import Classic
from tasks.verifiers.episodes import Episodes
from tasks.verifiers.sources import Rows, TaskItems


def verifiers_task(
    env: Any,
    *,
    client: ChatClient,
    name: str = "",
    source: Source | None = None,
    sampling: Mapping[str, Any] | None = None,
    reward: Callable[[Any], float] | None = None,
    group_size: int = 1,
    **options: Any,
) -> Task:
    """Return a task whose attempts are rollouts of an environment, with the reward of its own rubric.

    Traces have ``prompt_ids`` [p], ``completion_ids``, ``completion_mask``, ``logprobs`` and ``versions`` [c], as of
    :class:`tasks.chat.Session`; ``info`` has ``rewards`` and ``metrics`` by the environment's names, and the messages.
    An episode that the environment gives up is an attempt that failed.

    Args:
        env: an ``Env`` of ``verifiers.v1``, or an ``Environment``.
        client: whom to ask; tasks may share one.
        name: of the task; by default the environment's own.
        source: other items than those that the environment trains on: rows of its data set, or its tasks.
        sampling: fields of each request, before those of the client.
        reward: a function of an ``Env``'s ``Episode``, instead of the mean reward of its agents that are trained.
        group_size: as of :class:`pipeline.Task`.
        options: what else :class:`pipeline.Task` takes: ``share=``, ``timeout=``, ``on_failure=``, ...

    Raises:
        ConfigError: it is no environment, or an option does not go with it.
        ImportError: the package is not installed.
    """
    _require()
    if not isinstance(client, ChatClient):
        raise ConfigError.of("client", client, "chat.client(...) is needed")
    for option in ("run", "resource"):
        if option in options:
            raise ConfigError(f"{option}=: a task of an environment has its own", option=option)
    recorder = recorder_of(client)
    played: Any
    if callable(getattr(env, "run_episode", None)) and hasattr(env, "taskset"):
        played, items = Episodes(env, recorder, sampling, reward), source or TaskItems(env.taskset)
    elif callable(getattr(env, "rollout", None)) and hasattr(env, "rubric"):
        played, items = Classic(env, recorder, sampling, group_size), source or Rows(env)
        _check_classic(env, played, reward, group_size, options.get("min_group"))
    else:
        raise ConfigError.of("env", env, "an Env of verifiers.v1, or an Environment, is needed: verifiers loads them")
    return Task(name or played.name, source=items, run=played.run, resource=played, group_size=group_size, **options)


def _check_classic(env: Any, played: Classic, reward: Any, group_size: int, min_group: int | None) -> None:
    if reward is not None:
        raise ConfigError("reward=: a Rubric has one reward; give the environment another rubric", option="reward")
    if played.grouped and min_group not in (None, group_size):
        raise ConfigError(
            f"min_group={min_group}: rewards of {type(env).__name__} are of whole groups, of all {group_size} members; "
            "leave it out",
            option="min_group",
        )


def _require() -> None:
    try:
        import verifiers  # noqa: F401
    except ImportError as error:
        raise ImportError("tasks.verifiers needs the extra verifiers: pip install 'forebay[verifiers]'") from error
