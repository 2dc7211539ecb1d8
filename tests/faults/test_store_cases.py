"""Hard cases of what is stored, each through a whole run: into a batch, saved, resumed, and forked."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from pipeline import Batch, ConfigError, Context, Damaged, Item, NewerFormat, Pipeline, Retry, Rollout, Task
from pipeline.checkpoint import verify
from tests.faults.test_triggers import manifests
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.opening import find, reseal, told
from tests.support.runs import numbers, task
from tests.unit.test_trainer_state import same

pytestmark = pytest.mark.virtual_time

_RANGE = np.arange(6).reshape(2, 3)

TENSORS: dict[str, tuple[Any, torch.Tensor]] = {
    "Fortran order": (np.asfortranarray(_RANGE), torch.tensor([[0, 1, 2], [3, 4, 5]])),
    "every other": (np.arange(10)[::2], torch.tensor([0, 2, 4, 6, 8])),
    "transposed": (_RANGE.T, torch.tensor([[0, 3], [1, 4], [2, 5]])),
    "backwards": (np.arange(3)[::-1], torch.tensor([2, 1, 0])),
    "broadcast": (np.broadcast_to(np.arange(3), (2, 3)), torch.tensor([[0, 1, 2], [0, 1, 2]])),
    "torch, transposed": (torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])),
    "torch, every other": (torch.arange(10)[::2], torch.tensor([0, 2, 4, 6, 8])),
    "torch, expanded": (torch.ones(1).expand(3), torch.ones(3)),
    "empty a": (np.zeros((0, 4), np.float32), torch.zeros((0, 4))),
    "empty b": (torch.zeros((0, 4)), torch.zeros((0, 4))),
    "empty bool": (np.zeros((3, 0, 2), bool), torch.zeros((3, 0, 2), dtype=torch.bool)),
    "0-d": (np.array(3.5), torch.tensor(3.5, dtype=torch.float64)),
    "a scalar of NumPy": (np.float32(3.5), torch.tensor(3.5)),
    "uint8": (np.array([0, 255], np.uint8), torch.tensor([0, 255], dtype=torch.uint8)),
    "bool": (np.array([True, False]), torch.tensor([True, False])),
    "int64": (np.array(2**53 + 1), torch.tensor(2**53 + 1)),
    "float16": (np.array([65504, 6e-8], np.float16), torch.tensor([65504, 6e-8], dtype=torch.float16)),
    "bfloat16": (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.bfloat16)),
    "float64": ([5e-324, -0.0, float("inf"), float("nan")], torch.tensor([5e-324, -0.0, float("inf"), float("nan")])),
    "more than a byte": ([300], torch.tensor([300])),
}
TENSORS["float64"] = (np.array(TENSORS["float64"][0]), torch.tensor(TENSORS["float64"][0], dtype=torch.float64))

INFO: dict[str, Any] = {
    "cut in the midst": "ok \ud83d",
    "special": ["a\0b", "\ufffe", "\u202e\u05d0\u05d1 right to left"],
    "long": "x" * 2**20,
    "\U0001f600": {"\U0001f916 \ud83d": 1},
    "numbers": [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1],
    "floats": {"best": float("-inf"), "last": float("nan"), "lr": 5e-324, "x": -0.0},
}


def given() -> Rollout:
    return Rollout({name: value for name, (value, _) in TENSORS.items()}, reward=1.0, info=INFO)


async def hard(item: Item, ctx: Context) -> Rollout:
    """The first attempt fails, with a text that MessagePack refuses."""
    await anyio.sleep(1.0)
    if ctx.attempt == 1:
        raise ValueError("ok \ud83d \0")
    return given()


def check(batch: Batch) -> None:
    for group in batch:
        for rollout in group:
            assert same(dict(rollout.info), INFO)
            assert set(rollout.traces[0].tensors) == set(TENSORS)
            for name, (_, expected) in TENSORS.items():
                assert same(rollout[name], expected), name


def hard_run(directory: str) -> Pipeline:
    kind = task(4, hard, group_size=2, on_failure=Retry(attempts=3))
    return inline_pipeline(kind, directory=directory, capacity=8)


async def test_whatever_a_runner_returns_comes_back_from_memory_from_the_disk_and_in_a_fork(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    async with hard_run(first) as pipe:
        await begin(pipe, trained=Trained())
        await pipe.put("numbers", [given(), given()])
        batch = await pipe.get_batch(5)
        check(batch)
        batch.release()
        assert pipe.ledger.totals["numbers"].failed == 8, "an error's text must not end the run"
        await (await pipe.save(0)).committed()
    for directory, origin in ((second, first), (first, None)):
        async with hard_run(directory) as pipe:
            pipe.attach(trained=Trained())
            assert (await pipe.resume(from_=origin)).buffered == 5
            await pipe.start(weights_current=True)
            check(await pipe.get_batch(5))
    assert verify(first).whole
    assert verify(second).whole


async def test_what_is_changed_afterwards_changes_nothing_that_is_stored(run_directory: str) -> None:
    """By the runner, which uses its array and its lists again, and by the trainer, who was handed them."""
    obs, log, note = np.zeros(2, np.int64), list[int](), dict[str, Any]()

    async def reuses(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1.0 + item["n"])
        obs[:] = item["n"] + 1
        log.clear()
        log.append(item["n"])
        note["n"] = item["n"]
        return Rollout({"obs": obs}, reward=0.0, info={"log": log, "note": note})

    def seen(batch: Batch) -> list[Any]:
        rollouts = [rollout for group in batch for rollout in group]
        return [(each["obs"].tolist(), each.info["log"], each.info["note"]) for each in rollouts]

    expected = [([n + 1] * 2, [n], {"n": n}) for n in range(3)]
    async with inline_pipeline(task(3, reuses), directory=run_directory, capacity=3) as pipe:
        await begin(pipe)
        for _ in range(2):
            batch = await pipe.get_batch(3)
            assert seen(batch) == expected
            for group in batch:
                for rollout in group:
                    rollout["obs"].zero_()
                    rollout.info["log"].clear()
                    rollout.info["note"]["n"] = "mine"
            batch.release()
        await (await pipe.save(0)).committed()
    async with inline_pipeline(task(3, reuses), directory=run_directory, capacity=3) as pipe:
        await begin(pipe)
        assert seen(await pipe.get_batch(3)) == expected


class Best:
    """What a trainer keeps of its best score, before there is one."""

    def __init__(self) -> None:
        self.state: Any = {"best": float("-inf"), "last": float("nan"), "lr": 5e-324, "x": -0.0}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


async def test_a_best_score_of_minus_infinity_survives_the_very_first_generation(
    run_directory: str, tmp_path: Path
) -> None:
    async with inline_pipeline(directory=run_directory) as pipe:
        await begin(pipe, best=Best())
        copy = crashed_copy(run_directory, tmp_path / "copy")
    async with inline_pipeline(directory=copy) as pipe:
        best = Best()
        best.state = None
        assert (await begin(pipe, best=best)).generation == 0
        assert same(best.state, Best().state)


async def saved(directory: str, steps: int, **options: Any) -> None:
    """A run that saved step 10, step 20, and so on."""
    async with inline_pipeline(task(steps * 10, lasting({})), directory=directory, capacity=40, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=1, until=steps * 10):
            await train(pipe, trained, batch)
            if batch.step % 10 == 0:
                await (await pipe.save(batch.step)).committed()


class TestWhichGeneration:
    @pytest.mark.parametrize("name", ["consumer.json", "progress.json", "trainer/trained.safetensors"])
    @pytest.mark.parametrize("way", ["missing", "short"])
    async def test_a_damaged_newest_one_is_refused_and_the_one_before_offered(
        self, run_directory: str, name: str, way: str
    ) -> None:
        await saved(run_directory, 2)
        path = Path(run_directory, "generations", "00000002", name)
        if way == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])
        async with inline_pipeline(task(20, lasting({})), directory=run_directory) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            with pytest.raises(Damaged, match=rf"generation 2 is damaged: {path}.*resume\(step=10\) takes the one bef"):
                await pipe.resume()
            assert trained.batches == [], "it is used only when it is asked for"
            assert (await pipe.resume(step=10)).step == 10

    async def test_one_of_the_same_step_is_offered_by_what_to_move(self, run_directory: str, tmp_path: Path) -> None:
        """A resume commits a generation of the step that it resumes: the step does not tell the two apart."""
        await saved(run_directory, 1, keep=None)
        async with inline_pipeline(task(10, lasting({})), directory=run_directory, keep=None) as pipe:
            await begin(pipe, trained=Trained())
        newest = Path(run_directory, "generations", "00000002")
        Path(newest, "consumer.json").write_bytes(b"{}")
        async with inline_pipeline(task(10, lasting({})), directory=run_directory) as pipe:
            pipe.attach(trained=Trained())
            with pytest.raises(Damaged, match=rf"Move {newest} out of the run"):
                await pipe.resume()
            os.rename(newest, tmp_path / "moved")
            assert (await pipe.resume()).step == 10

    async def test_the_only_one_has_none_before_it(self, run_directory: str) -> None:
        async with inline_pipeline(directory=run_directory) as pipe:
            await begin(pipe, trained=Trained())
        Path(run_directory, "generations", "00000000", "consumer.json").unlink()
        async with inline_pipeline(directory=run_directory) as pipe:
            pipe.attach(trained=Trained())
            with pytest.raises(Damaged, match=r"expected\.|lists it \(\d+ bytes\)\.$"):
                await pipe.resume()

    @pytest.mark.parametrize(
        ("keep", "kept"), [(2, [20, 30]), (1, [30]), (None, [0, 10, 20, 30]), (-1, [0, 10, 20, 30])]
    )
    async def test_so_many_are_kept(self, run_directory: str, keep: int | None, kept: list[int]) -> None:
        await saved(run_directory, 3, keep=keep)
        assert sorted(manifest.step for manifest in manifests(run_directory)) == kept

    @pytest.mark.parametrize("keep", [0, -2])
    async def test_no_number_means_that_none_is_kept(self, run_directory: str, keep: int) -> None:
        with pytest.raises(ConfigError, match=f"keep={keep}"):
            inline_pipeline(directory=run_directory, keep=keep)

    async def test_the_order_in_which_a_folder_is_listed_decides_nothing(
        self, run_directory: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twelve lives, with as many journals and generations, and a name that is a number among them."""
        for life in range(1, 13):
            async with inline_pipeline(
                task(60, lasting({})), directory=run_directory, capacity=20, keep=None, segment_bytes=700
            ) as pipe:
                trained = Trained()
                resumed = await begin(pipe, trained=trained)
                async for batch in pipe.batches(groups=2, until=resumed.step + 1):
                    await train(pipe, trained, batch)
                await (await pipe.save(life)).committed()
        expected = told(find(run_directory, [task(60, lasting({}))], ["trained"]))
        listed = os.listdir
        for seed in range(6):
            chance = random.Random(seed)
            monkeypatch.setattr(os, "listdir", lambda path, c=chance: c.sample(names := listed(path), len(names)))
            assert told(find(run_directory, [task(60, lasting({}))], ["trained"])) == expected


class TestOtherVersions:
    @staticmethod
    def change(directory: str, name: str, old: str, new: str) -> Path:
        path = max(Path(directory, "generations").iterdir(), key=lambda each: int(each.name)) / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        reseal(directory)
        return path

    @pytest.mark.parametrize("name", ["progress.json", "consumer.json"])
    async def test_a_field_of_the_future_is_kept_and_told(self, run_directory: str, name: str) -> None:
        await saved(run_directory, 1)
        self.change(run_directory, name, "{", '{"of the future": [1, {"x": 0.5}],')
        for generation in (2, 3):
            with capture_logs() as logs:
                async with inline_pipeline(task(10, lasting({})), directory=run_directory) as pipe:
                    assert (await begin(pipe, trained=Trained())).step == 10
            unknown = [(each["field"], each["file"]) for each in logs if "unknown_field" in each["event"]]
            assert unknown == [("of the future", name)]
            content = Path(run_directory, "generations", f"{generation:08d}", name).read_bytes()
            assert b'"of the future"' in content

    async def test_a_newer_one_is_refused_with_both_numbers(self, run_directory: str) -> None:
        await saved(run_directory, 1)
        path = self.change(run_directory, "progress.json", '"format_version": 1', '"format_version": 7')
        async with inline_pipeline(task(10, lasting({})), directory=run_directory) as pipe:
            pipe.attach(trained=Trained())
            with pytest.raises(NewerFormat, match=f"{path}.*format 7.*up to 1"):
                await pipe.resume()

    async def test_an_older_one_lacks_fields_and_has_their_defaults(self, run_directory: str) -> None:
        await saved(run_directory, 1)
        before = self.change(run_directory, "progress.json", '"replay_buffer_saved": true', '"produce_time_s": {}')
        self.change(run_directory, "consumer.json", '"masked_by_task"', '"of before"')
        assert "replay_buffer_saved" not in before.read_text()
        async with inline_pipeline(task(10, lasting({})), directory=run_directory) as pipe:
            trained = Trained()
            assert (await begin(pipe, trained=trained)).step == 10
            assert pipe.progress.replay_buffer_saved
            assert (await finish(pipe, trained, 1)).items == list(range(10))


@pytest.mark.virtual_time
async def test_info_without_end_costs_its_item_and_not_the_run(run_directory: str) -> None:
    """CASES 120: a simulator's info that is nested 5000 deep is a failed attempt, counted and named."""

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1)
        info: dict[str, Any] = {}
        if item["n"] == 3:
            for _ in range(5000):
                info = {"x": info}
        return Rollout({"n": [item["n"]]}, reward=1.0, info=info)

    given = Task("numbers", source=numbers(12), run=run, shuffle=False, on_failure=Retry(attempts=2))
    trained = Trained()
    with capture_logs() as logs:
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 4)
            assert pipe.ledger.totals["numbers"].dropped == {"failed": 1}
    assert trained.items == [n for n in range(12) if n != 3]
    failed = [line for line in logs if line["event"] == "rollout.failed"]
    assert [(line["uid"], line["reason"], line["final"]) for line in failed] == [
        (3, "too deep", False),
        (3, "too deep", True),
    ]
    assert "nested deeper than 200 levels" in failed[0]["error"]
