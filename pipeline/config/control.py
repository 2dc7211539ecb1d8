"""The option of where a run is asked over HTTP."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from pipeline.config.base import Options
from pipeline.errors import ConfigError

_PLACE = re.compile(r"(\[[^\]]*\]|[^:]*):(\d{1,9})")
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
_TOKEN = re.compile(r"[!-~]{1,512}")


class Control(Options, frozen=True, kw_only=True):
    """Where a run listens to requests over HTTP: ``Control(host="127.0.0.1", port=8765)``, or ``"127.0.0.1:8765"``."""

    host: str = "127.0.0.1"
    """The address to listen at. Another one than of this machine's loopback needs a token."""
    port: int = 0
    """0: any that is free; the log and ``forebay status RUN`` say which. Of several ranks each takes the one of its own
    number further on."""
    token: str | None = None
    """What a request has to bring as ``Authorization: Bearer TOKEN``. It is written nowhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _HOST.fullmatch(self.host):
            raise ConfigError.of("host", self.host, "the address of a network interface is needed, as 127.0.0.1")
        if not 0 <= self.port < 2**16:
            raise ConfigError.of("port", self.port, "a number from 0 to 65535 is needed")
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise ConfigError("token=...: 1 to 512 signs of printable ASCII without spaces are needed", option="token")
        if self.token is None and not self.on_loopback:
            why = "whoever reaches it could stop the run; give a token= as well, or listen at 127.0.0.1"
            raise ConfigError.of("host", self.host, why)

    def __repr__(self) -> str:
        return f"Control(host={self.host!r}, port={self.port}, token={'...' if self.token else None})"

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine's processes reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def read(cls, given: Any) -> Control | None:
        """Build it from what the option ``control`` may be.

        Raises:
            ConfigError: it is something else, or not safe; ``option`` is ``control``.
        """
        if given is None or isinstance(given, cls):
            return given
        try:
            if isinstance(given, str):
                match = _PLACE.fullmatch(given)
                given = {"host": match[1].strip("[]"), "port": int(match[2])} if match else None
            if isinstance(given, Mapping):
                return cls.of(given)
        except ConfigError as error:
            raise ConfigError(f"control: {error}", option="control") from None
        raise ConfigError("control: 'HOST:PORT', a Control, or a mapping of its options is needed", option="control")


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, as plain values, as they may stand in a manifest."""
    control = options.get("control")
    return dict(options) if control is None else {**options, "control": {**control, "token": None}}
