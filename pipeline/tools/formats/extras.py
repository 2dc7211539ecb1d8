"""Packages that some formats need, and that nothing else does."""

from __future__ import annotations

import importlib
from typing import Any

from pipeline.errors import ConfigError


def needed(module: str, form: str, extra: str) -> Any:
    """Return a module of a package that need not be installed.

    Raises:
        ConfigError: it is not; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{form}: needs the package {package}, which cannot be imported ({error}); pip install 'forebay[{extra}]'",
            option="format",
        ) from None
