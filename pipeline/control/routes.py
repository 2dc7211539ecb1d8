"""What each request is answered by, and who may ask.

Whoever listens on the loopback is reached by pages in a browser of this machine as well, which send what other people
wrote: a page's requests carry its origin, and, if its name was made to mean this machine (DNS rebinding), a foreign
host. Both are refused.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from pipeline.config import Control
from pipeline.control.desk import Desk, Then, Ticket
from pipeline.control.http import Refused, Request

LONGEST_WAIT_S = 60.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Asked(NamedTuple):
    """What a request comes to: a ticket to tell of, at the latest after so many seconds; or, without one, how the run
    stands."""

    ticket: Ticket | None = None
    made: bool = False
    wait_s: float = 0.0


class Wish(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to save."""

    then: Then = "continue"


def check_who(request: Request, options: Control, port: int) -> None:
    """Refuse who may not ask.

    Raises:
        Refused: with 401 or 403.
    """
    if options.token is not None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {options.token}".encode("latin-1")):
            raise Refused(401, "this needs the header Authorization: Bearer TOKEN", WWW_Authenticate="Bearer")
    host = request.headers.get("host", "").lower()
    if options.on_loopback and host not in _names(options.host, port):
        raise Refused(403, f"the host {host!r} is not this one")
    origin = request.headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}":
        raise Refused(403, f"pages of {origin!r} may not ask")


def _names(own: str, port: int) -> set[str]:
    names = {*_LOOPBACK, f"[{own}]" if ":" in own else own.lower()}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def route(request: Request, desk: Desk) -> Asked:
    """Return what a request comes to.

    Raises:
        Refused: there is no such thing to ask.
    """
    first, _, name = request.path[1:].partition("/")
    if first == "status" and not name:
        _only("GET", request)
        return Asked()
    if first == "checkpoint" and not name:
        _only("POST", request)
        ticket = desk.post(_then(request.body))
        if ticket is None:
            raise Refused(503, desk.closed)
        return Asked(ticket, made=True)
    if first == "checkpoint" and "/" not in name:
        _only("GET", request)
        ticket = desk.find(name)
        if ticket is None:
            raise Refused(404, f"this process knows no request {name!r}: it was made elsewhere, or long ago")
        return Asked(ticket, wait_s=_wait(parse_qs(request.query)))
    raise Refused(404, "there are POST /checkpoint, GET /checkpoint/ID and GET /status")


def _only(method: str, request: Request) -> None:
    if request.method != method:
        raise Refused(405, f"{request.path} takes {method}, not {request.method}", Allow=method)


def _then(body: bytes) -> Then:
    try:
        return msgspec.json.decode(body, type=Wish).then if body.strip() else "continue"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Refused(400, 'the body is to be empty, {"then": "continue"} or {"then": "stop"}') from None


def _wait(query: Mapping[str, list[Any]]) -> float:
    try:
        seconds = float(query.get("wait", ["0"])[0])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise Refused(400, "wait= is a number of seconds")
    return min(seconds, LONGEST_WAIT_S)
