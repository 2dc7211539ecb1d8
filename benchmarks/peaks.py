"""How much more memory a save or a load takes at its worst: a process of its own for each figure.

``python -m benchmarks.peaks WHAT FOLDER BYTES`` prints bytes beyond what the process held before. Linux only: the
kernel keeps the peak (``VmHWM``), and is asked to begin anew.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from benchmarks.checkpoint_sides import Content, Trainer, pipeline, put
from pipeline import ReplayBuffer

TRANSITIONS = "transitions"
KINDS = ("save rollouts", "load rollouts", "save trainer", "load trainer")


def possible() -> bool:
    """Whether the kernel can be asked."""
    return os.access("/proc/self/clear_refs", os.W_OK)


def measure(kind: str, folder: str, size: int) -> int:
    """Return the extra bytes, measured in a process of its own; a load needs the folder of the save."""
    command = [sys.executable, "-m", "benchmarks.peaks", kind, folder, str(size)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":")) << 10


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


async def _extra(kind: str, folder: str, size: int) -> int:
    verb, what = kind.split()
    content = Content(size)
    async with pipeline(folder, "none") as pipe:
        if what == "trainer":
            pipe.attach(trainer=Trainer(content.state()))
        if verb == "save":
            await pipe.start()
            if what == "rollouts":
                await put(pipe, content.rollouts())
        before = _status("VmRSS")
        _forget_peak()
        if verb == "save":
            await (await pipe.save(0)).committed()
        else:
            await pipe.resume()
        return max(0, _status("VmHWM") - before)


def _extra_of_transitions(verb: str, folder: str, size: int) -> int:
    """As :func:`_extra`, of a buffer of transitions; of a load beyond the memory of its rows."""
    from benchmarks.transitions import ROW, content, filled

    count, held = max(1000, size // ROW), 0
    if verb == "save":
        buffer = filled(folder, "prioritized", content(count), count)
    else:
        buffer = ReplayBuffer(count, select="prioritized", directory=folder)
    with buffer:
        before = _status("VmRSS")
        _forget_peak()
        if verb == "save":
            buffer.save(0, wait=True)
        else:
            held = buffer.resume().rows * (buffer.statistics().row_bytes + 10)  # the sums take about ten bytes a row
        return max(0, _status("VmHWM") - before - held)


if __name__ == "__main__":
    kind, where, bytes_ = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind.endswith(TRANSITIONS):
        print(_extra_of_transitions(kind.split()[0], where, bytes_))
    else:
        print(asyncio.run(_extra(kind, where, bytes_)))
