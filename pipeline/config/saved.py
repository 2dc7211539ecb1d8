"""Options of a buffer that saves itself, without a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.config.base import LEAST, Options
from pipeline.config.control import Control
from pipeline.config.triggers import check_signals
from pipeline.errors import ConfigError


class SavingOptions(Options, frozen=True):
    """What a buffer is told of its folder.

    Attributes:
        directory: the run's folder, made if absent; None keeps everything in memory.
        keep: generations kept, counted by distinct steps; None, or -1: all.
        keep_every: beside those, the newest generation of every step that this divides stays for good.
        keep_within_s: and so does every generation that is younger than this, in seconds.
        save_every_s: seconds after which ``save_due`` says that a save is due.
        save_every: ``save_due(step)`` says so when the steps have passed a multiple of it.
        signals: names of signals that ask to stop: ``save_due`` says yes, and ``save`` leaves when it has committed.
            None: SIGTERM, where the buffer is used in the main thread.
        control: where requests to save, or to save and stop, are heard over HTTP, such as ``"127.0.0.1:0"``, from
            ``resume`` or the first ``save`` on (``docs/control.md``); None: nowhere.
    """

    directory: str | None = None
    keep: int | None = 3
    keep_every: int | None = None
    keep_within_s: float | None = None
    save_every_s: float | None = None
    save_every: int | None = None
    signals: list[str] | None = None
    control: Control | str | None = None

    @classmethod
    def _check_types(cls, values: Mapping[str, Any]) -> None:
        if "control" in values:
            Control.read(values["control"])
        super()._check_types(values)

    @property
    def listens(self) -> Control | None:
        """``control``, as it was read."""
        assert not isinstance(self.control, str)
        return self.control

    @property
    def archived_share(self) -> float:
        """No segment stays that no generation needs."""
        return 0.0

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Numbers of the signals that ask to stop."""
        return check_signals("signals", ("SIGTERM",) if self.signals is None else self.signals)

    def _check_saving(self) -> None:
        msgspec.structs.force_setattr(self, "control", Control.read(self.control))
        if self.keep == -1:  # as others write it
            msgspec.structs.force_setattr(self, "keep", None)
        for option in ("keep", "keep_every", "save_every"):
            self._at_least(option, 1, none_ok=True)
        for option in ("save_every_s", "keep_within_s"):
            self._at_least(option, LEAST, none_ok=True)
        check_signals("signals", self.signals or ())
        if self.directory is None:
            self._check_nothing_is_saved()

    def _check_nothing_is_saved(self) -> None:
        """Refuse options of a folder where there is none."""
        for field in msgspec.structs.fields(SavingOptions):
            value = getattr(self, field.name)
            if value != field.default:
                raise ConfigError.of(
                    field.name, value, "there is no directory=, so nothing is ever saved; give one, or leave this out"
                )
