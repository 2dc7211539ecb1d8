"""TRL's asynchronous GRPO trainer trains a tiny model on the rollouts of a pipeline, for real.

On the CPU: two of its functions, which ask for a GPU, are replaced.
"""

from __future__ import annotations

import math
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from pipeline import ConfigError, Context, EndOfSource, FailFast, Item, Pipeline, Retry, Rollout, RolloutFailed, Task
from pipeline.errors import UsageError
from tasks import SequenceSource, chat
from tasks.trl import RolloutWorker
from tests.support import tiny_llama
from tests.support.chat_server import Said, serving, toy

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
GROUPS, MEMBERS, STEPS = 2, 4, 5
FIRST_REPLY = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer asks for one in two places: a kernel of attention, and the name of what it runs on for a metric."""
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", tiny_llama.PlainAttention)
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", _no_peak)


def _no_peak(accelerator: Any, dtype: str) -> None:
    return None


class Server:
    """Says what weights it holds, and a number that it says once: ``[version, number]`` as tokens."""

    def __init__(self) -> None:
        self.url = ""
        self.version = 0
        self.said = 0
        self.pushed: list[dict[str, Any]] = []

    async def __call__(self, request: dict[str, Any]) -> Said:
        prompt = int(request["messages"][0]["content"].removeprefix("t"))
        self.said += 1
        ids = [10 + self.version, FIRST_REPLY + self.said % 90]
        return toy(f"t{ids[0]} t{ids[1]}", ids, prompt=[3, 30 + prompt])

    def push(self, weights: Iterator[tuple[str, Any]]) -> None:
        """Take the trainer's weights."""
        self.pushed.append({name: tensor.clone() for name, tensor in weights})
        self.version = len(self.pushed)


@contextmanager
def served() -> Iterator[Server]:
    server = Server()
    with start_blocking_portal() as portal:
        open_ = portal.wrap_async_context_manager(serving(server))
        server.url = open_.__enter__().url
        try:
            yield server
        finally:
            open_.__exit__(None, None, None)  # what a test raises is not the server's to wrap


async def solve(item: Item, ctx: Context) -> Rollout:
    talk = ctx.resource.session(ctx)
    await talk.complete(f"t{item['n']}")
    return talk.rollout(reward=float(ctx.member % 2), info={"rewards": {"odd": float(ctx.member % 2)}})  # type: ignore[no-any-return]


def pipeline(server: Server, directory: str | None = None, count: int = 30, **options: Any) -> Pipeline:
    client = chat.client(server.url, model="policy", backoff_s=0.0)
    task = Task(
        "toy",
        source=SequenceSource([{"n": n} for n in range(count)]),
        run=options.pop("run", solve),
        group_size=MEMBERS,
        resource=client,
        epochs=options.pop("epochs", None),
        on_failure=options.pop("on_failure", Retry()),
        shuffle=False,
    )
    return Pipeline([task], directory=directory, **{"max_staleness": 2, "signals": (), **options})


def config(folder: Path, **options: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    return AsyncGRPOConfig(
        str(folder / "out"),
        **{
            "per_device_train_batch_size": GROUPS * MEMBERS,
            "gradient_accumulation_steps": 1,
            "token_budget": 0,
            "max_steps": STEPS,
            "max_staleness": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **options,
        },
    )


def trainer_of(model: str, args: Any, worker: RolloutWorker, server: Server, **options: Any) -> tuple[Any, list[Any]]:
    """Return a trainer, and what will be the inputs that its loss is taken of, each with its step."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    seen: list[Any] = []

    class Seeing(AsyncGRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            # A token that several samples share is there once: what they were is read off the targets.
            seen.append((self.state.global_step + 1, inputs))
            return super().compute_loss(model, inputs, *rest, **more)

    made = Seeing(
        model,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["t3"] * 1000}),
        rollout_worker=worker,
        weight_transfer=worker.weight_transfer(server.push),
        **options,
    )
    return made, seen


def replies(inputs: Any) -> list[int]:
    """Return the last token of each reply in a batch of the trainer's: the number that was said once."""
    labels = inputs["shift_labels"][0]
    found = labels[inputs["token_index"][0]]
    return [int(each) for each in found if each >= FIRST_REPLY]


def test_each_rollout_is_trained_once_with_the_version_that_made_it(model: str, tmp_path: Path) -> None:
    args = config(tmp_path)
    with served() as server, RolloutWorker(pipeline(server), args, groups=GROUPS) as worker:
        samples: list[Any] = []
        taken = worker.rollout_buffer.get

        def get(block: bool = True, timeout: float | None = None) -> Any:
            samples.append((worker._model_version, taken(block, timeout)))
            return samples[-1][1]

        worker.rollout_buffer.get = get  # type: ignore[method-assign]
        trainer, seen = trainer_of(model, args, worker, server, callbacks=[worker.callback()])
        trainer.train()
        ledger = worker.pipe.ledger
        assert ledger.step == STEPS
        assert ledger.totals["toy"].trained == STEPS * GROUPS
    # Once each, and all of them what the server said.
    trained = [number for _, inputs in seen for number in replies(inputs)]
    assert len(trained) == STEPS * GROUPS * MEMBERS
    assert len(set(trained)) == len(trained)
    assert [step for step, _ in seen] == list(range(1, STEPS + 1))
    # What the server held when it spoke is the version that the sample has, at most one older where weights came in
    # between; and none was older than the bound.
    for now, sample in samples:
        spoke = int(sample.input_ids[2]) - 10
        assert sample.model_version <= spoke
        assert now - sample.model_version <= 2
        assert sample.completion_mask.tolist() == [0, 0, 1, 1]
        assert sample.old_log_probs.tolist() == pytest.approx([0, 0, *(-each / 10 for each in sample.input_ids[2:])])
    assert worker.dropped == 0
    logs = [each for each in trainer.state.log_history if "sample/staleness_max" in each]
    assert len(logs) == STEPS
    assert not any("sample/dropped_stale_total" in each for each in trainer.state.log_history)
    assert logs[0]["forebay/step"] == 1.5, "the mean of the step's own batch, and of the one that was taken ahead"
    assert logs[0]["reward"] == logs[0]["rewards/odd"] == 0.5
    assert all(math.isfinite(each["loss"]) for each in logs)
    # The trainer's own weights came to our function, once before all and once after each step.
    assert len(server.pushed) == STEPS + 1
    assert any(not np.array_equal(server.pushed[0][name], server.pushed[-1][name]) for name in server.pushed[0])


def test_without_the_callback_steps_are_counted_by_weight_updates(model: str, tmp_path: Path) -> None:
    args = config(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=4)
    with served() as server, RolloutWorker(pipeline(server), args, groups=GROUPS) as worker:
        trainer, seen = trainer_of(model, args, worker, server)
        trainer.train()
        assert worker.pipe.ledger.step == 4
        assert len([number for _, inputs in seen for number in replies(inputs)]) == 4 * GROUPS * MEMBERS


def test_fewer_pushes_than_steps(model: str, tmp_path: Path) -> None:
    args = config(tmp_path, weight_sync_steps=2, max_steps=6)
    with served() as server, RolloutWorker(pipeline(server), args, groups=GROUPS) as worker:
        trainer, seen = trainer_of(model, args, worker, server, callbacks=[worker.callback()])
        trainer.train()
        assert (worker.pipe.ledger.step, worker.pipe.version, worker.dropped) == (6, 6, 0)
        assert worker._versions == [(0, 1), (2, 2), (4, 3), (6, 4)]
    assert len({number for _, inputs in seen for number in replies(inputs)}) == 6 * GROUPS * MEMBERS


def test_a_training_that_was_cut_goes_on_from_its_checkpoint(model: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    counted: list[int] = []
    with served() as server:

        class Cut(BaseException):
            pass

        for life, until in enumerate((5, 9)):
            args = config(tmp_path, max_steps=9, save_strategy="steps", save_steps=2)
            with (
                pytest.raises(Cut) if life == 0 else _nothing(),
                RolloutWorker(pipeline(server, run), args, groups=GROUPS) as worker,
            ):
                resumed = worker.resume()
                assert resumed.step == (4 if life else 0)
                trainer, seen = trainer_of(model, args, worker, server, callbacks=[worker.callback()])
                step = trainer.training_step

                def training_step(*given: Any, step: Any = step, trainer: Any = trainer, life: int = life) -> Any:
                    if life == 0 and trainer.state.global_step == 5:
                        raise Cut
                    return step(*given)

                trainer.training_step = training_step
                trainer.train(resume_from_checkpoint=resumed.external or None)
            kept = 4 if life == 0 else until
            counted += [number for step, inputs in seen if step <= kept for number in replies(inputs)]
            if life:
                assert [step for step, _ in seen] == [5, 6, 7, 8, 9]
                assert worker.pipe.ledger.step == 9
                assert worker.pipe.ledger.totals["toy"].trained == 9 * GROUPS
    assert len(counted) == 9 * GROUPS * MEMBERS
    assert len(set(counted)) == len(counted)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def broken(item: Item, ctx: Context) -> Rollout:
    raise ValueError("it came to nothing")


def test_a_rollout_that_fails_ends_the_training_with_its_error(model: str, tmp_path: Path) -> None:
    args = config(tmp_path)
    with served() as server:
        pipe = pipeline(server, run=broken, on_failure=FailFast())
        with RolloutWorker(pipe, args, groups=GROUPS) as worker:
            trainer, _ = trainer_of(model, args, worker, server)
            with pytest.raises(RolloutFailed, match="it came to nothing"):
                trainer.train()
            with pytest.raises(RolloutFailed):
                worker.check_health(300.0)
            with pytest.raises(UsageError, match="between start"):
                worker.rollout_buffer.get(timeout=0.0)


def test_sources_that_end_say_what_to_do(model: str, tmp_path: Path) -> None:
    args = config(tmp_path)
    with served() as server, RolloutWorker(pipeline(server, count=6, epochs=1), args, groups=GROUPS) as worker:
        trainer, _ = trainer_of(model, args, worker, server)
        with pytest.raises(EndOfSource, match="epochs=None"):
            trainer.train()


def test_a_trainer_that_waits_is_told_that_nothing_ends(tmp_path: Path) -> None:
    async def never(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep_forever()
        raise AssertionError

    with served() as server, RolloutWorker(pipeline(server, run=never), config(tmp_path), groups=1) as worker:
        worker.update_model_version(1)
        worker.start()
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=0.0)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(block=False)
        assert worker.rollout_buffer.qsize() == 0
        worker.check_health(1e9)
        worker.check_health(1e9)
        with pytest.raises(RuntimeError, match="no rollout has ended for 0 s"):
            worker.check_health(0.0)


def test_a_push_that_fails_starts_nothing(tmp_path: Path) -> None:
    def push(weights: Iterator[tuple[str, Any]]) -> None:
        raise ConnectionError("gone")

    with served() as server, RolloutWorker(pipeline(server), config(tmp_path), groups=1) as worker:
        transfer = worker.weight_transfer(push)
        transfer.init_weight_transfer()
        transfer.pause()
        with pytest.raises(ConnectionError):
            transfer.send_weights(iter(()))
        transfer.destroy()
        with pytest.raises(UsageError, match="weight_update failed"):
            worker.start()


@pytest.mark.parametrize(
    ("options", "more", "named"),
    [
        ({"max_staleness": None}, {}, "max_staleness"),
        ({"max_staleness": 0}, {}, "max_staleness"),
        ({"max_staleness": 5}, {}, "max_staleness"),
        ({"staleness_policy": "mask"}, {}, "staleness_policy"),
        ({}, {"token_budget": None}, "token_budget"),
        ({}, {"weight_sync_steps": 3}, "max_staleness"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Any, more: Any, named: str, tmp_path: Path) -> None:
    with served() as server, pytest.raises(ConfigError) as error:
        RolloutWorker(pipeline(server, **options), config(tmp_path, **more), groups=2)
    assert error.value.option == named


def test_the_worker_is_what_the_installed_trainer_asks_for() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol, WeightTransferProtocol

    from tasks.trl import WeightTransfer

    def verbs(kind: Any) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(RolloutWorkerProtocol) <= verbs(RolloutWorker)
    assert set(RolloutWorkerProtocol.__annotations__) == {"rollout_buffer", "metrics_queue"}
    assert verbs(WeightTransferProtocol) <= verbs(WeightTransfer)
