"""Functions by name: what a worker process is to run is named by where it can be imported from, and never pickled."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.errors import ConfigError
from pipeline.names import is_import_path
from pipeline.store.plain import PlainValueError, to_plain

MAIN = "__main__"


class Named(msgspec.Struct, frozen=True, array_like=True):
    """A function by module and qualified name, with the arguments that a ``functools.partial`` gave it."""

    module: str
    qualname: str
    args: Any = []
    kwargs: Any = {}

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


def name_of(given: Callable[..., Any] | str, what: str, option: str | None = None) -> Named:
    """Return the name under which a worker finds a function.

    Args:
        given: the function, a ``functools.partial`` of one with plain values, or ``"module:qualname"``.
        what: what it is, for an error.
        option: the option that it was given as.

    Raises:
        ConfigError: it cannot be imported by name.
    """
    if isinstance(given, str):
        if not is_import_path(given):
            raise ConfigError(f"{what}: {given!r} is no name; 'module:function' is needed", option=option)
        return Named(*given.split(":"))
    if isinstance(given, functools.partial):
        inner = name_of(given.func, what, option)
        try:
            args, kwargs = to_plain(list(given.args)), to_plain(dict(given.keywords))
        except PlainValueError as error:
            raise ConfigError(f"{what}: an argument of the partial: {error}", option=option) from None
        return Named(inner.module, inner.qualname, args, kwargs)
    module, qualname = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    why = _why_not(given, module, qualname)
    if why is not None:
        raise ConfigError(
            f"{what}: a worker process imports what it runs, and {given!r} {why}. Write it as a function at the top "
            "level of a module (functools.partial may give it plain arguments)",
            option=option,
        )
    assert module is not None
    assert qualname is not None
    return Named(module, qualname)


def _why_not(given: Any, module: str | None, qualname: str | None) -> str | None:
    if not module or not qualname:
        return "has no name of its own"
    if "<" in qualname:
        return "is defined inside another function" if "<locals>" in qualname else "is a lambda"
    if module == MAIN and main_script() is None:
        return "is defined in a notebook or an interactive session, which cannot be imported"
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return None if found is given or found == given else f"is not what {module}:{qualname} is"


class Script(msgspec.Struct, frozen=True):
    """The script of this process, for workers to find what it defines."""

    path: str
    package: str = ""


def main_script() -> Script | None:
    """Return the file that is run as ``__main__``, or None if there is none."""
    main = sys.modules.get(MAIN)
    path = getattr(main, "__file__", None)
    if not path or not os.path.isfile(path):
        return None
    return Script(os.path.abspath(path), getattr(main, "__package__", None) or "")
