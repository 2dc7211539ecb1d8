"""Images as PNG, by ``pillow`` (extra ``tools``): 8 bits of each channel, without loss."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np

from pipeline.errors import Damaged
from pipeline.tools.formats.extras import needed

_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "I", "F")  # an array of which is what the image shows


def image_module(form: str) -> Any:
    """Return ``PIL.Image``.

    Raises:
        ConfigError: it is not installed.
    """
    return needed("PIL.Image", form, "tools")


def png_of(pillow: Any, image: np.ndarray) -> bytes:
    """Return an image [height, width, 3] uint8 as a file."""
    written = io.BytesIO()
    pillow.fromarray(np.ascontiguousarray(image)).save(written, "PNG", compress_level=1)
    return written.getvalue()


def pixels_of(pillow: Any, content: bytes, where: str) -> np.ndarray:
    """Return what a file shows: [height, width, channels], or [height, width] of one channel.

    Raises:
        Damaged: it is no image.
    """
    try:
        with pillow.open(io.BytesIO(content)) as image:
            if image.mode not in _MODES:
                raise ValueError(f"its mode is {image.mode}, and {', '.join(_MODES)} are read")
            pixels: np.ndarray = np.array(image)
    except (
        pillow.DecompressionBombError,
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
    ) as error:
        raise Damaged(f"{where}: an image cannot be read ({error})") from None
    return pixels
