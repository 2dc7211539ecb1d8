"""Goals that are set in hindsight, as options."""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config.base import Options
from pipeline.errors import ConfigError


class Hindsight(Options, frozen=True):
    """A share of the drawn rows is given out as if what their episode achieved later had been the goal.

    Source: Andrychowicz et al. 2017, Hindsight Experience Replay, arXiv:1707.01495, sections 3 and 4.5. Four relabelled
    rows to each that is not, as there, are ``ratio=0.8``::

        her = Hindsight(reward=lambda achieved, goal: env.unwrapped.compute_reward(achieved, goal, {}))
        batch = buffer.sample(256, hindsight=her)

    Attributes:
        reward: called with what the rows achieved [m, ...] and their new goals [m, ...], both arrays that are its own;
            returns the rewards [m].
        ratio: the share of a batch that is relabelled, 0 to 1; rounded to whole rows, which are chosen at random.
        strategy: whose achievement becomes the goal. ``future``: that of the row or of one of those after it, each
            alike. ``final``: that of the episode's last row, of an open episode its newest. ``episode``: that of
            any of its rows that are there. Never that of a row of another episode.
        goal: the column or columns that are replaced; by default ``desired_goal`` of ``obs`` and of ``next_obs``.
        achieved: the column of what had been achieved after each row; by default ``achieved_goal`` of ``next_obs``.
        terminated: called as ``reward`` is; returns whether the episode had ended with that [m] bool. Without it the
            column stays as it is.
    """

    reward: Any
    ratio: float = 0.8
    strategy: Literal["future", "final", "episode"] = "future"
    goal: str | tuple[str, ...] = ()
    achieved: str = ""
    terminated: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio <= 1:
            raise ConfigError.of("ratio", self.ratio, "a number from 0 to 1 is needed")
        for option in ("reward", "terminated"):
            value = getattr(self, option)
            if not callable(value) and not (option == "terminated" and value is None):
                raise ConfigError.of(option, value, "a function of (achieved, goal) is needed")
