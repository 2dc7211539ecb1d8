"""``forebay checkpoint`` and whoever answers it, which need not be a run."""

from __future__ import annotations

import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.cli import main


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, b'{"fine": true}', "is no run; its answer has no 'then'"),
        (200, b"[]", "[]"),
        (200, b"hello", "does not answer"),
        (409, b'{"error": "no \\u001b[31mred"}', "no \\x1b[31mred"),
        (200, b'{"then": "stop", "ask": "/x", "state": "failed", "reason": "full\\u0007"}', "has failed: full\\x07"),
    ],
    ids=["another", "list", "text", "refused", "failed"],
)
def test_what_is_answered_is_told_and_steers_no_terminal(
    status: int, answer: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["checkpoint", f"http://127.0.0.1:{server.server_port}"]) == 1
        thread.join()
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("forebay checkpoint: ")
    assert error.count("\n") == 1


def test_ctrl_c_while_it_waits_leaves_what_was_asked_and_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    class Waits(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = b'{"then": "stop", "ask": "/checkpoint/1", "state": "pending", "id": 1}'
            self.send_response(202)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def do_GET(self) -> None:
            asked.append(self.path)
            os.kill(os.getpid(), signal.SIGINT)
            self.rfile.read(1)  # until the command has gone

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Waits) as server:

        def both() -> None:
            server.handle_request()
            server.handle_request()

        thread = threading.Thread(target=both)
        thread.start()
        assert main(["checkpoint", f"http://127.0.0.1:{server.server_port}", "--stop", "--wait"]) == 130
        thread.join()
    assert asked == ["/checkpoint/1?wait=30"]
    assert capsys.readouterr().err == "forebay checkpoint: stopped\n"
