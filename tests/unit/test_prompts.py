"""A pool of prompts: what is drawn, what is learnt, and that a kill forgets nothing of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import ChoosingSource, ConfigError, Context, Item, LearningSource, Pipeline, Rollout, Task
from pipeline.errors import SourceError
from tasks import EnvSeeds, SequenceSource
from tasks.prompts import DifficultyPool, ParquetSource
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline

COUNT = 12


def pool(count: int = COUNT, **options: Any) -> DifficultyPool:
    return DifficultyPool(SequenceSource([{"n": n} for n in range(count)]), **options)


def test_it_is_a_source_that_learns_and_chooses() -> None:
    assert isinstance(pool(), ChoosingSource)
    assert isinstance(pool(), LearningSource)
    assert not isinstance(SequenceSource([]), ChoosingSource)


def test_what_is_solved_every_other_time_is_drawn_most() -> None:
    given = pool(4, memory=0.0, floor=0.1)
    assert given.weights.tolist() == [1, 1, 1, 1]
    for index, reward in ((0, 0.0), (1, 0.5), (2, 1.0)):
        given.feedback(index, reward)
    assert given.weights.tolist() == pytest.approx([0.1, 1, 0.1, 1])
    assert given.rates.tolist()[:3] == [0, 0.5, 1]
    assert np.isnan(given.rates[3])
    found = given.statistics()
    assert (found.unseen, found.hopeless, found.easy, found.between, found.rate) == (1, 1, 1, 1, 0.5)


@pytest.mark.parametrize(
    ("options", "rewards", "rate"),
    [
        ({}, [1.0, 0.0], 0.5),
        ({"memory": 0.75}, [1.0, 0.0], 0.75),
        ({"low": -1.0, "high": 3.0}, [0.0], 0.25),
        ({"low": -1.0}, [-7.0], 0.0),
        ({}, [2.5], 1.0),
        ({}, [float("inf")], 1.0),
    ],
)
def test_rates_follow_rewards(options: dict[str, float], rewards: list[float], rate: float) -> None:
    given = pool(2, **options)
    for reward in rewards:
        given.feedback(1, reward)
    assert given.rates[1] == pytest.approx(rate)


def test_draws_follow_the_weights() -> None:
    given = pool(5, memory=0.0, floor=0.2)
    for index, reward in enumerate([0.0, 0.1, 0.5, 0.9]):
        given.feedback(index, reward)
    draws = 20_000
    counts = np.bincount([given.choose(7, 0, position) for position in range(draws)], minlength=5)
    expected = draws * given.weights / given.weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square with 4 degrees of freedom, at 0.001
    assert [given.choose(7, 0, n) for n in range(50)] == [given.choose(7, 0, n) for n in range(50)]
    assert [given.choose(7, 0, n) for n in range(50)] != [given.choose(7, 1, n) for n in range(50)]


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"floor": 0.0}, "floor"),
        ({"floor": 1.5}, "floor"),
        ({"memory": 1.0}, "memory"),
        ({"low": 1.0}, "low"),
        ({"high": float("inf")}, "low"),
        ({"length": 0}, "length"),
    ],
)
def test_options_are_checked(options: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as raised:
        pool(**options)
    assert raised.value.option == option


def test_a_pool_needs_items_and_an_end_of_them() -> None:
    for source in (SequenceSource([]), EnvSeeds(1)):
        with pytest.raises(ConfigError, match="needs items, and an end"):
            DifficultyPool(source)


@pytest.mark.parametrize(("index", "reward"), [(-1, 1.0), (COUNT, 1.0), (0, float("nan"))])
def test_feedback_that_cannot_be_changes_nothing(index: int, reward: float) -> None:
    given = pool()
    with pytest.raises(SourceError):
        given.feedback(index, reward)
    assert np.isnan(given.rates).all()


# -- Parquet -----------------------------------------------------------------------------------------------------------


def write(path: Path, **columns: Any) -> str:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    return str(path)


def test_rows_of_parquet_files_are_items(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", prompt=["1+1", None], tags=[["x"], []], n=[2, 2**60])
    second = write(tmp_path / "b.parquet", prompt=["é🏞"], tags=[["y", "z"]], n=[0])
    source = ParquetSource([first, Path(second)])
    rows = [{"prompt": "1+1", "tags": ["x"], "n": 2}, {"prompt": None, "tags": [], "n": 2**60}]
    assert [source.item(index) for index in range(source.length())] == [
        *rows,
        {"prompt": "é🏞", "tags": ["y", "z"], "n": 0},
    ]
    assert ParquetSource(first, columns=["n"]).item(1) == {"n": 2**60}
    (tmp_path / "c").mkdir()
    moved = write(tmp_path / "c/a.parquet", prompt=["1+1", None], tags=[["x"], []], n=[2, 2**60])
    assert ParquetSource(moved).mark() == ParquetSource(first).mark() != source.mark()
    for index in (-1, 3):
        with pytest.raises(SourceError, match="has 3 items"):
            source.item(index)


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "a.parquet", n=[1])
    other = write(tmp_path / "b.parquet", m=[1])
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and no more")
    for path, columns, what in (
        ([], None, "no Parquet file"),
        (str(tmp_path / "absent"), None, "cannot be read"),
        (str(tmp_path / "c.parquet"), None, "cannot be read"),
        (good, ["n", "x"], "has no column 'x'; it has n"),
        ([good, other], None, "has the columns"),
    ):
        with pytest.raises(SourceError, match=what):
            ParquetSource(path, columns)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"ParquetSource: needs .*pip install 'forebay\[tools\]'"):
        ParquetSource(str(tmp_path / "a.parquet"))


# -- in a pipeline -----------------------------------------------------------------------------------------------------


async def solve(item: Item, ctx: Context) -> Rollout:
    """Even ones are solved, odd ones never are, and every third one now and then."""
    await anyio.sleep(1.0)
    n = item["n"]
    return Rollout({"n": [n]}, reward=float(ctx.rng.random() < 0.5) if n % 3 == 0 else float(n % 2 == 0))


def running(given: DifficultyPool, directory: str | None = None) -> Pipeline:
    task = Task("pool", source=given, run=solve, group_size=4, epochs=1)
    return inline_pipeline(task, directory=directory, concurrency=8, capacity=16, order="strict", seed=5)


@pytest.mark.virtual_time
async def test_a_run_comes_to_prefer_what_can_be_learnt() -> None:
    given, drawn = pool(length=400), []
    async with running(given) as pipe:
        await pipe.start(weights_current=True)
        async for batch in pipe.batches(groups=8):
            drawn += [group.index for group in batch]
    late = np.bincount(drawn[200:], minlength=COUNT)
    assert late[::3].sum() > 4 * np.delete(late, range(0, COUNT, 3)).sum()
    assert given.statistics().unseen == 0
    assert len(drawn) == 400


@pytest.mark.virtual_time
@pytest.mark.parametrize("at", [2.5, 7.5, 20.5])
async def test_after_a_crash_it_knows_what_it_knew_and_draws_on(run_directory: str, tmp_path: Path, at: float) -> None:
    given = pool(length=80)
    async with running(given, run_directory) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        with anyio.move_on_after(at):
            await finish(pipe, trained, 4)
        copy = crashed_copy(run_directory, tmp_path / "copy")
        rates = given.rates
        assert not np.isnan(rates).all()
        drawn = {uid: (entry.position, entry.index) for uid, entry in pipe.ledger.entries.items()}
        assert drawn
    again = pool(length=80)
    async with running(again, copy) as pipe:
        trained = Trained()
        pipe.attach(trained=trained)
        await pipe.resume()
        assert np.array_equal(again.rates, rates, equal_nan=True)
        assert {uid: (e.position, e.index) for uid, e in pipe.ledger.entries.items()}.items() >= drawn.items()
        await pipe.start(weights_current=True)
        await finish(pipe, trained, 4)
        assert pipe.ledger.next_uid == 80


@pytest.mark.virtual_time
async def test_a_choice_that_fails_ends_the_run_with_its_name() -> None:
    class Broken(DifficultyPool):
        def choose(self, seed: int, epoch: int, position: int) -> int:
            raise OSError("disk")

    async with running(Broken(SequenceSource([1, 2]))) as pipe:
        await pipe.start(weights_current=True)
        with pytest.raises(SourceError, match=r"task 'pool': its source's choose\(\) failed.*disk"):
            await pipe.get_batch(1)


async def test_the_items_of_a_local_data_set_of_hugging_face(tmp_path: Path, run_directory: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows: dict[str, list[Any]] = {
        "question": [f"{n}+{n}" for n in range(COUNT)],
        "answer": [2 * n for n in range(COUNT)],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    data = datasets.load_from_disk(str(tmp_path / "set"))
    asked: list[str] = []

    async def solve(item: Item, ctx: Context) -> Rollout:
        asked.append(item["question"])
        return Rollout({"answer": [item["answer"]]}, reward=1.0)

    seen: list[int] = []
    for steps in (2, None):  # the second life goes on where the first one was
        given = Task("sums", source=SequenceSource(data), run=solve, epochs=1)
        async with Pipeline(given, directory=run_directory, watchdog=None, after_crash="discard") as pipe:
            begun = await pipe.resume()
            await pipe.start(weights_current=True)
            step = begun.step
            async for batch in pipe.batches(2, until=None if steps is None else steps):
                seen += [int(group.rollouts[0]["answer"][0]) for group in batch]
                step = batch.step
            await (await pipe.save(step)).committed()
    assert sorted(seen) == rows["answer"]
    assert set(asked) == set(rows["question"])
