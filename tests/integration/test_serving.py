"""A served pipeline from another process: the same verbs, values and errors as in its own."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

import forebay
from pipeline import (
    ClosedError,
    ConfigError,
    EndOfSource,
    FailFast,
    NotServed,
    Rollout,
    RolloutFailed,
    RolloutInvalid,
    ServingError,
    Stopped,
    UsageError,
    connect,
)
from pipeline.errors import RemoteError, SourceError, Starved, StoppedExit
from pipeline.serve import notes, wire
from pipeline.serve.memory import share, view
from tests.support.children import child
from tests.support.runs import ids, solve, task
from tests.support.runs import pipeline as small
from tests.support.serving import pipeline, produce, rich


def same(one: Any, other: Any) -> None:
    """Assert that two tensors are equal, bit for bit, and of one type and shape."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)) if one.dim() else one == other


def test_batches_are_those_of_the_run_in_one_process_value_for_value(run_directory: str) -> None:
    with child(produce, run_directory, 9, "rich", {"seed": 5}) as producer:
        producer.hear()
        with connect(run_directory).sync() as held, pipeline(None, 9, rich, seed=5).sync() as own:
            own.start()
            pairs = list(zip(held.batches(4), own.batches(4), strict=True))
    assert [len(batch) for batch, _ in pairs] == [4, 4, 1]
    for batch, expected in pairs:
        assert (batch.step, batch.uids, batch.repeated) == (expected.step, expected.uids, expected.repeated)
        assert [repr(group) for group in batch] == [repr(group) for group in expected]
        for rollout, wanted in zip(batch.rollouts, expected.rollouts, strict=True):
            assert msgspec.structs.replace(rollout, traces=()) == msgspec.structs.replace(wanted, traces=())
            for trace, original in zip(rollout, wanted, strict=True):
                assert (list(trace.tensors), trace.agent) == (list(original.tensors), original.agent)
                for name, tensor in trace.tensors.items():
                    same(tensor, original[name])
                    tensor.zero_()  # they are the caller's
        for name, tensor in batch.padded().items():
            assert tensor.shape == expected.padded()[name].shape


async def test_every_verb_is_there_with_the_arguments_of_the_pipelines_own(run_directory: str) -> None:
    async with small(task(20), directory=run_directory) as pipe:
        serving = await pipe.serve()
        async with connect(run_directory) as held:
            assert (await held.resume()).generation is None
            await held.start()
            assert not await held.save_due(1)
            uid = await held.put("numbers", [Rollout({"n": [7]}, reward=2.0, oldest=0)], {"n": 7})
            assert pipe.ledger.state(uid) == "buffered"
            assert pipe.ledger.state(await held.submit("numbers", {"n": 3})) in ("waiting", "running", "buffered")
            await held.set_share("numbers", 2.0)
            found = await held.evaluate("numbers", items=3, samples=2)
            assert [float(each["n"]) for each in found.rollouts] == [0, 0, 1, 1, 2, 2]
            batch = await held.get_batch(2)
            held.release(batch)
            held.release(batch)
            assert (await held.get_batch(2)).uids == batch.uids
            await held.ack(1)
            async with held.weight_update(1, "abort"):
                assert pipe._run.state.updating
            assert (held.version, pipe.version) == (1, 1)
            assert msgspec.to_builtins(await held.progress()) == msgspec.to_builtins(pipe.progress)
            assert (await held.statistics()).groups == pipe.statistics().groups
            assert (await held.metrics()).keys() == pipe.metrics().keys()
            Path(run_directory, "..", "mine").write_text("weights")
            saving = await held.save(1, external=Path(run_directory, "..", "mine"))
            await saving.committed()
            assert saving.step == 1
            await held.request_save("mine")
            assert await held.save_due(2)
        assert not await serving.ended()
        async with connect(serving.address) as held:
            told = held.joined
            assert (told.step, told.version, told.saved_step, told.files) == (1, 1, 1, "")
            assert told.external == str(Path(run_directory).parent / "mine")


def test_the_synchronous_forms_have_the_same(run_directory: str) -> None:
    with small(task(8), directory=run_directory).sync() as pipe:
        pipe.start()
        serving = pipe.serve()
        with connect(run_directory).sync() as held:
            for batch in held.batches(2, until=4):
                with held.weight_update(batch.step):
                    pass
                with held.checkpoint(batch.step) as folder:
                    Path(folder, "weights").write_text(str(batch.step))
            assert (held.version, held.progress.next_consumer_step) == (4, 5)
            assert held.statistics().groups == pipe.statistics().groups
            assert held.metrics().keys() == pipe.metrics().keys()
            assert not held.save_due(5)
            assert held.evaluate("numbers", items=[2]).rollouts[0]["n"].tolist() == [2]
            held.save(4, replay_buffer=False).committed()
        assert not serving.ended()


async def test_errors_are_the_pipelines_own(run_directory: str) -> None:
    async def fail(item: Any, ctx: Any) -> Rollout:
        if item["n"] == 5:
            raise LookupError("no such thing")
        return await solve(item, ctx)

    async with small(task(6, fail, on_failure=FailFast()), directory=run_directory, concurrency=1) as pipe:
        await pipe.serve()
        async with connect(run_directory) as held:
            with pytest.raises(UsageError, match=r"get_batch\(\) comes after start"):
                await held.get_batch(1)
            await held.start()
            with pytest.raises(UsageError, match=r"start\(\) was called before"):
                await held.start()
            with pytest.raises(ConfigError, match="whole number") as wrong:
                await held.get_batch(0)
            assert wrong.value.option == "groups"
            with pytest.raises(UsageError, match="never handed out"):
                await held.ack(3)
            with pytest.raises(RolloutInvalid, match="the runner returned"):
                await held.put("numbers", 5)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="reward is float nan"):
                await held.put("numbers", Rollout(reward=float("nan")))
            with pytest.raises(TypeError, match="unexpected keyword"):
                await held._ask("ack", wrong=1)
            with pytest.raises(UsageError, match="no verb 'aclose'"):
                await held._ask("aclose")
            with pytest.raises(RolloutFailed, match="item 5") as failed:
                await held.get_batch(6)
            assert "no such thing" in str(failed.value.__cause__)


async def test_content_by_hand_arrives_as_it_was_or_is_refused_as_by_the_pipeline() -> None:
    seen: list[Any] = []

    async def look(item: Any, ctx: Any) -> Rollout:
        seen.append(item.content)
        return Rollout()

    async with small(task(1, look)) as pipe:
        await pipe.start()
        async with connect((await pipe.serve()).address) as held:
            content = {"pair": (1, 2), "bytes": b"x", "deep": [{"none": None}]}
            await held.submit("numbers", content)
            with pytest.raises(SourceError, match="task 'numbers', an item by hand"):
                await held.submit("numbers", {"object": object()})
            await held.get_batch(2)
            assert content in seen


async def test_an_answer_that_cannot_be_told_is_an_error_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with small(task(2)) as pipe:
        await pipe.start()
        async with connect((await pipe.serve()).address) as held:
            monkeypatch.setattr(pipe, "metrics", lambda: {"own": object()})
            with pytest.raises(TypeError, match="object"):
                await held.metrics()
            assert ids(await held.get_batch(2)) == [0, 1]


async def test_a_finite_source_ends_and_the_producer_hears_that_the_trainer_left() -> None:
    async with small(task(5)) as pipe:
        await pipe.start()
        serving = await pipe.serve()
        async with connect(serving.address) as held:
            assert [ids(batch) async for batch in held.batches(2)] == [[0, 1], [2, 3], [4]]
            with pytest.raises(EndOfSource):
                await anext(held.batches(2, until=9))
        assert not await serving.ended()
        with pytest.raises(UsageError, match=r"no generation holds them.*connect\(step=3\)"):
            await connect(serving.address).open()
        async with connect(serving.address, step=3) as held:
            assert held.joined.step == 3


async def test_a_body_that_raises_gives_back_what_was_leased() -> None:
    async with small(task(5)) as pipe:
        await pipe.start()
        address = (await pipe.serve()).address

        async def fail() -> None:
            async with connect(address) as held:
                await held.get_batch(5)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with connect(address) as held:
            assert ids(await held.get_batch(5)) == [0, 1, 2, 3, 4]


async def test_a_cancelled_request_is_cancelled_over_there_and_loses_nothing() -> None:
    gate = anyio.Event()

    async def wait(item: Any, ctx: Any) -> Rollout:
        await gate.wait()
        return await solve(item, ctx)

    async with small(task(4, wait)) as pipe:
        await pipe.start()
        async with connect((await pipe.serve()).address) as held:
            async with anyio.create_task_group() as group:
                group.start_soon(held.get_batch, 4)
                while not pipe._run.state.wanted:
                    await held.statistics()
                with pytest.raises(UsageError, match="waited for already"):
                    await held.get_batch(4)
                group.cancel_scope.cancel()
            while pipe._run.state.wanted:
                await held.statistics()
            gate.set()
            assert ids(await held.get_batch(4)) == [0, 1, 2, 3]


async def test_a_batch_that_nobody_waits_for_any_more_is_given_back() -> None:
    async with small(task(4)) as pipe:
        await pipe.start()
        async with connect((await pipe.serve()).address) as held:
            link = held._opened()
            link._last += 1
            link._wire.send(wire.Request(link._last, "get_batch", {"groups": 4}))  # cancelled when it was on its way
            of = link._last
            while not pipe.ledger.leases:
                await held.statistics()
            link.tell("cancel", of=of)
            assert (await held.statistics()).groups.buffered == 4
            assert ids(await held.get_batch(4)) == [0, 1, 2, 3]


async def test_a_weight_update_that_was_cancelled_on_its_way_is_not_left_open() -> None:
    async with small(task(4)) as pipe:
        await pipe.start()
        async with connect((await pipe.serve()).address) as held:
            link = held._opened()
            link.tell("weight_update", version=1)
            of = link._last
            while not pipe._run.state.updating:
                await held.statistics()
            link.tell("cancel", of=of)
            async with held.weight_update(2):
                pass
            assert ids(await held.get_batch(4)) == [0, 1, 2, 3]


async def test_every_rank_has_trained_what_the_last_of_them_acked() -> None:
    async with small(task(8)) as pipe:
        await pipe.start()
        serving = await pipe.serve()
        async with connect(serving.address, part=(1, 2)) as second:
            first = connect(serving.address, part=(0, 2))
            await first.open()
            assert [(await rank.get_batch(4)).step for rank in (first, second)] == [1, 1]
            await first.ack(1)
            await second.ack(1)
            await first.aclose(failed=True)  # as when it is killed
            assert await serving.ended()
            with pytest.raises(UsageError, match="that had trained step 1 is gone"):
                await connect(serving.address).open()


@pytest.mark.parametrize("failed", [False, True])
async def test_a_rank_that_leaves_before_the_others_are_done_takes_nothing_with_it(failed: bool) -> None:
    async with small(task(8)) as pipe:
        await pipe.start()
        serving = await pipe.serve()
        async with connect(serving.address, part=(0, 2)) as first:
            second = connect(serving.address, part=(1, 2))
            await second.open()
            assert [(await rank.get_batch(4)).step for rank in (first, second)] == [1, 1]
            await second.ack(1)
            await second.aclose(failed=failed)
            await settled(serving)
            if not failed:
                await first.ack(1)
                assert pipe.ledger.step == 1
            else:  # its weights are gone, and what it trained with them
                with pytest.raises(UsageError, match="step 1 was never handed out"):
                    await first.ack(1)


async def test_a_rank_that_leaves_in_peace_gives_back_what_it_has_not_trained() -> None:
    async with small(task(8)) as pipe:
        await pipe.start()
        serving = await pipe.serve()
        async with connect(serving.address, part=(0, 2)) as first:
            second = connect(serving.address, part=(1, 2))
            await second.open()
            assert [(await rank.get_batch(4)).step for rank in (first, second)] == [1, 1]
            await first.ack(1)
            await second.aclose()
            await settled(serving)
            assert not pipe.ledger.leases
        assert pipe.ledger.step == 0


async def test_batches_of_a_client_that_leaves_come_again_in_their_order() -> None:
    async with small(task(8)) as pipe:
        await pipe.start()
        address = (await pipe.serve()).address
        found = []
        for _ in range(2):
            async with connect(address) as held:
                found.append([(batch.step, batch.uids) for batch in [await held.get_batch(4), await held.get_batch(4)]])
        assert found[0] == found[1]
        assert [step for step, _ in found[0]] == [1, 2]


async def settled(serving: Any) -> None:
    """Return once one trainer is left."""
    await serving.run.state.changed.wait_for(lambda: len(serving._clients) == 1)


async def test_a_closed_pipeline_is_a_closed_error_in_its_clients() -> None:
    async def hang(item: Any, ctx: Any) -> Rollout:
        await anyio.sleep_forever()
        raise AssertionError

    async with small(task(4, hang)) as pipe:
        await pipe.start()
        serving = await pipe.serve()
        async with connect(serving.address) as held:

            async def closed() -> None:
                with pytest.raises(ClosedError, match="the pipeline is closed"):
                    await held.get_batch(1)

            async with anyio.create_task_group() as group:
                group.start_soon(closed)
                await held.statistics()
                await pipe.aclose()
            with pytest.raises(ClosedError, match="the pipeline is closed"):
                await held.statistics()
        with pytest.raises(ClosedError):
            await serving.ended()
    with pytest.raises(NotServed, match="nobody listens there"):
        await connect(serving.address).open()
    with pytest.raises(ClosedError, match="client is not open"):
        await connect(serving.address).get_batch(1)
    with pytest.raises(ClosedError, match="is closed"):
        await held.get_batch(1)


@pytest.mark.parametrize("synchronous", [False, True])
async def test_a_run_that_is_asked_to_stop_ends_trainer_and_producer(run_directory: str, synchronous: bool) -> None:
    async with small(task(400), directory=run_directory, max_staleness=0) as pipe:
        await pipe.start()
        serving = await pipe.serve()

        def blocking() -> None:
            with connect(run_directory).sync() as held:
                held.request_save("enough", then="stop")
                held.get_batch(4)

        async def awaiting() -> None:
            async with connect(run_directory) as held:
                await held.request_save("enough", then="stop")
                await held.get_batch(4)

        with pytest.raises(StoppedExit if synchronous else Stopped, match="enough"):
            await (anyio.to_thread.run_sync(blocking) if synchronous else awaiting())
        with pytest.raises(Stopped, match="enough"):
            await serving.ended()


async def test_triggers_leave_generations_to_the_trainer_whose_weights_they_are(run_directory: str) -> None:
    async with small(task(40), directory=run_directory, save_every=2) as pipe:
        await pipe.start()
        await pipe.serve()
        async with connect(run_directory) as held:
            due = []
            async for batch in held.batches(2, until=6):
                due.append(await held.save_due(batch.step))
                if due[-1]:
                    async with held.checkpoint(batch.step) as folder:
                        await anyio.Path(folder, "weights").write_text(str(batch.step))
            assert due == [False, True] * 3
        async with connect(run_directory) as held:
            assert (held.joined.generation, held.joined.saved_step) == (3, 6)
            assert await anyio.Path(held.joined.files, "weights").read_text() == "6"


async def test_a_checkpoint_whose_body_raises_commits_nothing(run_directory: str) -> None:
    async with small(task(4), directory=run_directory) as pipe:
        await pipe.start()
        await pipe.serve()
        async with connect(run_directory) as held:
            await held.get_batch(2)
            with pytest.raises(ZeroDivisionError):
                async with held.checkpoint(1):
                    raise ZeroDivisionError
            with pytest.raises(ZeroDivisionError):
                async with held.weight_update(1):
                    raise ZeroDivisionError
            await held.get_batch(2)
            await held.ack(2)
            with pytest.raises((EndOfSource, Starved)):
                await held.get_batch(1)
        assert {path.name for path in Path(run_directory, "generations").iterdir()} == {"00000000"}


# -- who may come ----------------------------------------------------------------------------------------------------


async def test_another_version_or_run_is_refused_by_name(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with small(task(4), directory=run_directory) as pipe:
        serving = await pipe.serve()
        with pytest.raises(ServingError, match=r"already in use. Is serve\(\) called twice"):
            await pipe.serve()
        monkeypatch.setattr("pipeline.serve.link.PROTOCOL", 7)
        with pytest.raises(NotServed, match="protocol 1, this client 7: use one version"):
            await connect(run_directory).open()
        monkeypatch.undo()
        monkeypatch.setattr(serving, "run_id", "another")
        with pytest.raises(NotServed, match="this address serves run another, and run"):
            await connect(run_directory).open()


async def test_a_folder_that_nobody_serves_is_told_apart(run_directory: str) -> None:
    with pytest.raises(NotServed, match="there is no run"):
        await connect(run_directory).open()
    async with small(task(4), directory=run_directory):
        with pytest.raises(NotServed, match=f"process {os.getpid()} held it last.*has not called serve"):
            await connect(run_directory).open()
    lock = Path(run_directory, "lock")
    lock.write_text(lock.read_text().replace(socket.gethostname(), "elsewhere"))
    with pytest.raises(NotServed, match="on host elsewhere holds it"):
        await connect(run_directory).open()


async def test_connecting_from_the_process_itself_leaves_it_the_lock(run_directory: str) -> None:
    async with small(task(4), directory=run_directory) as pipe:
        await pipe.start()
        await pipe.serve()
        async with connect(run_directory):
            pass
        with child(produce, run_directory, 4, "plain", {}) as other:
            word, trace = other.hear()
            assert word == "raised"
            assert "Locked" in trace


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0,), "ab", 3, (0, 0), (True, 2)])
def test_a_part_that_is_none_is_refused(part: Any) -> None:
    with pytest.raises(ConfigError, match="part="):
        connect("anywhere", part=part)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")
def test_another_user_is_hung_up_on() -> None:
    with child(produce, None, 4, "plain", {}) as producer:
        _, address = producer.hear()
        with child(_as_nobody, address) as other:
            assert other.hear() == ("got", b"")
            assert "user 0 listens there" in other.hear()[1]


def _as_nobody(pipe: Any, address: str) -> None:
    anyio.run(anyio.lowlevel.checkpoint)  # what it imports may lie where nobody else can read
    os.setuid(65534)
    raw = socket.socket(socket.AF_UNIX)
    raw.connect("\0" + address[1:])
    body = wire.encode(wire.Request(0, "hello", {"protocol": 1, "run": ""}))
    try:
        raw.sendall(struct.pack("<II", len(body), 0) + body)
        got = raw.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        got = b""
    pipe.send(("got", got))
    try:
        connect(address).sync().__enter__()
    except NotServed as error:
        pipe.send(("refused", str(error)))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0",
        b"\xff" * 64,
        struct.pack("<II", 3, 0) + b"\xc1ab",
        struct.pack("<II", 1, 1) + b"\x90",
        struct.pack("<II", 2, 0) + b"\x91\x01",
    ],
)
async def test_nonsense_ends_its_own_connection_and_nothing_else(said: bytes) -> None:
    async with small(task(4)) as pipe:
        await pipe.start()
        address = (await pipe.serve()).address
        for greeted in (False, True):
            stream = await anyio.connect_unix("\0" + address[1:])
            async with stream:
                hello = wire.encode(wire.Request(0, "hello", {"protocol": 1, "run": ""}))
                if greeted:
                    await stream.send(struct.pack("<II", len(hello), 0) + hello)
                    await stream.receive()
                if said:
                    await stream.send(said)
        async with connect(address) as held:
            assert ids(await held.get_batch(4)) == [0, 1, 2, 3]


# -- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[], [0], [1], [64, 0, 65], [3] * 3000])
def test_payloads_lie_in_shared_memory_as_they_were(lengths: list[int]) -> None:
    payloads = [bytes([place % 251]) * length for place, length in enumerate(lengths)]
    fd, size = share(payloads)
    try:
        assert [bytes(each) for each in view(fd, size, lengths)] == payloads
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(forebay.PeerLost, match="not what was announced"):
            view(fd, size + 64, lengths)
    finally:
        os.close(fd)


def test_errors_come_as_their_class_or_as_the_nearest_that_is_known() -> None:
    class Own(Starved):
        pass

    class Foreign(Exception):
        pass

    for error, kind in ((Own("mine"), Starved), (Foreign("x"), RemoteError), (KeyError("k"), KeyError)):
        note = msgspec.msgpack.decode(wire.encode(notes.note_of(error)), type=wire.ErrorNote)
        back = notes.error_of(note)
        assert type(back) is kind
        assert str(error) in str(back) or "k" in str(back)


@pytest.mark.parametrize(("groups", "size"), [(7, 3), (2, 2), (64, 8), (9, 4)])
def test_parts_are_all_of_it_none_empty_and_as_even_as_can_be(groups: int, size: int) -> None:
    parts: list[Any] = [notes.part_of(range(groups), rank, size) for rank in range(size)]  # type: ignore[arg-type]
    assert [each for part in parts for each in part] == list(range(groups))
    lengths = [len(part) for part in parts]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1
