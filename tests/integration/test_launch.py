"""Runs that launchers start, end and start again: the real torchrun, and what the job scripts decide."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.checkpoint import status_of

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SAVED = re.compile(r"rank (\d): step (\d+) is saved")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def saved(lines: Iterable[str] | None) -> Iterator[tuple[int, int]]:
    """Yield rank and step of all that says that a generation is there: two ranks may share a line."""
    for line in lines or ():
        yield from ((int(match[1]), int(match[2])) for match in SAVED.finditer(line))


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher, which ends what it has started when it is asked to."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, **environment},
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def ranks(directory: str, steps: int, seconds: float) -> list[str]:
    """Two ranks, which save every ten steps."""
    given = [str(LAUNCH / "train_ranks.py"), directory, "--steps", str(steps), "--seconds", str(seconds)]
    return [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *given]


def test_two_ranks_are_stopped_by_torchrun_and_go_on_where_they_were(run_directory: str) -> None:
    with started(ranks(run_directory, 100_000, 0.05)) as launcher:
        last: dict[int, int] = {}
        for rank, step in saved(launcher.stdout):
            last[rank] = step
            if set(last.values()) == {step} and len(last) == 2:
                break
        assert status_of(run_directory).state == "running"
        launcher.send_signal(signal.SIGTERM)
        last.update(saved(launcher.stdout))  # to the end of all that it says
        assert launcher.wait() == 1, "what torchrun says of a stop is no more than this"
    found = status_of(run_directory)
    assert (found.state, found.kind) == ("to be continued", "replay shards")
    assert found.life is not None
    assert (found.life.incarnation, found.life.ended) == (1, "stopped")
    assert found.life.reason in ("SIGTERM at rank 0", "SIGTERM at rank 1")  # both were sent it: one of them asked first
    assert found.newest is not None
    step = found.newest.step
    assert step % 10 == 0
    assert step >= max(last.values()) > 0
    assert (found.newest.world_size, [(shard.rank, shard.rows) for shard in found.newest.shards]) == (
        2,
        [(0, 16 * step), (1, 16 * step)],
    )
    with started(ranks(run_directory, step + 10, 0)) as launcher:
        assert sorted(saved(launcher.stdout)) == [(0, step + 10), (1, step + 10)], "nothing is done again"
        assert launcher.wait() == 0
    found = status_of(run_directory, until=step + 10)
    assert found.state == "finished"
    assert found.life is not None
    assert (found.life.incarnation, found.life.ended) == (2, "closed")
    assert found.newest is not None
    assert [shard.rows for shard in found.newest.shards] == [16 * (step + 10)] * 2


ANYWHERE = str(LAUNCH / "anywhere.py")
TRAINED = re.compile(r"step (\d+), rank (\d): trained items \[([\d, ]*)\]\.")


def batches(*commands: list[str]) -> tuple[dict[int, list[int]], set[str]]:
    """Run commands one after the other; return the items of each step, by rank, and the weight in the end."""
    found: dict[tuple[int, int], list[int]] = {}
    weights: set[str] = set()
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=100)
        assert done.returncode == 0, done.stderr
        weights = set(re.findall(r"weight (-?[\d.]+)\.", done.stdout))
        for step, rank, items in TRAINED.findall(done.stdout):
            assert (int(step), int(rank)) not in found, "no step is trained twice"
            found[int(step), int(rank)] = [int(item) for item in items.split(", ")]
    steps = {step for step, _ in found}
    return {step: [item for key in sorted(found) if key[0] == step for item in found[key]] for step in steps}, weights


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, list[int]], set[str]]:
    found = batches([sys.executable, ANYWHERE, str(tmp_path_factory.mktemp("runs") / "run")])
    assert sorted(item for batch in found[0].values() for item in batch) == list(range(48))
    assert list(map(len, found[0].values())) == [8] * 6
    return found


def test_one_script_trains_the_same_under_torchrun_and_goes_on_without(
    run_directory: str, in_one_process: tuple[dict[int, list[int]], set[str]]
) -> None:
    two_ranks = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", ANYWHERE, run_directory, "--until", "4"]
    assert batches(two_ranks, [sys.executable, ANYWHERE, run_directory]) == in_one_process


def test_one_script_trains_the_same_on_ray(
    run_directory: str, in_one_process: tuple[dict[int, list[int]], set[str]]
) -> None:
    pytest.importorskip("ray")
    assert batches([sys.executable, ANYWHERE, run_directory, "--engine", "ray"]) == in_one_process


FOREBAY = """\
#!/bin/bash
echo "forebay $*" >> calls
number=$(grep -c "^forebay status .*--until\\|^forebay status [^-]*$" calls)
nth() { local all=($1); echo "${all[$((number < ${#all[@]} ? number : ${#all[@]} - 1))]/none/}"; }
if [[ $* == *--field* ]]; then nth "$STEPS"; exit 3; fi
number=$((number - 1))
exit $(nth "$CODES")
"""
SBATCH = """\
#!/bin/bash
echo "sbatch $* IDLE=$IDLE RUN=$RUN" >> calls
"""


class Place:
    """A folder with a shell's commands that only note how they were called.

    ``forebay status`` ends with the codes that are given, one after the other, and says the steps: one before the first
    status, and one after each. The last of both stays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("forebay", FOREBAY), ("sbatch", SBATCH)):
            self.add(name, text)

    def add(self, name: str, text: str) -> None:
        """Add a command."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def environment(self, codes: str, steps: str, **more: str) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        plain = {"PATH": path, "CODES": codes, "STEPS": steps, "RUN": "runs/r", "SLURM_JOB_ID": "77"}
        return {**ENVIRONMENT, **plain, **more}

    def bash(self, script: str, codes: str, steps: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a script; what it calls is noted anew."""
        (self.folder / "calls").write_text("")
        return subprocess.run(
            ["bash", "-c", script],
            env=self.environment(codes, steps, **more),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def called(self, name: str) -> list[str]:
        """Return how a command was called."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.removeprefix(name + " ") for line in lines if line.startswith(name + " ")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


AGAIN = f". {LAUNCH / 'slurm.sh'}; again "


class TestSlurm:
    @pytest.mark.parametrize(
        ("code", "before", "now", "idle", "next_idle"),
        [
            (3, "10", "20", "0", "0"),
            (3, "10", "20", "2", "0"),
            (3, "", "10", "1", "0"),
            (3, "20", "20", "0", "1"),
            (3, "", "none", "1", "2"),
        ],
    )
    def test_the_next_job_is_asked_for(
        self, place: Place, code: int, before: str, now: str, idle: str, next_idle: str
    ) -> None:
        done = place.bash(AGAIN + f'"{before}"', str(code), f"x {now}", IDLE=idle)
        assert (done.returncode, done.stderr) == (0, "")
        asked = f"--dependency=afterany:77 examples/launch/slurm.sh IDLE={next_idle} RUN=runs/r"
        assert place.called("sbatch") == [asked]
        assert place.called("forebay")[0] == "status runs/r --until 200"

    @pytest.mark.parametrize(
        ("code", "steps", "idle", "left"),
        [
            (0, "x 200", "0", 0),  # finished
            (3, "x 20", "2", 1),  # the third job in a row that has saved no further step
            (1, "x 20", "0", 1),  # broken
            (4, "x 20", "0", 4),  # somebody else has it
            (5, "x 20", "0", 5),  # no run is there
            (2, "x 20", "0", 2),
            (137, "x 20", "0", 137),  # the command itself was killed
        ],
    )
    def test_no_job_is_asked_for(self, place: Place, code: int, steps: str, idle: str, left: int) -> None:
        done = place.bash(AGAIN + "20", str(code), steps, IDLE=idle)
        assert done.returncode == left
        assert place.called("sbatch") == []
        assert ("no further job" in done.stderr) == (left != 0)

    def test_without_a_command_forebay_no_job_is_asked_for(self, place: Place) -> None:
        place.add("forebay", "#!/nowhere/at/all\n")
        done = place.bash(AGAIN + "20", "3", "x 30")
        assert done.returncode in (126, 127)
        assert place.called("sbatch") == []

    def test_where_the_folder_tells_the_end_no_step_is_named(self, place: Place) -> None:
        place.bash(AGAIN + "10", "3", "x 20", UNTIL="")
        assert place.called("forebay")[0] == "status runs/r"
        assert len(place.called("sbatch")) == 1

    @pytest.mark.parametrize("nodes", [1, 3])
    def test_a_job_trains_and_then_decides_whatever_srun_says(self, place: Place, nodes: int) -> None:
        place.add("srun", '#!/bin/bash\necho "srun $*" >> calls\nexit 1\n')
        place.add("scontrol", '#!/bin/bash\n[[ $* == "show hostnames gpu[4-6]" ]] && printf "gpu4\\ngpu5\\ngpu6\\n"\n')
        more = {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu[4-6]"} if nodes == 3 else {}
        done = place.bash(f"bash {LAUNCH / 'slurm.sh'}", "3", "10 20", **more)
        assert done.returncode == 0, done.stderr
        (given,) = place.called("srun")
        head = "gpu4" if nodes == 3 else "localhost"
        assert given == (
            f"torchrun --nnodes={nodes} --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=77 "
            f"--rdzv-endpoint={head}:29400 examples/launch/train_ranks.py runs/r --steps 200"
        )
        order = [line.split()[0] for line in (place.folder / "calls").read_text().splitlines()]
        assert order == ["forebay", "srun", "forebay", "forebay", "sbatch"]

    def test_the_signal_goes_to_the_steps_and_the_job_may_be_requeued(self) -> None:
        lines = [line.split("#SBATCH ")[1].split()[0] for line in _directives()]
        assert {"--signal=TERM@120", "--requeue"} <= set(lines)


def _directives() -> list[str]:
    return [line for line in (LAUNCH / "slurm.sh").read_text().splitlines() if line.startswith("#SBATCH ")]


class TestTorchrun:
    LOOP = str(LAUNCH / "torchrun.sh")

    @pytest.mark.parametrize(
        ("codes", "steps", "rounds", "left"),
        [
            ("3 3 0", "0 10 20 30", 3, 0),
            ("0", "10 20", 1, 0),
            ("3 1", "0 10", 2, 1),
            ("3", "10", 3, 1),  # no further step, three times
            ("3 3 3 3 0", "10 10 10 20 20 30", 5, 0),
        ],
    )
    def test_it_starts_the_ranks_until_the_run_is_finished(
        self, place: Place, codes: str, steps: str, rounds: int, left: int
    ) -> None:
        place.add("torchrun", '#!/bin/bash\necho "torchrun $*" >> calls\nexit 1\n')
        done = place.bash(self.LOOP, codes, steps)
        assert done.returncode == left, done.stderr
        given = "--standalone --nproc-per-node=2 examples/launch/train_ranks.py runs/r --steps 200"
        assert place.called("torchrun") == [given] * rounds

    def test_a_signal_is_passed_on_once_and_ends_it_when_the_ranks_have_saved(self, place: Place) -> None:
        place.add(
            "torchrun",
            "#!/bin/bash\n"
            "trap 'kill $!; echo torchrun was told >> calls; sleep 0.3; "  # as long as a save may take
            "echo torchrun has saved >> calls; exit 1' TERM\n"
            "echo ready\n"
            "sleep 1000 & wait $!\n",
        )
        with subprocess.Popen(
            [self.LOOP],
            env=place.environment("3", "10 20"),
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 3
        calls = (place.folder / "calls").read_text().splitlines()
        assert calls == [
            "forebay status runs/r --field newest.step",
            "torchrun was told",
            "torchrun has saved",
            "forebay status runs/r --until 200",
            "forebay status runs/r --field newest.step",
        ]
