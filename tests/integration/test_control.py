"""Runs that are asked over HTTP: a request becomes one generation, which the answer names, whatever rank it reached."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Control, Pipeline, ReplayBuffer, ServingError, Stopped, TrajectoryBuffer, WriteFailed
from pipeline.checkpoint import status_of, verify
from pipeline.cli import checkpoint, main
from pipeline.control import find_places
from pipeline.errors import StoppedExit
from pipeline.store.lock import look
from tests.support import controlled
from tests.support.children import ChildProcess, child
from tests.support.controlled import Asker, HeldFiles, in_thread, rows
from tests.support.gates import Gate
from tests.support.ranked import ROWS, manifests, processes, serve
from tests.support.runs import pipeline, task

HERE = Control()


def asker_of(directory: str | Path, rank: int = 0) -> Asker:
    """Ask where the run's folder says."""
    place = status_of(directory).control[rank]
    assert place.rank == rank
    return Asker(place.address)


def own(pipe: Pipeline) -> Asker:
    server = pipe._run.control.server
    assert server is not None
    return Asker(server.address)


async def held(pipe: Pipeline, files: HeldFiles) -> Any:
    """Train a step and save it; the save waits before its manifest, until ``files.go`` is set."""
    batch = await pipe.get_batch(4)
    files.go.clear()
    files.reached.clear()
    saving = await pipe.save(batch.step)
    await in_thread(files.reached.wait)
    return saving


@pytest.fixture(scope="module")
def server() -> Any:
    return serve()


class TestPipeline:
    async def test_a_request_is_a_generation_at_the_next_ack(self, run_directory: str) -> None:
        async with pipeline(task(40), directory=run_directory, control=HERE, keep=None) as pipe:
            asker = own(pipe)
            early = await in_thread(asker.save)
            await pipe.start()
            assert (await in_thread(asker.end, early))["generation"] == 0
            batch = await pipe.get_batch(4)
            name = await in_thread(asker.save)
            assert await in_thread(asker.save) == name
            assert (await in_thread(asker.look, name))["state"] == "pending"
            await pipe.ack(batch.step)
            assert await in_thread(asker.end, name) == {
                "id": name,
                "state": "done",
                "then": "continue",
                "generation": 1,
                "step": 1,
            }
            found = (await in_thread(asker.ask, "GET", "/status")).value
            assert (found["kind"], found["step"], found["generation"], found["saved_step"]) == ("pipeline", 1, 1, 1)
            assert found["progress"]["consumed_samples"] == {"numbers": 4}
            assert found["statistics"]["groups"]["trained"] == 4
            again = await in_thread(asker.save)  # nothing was trained since, and nothing is leased
            with pytest.raises(StopAsyncIteration):
                await anext(pipe.batches(groups=4, until=1))
            await pipe.ack(1)
            assert (await in_thread(asker.end, again))["generation"] == 1
        assert [(m.step, m.reason) for m in manifests(Path(run_directory))] == [(0, "start"), (1, "HTTP")]
        async with pipeline(task(40), directory=run_directory, control=HERE, keep=None) as pipe:
            early = await in_thread(own(pipe).save)
            await pipe.resume()
            assert (await in_thread(own(pipe).end, early))["generation"] == 2
            early = await in_thread(own(pipe).save, "stop")
            with pytest.raises(Stopped):
                await pipe.start(weights_current=True)
            assert (await in_thread(own(pipe).end, early))["generation"] == 2

    async def test_a_trainer_that_waits_for_a_batch_is_heard(self, run_directory: str) -> None:
        gate = Gate()
        async with pipeline(task(8, gate.run), directory=run_directory, control=HERE) as pipe:
            await pipe.start()
            asker = own(pipe)

            async def ask() -> None:
                name = await in_thread(asker.save, "stop")
                assert (await in_thread(asker.end, name))["state"] == "done"

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                with pytest.raises(Stopped) as stopped:
                    await pipe.get_batch(4)
            assert (stopped.value.reason, stopped.value.code, stopped.value.generation) == ("HTTP", 0, 0)

    async def test_during_a_save_it_is_the_same_one(self, run_directory: str) -> None:
        files = HeldFiles()
        async with pipeline(task(40), directory=run_directory, control=HERE, keep=None, files=files) as pipe:
            await pipe.start()
            asker = own(pipe)
            saving = await held(pipe, files)  # nobody has asked for it
            first, second = await in_thread(asker.save), await in_thread(asker.save)
            assert first == second
            files.go.set()
            assert (await in_thread(asker.end, first))["generation"] == saving.generation
            batch = await pipe.get_batch(4)
            later = await in_thread(asker.save)
            assert later != first
            await pipe.save(batch.step)
            assert (await in_thread(asker.end, later))["step"] == 2
        assert [m.step for m in manifests(Path(run_directory))] == [0, 1, 2], "no generation more for any of them"

    async def test_a_stop_during_a_save_stops_after_the_next(self, run_directory: str) -> None:
        files = HeldFiles()
        async with pipeline(task(40), directory=run_directory, control=HERE, keep=None, files=files) as pipe:
            await pipe.start()
            asker = own(pipe)
            await held(pipe, files)
            batch = await pipe.get_batch(4)
            name = await in_thread(asker.save)
            assert await in_thread(asker.save, "stop") == name
            files.go.set()
            with pytest.raises(Stopped) as stopped:
                await pipe.ack(batch.step)
            assert await in_thread(asker.end, name) == {
                "id": name,
                "state": "done",
                "then": "stop",
                "generation": stopped.value.generation,
                "step": 2,
            }

    async def test_a_save_that_fails_says_why_and_the_next_one_may_work(self, run_directory: str) -> None:
        files = HeldFiles()
        async with pipeline(task(40), directory=run_directory, control=HERE, files=files) as pipe:
            await pipe.start()
            asker = own(pipe)
            batch = await pipe.get_batch(4)
            name, files.fail = await in_thread(asker.save), True
            await pipe.ack(batch.step)
            found = await in_thread(asker.end, name)
            assert (found["state"], found["reason"]) == ("failed", "the disk is full, says the test")
            files.fail = False
            with pytest.raises(WriteFailed):
                await pipe.get_batch(4)
            batch = await pipe.get_batch(4)
            name = await in_thread(asker.save)
            await pipe.ack(batch.step)
            assert (await in_thread(asker.end, name))["step"] == 2

    async def test_files_that_only_the_trainer_writes_are_waited_for(self, run_directory: str) -> None:
        async with pipeline(task(40), directory=run_directory, control=HERE) as pipe:
            await pipe.start()
            asker = own(pipe)
            async with pipe.checkpoint((await pipe.get_batch(4)).step):
                pass
            batch = await pipe.get_batch(4)
            name = await in_thread(asker.save)
            await pipe.ack(batch.step)
            assert (await in_thread(asker.look, name))["state"] == "pending"
            assert pipe.save_due(batch.step)
            async with pipe.checkpoint(batch.step) as folder:
                Path(folder, "weights").write_text("2")
            assert (await in_thread(asker.end, name))["step"] == 2
            batch = await pipe.get_batch(4)
            failing = await in_thread(asker.save)
            with pytest.raises(ZeroDivisionError):
                async with pipe.checkpoint(batch.step):
                    raise ZeroDivisionError
            assert (await in_thread(asker.end, failing))["state"] == "failed"

    async def test_when_it_is_closed_nobody_listens_and_the_folder_says_so(self, run_directory: str) -> None:
        async with pipeline(task(40), directory=run_directory, control=HERE) as pipe:
            await pipe.start()
            asker = own(pipe)
            await pipe.get_batch(4)
            waits = asker.sent(f"/checkpoint/{await in_thread(asker.save)}?wait=30")
            assert find_places(run_directory, 1)
            assert (await in_thread(asker.ask, "GET", "/status")).status == 200
        assert b'"reason":"the pipeline is closed"' in controlled.received(waits)
        with pytest.raises(ConnectionRefusedError):
            asker.save()
        assert not find_places(run_directory, 1)

    async def test_a_port_that_is_taken_is_an_error_and_the_folder_is_free(self, run_directory: str) -> None:
        async with pipeline(directory=run_directory, control=HERE) as pipe:
            port = own(pipe).where[1]
            with pytest.raises(ServingError, match="cannot be listened at"):
                async with pipeline(directory=run_directory + "2", control=f"127.0.0.1:{port}"):
                    pass
        assert look(run_directory + "2/lock").held is False
        async with pipeline(directory=run_directory + "2", control=f"127.0.0.1:{port}") as pipe:
            assert own(pipe).where[1] == port

    async def test_no_manifest_holds_the_token(self, run_directory: str) -> None:
        options = {"host": "127.0.0.1", "token": "s3cret-t0ken"}
        async with pipeline(directory=run_directory, control=options) as pipe:
            await pipe.start()
            await pipe.save(0)
        found = [path for path in Path(run_directory).rglob("*") if path.is_file()]
        assert len(found) > 5
        assert not any(b"s3cret-t0ken" in path.read_bytes() for path in found)
        assert manifests(Path(run_directory))[-1].options["control"] == {"host": "127.0.0.1", "port": 0, "token": None}


class TestBuffers:
    def test_a_request_is_answered_by_the_next_save(self, tmp_path: Path) -> None:
        with ReplayBuffer(100, directory=tmp_path, control=HERE) as buffer:
            buffer.resume()
            asker = asker_of(tmp_path)
            buffer.extend(rows(5))
            assert not buffer.save_due(1)
            name = asker.save()
            assert buffer.save_due(2)
            assert buffer.save_due(2), "until it was saved"
            buffer.save(2)
            assert not buffer.save_due(3)
            assert asker.end(name) == {"id": name, "state": "done", "then": "continue", "generation": 0, "step": 2}
            found = asker.ask("GET", "/status").value
            assert (found["kind"], found["step"], found["generation"]) == ("replay", 2, 0)
            assert found["statistics"]["size"] == 5
            name = asker.save("stop")
            assert buffer.save_due(3)
            with pytest.raises(StoppedExit) as stopped:
                buffer.save(3)
            assert (stopped.value.code, stopped.value.reason) == (0, "HTTP")
            assert asker.end(name) == {"id": name, "state": "done", "then": "stop", "generation": 1, "step": 3}
        with pytest.raises(ConnectionRefusedError):
            asker.save()

    def test_during_a_save_it_is_the_same_one_and_a_stop_waits_for_the_next(self, tmp_path: Path) -> None:
        files = HeldFiles()
        with ReplayBuffer(100, directory=tmp_path, control=HERE, files=files) as buffer:
            files.go.clear()
            saving = buffer.save(1)
            asker = asker_of(tmp_path)
            assert files.reached.wait(controlled.SECONDS)
            name = asker.save()
            assert asker.save("stop") == name
            files.go.set()
            saving.wait()
            assert asker.look(name)["state"] == "pending"
            assert buffer.save_due(2)
            with pytest.raises(StoppedExit):
                buffer.save(2)
            assert (asker.end(name)["generation"], asker.end(name)["step"]) == (1, 2)

    def test_a_save_that_fails_says_why_and_stays_due(self, tmp_path: Path) -> None:
        files = HeldFiles()
        with ReplayBuffer(100, directory=tmp_path, control=HERE, files=files) as buffer:
            buffer.resume()
            asker = asker_of(tmp_path)
            name, files.fail = asker.save(), True
            assert buffer.save_due(1)
            with pytest.raises(WriteFailed):
                buffer.save(1, wait=True)
            assert "the disk is full" in asker.end(name)["reason"]
            files.fail = False
            name = asker.save()
            assert buffer.save_due(2)
            buffer.save(2)
            assert asker.end(name)["step"] == 2

    async def test_the_form_for_tasks_and_buffers_of_trajectories(self, tmp_path: Path) -> None:
        async with ReplayBuffer(100, directory=tmp_path / "a", control=HERE).aio as replay:
            await replay.resume()
            asker = asker_of(tmp_path / "a")
            name = await in_thread(asker.save, "stop")
            assert replay.buffer.save_due()
            with pytest.raises(Stopped):
                await replay.save(1)
            assert (await in_thread(asker.end, name))["step"] == 1
        with TrajectoryBuffer(directory=str(tmp_path / "b"), control="127.0.0.1:0") as buffer:
            buffer.resume()
            asker = asker_of(tmp_path / "b")
            assert asker.ask("GET", "/status").value["statistics"]["num_trajectories"] == 0
            name = asker.save()
            assert buffer.save_due()
            buffer.save(4)
            assert asker.end(name)["step"] == 4

    def test_a_resume_that_fails_may_be_tried_again(self, tmp_path: Path) -> None:
        with ReplayBuffer(100, directory=tmp_path, control=HERE) as buffer:
            buffer.extend({"n": np.arange(3)})
            with pytest.raises(RuntimeError, match="resume"):
                buffer.resume()
            buffer.save(1)
            assert asker_of(tmp_path).save()


def _noticed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What is set when the command has asked."""
    posted, ask = threading.Event(), checkpoint._ask

    def noticed(*given: Any) -> dict[str, Any]:
        answer = ask(*given)
        posted.set()
        return answer

    monkeypatch.setattr(checkpoint, "_ask", noticed)
    return posted


class TestProcesses:
    def test_the_command_finds_the_run_and_says_what_became_of_it(
        self, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = str(tmp_path)
        with child(controlled.synchronous, directory) as process:
            assert (process.hear(), process.hear()) == ("started", 1)
            assert main(["status", directory]) == 4
            assert "  control   http://127.0.0.1:" in capsys.readouterr().out
            assert main(["checkpoint", directory]) == 0
            asked = capsys.readouterr().out
            process.pipe.send("on")
            assert process.hear() == 2
            assert asker_of(directory).end(asked.split(":")[2].split("/")[-1])["step"] == 1
            posted = _noticed(monkeypatch)
            codes = list[int]()
            waits = threading.Thread(target=lambda: codes.append(main(["checkpoint", directory, "--stop", "--wait"])))
            waits.start()
            assert posted.wait(controlled.SECONDS)
            process.pipe.send("on")
            waits.join()
            assert codes == [0]
            assert capsys.readouterr().out.endswith("asked, to stop afterwards\nsaved: generation 2, step 2\n")
            process.process.join(controlled.SECONDS)
            assert process.process.exitcode == 0
        assert status_of(directory).life.reason == "HTTP"  # type: ignore[union-attr]
        assert main(["checkpoint", directory]) == 1
        assert "to be continued; nobody listens to requests there" in capsys.readouterr().err
        assert main(["checkpoint", str(tmp_path / "none")]) == 1

    def test_a_trainer_that_waits_stops_and_goes_on_where_it_was(self, tmp_path: Path) -> None:
        with child(controlled.asynchronous, str(tmp_path)) as process:
            assert (process.hear(), process.hear()) == ("started", 1)
            process.pipe.send("on")
            assert process.hear() == 2
            name = asker_of(tmp_path).save("stop")
            waits = asker_of(tmp_path).sent(f"/checkpoint/{name}?wait=30")
            assert asker_of(tmp_path).ask("GET", "/status").status == 200
            process.pipe.send("on")
            process.process.join(controlled.SECONDS)
            assert process.process.exitcode == 0
            assert b'"state":"done"' in controlled.received(waits)
        newest = manifests(tmp_path)[-1]
        assert (newest.step, newest.reason) == (2, "HTTP")
        assert status_of(tmp_path).state == "finished"

    def test_what_a_killed_process_left_is_no_address(self, tmp_path: Path) -> None:
        with child(controlled.synchronous, str(tmp_path)) as process:
            assert process.hear() == "started"
            assert status_of(tmp_path).control
            process.kill()
            assert (tmp_path / "control-0000.json").exists()
            assert status_of(tmp_path).control == []
        with child(controlled.synchronous, str(tmp_path)) as process:
            assert process.hear() == "started"
            assert asker_of(tmp_path).ask("GET", "/status").value["incarnation"] == 2


class TestRanks:
    @pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
    def test_whichever_rank_is_asked_all_save_once_and_the_answer_names_it(
        self, tmp_path: Path, server: Any, which: tuple[int, ...]
    ) -> None:
        with processes(server, controlled.rank, tmp_path, 2) as ranks:
            ranks.start()
            assert [each.hear() for each in ranks.ranks] == ["resumed"] * 2
            askers = [asker_of(tmp_path, rank) for rank in range(2)]
            names = {rank: askers[rank].save() for rank in which}
            found = [askers[rank].end(name) for rank, name in names.items()]
            assert all(each["state"] == "done" for each in found)
            saved = manifests(tmp_path)
            for each in found:
                (made,) = [m for m in saved if m.generation == each["generation"]]
                assert (made.step, made.world_size) == (each["step"], 2)
                assert [shard.rows for shard in made.shards] == [ROWS * made.step] * 2
            assert len(saved) == len({each["generation"] for each in found})
            assert [asker.ask("GET", "/status").value["rank"] for asker in askers] == [0, 1]
            name = askers[which[-1]].save("stop")
            waits = askers[which[-1]].sent(f"/checkpoint/{name}?wait=30")
            assert ranks.ends() == [0, 0]
            assert b'"state":"done"' in controlled.received(waits)
        assert len(manifests(tmp_path)) == len(saved) + 1
        assert verify(str(tmp_path)).whole


def test_a_child_process_says_what_it_raised(tmp_path: Path) -> None:
    """The support of these tests: an address that does not answer is an error, not a hang."""
    process = ChildProcess(controlled.synchronous, str(tmp_path))
    try:
        assert process.hear() == "started"
        asker = asker_of(tmp_path)
    finally:
        process.kill()
        process.pipe.close()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        asker.save()
