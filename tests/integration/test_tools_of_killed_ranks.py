"""Ranks that are processes are killed, and what they left is damaged, salvaged, resharded or merged: what the weights
have seen in the end is every item, once."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import salvage, verify
from pipeline.checkpoint.manifest import PIPELINE_RANKS
from pipeline.cli import main
from pipeline.testing import KillingFiles
from pipeline.tools import reshard
from tests.integration.test_pipeline_ranks_killed import Lives
from tests.support.children import ChildProcess
from tests.support.keeping import digest
from tests.support.pipeline_ranks import SAVE_EVERY
from tests.support.ranked import manifests, serve
from tests.support.salvaging import flip


@pytest.fixture(scope="module")
def server() -> Any:
    return serve()


@pytest.fixture(scope="module", params=[(2,), (3, 2)], ids=str)
def killed(request: pytest.FixtureRequest, server: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run whose ranks were killed amid the work, all at once; and how many the last were."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    lives = Lives(server, directory, keep=None)
    for size in request.param:
        lives.live(size, 2 * SAVE_EVERY + 2)
    return directory, request.param[-1]


@pytest.fixture
def run(killed: tuple[Path, int], tmp_path: Path) -> tuple[Path, int]:
    """A copy of it."""
    return Path(shutil.copytree(killed[0], tmp_path / "run")), killed[1]


def journal_gone(run: Path, chance: random.Random) -> None:
    max((run / "journals").glob("*-0001.fbj")).unlink()


def journals_flipped(run: Path, chance: random.Random) -> None:
    for path in (run / "journals").iterdir():
        flip(path, chance.randrange(64, path.stat().st_size))


def segments_cut(run: Path, chance: random.Random) -> None:
    for path in (run / "segments").iterdir():
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def manifest_gone(run: Path, chance: random.Random) -> None:
    max((run / "generations").glob("*[0-9]/manifest.json")).unlink()  # the very newest may have had none yet


@pytest.mark.slow
@pytest.mark.parametrize("damage", [journal_gone, journals_flipped, segments_cut, manifest_gone])
def test_every_item_is_trained_once_by_as_many_ranks_after_a_salvage(
    run: tuple[Path, int], tmp_path: Path, server: Any, damage: Callable[[Path, random.Random], None]
) -> None:
    directory, size = run
    damage(directory, random.Random(f"{damage.__name__} {size}"))
    before, out = digest(directory), tmp_path / "out"
    assert main(["salvage", str(directory), str(out)]) == 0
    assert digest(directory) == before
    assert verify(str(out)).whole
    (manifest,) = manifests(out)
    assert (manifest.kind, manifest.world_size, manifest.reason) == (PIPELINE_RANKS, size, "salvage")
    Lives(server, out).end(size)


@pytest.mark.slow
@pytest.mark.parametrize("to", [1, 2, 3])
def test_every_item_is_trained_once_by_the_ranks_for_which_it_was_resharded(
    run: tuple[Path, int], tmp_path: Path, server: Any, to: int
) -> None:
    directory, _ = run
    out = tmp_path / "out"
    assert main(["reshard", str(directory), "--to", str(to), "--out", str(out)]) == 0
    Lives(server, out).end(to)


def reshard_and_die(pipe: Connection, run: str, out: str, after: int) -> None:
    reshard(run, out, 3, files=KillingFiles(after=after))
    pipe.send("it lives")


def salvage_and_die(pipe: Connection, run: str, out: str, after: int) -> None:
    salvage(run, out, files=KillingFiles(after=after))
    pipe.send("it lives")


@pytest.mark.parametrize("dies", [salvage_and_die, reshard_and_die])
def test_a_tool_that_is_killed_leaves_the_source_and_no_run(
    killed: tuple[Path, int], tmp_path: Path, dies: Callable[..., None]
) -> None:
    before = digest(killed[0])
    for after in (0, 5, 30):
        out = tmp_path / str(after)
        child = ChildProcess(dies, str(killed[0]), str(out), after)
        child.process.join(60)
        assert child.process.exitcode == -9
        child.pipe.close()
        assert not (out / "run.json").exists()
    assert digest(killed[0]) == before
    assert main(["verify", str(killed[0]), "--quick"]) == 0
