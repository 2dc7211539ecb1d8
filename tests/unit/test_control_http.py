"""Requests over real sockets: who may ask, what is answered, and what a stranger cannot do."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline import Control, ServingError
from pipeline.control import ControlServer, Desk, find_places
from pipeline.control import server as serving
from pipeline.control.http import MOST_BODY, MOST_HEAD
from pipeline.observe.logs import logger
from pipeline.store.layout import Layout
from tests.support.controlled import Asker, received


@contextmanager
def listening(options: Control | None = None, rank: int = 0) -> Iterator[tuple[ControlServer, Asker]]:
    """A server with a desk, and no run behind it."""
    options = options or Control()
    server = ControlServer(options, Desk(), logger(), rank)
    server.look = lambda: {"step": 3}
    server.begin()
    try:
        yield server, Asker(server.address, options.token)
    finally:
        server.close("the test is over")


def test_a_request_is_answered_at_once_and_its_end_can_be_waited_for() -> None:
    with listening() as (server, asker):
        said = asker.ask("POST", "/checkpoint")
        name = said.value["id"]
        assert said.value == {
            "id": name,
            "state": "pending",
            "then": "continue",
            "rank": 0,
            "ask": f"/checkpoint/{name}",
        }
        assert (said.status, said.headers["Location"]) == (202, f"/checkpoint/{name}")
        assert asker.save("stop") == name
        assert asker.look(name) == {"id": name, "state": "pending", "then": "stop"}
        found: list[Any] = []
        waits = threading.Thread(target=lambda: found.append(asker.end(name)))
        waits.start()
        server.desk.ended(server.desk.begun(), 5, 50, stops=True)
        waits.join()
        assert found == [{"id": name, "state": "done", "then": "stop", "generation": 5, "step": 50}]
        assert asker.look(name) == found[0]
        again = asker.save()
        server.desk.failed(server.desk.begun(), "no space", stops=False)
        assert asker.end(again) == {"id": again, "state": "failed", "then": "continue", "reason": "no space"}


def test_how_the_run_stands() -> None:
    with listening() as (server, asker):
        said = asker.ask("GET", "/status")
        here = {"rank": 0, "process": os.getpid(), "host": socket.gethostname()}
        assert (said.status, said.value) == (200, {"step": 3, **here})
        assert said.headers["Content-Type"] == "application/json"

        def fails() -> dict[str, Any]:
            raise OSError("gone")

        server.look = fails
        said = asker.ask("GET", "/status")
        assert (said.status, said.value) == (500, {"error": "OSError('gone')"})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "why"),
    [
        ("GET", "/checkpoint", None, 405, "/checkpoint takes POST, not GET"),
        ("PUT", "/checkpoint", b"", 405, "takes POST"),
        ("DELETE", "/checkpoint/x", None, 405, "takes GET"),
        ("POST", "/status", b"", 405, "takes GET"),
        ("OPTIONS", "/checkpoint", None, 405, "takes POST"),
        ("GET", "/checkpoint/deadbeef", None, 404, "knows no request 'deadbeef'"),
        ("GET", "/checkpoint/a/b", None, 404, "there are POST /checkpoint"),
        ("GET", "/", None, 404, "there are POST /checkpoint"),
        ("GET", "/../run.json", None, 404, "there are"),
        ("GET", "/statuses", None, 404, "there are"),
        ("POST", "/checkpoint", {"then": "leave"}, 400, "the body is to be empty"),
        ("POST", "/checkpoint", {"than": "stop"}, 400, "the body is to be empty"),
        ("POST", "/checkpoint", ["stop"], 400, "the body is to be empty"),
        ("POST", "/checkpoint", b"{", 400, "the body is to be empty"),
        ("POST", "/checkpoint", b"[" * 4000, 400, "the body is to be empty"),
        ("POST", "/checkpoint", b"\xff", 400, "the body is to be empty"),
    ],
)
def test_anything_else_is_an_error_that_says_what_there_is(
    method: str, path: str, body: Any, status: int, why: str
) -> None:
    with listening() as (server, asker):
        said = asker.ask(method, path, body)
        assert said.status == status
        assert why in said.value["error"]
        assert not server.desk.asked
        if status == 405:
            assert said.headers["Allow"] in ("GET", "POST")


def test_a_wait_is_a_number() -> None:
    with listening() as (_, asker):
        name = asker.save()
        for wrong in ("x", "-1", "nan", "inf"):
            assert asker.ask("GET", f"/checkpoint/{name}?wait={wrong}").status == 400


class TestWhoMayAsk:
    def test_on_the_loopback_the_host_must_be_this_machine(self) -> None:
        """A page whose name was made to mean 127.0.0.1 says its own name."""
        with listening() as (server, asker):
            port = asker.where[1]
            for host in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil:{port}", ""):
                said = asker.ask("POST", "/checkpoint", **{"Host": host})
                assert (said.status, server.desk.asked) == (403, False), host
            without = asker.raw(b"POST /checkpoint HTTP/1.1\r\n\r\n")
            assert without.startswith(b"HTTP/1.1 403")
            for host in (f"localhost:{port}", f"LocalHost:{port}", f"127.0.0.1:{port}"):
                assert asker.ask("GET", "/status", **{"Host": host}).status == 200

    def test_pages_of_others_may_not(self) -> None:
        with listening() as (server, asker):
            for origin in ("http://evil.example", "null", f"https://127.0.0.1:{asker.where[1]}"):
                assert asker.ask("POST", "/checkpoint", b"", Origin=origin).status == 403
            assert not server.desk.asked
            assert asker.ask("GET", "/status", Origin=server.address).status == 200

    @pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
    def test_with_a_token_only_who_brings_it(self, host: str) -> None:
        with listening(Control(host=host, token="open-sesame")) as (_, asker):
            assert asker.ask("GET", "/status").status == 200
            name = asker.save()
            strangers = [{}, {"Authorization": "Bearer open"}, {"Authorization": "Basic open-sesame"}]
            strangers += [{"Authorization": "Bearer open-sesame "}, {"Authorization": "Bearer \xe9"}]
            asker.headers = {}
            for headers in strangers[:3] + strangers[4:]:
                for method, path in (
                    ("GET", "/status"),
                    ("POST", "/checkpoint"),
                    ("GET", f"/checkpoint/{name}"),
                    ("GET", "/x"),
                ):
                    said = asker.ask(method, path, **headers)
                    assert (said.status, said.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert name not in str(said.value)
            if host == "0.0.0.0":  # who has the token may call this machine what it likes
                assert asker.ask("GET", "/status", Host="gpu7:80", Authorization="Bearer open-sesame").status == 200


class TestStrangers:
    def test_a_body_or_a_head_that_is_too_long(self) -> None:
        with listening() as (server, asker):
            long = asker.ask("POST", "/checkpoint", b" " * (MOST_BODY + 1))
            assert (long.status, long.value) == (413, {"error": f"a body has at most {MOST_BODY} bytes"})
            assert asker.ask("POST", "/checkpoint", b" " * MOST_BODY).status == 202
            huge = asker.raw(b"POST /checkpoint HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
            assert huge.startswith(b"HTTP/1.1 413")
            head = asker.raw(b"GET /status HTTP/1.1\r\nX: " + b"x" * MOST_HEAD)
            assert head.startswith(b"HTTP/1.1 431")
            chunked = asker.raw(b"POST /checkpoint HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
            assert chunked.startswith(b"HTTP/1.1 411")
            server.desk.ended(None, 1, 1, stops=True)

    @pytest.mark.parametrize(
        "said",
        [
            b"GET /status\r\n\r\n",
            b"get /status HTTP/1.1\r\n\r\n",
            b"GET status HTTP/1.1\r\n\r\n",
            b"GET /status HTTP/2\r\n\r\n",
            b"GET /sta tus HTTP/1.1\r\n\r\n",
            b"GET http://127.0.0.1/status HTTP/1.1\r\n\r\n",
            b"GET /status HTTP/1.1\r\nHost\r\n\r\n",
            b"GET /status HTTP/1.1\r\n Host: folded\r\n\r\n",
            b"GET /status HTTP/1.1\r\nHost : spaced\r\n\r\n",
            b"GET /status HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"POST /checkpoint HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
            b"POST /checkpoint HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"POST /checkpoint HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n",
            b"\x16\x03\x01\x02\x00\r\n\r\n",
            b"\r\n\r\n",
        ],
    )
    def test_what_is_no_request_is_refused(self, said: bytes) -> None:
        with listening() as (server, asker):
            assert asker.raw(said).startswith(b"HTTP/1.1 400"), said
            assert not server.desk.asked
            assert asker.ask("GET", "/status").status == 200

    @pytest.mark.parametrize("seed", range(3))
    def test_bytes_at_random_break_nothing(self, seed: int) -> None:
        rng = random.Random(seed)
        with listening() as (server, asker):
            good = (
                f"POST /checkpoint HTTP/1.1\r\nHost: 127.0.0.1:{asker.where[1]}\r\nContent-Length: 15\r\n\r\n".encode()
            )
            good += b'{"then":"stop"}'
            for _ in range(60):
                bad = bytearray(good)
                for _ in range(rng.randrange(1, 6)):
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
                said = asker.raw(bytes(bad[: rng.randrange(1, len(bad) + 1)]))
                assert said == b"" or said.split(b" ")[1] in (b"202", b"400", b"403", b"404", b"405", b"411", b"413")
            assert asker.ask("GET", "/status").status == 200
            server.desk.ended(None, 1, 1, stops=True)

    def test_who_is_slow_has_a_time_limit_and_holds_nobody_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving, "REQUEST_S", 0.3)
        with listening() as (_, asker), socket.create_connection(asker.where, timeout=30) as slow:
            slow.sendall(b"POST /check")
            assert asker.ask("GET", "/status").status == 200
            said = received(slow)
            assert said.startswith(b"HTTP/1.1 408")
            assert b"a request is to arrive within 0.3 s" in said

    def test_so_many_may_ask_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving, "MOST_AT_ONCE", 2)
        with listening() as (server, asker):
            name = asker.save()
            waiting = [asker.sent(f"/checkpoint/{name}?wait=30") for _ in range(2)]
            assert asker.ask("GET", "/status").status == 503
            server.desk.ended(None, 1, 1, stops=True)
            assert [received(each).startswith(b"HTTP/1.1 200") for each in waiting] == [True, True]

    def test_a_run_that_does_not_answer_is_said_to_be_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving, "STATUS_S", 0.05)
        held = threading.Event()
        with listening() as (server, asker):
            server.look = lambda: {"held": held.wait(30)}
            try:
                said = asker.ask("GET", "/status")
            finally:
                held.set()
            assert said.status == 503
            assert "did not answer within 0.05 s" in said.value["error"]

    def test_who_leaves_before_the_answer_costs_nothing(self) -> None:
        with listening() as (server, asker):
            name = asker.save()
            asker.sent(f"/checkpoint/{name}?wait=30").close()
            server.desk.ended(None, 1, 1, stops=True)
            assert asker.look(name)["state"] == "done"


class TestTheEnd:
    def test_who_waits_is_told_and_then_nobody_listens(self) -> None:
        with listening() as (server, asker):
            name = asker.save("stop")
            waits = asker.sent(f"/checkpoint/{name}?wait=30")
            assert asker.ask("GET", "/status").status == 200, "so the one before is being answered"
        assert b'"reason":"the test is over"' in received(waits)
        with pytest.raises(ConnectionRefusedError):
            asker.ask("GET", "/status")
        server.close("again")

    def test_a_request_to_a_closed_run_says_so(self) -> None:
        """One that comes in the moment between the end of the run and of the listening."""
        with listening() as (server, asker):
            server.desk.close("the pipeline is closed")
            said = asker.ask("POST", "/checkpoint")
            assert (said.status, said.value) == (503, {"error": "the pipeline is closed"})

    def test_a_forked_child_does_not_keep_the_port(self) -> None:
        ends, theirs = os.pipe()
        begun, begins = os.pipe()
        with listening() as (_, asker):
            child = os.fork()
            if child == 0:
                os.close(theirs)
                os.write(begins, b"x")
                os.read(ends, 1)  # until the parent is done
                os._exit(0)
            os.read(begun, 1)  # until the child runs: before that it cannot have let anything go
        try:
            with pytest.raises(ConnectionRefusedError):
                asker.ask("GET", "/status")
        finally:
            for end in (theirs, ends, begun, begins):
                os.close(end)
            os.waitpid(child, 0)


class TestWhere:
    def test_a_port_that_is_taken(self) -> None:
        with listening() as (_, asker):
            options = Control(port=asker.where[1])
            with pytest.raises(ServingError, match=rf"control: 127.0.0.1:{options.port} cannot be listened at"):
                ControlServer(options, Desk(), logger()).begin()

    def test_each_rank_has_the_port_of_its_number(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with listening(Control(port=port - 3), rank=3) as (server, asker):
            assert server.address == f"http://127.0.0.1:{port}"
            assert asker.ask("GET", "/status").value["rank"] == 3

    def test_the_other_loopback(self) -> None:
        if not socket.has_ipv6:
            pytest.skip("no IPv6 here")
        try:
            with socket.create_server(("::1", 0), family=socket.AF_INET6):
                pass
        except OSError:
            pytest.skip("no IPv6 here")
        with listening(Control(host="::1")) as (server, asker):
            assert server.address == f"http://[::1]:{asker.where[1]}"
            assert asker.ask("GET", "/status").status == 200

    def test_the_runs_folder_says_where_while_it_listens(self, tmp_path: Path) -> None:
        with listening(Control(token="t"), rank=2) as (server, _):
            server.announce(Layout(str(tmp_path)), 4)
            (place,) = find_places(str(tmp_path), 4)
            assert (place.address, place.rank, place.process) == (server.address, 2, os.getpid())
            assert (place.loopback, place.token) == (True, True)
            assert find_places(str(tmp_path), 3) == []
            (tmp_path / "control-0009.json").write_text("{")
            assert find_places(str(tmp_path), 4) == [place]
        assert find_places(str(tmp_path), 4) == []
        assert find_places(str(tmp_path / "no such"), 4) == []
