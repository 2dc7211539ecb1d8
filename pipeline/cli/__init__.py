"""The command ``forebay``: thin. It has some commands itself; others are found by entry point, so that it needs none
of their packages.

A command is a function of its arguments that returns an exit code. If its module has a function ``parser``, the page
``docs/cli.md`` shows what that says: see :mod:`pipeline.cli.pages`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version

GROUP = "forebay.commands"
OWN = {
    "checkpoint": "pipeline.cli.checkpoint",
    "export": "pipeline.cli.export",
    "import": "pipeline.cli.import_",
    "inspect": "pipeline.cli.inspect",
    "merge": "pipeline.cli.merge",
    "reshard": "pipeline.cli.reshard",
    "salvage": "pipeline.cli.salvage",
    "sample": "pipeline.cli.sample",
    "split": "pipeline.cli.split",
    "status": "pipeline.cli.status",
    "verify": "pipeline.cli.verify",
}
"""Commands of this package, by the module whose ``main`` they are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``forebay COMMAND ...`` and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    names = command_names()
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: forebay COMMAND ...\n\ncommands: {', '.join(names)}")
        print("`forebay COMMAND --help` says what a command does.")
        return 0 if given else 2
    if given[0] == "--version":
        print(f"forebay {version('forebay')}")
        return 0
    if given[0] not in names:
        print(f"forebay: no command {given[0]!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    return int(command(given[0])(given[1:]) or 0)


def command_names() -> list[str]:
    """Return the names of all commands that are installed."""
    return sorted({*OWN, *(entry.name for entry in entry_points(group=GROUP))})


def command(name: str) -> Callable[[Sequence[str]], int | None]:
    """Return a command's function."""
    if name in OWN:
        return importlib.import_module(OWN[name]).main  # type: ignore[no-any-return]
    (entry,) = entry_points(group=GROUP, name=name)
    return entry.load()  # type: ignore[no-any-return]
