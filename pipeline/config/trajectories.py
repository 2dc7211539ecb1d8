"""Options of a buffer of trajectories."""

from __future__ import annotations

from pipeline.config.saved import SavingOptions
from pipeline.errors import ConfigError


class TrajectoryOptions(SavingOptions, frozen=True):
    """Everything that a :class:`~pipeline.replay.TrajectoryBuffer` was built with; of its folder, see
    :class:`~pipeline.config.SavingOptions`.

    Attributes:
        sample_window_size: of how many of the newest trajectories transitions are drawn; 0 or less: of all.
        capacity: how many of the newest trajectories there are; by default all with ``directory``, and without it as
            many as are in memory.
        cache_size: how many of the newest trajectories are held in memory; by default as many as the largest window so
            far. The others lie on the disk with ``directory``; without it there are none, and the window must not be
            more.
        auto_save: with ``directory``, trajectories are written beside the training as they come; else when the cache
            has no room for them, or at ``save``. Either way they count once they are saved.
        seed: of every random choice.
        strict: ``sample`` raises where fewer transitions are in the window than are asked for; else it returns as many
            as there are.
        first_extra: fields that may have one row more at the beginning of each epoch, such as what a reset returned:
            [T + E, B, ...], where E divides T. That row is dropped.
        last_extra: fields that may have one row more at the end of each epoch, such as the value of the state after it.
            That row is dropped.
    """

    sample_window_size: int = 100
    capacity: int | None = None
    cache_size: int | None = None
    auto_save: bool = False
    seed: int = 0
    strict: bool = False
    first_extra: tuple[str, ...] = ("dones", "terminations", "truncations")
    last_extra: tuple[str, ...] = ("prev_values",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_saving()
        self._at_least("capacity", 1, none_ok=True)
        self._at_least("cache_size", 1, none_ok=True)
        self._at_least("seed", 0)
        self._at_least("sample_window_size", -(2**63))
        if self.auto_save and self.directory is None:
            raise ConfigError.of("auto_save", True, "there is nowhere to write to; add directory=")
        self.check_window(self.sample_window_size)

    def check_window(self, window: int) -> None:
        """Compare a window with what is held.

        Raises:
            ConfigError: no whole number, or more than ``cache_size`` where the rest is not on the disk.
        """
        if window.__class__ is not int or not -(2**63) <= window < 2**63:
            raise ConfigError.of("sample_window_size", window, "a whole number of 64 bits is needed")
        if self.directory is None and self.cache_size is not None and not 0 < window <= self.cache_size:
            raise ConfigError.of(
                "sample_window_size",
                window,
                f"cache_size={self.cache_size}: older trajectories are not in memory; raise it, leave it out, or add "
                "directory=",
            )
