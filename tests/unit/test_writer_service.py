"""The asynchronous shell of the writer: back-pressure, and cancellation that loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from pipeline.errors import WriteFailed
from pipeline.records import Dropped
from pipeline.store.files import OsFiles
from pipeline.store.layout import Layout, RunFile
from pipeline.store.service import WriterService
from pipeline.store.writer import StoreWriter, WriteBatch
from tests.support.disk import ScriptedFiles, events_of, new_run


class GatedFiles(OsFiles):
    """Writes wait at a gate; how many are inside at once is counted."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.inside = self.most = 0

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.gate.wait(10)
        self.inside -= 1
        return super().write(handle, chunks)


class Service(WriterService):
    """A service over a run of its own."""

    def __init__(self, tmp_path: Path, files: OsFiles, *, queue_bytes: int = 1 << 20, inline: bool = False) -> None:
        self.layout: Layout
        self.run_file: RunFile
        self.layout, self.run_file = new_run(tmp_path / "run")
        tag = self.run_file.tag
        super().__init__(
            StoreWriter(self.layout, files, run_tag=tag, incarnation=1, queue_bytes=queue_bytes), inline=inline
        )

    def append(self, *uids: int) -> None:
        for uid in uids:
            self.writer.append(Dropped(uid, "failed"))
        self.notify()

    def uids(self) -> list[int]:
        return [event.uid for event in events_of(self.layout, self.run_file) if isinstance(event, Dropped)]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("inline", [False, True])
async def test_what_is_appended_is_written_in_order_and_the_queue_returns_to_zero(tmp_path: Path, inline: bool) -> None:
    service = Service(tmp_path, OsFiles(), inline=inline)
    async with anyio.create_task_group() as group:
        group.start_soon(service.run)
        for uid in range(300):
            service.append(uid)
            if uid % 7 == 0:
                await turns(1)
        await service.flush()
        assert service.uids() == list(range(300))
        assert service.writer.queued_bytes == 0
        group.cancel_scope.cancel()
    service.append(300)
    await service.close()
    assert service.uids() == list(range(301))


async def test_a_flush_cancelled_at_any_turn_loses_nothing_and_writes_nothing_twice(tmp_path: Path) -> None:
    """By anyio's scopes, and by asyncio's own cancel (``wait_for``), which no shield holds up."""
    for native in (True, False):
        for turn in range(12):
            service = Service(tmp_path / f"{native}{turn}", OsFiles())
            service.append(0, 1)
            with anyio.CancelScope() as scope:
                flushing = asyncio.ensure_future(service.flush()) if native else None
                if flushing is not None:
                    await turns(turn)
                    flushing.cancel()
                    await asyncio.gather(flushing, return_exceptions=True)
                else:
                    asyncio.get_running_loop().call_later(turn * 1e-4, scope.cancel)
                    await service.flush()
            service.append(2)
            await service.flush()
            assert service.uids() == [0, 1, 2], (native, turn)
            assert service.writer.queued_bytes == 0
            await service.close()


async def test_a_flush_cancelled_while_its_thread_writes_is_followed_by_one_writer_at_a_time(tmp_path: Path) -> None:
    files = GatedFiles()
    service = Service(tmp_path, files)
    service.append(0)
    flushing = asyncio.ensure_future(service.flush())
    await asyncio.to_thread(files.entered.wait, 10)
    flushing.cancel()
    await turns(5)
    service.append(1)
    later = [asyncio.ensure_future(service.flush()), asyncio.ensure_future(service.sync())]
    await turns(20)
    files.gate.set()
    await asyncio.gather(*later)
    assert files.most == 1
    assert service.uids() == [0, 1]
    assert service.writer.queued_bytes == 0
    await asyncio.gather(flushing, return_exceptions=True)
    await service.close()


async def test_a_writing_task_goes_on_with_what_a_cancelled_flush_had_taken(tmp_path: Path) -> None:
    service = Service(tmp_path, OsFiles())
    async with anyio.create_task_group() as group:
        service.append(0)
        flushing = asyncio.ensure_future(service.flush())
        await turns(2)
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
        written = anyio.Event()
        done = service.writer.done

        def note(batch: WriteBatch) -> None:
            done(batch)
            written.set()

        service.writer.done = note  # type: ignore[method-assign]
        group.start_soon(service.run)
        with anyio.fail_after(5):
            await written.wait()
        assert service.uids() == [0]
        group.cancel_scope.cancel()
    await service.close()


async def test_producers_wait_while_the_queue_is_full_and_go_on_when_it_has_room(tmp_path: Path) -> None:
    files = GatedFiles()
    service = Service(tmp_path, files, queue_bytes=200)
    passed: list[int] = []
    everybody = anyio.Event()

    async def produce(uid: int) -> None:
        await service.room()
        passed.append(uid)
        if len(passed) == 3:
            everybody.set()

    async with anyio.create_task_group() as group:
        await produce(0)
        service.append(0, 1, 2, 3)
        assert service.writer.full
        group.start_soon(service.run)
        for uid in (1, 2):
            group.start_soon(produce, uid)
        await asyncio.to_thread(files.entered.wait, 10)
        await turns(20)
        assert passed == [0], "what is on its way to the disk still counts"
        files.gate.set()
        with anyio.fail_after(5):
            await everybody.wait()
        await service.flush()
        assert service.writer.queued_bytes == 0
        group.cancel_scope.cancel()
    await service.close()


async def test_a_failed_write_ends_the_writing_task_and_is_raised_by_every_later_call(tmp_path: Path) -> None:
    files = ScriptedFiles(3)  # the journal is made and written to once
    service = Service(tmp_path, files)
    service.append(0)
    await service.flush()
    service.append(1)
    with pytest.raises(WriteFailed) as caught:
        await service.run()
    first = caught.value
    for call in (service.flush, service.sync, service.flush):
        with pytest.raises(WriteFailed) as again:
            await call()
        assert again.value is first, "a flush that had nothing new to write must not pretend that all is well"
    assert service.uids() == [0]
    await service.close()
    assert files.open == set()


async def test_a_sync_covers_all_that_was_appended_before_it(tmp_path: Path) -> None:
    service = Service(tmp_path, OsFiles())
    service.append(*range(5))
    position, segments = await service.sync()
    assert position.sequence == 5
    assert segments == []
    service.append(5)
    later, _ = await service.sync()
    assert later.sequence == 6
    assert later.bytes > position.bytes
    await service.close()


async def test_closing_writes_what_is_queued_and_frees_the_files(tmp_path: Path) -> None:
    files = ScriptedFiles()
    service = Service(tmp_path, files)
    service.append(0, 1)
    await service.close()
    assert service.uids() == [0, 1]
    assert files.open == set()
