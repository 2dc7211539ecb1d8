"""A small process that outlives the one that started it, to end its workers and whatever these have started.

It is told on its stdin which process groups there are (``+4711``, ``-4711``), and kills them when that is closed: by
the end of the other process, however it came. Run as a script, by its path; nothing of the library is imported.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read to the end, and kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        if line.endswith("\n"):
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
