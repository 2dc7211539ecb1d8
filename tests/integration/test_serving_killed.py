"""A served run whose processes are killed: nothing is lost, nothing is trained twice, nothing is left behind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from random import Random
from typing import Any

import pytest

from pipeline import EndOfSource, NotServed, PeerLost, UsageError, connect
from tests.support.children import ChildProcess, child
from tests.support.disk import lying_in
from tests.support.serving import GROUPS, Tally, peak, produce, take, train

COUNT = 42


def names_left(run: str) -> set[str]:
    """What lies where something could be left, but for the run's own files."""
    shared = lying_in("/dev/shm") if os.path.isdir("/dev/shm") else set()
    ours = {name for name in lying_in(tempfile.gettempdir()) if "forebay" in name}
    known = {"run.json", "lock", "journals", "segments", "generations"}
    return shared | ours | (set(os.listdir(run)) - known if os.path.isdir(run) else set())


def start(directory: str | None, kind: str = "plain", count: int = COUNT, **options: Any) -> ChildProcess:
    return ChildProcess(produce, directory, count, kind, options)


def serving(producer: ChildProcess) -> str:
    word, address = producer.hear()
    assert word == "serving", address
    return str(address)


def test_a_trainer_killed_again_and_again_trains_every_item_once(run_directory: str) -> None:
    before = names_left(run_directory)
    producer = start(run_directory)
    try:
        serving(producer)
        # Where it is killed, and whether its weights have forgotten steps that the run counts as trained.
        for place, step, goes_back in (
            ("leased", 1, False),
            ("acked", 1, True),
            ("saved", 2, False),
            ("saving", 4, True),
            ("pushing", 3, False),
            ("pushed", 3, True),
            ("leased", 4, True),
            ("acked", 5, True),
            ("saved", 8, False),
        ):
            with child(train, run_directory, {place: step}) as trainer:
                assert trainer.hear() == (place, step)
            if goes_back:
                assert producer.hear()[0] == "lost"
                serving(producer)
        with child(train, run_directory, {}) as trainer:
            word, seen = trainer.hear()
            assert word == "finished", seen
        assert seen == {str(n): 1 for n in range(COUNT)}
        assert producer.hear() == ("done", COUNT)
    finally:
        producer.kill()
        producer.pipe.close()
    assert names_left(run_directory) - before == set()


@pytest.mark.slow
def test_both_sides_killed_at_any_moment_train_every_item_once(run_directory: str) -> None:
    random, rounds = Random(11), 9 * int(os.environ.get("FOREBAY_SOAK", "1"))
    count = 40 * rounds  # more than the lives before the last can train
    before = names_left(run_directory)
    producer = start(run_directory, count=count)
    serving(producer)
    kills: Counter[str] = Counter()
    try:
        for _ in range(rounds):
            with child(train, run_directory, {}, True) as trainer:
                word, events = "", random.randint(1, 14)
                while events and word != "raised":
                    word, events = trainer.hear()[0], events - 1
                if word == "raised":
                    trainer.rest()  # it came while the producer was going back
                elif kills.total() % 3 == 2:
                    producer.kill()
                    kills["producer"] += 1
                    assert "PeerLost" in str(trainer.rest()[-1])
                    producer.pipe.close()
                    producer = start(run_directory, count=count)
                    serving(producer)
                else:
                    trainer.kill()
                    kills["trainer"] += 1
        while True:
            with child(train, run_directory, {}) as trainer:
                word, seen = trainer.hear()
            if word == "finished":
                break
            assert "went back" in seen or "NotServed" in seen or "UsageError" in seen or "ClosedError" in seen, seen
            assert producer.hear()[0] in ("lost", "serving")
        assert seen == {str(n): 1 for n in range(count)}
        assert min(kills["producer"], kills["trainer"]) >= 1
        assert ("done", count) in producer.rest()
    finally:
        producer.kill()
        producer.pipe.close()
    assert names_left(run_directory) - before == set()


def test_what_a_killed_trainer_had_leased_comes_again_in_order_while_the_producer_goes_on(run_directory: str) -> None:
    with child(produce, run_directory, COUNT, "plain", {}) as producer:
        address = serving(producer)
        with child(take, address, None, GROUPS) as trainer:
            trainer.hear()
            leased = []
            for _ in range(2):
                trainer.pipe.send(("get",))
                leased.append(trainer.hear())
        with connect(address).sync() as held:
            again = [held.get_batch(GROUPS) for _ in range(2)]
            assert [("batch", batch.step, batch.uids) for batch in again] == leased
            assert held.statistics().groups.leased == 2 * GROUPS


def test_a_child_that_a_trainer_forked_does_not_keep_its_leases() -> None:
    with child(produce, None, COUNT, "plain", {}) as producer:
        address = serving(producer)
        with child(take, address, None, GROUPS) as trainer:
            trainer.hear()
            for told in (("get",), ("fork",)):
                trainer.pipe.send(told)
            leased, (_, forked) = trainer.hear(), trainer.hear()
        try:
            with connect(address).sync() as held:
                assert held.get_batch(GROUPS).uids == leased[2]
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_killed_producer_is_named_and_its_run_gone_on_with(run_directory: str) -> None:
    before = names_left(run_directory)
    seen: Counter[int] = Counter()
    with child(produce, run_directory, COUNT, "plain", {}) as producer:
        serving(producer)
        with connect(run_directory).sync() as held:
            tally = Tally("")
            for batch in held.batches(GROUPS, until=3):
                tally.train([group.index for group in batch])
            with held.checkpoint(3) as folder:
                tally.write(folder)
            lost = held.get_batch(GROUPS)
            producer.kill()
            with pytest.raises(PeerLost, match="ended"):
                held.get_batch(GROUPS)
            with pytest.raises(PeerLost, match="ended"):
                held.statistics()
            assert len(lost.rollouts) == 2 * GROUPS, "what has come is the trainer's"
            lost.release()  # says nothing any more: it has happened
    with pytest.raises(NotServed, match=f"process {producer.process.pid} held it last, as incarnation 1"):
        connect(run_directory).sync().__enter__()
    with child(produce, run_directory, COUNT, "plain", {}) as producer:
        serving(producer)
        with connect(run_directory, step=3).sync() as held:
            assert (held.joined.incarnation, held.joined.saved_step) == (2, 3)
            seen.update({int(index): times for index, times in Tally(held.joined.files).seen.items()})
            for batch in held.batches(GROUPS):
                seen.update(group.index for group in batch)
    assert seen == dict.fromkeys(range(COUNT), 1)
    assert names_left(run_directory) - before == set()


def test_weights_that_went_back_are_refused_until_the_run_goes_back_too(run_directory: str) -> None:
    with child(produce, None, COUNT, "plain", {}) as producer:  # no generation at all
        address = serving(producer)
        with child(take, address, None, GROUPS) as trainer:
            trainer.hear()
            for told in (("get",), ("ack", 1), ("get",)):
                trainer.pipe.send(told)
                trainer.hear()
        assert producer.hear() == ("lost", GROUPS)
    with child(produce, run_directory, COUNT, "plain", {}) as producer:
        serving(producer)
        with pytest.raises(UsageError, match=r"connect\(step=7\): the run has trained step 0.*resume\(step=7\)"):
            connect(run_directory, step=7).sync().__enter__()


def test_a_trainer_killed_amid_a_weight_update_has_failed_to_push(run_directory: str) -> None:
    with child(produce, run_directory, 400, "plain", {"max_staleness": 0}) as producer:
        serving(producer)
        with child(take, run_directory, None, GROUPS) as trainer:
            trainer.hear()
            trainer.pipe.send(("update", 1))
            assert trainer.hear() == ("updating", 1)
        with connect(run_directory).sync() as held:
            with held.weight_update(2):
                pass
            assert held.version == 2
            assert held.get_batch(GROUPS).step == 1


def test_a_trainer_that_reads_nothing_holds_up_nobody_else() -> None:
    with child(produce, None, 16, "large", {"capacity": 8}) as producer:
        address = serving(producer)
        with child(take, address, None, 4) as trainer:
            trainer.hear()
            trainer.send(signal.SIGSTOP)
            trainer.pipe.send(("get",))
            with connect(address).sync() as held:
                assert held.statistics().groups.leased == 0
                batch = held.get_batch(1)
                assert batch.step == 1
                trainer.send(signal.SIGCONT)
                assert trainer.hear()[:2] == ("batch", 2)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system does not tell peaks of memory")
def test_200_mb_arrive_without_a_copy_in_the_memory_of_the_producer() -> None:
    with child(produce, None, 8, "large", {"capacity": 4, "concurrency": 2}) as producer:
        address = serving(producer)
        with child(take, address, None, 4) as trainer:
            trainer.hear()
            trainer.pipe.send(("get",))
            trainer.hear()  # all that is made by now is held, and nothing more is before the ack
            trainer.kill()
        with child(take, address, None, 4) as trainer:
            trainer.hear()
            before = peak(producer.process.pid or 0, reset=True)
            trainer.pipe.send(("get",))
            assert trainer.hear()[2] == [0, 1, 2, 3]
            assert peak(producer.process.pid or 0) - before < 20 << 20
            trainer.pipe.send(("read",))
            _, total, more = trainer.hear()
            assert total == 2 * (0 + 1 + 2 + 3) * (25 << 18)
            assert more < (2 * 200 << 20) + (30 << 20), "the memory that is shared, and the caller's tensors"


def test_ranks_share_a_batch_and_it_is_trained_once_all_have_acked_it() -> None:
    with child(produce, None, 7, "plain", {}) as producer:
        address = serving(producer)
        with child(take, address, (0, 2), 5) as first, child(take, address, (1, 2), 5) as second:
            for rank in (first, second):
                rank.hear()
                rank.pipe.send(("get",))
            parts = [first.hear(), second.hear()]
            assert parts == [("batch", 1, [0, 1]), ("batch", 1, [2, 3, 4])]
            with connect(address).sync() as held:
                first.pipe.send(("ack", 1))
                first.hear()
                assert held.statistics().groups.trained == 0
                second.pipe.send(("ack", 1))
                second.hear()
                assert held.statistics().groups.trained == 5
            for rank in (first, second):
                rank.pipe.send(("get",))
            assert [first.hear()[2], second.hear()[2]] == [[5], [6]]


def test_a_rank_killed_gives_the_whole_batch_back() -> None:
    with child(produce, None, 8, "plain", {}) as producer:
        address = serving(producer)
        with child(take, address, (0, 2), 4) as first:
            first.hear()
            first.pipe.send(("get",))
            assert first.hear() == ("batch", 1, [0, 1])
            with child(take, address, (1, 2), 4) as second:
                second.hear()
                second.pipe.send(("get",))
                assert second.hear() == ("batch", 1, [2, 3])
            with child(take, address, (1, 2), 4) as second:
                second.hear()
                for rank in (first, second):
                    rank.pipe.send(("get",))
                assert [first.hear(), second.hear()] == [("batch", 1, [0, 1]), ("batch", 1, [2, 3])]


def test_parts_for_which_too_little_is_left_end() -> None:
    with child(produce, None, 5, "plain", {}) as producer:
        address = serving(producer)
        with connect(address, part=(0, 2)).sync() as first, connect(address, part=(1, 2)).sync() as second:
            assert [len(first.get_batch(4)), len(second.get_batch(4))] == [2, 2]
            for rank in (first, second):
                with pytest.raises(EndOfSource, match="1 groups are left at the end, too few for 2 clients"):
                    rank.get_batch(4)
