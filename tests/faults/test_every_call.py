"""Every call to the file system that a life makes, from its resume to its last commit: failing, done and failing all
the same, and with a loss of power. What is there afterwards is whole, and the run goes on.

The life resumes a run that was killed (links, syncs of what the dead had written), saves at every step (generations and
segments are removed), and copies what is live out of segments that are mostly dead.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Rollout, StoreError, Task, WriteFailed
from pipeline.checkpoint import verify
from pipeline.store.files import FilesLike
from tests.faults.test_compacting import moves
from tests.faults.test_triggers import manifests
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, train
from tests.support.disk import ScriptedFiles
from tests.support.power import VolatileFiles
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

VERBS = {name for name in vars(FilesLike) if not name.startswith("_")} - {
    "start_writing"
}  # a hint to the disk, which promises nothing
COUNT, BEFORE, AFTER = 120, 8, 18
"""Items; the steps of the life that is killed, and of the one that resumes."""


async def parks(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep(1 + item["n"] / 10_000)
    if item["n"] % 10 == 0:
        ctx.park()
    return Rollout({"n": [item["n"]]}, reward=1.0)


def make(directory: str, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(COUNT), run=parks, shuffle=False)
    options = {"capacity": COUNT, "segment_bytes": 2000, **options}
    return inline_pipeline(given, directory=directory, concurrency=8, keep=1, **options)


async def live(pipe: Pipeline, until: int, trained: Trained) -> None:
    await begin(pipe, trained=trained)
    async for batch in pipe.batches(groups=5, until=until):
        await train(pipe, trained, batch)
        await (await pipe.save(batch.step)).committed()


async def goes_on(directory: str, least: int) -> None:
    """A new life on a disk that is mended: it has what was committed, and every item is trained once."""
    trained = Trained()
    async with make(directory) as pipe:
        assert (await begin(pipe, trained=trained)).step >= least
        found = verify(directory)  # of the generation that the resume committed
        assert found.whole, found.damages

        async def reward() -> None:
            while pipe.ledger.claimed < COUNT or pipe.ledger.parked:
                for uid in list(pipe.ledger.parked):
                    await pipe.reward(uid, 2.0)
                await anyio.sleep(1)

        async with anyio.create_task_group() as group:
            group.start_soon(reward)
            await finish(pipe, trained, 5)
        await (await pipe.save(len(trained.batches))).committed()
    assert trained.items == list(range(COUNT))
    found = verify(directory)
    assert found.whole, found.damages
    leftovers = [str(path) for path in Path(directory).rglob("*.part")]
    assert not leftovers


@pytest.fixture
async def killed(tmp_path: Path) -> str:
    """A run that was killed after a few steps."""
    async with make(str(tmp_path / "first")) as pipe:
        await live(pipe, BEFORE, Trained())
        return crashed_copy(str(tmp_path / "first"), tmp_path / "killed")


async def calls(killed: str, target: str) -> list[str]:
    """Each call of the second life."""
    shutil.copytree(killed, target)
    files = ScriptedFiles()
    async with make(target, files=files) as pipe:
        await live(pipe, AFTER, Trained())
    assert moves(target), "nothing was compacted"
    return files.calls


def some_of_each(calls: Sequence[str], most: int) -> list[int]:
    """Numbers of calls, from 1: the first and last of each verb, and some between."""
    chance, chosen = random.Random(7), set[int]()
    for verb in sorted(set(calls)):
        places = [at for at, each in enumerate(calls, 1) if each == verb]
        chosen |= {places[0], places[-1], *chance.sample(places, min(most, len(places)))}
    return sorted(chosen)


async def test_such_a_life_makes_every_kind_of_call(killed: str, tmp_path: Path) -> None:
    """A verb that is added to the file layer has to be among those that the tests below let fail."""
    assert set(await calls(killed, str(tmp_path / "counted"))) == VERBS | {"set_aside"}


@pytest.mark.parametrize(
    "how",
    [{}, {"after": True}, {"stays": True}, {"torn": True, "stays": True}],
    ids=["failing", "done", "failing for good", "half done"],
)
async def test_failing_at_any_call_it_is_told_and_a_new_life_goes_on(
    killed: str, tmp_path: Path, how: dict[str, bool]
) -> None:
    made = await calls(killed, str(tmp_path / "counted"))
    told, passed = set(), set()
    for number in some_of_each(made, 4):
        directory = str(tmp_path / str(number))
        shutil.copytree(killed, directory)
        trained, files = Trained(), ScriptedFiles(number, lambda: OSError(errno.EIO, "Input/output error"), **how)
        try:
            async with make(directory, files=files) as pipe:
                await live(pipe, AFTER, trained)
        except StoreError as error:
            told.add(made[number - 1])
            text = str(error)
        else:
            passed.add(made[number - 1])
            text = f"Input/output error {directory}"
        assert "Input/output error" in text
        assert directory in text
        assert files.open == set(), "a descriptor was left open"
        committed = max(manifest.step for manifest in manifests(directory))
        await goes_on(directory, committed)
        shutil.rmtree(directory)
    # What only cleans up is tried again later, and a failure of it is no failure of the commit.
    assert passed <= {"unlink", "rmdir", "sync_directory", "link", "close", "set_aside"}
    assert told >= {"makedirs", "create", "write", "sync", "sync_path", "rename", "sync_directory"}


async def test_half_a_record_at_the_end_of_a_segment_is_promised_by_no_generation(killed: str, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "counted")
    async with make(str(tmp_path / "counted"), files=(whole := ScriptedFiles()), segment_bytes=1 << 20) as pipe:
        await live(pipe, AFTER, Trained())
    writes = [number for number, verb in enumerate(whole.calls, 1) if verb == "write"]
    torn = 0
    for number in writes[:: max(1, len(writes) // 25)]:
        directory = str(tmp_path / str(number))
        shutil.copytree(killed, directory)
        files = ScriptedFiles(number, lambda: OSError(errno.EIO, "Input/output error"), torn=True, stays=True)
        with pytest.raises(StoreError):
            async with make(directory, files=files, segment_bytes=1 << 20) as pipe:
                await live(pipe, AFTER, Trained())
        torn += any(path.suffix == ".fbs" and path.stat().st_size % 64 for path in Path(directory).rglob("*"))
        await goes_on(directory, max(manifest.step for manifest in manifests(directory)))
    assert torn, "no segment was torn"


class PowerCuts(VolatileFiles):
    """Notes what would be there, were the power to go right before one of the chosen calls."""

    def __init__(self, directory: str, target: Path, chosen: Sequence[int]) -> None:
        super().__init__()
        self._directory, self._target, self._chosen = directory, target, set(chosen)
        self.count = self.committed = 0
        self.cuts: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in VERBS:
            self._comes()
        return super().__getattribute__(name)

    def _comes(self) -> None:
        self.count += 1
        if self.count in self._chosen:
            left = self.after_power_loss(self._directory, str(self._target / str(self.count)))
            self.cuts.append((left, self.committed))


@pytest.mark.parametrize("durability", ["kill", "power"])
async def test_with_the_power_gone_at_any_call_what_was_committed_is_there(tmp_path: Path, durability: Any) -> None:
    directory = str(tmp_path / "run")
    files = PowerCuts(directory, tmp_path, range(60, 2000, 13))
    for until in (BEFORE, AFTER):
        trained = Trained()
        async with make(directory, files=files, durability=durability) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=5, until=until):
                await train(pipe, trained, batch)
                await (await pipe.save(batch.step)).committed()
                files.committed = batch.step
    files.end()
    assert len(files.cuts) > 20
    assert {committed for _, committed in files.cuts} >= set(range(1, AFTER))
    for left, committed in files.cuts:
        await goes_on(left, committed)


async def test_a_commit_that_failed_is_told_once_and_a_retry_works_in_the_same_life(run_directory: str) -> None:
    files, trained = ScriptedFiles(), Trained()
    async with make(run_directory, files=files) as pipe:
        await begin(pipe, trained=trained)
        for step in (1, 2, 3):
            await train(pipe, trained, await pipe.get_batch(5))
            saving = await pipe.save(step)
            if step == 2:
                broken = os.path.join(run_directory, "generations", f"{saving.generation:08d}")
                Path(broken).write_bytes(b"in the way")  # the folder cannot be renamed to it
                with pytest.raises(WriteFailed, match="a retry may work"):
                    await saving.committed()
                saving = await pipe.save(step)
            await saving.committed()
    assert sorted(manifest.step for manifest in manifests(run_directory)) == [3]


SCRIPT = """
    import os, sys
    import anyio
    directory = sys.argv[1]
    changes, beside = set(), set()

    def watch(event, args):
        kinds = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.symlink")
        if event not in kinds or not isinstance(args[0], str) or not os.path.abspath(args[0]).startswith(directory):
            return
        if event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith(os.path.join("store", "files.py")):
            frame = frame.f_back
        (beside if frame is None else changes).add((event, os.path.basename(args[0])))

    from tests.faults.test_every_call import live, make
    from tests.support.crashes import Trained
    from pipeline.store.files import OsFiles
    from pipeline.testing import VirtualClockLoop
    import asyncio

    async def main(until):
        async with make(directory, files=OsFiles()) as pipe:
            await live(pipe, until, Trained())

    sys.addaudithook(watch)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main(8))
        runner.run(main(18))
    print(sorted({event for event, _ in changes}), sorted(beside), file=sys.stderr)
"""


def test_nothing_in_the_folder_is_changed_but_through_the_file_layer(tmp_path: Path) -> None:
    """So that what the tests let fail is all that there is; but for the lock, which is no part of what is saved."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    kinds = ["open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"]
    assert done.stderr.splitlines()[-1] == f"{kinds} [('open', 'lock')]"
