"""Every example runs as it is written, also as a notebook's cell, and beside a file that hides a package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.chat_server import Said, called, serving, toy
from tests.support.real_server import PYTHON

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*arguments: str, cwd: Path = ROOT, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=timeout)


def test_quickstart_shows_rollouts() -> None:
    done = run("examples/quickstart.py")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"step {n}" for n in range(1, 5)]


def test_quickstart_is_twelve_lines_to_the_first_rollouts() -> None:
    lines = [line for line in (EXAMPLES / "quickstart.py").read_text().splitlines() if line.strip()]
    code = [line for line in lines if not line.startswith('"""')]
    assert len(code) <= 12


def test_quickstart_runs_in_a_notebook_under_its_running_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    check = "import asyncio; assert asyncio.get_running_loop().is_running()"
    notebook = nbformat.from_dict(  # type: ignore[no-untyped-call]
        {
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"c{n}",
                    "metadata": {},
                    "outputs": [],
                    "execution_count": None,
                    "source": text,
                }
                for n, text in enumerate((check, (EXAMPLES / "quickstart.py").read_text()))
            ],
            "metadata": {},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )
    NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[1].outputs if output.get("name") == "stdout")
    assert "step 4: 20 rollouts" in printed


def test_crash_and_resume_loses_nothing() -> None:
    done = run("examples/crash_and_resume.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "240 items: 0 never trained, 0 trained twice"
    assert done.stdout.count("to be killed") == 3


def test_async_script_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = run("examples/async_script.py", str(tmp_path / "run"))
    second = run("examples/async_script.py", str(tmp_path / "run"))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.startswith("from step 0, 0 finished")
    assert second.stdout.startswith("from step 200, ")
    assert "step 400: loss 0.0" in second.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="FOREBAY_SERVER_PYTHON names no interpreter with transformers[serving]")
def test_tool_agent_makes_its_model_and_talks_to_it() -> None:
    done = subprocess.run(
        [sys.executable, "examples/tool_agent.py"], capture_output=True, text=True, cwd=ROOT, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, said, ids = done.stdout.splitlines()
    assert said.startswith("32 conversations, ")
    assert "'calculate': " in said
    assert "'search': " in said
    assert ids == "token ids of the server: no, so these cannot be trained on"
    assert done.stdout.count("rewards [1.0, 1.0, 1.0, 1.0]") >= 2, "the model has learnt something"


async def test_tool_agent_talks_to_a_server_that_is_there() -> None:
    pytest.importorskip("openai")

    async def answer(request: dict[str, Any]) -> Said:
        *_, last = request["messages"]
        if last["role"] == "tool":
            return toy(last["content"].split()[-1].rstrip("."), [2], prompt=[9, 1, 7])
        word = last["content"].split()[-1].rstrip("?")
        name, given = ("search", "words") if word.isalpha() else ("calculate", "expression")
        return toy("", [1], prompt=[9], tool_calls=[called(name, json.dumps({given: word}))])

    async with serving(answer) as server:
        command = [sys.executable, "examples/tool_agent.py", "--base-url", server.url, "--model", "m", "--token-ids"]
        done = await anyio.run_process(command, cwd=ROOT, check=False)
    said = done.stdout.decode()
    assert done.returncode == 0, said + done.stderr.decode()
    *_, summary, ids = said.splitlines()
    assert (
        summary
        == ("32 conversations, 100% right; called {'calculate': 16, 'search': 16}; ended: {'the model was done': 32}")
        or "100% right; called {'search': 16, 'calculate': 16}" in summary
    )
    assert ids == "token ids of the server: yes"


def test_two_processes_go_on_though_the_trainer_is_killed(tmp_path: Path) -> None:
    first = run("examples/two_processes.py", str(tmp_path / "run"), "30")
    assert first.returncode == 0, first.stderr
    said = [line.split(":")[0] for line in first.stdout.splitlines()]
    assert said == ["from step 0", "step 20", "the trainer was killed", "from step 20", "step 40", "step 60"]


@pytest.mark.parametrize("name", ["tasks.py", "pipeline.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine = True\n")
    (tmp_path / "script.py").write_text("from forebay import Pipeline\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError")
    assert str(tmp_path / name) in last
    assert "Rename" in last


def test_cartpole_trains_and_goes_on(tmp_path: Path) -> None:
    first = run("examples/cartpole.py", str(tmp_path / "run"), "--steps", "4")
    second = run("examples/cartpole.py", str(tmp_path / "run"), "--steps", "6")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.startswith("64 episodes trained")
    assert second.stdout.startswith("96 episodes trained")


def test_agents_killed_five_times_train_what_a_run_in_peace_does() -> None:
    done = run("examples/agent_resume.py", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the same trained: True; trained twice: 0"
    assert done.stdout.count("ended by signal 9") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "least"),
    [("dqn_cartpole.py", 1200, 1000), ("sac_pendulum.py", 270, 1000), ("dqn_pipeline.py", 600, 500)],
)
def test_an_off_policy_learner_is_killed_and_goes_on(tmp_path: Path, script: str, steps: int, least: int) -> None:
    """Its learning is `make soak`'s; here it has no time to reach the mark."""
    command = [f"examples/{script}", "--directory", str(tmp_path / "run"), "--die-after", str(steps)]
    first, second = run(*command), run(*command)
    assert (first.returncode, second.returncode) == (-9, -9), first.stderr + second.stderr
    assert "from step 0, with 0 transitions" in first.stdout
    begin = next(line for line in second.stdout.splitlines() if "from step" in line)
    assert int(begin.split()[4]) >= least - 4, begin


@pytest.mark.slow
@pytest.mark.timeout(320)  # some 30 s of processor time, which others may want too
def test_a_language_model_learns_a_little_though_it_is_killed() -> None:
    short = ("--steps", "400", "--save-every", "5", "--kills", "1", "--mark", "0.15", "--grader-ms", "2")
    done = run("examples/grpo_arithmetic.py", *short, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  killed\n") == 1
    begins = [int(found) for found in re.findall(r"from step (\d+),", done.stdout)]
    assert begins[0] == 0 < begins[1] < 22
    last = done.stdout.splitlines()[-1]
    before, after = re.findall(r"([\d.]+)%", last)  # of the sums that are held out
    assert float(before) < 15 <= float(after), done.stdout
    assert last.endswith("lost: 0, trained twice: 0")
    steps = int(re.findall(r"^ *(\d+) +[\d.]+ +[\d.]+%", done.stdout, re.MULTILINE)[-1])
    assert f"trained on {16 * steps} groups of 8" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(int(os.environ.get("FOREBAY_SOAK", "1")) < 2, reason="minutes")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("seeds", "form"), [(3, []), (1, ["--synchronous"])])
def test_a_language_model_reaches_its_mark_though_it_is_killed(seeds: int, form: list[str]) -> None:
    for seed in range(seeds):
        command = [sys.executable, "examples/grpo_arithmetic.py", "--seed", str(seed), *form]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("  killed\n") == 2


@pytest.mark.skipif(int(os.environ.get("FOREBAY_SOAK", "1")) < 2, reason="minutes")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", ["dqn_cartpole.py", "sac_pendulum.py", "dqn_pipeline.py"])
def test_off_policy_learners_reach_their_marks_though_they_are_killed(script: str) -> None:
    reached = 0
    for seed in range(5):
        done = subprocess.run(
            [sys.executable, f"examples/{script}", "--seed", str(seed)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert done.stdout.count("killed") == 2
        reached += done.returncode == 0
    assert reached >= 4
