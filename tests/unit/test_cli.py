"""How commands are found, and the page that is made of what they say."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import pipeline.cli
from pipeline.cli import command, command_names, main, pages, transfer
from pipeline.cli.status import CODES, USAGE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"


def test_own_commands_and_those_of_other_packages_are_found() -> None:
    assert {"demo", "status"} <= set(command_names())
    assert command("demo").__module__ == "tasks.demo.command"
    assert command("status").__module__ == "pipeline.cli.status"


def test_a_command_of_another_package_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """And one that returns nothing has done well."""

    def found(group: str, name: str = "pages") -> list[EntryPoint]:
        assert group == "forebay.commands"
        return [EntryPoint("pages", "tests.unit.test_cli:said", group)]

    monkeypatch.setattr(pipeline.cli, "entry_points", found)
    assert main(["pages", "a", "--b"]) == 0
    assert capsys.readouterr().out == "['a', '--b']\n"
    assert main(["pages"]) == 9


def said(arguments: Sequence[str]) -> int | None:
    print(arguments)  # noqa: T201
    return None if arguments else 9


def test_without_a_command_or_with_an_unknown_one(capsys: Any) -> None:
    assert (main([]), main(["--help"]), main(["--version"])) == (2, 0, 0)
    assert "status" in capsys.readouterr().out
    assert main(["nonsense"]) == 2
    shown = capsys.readouterr().err
    assert "no command 'nonsense'" in shown
    assert "status" in shown


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "status", str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout == f"{tmp_path}: nothing\n  {tmp_path}: an empty folder\n"


class TestPage:
    def test_it_says_what_the_commands_say(self) -> None:
        assert pages.renewed(PAGE.read_text()) == PAGE.read_text(), "run: python -m pipeline.cli.pages docs/cli.md"

    def test_an_old_one_is_renewed_and_the_rest_of_it_stays(self, tmp_path: Path, capsys: Any) -> None:
        now, old = PAGE.read_text(), tmp_path / "cli.md"
        for before, after in (("--until STEP", "--up-to STEP"), ("  4  running", "  9  running")):
            assert before in now
            old.write_text(now.replace(before, after))
            assert pages.main([str(old)]) == 0
            assert old.read_text() == now
            assert capsys.readouterr().out == f"{old}: renewed\n"
        pages.main([str(old)])
        assert capsys.readouterr().out == ""

    def test_a_command_without_its_place_is_found(self) -> None:
        with pytest.raises(ValueError, match=r"blocks of .*and there are .*demo, "):
            pages.renewed(PAGE.read_text().replace("<!-- forebay demo -->", ""))

    @pytest.mark.parametrize(
        ("names", "how", "line"),
        [
            (["--width"], {"default": 3, "help": "of %(default)s"}, "| `--width WIDTH` | of 3 |"),
            (["-q", "--quiet"], {"action": "store_true", "help": "a|b"}, "| `-q, --quiet` | a\\|b |"),
            (["run"], {"metavar": "RUN"}, "| `RUN` |  |"),
        ],
    )
    def test_how_an_argument_is_shown(self, names: list[str], how: dict[str, Any], line: str) -> None:
        made = argparse.ArgumentParser(description="What it does.")
        made.add_argument(*names, **how)
        assert line in pages.block("any", made).splitlines()

    def test_the_exit_codes_on_the_page_are_those_of_the_command(self) -> None:
        rows = [line.split("|") for line in PAGE.read_text().splitlines() if re.match(r"\| \d \|", line)]
        told = {int(row[1]): row[2].strip() for row in rows}
        assert told == {USAGE: "", **{code: state for state, code in CODES.items()}}


@pytest.mark.parametrize("before", [None, "mimalloc"])
def test_arrow_takes_its_memory_from_the_system_unless_somebody_says_otherwise(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, seen = "ARROW_DEFAULT_MEMORY_POOL", list[str | None]()
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    assert transfer.ended("forebay export", lambda told: seen.append(os.environ.get(name))) == transfer.DONE
    assert seen == [before or "system"]
    assert os.environ.get(name) == before
