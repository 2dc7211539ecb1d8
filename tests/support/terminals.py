"""Commands as a person sees them: a real process on a pseudo-terminal of a given width, or behind a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from pipeline.cli import main
from tests.support.children import child

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "pipeline.cli")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Session(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    raw: str

    @property
    def text(self) -> str:
        """Without colours, and as what a bar wrote over has left it."""
        lines = _ESCAPE.sub("", self.raw).replace("\r\n", "\n").split("\n")
        return "\n".join(line.split("\r")[-1].rstrip() for line in lines)

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


def at_a_terminal(arguments: Sequence[str | Path], columns: int, *, command: Sequence[str] = COMMAND) -> Session:
    """Run a command on a terminal that is ``columns`` wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [*command, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=_environment()
    )
    os.close(slave)
    try:
        raw = _read_all(master)
        return Session(process.wait(), raw)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def on_terminal(arguments: Sequence[str | Path], columns: int) -> Session:
    """As :func:`at_a_terminal`, in a process that takes milliseconds to start."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with child(_command, os.ttyname(slave), [str(each) for each in arguments]) as process:
        try:
            assert process.hear() == "opened"
            os.close(slave)
            raw = _read_all(master)
            return Session(process.hear(), raw)
        finally:
            os.close(master)


def _command(pipe: Connection, terminal: str, arguments: list[str]) -> None:
    handle = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    for number in (0, 1, 2):
        os.dup2(handle, number)
    os.close(handle)
    os.environ.update(_environment())
    for name in ("COLUMNS", "NO_COLOR"):
        os.environ.pop(name, None)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8")
    pipe.send("opened")
    try:
        code = main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    sys.stdout.close()
    sys.stderr.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    pipe.send(code)


def piped(arguments: Sequence[str | Path], *, command: Sequence[str] = COMMAND) -> Session:
    """Run a command whose output goes to a pipe."""
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=_environment(), check=False
    )
    return Session(done.returncode, done.stdout + done.stderr)


def _read_all(master: int) -> str:
    data = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says so where the other end is closed
            break
        if not piece:
            break
        data += piece
    return data.decode()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
