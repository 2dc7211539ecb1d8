"""Lines reach what the user has set up, and nothing is set up that the user did not ask for."""

import io
import json
import logging
import math
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import structlog

from pipeline.errors import ConfigError
from pipeline.observe import RunContext, configure, logger

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
    )


class TestUnconfigured:
    def test_a_program_that_configured_nothing_sees_warnings_on_stderr_only(self) -> None:
        done = run_script(
            "from pipeline.observe import logger\n"
            "log = logger()\n"
            "log.debug('a.b'); log.info('c.d'); log.warning('loop.held', seconds=0.25, where='f (x.py:3)')\n"
            "try: 1 / 0\n"
            "except ZeroDivisionError: log.exception('run.failed')\n"
        )
        assert done.stdout == ""
        first, second, *traceback = done.stderr.splitlines()
        assert first == "loop.held seconds=0.25 where='f (x.py:3)'"
        assert second == "run.failed"
        assert traceback[-1] == "ZeroDivisionError: division by zero"

    def test_importing_configures_and_starts_nothing(self) -> None:
        done = run_script(
            "import logging, sys, threading\n"
            "before = threading.active_count(), logging.getLoggerClass()\n"
            "import pipeline.observe, structlog\n"
            "assert not structlog.is_configured() and not logging.root.handlers\n"
            "assert before == (threading.active_count(), logging.getLoggerClass())\n"
            "assert 'trio' not in sys.modules\n"
        )
        assert (done.stdout, done.stderr) == ("", "")

    def test_standard_handlers_and_levels_work(self, caplog: pytest.LogCaptureFixture) -> None:
        log = logger(task="math")
        with caplog.at_level(logging.INFO, logger="forebay"):
            log.info("batch.given", step=3, text="100% {sure} %s")
            log.debug("batch.given", step=4)
        (record,) = caplog.records
        assert record.name == "forebay"
        assert record.levelno == logging.INFO
        assert record.pathname == __file__
        assert record.getMessage() == "batch.given task=math step=3 text='100% {sure} %s'"


class TestConfigured:
    def test_json_has_one_object_a_line_led_by_time_level_and_event(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        logger(task="math").info("batch.given", step=3)
        (line,) = json_lines(stream)
        assert list(line)[:3] == ["timestamp", "level", "event"]
        assert line | {"timestamp": ""} == {
            "timestamp": "",
            "level": "info",
            "event": "batch.given",
            "logger": "forebay",
            "task": "math",
            "step": 3,
        }

    @pytest.mark.parametrize(
        "value", [math.nan, "two\nlines", "\ud800", b"\xff", object(), {(1, 2): 3}, Path("/x"), KeyError("k")]
    )
    def test_json_is_valid_whatever_the_value(self, value: Any) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        logger().warning("a.b", value=value)
        (line,) = json_lines(stream)
        assert "a.b" in line["event"]
        assert "value" in line

    def test_a_traceback_stays_inside_its_json_line(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        try:
            raise ValueError("broken")
        except ValueError:
            logger().exception("run.failed")
        (line,) = json_lines(stream)
        assert line["exception"].endswith("ValueError: broken")

    def test_console_is_without_colours_off_a_terminal(self) -> None:
        stream = io.StringIO()
        configure(format="console", stream=stream)
        logger().info("batch.given", step=3)
        assert "batch.given" in stream.getvalue()
        assert "step=3" in stream.getvalue()
        assert "\x1b" not in stream.getvalue()

    def test_auto_is_coloured_on_a_terminal_and_json_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        master, slave = pty.openpty()
        with os.fdopen(slave, "w") as terminal:
            configure(stream=terminal)
            logger().info("batch.given", step=3)
            shown = os.read(master, 10_000).decode()
        os.close(master)
        assert "\x1b[" in shown
        assert "batch.given" in shown
        stream = io.StringIO()
        configure(stream=stream)
        logger().info("batch.given")
        assert len(json_lines(stream)) == 1

    def test_stderr_is_looked_up_when_a_line_is_written(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure(format="json")
        logger().info("batch.given")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert json.loads(captured.err)["event"] == "batch.given"

    def test_levels_filter(self) -> None:
        stream = io.StringIO()
        configure(format="json", level="warning", stream=stream)
        logger().info("a.b")
        logger().warning("c.d")
        assert [line["event"] for line in json_lines(stream)] == ["c.d"]

    def test_a_logger_made_before_follows_what_is_configured_later(self) -> None:
        log, bound = logger(), logger().bind(task="math")
        stream = io.StringIO()
        configure(format="json", stream=stream)
        log.info("a.b")
        bound.info("c.d")
        assert [line.get("task") for line in json_lines(stream)] == [None, "math"]

    @pytest.mark.parametrize("options", [{"format": "xml"}, {"level": "loud"}, {"level": "notset"}])
    def test_unknown_options_are_refused_with_the_choices(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="must be one of") as caught:
            configure(**options)
        assert caught.value.option == next(iter(options))
        assert not structlog.is_configured()

    def test_a_stream_that_is_gone_stops_nobody(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        stream.close()
        logger().error("run.failed")

    def test_lines_of_threads_do_not_mix(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        threads = [
            threading.Thread(target=lambda: [logger().info("a.b", pad="x" * 500) for _ in range(50)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(json_lines(stream)) == 200

    def test_the_users_own_configuration_is_used(self) -> None:
        caller = structlog.processors.CallsiteParameterAdder([structlog.processors.CallsiteParameter.FILENAME])
        seen: list[structlog.typing.EventDict] = []

        def keep(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
            seen.append(event)
            raise structlog.DropEvent

        structlog.configure(processors=[caller, keep])
        with RunContext(run="a").active():
            logger().info("batch.given", step=3)
        assert seen == [
            {"logger": "forebay", "run": "a", "step": 3, "event": "batch.given", "filename": Path(__file__).name}
        ]


class TestRunContext:
    async def test_is_given_once_and_followed_by_tasks_and_threads(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        stepped = anyio.Event()

        async def roll_out() -> None:
            await stepped.wait()
            logger().info("rollout.failed")
            await anyio.to_thread.run_sync(lambda: logger().info("writer.full"))

        context = RunContext(run="a", incarnation=2, rank=0)
        with context.active():
            async with anyio.create_task_group() as group:
                group.start_soon(roll_out)
                await anyio.lowlevel.checkpoint()
                context.update(step=12)
                stepped.set()
        logger().info("run.closed")
        *inside, outside = json_lines(stream)
        for line in inside:
            assert (line["run"], line["incarnation"], line["rank"], line["step"]) == ("a", 2, 0, 12)
        assert len(inside) == 2
        assert "run" not in outside

    async def test_two_runs_in_one_process_do_not_mix(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)

        async def run(name: str) -> None:
            with RunContext(run=name).active():
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                    logger(said_by=name).info("batch.given")

        async with anyio.create_task_group() as group:
            group.start_soon(run, "a")
            group.start_soon(run, "b")
        lines = json_lines(stream)
        assert len(lines) == 6
        assert all(line["run"] == line["said_by"] for line in lines)

    def test_a_logger_can_be_tied_to_one(self) -> None:
        stream = io.StringIO()
        configure(format="json", stream=stream)
        context = RunContext(run="a")
        log = logger(context, task="math")
        context.update(step=1)
        with RunContext(run="b").active():
            log.info("batch.given")
            log.bind(step=7).info("batch.given")
        first, second = json_lines(stream)
        assert (first["run"], first["step"], first["task"]) == ("a", 1, "math")
        assert second["step"] == 7
