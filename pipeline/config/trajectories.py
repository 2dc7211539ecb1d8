"""Options of a buffer of trajectories."""

from __future__ import annotations

from pipeline.config.base import Options
from pipeline.errors import ConfigError


class TrajectoryOptions(Options, frozen=True):
    """Everything that a :class:`~pipeline.replay.TrajectoryBuffer` was built with.

    Attributes:
        sample_window_size: of how many of the newest trajectories transitions are drawn; 0 or less: of all.
        cache_size: how many of the newest trajectories are held in memory; by default as many as the largest window so
            far. It must not be less than the window.
        seed: of every random choice.
        strict: ``sample`` raises where fewer transitions are in the window than are asked for; else it returns as many
            as there are.
        first_extra: fields that may have one row more at the beginning of each epoch, such as what a reset returned:
            [T + E, B, ...], where E divides T. That row is dropped.
        last_extra: fields that may have one row more at the end of each epoch, such as the value of the state after it.
            That row is dropped.
    """

    sample_window_size: int = 100
    cache_size: int | None = None
    seed: int = 0
    strict: bool = False
    first_extra: tuple[str, ...] = ("dones", "terminations", "truncations")
    last_extra: tuple[str, ...] = ("prev_values",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("cache_size", 1, none_ok=True)
        self._at_least("seed", 0)
        self._at_least("sample_window_size", -(2**63))
        self.check_window(self.sample_window_size)

    def check_window(self, window: int) -> None:
        """Compare a window with what is held.

        Raises:
            ConfigError: no whole number, or more than ``cache_size``.
        """
        if window.__class__ is not int:
            raise ConfigError.of("sample_window_size", window, "a whole number is needed")
        if self.cache_size is not None and not 0 < window <= self.cache_size:
            raise ConfigError.of(
                "sample_window_size",
                window,
                f"cache_size={self.cache_size}: older trajectories are not in memory; raise it, or leave it out",
            )
