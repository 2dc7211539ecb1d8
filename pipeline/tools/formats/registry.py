"""The formats by their names, and which of them something is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from pipeline.errors import ConfigError, StoreError
from pipeline.store.files import open_plain
from pipeline.tools.formats.folder import FILE, OutFolder
from pipeline.tools.interchange.streams import Stream

_PLACES = {
    "jsonl": "jsonl",
    "safetensors": "safetensors_files",
    "parquet": "parquet",
    "datasets": "datasets_folder",
    "minari": "minari",
    "lerobot": "lerobot",
    "rlinf": "rlinf",
    "torchrl": "torchrl",
    "xtuner": "xtuner",
}
TO = ("jsonl", "safetensors", "parquet", "datasets", "minari", "lerobot")
"""Formats that are written."""
FROM = ("jsonl", "safetensors", "parquet", "datasets", "minari", "lerobot", "rlinf", "torchrl", "xtuner")
"""Formats that are read."""


class Format(Protocol):
    """A module of this package; one that reads alone has no ``write``, and no ``CONTENTS``."""

    NAME: str
    CONTENTS: tuple[str, ...]
    """What it can hold."""
    recognises: Callable[[str], bool]
    write: Callable[[Stream, OutFolder], None]
    read: Callable[[str], Stream]
    told: Callable[[Stream], list[str]]
    """What it cannot hold in its own places; a module that holds all of it has none."""


def format_of(name: str, option: str, allowed: tuple[str, ...]) -> Format:
    """Return a format's module.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in allowed:
        raise ConfigError.of(option, name, f"there are {', '.join(allowed)}")
    return cast(Format, importlib.import_module(f"pipeline.tools.formats.{_PLACES[name]}"))


def guessed(path: str) -> str:
    """Return the name of the format in which something lies.

    Raises:
        ConfigError: it is none, or could be several.
    """
    described = os.path.join(path, FILE)
    if os.path.isfile(described):
        return _said(described)
    found = [name for name in FROM if format_of(name, "from", FROM).recognises(path)]
    if len(found) != 1:
        what = f"could be {' or '.join(found)}" if found else "is in no format that is known by its looks"
        raise ConfigError(f"{path}: {what}; say which with --from", option="from")
    return found[0]


def _said(path: str) -> str:
    try:
        with open_plain(path) as file:
            fields: Any = msgspec.json.decode(file.read())
        return str(fields["to"])
    except (StoreError, msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: does not say what the export is ({error}); say it with --from", option="from"
        ) from None
