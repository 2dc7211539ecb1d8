"""Runs that are asked over HTTP: a client, files that hold a save up, and processes that train."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import numpy as np

from pipeline import Pipeline, ReplayBuffer, Stopped
from pipeline.errors import WriteFailed
from pipeline.store.files import OsFiles
from tests.support.ranked import Place, add, reduced
from tests.support.runs import task

SECONDS = 30.0


class Said(NamedTuple):
    """An answer."""

    status: int
    value: Any
    headers: dict[str, str]


class Asker:
    """Asks one address. Blocks."""

    def __init__(self, address: str, token: str | None = None) -> None:
        place = urlsplit(address)
        assert place.hostname is not None
        assert place.port is not None
        self.where, self.headers = (place.hostname, place.port), {}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Said:
        """Send a request. ``body``: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection(*self.where, timeout=SECONDS)
        given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, given, {**self.headers, **headers})
            answer = connection.getresponse()
            return Said(answer.status, json.loads(answer.read()), dict(answer.getheaders()))
        finally:
            connection.close()

    def save(self, then: str = "continue") -> str:
        """Ask for a save; return the id."""
        said = self.ask("POST", "/checkpoint", {"then": then})
        assert said.status == 202, said
        return str(said.value["id"])

    def look(self, name: str, wait: float = 0.0) -> dict[str, Any]:
        """Return what became of a request."""
        said = self.ask("GET", f"/checkpoint/{name}?wait={wait}")
        assert said.status == 200, said
        return dict(said.value)

    def end(self, name: str) -> dict[str, Any]:
        """Wait until a request is done, or has failed."""
        found = self.look(name, SECONDS)
        assert found["state"] != "pending"
        return found

    def raw(self, data: bytes, *, shut: bool = True) -> bytes:
        """Send bytes as they are; return all that comes."""
        with socket.create_connection(self.where, timeout=SECONDS) as connection:
            connection.sendall(data)
            if shut:
                connection.shutdown(socket.SHUT_WR)
            return received(connection)

    def sent(self, path: str) -> socket.socket:
        """Send a request, and leave the answer for later."""
        connection = socket.create_connection(self.where, timeout=SECONDS)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost:{self.where[1]}\r\n\r\n".encode())
        return connection


def received(connection: socket.socket) -> bytes:
    """Return all that comes on a connection, and close it."""
    said = b""
    with connection:
        while chunk := connection.recv(1 << 16):
            said += chunk
    return said


class HeldFiles(OsFiles):
    """Files whose manifests wait to be written, or cannot be."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()
        self.fail = False

    def create(self, path: str) -> int:
        if os.path.basename(path).startswith("manifest"):
            self.reached.set()
            assert self.go.wait(SECONDS)
            if self.fail:
                raise WriteFailed("the disk is full, says the test")
        return super().create(path)


async def in_thread(do: Callable[..., Any], *args: Any) -> Any:
    """Ask while this loop goes on."""
    return await anyio.to_thread.run_sync(lambda: do(*args))


# -- processes ---------------------------------------------------------------------------------------------------


def synchronous(pipe: Connection, directory: str) -> None:
    """Train until asked to stop: a step for each word."""
    with Pipeline(task(40, epochs=None), directory=directory, control="127.0.0.1:0", watchdog=None).sync() as run:
        run.resume()
        run.start(weights_current=True)
        pipe.send("started")
        for batch in run.batches(groups=4):
            pipe.send(batch.step)
            pipe.recv()


def asynchronous(pipe: Connection, directory: str) -> None:
    """The same, awaiting; a trainer that waits in vain for a batch is heard as well."""

    async def main() -> None:
        async with Pipeline(task(8), directory=directory, control="127.0.0.1:0", watchdog=None) as run:
            await run.resume()
            await run.start(weights_current=True)
            pipe.send("started")
            async for batch in run.batches(groups=4):
                pipe.send(batch.step)
                await anyio.to_thread.run_sync(pipe.recv)

    try:
        anyio.run(main)
    except Stopped as stopped:
        sys.exit(stopped.code)


def rank(pipe: Connection, place: Place, directory: str) -> None:
    """A rank that trains until all stop, an all-reduce in each step."""
    ranks = place.join()
    with ReplayBuffer(100_000, directory=directory, ranks=ranks, control={"port": 0}, keep=None) as buffer:
        step = buffer.resume().step
        pipe.send("resumed")
        while True:
            step += 1
            add(buffer, place.rank, step)
            assert reduced(step) == step * place.size
            if buffer.save_due(step):
                buffer.save(step)


def rows(count: int, first: int = 0) -> dict[str, np.ndarray]:
    """Rows that say which they are."""
    return {"n": np.arange(first, first + count)}
