"""What commands print fits the terminal, is plain in a pipe, and cannot be steered by what a file holds."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from pipeline.cli.tables import table_lines
from pipeline.cli.terminal import Terminal, make_parser, run_command
from pipeline.cli.words import counted, in_bytes, in_time, number, printable, shortened, width_of, wrapped
from pipeline.errors import ConfigError, Damaged, NotARun
from tests.support.terminals import at_a_terminal, piped

HEADER = ["task", "what became of it", "groups"]
ROWS = [["math", "trained in the order of its draws", "12"], ["tools", "x", "1,234"]]


class TestWords:
    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (12.4e9, "12.4 GB"), (3e15, "3000.0 TB")],
    )
    def test_bytes(self, count: float, text: str) -> None:
        assert in_bytes(count) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.25, "0.25 s"), (9.5, "9.5 s"), (12.6, "13 s"), (59.6, "1 min"), (200, "3 min 20 s"),
            (7500, "2 h 5 min"), (3600, "1 h"), (273_600, "3 d 4 h"),
        ],
    )  # fmt: skip
    def test_time(self, seconds: float, text: str) -> None:
        assert in_time(seconds) == text

    def test_numbers(self) -> None:
        assert [number(each) for each in (None, 1234, 0.123456, 29930.0, 1e12)] == [
            "-",
            "1,234",
            "0.1235",
            "29,930",
            "1e+12",
        ]
        assert (counted(1, "row"), counted(2000, "row"), counted(2, "entry", "entries")) == (
            "1 row",
            "2,000 rows",
            "2 entries",
        )

    def test_what_steers_a_terminal_is_shown_instead(self) -> None:
        assert printable("a\x1b[2Jb\r\x07\u202ec\td\ne\ud800") == "a\\x1b[2Jb\\r\\x07\\u202ec\td\ne\\ud800"

    def test_wide_letters_take_two_cells(self) -> None:
        assert (width_of("añ"), width_of("日本"), width_of("e\u0301")) == (2, 4, 1)
        assert wrapped("日本語", 4) == ["日本", "語"]
        assert shortened("日本語", 5) == "日本…"
        assert shortened("abc", 3) == "abc"

    def test_lines_break_at_blanks_and_lose_nothing(self) -> None:
        text = "the quick brown  fox jumps overthelazydogwithoutablank\nand more"
        for width in range(1, 70):
            lines = wrapped(text, width)
            assert all(width_of(line) <= width for line in lines)
            assert "".join("".join(lines).split()) == "".join(text.split())


class TestTables:
    def test_one_that_fits_has_a_line_for_each_row(self) -> None:
        assert table_lines(HEADER, ROWS, None) == (
            ["task   what became of it                  groups"],
            ["math   trained in the order of its draws      12", "tools  x                                   1,234"],
        )

    def test_a_narrow_one_wraps_its_text(self) -> None:
        above, lines = table_lines(HEADER, ROWS, 36)
        assert max(map(width_of, [*above, *lines])) <= 36
        assert lines[:2] == ["math   trained in the order       12", "       of its draws"]

    def test_a_very_narrow_one_has_several_lines_for_each_row(self) -> None:
        above, lines = table_lines(HEADER, ROWS, 24)
        assert max(map(width_of, lines)) <= 24
        assert not above
        assert lines[0] == "task math"
        assert "  groups" in lines[4] or any("1,234" in line for line in lines)

    def test_without_rows(self) -> None:
        assert table_lines(HEADER, [], 80) == (["task  what became of it  groups"], [])

    @pytest.mark.parametrize(
        ("cell", "number"),
        [("1,234", True), ("-0.5", True), ("1e-05", True), ("12.4 GB", True), ("-", True), ("2030-01-31", False),
         ("3 of 4", False), ("0, 1", False)],
    )  # fmt: skip
    def test_numbers_stand_to_the_right(self, cell: str, number: bool) -> None:
        (line,) = table_lines(["a long name"], [[cell]], 80)[1]
        assert line.startswith(" ") == number


class TestPiped:
    def test_nothing_is_cut_or_coloured(self) -> None:
        stream = io.StringIO()
        out = Terminal(stream, errors=io.StringIO())
        out.title("t" * 200)
        out.line("bad", style="bad")
        out.fields([("a", "1"), ("long", "x" * 100)])
        with out.progress(10, "work") as advance:
            advance(10)
        assert stream.getvalue() == f"{'t' * 200}\nbad\n  a     1\n  long  {'x' * 100}\n"

    def test_a_stream_of_few_letters_shows_the_others_by_number(self) -> None:
        raw = io.BytesIO()
        out = Terminal(io.TextIOWrapper(raw, encoding="ascii"))
        out.line("é…")
        out.flush()
        assert raw.getvalue() == b"\\xe9\\u2026\n"

    def test_json_is_one_value(self) -> None:
        stream = io.StringIO()
        Terminal(stream).json({"a": [1, None]})
        assert json.loads(stream.getvalue()) == {"a": [1, None]}

    def test_json_stays_json_whatever_the_letters(self) -> None:
        raw = io.BytesIO()
        out = Terminal(io.TextIOWrapper(raw, encoding="ascii"))
        out.json({"é": "\U0001f600", "name": ["\udcff"]})
        out.flush()
        assert json.loads(raw.getvalue()) == {"é": "\U0001f600", "name": ["\\udcff"]}


SHOW = """
import sys
from pipeline.cli.terminal import Terminal
out = Terminal()
out.title("heading")
out.line("it is damaged: " + "word " * 20, style="bad")
out.fields([("name", "word " * 20)])
out.table(["task", "text"], [["math", "word " * 20]])
with out.progress(3000000, "verify") as advance:
    for _ in range(3):
        advance(1000000)
print(out.width)
"""


class TestAtATerminal:
    @pytest.mark.parametrize("columns", [30, 120])
    def test_lines_fit_and_colours_and_a_bar_are_there(self, columns: int) -> None:
        session = at_a_terminal([], columns, command=(sys.executable, "-c", SHOW))
        assert session.code == 0
        assert session.lines[-2] == str(columns)
        assert all(len(line) <= columns for line in session.lines)
        assert "\x1b[1mheading\x1b[0m" in session.raw
        assert "\x1b[31mit is damaged" in session.raw
        assert "verify" in session.raw
        assert "verify" not in session.text, "the bar is taken away"

    def test_none_of_it_in_a_pipe(self) -> None:
        session = piped([], command=(sys.executable, "-c", SHOW))
        assert "\x1b" not in session.raw
        assert "verify" not in session.raw
        assert session.lines[-2] == "None"

    @pytest.mark.parametrize("name", ["NO_COLOR", "COLUMNS"])
    def test_what_the_user_says_counts(self, name: str) -> None:
        set_first = f"import os; os.environ[{name!r}] = '50'\n" + SHOW
        session = at_a_terminal([], 80, command=(sys.executable, "-c", set_first))
        assert ("\x1b[1m" in session.raw) == (name == "COLUMNS")
        assert session.lines[-2] == ("50" if name == "COLUMNS" else "80")


class TestCommands:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (Damaged("it is \x1b[2J cut"), 1), (OSError(5, "no"), 1), (ConfigError("bad"), 2), (NotARun("none"), 2),
            (KeyboardInterrupt(), 130),
        ],
    )  # fmt: skip
    def test_errors_are_a_line_and_an_exit_code(self, error: BaseException, code: int, capsys: Any) -> None:
        def body() -> int:
            raise error

        assert run_command("any", body) == code
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("forebay any: ")
        assert told.err.count("\n") == 1
        assert "\x1b" not in told.err

    def test_a_reader_that_went_away_ends_it_quietly(self) -> None:
        script = (
            "import os, sys\nfrom pipeline.cli.terminal import *\n"
            "read, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
            "def body():\n    Terminal().line('x' * 100000)\n    return 0\n"
            "sys.exit(run_command('any', body))"
        )
        assert piped([], command=(sys.executable, "-c", script)) == (1, "")

    def test_help_has_an_example_and_the_exit_codes(self) -> None:
        told = make_parser("any", "What it does.", "forebay any runs/a", "0  it is done\n1  it is not").format_help()
        assert told.endswith(
            "What it does.\n\noptions:\n  -h, --help  show this help message and exit\n\n"
            "example:\n  forebay any runs/a\n\nexit codes:\n  0  it is done\n  1  it is not\n"
        )
