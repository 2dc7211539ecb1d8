"""Stands in for the server that drives a browser for ``BrowserEnv``: the real one needs npm's packages and Chrome."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Asked = list[tuple[str, str, Any]]


class _Browser(BaseHTTPRequestHandler):
    asked: Asked

    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        self._answer({"sessionId": "one", "success": True, "state": {"url": "http://a.test/"}})

    def do_DELETE(self) -> None:
        self._answer({})

    def _answer(self, said: dict[str, Any]) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.asked.append((self.command, self.path, json.loads(raw) if raw else None))
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def browsing() -> Iterator[tuple[str, Asked]]:
    """A server in a thread of its own, since the environment waits for it when it is made; its address, and what it
    was asked."""
    asked: Asked = []
    handler = type("Browser", (_Browser,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
