"""``forebay checkpoint RUN``: ask a run that listens to requests (``control=``) to save, or to save and stop."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipeline.checkpoint.status import Status, status_of
from pipeline.cli.terminal import Terminal, make_parser, run_command
from pipeline.errors import ForebayError

DESCRIPTION = """\
Ask a run that listens to requests (the option control=) to save, at the trainer's next step, and say how to ask what
has become of it. Any rank may be asked: all of them save.
"""
EXAMPLE = "forebay checkpoint runs/a --stop --wait"
EXITS = """\
0  it was asked; with --wait: it has saved
1  it cannot be asked, or could not save
2  the command line is wrong
130  Ctrl-C: nobody waits any more; what was asked stays asked
"""
TOKEN = "FOREBAY_CONTROL_TOKEN"
_ANSWERS_S = 20.0  # more than the run may take to answer
_ASKED_FOR_S = 30


class _NotAsked(ForebayError):
    """The run cannot be asked, or could not save."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, print the answer, and return the exit code."""
    own = parser()
    given = own.parse_args(arguments)
    try:
        token = _token(given.token_file)
    except OSError as error:
        own.error(f"--token-file: {error}")
    return run_command("checkpoint", lambda: _run(given, token))


def _run(given: Any, token: str | None) -> int:
    terminal = Terminal()
    address = given.run if given.run.startswith("http://") else _address(given.run, given.rank)
    try:
        asked = _ask(address, token, "POST", "/checkpoint", {"then": "stop" if given.stop else "continue"})
        then = "stop" if asked["then"] == "stop" else "go on"
        terminal.line(f"{address}{asked['ask']}: asked, to {then} afterwards")
        terminal.flush()
        while given.wait and asked["state"] == "pending":
            asked = _ask(address, token, "GET", f"/checkpoint/{asked['id']}?wait={_ASKED_FOR_S}")
        if asked["state"] == "failed":
            raise _NotAsked(f"the save has failed: {asked['reason']}")
        if asked["state"] == "done":
            terminal.line(f"saved: generation {asked['generation']}, step {asked['step']}")
    except KeyError as error:
        raise _NotAsked(f"{address}: is no run; its answer has no {error}") from None
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = make_parser("checkpoint", DESCRIPTION, EXAMPLE, EXITS)
    made.add_argument("run", metavar="RUN", help="the run's folder, which says where it listens; or http://HOST:PORT")
    made.add_argument("--stop", action="store_true", help="let it stop when it has saved")
    made.add_argument("--wait", action="store_true", help="return when it has saved, and print the generation")
    made.add_argument("--rank", type=int, metavar="N", help="ask this one of several ranks; left out, the first")
    made.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"a file with the token that the run wants; left out, the variable {TOKEN} is it",
    )
    return made


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(TOKEN)
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _address(run: str, rank: int | None) -> str:
    status = status_of(run)
    places = [place for place in status.control if rank is None or place.rank == rank]
    if not places:
        raise _NotAsked(_why_nowhere(status, run, rank))
    here = socket.gethostname()
    for place in places:
        if not place.loopback or place.host == here:
            return place.address
    raise _NotAsked(f"{run}: listens on the loopback of {places[0].host}, and this is {here}: run the command there")


def _why_nowhere(status: Status, run: str, rank: int | None) -> str:
    if status.control:
        ranks = ", ".join(str(place.rank) for place in status.control)
        return f"{run}: rank {rank} does not listen; there are: {ranks}"
    how = "build it with control='127.0.0.1:0' for that, or make the file `stop` in its folder to stop it"
    return f"{run}: {status.state}; nobody listens to requests there: {how}"


def _ask(
    address: str, token: str | None, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    place = urlsplit(address)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if place.hostname is None or place.port is None:
        raise _NotAsked(f"{address}: an address is http://HOST:PORT")
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=_ANSWERS_S + _ASKED_FOR_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        said = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        hint = "" if method == "POST" else "; `forebay status` says whether it has saved"
        raise _NotAsked(f"{address}: does not answer ({str(error) or type(error).__name__}){hint}") from None
    finally:
        connection.close()
    if not isinstance(said, dict) or answer.status >= 400:
        raise _NotAsked(f"{address}: {said.get('error', said) if isinstance(said, dict) else said}")
    return said
