"""Sees to it that no worker, and nothing that a worker has started, outlives this process by a SIGKILL."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import anyio

from pipeline.engines.ending import ended, kill_all

_SCRIPT = str(Path(__file__).parent / "worker" / "guard.py")
_SECONDS = 5.0


class Guardian:
    """One process for all workers of an engine, started with the first of them (``worker/guard.py``).

    Without it (somebody has killed it) workers still end by themselves: they see their socket close, and on Linux the
    kernel kills them.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, if it is not there yet.

        Raises:
            OSError: the system starts no process.
        """
        if self._process is None:
            # In a session of its own: who ends this process by its group or its terminal does not end it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )

    def add(self, group: int) -> None:
        """Guard a process group."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Guard it no more: call it before its number can be another's."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), line.encode())

    async def close(self) -> None:
        """Let it kill what is left, and leave."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with anyio.move_on_after(_SECONDS):
            await ended(process)
        kill_all(process)
        process.wait()
