"""The synchronous form: the same verbs, on a loop in a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

from pipeline import (
    ClosedError,
    Context,
    EndOfSource,
    Item,
    Locked,
    Pipeline,
    Rollout,
    RolloutFailed,
    StoreError,
    Task,
    TimedOut,
    UsageError,
)
from tasks import SequenceSource
from tests.support.runs import ids, numbers, pipeline, task


def test_batches_of_a_finite_source_end_with_a_shorter_one() -> None:
    with pipeline().sync() as pipe:
        pipe.start()
        batches = [ids(batch) for batch in pipe.batches(groups=5)]
    assert [len(batch) for batch in batches] == [5, 5, 2]
    assert sorted(number for batch in batches for number in batch) == list(range(12))


def test_a_source_that_ends_before_the_last_step_is_an_error() -> None:
    with pipeline().sync() as pipe:
        pipe.start()
        with pytest.raises(EndOfSource, match="step 4"):
            for _ in pipe.batches(groups=4, until=6):
                pass


def test_a_batch_that_is_not_there_in_time_is_lost_to_nobody() -> None:
    opened = threading.Event()

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.to_thread.run_sync(opened.wait)
        return Rollout(reward=0.0)

    with Pipeline([Task("t", source=SequenceSource([0, 1]), run=run)]).sync() as pipe:
        pipe.start()
        for _ in range(3):
            with pytest.raises(TimedOut, match=r"groups=2.*0 s"):
                pipe.get_batch(2, timeout=0)
        opened.set()
        assert len(pipe.get_batch(2, timeout=60).groups) == 2
        with pytest.raises(EndOfSource):
            pipe.get_batch(2, timeout=60)


def test_state_is_read_and_loaded_on_the_callers_thread(run_directory: str) -> None:
    threads: set[int] = set()

    class Model:
        value = 0

        def state_dict(self) -> dict[str, int]:
            threads.add(threading.get_ident())
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            threads.add(threading.get_ident())
            self.value = state["value"]

    model = Model()
    with pipeline(directory=run_directory).sync() as pipe:
        pipe.attach(model=model)
        pipe.start()
        for batch in pipe.batches(groups=4, until=2):
            model.value = batch.step
            pipe.save(batch.step)
    again = Model()
    with pipeline(directory=run_directory).sync() as pipe:
        pipe.attach(model=again)
        assert pipe.resume().step == 2
    assert again.value == 2
    assert threads == {threading.get_ident()}


def test_save_reads_the_tensors_before_it_returns(run_directory: str) -> None:
    model = torch.nn.Linear(300, 300)
    with pipeline(directory=run_directory).sync() as pipe:
        pipe.attach(model=model)
        pipe.start()
        batch = pipe.get_batch(4)
        before = model.weight.detach().clone()
        saving = pipe.save(batch.step)
        with torch.no_grad():
            model.weight.zero_()
        saving.committed()
    other = torch.nn.Linear(300, 300)
    with pipeline(directory=run_directory).sync() as pipe:
        pipe.attach(model=other)
        pipe.resume()
    assert torch.equal(other.weight, before)


def test_files_of_the_trainers_own_are_committed_with_the_rest(run_directory: str) -> None:
    with pipeline(directory=run_directory).sync() as pipe:
        pipe.start()
        batch = pipe.get_batch(4)
        with pipe.checkpoint(batch.step) as folder, open(f"{folder}/mine.txt", "w") as file:
            file.write("mine")
        batch = pipe.get_batch(4)
        with pytest.raises(ZeroDivisionError), pipe.checkpoint(batch.step):
            raise ZeroDivisionError
        assert pipe.get_batch(4).step == 3
    with pipeline(directory=run_directory).sync() as pipe:
        resumed = pipe.resume()
        assert resumed.step == 1
        assert resumed.generation == 1
    # The resumed generation has taken the file over, and replaces the older one of the same step.
    kept = sorted(Path(run_directory, "generations").glob("*/files/mine.txt"))
    assert [path.parts[-3] for path in kept] == ["00000002"]
    assert kept[0].read_text() == "mine"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_body_ends_the_lease_and_frees_the_folder(
    run_directory: str, error: type[BaseException]
) -> None:
    pipe = pipeline(directory=run_directory).sync()

    def train() -> None:
        with pipe:
            pipe.start()
            for _ in pipe.batches(groups=4):
                raise error

    with pytest.raises(error):
        train()
    assert pipe.ledger.leases == {}
    with pipeline(directory=run_directory).sync() as pipe:
        with pipe.weight_update(version=pipe.resume().version):
            pass
        pipe.start()
        assert sorted(number for batch in pipe.batches(groups=4) for number in ids(batch)) == list(range(12))


def test_two_pipelines_of_one_process_cannot_share_a_folder(run_directory: str) -> None:
    second = pipeline(directory=run_directory).sync()
    with pipeline(directory=run_directory).sync(), pytest.raises(Locked, match="another pipeline of this process"):
        second.__enter__()
    with pipeline(directory=run_directory).sync():
        pass


def test_a_released_batch_comes_again() -> None:
    with pipeline(concurrency=2).sync() as pipe:
        pipe.start()
        first = pipe.get_batch(3)
        first.release()
        first.release()
        second = pipe.get_batch(3)
        assert (second.step, second.uids) == (first.step, first.uids)


def test_a_failed_rollout_reaches_the_trainer_with_its_cause() -> None:
    async def broken(item: Item, ctx: Context) -> Rollout:
        raise ValueError("x")

    with pipeline(task(run=broken, on_failure="fail_fast")).sync() as pipe:
        pipe.start()
        with pytest.raises(RolloutFailed, match="ValueError: x") as caught:
            pipe.get_batch(2)
        assert isinstance(caught.value.__cause__, ValueError)


def test_verbs_outside_of_the_with_block_say_so() -> None:
    pipe = pipeline().sync()
    with pytest.raises(ClosedError, match="with Pipeline"):
        pipe.start()
    with pipe:
        pass
    with pytest.raises(ClosedError):
        pipe.get_batch(1)
    with pytest.raises(UsageError), pipe:
        pass


def test_saving_without_a_directory_only_acks() -> None:
    with pipeline().sync() as pipe:
        pipe.start()
        batch = pipe.get_batch(4)
        assert pipe.save(batch.step).generation is None
        assert pipe.statistics().groups.trained == 4
        with pytest.raises(UsageError, match="directory"), pipe.checkpoint(batch.step):
            pass


def test_weights_that_failed_to_be_pushed_stop_the_run_with_a_reason() -> None:
    with pipeline(concurrency=1, max_staleness=0).sync() as pipe:
        pipe.start()
        batch = pipe.get_batch(2)
        with pytest.raises(ConnectionError), pipe.weight_update(version=1):
            raise ConnectionError
        pipe.ack(batch.step)
        with pytest.raises(Exception, match="last weight_update failed"):
            pipe.get_batch(2)
        with pipe.weight_update(version=1):
            pass
        assert pipe.get_batch(2).step == 2


def test_another_seed_is_refused(run_directory: str) -> None:
    with pipeline(directory=run_directory, seed=1).sync() as pipe:
        pipe.start()
    with pipeline(directory=run_directory, seed=2).sync() as pipe, pytest.raises(UsageError, match=r"seed=2.*seed=1"):
        pipe.resume()


def test_an_older_step_can_be_resumed_and_an_unknown_one_names_those_that_exist(run_directory: str) -> None:
    with pipeline(directory=run_directory, keep=None).sync() as pipe:
        pipe.start()
        for batch in pipe.batches(groups=2, until=4):
            pipe.save(batch.step)
    with pipeline(directory=run_directory).sync() as pipe:
        with pytest.raises(StoreError, match=r"no generation of step 9; there are steps 0, 1, 2, 3, 4"):
            pipe.resume(step=9)
        resumed = pipe.resume(step=2)
        assert (resumed.step, resumed.version, resumed.repeated) == (2, 2, 2)
        with pipe.weight_update(version=resumed.version):
            pass
        pipe.start()
        assert sum(len(batch) for batch in pipe.batches(groups=2)) == 8


def test_one_item_can_be_tried_with_no_run_at_all() -> None:
    async def look(item: Item, ctx: Context) -> Rollout:
        return Rollout({"n": [item["n"], ctx.member, ctx.attempt]}, reward=ctx.rng.random())

    tried: Any = (
        Pipeline(Task("look", source=numbers(5), run=look)).sync().try_one(Task("t", source=numbers(5), run=look), 3)
    )
    assert tried["n"] == [3, 0, 1]


def test_the_verbs_that_are_not_only_for_training(run_directory: str) -> None:
    async def later(item: Item, ctx: Context) -> Rollout:
        if item["n"] < 2:
            ctx.park()
        return Rollout({"n": [item["n"]]}, reward=float(item["n"]))

    given = [task(2, later), task(2, later, name="other")]
    exam = Task("exam", source=numbers(3), run=later)
    with pipeline(given, directory=run_directory, capacity=20).sync() as pipe:
        pipe.start()
        by_hand = pipe.submit("numbers", {"n": 5})
        put = pipe.put(given[1], [Rollout({"n": [7]}, reward=7.0), Rollout({"n": [8]}, reward=8.0)])
        pipe.set_share("other", 2.0)
        result = pipe.evaluate(exam, samples=2)
        assert [(each.index, each.member, each.reward) for each in result] == [
            (n, member, float(n)) for n in range(3) for member in range(2)
        ]
        assert [rollout["n"].tolist() for rollout in result.rollouts] == [[0], [0], [1], [1], [2], [2]]
        first = pipe.get_batch(2)
        assert sorted(first.uids) == sorted([by_hand, put]), "the others wait for their rewards"
        parked = sorted(pipe.ledger.parked)
        assert len(parked) == 4
        for uid in parked[:3]:
            pipe.reward(uid, 10.0 + uid)
        pipe.discard(parked[3])
        assert sorted(pipe.get_batch(3).rewards.tolist()) == [10.0 + uid for uid in parked[:3]]
        with pytest.raises(UsageError, match="it is dropped"):
            pipe.reward(parked[3], 1.0)
        with pytest.raises(EndOfSource):
            pipe.get_batch(1)
    with pytest.raises(ClosedError):
        pipe.submit("numbers", {"n": 1})


def test_an_evaluation_with_threads_outlives_the_process(run_directory: str) -> None:
    exam = Task("exam", source=numbers(5), run=task().run)
    for reused in (0, 5):
        with pipeline(directory=run_directory).sync() as pipe:
            with pipe.weight_update(version=pipe.resume().version):
                pass
            pipe.start()
            assert pipe.evaluate(exam).reused == reused
