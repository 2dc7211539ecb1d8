"""Runs plain runners in worker processes of this machine, and keeps them there: a worker that dies costs its attempts.

A plain ``def`` runner runs in a worker, alone in its main thread; an ``async def`` one runs in this process, as with
:class:`LocalEngine`, unless ``per_worker=`` sends it to a worker too. Workers import what they run by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio

from pipeline.config import ProcessOptions
from pipeline.engines.crew import Crew
from pipeline.engines.guardian import Guardian
from pipeline.engines.local import backend
from pipeline.engines.remote import RemoteEngine
from pipeline.engines.worker_process import WorkerProcess


class ProcessEngine(RemoteEngine):
    """Runs runners in worker processes; implements :class:`pipeline.interfaces.Engine`.

    ::

        engine = ProcessEngine(workers=8)
        with Pipeline([Task("sim", source=seeds, run=play)], engine=engine).sync() as pipe:
            ...

    An engine serves one pipeline. By itself, it calls plain functions in its workers::

        async with ProcessEngine(workers=4) as graders:
            passed = await graders.call(run_tests, code, timeout=10)

    Args:
        options: a :class:`~pipeline.config.ProcessOptions` or a mapping of plain values.
        **more: single options; they win over ``options``.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    def __init__(self, options: ProcessOptions | Mapping[str, Any] | None = None, **more: Any) -> None:
        base = options.to_dict() if isinstance(options, ProcessOptions) else dict(options or {})
        self.options = ProcessOptions.of({**base, **more})
        self._guardian = Guardian()
        count, grace_s, places = self.options.count, self.options.grace_s, self.options.per_worker
        plain = Crew(self._start_plain, count=count, places=1, grace_s=grace_s)
        asynchronous = None
        if places is not None:
            asynchronous = Crew(self._start_async, count=count, places=places, grace_s=grace_s)
        super().__init__(plain, asynchronous, most=count)

    def _start_plain(self, on_ready: Callable[[], None], on_room: Callable[[], None]) -> WorkerProcess:
        return WorkerProcess(self.options, self._guardian, backend="", on_ready=on_ready, on_room=on_room)

    def _start_async(self, on_ready: Callable[[], None], on_room: Callable[[], None]) -> WorkerProcess:
        return WorkerProcess(self.options, self._guardian, backend=backend(), on_ready=on_ready, on_room=on_room)

    async def __aenter__(self) -> ProcessEngine:
        await self._open()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        try:
            return await self._close(*exc)
        finally:
            with anyio.CancelScope(shield=True):
                await self._guardian.close()

    @property
    def processes(self) -> int:
        """How many worker processes there are now."""
        return sum(crew.running for crew in self._crews)
