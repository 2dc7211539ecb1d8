"""Where a run is asked over HTTP: a small file in its folder for each rank, for people and for the command line.

It is no part of what is saved. One that a killed process left names an incarnation that is over.
"""

from __future__ import annotations

import contextlib
import os
import re

import msgspec

from pipeline.store.files import open_plain
from pipeline.store.layout import Layout

_NAME = re.compile(r"control-(\d{1,9})\.json")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What such a file says."""

    address: str
    """``http://HOST:PORT``."""
    rank: int
    host: str
    """The name of the machine."""
    process: int
    incarnation: int
    loopback: bool
    """Whether only processes of that machine reach it."""
    token: bool
    """Whether a request needs one."""


def path_of(layout: Layout, rank: int) -> str:
    """Return the path of a rank's file."""
    return os.path.join(layout.directory, f"control-{rank:04d}.json")


def write_place(layout: Layout, place: Place) -> None:
    """Write a rank's file, whole or not at all."""
    path = path_of(layout, place.rank)
    with open(path + ".part", "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(place)) + b"\n")
    os.replace(path + ".part", path)


def remove_place(layout: Layout, place: Place) -> None:
    """Remove a rank's file, if it is still this one."""
    with contextlib.suppress(OSError):
        path = path_of(layout, place.rank)
        if _read(path) == place:
            os.unlink(path)


def find_places(directory: str, incarnation: int) -> list[Place]:
    """Return where the ranks of an incarnation listen, by rank."""
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except OSError:
        return []
    found = [_read(os.path.join(directory, name)) for name in names]
    own = [place for place in found if place is not None and place.incarnation == incarnation]
    return sorted(own, key=lambda place: place.rank)


def _read(path: str) -> Place | None:
    try:
        with open_plain(path) as file:
            return msgspec.json.decode(file.read(1 << 16), type=Place)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
