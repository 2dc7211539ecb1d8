"""Finds in a worker what was named in the process that started it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from pipeline.engines.naming import MAIN, Named
from pipeline.store.plain import from_plain

MAIN_HERE = "__forebay_main__"
"""The name under which the script of that process is run here, so that what stands under its guard is not."""

script: dict[str, str] | None = None
loading = False
"""Whether something is being imported, whose code outside of functions runs now."""


class NotLoaded(Exception):
    """A function cannot be had; the cause says why."""


def load(named: Named) -> Callable[..., Any]:
    """Import a function by its name.

    Raises:
        NotLoaded: that raised, or there is no such function.
    """
    global loading
    loading = True
    try:
        found: Any = _main() if named.module == MAIN else importlib.import_module(named.module)
        for part in named.qualname.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError(f"{named} is a {type(found).__name__}, and nothing that can be called")
    except BaseException as error:  # a script without a guard may well leave by sys.exit()
        raise NotLoaded(f"{named} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        loading = False
    args, kwargs = from_plain(named.args), from_plain(named.kwargs)
    function: Callable[..., Any] = found
    if not args and not kwargs:
        return function
    import functools

    return functools.partial(function, *args, **kwargs)


def _main() -> ModuleType:
    if script is None:
        raise ImportError("the process that started this worker has no script")
    path, package = script["path"], script["package"]
    name = f"{package}.{MAIN_HERE}" if package else MAIN_HERE
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
