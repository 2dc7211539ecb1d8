"""What a worker process begins with: run as a script, by its path, with nothing of the library imported.

The argument is a descriptor: the socket to the process that started it. What is to be imported from where comes first
on it, as JSON.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1
_LIGHT = {"Context": "pipeline.runner.context"} | dict.fromkeys(
    ("Item", "Rollout", "SourceMark", "Trace"), "pipeline.records"
)


def main() -> None:
    """Serve until there is nobody to serve, or until told to stop."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    # Handlers that do nothing, and not SIG_IGN, which whatever a runner starts would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _left_to_the_parent)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()
    setup = _receive(sock)
    _end_with(setup["parent"])
    sys.path[:], sys.argv = setup["path"], setup["argv"]
    install_light_packages()
    from pipeline.engines.worker import loading

    loading.script = setup["script"]
    if setup["backend"]:
        from pipeline.engines.worker import asynchronous

        asynchronous.serve(sock, setup["backend"])
    else:
        from pipeline.engines.worker import plain

        plain.serve(sock)


def _left_to_the_parent(number: int, frame: FrameType | None) -> None:
    pass


def _receive(sock: socket.socket) -> dict[str, Any]:
    length = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little")
    data = sock.recv(length, socket.MSG_WAITALL) if length else b""
    if not length or len(data) < length:
        os._exit(1)
    found: dict[str, Any] = json.loads(data)
    return found


def _end_with(parent: int) -> None:
    """Make the kernel end this process when ``parent`` does, where it can. Elsewhere a guardian does it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def install_light_packages() -> None:
    """Let ``from forebay import Rollout`` import what it names, and not the whole library with torch, which takes
    seconds and hundreds of megabytes: a runner's module needs a few light names.

    ``forebay`` and ``pipeline`` stand in ``sys.modules`` as packages that find these names at once. Any other name
    imports the package as it is.
    """
    for name in ("pipeline", "forebay"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None and name not in sys.modules:
            sys.modules[name] = _Package(name, spec)


class _Package(ModuleType):
    def __init__(self, name: str, spec: ModuleSpec) -> None:
        super().__init__(name)
        assert spec.loader is not None
        assert spec.submodule_search_locations is not None
        self.__spec__, self.__loader__, self.__package__ = spec, spec.loader, name
        self.__path__, self.__file__ = spec.submodule_search_locations, spec.origin
        self._execute = spec.loader.exec_module
        self._whole = False

    def __getattr__(self, name: str) -> Any:
        if self._whole or name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = _light(name)
        if found is not None:
            return found
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        self._whole = True
        self._execute(self)
        return getattr(self, name)


def _light(name: str) -> Any:
    if name in _LIGHT:
        return getattr(importlib.import_module(_LIGHT[name]), name)
    errors = importlib.import_module("pipeline.errors")
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and found.__module__ == errors.__name__ else None


if __name__ == "__main__":
    main()
