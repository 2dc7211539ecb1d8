"""The command ``forebay``: thin. Commands are found by entry point, so that this package needs none of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version

GROUP = "forebay.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``forebay COMMAND ...`` and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: forebay COMMAND ...\n\ncommands: {', '.join(sorted(commands)) or 'none installed'}")
        print("`forebay COMMAND --help` says what a command does.")
        return 0 if given else 2
    if given[0] == "--version":
        print(f"forebay {version('forebay')}")
        return 0
    entry = commands.get(given[0])
    if entry is None:
        print(f"forebay: no command {given[0]!r}; there are: {', '.join(sorted(commands))}", file=sys.stderr)
        return 2
    result = entry.load()(given[1:])
    return int(result or 0)
