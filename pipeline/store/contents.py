"""An item's content where the journal keeps it, because its source cannot give it again."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.errors import SourceError
from pipeline.store.plain import PlainValueError, from_plain, to_plain

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def encode_content(content: Any, where: str) -> bytes:
    """Return what ``decode_content`` makes the same value of.

    Raises:
        SourceError: it holds something that cannot be kept; the message begins with ``where`` and says what.
    """
    try:
        return _encode(to_plain(content))
    except PlainValueError as error:
        raise SourceError(f"{where}: the content is kept in the journal, and {error}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise SourceError(f"{where}: the content is kept in the journal, and cannot be encoded: {error}") from None


def decode_content(raw: bytes) -> Any:
    """Return the content that was kept, a fresh copy."""
    return from_plain(_decode(raw))
