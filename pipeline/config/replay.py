"""Options of a replay buffer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pipeline.config.base import Options
from pipeline.config.removing import Remove, removal
from pipeline.config.saved import SavingOptions
from pipeline.config.selecting import Prioritized, Selection, Uniform, WithoutReplacement, selection
from pipeline.errors import ConfigError

MOST_ROWS = 2**31 - 1
"""That a buffer holds, or an episode has: how far rows lie apart is kept in 32 bits."""


class Limiter(Options, frozen=True, tag="limiter", tag_field="limit"):
    """How the number of sampled rows follows that of added ones.

    With a ratio, let ``debt = ratio * added - sampled``. It may move by ``error_buffer`` to either side of
    ``ratio * min_size``: a row may be added while the debt stays within the upper bound, and one may be sampled while
    it stays within the lower one. This is the rule of Reverb's ``SampleToInsertRatio`` (arXiv:2102.04736), but that
    rows are let in at any rate while there are less than ``min_size``. Blocks of k rows and batches of m need
    ``ratio * k + m`` of no more than twice ``error_buffer``, or each may come to wait for the other for ever.

    Attributes:
        min_size: how many rows there must be before any is sampled.
        ratio: how often each row is to be sampled, on average; None: nothing is held back but by ``min_size``.
        error_buffer: how far the debt may move, in sampled rows; by default the largest of 1, ``ratio`` and
            ``ratio * min_size / 10``.
    """

    min_size: int = 1
    ratio: float | None = None
    error_buffer: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("min_size", 1)
        if self.ratio is None:
            if self.error_buffer is not None:
                raise ConfigError.of("error_buffer", self.error_buffer, "it bounds a ratio, and there is none: ratio=")
            return
        if not 0 < self.ratio <= 1e9:
            raise ConfigError.of("ratio", self.ratio, "a number above 0 is needed, or None")
        if self.error_buffer is not None and not max(1.0, self.ratio) <= self.error_buffer <= 1e15:
            raise ConfigError.of(
                "error_buffer",
                self.error_buffer,
                f"at least max(1, ratio) = {max(1.0, self.ratio):g} is needed: with less there comes a time at which "
                "neither a row can be added nor one sampled",
            )

    @property
    def buffer(self) -> float:
        """How far the debt may move."""
        ratio = self.ratio or 0.0
        return max(1.0, ratio, ratio * self.min_size / 10) if self.error_buffer is None else self.error_buffer


class Fields(Options, frozen=True):
    """The columns that episodes, returns and frames are made of; a column that is not there plays no part.

    Attributes:
        obs, reward, next_obs: names of columns, or of groups of them (``obs`` stands for ``obs.camera`` as well).
        terminated, truncated: bool columns: the episode ended with the row, in a state that has no future, or was cut
            from outside.
        done: a bool column that does not tell the two apart: taken for ``terminated``, unless ``truncated`` is set.
    """

    obs: str = "obs"
    reward: str = "reward"
    next_obs: str = "next_obs"
    terminated: str = "terminated"
    truncated: str = "truncated"
    done: str = "done"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text(*self.__struct_fields__)


class ReplayOptions(SavingOptions, frozen=True, kw_only=True):
    """Everything that a :class:`~pipeline.replay.ReplayBuffer` was built with; of its folder, see
    :class:`~pipeline.config.SavingOptions`.

    Attributes:
        capacity: how many rows are held.
        select: which are sampled.
        limiter: when rows may be added and sampled.
        remove: which row goes when a new one comes to a full buffer; by default the oldest. See
            :class:`~pipeline.config.Remove`.
        seed: of every random choice.
        storage: where rows lie: in the ``memory`` of this process; or in memory that processes of this machine have
            in common, ``shared`` (Linux): see :meth:`~pipeline.replay.ReplayBuffer.share`; or in a file of
            ``directory``, ``mapped`` (Linux), so that there may be more of them than memory.
        returns: what a batch gives out: ``torch`` tensors or ``numpy`` arrays.
        fields: names of columns.
        share_next_obs: do not store the next observation of a row that is the observation of the next one of its
            episode; what is sampled is the same.
        compress: large columns (a kilobyte a row, or more), or groups of them, whose rows are held compressed in memory
            and on the disk: ``{"obs": "zlib"}``. What is sampled is the same, and takes longer.
        incomplete: what a save makes of episodes that have no end yet, and of those whose first rows have gone:
            ``keep`` has them as they are; ``truncate`` has the newest row of an open one as ``truncated``; ``drop``
            leaves the rows of both out. The buffer itself stays as it is.
        timeout: seconds that ``extend`` and ``sample`` wait for the limiter, unless they are told otherwise; None: as
            long as it takes. With 0 they raise at once, as in a plain loop nobody else could change anything.
    """

    capacity: int
    select: Selection = Uniform()
    limiter: Limiter = Limiter()
    remove: Remove = Remove()
    seed: int = 0
    storage: Literal["memory", "shared", "mapped"] = "memory"
    returns: Literal["torch", "numpy"] = "torch"
    fields: Fields = Fields()
    share_next_obs: bool = False
    compress: dict[str, Literal["zlib"]] | None = None
    incomplete: Literal["keep", "truncate", "drop"] = "keep"
    timeout: float | None = 0.0

    @classmethod
    def build(cls, capacity: int, given: Mapping[str, Any]) -> ReplayOptions:
        """Build from keywords, in which ``select`` may be a name and the others mappings.

        Raises:
            ConfigError: the message names the option.
        """
        values = dict(given)
        values["select"] = selection(values.get("select", Uniform()))
        values["limiter"] = Limiter.of(values.get("limiter"))
        values["remove"] = removal(values.get("remove"))
        values["fields"] = Fields.of(values.get("fields"))
        if isinstance(values.get("directory"), os.PathLike):
            values["directory"] = os.fspath(values["directory"])
        known = set(cls.__struct_fields__)
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ConfigError(
                f"ReplayBuffer has no option {unknown[0]!r}; it has {', '.join(sorted(known))}", option=unknown[0]
            )
        try:
            return cls(capacity=capacity, **values)
        except msgspec.ValidationError as error:
            raise ConfigError(f"ReplayBuffer: {error}") from None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("capacity", 1)
        if self.capacity > MOST_ROWS:
            raise ConfigError.of("capacity", self.capacity, f"at most {MOST_ROWS} rows can be held")
        self._at_least("seed", 0)
        self._at_least("timeout", 0, none_ok=True)
        self._check_saving()
        if self.limiter.min_size > self.capacity:
            raise ConfigError.of(
                "min_size", self.limiter.min_size, f"capacity={self.capacity}: so many rows are never there"
            )
        if self.share_next_obs and self.compress and self.fields.next_obs in self.compress:
            raise ConfigError.of("compress", self.compress, "with share_next_obs no row holds a next observation")
        self._check_removal()
        if self.storage == "shared":
            self._check_shared()
        if self.storage == "mapped" and self.directory is None:
            raise ConfigError.of("storage", "mapped", "rows lie in a file of the run's folder; name it with directory=")
        if self.storage == "mapped" and self.compress:
            raise ConfigError.of("compress", self.compress, "rows of any length lie in memory: no storage='mapped'")

    def _check_shared(self) -> None:
        """Refuse what processes cannot have in common.

        Raises:
            ConfigError: the message names the option, and what to do instead.
        """
        of = "storage='shared': processes have rows, priorities and counters in common, and not"
        if self.compress:
            raise ConfigError.of(
                "compress", self.compress, f"{of} rows of any length; leave it out, or use one process"
            )
        if self.remove.by != "fifo":
            raise ConfigError.of("remove", self.remove.by, f"{of} an order of removal; leave it out: the oldest goes")
        if self.incomplete == "drop":
            raise ConfigError.of("incomplete", "drop", f"{of} rows that are gone; 'keep' and 'truncate' are allowed")

    def _check_removal(self) -> None:
        by, select = self.remove.by, self.select
        if by == "fifo":
            return
        if self.share_next_obs:
            raise ConfigError.of("share_next_obs", True, f"rows have no neighbours with remove={by!r}")
        if self.incomplete != "keep":
            raise ConfigError.of("incomplete", self.incomplete, f"rows are of no episode with remove={by!r}")
        windows = (select.window, select.window_trajectories) if isinstance(select, Uniform) else ()
        if any(window is not None for window in windows):
            raise ConfigError.of("select", select, f"a window is of neighbours, and there are none with remove={by!r}")
        if by == "lowest_priority" and not isinstance(select, Prioritized):
            raise ConfigError.of("remove", by, "priorities are those of select=Prioritized()")

    def check_batch(self, count: int) -> None:
        """Refuse a batch that could never be sampled.

        Raises:
            ConfigError: it is empty, or larger than what can be drawn without replacement, or than the limiter's range.
        """
        if count < 1:
            raise ConfigError.of("count", count, "must be at least 1")
        if isinstance(self.select, WithoutReplacement) and count > self.capacity:
            raise ConfigError.of("count", count, f"without replacement, at most capacity={self.capacity} can be drawn")
        if self.limiter.ratio is not None and count > 2 * self.limiter.buffer:
            raise ConfigError.of(
                "error_buffer",
                self.limiter.buffer,
                f"a batch of {count} is more than the limiter ever lets through at once ({2 * self.limiter.buffer:g}); "
                "sample fewer at once, or raise error_buffer",
            )
