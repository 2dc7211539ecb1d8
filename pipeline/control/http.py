"""As much of HTTP/1.1 as a handful of small requests need: one request on a connection, JSON in and out.

What a stranger may send is bounded: the head, the body, and, by who calls :func:`read_request`, the time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import anyio
import anyio.abc
import msgspec

MOST_HEAD = 16 << 10
MOST_BODY = 4 << 10
_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]{0,2000}) HTTP/1\.[01]")
_HEADER = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_ONCE = ("host", "content-length", "authorization", "origin")


class Request(NamedTuple):
    """A request. Names of headers are in small letters."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


async def read_request(stream: anyio.abc.ByteReceiveStream) -> Request | None:
    """Read a request; None: the other side went away before it had sent one.

    Raises:
        Refused: it is none, or longer than it may be.
    """
    data = bytearray()
    while (end := data.find(b"\r\n\r\n", 0, MOST_HEAD)) < 0:
        if len(data) >= MOST_HEAD:
            raise Refused(431, f"the head of a request has at most {MOST_HEAD} bytes")
        try:
            data += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            return None
    method, target, headers = _head(bytes(data[:end]))
    length = _length(headers)
    body = data[end + 4 :]
    while len(body) < length:
        try:
            body += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            return None
    path, _, query = target.partition("?")
    return Request(method, path, query, headers, bytes(body[:length]))


def _head(raw: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = raw.split(b"\r\n")
    match = _LINE.fullmatch(first)
    if match is None:
        raise Refused(400, "the first line is to be METHOD /PATH HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise Refused(400, "a header is to be NAME: VALUE")
        name = header[1].decode().lower()
        if name in headers and name in _ONCE:
            raise Refused(400, f"the header {name} comes twice")
        headers[name] = header[2].decode("latin-1")
    return match[1].decode(), match[2].decode(), headers


def _length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise Refused(411, "a body needs Content-Length, and no Transfer-Encoding")
    given = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,20}", given):
        raise Refused(400, "Content-Length is no number")
    if int(given) > MOST_BODY:
        raise Refused(413, f"a body has at most {MOST_BODY} bytes")
    return int(given)


def answer(status: int, value: Any, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of an answer, after which the connection ends."""
    body = msgspec.json.encode(value) + b"\n"
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
