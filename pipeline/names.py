"""Names of things that are imported elsewhere."""

from __future__ import annotations

import re

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_import_path(value: str) -> bool:
    """Whether it names something in a module, as ``"module:function"``."""
    return _IMPORT_PATH.fullmatch(value) is not None
