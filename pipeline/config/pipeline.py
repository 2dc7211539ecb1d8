"""The options of a pipeline."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.config.base import LEAST, MOST, Options
from pipeline.config.control import Control
from pipeline.config.policies import Reroll, StalenessPolicy, staleness_policy
from pipeline.config.triggers import calendar_time, check_signals
from pipeline.errors import ConfigError

Durability: TypeAlias = Literal["none", "kill", "power"]
_MOST_OVERSAMPLE = 1000


class PipelineOptions(Options, frozen=True, kw_only=True):
    """Options of a :class:`~pipeline.Pipeline`."""

    directory: str | None = None
    """Folder of the run, made if absent. None keeps everything in memory."""
    concurrency: int = 64
    """Attempts in flight at once. An engine with fewer places for them lowers it."""
    max_staleness: int | None = None
    """Most steps that may have been trained since the oldest weights of a rollout: one of version v may be in the batch
    of step s while ``(s - 1) - v <= max_staleness``. None: any."""
    batch_groups: int | None = None
    """Groups of a batch, if that is known beforehand. Left out, the first ``get_batch`` tells; until then a run with
    ``max_staleness`` starts nothing, because it cannot know how far ahead is too far."""
    strategy: Literal["asynchronous", "synchronous"] = "asynchronous"
    """``synchronous``: nothing is produced but for the batch that is being waited for; batches are in draw order."""
    order: Literal["finished", "strict"] = "finished"
    """``strict``: batches are made in draw order, so that they never depend on how long rollouts take."""
    selector: Literal["stalest", "fifo", "freshest"] = "stalest"
    """Which finished groups a batch takes first: those of the oldest weights, those that finished first, or those of
    the newest weights (what is left over expires).
    ``stalest`` lets a slow rollout that finishes late into the next batch, where ``fifo`` may let it expire in the
    queue. ``strict`` order leaves no choice."""
    capacity: int | None = None
    """Most groups claimed and not yet trained. None: as many as staleness allows, else two batches."""
    oversample: float = 1.0
    """How many groups may be begun for each that a batch needs; what is left over is kept for the next ones.
    ``synchronous``: ``oversample * groups`` are begun for a batch and it takes those that finish first (in draw order
    if ``order="strict"``). ``asynchronous``: ``(oversample - 1) * groups`` more than staleness or two batches allow."""
    mixing: Literal["long_run", "batch"] = "long_run"
    """``long_run``: draws follow the shares of the tasks, and a batch takes what has finished. ``batch``: each batch is
    divided by the shares, to the largest remainder, so a slow task may hold every batch up. A task that has nothing
    left to give leaves its places to the others."""
    staleness_policy: StalenessPolicy = "drop"
    """What keeps rollouts within ``max_staleness``, beside the pacing of starts. It is checked where a batch is made,
    whatever the policy. ``gate``: nothing else, which bounds only batches in draw order. ``wait``: neither a batch nor
    the next version comes before what would thereby become too old has finished. ``drop``: a group that is
    too old is thrown away, and its item run again up to ``max_rerolls`` times. ``reroll``: so are its too old members
    alone; or ``Reroll(tail=n)``. ``mask``: the tensor ``versions`` of a rollout says which weights made each token, and
    those that are too old are masked; a group is dropped as above when nothing of it is left."""
    durability: Durability = "kill"
    """``none``: written at a save. ``kill``: written as it comes, so a killed process loses next to nothing. ``power``:
    synced as well, within a second or 64 MB of being written, so a loss of power takes no more than that
    (``docs/durability.md``)."""
    write_queue_bytes: int = 256 << 20
    """Bytes that may wait to be written before producers wait."""
    segment_bytes: int = 64 << 20
    """A payload segment is sealed when it is longer than this."""
    after_crash: Literal["reuse", "discard"] = "reuse"
    """What a resume does with rollouts that finished after its generation: use them, or set them aside, so that the
    buffer is exactly what it was at the save."""
    partial: bool = True
    """Whether a rollout may be made by the weights of several versions. False: a weight update finishes or aborts what
    runs, what an attempt has kept is not gone on from, and every rollout has one version."""
    max_rerolls: int = 3
    """How often a group that became too old is run again; then it is dropped as expired."""
    max_deaths: int = 3
    """Unplanned deaths of the process, or of a worker process, with an item in flight, past which the item is
    quarantined. A group that has finished since, and is run again because it became too old, begins at 0."""
    evaluation_share: float = 0.25
    """How much of ``concurrency`` evaluations may take from the training at most; one slot always."""
    seed: int = 0
    """Decides the order of items and every random stream of the run."""
    keep: int | None = 3
    """Generations kept, counted by distinct steps. None, or -1: all."""
    keep_every: int | None = None
    """Beside those, the newest generation of every step that this divides stays for good."""
    keep_within_s: float | None = None
    """And so does every generation that is younger than this, in seconds."""
    archive: Literal["none", "all"] | float = "none"
    """Payloads lie in segments, and a segment goes when no kept generation needs it. ``all``, or a share of them from 0
    to 1, stay for good: so what was trained can be looked at, or be trained again, later."""
    max_disk_bytes: int | None = None
    """Most that the run's folder may hold. From 90% of it on a generation is asked for, since that lets go what is not
    needed any more; at the bound nothing new is begun, and what is in flight is still written. Count the trainer's
    files of ``keep`` + 1 generations in."""
    save_every: int | None = None
    """Steps. A generation is committed when the weights have passed a multiple of it."""
    save_every_s: float | None = None
    """Seconds. A generation is committed that often, if the weights or what is not yet on the disk have changed."""
    stop_at: float | str | None = None
    """A time, in seconds since 1970 or as ISO 8601 text (local, unless it says otherwise), at which the run saves and
    stops. Making the file ``stop`` in the run's folder does the same at once."""
    signals: tuple[str, ...] | None = None
    """Signals at which the run saves and stops. None: SIGTERM, where a directory is given and the pipeline is opened in
    the main thread, as Python asks for."""
    save_signals: tuple[str, ...] = ()
    """Signals at which the run saves and goes on."""
    grace_s: float = 30.0
    """Seconds that a stop may take, as launchers grant them before they kill."""
    control: Control | str | None = None
    """Where requests to save, or to save and stop, are heard over HTTP, such as ``"127.0.0.1:0"``
    (``docs/control.md``); None: nowhere."""
    watchdog: float | None = 0.1
    """Seconds after which whoever holds the event loop is named in the log. None: off."""
    rank: int = 0
    """This trainer's data-parallel rank."""

    @classmethod
    def _check_types(cls, values: Mapping[str, Any]) -> None:
        if "staleness_policy" in values:
            staleness_policy(values["staleness_policy"])
        if "control" in values:
            Control.read(values["control"])
        super()._check_types(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "staleness_policy", staleness_policy(self.staleness_policy))
        msgspec.structs.force_setattr(self, "oversample", float(self.oversample))
        msgspec.structs.force_setattr(self, "control", Control.read(self.control))
        if self.directory is not None and (self.directory == "" or "\0" in self.directory):
            raise ConfigError.of("directory", self.directory, "a folder's name is needed, or None for memory alone")
        if self.keep == -1:  # as others write it
            msgspec.structs.force_setattr(self, "keep", None)
        for option in ("concurrency", "write_queue_bytes", "segment_bytes"):
            self._at_least(option, 1)
        for option in ("max_deaths", "max_rerolls", "rank"):
            self._at_least(option, 0)
        self._at_least("max_staleness", 0, none_ok=True)
        for option in ("capacity", "keep", "keep_every", "batch_groups", "save_every", "max_disk_bytes"):
            self._at_least(option, 1, none_ok=True)
        if self.capacity is not None and self.batch_groups is not None and self.batch_groups > self.capacity:
            raise ConfigError(
                f"batch_groups={self.batch_groups} is more than capacity={self.capacity}: such a batch never comes; "
                "raise capacity= or ask for less",
                option="batch_groups",
            )
        if not 0 < self.evaluation_share <= 1:
            raise ConfigError.of("evaluation_share", self.evaluation_share, "must be above 0 and at most 1")
        self._check_oversample()
        self._check_policy()
        self._check_triggers()
        if not 0 <= self.archived_share <= 1:
            raise ConfigError.of("archive", self.archive, "'none', 'all' or a share from 0 to 1 is needed")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError.of("seed", self.seed, "must fit in 64 bits")
        if self.watchdog is not None and not (math.isfinite(self.watchdog) and self.watchdog > 0):
            raise ConfigError.of("watchdog", self.watchdog, "seconds above 0 are needed, or None")
        if self.directory is None and self.durability == "power":
            raise ConfigError.of("durability", "power", "needs a directory")

    def _check_oversample(self) -> None:
        if not 1 <= self.oversample <= _MOST_OVERSAMPLE:
            raise ConfigError.of("oversample", self.oversample, f"a ratio of 1 to {_MOST_OVERSAMPLE} is needed")
        if self.oversample > 1 and self.max_staleness == 0 and self.strategy == "synchronous":
            raise ConfigError.of(
                "oversample", self.oversample, "max_staleness=0 would throw away all that a batch leaves over"
            )

    def _check_policy(self) -> None:
        policy = self.staleness_policy
        if policy == "drop":
            return
        why = None
        if self.max_staleness is None:
            why = "it enforces a bound, and max_staleness= says none"
        elif policy in ("gate", "wait") and self.oversample > 1:
            why = f"it counts on groups being begun for the batches that they fit in; oversample={self.oversample}"
        elif policy in ("gate", "wait") and self.mixing == "batch":
            why = "it counts on the order of batches, which mixing='batch' changes"
        elif policy == "gate" and not self.in_draw_order:
            why = "it bounds nothing where groups overtake each other; use order='strict', or another policy"
        elif policy == "wait" and not self.in_draw_order and self.selector != "stalest":
            why = f"batches must take the stalest first; selector={self.selector!r}"
        elif isinstance(policy, Reroll) and policy.tail > 1 and self.in_draw_order:
            why = "a batch in draw order waits for the next item, which would be waiting for others to gather"
        elif isinstance(policy, Reroll) and policy.tail > 1 and self.mixing == "batch":
            why = "a batch waits for its part of every task, which would be waiting for others to gather"
        if why is not None:
            raise ConfigError.of("staleness_policy", policy, why)

    def _check_triggers(self) -> None:
        for option in ("save_every_s", "grace_s", "keep_within_s"):
            seconds = getattr(self, option)
            if seconds is not None and not LEAST <= seconds <= MOST:
                raise ConfigError.of(option, seconds, f"seconds from {LEAST:g} to {MOST:g} are needed")
        stop, save = self.stop_signals, check_signals("save_signals", self.save_signals)
        if set(stop) & set(save):
            raise ConfigError.of("save_signals", self.save_signals, "a signal saves, or saves and stops")
        if self.stop_at is not None:
            calendar_time(self.stop_at)
        if self.directory is None:
            for option in ("save_every", "save_every_s", "save_signals", "max_disk_bytes", "control"):
                if getattr(self, option):
                    raise ConfigError.of(option, getattr(self, option), "needs a directory")

    @property
    def listens(self) -> Control | None:
        """``control``, as it was read."""
        assert not isinstance(self.control, str)
        return self.control

    @property
    def archived_share(self) -> float:
        """``archive`` as a number from 0 to 1."""
        return self.archive if isinstance(self.archive, (int, float)) else float(self.archive == "all")

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Numbers of ``signals``."""
        if self.signals is None:
            return (signal.SIGTERM,) if self.directory is not None else ()
        return check_signals("signals", self.signals)

    @property
    def stop_time(self) -> float | None:
        """``stop_at`` in seconds since 1970."""
        return None if self.stop_at is None else calendar_time(self.stop_at)

    @property
    def in_draw_order(self) -> bool:
        """Whether batches are made in draw order. A synchronous batch waits for all its groups anyway: in draw order
        it does not tell which of them a crash delayed."""
        return self.order == "strict" or (self.strategy == "synchronous" and self.oversample == 1)

    @property
    def reroll(self) -> Reroll | None:
        """The policy, if it is to run again what is too old member by member or in a tail batch."""
        if self.staleness_policy == "reroll":
            return Reroll()
        return self.staleness_policy if isinstance(self.staleness_policy, Reroll) else None
