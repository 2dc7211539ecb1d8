"""How commands talk: to a person at a terminal of any width, to a pipe, to a program.

::

    out = Terminal(sys.stdout)  # `out.width` is None where it is no terminal: then nothing is cut
    out.title("runs/a")  # bold on a terminal; `style=` of `line` colours: "good", "bad", "faint"
    out.fields([("rows", "12,000"), ("bytes", in_bytes(4e6))])
    out.table(["task", "groups", "reward"], [["math", "64", "0.71"]])
    out.json(struct)  # for a program: never with colours
    with out.progress(total_bytes, "verify") as advance:
        advance(len(block))  # a bar with bytes and time left on stderr, on a terminal alone


    def main(arguments=None):
        own = parser()  # from `make_parser(name, description, example, exits)`
        given = own.parse_args(arguments)
        return run_command("inspect", lambda: _run(given))

- Colours and bars go to terminals alone; ``NO_COLOR`` and ``TERM=dumb`` are heeded, ``COLUMNS`` is believed.
- All text goes through :func:`~pipeline.cli.words.printable`: what a file holds cannot steer a terminal.
- :func:`run_command` prints an error of the library as one line on stderr and returns 1, or 2 if an argument was
  refused or no run is there; Ctrl-C gives 130, and a reader that went away (``| head``) ends the command quietly.

Numbers as words (``counted``, ``in_bytes``, ``in_time``, ``number``) are in :mod:`pipeline.cli.words`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, TextIO

import msgspec

from pipeline.cli.tables import field_lines, table_lines
from pipeline.cli.words import printable, width_of, wrapped
from pipeline.errors import ConfigError, ForebayError, NotARun
from pipeline.observe.lines import is_terminal

FAILED, USAGE, INTERRUPTED = 1, 2, 130
NARROWEST: Final = 20
_STYLES: Final = {"bold": "\x1b[1m", "good": "\x1b[32m", "bad": "\x1b[31m", "faint": "\x1b[2m"}
_PLAIN: Final = "\x1b[0m"
_BAR: Final = "{desc}: {n_fmt}B of {total_fmt}B |{bar}| {rate_fmt}, {remaining} left"
_BAR_WITHOUT_END: Final = "{desc}: {n_fmt}B, {rate_fmt}"

Advance = Callable[[int], None]
"""Told how many bytes more are done."""


class Terminal:
    """What a command prints to: ``stream``, or stdout. Bars and hints go to ``errors``, or stderr."""

    def __init__(self, stream: TextIO | None = None, *, errors: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.errors = sys.stderr if errors is None else errors
        self.width = _width(self.stream)
        self.styled = is_terminal(self.stream) and not os.environ.get("NO_COLOR")

    def line(self, text: str = "", *, style: str | None = None, indent: int = 0) -> None:
        """Print a text; on a terminal wrapped to its width."""
        text = printable(text)
        lines = text.split("\n") if self.width is None else wrapped(text, self.width - indent)
        for each in lines:
            self._write(" " * indent + each if each else "", style)

    def title(self, text: str) -> None:
        """Print a line that stands out."""
        self.line(text, style="bold")

    def fields(self, pairs: Iterable[tuple[str, str]], *, indent: int = 2) -> None:
        """Print names, and their texts beside them in one column."""
        shown = [(printable(name), printable(text)) for name, text in pairs]
        names = max((width_of(name) for name, _ in shown), default=0)
        for name, text in shown:
            for line in field_lines(name, text, names, self.width, indent=indent):
                self._write(line)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 2) -> None:
        """Print a table; columns of numbers stand to the right. On a narrow terminal each row takes several lines."""
        cells = [[printable(cell) for cell in row] for row in rows]
        width = None if self.width is None else self.width - indent
        above, lines = table_lines(header, cells, width)
        for line in above:
            self._write(" " * indent + line, "faint")
        for line in lines:
            self._write(" " * indent + line)

    def json(self, value: Any) -> None:
        """Print a value as JSON, for a program."""
        try:
            raw = msgspec.json.encode(value)
        except UnicodeEncodeError:  # the name of a file may be bytes that are no text
            raw = msgspec.json.encode(_text(msgspec.to_builtins(value)))
        text = msgspec.json.format(raw).decode()
        if (self.stream.encoding or "utf-8").lower().replace("-", "") != "utf8":
            text = "".join(each if each.isascii() else json.dumps(each)[1:-1] for each in text)
        self._write(text)

    @contextmanager
    def progress(self, total: int | None, what: str) -> Iterator[Advance]:
        """Show how many of ``total`` bytes are done and how long the rest will take, while the body runs: on a
        terminal, where ``tqdm`` is installed, and else not at all."""
        bar = _bar(total, what, self.errors)
        if bar is None:
            yield lambda count: None
            return
        try:
            yield lambda count: bar.update(count)
        finally:
            with suppress(OSError, ValueError):  # the terminal is gone
                bar.close()

    @contextmanager
    def bar(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """As :meth:`progress`, from when it is first told how many bytes are done, and of how many."""
        shown = 0
        advance: Advance | None = None
        with ExitStack() as stack:

            def told(done: int, total: int) -> None:
                nonlocal advance, shown
                if advance is None:
                    advance = stack.enter_context(self.progress(total, what))
                advance(done - shown)
                shown = done

            yield told

    def flush(self) -> None:
        """Hand what was printed to whoever reads it."""
        self.stream.flush()

    def _write(self, text: str, style: str | None = None) -> None:
        if style is not None and self.styled and text:
            text = f"{_STYLES[style]}{text}{_PLAIN}"
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_text(key): _text(each) for key, each in value.items()}
    return [_text(each) for each in value] if isinstance(value, list) else value


def _width(stream: TextIO) -> int | None:
    """Return how many cells a line has; None where there is no terminal to say so."""
    if not is_terminal(stream):
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return max(NARROWEST, int(given))
    try:
        return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):
        return 80


def _bar(total: int | None, what: str, stream: TextIO) -> Any:
    if not is_terminal(stream):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})  # a monitor would be one more thread, and live on
    layout = _BAR_WITHOUT_END if total is None else _BAR
    form = {"unit": "B", "unit_scale": True, "unit_divisor": 1000, "bar_format": layout}
    bar = quiet(total=total, desc=printable(what), file=stream, dynamic_ncols=True, leave=False, **form)
    return None if bar.disable else bar


def run_command(name: str, body: Callable[[], int]) -> int:
    """Run a command's body and return its exit code: 1 for an error, which is printed; 2 for an argument that the
    library refused, or a path without a run; 130 for Ctrl-C."""
    try:
        code = body()
        sys.stdout.flush()
        return code
    except ForebayError as error:
        print(printable(f"forebay {name}: {error}"), file=sys.stderr)
        return USAGE if isinstance(error, (ConfigError, NotARun)) else FAILED
    except KeyboardInterrupt:
        print(f"forebay {name}: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # what is still in the buffer must not be written at the interpreter's end
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(printable(f"forebay {name}: {error}"), file=sys.stderr)
        return FAILED


def make_parser(name: str, description: str, example: str, exits: str) -> argparse.ArgumentParser:
    """Return a command's parser; the example and the exit codes stand at the end of its help, and in docs/cli.md."""
    return argparse.ArgumentParser(
        prog=f"forebay {name}",
        description=description,
        epilog=f"example:\n{_indented(example)}\n\nexit codes:\n{_indented(exits)}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())
