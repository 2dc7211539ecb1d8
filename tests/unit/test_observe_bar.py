"""The bar shows on a terminal, logs elsewhere, and is in nobody's way."""

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog

from pipeline.errors import UsageError
from pipeline.observe import ProgressBar, configure, logger

METRICS = {
    "batch/reward_mean": 0.7341,
    "batch/staleness_mean": 0.75,
    "batch/staleness_max": 2.0,
    "rollouts/per_second": 1250.0,
    "rollouts/in_flight": 256.0,
    "buffer/groups": 64.0,
}


class Terminal:
    """A pseudo-terminal and just enough of a screen to see what a person would."""

    def __init__(self, columns: int = 120) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream: TextIO = os.fdopen(self.slave, "w")

    def raw(self) -> str:
        data = b""
        while select.select([self.master], [], [], 0)[0]:
            try:
                data += os.read(self.master, 65536)
            except OSError:  # the other end is closed
                break
        return data.decode()

    def screen(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for character in self.raw().replace("\x1b[A", "\x0b"):
            if character == "\r":
                column = 0
            elif character == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif character == "\x0b":
                row -= 1
            else:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + character + line[column + 1 :]
                column += 1
        return [line.rstrip() for line in lines]

    def hang_up(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def close(self) -> None:
        self.hang_up()
        with contextlib.suppress(OSError):  # what could not be written
            self.stream.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure(format="json", stream=stream)
    yield stream
    structlog.reset_defaults()


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


class TestOnATerminal:
    def test_step_and_figures_are_shown_on_one_line(self, terminal: Terminal) -> None:
        clock = Clock()
        with ProgressBar(1000, stream=terminal.stream, now=clock) as bar:
            for step in range(1, 6):
                clock.now += 1
                bar.update(step, METRICS)
        first, *rest = terminal.screen()
        assert first.startswith("train: 5/1000 |")
        assert first.endswith("reward 0.734, stale 0.75/2, 1.25k/s, 256 running, 64 buffered")
        assert rest == [""]

    def test_stdout_stays_empty(self, terminal: Terminal, capfd: pytest.CaptureFixture[str]) -> None:
        with ProgressBar(10, stream=terminal.stream) as bar:
            bar.update(1, METRICS)
        assert capfd.readouterr() == ("", "")

    def test_stderr_is_the_default(self, terminal: Terminal) -> None:
        script = (
            "from pipeline.observe import ProgressBar, logger\n"
            "with ProgressBar(9) as bar:\n"
            "    bar.update(1, {'buffer/groups': 4.0}); logger().warning('writer.full', bytes=7); bar.update(9)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=terminal.slave,
            cwd=Path(__file__).parents[2],
            check=True,
            timeout=60,
        )
        warning, bar, *_ = terminal.screen()
        assert done.stdout == b""
        assert warning == "writer.full bytes=7"
        assert bar.startswith("train: 9/9 |")

    @pytest.mark.parametrize("form", ["console", "json"])
    def test_log_lines_do_not_tear_it(self, terminal: Terminal, form: Any) -> None:
        configure(format=form, stream=terminal.stream)
        try:
            with ProgressBar(10, stream=terminal.stream) as bar:
                bar.update(1, METRICS)
                logger().info("batch.given", step=1, text="short")
                structlog.get_logger("mine").info("a line of the user's own")
                bar.update(2, METRICS)
        finally:
            structlog.reset_defaults()
        first, second, bar_line, end = terminal.screen()
        assert "batch.given" in first
        assert "a line of the user's own" in second
        assert all("|" not in line and "train" not in line for line in (first, second))
        assert bar_line.startswith("train: 2/10 |")
        assert end == ""

    def test_it_is_redrawn_ten_times_a_second_at_most_and_ends_up_to_date(self, terminal: Terminal) -> None:
        clock = Clock()
        with ProgressBar(5000, stream=terminal.stream, now=clock) as bar:
            for step in range(1, 1001):
                clock.now += 0.001
                bar.update(step)
        raw = terminal.raw()
        assert raw.count("\r") < 30
        assert "train: 1000/5000" in raw

    def test_without_a_last_step_there_is_no_length(self, terminal: Terminal) -> None:
        with ProgressBar(stream=terminal.stream, description="collect") as bar:
            bar.update(12, METRICS)
        assert terminal.screen()[0].startswith("collect: 12/? |")

    def test_no_thread_is_left_behind(self, terminal: Terminal) -> None:
        before = threading.active_count()
        with ProgressBar(10, stream=terminal.stream) as bar:
            bar.update(1)
            assert threading.active_count() == before

    def test_a_terminal_that_hangs_up_stops_nobody(self, terminal: Terminal) -> None:
        clock = Clock()
        with ProgressBar(10, stream=terminal.stream, now=clock) as bar:
            bar.update(1)
            terminal.hang_up()
            for step in range(2, 6):
                clock.now += 1
                bar.update(step)

    def test_a_broken_stream_is_given_up_for_log_lines(self, terminal: Terminal, lines: io.StringIO) -> None:
        class Broken(io.StringIO):
            broken = False

            def isatty(self) -> bool:
                return True

            def write(self, text: str) -> int:
                if self.broken:
                    raise BrokenPipeError
                return super().write(text)

        stream, clock = Broken(), Clock()
        with ProgressBar(10, stream=stream, now=clock) as bar:
            stream.broken = True
            clock.now += 1
            bar.update(1)
            clock.now += 60
            bar.update(2)
        assert [line["step"] for line in events(lines)] == [2]
        other = threading.Thread(target=_show_a_bar, args=(terminal.stream,), daemon=True)
        other.start()
        other.join(timeout=10)
        assert not other.is_alive(), "tqdm's lock is still held"


class TestElsewhere:
    def test_nothing_is_shown_to_who_configured_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        clock = Clock()
        with ProgressBar(10, now=clock) as bar:
            for step in range(10):
                clock.now += 100
                bar.update(step, METRICS)
        assert capfd.readouterr() == ("", "")

    def test_the_same_figures_are_logged_every_interval_and_at_the_end(self, lines: io.StringIO) -> None:
        clock = Clock()
        with ProgressBar(100, stream=io.StringIO(), interval=30, now=clock) as bar:
            for step in range(1, 101):
                clock.now += 0.7
                bar.update(step, METRICS)
        shown = events(lines)
        assert [line["step"] for line in shown] == [43, 86, 100]
        assert {line["event"] for line in shown} == {"run.advanced"}
        last = {name: value for name, value in shown[-1].items() if name not in ("timestamp", "level", "logger")}
        assert last == {
            "event": "run.advanced",
            "step": 100,
            "until": 100,
            "reward_mean": 0.7341,
            "staleness_mean": 0.75,
            "staleness_max": 2.0,
            "rollouts_per_second": 1250.0,
            "in_flight": 256.0,
            "groups": 64.0,
        }

    def test_without_an_interval_nothing_is_logged(self, lines: io.StringIO) -> None:
        with ProgressBar(10, stream=io.StringIO(), interval=None) as bar:
            bar.update(1, METRICS)
        assert events(lines) == []

    @pytest.mark.parametrize("why", ["no tqdm", "TQDM_DISABLE", "dumb terminal"])
    def test_what_keeps_tqdm_away_is_no_error(
        self, terminal: Terminal, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        if why == "no tqdm":
            monkeypatch.setitem(sys.modules, "tqdm", None)
        elif why == "TQDM_DISABLE":
            monkeypatch.setattr("tqdm.tqdm.__init__", _disabled)
        else:
            monkeypatch.setenv("TERM", "dumb")
        with ProgressBar(10, stream=terminal.stream) as bar:
            bar.update(1, METRICS)
        assert terminal.raw() == ""
        assert [line["step"] for line in events(lines)] == [1]

    def test_missing_and_infinite_figures_are_left_out(self, lines: io.StringIO) -> None:
        with ProgressBar(stream=io.StringIO()) as bar:
            bar.update(1, {"batch/reward_mean": math.nan, "buffer/groups": 2.0, "other/metric": 1.0})
        assert len(events(lines)) == 1
        assert set(events(lines)[0]) == {"timestamp", "level", "event", "logger", "step", "groups"}

    def test_the_rate_comes_from_the_counter_over_the_last_half_minute(self, lines: io.StringIO) -> None:
        clock, finished = Clock(), 0.0
        with ProgressBar(stream=io.StringIO(), interval=100, now=clock) as bar:
            for second in range(200):
                finished += 5.0 if second < 100 else 20.0
                bar.update(second, {"rollouts/finished": finished})
                clock.now += 1
        slow, fast, *_ = events(lines)
        assert slow["rollouts_per_second"] == pytest.approx(5, rel=0.15)
        assert fast["rollouts_per_second"] == 20

    def test_a_closed_or_missing_stderr_is_no_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = io.StringIO()
        closed.close()
        for stderr in (closed, None):
            monkeypatch.setattr(sys, "stderr", stderr)
            with ProgressBar(10) as bar:
                bar.update(1)

    def test_it_can_be_used_again(self, lines: io.StringIO) -> None:
        bar = ProgressBar(10, stream=io.StringIO())
        for step in (1, 2):
            with bar:
                bar.update(step)
        assert [line["step"] for line in events(lines)] == [1, 2]

    def test_an_update_outside_of_the_block_is_refused(self) -> None:
        with pytest.raises(UsageError, match="with ProgressBar"):
            ProgressBar(10).update(1)


def _show_a_bar(stream: TextIO) -> None:
    with ProgressBar(10, stream=stream) as bar:
        bar.update(1)


def _disabled(self: Any, **_: Any) -> None:
    """What ``tqdm`` does under TQDM_DISABLE, which it reads when it is imported."""
    self.disable = True
