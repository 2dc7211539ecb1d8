"""What ``docs/cli.md`` says of each command's arguments, made from the commands: a test finds a page that is old.

``python -m pipeline.cli.pages docs/cli.md`` brings it up to date. What stands outside the marks is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from pipeline.cli import command, command_names

_BLOCK = re.compile(r"<!-- forebay (?P<name>\S+) -->\n.*?<!-- end -->\n", re.DOTALL)


def renewed(page: str) -> str:
    """Return a page whose blocks say what the commands say now.

    Raises:
        ValueError: a command has no block, or a block no command.
    """
    parsers = parsers_of_commands()
    there = [match["name"] for match in _BLOCK.finditer(page)]
    if sorted(there) != sorted(parsers):
        raise ValueError(f"the page has blocks of {', '.join(there)}, and there are {', '.join(parsers)}")
    return _BLOCK.sub(lambda match: block(match["name"], parsers[match["name"]]), page)


def parsers_of_commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands that show theirs."""
    modules = {name: sys.modules[command(name).__module__] for name in command_names()}
    return {name: module.parser() for name, module in modules.items() if hasattr(module, "parser")}


def block(name: str, parser: argparse.ArgumentParser) -> str:
    """Return what a command's parser says, as Markdown: the same for every version of Python."""
    actions = [each for each in parser._actions if "--help" not in each.option_strings]
    rows = [f"| `{_spelled(each)}` | {_help(each)} |" for each in actions]
    usage = " ".join(["forebay", name, *map(_usage, actions)])
    parts = [
        f"<!-- forebay {name} -->",
        f"```\n{usage}\n```",
        (parser.description or "").strip(),
        "\n".join(["| argument | |", "|---|---|", *rows]),
        f"```\n{parser.epilog.strip()}\n```" if parser.epilog else "",
        "<!-- end -->",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _spelled(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    return " ".join([*(", ".join(action.option_strings).split()), *([value] if value else [])])


def _usage(action: argparse.Action) -> str:
    return f"[{_spelled(action)}]" if action.option_strings and not action.required else _spelled(action)


def _help(action: argparse.Action) -> str:
    return ((action.help or "") % {"default": action.default, "prog": "forebay"}).replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring the pages that are named up to date."""
    for path in sys.argv[1:] if arguments is None else arguments:
        with open(path, encoding="utf-8") as file:
            before = file.read()
        after = renewed(before)
        if after != before:
            with open(path, "w", encoding="utf-8") as file:
                file.write(after)
            print(f"{path}: renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
